import pytest
import torch

from orion_hf.methods.zero_shot import zero_shot
from orion_hf.methods.zlap import zlap


@pytest.mark.golden("zlap_")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_golden(case, dtype):
    features, prototypes = case["features"].to(dtype), case["prototypes"].to(dtype)
    output = zlap(features, prototypes, unlabeled_features=case.tensors.get("unlabeled_features"), **case.options)
    assert output.scores.dtype == dtype
    case.close("z", output.scores, 5e-6)
    assert torch.equal(output.predictions, case["predictions"])
    if "linv" in case.tensors:
        case.close("linv", output.node_scores, 5e-6)
    y_hat = zero_shot(features, prototypes)
    case.close("y_hat", y_hat.scores, 1e-4)
    assert torch.equal(y_hat.predictions, case["predictions_zero_shot"])

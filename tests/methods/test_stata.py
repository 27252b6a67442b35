import pytest
import torch

from orion_hf.methods.stata import stata


@pytest.mark.golden("stata_")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_golden(case, dtype):
    features, prototypes = case["features"].to(dtype), case["prototypes"].to(dtype)
    options = case.options | {"reference_chunking": True}
    output = stata(features, prototypes, **options)
    assert output.scores.dtype == dtype
    case.close("y_hat", output.zero_shot, 1e-4)
    case.close("z", output.scores, 5e-4)
    assert torch.equal(output.predictions, case["predictions"])
    assert torch.equal(output.zero_shot.argmax(1), case["predictions_zero_shot"])
    case.close("mu_last", output.means, 1e-4)
    case.close("cov_last", output.covariances, 1e-4)
    case.close("beta_last", output.weights, 1e-4)

    start = stata(features, prototypes, **options | {"max_iter": 0})
    case.close("z_first", start.scores, 5e-4)
    case.close("cov_init", start.covariances[0], 1e-4)
    first = stata(features, prototypes, **options | {"max_iter": 1})
    case.close("mu_first", first.means, 1e-4)
    case.close("cov_first", first.covariances, 1e-4)
    case.close("beta_first", first.weights, 1e-4)

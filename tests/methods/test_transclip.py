import pytest
import torch

from orion_hf.methods.transclip import transclip, transclip_few_shot


@pytest.mark.golden("transclip_")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_golden(case, dtype):
    options = dict(case.options)
    gammas = options.pop("gammas", None)
    features, prototypes = case["features"].to(dtype), case["prototypes"].to(dtype)
    if options["variant"] == "few-shot":
        del options["variant"]
        options.pop("n_most_confident", None)
        shots = [case[f"{part}_{kind}"] for part in ("support", "val") for kind in ("features", "labels")]
        options |= {"gammas": gammas, "reference_indexing": True}
        output = transclip_few_shot(features, prototypes, *shots, **options)
        case.close("z_per_gamma", output.scores_per_gamma, 5e-4)
        scores = output.scores_per_gamma[-1]
        hits = (output.predictions == case["labels"]).double().mean().item()
        assert 100 * hits == pytest.approx(case.meta["accuracy_at_best_validation"])
        start = transclip_few_shot(features, prototypes, *shots, **options | {"max_iter": 0})
    else:
        options["reference_chunking"] = True
        output = transclip(features, prototypes, **options)
        scores = output.scores
        start = transclip(features, prototypes, **options | {"max_iter": 0})
    assert scores.dtype == dtype
    case.close("y_hat", output.zero_shot, 1e-4)
    case.close("z", scores, 5e-4)
    assert torch.equal(scores.argmax(1), case["predictions"])
    assert torch.equal(output.zero_shot.argmax(1), case["predictions_zero_shot"])
    if "mu_init" in case.tensors:
        case.close("mu_init", start.means, 1e-4)
    if "mu_last" in case.tensors:
        case.close("mu_last", output.means, 1e-4)
        case.close("cov_last", output.covariance, 1e-4)
        first = transclip(features, prototypes, **options | {"max_iter": 1})
        case.close("z_first", start.scores, 5e-4)
        case.close("mu_first", first.means, 1e-4)
        case.close("cov_first", first.covariance, 1e-4)

import pytest

from orion_hf.methods.mta import mta, view_affinity

OPTIONS = ("lambda_q", "lambda_y", "logit_scale", "max_iter", "tol", "neighbour_fraction", "temperature")


@pytest.mark.golden("mta_")
def test_golden(case):
    options = {name: case.options[name] for name in OPTIONS if name in case.options}
    views, prototypes = case["in.image_features"], case["in.text_features"]
    output = mta(views[None], prototypes, **options)
    case.close("out.logits", output.scores[0], 3e-4)
    case.close("out.inlierness", output.inlierness[0], 2e-5)
    case.close("out.mode", output.modes[0], 2e-5)
    case.close("out.bandwidth", output.bandwidths[0], 2e-5)
    tempered = case["out.view_logits"] / options.get("temperature", 1.0)
    case.close("out.affinity", view_affinity(tempered[None])[0], 2e-5)
    assert output.predictions[0] == case["out.pred"]

    exact = mta(views[None].double(), prototypes.double(), **options)
    case.close("out64.logits", exact.scores[0], 1e-9)
    case.close("out64.inlierness", exact.inlierness[0], 1e-9)
    case.close("out64.mode", exact.modes[0], 1e-9)
    case.close("out64.bandwidth", exact.bandwidths[0], 1e-9)

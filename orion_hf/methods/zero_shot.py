"""Zero-shot classification: the nearest text prototype, ``y_ik = softmax_k(s <x_i, t_k>)``."""

from torch import Tensor

from orion_hf.methods import MethodOutput
from orion_hf.methods._inputs import check_inputs

PAPER = "Radford et al., Learning Transferable Visual Models From Natural Language Supervision, ICML 2021"
INPUTS = "batch"


def zero_shot(features: Tensor, prototypes: Tensor, *, logit_scale: float = 100.0) -> MethodOutput:
    """CLIP's classifier.

    Args:
        features: Image features X, ``(N, d)``, unit rows.
        prototypes: Text prototypes T, ``(K, d)``, unit rows.
        logit_scale: s, the exponential of CLIP's learned log-scale.

    Returns:
        ``scores``: probabilities ``(N, K)``.

    Example:
        >>> import torch
        >>> zero_shot(torch.eye(3)[:2], torch.eye(3)).predictions
        tensor([0, 1])
    """
    features, prototypes = check_inputs(features=features, prototypes=prototypes)
    return MethodOutput(probabilities(features, prototypes, logit_scale))


def probabilities(features: Tensor, prototypes: Tensor, logit_scale: float) -> Tensor:
    """``softmax_k(s X T^T)``, ``(N, K)``, of rows already checked."""
    return (logit_scale * features @ prototypes.T).softmax(dim=1)

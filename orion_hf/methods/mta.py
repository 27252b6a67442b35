"""MTA: the mode of one image's augmented views, found together with a weight for each view.

For every image on its own, with views f_p, probabilities q_p = softmax(s T f_p), affinity
W_pr = <q_p, q_r> and kernel G_p(m) = exp(-|f_p - m|^2 / (2 h_p^2)), maximise over the mode m and
the inlierness y (on the simplex)

    sum_p y_p G_p(m) + lambda_q / 2 y^T W y + lambda_y H(y)

by a few fixed-point steps, then classify the mode. The steps do not converge: their number is part of the
method.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.functional import normalize

from orion_hf.methods import MethodOutput
from orion_hf.methods._inputs import check_inputs, check_range

PAPER = "Zanella and Ben Ayed, On the test-time zero-shot generalization of vision-language models, CVPR 2024"
INPUTS = "views"

BLOCK_ELEMENTS = 2**22  # view logits held at once, 16 MB in float32


@dataclass(frozen=True)
class MTAOutput(MethodOutput):
    """Logits of the modes as ``scores``, and how they were found.

    Attributes:
        modes: ``(N, d)``, unit rows, used in place of the image features.
        inlierness: ``(N, V)``, weight of each view, rows on the simplex.
        bandwidths: ``(N, V)``, h_p.
    """

    modes: Tensor
    inlierness: Tensor
    bandwidths: Tensor


def mta(
    features: Tensor,
    prototypes: Tensor,
    *,
    lambda_q: float = 4.0,
    lambda_y: float = 0.2,
    max_iter: int = 5,
    tol: float = 1e-6,
    neighbour_fraction: float = 0.3,
    temperature: float = 1.0,
    logit_scale: float = 100.0,
) -> MTAOutput:
    """Classify each image by the mode of its views.

    Args:
        features: Features of the views, ``(N, V, d)``, unit rows; view 0 is the image without augmentation.
        prototypes: Text prototypes, ``(K, d)``, unit rows.
        lambda_q: Weight of the agreement between the predictions of views.
        lambda_y: Weight of the entropy of the inlierness.
        max_iter: Outer rounds, and the most steps of each inner loop.
        tol: An image's inner loop ends when its step is shorter than this.
        neighbour_fraction: Share of the other views that sets a view's bandwidth.
        temperature: Divides the logits in the affinity.
        logit_scale: s.

    Example:
        >>> mta(torch.randn(10, 64, 512), prototypes).scores.shape      # doctest: +SKIP
        torch.Size([10, K])
    """
    features, prototypes = check_inputs(features=features, prototypes=prototypes)
    if features.dim() != 3:
        raise ValueError(f"features must be (N, V, d), V views of each image; got shape {tuple(features.shape)}.")
    check_range(0, lambda_q=lambda_q, max_iter=max_iter, tol=tol)
    check_range(0, above=True, lambda_y=lambda_y, temperature=temperature)
    check_range(0, 1, above=True, neighbour_fraction=neighbour_fraction)
    views = features.shape[1]
    neighbours = int(neighbour_fraction * (views - 1))
    if neighbours < 1:
        raise ValueError(f"{views} views are too few: a bandwidth needs {neighbour_fraction} * (views - 1) >= 1.")

    def solve(block: Tensor) -> MTAOutput:
        affinity = view_affinity(logit_scale * block @ prototypes.T / temperature)
        bandwidths = view_bandwidths(block, neighbours)
        modes, inlierness = _find_modes(block, affinity, bandwidths, lambda_q, lambda_y, max_iter, tol)
        return MTAOutput(logit_scale * modes @ prototypes.T, modes, inlierness, bandwidths)

    images_at_once = max(1, BLOCK_ELEMENTS // (views * max(len(prototypes), views)))
    blocks = [solve(block) for block in features.split(images_at_once)]
    return MTAOutput(*(torch.cat([getattr(block, field.name) for block in blocks]) for field in fields(MTAOutput)))


def mta_vote(features: Tensor, template_prototypes: Tensor, **options) -> MethodOutput:
    """Majority vote over templates, the paper's ensemble: MTA once per template on the same views.

    The other reading, one run on the mean of the templates' prototypes, is :func:`mta` on that mean.

    Args:
        features: ``(N, V, d)``.
        template_prototypes: ``(T, K, d)``, the prototypes of each template.
        options: Those of :func:`mta`.

    Returns:
        ``scores``: number of votes, ``(N, K)``; the lowest class index wins a tie.
    """
    votes = [mta(features, prototypes, **options).predictions for prototypes in template_prototypes]
    return MethodOutput(torch.nn.functional.one_hot(torch.stack(votes), template_prototypes.shape[1]).sum(dim=0))


def view_affinity(logits: Tensor) -> Tensor:
    """``W_pr = <softmax(l_p), softmax(l_r)>``, ``(N, V, V)``, from view logits ``(N, V, K)``."""
    probabilities = logits.softmax(dim=-1)
    return probabilities @ probabilities.mT


def view_bandwidths(features: Tensor, neighbours: int) -> Tensor:
    """``h_p``, ``(N, V)``: half the mean squared distance to the nearest other views is ``h_p^2``."""
    gram = features @ features.mT
    squares = gram.diagonal(dim1=1, dim2=2)
    distances = squares[:, :, None] + squares[:, None, :] - 2 * gram
    distances.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    nearest = distances.topk(neighbours, dim=2, largest=False).values.clamp_min(0)
    # Copies of one view would leave no width at all.
    return (nearest.mean(dim=2) / 2).clamp_min(torch.finfo(features.dtype).eps).sqrt()


def _find_modes(
    features: Tensor,
    affinity: Tensor,
    bandwidths: Tensor,
    lambda_q: float,
    lambda_y: float,
    max_iter: int,
    tol: float,
) -> tuple[Tensor, Tensor]:
    squares = features.square().sum(dim=2)

    def log_kernel(modes: Tensor) -> Tensor:
        products = (features @ modes[:, :, None]).squeeze(2)
        distances = squares - 2 * products + modes.square().sum(dim=1, keepdim=True)
        return -distances.clamp_min(0) / (2 * bandwidths.square())

    def weigh(inlierness: Tensor, density: Tensor) -> Tensor:
        agreement = (affinity @ inlierness[:, :, None]).squeeze(2)
        return ((density + lambda_q * agreement) / lambda_y).softmax(dim=1)

    def shift(modes: Tensor, inlierness: Tensor) -> Tensor:
        weights = (log_kernel(modes) + inlierness.log()).softmax(dim=1)
        return normalize((weights[:, None, :] @ features).squeeze(1), dim=1)

    modes = features[:, 0]
    inlierness = torch.full_like(squares, 1 / features.shape[1])
    for _ in range(max_iter):
        inlierness = _fixed_point(weigh, inlierness, log_kernel(modes).exp(), max_iter, tol)
        modes = _fixed_point(shift, modes, inlierness, max_iter, tol)
    return modes, inlierness


def _fixed_point(
    step: Callable[[Tensor, Tensor], Tensor], rows: Tensor, constant: Tensor, max_iter: int, tol: float
) -> Tensor:
    """Apply ``rows <- step(rows, constant)``; a row stops after its first step shorter than ``tol``."""
    running = torch.ones_like(rows[:, :1], dtype=torch.bool)
    for _ in range(max_iter):
        moved = step(rows, constant)
        lengths = (moved - rows).norm(dim=1, keepdim=True)
        rows = moved.where(running, rows)
        running = running & (lengths >= tol)
        if not running.any():
            break
    return rows

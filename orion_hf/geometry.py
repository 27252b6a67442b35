"""What the fine-tuning did: geometry of prototypes, and of image features around them.

Of the prototypes alone: displacement, off-diagonal cosines, effective rank, distance to orthonormality. Given
image features as well: scatter, dispersion and the likelihood of the paper's Gaussian view of eq. 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .loss import orthogonality_penalty

_BLOCK = 2048  # rows of a K x K or N x K matrix held at once


# Fields of a GeometryReport, as cards and pages call them.
MEASURE_NAMES = {
    "mean_displacement": "mean displacement of a class",
    "median_displacement": "median displacement",
    "mean_cosine": "mean cosine between two classes",
    "max_cosine": "largest cosine between two classes",
    "effective_rank": "effective rank",
    "distance_to_orthonormality": "distance to orthonormality",
}


@dataclass(frozen=True)
class GeometryReport:
    """Numbers of one set of prototypes; see :func:`prototype_geometry`.

    Attributes:
        num_classes: K.
        mean_displacement: mean over classes of ``||x_i - v_i||`` (paper, EuroSAT: 0.23).
        median_displacement: median of the same (paper, EuroSAT: 0.15).
        mean_cosine: mean cosine between two different classes.
        max_cosine: the largest of them, the most confusable pair.
        effective_rank: ``exp(entropy(s / sum(s)))`` of the singular values s; K when orthonormal.
        distance_to_orthonormality: ``||X X^T - I_K||_F``.
    """

    num_classes: int
    mean_displacement: float
    median_displacement: float
    mean_cosine: float
    max_cosine: float
    effective_rank: float
    distance_to_orthonormality: float


def prototype_geometry(prototypes: Tensor, anchors: Tensor | None = None) -> GeometryReport:
    """Geometry of the prototypes X, displacement measured from V.

    Args:
        prototypes: X, ``(K, d)``, K at least 2. Rows are normalised here.
        anchors: V, ``(K, d)``; None for V itself, whose displacement is 0.

    Example:
        >>> prototype_geometry(torch.eye(4)).effective_rank
        4.0
    """
    if prototypes.ndim != 2 or len(prototypes) < 2:
        raise ValueError(f"prototypes must be (K, d) with K at least 2, got {tuple(prototypes.shape)}")
    x = F.normalize(prototypes.detach().double(), dim=-1)
    moved = displacement(prototypes, prototypes if anchors is None else anchors)
    mean_cosine, max_cosine = off_diagonal_cosines(x)
    return GeometryReport(
        num_classes=len(x),
        mean_displacement=moved.mean().item(),
        median_displacement=moved.quantile(0.5).item(),
        mean_cosine=mean_cosine,
        max_cosine=max_cosine,
        effective_rank=effective_rank(x),
        distance_to_orthonormality=distance_to_orthonormality(x),
    )


def displacement(prototypes: Tensor, anchors: Tensor) -> Tensor:
    """``||x_i - v_i||`` of unit rows for each class, ``(K,)``, between 0 and 2.

    Example:
        >>> displacement(torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 0.0]]))
        tensor([0.])
    """
    if prototypes.shape != anchors.shape:
        raise ValueError(f"prototypes {tuple(prototypes.shape)} and anchors {tuple(anchors.shape)} differ in shape")
    return (F.normalize(prototypes.detach(), dim=-1) - F.normalize(anchors, dim=-1)).norm(dim=-1)


def off_diagonal_cosines(prototypes: Tensor) -> tuple[float, float]:
    """Mean and largest cosine between two different rows of X, ``(K, d)`` with unit rows; 0 if K is 1.

    The mean needs no Gram matrix (``sum_ij x_i.x_j = ||sum_i x_i||^2``); the maximum goes over row blocks.

    Example:
        >>> off_diagonal_cosines(torch.eye(3))
        (0.0, 0.0)
    """
    x = prototypes.detach()
    if len(x) < 2:
        return 0.0, 0.0
    pairs = len(x) * (len(x) - 1)
    mean = (x.sum(dim=0).square().sum() - x.square().sum()) / pairs
    largest = -torch.inf
    for start in range(0, len(x), _BLOCK):
        cosines = x[start : start + _BLOCK] @ x.T
        cosines.diagonal(start).fill_(-torch.inf)
        largest = max(largest, cosines.max().item())
    return mean.item(), largest


def effective_rank(prototypes: Tensor) -> float:
    """``exp(H(p))`` with ``p = s / sum(s)``, s the singular values of X ``(K, d)`` (Roy and Vetterli, 2007).

    Example:
        >>> effective_rank(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
        1.0
    """
    singular_values = torch.linalg.svdvals(prototypes.detach().double())
    p = singular_values / singular_values.sum()
    return torch.special.entr(p).sum().exp().item()


def distance_to_orthonormality(prototypes: Tensor) -> float:
    """``||X X^T - I_K||_F`` of X ``(K, d)``; never below ``sqrt(K - d)`` when K > d.

    Example:
        >>> distance_to_orthonormality(torch.eye(3))
        0.0
    """
    return orthogonality_penalty(prototypes.detach()).sqrt().item()


class Scatter(NamedTuple):
    """Sums of squared distances of features; Huygens' theorem: ``within = total - between``."""

    within: float
    between: float
    total: float


def feature_scatter(features: Tensor, assignments: Tensor) -> Scatter:
    """Scatter of features f_i around class means, class means around the grand mean, and in all.

    ``within = sum_ik u_ik ||f_i - m_k||^2``, ``between = sum_k n_k ||m_k - m||^2``,
    ``total = sum_ik u_ik ||f_i - m||^2`` with ``n_k = sum_i u_ik`` and ``m_k = sum_i u_ik f_i / n_k``.
    Each is computed from its own definition.

    Args:
        features: f, ``(N, d)``.
        assignments: labels ``(N,)`` of integers, or soft u ``(N, K)``, non-negative (the paper declares U as
            K x N but indexes it as here).

    Example:
        >>> feature_scatter(torch.tensor([[0.0], [2.0], [4.0]]), torch.tensor([0, 0, 1]))
        Scatter(within=2.0, between=6.0, total=8.0)
    """
    f, u = features.detach().double(), _check_assignments(features, assignments)
    means, counts = _class_means(f, u)
    point_weights = torch.ones(len(f), dtype=f.dtype, device=f.device) if u.ndim == 1 else u.sum(dim=1)
    center = (point_weights @ f) / point_weights.sum()
    return Scatter(
        within=_assigned_square_distance(f, means, u),
        between=(counts * (means - center).square().sum(dim=1)).sum().item(),
        total=(point_weights * (f - center).square().sum(dim=1)).sum().item(),
    )


def negative_log_likelihood(features: Tensor, prototypes: Tensor, assignments: Tensor) -> float:
    """The paper's likelihood link (neglog): ``sum_ik u_ik ||f_i - x_k||^2``.

    It is the negative log-likelihood, up to a constant, of features drawn around their class prototype with
    an isotropic Gaussian of variance 1/2. Over free x_k its minimum is the within-class scatter, reached at
    the class means: ``nll(X) = within + sum_k n_k ||m_k - x_k||^2``. The paper takes ``||x_k|| = 1``, which
    class means of unit features are not; here both are used as given.

    Args:
        features: f, ``(N, d)``.
        prototypes: X, ``(K, d)``.
        assignments: labels ``(N,)`` or soft u ``(N, K)``.

    Example:
        >>> negative_log_likelihood(torch.tensor([[1.0, 0.0]]), torch.eye(2), torch.tensor([1]))
        2.0
    """
    u = _check_assignments(features, assignments)
    num_classes = u.shape[1] if u.ndim == 2 else int(u.max()) + 1
    if prototypes.ndim != 2 or len(prototypes) < num_classes or (u.ndim == 2 and len(prototypes) != num_classes):
        raise ValueError(f"{num_classes} classes are assigned but prototypes are {tuple(prototypes.shape)}")
    return _assigned_square_distance(features.detach().double(), prototypes.detach().double(), u)


def cosine_dispersion(features: Tensor, assignments: Tensor) -> float:
    """Intra-class cosine dispersion: mean over samples of ``1 - cos(f_i, m_k)``, k the sample's class.

    The paper reports 0.17 falling to 0.10 on EuroSAT and does not define it. The image encoder is frozen, so
    with true labels this number cannot change; with ``assignments`` predicted from the prototypes it does,
    as the predicted groups become tighter. Both are offered: it depends only on what is passed.

    Args:
        features: f, ``(N, d)``; rows are normalised here.
        assignments: labels ``(N,)`` or soft u ``(N, K)``.

    Example:
        >>> cosine_dispersion(torch.tensor([[1.0, 0.0], [3.0, 0.0]]), torch.tensor([0, 0]))
        0.0
    """
    f, u = F.normalize(features.detach().double(), dim=-1), _check_assignments(features, assignments)
    means, counts = _class_means(f, u)
    # sum_i u_ik cos(f_i, m_k) = n_k ||m_k|| for unit f_i, so no N x K matrix of cosines is needed.
    return (1 - (counts * means.norm(dim=1)).sum() / counts.sum()).item()


def _check_assignments(features: Tensor, assignments: Tensor) -> Tensor:
    """Labels as long ``(N,)`` or soft assignments as double ``(N, K)``, or one clear error."""
    if features.ndim != 2 or len(features) == 0:
        raise ValueError(f"features must be (N, d) with N at least 1, got {tuple(features.shape)}")
    if assignments.ndim not in (1, 2) or len(assignments) != len(features):
        raise ValueError(
            f"assignments must be labels (N,) or soft (N, K) with N = {len(features)}, got {tuple(assignments.shape)}"
        )
    if (assignments < 0).any():
        raise ValueError("assignments hold a negative value")
    if assignments.ndim == 2:
        return assignments.detach().double()
    if assignments.is_floating_point():
        raise ValueError("assignments of shape (N,) are labels and must be integers")
    return assignments.long()


def _class_means(features: Tensor, assignments: Tensor) -> tuple[Tensor, Tensor]:
    """Means ``(K, d)`` and counts ``(K,)``; the mean of an empty class is 0 and counts for nothing."""
    if assignments.ndim == 2:
        counts, sums = assignments.sum(dim=0), assignments.T @ features
    else:
        counts = torch.bincount(assignments).to(features)
        sums = features.new_zeros(len(counts), features.shape[1]).index_add_(0, assignments, features)
    return sums / counts.clamp_min(torch.finfo(counts.dtype).tiny).unsqueeze(1), counts


def _assigned_square_distance(features: Tensor, centers: Tensor, assignments: Tensor) -> float:
    """``sum_ik u_ik ||f_i - c_k||^2`` in blocks of samples."""
    total = 0.0
    for start in range(0, len(features), _BLOCK):
        f, u = features[start : start + _BLOCK], assignments[start : start + _BLOCK]
        if u.ndim == 1:
            total += (f - centers[u]).square().sum().item()
        else:
            total += (u * torch.cdist(f, centers).square()).sum().item()
    return total

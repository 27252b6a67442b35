"""Class prototypes without training: averaged prompts, the hard constraint, and the soft problem.

The three are one family: eq. 2 at lambda = 0 is solved by the averages V, at lambda = infinity by the nearest
orthonormal matrix, and in between over free prototypes by descent. None of them touches the encoder.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .loss import orthonormality_gradient


def mean_prototypes(text_embeds: Tensor) -> Tensor:
    """Averaged prompts, eq. 1: ``v_k = normalize(mean_t normalize(f(t(k))))``.

    The paper averages the embeddings and leaves normalisation open. We normalise before the mean, so that
    each template weighs the same, and after it, because the prototypes are compared by cosine.

    Args:
        text_embeds: ``(T, K, d)``, one embedding per template and class, of any length.

    Returns:
        V, ``(K, d)``, unit rows.

    Example:
        >>> mean_prototypes(torch.tensor([[[3.0, 0.0]], [[0.0, 1.0]]]))
        tensor([[0.7071, 0.7071]])
    """
    if text_embeds.ndim != 3:
        raise ValueError(f"text_embeds must be (templates, classes, d), got {tuple(text_embeds.shape)}")
    return F.normalize(F.normalize(text_embeds, dim=-1).mean(dim=0), dim=-1)


class SvdPrototypes(NamedTuple):
    """Solution of the hard-constrained problem.

    Attributes:
        prototypes: X, ``(K, d)``.
        row_orthonormal: True when ``X X^T = I_K``. False when K > d, where no such X exists: then X has
            orthonormal **columns** (``X^T X = I_d``) and its rows are neither orthogonal nor of unit length.
    """

    prototypes: Tensor
    row_orthonormal: bool


def svd_prototypes(anchors: Tensor) -> SvdPrototypes:
    """Nearest (semi-)orthogonal matrix: ``X = U R^T`` with ``V = U S R^T`` (orthogonal Procrustes).

    It minimises ``||X - V||_F`` subject to ``X X^T = I_K`` when ``K <= d``. With more classes than dimensions
    (ImageNet on ViT-B: 1000 > 512) that constraint has no solution; the same formula then gives the nearest
    matrix with orthonormal columns, and ``row_orthonormal`` is False. Rows are left as the formula gives
    them: normalise before using them as a cosine classifier when K > d.

    When V has lower rank than ``min(K, d)`` (two classes with the same name) the minimiser is not unique and
    one of them is returned.

    Args:
        anchors: V, ``(K, d)``.

    Example:
        >>> svd_prototypes(torch.tensor([[2.0, 0.0], [0.0, 0.5]])).row_orthonormal
        True
    """
    if anchors.ndim != 2:
        raise ValueError(f"anchors must be (K, d), got {tuple(anchors.shape)}")
    # LAPACK has no half precision.
    precise = anchors if anchors.dtype == torch.float64 else anchors.float()
    left, _, right = torch.linalg.svd(precise, full_matrices=False)
    return SvdPrototypes((left @ right).to(anchors.dtype), anchors.shape[0] <= anchors.shape[1])


class SoftPrototypes(NamedTuple):
    """Where the descent of :func:`soft_prototypes` ended, and the way there.

    Attributes:
        prototypes: X, ``(K, d)``, unit rows.
        losses: eq. 2 after 0, 1, 2, ... steps, never rising.
        displacements: mean ``||x_i - v_i||`` after the same steps.
        converged: True when no further step lowers the loss.
    """

    prototypes: Tensor
    losses: list[float]
    displacements: list[float]
    converged: bool


@torch.no_grad()
def soft_prototypes(
    anchors: Tensor,
    weight: float,
    *,
    max_steps: int = 200,
    target_displacement: float | None = None,
    normalize_by_classes: bool = False,
    tolerance: float = 1e-7,
) -> SoftPrototypes:
    """Eq. 2 over free unit-row prototypes, no encoder: a reference curve for what LoRA can reach.

    Riemannian gradient descent on the product of spheres from X = V: the gradient is projected on each row's
    tangent space, rows are normalised after the step, and the step is halved until the loss falls (Armijo).
    It starts at the inverse curvature and grows slowly, so that the path follows the gradient flow and its
    displacements are those a patient optimiser passes through.

    Args:
        anchors: V, ``(K, d)``, unit rows.
        weight: lambda; 0 returns V itself.
        max_steps: accepted steps at most.
        target_displacement: stop at the first step whose mean displacement reaches this value.
        normalize_by_classes: as in :func:`orion_hf.loss.orthonormality_loss`.
        tolerance: converged when a step lowers the loss by less than this fraction.

    Example:
        >>> v = torch.nn.functional.normalize(torch.tensor([[1.0, 0.0], [1.0, 0.2]]), dim=1)
        >>> soft_prototypes(v, weight=0.0).displacements
        [0.0]
    """
    start = F.normalize(anchors, dim=-1)
    x, largest = start, torch.linalg.matrix_norm(start.float(), ord=2).item() ** 2
    classes = len(start) if normalize_by_classes else 1
    step = 1 / (2 / classes + 12 * weight * largest / classes**2)
    loss, gradient = orthonormality_gradient(x, start, weight, normalize_by_classes)
    losses, displacements, converged = [loss.total.item()], [0.0], False

    while len(losses) <= max_steps and not converged:
        tangent = gradient - (gradient * x).sum(dim=-1, keepdim=True) * x
        slope = tangent.square().sum().item()
        converged = True  # unless some step size below lowers the loss
        while slope > 0 and step * slope > tolerance * 1e-3 * max(losses[-1], 1e-12):
            candidate = F.normalize(x - step * tangent, dim=-1)
            loss, candidate_gradient = orthonormality_gradient(candidate, start, weight, normalize_by_classes)
            if loss.total.item() <= losses[-1] - 1e-4 * step * slope:
                converged = losses[-1] - loss.total.item() < tolerance * losses[-1]
                x, gradient = candidate, candidate_gradient
                losses.append(loss.total.item())
                displacements.append((x - start).norm(dim=-1).mean().item())
                step *= 1.25
                break
            step /= 2
        if target_displacement is not None and displacements[-1] >= target_displacement:
            break
    return SoftPrototypes(x, losses, displacements, converged)

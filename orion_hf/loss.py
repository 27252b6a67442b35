"""The ORION objective (eq. 2 of the paper) and its gradient in bounded memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class OrionLoss(NamedTuple):
    """Both terms of eq. 2 and their weighted sum, each a scalar tensor.

    ``total = fidelity + weight * orthogonality``.
    """

    total: Tensor
    fidelity: Tensor
    orthogonality: Tensor


def orthonormality_loss(
    prototypes: Tensor, anchors: Tensor, weight: float, normalize_by_classes: bool = False
) -> OrionLoss:
    """ORION objective, eq. 2: ``||X - V||_F^2 + weight * ||X X^T - I_K||_F^2``.

    The paper does not say that rows are unit-norm; we take them so, because only then is the second term
    the sum of squared cosines between different classes, which is how the paper reads it.

    Args:
        prototypes: X, ``(K, d)``, unit rows, from the encoder being tuned.
        anchors: V, ``(K, d)``, unit rows, from the frozen encoder.
        weight: lambda.
        normalize_by_classes: ours, not the paper's: divide the fidelity by K and the orthogonality by K^2,
            so that one lambda means the same for 10 and for 1000 classes.

    Example:
        >>> x = torch.eye(3)
        >>> orthonormality_loss(x, x, weight=2.0).total
        tensor(0.)
    """
    _check_shapes(prototypes, anchors)
    num_classes = len(prototypes)
    fidelity = (prototypes - anchors).square().sum()
    orthogonality = _minus_identity(prototypes @ prototypes.T).square().sum()
    if normalize_by_classes:
        fidelity, orthogonality = fidelity / num_classes, orthogonality / num_classes**2
    return OrionLoss(fidelity + weight * orthogonality, fidelity, orthogonality)


@torch.no_grad()
def orthonormality_gradient(
    prototypes: Tensor, anchors: Tensor, weight: float, normalize_by_classes: bool = False
) -> tuple[OrionLoss, Tensor]:
    """Value and gradient of :func:`orthonormality_loss` at X, in memory that does not grow as K^2.

    ``dL/dX = 2 (X - V) + 4 weight (X X^T - I_K) X``. When K > d the smaller Gram matrix gives the same:
    ``(X X^T - I_K) X = X (X^T X - I_d)`` and ``||X X^T - I_K||_F^2 = ||X^T X - I_d||_F^2 + K - d``, because
    both have the same non-zero eigenvalues. So 21,000 classes cost a 512 x 512 matrix, not 1.8 GB.

    Args:
        prototypes: X, ``(K, d)``.
        anchors: V, ``(K, d)``.
        weight: lambda.
        normalize_by_classes: as in :func:`orthonormality_loss`.

    Returns:
        The loss, and its gradient with respect to X, ``(K, d)``.

    Example:
        >>> loss, gradient = orthonormality_gradient(torch.eye(3), torch.eye(3), weight=2.0)
        >>> gradient.abs().max()
        tensor(0.)
    """
    _check_shapes(prototypes, anchors)
    num_classes, dim = prototypes.shape
    difference = prototypes - anchors
    fidelity, orthogonality = difference.square().sum(), orthogonality_penalty(prototypes)
    if num_classes <= dim:
        product = _minus_identity(prototypes @ prototypes.T) @ prototypes
    else:
        product = prototypes @ _minus_identity(prototypes.T @ prototypes)
    fidelity_scale, orthogonality_scale = (1 / num_classes, 1 / num_classes**2) if normalize_by_classes else (1, 1)
    fidelity, orthogonality = fidelity * fidelity_scale, orthogonality * orthogonality_scale
    gradient = 2 * fidelity_scale * difference + 4 * weight * orthogonality_scale * product
    return OrionLoss(fidelity + weight * orthogonality, fidelity, orthogonality), gradient


def orthogonality_penalty(prototypes: Tensor) -> Tensor:
    """``||X X^T - I_K||_F^2`` of X ``(K, d)`` from the smaller of the two Gram matrices; at least ``K - d``.

    Example:
        >>> orthogonality_penalty(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]))
        tensor(2.)
    """
    num_classes, dim = prototypes.shape
    if num_classes <= dim:
        return _minus_identity(prototypes @ prototypes.T).square().sum()
    return _minus_identity(prototypes.T @ prototypes).square().sum() + (num_classes - dim)


def _minus_identity(gram: Tensor) -> Tensor:
    return gram - torch.eye(len(gram), dtype=gram.dtype, device=gram.device)


def _check_shapes(prototypes: Tensor, anchors: Tensor) -> None:
    if prototypes.ndim != 2 or prototypes.shape != anchors.shape:
        raise ValueError(
            f"prototypes and anchors must both be (K, d), got {tuple(prototypes.shape)} and {tuple(anchors.shape)}"
        )

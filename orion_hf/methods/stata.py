"""StatA: transductive adaptation of a batch with statistical anchors at the text prototypes.

Every class is a Gaussian with mean m_k and diagonal covariance C_k. Assignments Z, means and covariances are
updated in turn; ``alpha`` pseudo-samples hold each class at its text prototype t_k and at the initial
covariance C0, so a class with little data stays where zero-shot classification put it:

    z_ik ~ y_ik^lambda_y * N(x_i; m_k, C_k)^(1/tau) * exp(lambda_lap / (2n) [(W + W^T) Z]_ik)
    m_k = unit(b_k v_k + (1 - b_k) t_k),                v_k = unit(sum_i z_ik x_i)
    C_k = b_k D_k + (1 - b_k) (C0 + (t_k - m_k)^2),     D_k = sum_i z_ik (x_i - m_k)^2 / sum_i z_ik
    b_k = c_k / (alpha + c_k),                          c_k = number of samples of class k

The published solver forms N x K x d arrays. Here squares are expanded so that everything is a matrix product,
and with hard counts the classes without a sample (b_k = 0), which are at their anchor by definition, are
computed once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from orion_hf.methods import MethodOutput
from orion_hf.methods._inputs import check_inputs, check_range
from orion_hf.methods._transduction import TAU, assign, chunked_mean, neighbour_affinity
from orion_hf.methods.zero_shot import probabilities

PAPER = "Zanella et al., Realistic Test-Time Adaptation of Vision-Language Models, CVPR 2025"
INPUTS = "batch"

VARIANCE_FLOOR = 1e-12


@dataclass(frozen=True)
class StatAOutput(MethodOutput):
    """StatA's assignments Z as ``scores`` and the state behind them.

    Attributes:
        zero_shot: Y, ``(N, K)``, zero-shot probabilities.
        means: ``(K, d)``, the class means that gave the final scores.
        covariances: ``(K, d)``, the variances.
        weights: ``(K,)``, b_k, the share of the data in each class's statistics.
    """

    zero_shot: Tensor
    means: Tensor
    covariances: Tensor
    weights: Tensor


def stata(
    features: Tensor,
    prototypes: Tensor,
    *,
    alpha: float = 1.0,
    soft_beta: bool = False,
    lambda_y_hat: float = 1.0,
    lambda_laplacian: float = 1.0,
    n_neighbors: int = 3,
    max_iter: int = 10,
    logit_scale: float = 100.0,
    reference_chunking: bool = False,
) -> StatAOutput:
    """Adapt one batch. Nothing is kept from one batch to the next.

    Args:
        features: Image features X of the batch, ``(N, d)``, unit rows.
        prototypes: Text prototypes T, ``(K, d)``, unit rows.
        alpha: Strength of the anchor, in samples.
        soft_beta: Count samples by their probabilities instead of by their largest one.
        lambda_y_hat: Exponent of the zero-shot probabilities.
        lambda_laplacian: Weight of the agreement with neighbours.
        n_neighbors: n, neighbours of a sample; a batch of fewer samples uses all others.
        max_iter: Parameter updates; one more assignment update follows the last.
        logit_scale: Zero-shot temperature s.
        reference_chunking: Initial covariance as the published code computes it for N > 2,500, which nearly
            ignores all but the last chunk of 2,500. ``False`` is the mean over all samples.

    Returns:
        Assignments as ``scores`` ``(N, K)``, rows on the simplex, with the statistics.

    Example:
        >>> output = stata(features, prototypes)        # doctest: +SKIP
        >>> accuracy = (output.predictions == labels).float().mean()        # doctest: +SKIP
    """
    features, prototypes = check_inputs(features=features, prototypes=prototypes)
    check_range(0, alpha=alpha, lambda_y_hat=lambda_y_hat, lambda_laplacian=lambda_laplacian, max_iter=max_iter)
    check_range(1, n_neighbors=n_neighbors)
    zero_shot = probabilities(features, prototypes, logit_scale)
    affinity = neighbour_affinity(features, n_neighbors)
    prior = torch.xlogy(lambda_y_hat, zero_shot)  # 0 log 0 = 0, as in y^0 = 1

    # Only differences x - m enter below; a common shift keeps the expanded squares accurate in float32.
    shift = features.mean(dim=0)
    shifted = features - shift
    moments = torch.cat([shifted.square(), shifted], dim=1)
    initial_covariance = _initial_covariance(shifted, prototypes - shift, zero_shot, reference_chunking)

    # A class without data, after any update: b_k = 0.
    anchors = normalize(prototypes, dim=1)
    anchor_covariances = initial_covariance + (prototypes - anchors).square()
    anchor_evidence = prior + _log_likelihood(moments, anchors - shift, anchor_covariances) / TAU

    means, covariances = prototypes, initial_covariance.expand_as(prototypes)
    weights = torch.zeros_like(prototypes[:, 0])
    evidence = prior + _log_likelihood(moments, prototypes - shift, covariances) / TAU
    assignments = assign(zero_shot, evidence, affinity, lambda_laplacian / (2 * n_neighbors))
    for _ in range(max_iter):
        weights = _mixing_weights(assignments, alpha, soft_beta)
        populated = weights.nonzero().squeeze(1)
        data_means, second_moments = _class_moments(assignments[:, populated], moments, shift)
        anchor, weight = prototypes[populated], weights[populated, None]
        class_means = normalize(weight * normalize(data_means, dim=1) + (1 - weight) * anchor, dim=1)
        centred = class_means - shift
        spread = second_moments - 2 * centred * (data_means - shift) + centred.square()
        anchor_spread = initial_covariance + (anchor - class_means).square()
        class_covariances = weight * spread.clamp_min(0) + (1 - weight) * anchor_spread
        class_covariances = class_covariances.clamp_min(VARIANCE_FLOOR)

        means = anchors.index_copy(0, populated, class_means)
        covariances = anchor_covariances.index_copy(0, populated, class_covariances)
        log_likelihood = _log_likelihood(moments, centred, class_covariances)
        evidence = anchor_evidence.index_copy(1, populated, prior[:, populated] + log_likelihood / TAU)
        assignments = assign(assignments, evidence, affinity, lambda_laplacian / (2 * n_neighbors))
    return StatAOutput(assignments, zero_shot, means, covariances, weights)


def _initial_covariance(features: Tensor, prototypes: Tensor, zero_shot: Tensor, reference_chunking: bool) -> Tensor:
    """``C0 = 1/N sum_ik y_ik (x_i - t_k)^2``, ``(d,)``."""

    def total(rows: slice) -> Tensor:
        x, y = features[rows], zero_shot[rows]
        cross = ((y.T @ x) * prototypes).sum(dim=0)
        return y.sum(dim=1) @ x.square() - 2 * cross + y.sum(dim=0) @ prototypes.square()

    return chunked_mean(total, len(features), reference_chunking).clamp_min(VARIANCE_FLOOR)


def _log_likelihood(moments: Tensor, means: Tensor, covariances: Tensor) -> Tensor:
    """``-1/2 sum_d ((x_id - m_kd)^2 / C_kd + log C_kd)``, ``(N, K)``, from rows ``(x^2, x)``."""
    precision = covariances.reciprocal()
    scaled = means * precision
    bias = (means * scaled + covariances.log()).sum(dim=1)
    return torch.addmm(-bias / 2, moments, torch.cat([precision / -2, scaled], dim=1).T)


def _mixing_weights(assignments: Tensor, alpha: float, soft_beta: bool) -> Tensor:
    """b_k, ``(K,)``; zero for a class without mass, whatever alpha."""
    mass = assignments.sum(dim=0)
    hard_counts = assignments.argmax(dim=1).bincount(minlength=len(mass))
    counts = mass if soft_beta else hard_counts.to(mass.dtype)
    weights = counts / (alpha + counts + 1e-12)
    return weights.where(mass > 0, torch.zeros_like(weights))


def _class_moments(assignments: Tensor, moments: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean of x and weighted mean of the shifted x^2, both ``(K, d)``."""
    averages = (assignments.T @ moments) / assignments.sum(dim=0)[:, None]
    second, first = averages.chunk(2, dim=1)
    return first + shift, second

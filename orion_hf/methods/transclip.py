"""TransCLIP: transductive classification of a batch by Gaussians with one shared covariance.

The means start at the text prototypes (``text-init``, the form of the StatA study) or at the most confident
images (``visual-init``, the authors' first solver), then

    z_ik ~ y_ik^lambda_y * exp(-1/2 sum_d (x_id - m_kd)^2 / C_d)^(1/tau) * exp(lambda_lap / (2n) [(W + W^T)
    Z]_ik) m_k = unit(sum_i z_ik x_i),     C = 1/N sum_ik z_ik (x_i - m_k)^2

Nothing anchors a class to its prototype: with few of the K classes in the batch, absent classes drift
(StatA's cure). :func:`transclip_few_shot` adds labelled images to the sums and to the neighbour term.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from orion_hf.methods import MethodOutput
from orion_hf.methods._inputs import check_inputs, check_range
from orion_hf.methods._transduction import (
    TAU,
    assign,
    chunked_mean,
    neighbour_affinity,
    symmetric_sum,
    top_similarities,
)
from orion_hf.methods.zero_shot import probabilities

PAPER = "Zanella et al., Boosting Vision-Language Models with Transduction, NeurIPS 2024"
INPUTS = "batch"

VARIANCE_FLOOR = 1e-12


@dataclass(frozen=True)
class TransCLIPOutput(MethodOutput):
    """TransCLIP's assignments Z as ``scores`` and the state behind them.

    Attributes:
        zero_shot: Y, ``(N, K)``, zero-shot probabilities.
        means: ``(K, d)``, class means.
        covariance: ``(d,)``, the shared variances.
    """

    zero_shot: Tensor
    means: Tensor
    covariance: Tensor


@dataclass(frozen=True)
class TransCLIPFewShotOutput(TransCLIPOutput):
    """Few-shot result; ``scores`` are those of the gamma with the best validation accuracy.

    Attributes:
        scores_per_gamma: ``(G, N, K)``, Z after each gamma; the published solver hands back the last.
        validation_accuracies: ``(G,)``, in percent.
    """

    scores_per_gamma: Tensor
    validation_accuracies: Tensor


def transclip(
    features: Tensor,
    prototypes: Tensor,
    *,
    variant: str = "text-init",
    lambda_y_hat: float = 1.0,
    lambda_laplacian: float = 1.0,
    n_neighbors: int = 3,
    max_iter: int = 10,
    n_most_confident: int = 8,
    initial_probabilities: Tensor | None = None,
    logit_scale: float = 100.0,
    reference_chunking: bool = False,
) -> TransCLIPOutput:
    """Classify one batch together.

    Args:
        features: Image features X, ``(N, d)``, unit rows.
        prototypes: Text prototypes T, ``(K, d)``, unit rows.
        variant: ``"text-init"`` or ``"visual-init"``.
        lambda_y_hat: Exponent of the zero-shot probabilities.
        lambda_laplacian: Weight of the agreement with neighbours (always 1 in the authors' first solver).
        n_neighbors: n, neighbours of a sample; a batch of fewer samples uses all others.
        max_iter: Parameter updates; one more assignment update follows the last.
        n_most_confident: Images that give a class its first mean, ``visual-init`` only.
        initial_probabilities: ``(N, K)``, another method's probabilities in place of the zero-shot ones.
        logit_scale: Zero-shot temperature s.
        reference_chunking: ``text-init`` only: covariance updates as the published code computes them for N >
            2,500, which nearly ignore all but the last chunk of 2,500. ``False`` is the mean over all
            samples.

    Example:
        >>> transclip(features, prototypes, variant="visual-init").predictions      # doctest: +SKIP
    """
    if variant not in ("text-init", "visual-init"):
        raise ValueError(f"variant must be 'text-init' or 'visual-init', not {variant!r}.")
    features, prototypes = check_inputs(features=features, prototypes=prototypes)
    check_range(0, lambda_y_hat=lambda_y_hat, lambda_laplacian=lambda_laplacian, max_iter=max_iter)
    check_range(1, n_neighbors=n_neighbors, n_most_confident=n_most_confident)
    if initial_probabilities is None:
        zero_shot = probabilities(features, prototypes, logit_scale)
    elif initial_probabilities.shape != (len(features), len(prototypes)):
        raise ValueError(
            f"initial_probabilities must be {(len(features), len(prototypes))}, images by classes; "
            f"got {tuple(initial_probabilities.shape)}."
        )
    elif not initial_probabilities.isfinite().all():
        raise ValueError("initial_probabilities hold NaN or infinite values.")
    else:
        zero_shot = initial_probabilities.to(features)

    means = (
        prototypes if variant == "text-init" else _confident_means(features, prototypes, zero_shot, n_most_confident)
    )
    solver = _Solver(
        features,
        prior=torch.xlogy(lambda_y_hat, zero_shot),
        affinity=neighbour_affinity(features, n_neighbors),
        strength=lambda_laplacian / (2 * n_neighbors),
        reference_chunking=reference_chunking and variant == "text-init",
    )
    covariance = torch.full_like(features[0], 1 / features.shape[1])
    assignments, means, covariance = solver.run(zero_shot, means, covariance, max_iter)
    return TransCLIPOutput(assignments, zero_shot, means, covariance)


def transclip_few_shot(
    features: Tensor,
    prototypes: Tensor,
    support_features: Tensor,
    support_labels: Tensor,
    val_features: Tensor,
    val_labels: Tensor,
    *,
    gammas: Sequence[float] = (0.002, 0.01, 0.02, 0.2),
    lambda_y_hat: float = 0.5,
    n_neighbors: int = 3,
    max_iter: int = 10,
    logit_scale: float = 100.0,
    reference_indexing: bool = False,
) -> TransCLIPFewShotOutput:
    """Classify one batch together with labelled supports; gamma, their weight, is chosen on validation
    images.

    Each gamma starts where the one before it ended.

    Args:
        features: Query features X, ``(N, d)``, unit rows.
        prototypes: Text prototypes, ``(K, d)``, unit rows.
        support_features: ``(S, d)``, unit rows.
        support_labels: ``(S,)``.
        val_features: ``(V, d)``, unit rows. A validation image takes the prediction of its nearest query.
        val_labels: ``(V,)``.
        gammas: Weights to try, in order; the first of the best is taken.
        lambda_y_hat: Exponent of the zero-shot probabilities.
        n_neighbors: n, neighbours of a query; a support loses its nearest query, as in the published code.
        max_iter: Parameter updates for each gamma.
        logit_scale: Zero-shot temperature s.
        reference_indexing: The published neighbour term pairs graph rows (supports first) with assignments
            (queries first). ``True`` repeats that; ``False`` pairs each row with its own assignment.

    Example:
        >>> transclip_few_shot(features, prototypes, shots, shot_labels, val, val_labels)   # doctest: +SKIP
    """
    features, prototypes, support_features, val_features = check_inputs(
        features=features, prototypes=prototypes, support_features=support_features, val_features=val_features
    )
    zero_shot = probabilities(features, prototypes, logit_scale)
    support_assignments = one_hot(support_labels, len(prototypes)).to(features)
    strength = 1 / (2 * n_neighbors)
    affinity, pull = _few_shot_affinity(
        features, support_features, support_assignments, n_neighbors, reference_indexing
    )
    solver = _Solver(
        features,
        prior=torch.xlogy(lambda_y_hat, zero_shot) + strength * pull,
        affinity=affinity,
        strength=strength,
        support_features=support_features,
        support_assignments=support_assignments,
    )

    assignments = zero_shot
    means = normalize(support_assignments.T @ support_features, dim=1)
    means = means.where(support_assignments.sum(dim=0)[:, None] > 0, prototypes)
    covariance = torch.full_like(features[0], 1 / features.shape[1])
    nearest_query = top_similarities(val_features, features, 1)[1].squeeze(1)
    states, accuracies = [], []
    for gamma in gammas:
        solver.support_weight = gamma * TAU / len(support_features)
        assignments, means, covariance = solver.run(assignments, means, covariance, max_iter)
        states.append((assignments, means, covariance))
        hits = assignments.argmax(dim=1)[nearest_query] == val_labels
        accuracies.append(100 * hits.double().mean())
    validation = torch.stack(accuracies)
    best = states[int(validation.argmax())]
    return TransCLIPFewShotOutput(
        best[0], zero_shot, best[1], best[2], torch.stack([state[0] for state in states]), validation
    )


@dataclass
class _Solver:
    """The alternation both forms share; supports enter the parameter sums with weight g = gamma tau / S."""

    features: Tensor
    prior: Tensor
    affinity: Tensor
    strength: float
    reference_chunking: bool = False
    support_features: Tensor | None = None
    support_assignments: Tensor | None = None
    support_weight: float = 0.0

    def run(
        self, assignments: Tensor, means: Tensor, covariance: Tensor, max_iter: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``max_iter`` rounds of assignments and parameters, then the final assignments."""
        assignments = self.assign(assignments, means, covariance)
        for _ in range(max_iter):
            means = self.update_means(assignments, means)
            covariance = self.update_covariance(assignments, means)
            assignments = self.assign(assignments, means, covariance)
        return assignments, means, covariance

    def assign(self, assignments: Tensor, means: Tensor, covariance: Tensor) -> Tensor:
        # Only differences x - m matter: the common shift keeps the expanded square accurate, and its x^2
        # term, the same for all classes, is left out.
        shift = self.features.mean(dim=0)
        centred = means - shift
        scaled = centred / covariance
        log_likelihood = (self.features - shift) @ scaled.T - (centred * scaled).sum(dim=1) / 2
        return assign(assignments, self.prior + log_likelihood / TAU, self.affinity, self.strength)

    def update_means(self, assignments: Tensor, means: Tensor) -> Tensor:
        total, mass = assignments.T @ self.features, assignments.sum(dim=0)
        if self.support_features is not None and self.support_assignments is not None:
            weight = self.support_weight * len(self.features)
            total = total + weight * self.support_assignments.T @ self.support_features
            mass = mass + weight * self.support_assignments.sum(dim=0)
        return normalize(total / mass[:, None], dim=1).where(mass[:, None] > 0, means)

    def update_covariance(self, assignments: Tensor, means: Tensor) -> Tensor:
        def total(rows: slice) -> Tensor:
            return _scatter(self.features[rows], assignments[rows], means)

        covariance = chunked_mean(total, len(self.features), self.reference_chunking)
        if self.support_features is not None and self.support_assignments is not None:
            support = _scatter(self.support_features, self.support_assignments, means)
            mass = assignments.sum() / len(self.features) + self.support_weight * len(self.support_features)
            covariance = (covariance + self.support_weight * support) / mass
        return covariance.clamp_min(VARIANCE_FLOOR)


def _scatter(features: Tensor, assignments: Tensor, means: Tensor) -> Tensor:
    """``sum_ik z_ik (x_i - m_k)^2``, ``(d,)``, centred first for the accuracy of the expanded square."""
    shift = features.mean(dim=0)
    features, means = features - shift, means - shift
    cross = ((assignments.T @ features) * means).sum(dim=0)
    return assignments.sum(dim=1) @ features.square() - 2 * cross + assignments.sum(dim=0) @ means.square()


def _confident_means(features: Tensor, prototypes: Tensor, zero_shot: Tensor, count: int) -> Tensor:
    """Unit mean of the ``count`` images most confident in each class, weighted by confidence, ``(K, d)``."""
    confidence, images = zero_shot.T.topk(min(count, len(features)), dim=1)
    weight = confidence / confidence.sum(dim=1, keepdim=True)
    means = normalize((weight[:, None, :] @ features[images]).squeeze(1), dim=1)
    return means.where(confidence[:, :1] > 0, prototypes)


def _few_shot_affinity(
    features: Tensor,
    supports: Tensor,
    support_assignments: Tensor,
    n_neighbors: int,
    reference_indexing: bool,
) -> tuple[Tensor, Tensor]:
    """Neighbour term ``A Z + B`` of the queries: A sparse ``(N, N)``, B ``(N, K)`` what the supports add.

    W has one row a query or support and one column a query. With queries in the first N rows,
    ``A = W[:N] + W[:N]^T`` and ``B = W[N:]^T Y_S``.
    """
    query_values, query_columns = top_similarities(features, features, n_neighbors, exclude_self=True)
    support_values, support_columns = (top[:, 1:] for top in top_similarities(supports, features, n_neighbors + 1))
    order = -1 if reference_indexing else 1
    values = torch.cat([query_values, support_values][::order])
    columns = torch.cat([query_columns, support_columns][::order])

    size = len(features)
    rows = torch.arange(size, device=features.device).repeat_interleave(columns.shape[1])
    affinity = symmetric_sum(rows, columns[:size].flatten(), values[:size].flatten(), size)
    votes = values[size:, :, None] * support_assignments[:, None, :]
    pull = torch.zeros_like(features[:, :1]).expand(-1, votes.shape[2]).clone()
    return affinity, pull.index_add(0, columns[size:].flatten(), votes.flatten(0, 1))

"""How test-time adaptation is evaluated: which images a method sees together, how accuracies are summed up.

Batch-realistic: independent tasks, each one batch with few of the classes. Online-realistic: streams over the
whole test set with correlated labels, cut into batches. Labels choose the batches and score the predictions;
methods never see them. A task depends only on the seed and its own number, so any part of a run can be
repeated or shared between processes.

Example:
    >>> tasks = batch_tasks(labels, "very-low", batch_size=64, num_tasks=1000)      # doctest: +SKIP
    >>> accuracies = run_tasks(stata, features, prototypes, labels, tasks)      # doctest: +SKIP
    >>> print(summarize(accuracies))        # doctest: +SKIP
    67.31 ± 0.42 (95 %, n=1000)
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Effective classes of a batch, both ends included; "all" is the whole test set in one batch.
EFFECTIVE_CLASSES: dict[str, tuple[int, int] | None] = {
    "very-low": (1, 4),
    "low": (2, 10),
    "medium": (5, 25),
    "high": (25, 50),
    "very-high": (50, 100),
    "all": None,
}

# Dirichlet concentration of a stream; None: one class after the other.
CORRELATIONS: dict[str, float | None] = {"low": 0.1, "medium": 0.01, "high": 0.001, "separate": None}


def effective_classes(scenario: str) -> tuple[int, int] | None:
    """Range of a scenario's name, or of ``"LOW-HIGH"``; ``None`` for all classes.

    Example:
        >>> effective_classes("very-low"), effective_classes("3-7"), effective_classes("all")
        ((1, 4), (3, 7), None)
    """
    if scenario in EFFECTIVE_CLASSES:
        return EFFECTIVE_CLASSES[scenario]
    low, dash, high = scenario.partition("-")
    if not (dash and low.isdigit() and high.isdigit() and 1 <= int(low) <= int(high)):
        raise ValueError(
            f"Unknown scenario {scenario!r}: choose {', '.join(EFFECTIVE_CLASSES)}, or a range of effective "
            "classes such as 1-4."
        )
    return int(low), int(high)


def batch_tasks(
    labels: Tensor, scenario: str, *, batch_size: int = 64, num_tasks: int = 1000, seed: int = 0
) -> Iterator[Tensor]:
    """Batches of the batch-realistic protocol, as indices into the test set.

    A task draws its number of effective classes, then the classes (all, if that number reaches theirs), then
    ``batch_size`` of their images without replacement, or all of them if there are fewer. Class shares follow
    the test set.

    Args:
        labels: ``(N,)``, of the test set.
        scenario: A name of :data:`EFFECTIVE_CLASSES` or a range such as ``"1-4"``. ``"all"`` gives the whole
            test set in random order; one task is enough there.
        batch_size: 64 or 1000 in the paper.
        num_tasks: Tasks, each independent of the others.
        seed: Same seed, same tasks.
    """
    allowed = effective_classes(scenario)
    target = _checked_labels(labels)
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {batch_size}.")
    members = [np.flatnonzero(target == c) for c in np.unique(target)]
    for task in range(num_tasks):
        rng = np.random.default_rng([seed, task])
        if allowed is None:
            yield torch.from_numpy(rng.permutation(len(target)))
            continue
        count = rng.integers(allowed[0], allowed[1], endpoint=True)
        chosen = rng.choice(len(members), min(int(count), len(members)), replace=False)
        pool = np.concatenate([members[c] for c in chosen])
        yield torch.from_numpy(rng.permutation(pool)[:batch_size])


def online_streams(
    labels: Tensor,
    gamma: float | None,
    *,
    batch_size: int = 128,
    num_streams: int = 100,
    seed: int = 0,
) -> Iterator[list[Tensor]]:
    """Streams of the online-realistic protocol, each a list of batches of indices into the test set.

    Every class spreads its images over time slots by a Dirichlet(gamma) draw; small gamma keeps a class
    together. The last incomplete batch of a stream is dropped.

    Args:
        labels: ``(N,)``, of the test set.
        gamma: Concentration, see :data:`CORRELATIONS`; ``None``: classes one after the other.
        batch_size: 128 in the paper.
        num_streams: Independent streams.
        seed: Same seed, same streams.

    Raises:
        ValueError: Fewer images than one batch.
    """
    target = _checked_labels(labels)
    if not 1 <= batch_size <= len(target):
        raise ValueError(
            f"A stream of {len(target)} images has no batch of {batch_size}: use a smaller batch_size or more images."
        )
    if gamma is not None and gamma <= 0:
        raise ValueError(f"gamma must be positive, or None for classes one after the other; not {gamma}.")
    members = [np.flatnonzero(target == c) for c in np.unique(target)]
    for stream in range(num_streams):
        rng = np.random.default_rng([seed, stream])
        if gamma is None:
            order = np.concatenate([rng.permutation(members[c]) for c in rng.permutation(len(members))])
        else:
            slots = min(len(target) // batch_size, len(members))
            order = _dirichlet_order(members, slots, gamma, rng)
        batches = torch.from_numpy(order).split(batch_size)
        yield [batch for batch in batches if len(batch) == batch_size]


def accuracy(predictions: Tensor, labels: Tensor) -> float:
    """Share of correct predictions, in percent."""
    return 100 * (predictions == labels).double().mean().item()


def run_tasks(
    method: Callable[..., Any],
    features: Tensor,
    prototypes: Tensor,
    labels: Tensor,
    tasks: Iterable[Tensor],
    **options: Any,
) -> Tensor:
    """Accuracy of a method on each batch, ``(tasks,)`` in percent; a short batch counts like a full one.

    Args:
        method: A method of :mod:`orion_hf.methods`; each batch is adapted from scratch.
        features: Of the test set, ``(N, d)``.
        prototypes: ``(K, d)``.
        labels: ``(N,)``; only used to score.
        tasks: Indices of each batch; for a stream, its batches.
        options: Of the method.
    """
    accuracies = []
    for batch in tasks:
        batch = batch.to(features.device)
        predictions = method(features[batch], prototypes, **options).predictions
        accuracies.append(accuracy(predictions, labels.to(features.device)[batch]))
    return torch.tensor(accuracies, dtype=torch.float64)


@dataclass(frozen=True)
class Summary:
    """Mean of n values with its standard error and 95 % interval (Student's t); both NaN for one value."""

    mean: float
    standard_error: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {(self.high - self.low) / 2:.2f} (95 %, n={self.n})"


def summarize(values: Tensor | Sequence[float]) -> Summary:
    """Mean over tasks, streams or seeds.

    For a paired comparison of two methods or prototypes on the same tasks, summarize the differences.

    Example:
        >>> str(summarize([70.0, 72.0, 74.0]))
        '72.00 ± 4.97 (95 %, n=3)'
    """
    values = torch.as_tensor(values, dtype=torch.float64)
    count = len(values)
    if count == 0:
        raise ValueError("There is nothing to summarize: values is empty.")
    mean = values.mean().item()
    if count == 1:
        return Summary(mean, math.nan, math.nan, math.nan, 1)
    error = (values.std() / math.sqrt(count)).item()
    half = student_t_975(count - 1) * error
    return Summary(mean, error, mean - half, mean + half, count)


def student_t_975(degrees: int) -> float:
    """97.5 % quantile of Student's t: a table for few degrees, then an expansion with an error below 1e-4.

    Example:
        >>> student_t_975(2), round(student_t_975(999), 4)
        (4.30265, 1.9623)
    """
    table = (12.7062, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.306, 2.26216, 2.22814, 2.20099)
    if degrees <= len(table):
        return table[degrees - 1]
    z = 1.959963984540054
    return (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    )


def _checked_labels(labels: Tensor) -> np.ndarray:
    if labels.dim() != 1 or len(labels) == 0 or labels.is_floating_point():
        raise ValueError(f"labels must be a vector of class indices; got {labels.dtype} {tuple(labels.shape)}.")
    return labels.cpu().numpy()


def _dirichlet_order(members: list[np.ndarray], slots: int, gamma: float, rng: np.random.Generator) -> np.ndarray:
    """Order of a stream: each class, in test-set order, is cut over the slots; slots are shuffled."""
    order = rng.permutation(sum(map(len, members)))
    slot_of = np.empty(len(order), int)
    for images in members:
        cuts = (len(images) * np.cumsum(_dirichlet(gamma, slots, rng))[:-1]).astype(int)
        slot_of[images] = np.searchsorted(cuts, np.arange(len(images)), side="right")
    return order[np.argsort(slot_of[order], kind="stable")]


def _dirichlet(gamma: float, size: int, rng: np.random.Generator) -> np.ndarray:
    """A symmetric Dirichlet draw from log Gamma variates, which small gamma does not underflow."""
    logs = np.log(rng.standard_gamma(gamma + 1, size)) + np.log1p(-rng.random(size)) / gamma
    shares = np.exp(logs - logs.max())
    return shares / shares.sum()

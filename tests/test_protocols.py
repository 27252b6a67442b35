import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import stdtrit

from orion_hf.methods.zero_shot import zero_shot
from orion_hf.protocols import (
    CORRELATIONS,
    EFFECTIVE_CLASSES,
    accuracy,
    batch_tasks,
    effective_classes,
    online_streams,
    run_tasks,
    student_t_975,
    summarize,
)

DEFAULT_DIR = Path(__file__).parent / "golden"
FILES = [Path(os.environ.get("ORION_GOLDEN_DIR") or DEFAULT_DIR) / "samplers_stats.json"]
STATS = json.loads((FILES[0] if FILES[0].exists() else DEFAULT_DIR / FILES[0].name).read_text())


def class_labels(counts):
    return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))


def composition(labels, batch):
    counts = labels[batch].bincount()
    return (counts > 0).sum().item(), counts.max().item() / len(batch)


def agrees(ours, theirs, their_draws, our_draws):
    """The rule of the file's note; the spread of a constant is rounding."""
    limit = 5 * theirs["std"] * math.sqrt(1 / their_draws + 1 / our_draws) + 1e-9
    assert abs(np.mean(ours) - theirs["mean"]) <= limit
    assert theirs["std"] > 1e-9 or np.ptp(ours) < 1e-9


@pytest.mark.parametrize("name", STATS["batch"])
def test_batches_have_the_published_statistics(name):
    expected = STATS["batch"][name]
    labels = class_labels(expected["class_counts"])
    low, high = expected["k_eff_min"], expected["k_eff_max"]
    scenario = "all" if low is None else f"{low}-{high}"
    assert expected["range"].lower().replace(" ", "-") in EFFECTIVE_CLASSES
    assert EFFECTIVE_CLASSES[expected["range"].lower().replace(" ", "-")] == effective_classes(scenario)
    draws = min(expected["draws"], 300)
    size = max(expected["batch_size"], 1)
    batches = list(batch_tasks(labels, scenario, batch_size=size, num_tasks=draws, seed=3))
    assert all(len(batch.unique()) == len(batch) for batch in batches)
    classes, shares = zip(*(composition(labels, batch) for batch in batches), strict=True)
    lengths = [len(batch) for batch in batches]
    agrees(lengths, expected["batch_length"], expected["draws"], draws)
    agrees(classes, expected["distinct_classes"], expected["draws"], draws)
    agrees(shares, expected["largest_class_share"], expected["draws"], draws)
    if low is not None:
        theirs = expected["fraction_of_batches_shorter_than_nominal"]
        spread = {"mean": theirs, "std": math.sqrt(theirs * (1 - theirs))}
        agrees([float(length < size) for length in lengths], spread, expected["draws"], draws)


@pytest.mark.parametrize("name", STATS["online"])
def test_streams_have_the_published_statistics(name):
    expected = STATS["online"][name]
    labels = class_labels(expected["class_counts"])
    gamma = expected["gamma"] if expected["gamma"] > 0 else None
    assert gamma in CORRELATIONS.values()
    draws = min(expected["streams"], 25)
    size, classes, shares, overlaps = expected["batch_size"], [], [], []
    for batches in online_streams(labels, gamma, batch_size=size, num_streams=draws, seed=5):
        stream = torch.cat(batches)
        assert len(batches) == expected["batches_per_stream"]["mean"]
        assert all(len(batch) == size for batch in batches)
        assert len(stream.unique()) == len(stream) == expected["samples_evaluated_per_stream"]
        counts = torch.stack([labels[batch].bincount(minlength=len(expected["class_counts"])) for batch in batches])
        present = counts > 0
        classes += present.sum(dim=1).tolist()
        shares += (counts.amax(dim=1) / size).tolist()
        both, either = present[1:] & present[:-1], present[1:] | present[:-1]
        overlaps += (both.sum(dim=1) / either.sum(dim=1)).tolist()
    agrees(classes, expected["distinct_classes_per_batch"], expected["streams"], draws)
    agrees(shares, expected["largest_class_share"], expected["streams"], draws)
    agrees(overlaps, expected["jaccard_of_class_sets_of_consecutive_batches"], expected["streams"], draws)


def test_tasks_depend_on_the_seed_and_their_number_only():
    labels = class_labels([30] * 12)
    tasks = list(batch_tasks(labels, "low", num_tasks=6, seed=1))
    again = list(batch_tasks(labels, "low", num_tasks=3, seed=1))
    assert all(torch.equal(a, b) for a, b in zip(tasks, again, strict=False))
    other = list(batch_tasks(labels, "low", num_tasks=6, seed=2))
    assert not any(torch.equal(a, b) for a, b in zip(tasks, other, strict=True))
    streams = [torch.cat(batches) for batches in online_streams(labels, 0.01, batch_size=32, num_streams=2, seed=1)]
    (repeated,) = online_streams(labels, 0.01, batch_size=32, num_streams=1, seed=1)
    assert torch.equal(streams[0], torch.cat(repeated)) and not torch.equal(streams[0], streams[1])


def test_labels_need_not_be_sorted_or_dense():
    labels = torch.tensor([7, 2, 7, 9, 2, 7] * 10)
    for batch in batch_tasks(labels, "1-1", batch_size=64, num_tasks=20):
        assert len(labels[batch].unique()) == 1
        assert len(batch) == (labels == labels[batch[0]]).sum()
    (batches,) = online_streams(labels, None, batch_size=60, num_streams=1)
    changes = (labels[batches[0]].diff() != 0).sum()
    assert changes == 2


def test_run_tasks_scores_each_batch_of_the_same_tasks():
    torch.manual_seed(0)
    prototypes = torch.nn.functional.normalize(torch.randn(5, 16), dim=1)
    labels = class_labels([20] * 5)
    features = torch.nn.functional.normalize(prototypes[labels] + 0.3 * torch.randn(100, 16), dim=1)
    tasks = list(batch_tasks(labels, "1-4", batch_size=16, num_tasks=10))
    accuracies = run_tasks(zero_shot, features, prototypes, labels, tasks, logit_scale=50.0)
    everything = zero_shot(features, prototypes).predictions
    expected = [accuracy(everything[batch], labels[batch]) for batch in tasks]
    assert accuracies.tolist() == expected and 20 < min(expected) <= max(expected) <= 100


def test_summary_is_the_student_interval():
    values = [70.0, 72.0, 74.0, 71.0]
    summary = summarize(values)
    error = np.std(values, ddof=1) / 2
    assert summary.mean == 71.75 and summary.n == 4
    assert summary.standard_error == pytest.approx(error)
    assert summary.high - summary.mean == pytest.approx(3.18245 * error)
    assert summary.mean - summary.low == pytest.approx(3.18245 * error)
    assert math.isnan(summarize([1.0]).standard_error)
    assert all(abs(student_t_975(n) - stdtrit(n, 0.975)) < 1e-4 for n in range(1, 2000))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: next(batch_tasks(torch.arange(3), "tiny")), "very-low.*range"),
        (lambda: next(batch_tasks(torch.arange(3), "4-1")), "4-1"),
        (lambda: next(batch_tasks(torch.arange(3), "low", batch_size=0)), "batch_size"),
        (lambda: next(batch_tasks(torch.rand(3), "low")), "labels"),
        (lambda: next(batch_tasks(torch.arange(0), "low")), "labels"),
        (lambda: next(online_streams(torch.arange(50), 0.1)), "50 images has no batch of 128"),
        (lambda: next(online_streams(torch.arange(500), -1.0)), "gamma"),
        (lambda: summarize([]), "empty"),
    ],
)
def test_errors_name_the_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()

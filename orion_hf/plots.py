"""Figures: what ORION did to the classes of a task, and what that was worth.

One function a figure. Each returns a :class:`matplotlib.figure.Figure` with an Agg canvas and leaves pyplot
and the rcParams alone; :func:`save_figure` writes one to disk. Class names are shown as they are, ``$`` and
``_`` included, shortened when long; a letter that no font here can draw becomes a box. Up to 40 classes all
are named, above that some of them, and the figure says which.

    figure = gram_heatmaps(trainer.anchors, model.prototypes(), task.class_names)
    save_figure(figure, "gram.png")
"""

from __future__ import annotations

import math
import os
import re
import textwrap
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

import matplotlib
import numpy as np
import torch
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, fontManager, get_font
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from torch import Tensor
from torch.nn import functional as F

from .geometry import displacement, off_diagonal_cosines
from .training_log import steps_of, validations_of

Array: TypeAlias = Tensor | np.ndarray
LogRow: TypeAlias = Mapping[str, Any]  # a line of training_log.jsonl

VARIANTS = ("baseline", "averaged prompts", "ORION")

# Okabe and Ito's colours, which the colour-blind can tell apart. Black is left for text and outlines.
_BLUE, _VERMILLION, _GREEN, _PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
_ORANGE, _SKY, _YELLOW, _GREY = "#E69F00", "#56B4E9", "#F0E442", "#999999"
_CLASS_COLORS = (_BLUE, _ORANGE, _GREEN, _VERMILLION, _SKY, _PURPLE, _YELLOW)

_WIDTH = 8.0  # inches; 100 pixels an inch in a README, so that 8 pt are 11 pixels
_MOST_NAMES = 40  # labels of an axis
_MOST_PAIRS = 15
_MOST_IMAGES = 2000  # more make a map slower (t-SNE) and no clearer
_BLOCK = 2048  # rows of a K x K matrix held at once

# DejaVu Sans comes with matplotlib; the others are used, where installed, for the letters it lacks.
_FONTS = ["DejaVu Sans"] + [
    name
    for name in ("Noto Sans CJK JP", "Arial Unicode MS", "Microsoft YaHei", "Hiragino Sans", "Noto Emoji")
    if name in fontManager.get_font_names()
]
_STYLE: dict[Any, Any] = {
    "font.family": _FONTS,
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "figure.facecolor": "white",
    "legend.frameon": False,
    "text.parse_math": False,  # a class name may hold "$"
    "text.usetex": False,
    "savefig.bbox": None,
}


@matplotlib.rc_context(_STYLE)
def gram_heatmaps(before: Array, after: Array, class_names: Sequence[str]) -> Figure:
    """Cosines between classes, ``V V^T`` and ``X X^T``, side by side on one scale with 0 in its middle.

    Rows and columns have one order, from average-linkage clustering of V, so groups of similar classes are
    blocks along the diagonal. The diagonal, always 1, is left grey.

    Args:
        before: V, ``(K, d)``, K at least 2. Rows are normalised here.
        after: X, ``(K, d)``.
        class_names: K names.

    Example:
        >>> gram_heatmaps(torch.eye(3) + 0.5, torch.eye(3), ["cat", "dog", "car"])
        <Figure size 1200x607.5 with 3 Axes>
    """
    v, x, names = _check_prototypes(before, after, class_names)
    order = _cluster_order(v)
    # A thinned list is kept short enough for square maps.
    shown = np.arange(0, len(names), 1 if len(names) <= _MOST_NAMES else math.ceil(len(names) / 25))
    figure = _new_figure(max(4.05, 0.95 + 0.13 * len(shown)))
    axes = figure.subplots(1, 2, sharey=True)
    grams = []
    for prototypes in (v, x):
        gram = (prototypes @ prototypes.T).numpy()[np.ix_(order, order)]
        np.fill_diagonal(gram, np.nan)
        grams.append(gram)
    limit = max(0.01, *(np.nanmax(np.abs(gram)) for gram in grams))
    colors = matplotlib.colormaps["RdBu_r"].with_extremes(bad="#bbbbbb")
    for axis, title, prototypes, gram in zip(axes, ("before", "after"), (v, x), grams, strict=True):
        image = axis.imshow(gram, cmap=colors, vmin=-limit, vmax=limit, aspect="auto")
        mean, largest = off_diagonal_cosines(prototypes)
        axis.set_title(f"{title}\nmean cosine {mean:.2f}, largest {largest:.2f}")
        axis.set_xticks([])
        axis.spines[:].set_visible(False)
        axis.tick_params(axis="y", length=2, labelsize=7)
    axes[1].tick_params(axis="y", left=False)
    axes[0].set_yticks(shown, [_label(names[order[row]]) for row in shown])
    every = f", one in {shown[1]} named" if len(shown) < len(names) else ""
    figure.supxlabel(f"{len(names)} classes, similar ones side by side{every}", fontsize=8)
    figure.colorbar(image, ax=axes, label="cosine", shrink=0.9, format="{x:g}")
    return _finished(figure)


@matplotlib.rc_context(_STYLE)
def prototype_map(
    features: Array,
    labels: Array,
    before: Array,
    after: Array,
    class_names: Sequence[str],
    method: Literal["tsne", "pca"] = "tsne",
) -> Figure:
    """The paper's Figure 1: image features and prototypes, before (x) and after (o), in one plane.

    CLIP's images and texts lie in two cones far apart, so features, V and X are each centred on their mean
    (for prototypes this changes no prediction) and normalised before the projection; else the map would show
    little but the gap. Above 40 classes the 30 that moved most are coloured and named, the others are grey.

    Args:
        features: image features, ``(N, d)``; of more than 2000 a random 2000 are shown.
        labels: class of each image, ``(N,)``, integers from 0 to K - 1.
        before: V, ``(K, d)``.
        after: X, ``(K, d)``.
        class_names: K names.
        method: "tsne" keeps neighbours together, "pca" is linear and quick.

    Example:
        >>> prototype_map(torch.eye(4), torch.tensor([0, 0, 1, 1]), torch.eye(4)[:2], torch.eye(4)[2:],
        ...               ["cat", "dog"], method="pca")
        <Figure size 1200x900 with 1 Axes>
    """
    v, x, names = _check_prototypes(before, after, class_names)
    f, y = _check_images(features, labels, v)
    if method not in ("tsne", "pca"):
        raise ValueError(f'method must be "tsne" or "pca", got {method!r}')
    total = len(f)
    if total > _MOST_IMAGES:
        kept = torch.randperm(total, generator=torch.Generator().manual_seed(0))[:_MOST_IMAGES]
        f, y = f[kept], y[kept.numpy()]
    plane = _project(torch.cat([_centered(f), _centered(v), _centered(x)]), method)
    images, start, end = np.split(plane, [len(f), len(f) + len(v)])

    by_movement = displacement(x, v).argsort(descending=True).numpy()
    named = by_movement if len(names) <= _MOST_NAMES else by_movement[:30]
    colors = np.full((len(names), 3), to_rgb("#cccccc"))
    colors[named] = _class_colors(_cluster_order(v[named]))
    figure = _new_figure(6.0)
    axes = figure.subplots()
    axes.set_axis_off()
    axes.margins(0.06)

    def scatter(points: np.ndarray, **style: Any) -> None:
        axes.scatter(points[:, 0], points[:, 1], **style)

    # Grey first, so that it covers nothing that has a name; x over o, so that both are seen when they meet.
    is_named = np.isin(np.arange(len(names)), named)
    order = np.argsort(is_named[y], kind="stable")
    scatter(images[order], c=colors[y][order], s=7, alpha=0.55, linewidths=0)
    scatter(start[~is_named], c="#aaaaaa", s=9, marker="x", linewidths=0.6)
    scatter(end[~is_named], facecolors="none", edgecolors="#aaaaaa", s=9, linewidths=0.6)
    for k in named:
        axes.plot(*np.stack([start[k], end[k]]).T, color="#444444", linewidth=0.8, zorder=2)
    scatter(end[named], c=colors[named], s=70, edgecolors="black", linewidths=0.8, zorder=3)
    scatter(start[named], c=colors[named], s=30, marker="X", edgecolors="black", linewidths=0.7, zorder=4)
    outlined: dict[str, Any] = {"color": "white", "markeredgecolor": "black", "linestyle": ""}
    figure.legend(
        handles=[
            Line2D([], [], marker="o", color=_GREY, markersize=3, linestyle="", label="image"),
            Line2D([], [], marker="X", markersize=6, **outlined, label="prototype before"),
            Line2D([], [], marker="o", markersize=8, **outlined, label="prototype after"),
        ],
        loc="outside lower center",
        ncols=3,
    )
    of_images = f"{len(f)} of {total} images" if len(f) < total else f"{total} images"
    of_classes = (
        f"{len(names)} classes"
        if len(named) == len(names)
        else f"the {len(named)} of {len(names)} classes that moved most in colour"
    )
    figure.suptitle(f"{'t-SNE' if method == 'tsne' else 'PCA'}: {of_images}, {of_classes}", fontsize=9)
    _finished(figure)
    _place_labels(
        axes,
        end[named],
        [_label(names[k]) for k in named],
        np.concatenate([start[named], end[named]]),
        colors[named],
    )
    return figure


@matplotlib.rc_context(_STYLE)
def method_bars(results: Mapping[str, Mapping[str, float]]) -> Figure:
    """The overview: accuracy of each method with the three kinds of prototypes, gains above the bars.

    Args:
        results: for each method its accuracies in percent under the names in :data:`VARIANTS`; what was not
            run is left out. Gains are over the method's baseline.

    Example:
        >>> method_bars({"zero-shot": {"baseline": 63.7, "averaged prompts": 65.2, "ORION": 66.5}})
        <Figure size 1200x390 with 1 Axes>
    """
    for method, accuracies in results.items():
        unknown = set(accuracies) - set(VARIANTS)
        if unknown:
            raise ValueError(f"results[{method!r}] has {sorted(unknown)}; known are {list(VARIANTS)}")
    if not results:
        raise ValueError("results is empty: give at least one method")
    per_row = min(6, len(results))
    num_rows = math.ceil(len(results) / per_row)
    labels = {method: _wrapped(method, 6) for method in results}
    tallest = max(text.count("\n") for text in labels.values())
    figure = _new_figure(0.5 + (2.1 + 0.13 * max(0, tallest - 2)) * num_rows)
    highest = max((value for accuracies in results.values() for value in accuracies.values()), default=1.0)
    methods = list(results)
    bars_of = dict(zip(VARIANTS, ((_GREY, "black"), (_SKY, "black"), (_BLUE, "white")), strict=True))
    for row, axes in enumerate(figure.subplots(num_rows, 1, squeeze=False)[:, 0]):
        members = methods[row * per_row : (row + 1) * per_row]
        for column, method in enumerate(members):
            accuracies = results[method]
            for slot, (variant, (color, ink)) in enumerate(bars_of.items()):
                if variant not in accuracies:
                    continue
                value, center = accuracies[variant], column + 0.28 * (slot - 1)
                axes.bar(center, value, width=0.26, color=color)
                if value > 0.15 * highest:  # else the figure would not fit into the bar
                    _write(axes, (center, value), f"{value:.1f}", below=True, color=ink)
                if slot and VARIANTS[0] in accuracies:
                    gain = _number(value - accuracies[VARIANTS[0]], "+.1f")
                    _write(axes, (center, value), gain, weight="bold" if slot == 2 else "normal")
        axes.set_xticks(range(len(members)), [labels[method] for method in members])
        axes.tick_params(axis="x", length=0)
        spare = max(0.0, (3 - per_row) / 2)
        axes.set_xlim(-0.5 - spare, per_row - 0.5 + spare)
        axes.set_ylim(0, 1.15 * highest)
        axes.set_ylabel("accuracy, %")
    figure.legend(
        handles=[
            Line2D([], [], marker="s", color=color, markersize=7, linestyle="", label=variant)
            for variant, (color, _) in bars_of.items()
            if any(variant in accuracies for accuracies in results.values())
        ],
        loc="outside upper center",
        ncols=3,
    )
    return _finished(figure)


@matplotlib.rc_context(_STYLE)
def lambda_sweep(
    weights: Sequence[float],
    means: Sequence[float],
    intervals: Sequence[float | None],
    no_orth: float | None = None,
    title: str = "",
) -> Figure:
    """The paper's ablation: accuracy against ``log10(lambda / 2)``, with a line where lambda is 0.

    Args:
        weights: lambda of each run, at least 0. A weight of 0 has no place on the axis; its mean is
            ``no_orth``, unless that is given.
        means: mean accuracy in percent, one a weight.
        intervals: half-width of the interval around each mean; None where it is not known, as of a single seed.
        no_orth: accuracy without the orthogonality term.
        title: what the curve is of.

    Example:
        >>> lambda_sweep([0.2, 2, 20, 200], [64.1, 66.5, 66.2, 65.0], [0.2, 0.1, 0.2, 0.3], no_orth=63.7)
        <Figure size 1200x600 with 1 Axes>
    """
    if not len(weights) == len(means) == len(intervals):
        raise ValueError("weights, means and intervals must be equally long")
    half_widths = _half_widths(intervals)
    runs = np.array(sorted(zip(weights, means, half_widths, strict=True)), dtype=float).reshape(-1, 3)
    if not np.isfinite(runs[:, :2]).all() or (runs[:, 0] < 0).any():
        raise ValueError("weights and means must be finite, weights at least 0")
    if no_orth is None and len(runs) and runs[0, 0] == 0:
        no_orth = runs[0, 1]
    runs = runs[runs[:, 0] > 0]
    if not len(runs):
        raise ValueError("weights holds no lambda above 0: there is nothing to draw")
    lambdas, accuracies, half_widths = runs.T
    x = np.log10(lambdas / 2)
    shown = [exact if len(exact := f"{value:.6g}") < 7 else f"{value:.3g}" for value in lambdas]
    ticks = [f"{_number(at, '.3g')}\nλ = {value}" for at, value in zip(x, shown, strict=True)]
    return _sweep_figure(x, accuracies, half_widths, ticks, "log₁₀(λ/2)", title, no_orth)


@matplotlib.rc_context(_STYLE)
def setting_sweep(
    setting: str,
    values: Sequence[float] | Sequence[str],
    means: Sequence[float],
    intervals: Sequence[float | None],
    title: str = "",
) -> Figure:
    """Accuracy against one setting of the training: numbers on an axis, a wide range of them on a logarithmic one.

    Args:
        setting: name of the axis, such as "learning_rate".
        values: of each run, numbers or words; words are drawn side by side.
        means: mean accuracy in percent, one a value.
        intervals: half-width of the interval around each mean; None where it is not known, as of a single seed.
        title: what the curve is of.

    Example:
        >>> setting_sweep("lora_rank", [2, 8, 32], [65.0, 66.5, 66.4], [0.2, 0.1, 0.2])
        <Figure size 1200x600 with 1 Axes>
    """
    if not len(values) == len(means) == len(intervals) or not len(values):
        raise ValueError("values, means and intervals must be equally long, and hold at least one run")
    if not np.isfinite(means).all():
        raise ValueError("means must be finite")
    half_widths = _half_widths(intervals)
    if any(isinstance(value, str) for value in values):
        names = [_wrapped(str(value)) for value in values]
        heights = np.array(means, dtype=float)
        return _sweep_figure(np.arange(len(names)), heights, half_widths, names, setting, title, line=False)
    runs = np.array(sorted(zip(values, means, half_widths, strict=True)), dtype=float)
    numbers, heights, half_widths = runs.T
    ticks = [f"{number:.6g}" for number in numbers]
    logarithmic = numbers[0] > 0 and numbers[-1] >= 20 * numbers[0]
    x = np.log10(numbers) if logarithmic else numbers
    return _sweep_figure(x, heights, half_widths, ticks, f"{setting}, logarithmic" if logarithmic else setting, title)


def _half_widths(intervals: Sequence[float | None]) -> np.ndarray:
    """NaN where an interval is not known; matplotlib draws nothing there."""
    found = np.array([np.nan if value is None else value for value in intervals], dtype=float)
    if np.isinf(found).any() or (found < 0).any():
        raise ValueError("intervals must be finite and at least 0, or None")
    return found


def _sweep_figure(
    x: np.ndarray,
    accuracies: np.ndarray,
    half_widths: np.ndarray,
    ticks: Sequence[str],
    label: str,
    title: str,
    no_orth: float | None = None,
    line: bool = True,
) -> Figure:
    """Means with intervals over ``x``, which rises; their figures as far as there is room for them."""
    figure = _new_figure(4.0)
    axes = figure.subplots()
    if title:
        axes.set_title("\n".join(textwrap.wrap(_label(title, 300), 100)), fontsize=8)
    if line:
        axes.fill_between(x, accuracies - half_widths, accuracies + half_widths, color=_BLUE, alpha=0.15, linewidth=0)
    axes.errorbar(
        x,
        accuracies,
        half_widths,
        color=_BLUE,
        marker="o",
        markersize=5,
        linewidth=1.5,
        linestyle="-" if line else "",
        capsize=3,
        label="ORION",
    )
    if no_orth is not None:
        axes.axhline(no_orth, color=_VERMILLION, linestyle="--", label=f"no orthogonality term (λ = 0): {no_orth:.1f}")
    axes.margins(x=0.06 if line else 0.2, y=0.15)
    widths = [0.0105 * max(map(len, text.split("\n"))) + 0.01 for text in ticks]  # shares of the axis, at 8 pt
    at = [0]  # points with a number below them: all, or as many as there is room for
    for place in range(1, len(x)):
        if x[place] - x[at[-1]] > (widths[place] + widths[at[-1]]) / 2 * np.ptp(x):
            at.append(place)
    axes.set_xticks(x[at], [ticks[place] for place in at])
    axes.set_xticks(x, minor=True)
    axes.set_xlabel(label)
    axes.set_ylabel("accuracy, %")
    figure.legend(loc="outside upper center", ncols=2)
    _finished(figure)
    known = np.nan_to_num(half_widths)
    bars = np.stack([np.tile(x, 9), np.concatenate([accuracies + t * known for t in np.linspace(-1, 1, 9)])])
    marks = bars.T
    if line:
        track = np.linspace(x[0], x[-1], 100)
        marks = np.concatenate([np.stack([track, np.interp(track, x, accuracies)], axis=1), marks])
    labelled = np.argsort(-accuracies, kind="stable")[: len(x) if len(x) <= _MOST_NAMES else 1]
    _place_labels(
        axes, np.stack([x, accuracies], axis=1)[labelled], [f"{value:.1f}" for value in accuracies[labelled]], marks
    )
    return figure


@matplotlib.rc_context(_STYLE)
def displacement_chart(before: Array, after: Array, class_names: Sequence[str]) -> Figure:
    """How far each class moved, ``||x_i - v_i||``, and which pairs of classes moved apart most.

    Apart means a falling cosine, ``v_i.v_j - x_i.x_j > 0``; the 15 largest falls are ranked. Above 40 classes
    the 40 that moved most are shown, with mean and median of all.

    Args:
        before: V, ``(K, d)``, K at least 2. Rows are normalised here.
        after: X, ``(K, d)``.
        class_names: K names.

    Example:
        >>> displacement_chart(torch.eye(3) + 0.5, torch.eye(3), ["crop land", "pasture land", "forest"])
        <Figure size 1200x450 with 2 Axes>
    """
    v, x, names = _check_prototypes(before, after, class_names)
    moved = displacement(x, v).numpy()
    ranking = np.argsort(-moved, kind="stable")[:_MOST_NAMES]
    pairs = _pairs_moved_apart(v, x)
    figure = _new_figure(max(3.0, 1.1 + 0.15 * max(len(ranking), 1.4 * len(pairs))))
    halves = figure.subfigures(1, 2, squeeze=False, width_ratios=(0.43, 0.57))[0]
    left, right = (half.subplots() for half in halves)

    left.barh(range(len(ranking)), moved[ranking], color=_SKY, height=0.75)
    mean, median = moved.mean(), np.median(moved)
    left.axvline(mean, color="black", linewidth=1, label=f"mean {mean:.3f}")
    left.axvline(median, color=_VERMILLION, linewidth=1, linestyle="--", label=f"median {median:.3f}")
    left.set_yticks(range(len(ranking)), [_label(names[k]) for k in ranking])
    left.set_xlabel("displacement ‖x \N{MINUS SIGN} v‖")
    few = f"the {len(ranking)} of {len(names)} that moved most"
    halves[0].suptitle(f"{len(names)} classes" if len(ranking) == len(names) else few, fontsize=9)

    for place, (_, _, *cosines) in enumerate(pairs):
        right.plot(cosines, [place, place], color=_GREY, linewidth=1.5, zorder=1)
    for index, (label, marker, color) in enumerate((("before", "X", _VERMILLION), ("after", "o", _BLUE))):
        cosines = [pair[2 + index] for pair in pairs]
        right.scatter(cosines, range(len(pairs)), marker=marker, color=color, s=30, label=label)
    right.set_yticks(range(len(pairs)), [f"{_label(names[i], 22)} / {_label(names[j], 22)}" for i, j, *_ in pairs])
    right.set_xlabel("cosine of the pair")
    halves[1].suptitle("pairs that moved apart most" if pairs else "no pair moved apart", fontsize=9)

    for half, axes, count in ((halves[0], left, len(ranking)), (halves[1], right, max(1, len(pairs)))):
        half.legend(loc="outside lower center", ncols=2)
        axes.set_ylim(count - 0.4, -0.6)
        axes.tick_params(axis="y", length=0, labelsize=7)
        axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter("{x:g}")
    return _finished(figure)


@matplotlib.rc_context(_STYLE)
def accuracy_against_displacement(log_rows: Iterable[LogRow]) -> Figure:
    """Validation accuracy against mean displacement, the way it went during training.

    Args:
        log_rows: rows of ``training_log.jsonl``. Those with "accuracy" (in percent) are drawn; they need
            "displacement" and "epoch" too.

    Example:
        >>> accuracy_against_displacement([{"epoch": 1, "displacement": 0.1, "accuracy": 60.0},
        ...                                {"epoch": 2, "displacement": 0.2, "accuracy": 64.0}])
        <Figure size 1200x600 with 2 Axes>
    """
    rows = validations_of(log_rows)
    if not rows:
        raise ValueError("log_rows has no accuracy: train with a validation set to have it logged")
    epochs, x, y = (_column(rows, key) for key in ("epoch", "displacement", "accuracy"))
    figure = _new_figure(4.0)
    axes = figure.subplots()
    axes.plot(x, y, color=_GREY, linewidth=1, zorder=1)
    points = axes.scatter(x, y, c=epochs, cmap="cividis", s=26, edgecolors="black", linewidths=0.5, zorder=2)
    axes.set_xlabel("mean displacement")
    axes.set_ylabel("validation accuracy, %")
    axes.margins(0.12)
    if np.ptp(epochs) > 0:
        figure.colorbar(points, ax=axes, label="epoch", ticks=MaxNLocator(6, integer=True))
    _finished(figure)
    best = int(np.argmax(y))
    texts = {best: f"best: {y[best]:.1f}, epoch {epochs[best]:.0f}"}
    for place, word in ((len(rows) - 1, "last"), (0, "first")):
        texts.setdefault(place, f"{word}: {y[place]:.1f}")
    track = np.stack([x, y], axis=1)
    _place_labels(axes, track[list(texts)], list(texts.values()), track)
    return figure


@matplotlib.rc_context(_STYLE)
def training_curves(log_rows: Iterable[LogRow]) -> Figure:
    """Both terms of eq. 2, the cosines between classes and the displacement, epoch by epoch.

    An epoch of several steps is drawn as its mean, for the largest cosine its maximum, for the displacement
    its last value. The orthogonality term is shown without lambda, which may grow during training.

    Args:
        log_rows: rows of ``training_log.jsonl``.

    Example:
        >>> row = {"fidelity": 0.1, "orthogonality": 9.0, "mean_cosine": 0.6, "max_cosine": 0.9,
        ...        "displacement": 0.05}
        >>> training_curves([{"epoch": 1, **row}, {"epoch": 2, **row}])
        <Figure size 1200x750 with 4 Axes>
    """
    rows = steps_of(log_rows)
    if not rows:
        raise ValueError("log_rows has no step: read them from the training_log.jsonl of a run")
    epochs, epoch_of_row = np.unique(_column(rows, "epoch"), return_inverse=True)

    def by_epoch(key: str, reduce: Any = np.mean) -> np.ndarray:
        values = _column(rows, key)
        return np.array([reduce(values[epoch_of_row == index]) for index in range(len(epochs))])

    panels = {
        "fidelity ‖X \N{MINUS SIGN} V‖²": {"": (by_epoch("fidelity"), _BLUE, "o")},
        "orthogonality ‖XXᵀ \N{MINUS SIGN} I‖²": {"": (by_epoch("orthogonality"), _VERMILLION, "o")},
        "cosine between classes": {
            "largest": (by_epoch("max_cosine", np.max), _ORANGE, "s"),
            "mean": (by_epoch("mean_cosine"), _BLUE, "o"),
        },
        "mean displacement": {"": (by_epoch("displacement", lambda values: values[-1]), _GREEN, "o")},
    }
    figure = _new_figure(5.0)
    for axes, (title, curves) in zip(figure.subplots(2, 2, sharex=True).flat, panels.items(), strict=True):
        for label, (values, color, marker) in curves.items():
            few = len(epochs) <= 50  # markers of more would run together
            axes.plot(epochs, values, color=color, marker=marker if few else None, markersize=3, label=label)
        axes.set_title(title)
        axes.margins(y=0.12)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        if len(curves) > 1:
            axes.legend(loc="best")
    figure.supxlabel("epoch", fontsize=8)
    return _finished(figure)


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write the figure; the suffix (.png, .svg, .pdf) says how. Equal figures give equal files.

    Example:
        >>> save_figure(training_curves(rows), "curves.png")  # doctest: +SKIP
        PosixPath('curves.png')
    """
    path = Path(path)
    undated: dict[str, dict[str, Any]] = {
        ".png": {"Software": None},
        ".svg": {"Date": None},
        ".pdf": {"CreationDate": None},
    }
    if path.suffix not in undated:
        raise ValueError(f"{path}: the name must end in {', '.join(undated)}")
    temporary = path.with_name(f".{path.stem}.tmp{path.suffix}")
    try:
        with matplotlib.rc_context({"svg.hashsalt": "orion-hf", "savefig.bbox": None}):
            figure.savefig(temporary, metadata=undated[path.suffix])
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


# Input


def _check_prototypes(before: Array, after: Array, class_names: Sequence[str]) -> tuple[Tensor, Tensor, list[str]]:
    """V and X with unit rows in float64, and the names, or one clear error."""
    v, x = (torch.as_tensor(rows).detach().cpu().double() for rows in (before, after))
    for name, rows in (("before", v), ("after", x)):
        if rows.ndim != 2 or len(rows) < 2 or rows.shape != v.shape:
            raise ValueError(f"{name} is {tuple(rows.shape)}: before and after must both be (K, d) with K at least 2")
        if not rows.isfinite().all():
            raise ValueError(f"{name} holds values that are not finite")
    if len(class_names) != len(v):
        raise ValueError(f"class_names has {len(class_names)} names for {len(v)} prototypes")
    return F.normalize(v, dim=-1), F.normalize(x, dim=-1), list(class_names)


def _check_images(features: Array, labels: Array, prototypes: Tensor) -> tuple[Tensor, np.ndarray]:
    f, y = torch.as_tensor(features).detach().cpu().double(), torch.as_tensor(labels).detach().cpu()
    if f.ndim != 2 or not len(f) or f.shape[1] != prototypes.shape[1]:
        raise ValueError(f"features must be (N, {prototypes.shape[1]}) with N at least 1, got {tuple(f.shape)}")
    if not f.isfinite().all():
        raise ValueError("features holds values that are not finite")
    if y.shape != f.shape[:1] or y.is_floating_point() or y.min() < 0 or y.max() >= len(prototypes):
        raise ValueError(f"labels must be {len(f)} integers from 0 to {len(prototypes) - 1}")
    return f, y.long().numpy()


def _column(rows: Sequence[LogRow], key: str) -> np.ndarray:
    return np.array([row[key] for row in rows], dtype=float)


# What is drawn


def _cluster_order(prototypes: Tensor) -> np.ndarray:
    """Classes in the order of the leaves of an average-linkage tree over ``1 - cosine``, neighbours alike."""
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    distances = (1 - prototypes @ prototypes.T).clamp_min(0).fill_diagonal_(0).numpy()
    return leaves_list(linkage(squareform(distances, checks=False), "average", optimal_ordering=len(distances) <= 200))


def _pairs_moved_apart(v: Tensor, x: Tensor) -> list[tuple[int, int, float, float]]:
    """``(i, j, v_i.v_j, x_i.x_j)`` of the pairs i < j whose cosine fell most, the largest fall first."""
    found: list[tuple[float, int, int, float, float]] = []
    for start in range(0, len(v), _BLOCK):
        cosines_before, cosines_after = (rows[start : start + _BLOCK] @ rows.T for rows in (v, x))
        fall = (cosines_before - cosines_after).triu(start + 1)  # 0 where j <= i, and 0 is no fall
        values, places = fall.flatten().topk(min(_MOST_PAIRS, fall.numel()))
        for value, place in zip(values.tolist(), places.tolist(), strict=True):
            i, j = divmod(place, len(v))
            if value > 1e-6:
                found.append((value, start + i, j, cosines_before[i, j].item(), cosines_after[i, j].item()))
    return [pair[1:] for pair in sorted(found, reverse=True)[:_MOST_PAIRS]]


def _centered(rows: Tensor) -> Tensor:
    return F.normalize(rows - rows.mean(dim=0), dim=-1)


def _project(rows: Tensor, method: str) -> np.ndarray:
    """``(n, 2)``, the same on every call."""
    if method == "pca":
        from sklearn.decomposition import PCA

        return PCA(2, random_state=0).fit_transform(rows.numpy())
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(rows) - 1) / 3)
    return TSNE(2, perplexity=perplexity, init="pca", random_state=0).fit_transform(rows.numpy())


def _class_colors(order: np.ndarray) -> np.ndarray:
    """Colours ``(K, 3)``: seven hues, then lighter, then darker, then again; neighbours differ."""
    colors = np.empty((len(order), 3))
    for place, k in enumerate(order):
        turn, hue = divmod(place, len(_CLASS_COLORS))
        toward, share = ((0.0, 0.0), (1.0, 0.5), (0.0, 0.45))[turn % 3]
        colors[k] = (1 - share) * np.array(to_rgb(_CLASS_COLORS[hue])) + share * toward
    return colors


# Text and layout


def _new_figure(height: float) -> Figure:
    figure = Figure(figsize=(_WIDTH, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _finished(figure: Figure) -> Figure:
    """Lay the figure out once and for all, so that what is placed by its text's size stays where it fits."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    return figure


@cache
def _drawable() -> frozenset[int]:
    return frozenset().union(*(get_font(findfont(name)).get_charmap() for name in _FONTS))


def _label(name: str, most: int = 24) -> str:
    """A class name on one line, its middle cut out when long, a box for letters no font has.

    The middle, because names of one family often differ at the end: "2012 Audi S5 Coupe / Convertible".
    """
    name = "".join(" " if letter.isspace() else letter for letter in str(name))
    name = " ".join("".join(letter for letter in name if unicodedata.category(letter)[0] != "C").split())
    if len(name) > most:
        name = f"{name[: most // 2].rstrip()}…{name[-(most - most // 2 - 1) :].lstrip()}"
    return "".join(letter if ord(letter) in _drawable() else "□" for letter in name)


def _number(value: float, spec: str) -> str:
    return format(value, spec).replace("-", "\N{MINUS SIGN}")


def _wrapped(name: str, most_lines: int = 3) -> str:
    """A name on lines of up to 15 letters.

    A longer word is broken after punctuation, and what is still too long loses its middle: half a word would read like
    another.
    """
    words: list[str] = []
    for word in _label(name, 15 * most_lines).split():
        chunk = ""
        for piece in re.split("(?<=[-:_/])", word) if len(word) > 15 else [word]:
            if len(chunk) + len(piece) > 15:
                words.append(chunk)
                chunk = ""
            chunk += _label(piece, 15)
        words.append(chunk)
    lines = textwrap.wrap(" ".join(filter(None, words)), 15, break_long_words=False, break_on_hyphens=False)
    return "\n".join(
        lines if len(lines) <= most_lines else [*lines[: most_lines - 1], lines[most_lines - 1][:14] + "…"]
    )


def _write(axes: Axes, point: tuple[float, float], text: str, *, below: bool = False, **style: Any) -> None:
    """A small text above or below a point."""
    axes.annotate(
        text,
        point,
        xytext=(0, -2 if below else 2),
        textcoords="offset points",
        ha="center",
        va="top" if below else "bottom",
        fontsize=7,
        **style,
    )


def _place_labels(
    axes: Axes, points: np.ndarray, texts: Sequence[str], marks: np.ndarray, colors: np.ndarray | None = None
) -> None:
    """Write each text near its point, inside the axes, over no other text; what finds no room is left out.

    Greedy: the first texts choose first. Places are tried from near to far, and those that cover a mark only
    when there is no other; a line leads back from the far ones.

    Args:
        points: ``(n, 2)`` in data coordinates, the important ones first.
        texts: n texts.
        marks: ``(m, 2)`` in data coordinates, what is better left visible.
        colors: ``(n, 3)``, of the texts, to be darkened; None for black.
    """
    figure = axes.get_figure(root=True)
    assert isinstance(figure, Figure) and isinstance(figure.canvas, FigureCanvasAgg)
    renderer, pixel = figure.canvas.get_renderer(), figure.dpi / 72
    inside = axes.get_window_extent(renderer)
    mark_boxes = _boxes_around(axes.transData.transform(marks), 3.5 * pixel)
    taken, lines = np.empty((0, 4)), np.empty((0, 4))  # by texts, and by the lines that lead to them
    angles = np.deg2rad(np.arange(0, 360, 30))
    directions = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    distances = pixel * np.array([6.0, 10.0, 18.0, 28.0, 40.0])
    line: dict[str, Any] = {"arrowstyle": "-", "linewidth": 0.5, "color": "#444444", "shrinkA": 0}
    for index, point in enumerate(axes.transData.transform(points)):
        measured = axes.text(0, 0, texts[index], fontsize=7)
        extent = measured.get_window_extent(renderer)
        measured.remove()
        size = np.array([extent.width, extent.height]) + 2 * pixel  # a little air
        lower = (point + distances[:, None, None] * directions + directions * size / 2).reshape(-1, 2) - size / 2
        boxes = np.hstack([lower, lower + size])
        far = np.arange(len(boxes)) >= 2 * len(directions)
        nearest = np.clip(point, boxes[:, :2], boxes[:, 2:])
        leads = point + np.linspace(0, 1, 12)[:, None, None] * (nearest - point)  # (12, candidates, 2)
        crosses = np.any([_overlap(_boxes_around(lead, pixel / 2), taken) for lead in leads], axis=0)
        fits = (boxes[:, :2] >= inside.min).all(1) & (boxes[:, 2:] <= inside.max).all(1)
        fits &= ~_overlap(boxes, np.vstack([taken, lines])) & ~(far & crosses)
        free = fits & ~_overlap(boxes, mark_boxes)
        if not fits.any():
            continue
        chosen = int(np.argmax(free if free.any() else fits))
        taken = np.vstack([taken, boxes[chosen]])
        if far[chosen]:
            lines = np.vstack([lines, _boxes_around(leads[:, chosen], pixel / 2)])
        axes.annotate(
            texts[index],
            tuple(axes.transData.inverted().transform(point)),
            xytext=(lower[chosen] + pixel - point) / pixel,
            textcoords="offset points",
            ha="left",
            va="bottom",
            fontsize=7,
            color="black" if colors is None else 0.45 * colors[index],
            annotation_clip=False,
            zorder=5,
            arrowprops=line | {"relpos": (nearest[chosen] - lower[chosen]) / size} if far[chosen] else None,
            path_effects=[patheffects.withStroke(linewidth=2, foreground="white")],
        )


def _boxes_around(centers: np.ndarray, half_width: float) -> np.ndarray:
    """Squares ``(n, 4)`` of left, bottom, right, top around ``(n, 2)``."""
    return np.hstack([centers - half_width, centers + half_width])


def _overlap(boxes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Whether each box ``(n, 4)`` of left, bottom, right, top overlaps any of the others ``(m, 4)``."""
    a, b = boxes[:, None], others[None]
    return np.any(((a[..., :2] < b[..., 2:]) & (b[..., :2] < a[..., 2:])).all(-1), axis=-1)

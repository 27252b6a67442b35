"""Measured cells as tables, in the layout of the paper's own.

Means and 95 % intervals (Student's t) are over runs; a gain is the mean difference of pairs, the same images and the
same seed with ORION's prototypes and with CLIP's. Measured figures and the paper's are kept apart, and nothing that was
not run is filled in.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .card import paper_tables
from .cells import BASELINE, ORION, MeasuredCell, canonical
from .protocols import CORRELATIONS, EFFECTIVE_CLASSES, summarize
from .results import PROTOTYPES
from .tasks import builtin_record

AVERAGE = "Average"  # name of the paper's last column
# Table of the paper -> its title here. Its table of averages of the closed form is the last row of `svd_per_dataset`.
PAPER_TABLES = {
    "zero_shot": "Zero-shot",
    "few_shot": "Few-shot, ViT-B/16",
    "tta_mta_tpt": "Test-time adaptation, ViT-B/16",
    "stata_batch": "StatA on batches, ViT-B/16",
    "stata_online": "StatA on streams, ViT-B/16",
    "svd_per_dataset": "Closed form (SVD) under MTA, ViT-B/16",
    "cupl_vit_l14": "CuPL prompts, ViT-L/14",
    "zlap_vit_b16": "ZLaP, ViT-B/16",
}
PAPER_BACKBONES = {
    "CLIP ViT-B/16": r"clip-vit-base-patch16",
    "CLIP ViT-L/14": r"clip-vit-large-patch14",
    "MetaCLIP": r"metaclip-.*",
}
_METHOD_NAMES = {"zero_shot": "zero-shot", "coop": "CoOp", "clap": "CLAP", "mta": "MTA", "tpt": "TPT", "stata": "StatA",
                 "zlap": "ZLaP", "transclip": "TransCLIP", "tip_adapter": "Tip-Adapter"}  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """A mean in percent or points, half of its 95 % interval (None for a single run), runs, datasets averaged."""

    mean: float
    half_width: float | None = None
    runs: int = 1
    datasets: int = 1


@dataclass(frozen=True)
class Line:
    """One line of a table: a dataset, or an average. Keys are those of :data:`~orion_hf.results.PROTOTYPES`.

    Attributes:
        measured: accuracies, only of what was run.
        gains: over the baseline, from pairs.
        printed: the paper's figures.
        printed_gain: the gain the paper printed for ORION.
        recomputed: of an average: the mean of the 11 figures that the paper printed.
        datasets: of an average: how many datasets were run.
    """

    dataset: str
    measured: Mapping[str, Measured] = field(default_factory=dict)
    gains: Mapping[str, Measured] = field(default_factory=dict)
    printed: Mapping[str, float] = field(default_factory=dict)
    printed_gain: float | None = None
    recomputed: Mapping[str, float] = field(default_factory=dict)
    num_images: int | None = None
    datasets: int = 1
    is_average: bool = False


@dataclass(frozen=True)
class Group:
    """Lines that share a method and its setting, such as "4-shot CLAP"; ``table`` is "other" if not of the paper."""

    table: str
    title: str
    lines: tuple[Line, ...]

    @property
    def was_run(self) -> bool:
        return any(line.measured for line in self.lines)


def groups_of(cells: Sequence[MeasuredCell]) -> list[Group]:
    """All groups of the paper's tables, run or not, in the paper's order; then the runs it has no table for."""
    placed: dict[tuple[str, str], dict[tuple[str, ...], list[MeasuredCell]]] = {}
    others: dict[tuple[str, ...], list[MeasuredCell]] = {}
    for cell in cells:
        places = paper_places(cell) if cell.sweep is None else []
        for place in places:
            placed.setdefault(place, {}).setdefault(cell.setting, []).append(cell)
        if not places and cell.sweep is None:
            others.setdefault(cell.setting, []).append(cell)
    chosen = {}
    for place, settings in placed.items():
        # Two settings never share a table: that with most cells is the paper's, the rest are runs of their own.
        chosen[place] = max(settings.values(), key=len)
        others |= {setting: members for setting, members in settings.items() if members is not chosen[place]}
    groups = [
        _paper_group(table, title, printed, chosen.get((table, title), []))
        for table in PAPER_TABLES
        for title, printed in printed_groups(table).items()
    ]
    titles = [_title(members[0]) for members in others.values()]
    for title, members in zip(titles, others.values(), strict=True):
        details = ", ".join(f"{key} {plain(value)}" for key, value in sorted(members[0].conditions.items()))
        groups.append(_other_group(f"{title} ({details})" if titles.count(title) > 1 and details else title, members))
    return groups


def paper_places(cell: MeasuredCell) -> list[tuple[str, str]]:
    """Tables of the paper, and groups in them, that a cell belongs to; empty if the paper has no such cell.

    Example:
        >>> cell = MeasuredCell("eurosat", "openai/clip-vit-base-patch16", "mta", "orion", 48.3)
        >>> paper_places(cell)
        [('tta_mta_tpt', 'MTA'), ('svd_per_dataset', 'MTA')]
    """
    backbone, conditions = paper_backbone(cell.model), cell.conditions
    if paper_column(cell.task) is None or backbone is None or "split" in conditions:  # the paper's are of test splits
        return []
    base, whole_test = backbone == "CLIP ViT-B/16", cell.protocol == "full"
    candidates: list[tuple[str, str]] = []
    if cell.method == "zero_shot" and whole_test:
        if conditions.get("class_prompts"):
            candidates = [("cupl_vit_l14", "CuPL")] if backbone == "CLIP ViT-L/14" else []
        else:
            candidates = [("zero_shot", backbone)]
    elif base and cell.method in ("coop", "clap"):
        candidates = [("few_shot", f"{conditions.get('shots')}-shot {_METHOD_NAMES[cell.method]}")]
    elif base and cell.method in ("mta", "tpt"):
        name = _METHOD_NAMES[cell.method]
        candidates = [("tta_mta_tpt", name), ("svd_per_dataset", name)]
    elif base and cell.method == "stata":
        candidates = [_stata_place(cell)]
    elif base and cell.method == "zlap" and whole_test:
        candidates = [("zlap_vit_b16", "ZLaP")]
    return [(table, title) for table, title in candidates if title in printed_groups(table)]


def _stata_place(cell: MeasuredCell) -> tuple[str, str]:
    """Row of the StatA tables, by the numbers in its name: "batch 64: low (2-10)", "low (gamma=0.1)", "separate"."""
    conditions = cell.conditions
    if cell.protocol == "online":
        gamma = CORRELATIONS.get(str(conditions.get("correlation")))
        ending = "separate" if gamma is None else f"(gamma={gamma:g})"
        return "stata_online", next((title for title in printed_groups("stata_online") if title.endswith(ending)), "")
    scenario = str(conditions.get("k_eff", "all"))
    if cell.protocol == "full" or scenario == "all":  # the whole test set in one batch
        return "stata_batch", "batch 1000: all classes"
    low, high = EFFECTIVE_CLASSES.get(scenario) or scenario.split("-")
    size = f"batch {conditions.get('batch_size')}:"
    titles = [t for t in printed_groups("stata_batch") if t.startswith(size) and t.endswith(f"({low}-{high})")]
    return "stata_batch", titles[0] if titles else ""


def paper_backbone(model: str) -> str | None:
    """The paper's name of a base model, None if it is none of its three."""
    name = model.rstrip("/").split("/")[-1]
    return next((row for row, pattern in PAPER_BACKBONES.items() if re.fullmatch(pattern, name)), None)


def paper_column(task: str) -> str | None:
    """The paper's name of a built-in task, None if it is not among its eleven."""
    record = builtin_record(task)
    name = None if record is None else record.get("display_name")
    return name if name in paper_tables()["_about"]["columns"] else None


def printed_groups(table: str) -> dict[str, dict[str, dict[str, float]]]:
    """A table of the paper as ``{group: {variant: {column: figure}}}``.

    Example:
        >>> printed_groups("zero_shot")["CLIP ViT-B/16"]["orion"]["EuroSAT"]
        51.33
    """
    groups: dict[str, dict[str, dict[str, float]]] = {}
    for row, figures in paper_tables()["tables"][table].items():
        title, variant = split_row(row)
        groups.setdefault(title, {})[variant] = figures
    return groups


def split_row(row: str) -> tuple[str, str]:
    """A row of the paper as group and variant: ``"MTA + ORION"`` is ``("MTA", "orion")``."""
    title, plus, addition = row.partition(" + ")
    if not plus:
        return row, BASELINE
    return title, {"ORION": ORION, "SVD (closed form)": "svd"}[addition]


def _paper_group(table: str, title: str, printed: dict[str, dict[str, float]], cells: list[MeasuredCell]) -> Group:
    paper = paper_tables()
    columns = [column for column in paper["_about"]["columns"] if column != AVERAGE]
    by_column: dict[str, list[MeasuredCell]] = {column: [] for column in columns}
    for cell in cells:
        by_column[str(paper_column(cell.task))].append(cell)
    gains = paper["printed_gains"].get(table, {}).get(f"{title} + ORION", {})
    lines = [_line(column, by_column[column], _figures(printed, column), gains.get(column)) for column in columns]
    run = {column: members for column, members in by_column.items() if members}
    averaged = average_line(run)
    if 1 < len(run) < len(columns):
        same = {
            variant: _mean([printed[variant][column] for column in _columns_of(run, variant)])
            for variant in averaged.measured
            if variant in printed
        }
        lines.append(replace(averaged, dataset=f"Average of the {len(run)} run", printed=same))
    whole = averaged if len(run) == len(columns) else Line("", is_average=True)
    recomputed = paper["recomputed_averages"].get(table, {})
    lines.append(
        replace(
            whole,
            dataset=AVERAGE,
            printed=_figures(printed, AVERAGE),
            printed_gain=gains.get(AVERAGE),
            recomputed={split_row(row)[1]: value for row, value in recomputed.items() if split_row(row)[0] == title},
        )
    )
    return Group(table, title, tuple(lines))


def _title(cell: MeasuredCell) -> str:
    """Method, model, protocol and its settings, without the method's options."""
    shown = ("shots", "class_prompts", "k_eff", "correlation", "batch_size", "num_tasks")
    details = [f"{name} {plain(cell.conditions[name])}" for name in shown if name in cell.conditions]
    protocol = [] if cell.protocol == "full" else [cell.protocol]
    return ", ".join([_METHOD_NAMES.get(cell.method, cell.method), cell.model, *protocol, *details])


def _other_group(title: str, cells: list[MeasuredCell]) -> Group:
    by_task: dict[str, list[MeasuredCell]] = {}
    for cell in cells:
        by_task.setdefault(cell.task, []).append(cell)
    lines = [_line(task, members) for task, members in sorted(by_task.items())]
    if len(by_task) > 1:
        lines.append(replace(average_line(by_task), dataset=f"Average of {len(by_task)}"))
    return Group("other", title, tuple(lines))


def _line(
    dataset: str, cells: list[MeasuredCell], printed: dict[str, float] | None = None, printed_gain: float | None = None
) -> Line:
    measured, gains = {}, {}
    for variant in ordered({cell.prototypes for cell in cells}):
        runs, pairs = _runs(cells, variant), _pairs(cells, variant)
        measured[variant] = _measured([cell.top1 for cell in runs], runs[0].half_width)
        if variant != BASELINE and pairs:
            differences = [ours.top1 - base.top1 for ours, base in pairs]
            gains[variant] = _measured(differences, pairs[0][0].gain_half_width)
    images = {cell.num_images for cell in cells}
    return Line(
        dataset,
        measured,
        gains,
        printed or {},
        printed_gain,
        num_images=images.pop() if len(images) == 1 else None,
    )


def _runs(cells: Iterable[MeasuredCell], variant: str) -> list[MeasuredCell]:
    return sorted((c for c in cells if c.prototypes == variant), key=lambda c: (c.seed, c.adapter or ""))


def _pairs(cells: Iterable[MeasuredCell], variant: str) -> list[tuple[MeasuredCell, MeasuredCell]]:
    """Cells of a variant, each with the baseline's cell of the same seed, setting and images."""
    cells = list(cells)
    baseline = {cell.pair: cell for cell in cells if cell.prototypes == BASELINE}
    found = [(cell, baseline.get(cell.pair)) for cell in _runs(cells, variant)]
    return [(ours, base) for ours, base in found if base is not None]


def average_line(by_dataset: Mapping[str, list[MeasuredCell]]) -> Line:
    """Means over datasets, and intervals over runs, if all datasets have as many: the n-th runs make one average."""
    measured, gains = {}, {}
    for variant in ordered({cell.prototypes for cells in by_dataset.values() for cell in cells}):
        values = [[cell.top1 for cell in _runs(cells, variant)] for cells in by_dataset.values()]
        measured[variant] = _over_datasets([runs for runs in values if runs])
        values = [[a.top1 - b.top1 for a, b in _pairs(cells, variant)] for cells in by_dataset.values()]
        if variant != BASELINE and any(values):
            gains[variant] = _over_datasets([runs for runs in values if runs])
    return Line("", measured, gains, datasets=len(by_dataset), is_average=True)


def _over_datasets(values: list[list[float]]) -> Measured:
    """``values``: of each dataset its runs, by seed."""
    mean, runs = _mean([_mean(of_dataset) for of_dataset in values]), len(values[0])
    if any(len(of_dataset) != runs for of_dataset in values):
        return Measured(mean, None, min(map(len, values)), len(values))
    spread = _measured([_mean(of_run) for of_run in zip(*values, strict=True)])
    return Measured(mean, spread.half_width, runs, len(values))


def _measured(values: Sequence[float], own_half_width: float | None = None) -> Measured:
    """Mean and interval over runs; runs that all came out the same say nothing of it, then the cell's own is taken."""
    summary = summarize(values)
    half = own_half_width if len(set(values)) == 1 else (summary.high - summary.low) / 2
    return Measured(summary.mean, half, len(values))


def _columns_of(run: Mapping[str, list[MeasuredCell]], variant: str) -> list[str]:
    return [column for column, cells in run.items() if any(cell.prototypes == variant for cell in cells)]


def _figures(printed: dict[str, dict[str, float]], column: str) -> dict[str, float]:
    return {variant: figures[column] for variant, figures in printed.items() if column in figures}


def ordered(variants: Iterable[str]) -> list[str]:
    """Kinds of prototypes in the order of the tables."""
    known = list(PROTOTYPES)
    return sorted(variants, key=lambda v: (known.index(v) if v in known else len(known), v))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def plain(value: Any) -> str:
    """A setting's value as people write it."""
    return value if isinstance(value, str) else canonical(value)


def label(variant: str) -> str:
    """Kind of prototypes as tables call it."""
    return PROTOTYPES.get(variant, variant)


def shown(value: Measured | None, line: Line, signed: bool = False) -> str:
    """Mean and interval; in an average also over how many datasets, if not over all that its line is of."""
    if value is None:
        return ""
    text = f"{value.mean:+.2f}" if signed else f"{value.mean:.2f}"
    if value.half_width is not None:
        text += f" ± {value.half_width:.2f}"
    return text if value.datasets == line.datasets else f"{text} ({value.datasets})"

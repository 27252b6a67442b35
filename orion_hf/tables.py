"""Measured cells as tables, in the layout of the paper's own.

Means and 95 % intervals (Student's t) are over runs; a gain is the mean difference of pairs, the same images and the
same seed with ORION's prototypes and with CLIP's. Runs differ in their seed: two cells of one seed, on other images or
with another adapter, are lines of their own. Measured figures and the paper's are kept apart, and nothing that was not
run is filled in.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from . import methods
from .card import paper_tables
from .cells import BASELINE, ORION, MeasuredCell, canonical
from .protocols import CORRELATIONS, effective_classes, summarize
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
_OBVIOUS_MODELS = {"CLIP ViT-B/16": "openai/clip-vit-base-patch16", "CLIP ViT-L/14": "openai/clip-vit-large-patch14"}


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
        printed_datasets: of an average: how many datasets the paper's figures are of, where fewer than ``datasets``.
        datasets: of an average: how many datasets were run.
        note: what tells the line from others of the same dataset.
        is_extra: whether another line of the dataset is the one that averages are of.
    """

    dataset: str
    measured: Mapping[str, Measured] = field(default_factory=dict)
    gains: Mapping[str, Measured] = field(default_factory=dict)
    printed: Mapping[str, float] = field(default_factory=dict)
    printed_gain: float | None = None
    recomputed: Mapping[str, float] = field(default_factory=dict)
    printed_datasets: Mapping[str, int] = field(default_factory=dict)
    num_images: int | None = None
    datasets: int = 1
    note: str = ""
    is_average: bool = False
    is_extra: bool = False

    @property
    def name(self) -> str:
        return f"{self.dataset} ({self.note})" if self.note else self.dataset


@dataclass(frozen=True)
class Group:
    """Lines that share a method and its setting, such as "4-shot CLAP"; ``table`` is "other" if not of the paper.

    ``about`` says what the title does not: a model, options that are not the published ones; ``method`` and ``model``
    are those of what was run.
    """

    table: str
    title: str
    lines: tuple[Line, ...]
    about: str = ""
    method: str = ""
    model: str = ""

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
    chosen, crowded = {}, set()
    for place, settings in placed.items():
        # Two settings never share a table: the published one is the paper's, or that with most cells; the rest are
        # runs of their own.
        chosen[place] = min(settings.values(), key=lambda members: (bool(unusual(members[0])), -len(members)))
        others |= {setting: members for setting, members in settings.items() if members is not chosen[place]}
        if len(settings) > 1:
            crowded.add(place)
    groups = [
        _paper_group(table, title, printed, chosen.get((table, title), []), (table, title) in crowded)
        for table in PAPER_TABLES
        for title, printed in printed_groups(table).items()
    ]
    titles = [_title(members[0]) for members in others.values()]
    for title, members in zip(titles, others.values(), strict=True):
        rivals = [each[0] for other, each in zip(titles, others.values(), strict=True) if other == title]
        keys = sorted({key for cell in rivals for key in cell.conditions})
        details = [
            f"{key} {plain(members[0].conditions.get(key))}"
            for key in keys
            if len({canonical(cell.conditions.get(key)) for cell in rivals}) > 1
        ]
        groups.append(_other_group(f"{title} ({', '.join(details)})" if details else title, members))
    return groups


@cache
def _published() -> dict[str, dict[str, Any]]:
    return {name: info.options for name, info in methods.available().items()}


def unusual(cell: MeasuredCell) -> dict[str, Any]:
    """Options and conditions of a cell that are not the defaults, which are the published ones.

    Example:
        >>> conditions = {"alpha": 2.0, "max_iter": 10, "logit_scale": 100.0}
        >>> unusual(MeasuredCell("dtd", "openai/clip-vit-base-patch16", "stata", "clip", 44.0, conditions=conditions))
        {'alpha': 2.0}
    """
    usual = {key: value for key, value in _published().get(cell.method, {}).items() if key != "logit_scale"}
    usual |= {"num_views": 64, "passes": 10 if cell.method.startswith("tip_adapter") else 20}
    usual |= {"mixed_precision": "no", "split": "test", "support_split": "train"}
    if cell.protocol != "full":
        usual |= {"batch": {"num_tasks": 1000}, "online": {"num_tasks": 100, "batch_size": 128}}.get(cell.protocol, {})
    return {
        key: value
        for key, value in sorted(cell.conditions.items())
        if key in usual and json.loads(canonical(usual[key])) != value  # JSON has lists for tuples
    }


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
    if conditions.get("class_prompts"):
        cupl = cell.method == "zero_shot" and whole_test and backbone == "CLIP ViT-L/14"
        candidates = [("cupl_vit_l14", "CuPL")] if cupl else []
    elif cell.method == "zero_shot" and whole_test:
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
        correlation = str(conditions.get("correlation"))
        gamma = CORRELATIONS.get(correlation, correlation)
        ending = "separate" if gamma is None else f"(gamma={gamma})"
        return "stata_online", next((title for title in printed_groups("stata_online") if title.endswith(ending)), "")
    scenario = str(conditions.get("k_eff", "all"))
    classes = None if cell.protocol == "full" else effective_classes(scenario)
    if classes is None:  # the whole test set in one batch
        return "stata_batch", "batch 1000: all classes"
    low, high = classes
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


def _paper_group(
    table: str, title: str, printed: dict[str, dict[str, float]], cells: list[MeasuredCell], crowded: bool
) -> Group:
    paper = paper_tables()
    columns = [column for column in paper["_about"]["columns"] if column != AVERAGE]
    by_column: dict[str, list[MeasuredCell]] = {column: [] for column in columns}
    for cell in cells:
        by_column[str(paper_column(cell.task))].append(cell)
    gains = paper["printed_gains"].get(table, {}).get(f"{title} + ORION", {})
    lines: list[Line] = []
    run: dict[str, list[MeasuredCell]] = {}
    for column, members in by_column.items():
        found = _lines(column, members)
        first = replace(found[0], printed=_figures(printed, column), printed_gain=gains.get(column))
        lines += [first, *found[1:]]
        if members:
            run[column] = series_of(members)[0]
    averaged = average_line(run)
    whole = {variant for variant, value in averaged.measured.items() if value.datasets == len(columns)}
    if len(run) > 1 and whole != set(averaged.measured):
        same = {variant: _columns_of(run, variant) for variant in averaged.measured if variant in printed}
        lines.append(
            replace(
                averaged,
                dataset=f"Average of the {len(run)} run",
                printed={key: _mean([printed[key][column] for column in names]) for key, names in same.items()},
                printed_datasets={key: len(names) for key, names in same.items() if len(names) != len(run)},
            )
        )
    recomputed = paper["recomputed_averages"].get(table, {})
    lines.append(
        Line(
            AVERAGE,
            {variant: value for variant, value in averaged.measured.items() if variant in whole},
            {variant: value for variant, value in averaged.gains.items() if variant in whole},
            _figures(printed, AVERAGE),
            gains.get(AVERAGE),
            {split_row(row)[1]: value for row, value in recomputed.items() if split_row(row)[0] == title},
            datasets=len(columns),
            is_average=True,
        )
    )
    if not cells:
        return Group(table, title, tuple(lines))
    model = cells[0].model
    said = [] if _OBVIOUS_MODELS.get(str(paper_backbone(model))) == model else [f"Model: {model}."]
    said += _said_of(cells[0], lines)
    said += ["What was run of it in other settings or with other models is under Other runs."] if crowded else []
    return Group(table, title, tuple(lines), " ".join(said), cells[0].method, model)


def _said_of(cell: MeasuredCell, lines: Sequence[Line]) -> list[str]:
    different = ", ".join(f"{key} {plain(value)}" for key, value in unusual(cell).items())
    said = [f"Not the published defaults: {different}."] if different else []
    if any(line.is_extra for line in lines) and any(line.is_average and line.measured for line in lines):
        said.append("Averages are of the first line of each dataset.")
    return said


def _title(cell: MeasuredCell) -> str:
    """Method, model, protocol and its settings, without the method's options."""
    of_protocol = () if cell.protocol == "full" else ("k_eff", "correlation", "batch_size", "num_tasks")
    shown = ("shots", "class_prompts", *of_protocol)
    details = [f"{name} {plain(cell.conditions[name])}" for name in shown if name in cell.conditions]
    protocol = [] if cell.protocol == "full" else [cell.protocol]
    return ", ".join([method_name(cell.method), cell.model, *protocol, *details])


def method_name(method: str) -> str:
    """A method as its authors write it."""
    return _METHOD_NAMES.get(method, method)


def _other_group(title: str, cells: list[MeasuredCell]) -> Group:
    by_task: dict[str, list[MeasuredCell]] = {}
    for cell in cells:
        by_task.setdefault(cell.task, []).append(cell)
    lines = [line for task, members in sorted(by_task.items()) for line in _lines(task, members)]
    if len(by_task) > 1:
        run = {task: series_of(members)[0] for task, members in by_task.items()}
        lines.append(replace(average_line(run), dataset=f"Average of {len(by_task)}"))
    about = " ".join(_said_of(cells[0], lines))
    return Group("other", title, tuple(lines), about, cells[0].method, cells[0].model)


def series_of(cells: Sequence[MeasuredCell]) -> list[list[MeasuredCell]]:
    """Cells of one task and setting, parted so that in each part they are runs: no seed is there twice.

    Parts differ in what :attr:`MeasuredCell.facts` has. Where that leaves a seed twice, they differ in the adapter (the
    cells without one are in all of them), else in the images, the file, the support set. The part with most images
    comes first, then that with most cells.
    """
    parts = _parted([list(cells)], lambda cell: canonical(cell.facts), always=True)
    parts = _parted(parts, lambda cell: cell.adapter)
    for name in ("fingerprint", "support"):
        parts = _parted(parts, lambda cell, name=name: str(cell.draw.get(name)))  # type: ignore[misc]
    parts = _parted(parts, lambda cell: cell.source)
    parts = _parted(parts, lambda cell: canonical(cell.draw))
    parts = _parted(parts, lambda cell: f"{cell.id}")
    whole = [part for part in parts if not any(part is not other and _is_within(part, other) for other in parts)]
    return sorted(whole, key=lambda part: (-(part[0].num_images or 0), -len(part)))


def _parted(
    parts: list[list[MeasuredCell]], key: Callable[[MeasuredCell], str | None], always: bool = False
) -> list[list[MeasuredCell]]:
    found: list[list[MeasuredCell]] = []
    for part in parts:
        kinds = [(cell.prototypes, cell.seed) for cell in part]
        values = [value for value in dict.fromkeys(map(key, part)) if value is not None]
        if not values or (not always and len(set(kinds)) == len(kinds)):
            found.append(part)
            continue
        for value in values:
            own = [cell for cell in part if key(cell) == value]
            seeds = {cell.seed for cell in own}
            found.append([cell for cell in part if cell in own or (key(cell) is None and cell.seed in seeds)])
    return found


def _is_within(part: list[MeasuredCell], other: list[MeasuredCell]) -> bool:
    return len(part) < len(other) and all(cell in other for cell in part)


def notes_of(parts: Sequence[Sequence[MeasuredCell]]) -> list[str]:
    """What tells each of the parts of a task from the others; what people know it by first, digests if need be."""
    if len(parts) < 2:
        return [""] * len(parts)
    facts = [
        {
            "images": f"{part[0].num_images} images",
            "adapter": _adapters(part, lambda cell: cell.adapter_name),
            **{name: _named(name, value) for name, value in part[0].facts.items() if name != "images"},
            "adapter weights": _adapters(part, lambda cell: (cell.adapter or "")[:12] or None),
            "file": f"file {part[0].source}",
            **{name: _named(name, value) for name, value in part[0].draw.items()},
            "seed": f"seed {part[0].seed}",
        }
        for part in parts
    ]
    notes = ["" for _ in parts]
    for name in facts[0]:
        values = [each[name] for each in facts]
        needed = name in ("images", "adapter", "source", "class_prompts") or len(set(notes)) < len(notes)
        if needed and len(set(values)) > 1:
            notes = [", ".join(filter(None, pair)) for pair in zip(notes, values, strict=True)]
    return notes


def _adapters(part: Sequence[MeasuredCell], name: Callable[[MeasuredCell], str | None]) -> str:
    names = dict.fromkeys(filter(None, map(name, part)))
    return f"adapter {', '.join(names)}" if names else ""


def _named(name: str, value: Any) -> str:
    text = plain(value)
    return "" if value is None else f"{name} {text if name in ('source', 'class_prompts') else text[:12]}"


def _lines(dataset: str, cells: Sequence[MeasuredCell]) -> list[Line]:
    """A line for each series of a task; one that is empty if it was not run."""
    parts = series_of(cells) if cells else [[]]
    return [
        replace(_line(dataset, part), note=note, is_extra=number > 0)
        for number, (part, note) in enumerate(zip(parts, notes_of(parts) if cells else [""], strict=True))
    ]


def _line(dataset: str, cells: Sequence[MeasuredCell]) -> Line:
    measured, gains = {}, {}
    for variant in ordered({cell.prototypes for cell in cells}):
        runs, pairs = _runs(cells, variant), _pairs(cells, variant)
        measured[variant] = _measured([cell.top1 for cell in runs], runs[0].half_width)
        if variant != BASELINE and pairs:
            first = pairs[0][0]
            together = len(pairs) > 1 and first.pooled == {ours.id for ours, _ in pairs}
            own = first.pooled_gain_half_width if together else first.gain_half_width
            gains[variant] = _measured([ours.top1 - base.top1 for ours, base in pairs], own)
    images = {cell.num_images for cell in cells}
    return Line(dataset, measured, gains, num_images=images.pop() if len(images) == 1 else None)


def _runs(cells: Iterable[MeasuredCell], variant: str) -> list[MeasuredCell]:
    return sorted((c for c in cells if c.prototypes == variant), key=lambda c: (c.seed, c.adapter or ""))


def _pairs(cells: Iterable[MeasuredCell], variant: str) -> list[tuple[MeasuredCell, MeasuredCell]]:
    """Cells of a variant, each with the baseline's cell of the same seed, setting, images and support set."""
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
    equal = max(values) - min(values) < 1e-9  # differences of floats
    half = own_half_width if equal else (summary.high - summary.low) / 2
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
    """Mean and interval; in an average also over how many datasets, if not over all that its line is of.

    A gain from fewer pairs than its line has runs says of how many.
    """
    if value is None:
        return ""
    text = f"{value.mean:+.2f}" if signed else f"{value.mean:.2f}"
    if value.half_width is not None:
        text += f" ± {value.half_width:.2f}"
    if value.datasets != line.datasets:
        return f"{text} ({value.datasets})"
    if signed and any(value.runs < measured.runs for measured in line.measured.values()):
        return f"{text} ({value.runs} {'pair' if value.runs == 1 else 'pairs'})"
    return text

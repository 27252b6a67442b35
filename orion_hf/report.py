"""The paper's tables from one's own runs: what was measured here beside what the paper printed.

    cells = read_results(["out/eurosat/results.json", "out/dtd"])
    write_text("report.html", report(cells, "html"))

Runs that the paper has no table for are laid out like the others, without its columns.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from .card import paper_tables
from .cells import BASELINE, ORION, MeasuredCell, read_header
from .configuration_orion import ORION_CONFIG_NAME, OrionConfig
from .escaping import printable
from .layout import Block, Heading, Paragraph, Picture, Table, as_html, as_latex, as_markdown, picture
from .repository import PROTOTYPES_NAME, read_prototypes, read_tensors
from .sweep import SweepPoint, printed_sweep, sweep_curves, sweep_points, sweep_table
from .tables import (
    AVERAGE,
    PAPER_TABLES,
    Group,
    Line,
    Measured,
    groups_of,
    label,
    method_name,
    ordered,
    paper_backbone,
    plain,
    shown,
    split_row,
)
from .training_log import LOG_NAME, read_log, steps_of, validations_of

Format = Literal["md", "html", "latex", "csv"]
_LARGEST_PICTURE = 8 * 2**20
# Of the figures of a model, by the names of their files.
CAPTIONS = {
    "accuracy": "Accuracy on the validation images against displacement, epoch by epoch.",
    "displacement": "How far classes moved, and which moved apart.",
    "gram": "Cosines between classes, before and after.",
    "prototypes": "Image features with the prototypes before (x) and after (o).",
    "training": "The terms of the loss, cosines and displacement by epoch, as they were before each step.",
}
_PNG = b"\x89PNG\r\n\x1a\n"


def report(
    cells: Sequence[MeasuredCell], format: Format = "md", *, files: Sequence[Path] = (), full: bool = False
) -> str:
    """The report as text.

    Args:
        cells: of :func:`read_results`.
        format: "md", "html", "latex", or "csv" with one line for each figure.
        files: the results files; their headers are shown, and on the HTML page the figures that lie beside them.
        full: show the tables of the paper of which nothing was run as well; "csv" does not leave them out.

    Example:
        >>> print(report(read_results(["out/demo"])))  # doctest: +SKIP
    """
    groups = groups_of(cells)
    if format == "csv":
        return _as_csv(groups if full else [group for group in groups if group.was_run], sweep_points(cells, True))
    blocks = [Paragraph(_preface(cells)), *_table_blocks(groups, full), *_sweep_blocks(cells)]
    if format == "html":
        curves = _sweep_curves(cells)
        drawn = {title.split(":")[0] for title in curves}
        sweeps = {cell.source for cell in cells if cell.sweep is not None}
        blocks += [*_figure_blocks(groups, curves), *_pictures_beside(files, sweeps, drawn)]
    blocks += _misprint_blocks(groups, full) + _source_blocks(files)
    if format == "html":
        return as_html("ORION: measured beside printed", blocks)
    return {"md": as_markdown, "latex": as_latex}[format](blocks)


def _preface(cells: Sequence[MeasuredCell]) -> str:
    tasks, models = sorted({cell.task for cell in cells}), sorted({cell.model for cell in cells})
    measured = sum(cell.error is None for cell in cells)
    failed = f"{len(cells) - measured} runs of sweeps failed and have none. " if measured < len(cells) else ""
    return (
        f"{measured} measured cells: {len(tasks)} {'task' if len(tasks) == 1 else 'tasks'}, {', '.join(models)}. "
        f"{failed}Top-1 accuracy in percent, mean and half of the 95 % interval: over runs, or over images, tasks or "
        "streams where there is one run or all are equal. Runs differ in their seed; where there are several, their "
        "number is beside the means. Gains are "
        "mean differences of pairs: the same images and seed with the other prototypes and with CLIP's. Columns "
        "called paper hold what the paper printed (in an average of some datasets, the mean of what it printed of "
        "those); an empty cell was not run here or not printed there."
    )


def _table_blocks(groups: Sequence[Group], full: bool) -> list[Block]:
    blocks: list[Block] = []
    for key, title in {**PAPER_TABLES, "other": "Other runs"}.items():
        members = [group for group in groups if group.table == key]
        shown = [group for group in members if full or group.was_run]
        if shown:
            blocks.append(Heading(title))
            left_out = [group.title for group in members if group not in shown]
            if left_out:
                blocks.append(Paragraph(f"Not run: {', '.join(left_out)}."))
        for group in shown:
            about = [Paragraph(group.about)] if group.about else []
            blocks += [Heading(group.title, 2), *about, group_table(group)]
    missing = [title for key, title in PAPER_TABLES.items() if not any(g.table == key and g.was_run for g in groups)]
    if missing and not full:
        blocks += [Heading("Tables of the paper of which nothing was run"), Paragraph(f"{'; '.join(missing)}.")]
    return blocks


def group_table(group: Group) -> Table:
    """The table of a group: a line a dataset; columns that would be empty are left out."""
    lines = group.lines
    measured = ordered({variant for line in lines for variant in line.measured})
    printed = ordered({variant for line in lines for variant in line.printed})
    columns: dict[str, list[str]] = {}

    def add_measured(variant: str) -> None:
        columns[label(variant)] = [shown(line.measured.get(variant), line) for line in lines]
        if any(variant in line.gains for line in lines):
            name = "gain" if variant == ORION else f"gain of {label(variant)}"
            columns[name] = [shown(line.gains.get(variant), line, signed=True) for line in lines]

    # What is looked for first stands first: on a phone the rest is a swipe away.
    for variant in (BASELINE, ORION):
        if variant in measured:
            add_measured(variant)
    for variant in printed:
        columns[f"paper: {label(variant)}"] = [_printed(line, variant) for line in lines]
    if any(line.printed_gain is not None for line in lines):
        columns["paper: gain"] = ["" if line.printed_gain is None else _signed(line.printed_gain) for line in lines]
    for variant in measured:
        if variant not in (BASELINE, ORION):
            add_measured(variant)
    if any(line.num_images for line in lines):
        columns["images"] = ["" if line.num_images is None else str(line.num_images) for line in lines]
    if any(value.runs > 1 for line in lines for value in line.measured.values()):
        columns["runs"] = [_runs(line) for line in lines]
    rows = [(line.name, *(column[number] for column in columns.values())) for number, line in enumerate(lines)]
    strong = frozenset(number for number, line in enumerate(lines) if line.is_average)
    return Table(("dataset", *columns), tuple(rows), strong=strong)


def _runs(line: Line) -> str:
    """How many runs the means of a line are over; "1-3" if not all over as many."""
    found = sorted({value.runs for value in line.measured.values()})
    return "-".join(map(str, found[:1] + found[1:][-1:]))


def _printed(line: Line, variant: str) -> str:
    if variant not in line.printed:
        return ""
    figure = line.printed[variant]
    if line.is_average and line.dataset != AVERAGE:
        count = line.printed_datasets.get(variant)
        return f"{figure:.2f}" if count is None else f"{figure:.2f} ({count})"
    return f"{figure} †" if _is_misprint(line, variant) else f"{figure}"


def _is_misprint(line: Line, variant: str) -> bool:
    """Whether a printed average is further from the mean of the printed figures than rounding explains."""
    return variant in line.recomputed and abs(line.printed[variant] - line.recomputed[variant]) > 0.005 + 1e-9


def _signed(gain: float) -> str:
    return f"+{gain}" if gain > 0 else f"{gain}"


def _misprint_blocks(groups: Sequence[Group], full: bool) -> list[Block]:
    """What the paper printed of the tables shown that its own figures do not give."""
    shown = {(group.table, group.title) for group in groups if full or group.was_run}
    rows = [
        (PAPER_TABLES[m["table"]], m["row"], m["what"], m["printed"], m["recomputed"])
        for m in paper_tables()["mismatches"]
        if (m["table"], split_row(m["row"])[0]) in shown
    ]
    if not rows:
        return []
    return [
        Heading("Misprints in the paper's tables shown here"),
        Paragraph(
            "Recomputed from the 11 figures, or pairs of figures, that the paper itself prints. † marks averages."
        ),
        Table(("table", "row", "what", "printed", "recomputed"), tuple(rows), names=3),
    ]


def _source_blocks(files: Sequence[Path]) -> list[Block]:
    if not files:
        return []
    rows = []
    for path in files:
        header = read_header(path)
        runs = header.get("runs") if isinstance(header.get("runs"), list) else []
        said = [f"{key}: {value}" for key, value in header.items() if isinstance(value, (str, int, float))]
        said += [str(run["command"]) for run in runs or () if isinstance(run, dict) and "command" in run]
        rows.append((str(path), "; ".join(said)[:2000]))
    return [Heading("Sources"), Table(("file", "what it says of itself"), tuple(rows), names=2, wrapped=True)]


def _as_csv(groups: Sequence[Group], points: Sequence[SweepPoint]) -> str:
    """One line for each dataset and kind of prototypes, and for each point of a sweep; figures in full, never rounded.

    "detail" is what tells a line from others of its dataset, or a point of a sweep from the others of its model.
    """
    buffer = io.StringIO()
    columns = [
        "table", "group", "dataset", "prototypes", "measured", "half_width", "runs", "datasets", "images",
        "gain", "gain_half_width", "gain_runs", "paper", "paper_gain", "paper_recomputed",
        "model", "about", "detail", "failed",
    ]  # fmt: skip
    writer = csv.DictWriter(buffer, columns, lineterminator="\n")
    writer.writeheader()
    for group in groups:
        for line in group.lines:
            for variant in ordered({*line.measured, *line.printed}):
                measured, gain = line.measured.get(variant), line.gains.get(variant)
                row: dict[str, Any] = {
                    "table": group.table,
                    "group": _inert(group.title),
                    "dataset": _inert(line.dataset),
                    "prototypes": _inert(variant),
                    "images": line.num_images,
                    "paper": line.printed.get(variant),
                    "paper_gain": line.printed_gain if variant == ORION else None,
                    "paper_recomputed": line.recomputed.get(variant),
                    "model": _inert(group.model),
                    "about": _inert(group.about),
                    "detail": _inert(line.note),
                }
                writer.writerow(row | _csv_figures(measured, gain))
    for point in points:
        row = {
            "table": "sweep",
            "group": _inert(f"Sweep, {point.model}"),
            "dataset": _inert(", ".join(point.tasks)),
            "prototypes": ORION,
            "paper": printed_sweep(point),
            "model": _inert(point.model),
            "detail": _inert(", ".join(f"{name} {plain(value)}" for name, value in point.described.items())),
            "failed": point.failed,
        }
        writer.writerow(row | _csv_figures(point.accuracy, point.gain))
    return buffer.getvalue()


def _csv_figures(measured: Measured | None, gain: Measured | None) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    if measured is not None:
        figures |= {"measured": measured.mean, "half_width": measured.half_width}
        figures |= {"runs": measured.runs, "datasets": measured.datasets}
    if gain is not None:
        figures |= {"gain": gain.mean, "gain_half_width": gain.half_width, "gain_runs": gain.runs}
    return figures


def _inert(text: str) -> str:
    """A name that a spreadsheet does not take for a formula."""
    text = printable(text)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def _sweep_blocks(cells: Sequence[MeasuredCell]) -> list[Block]:
    blocks: list[Block] = []
    points = sweep_points(cells, with_failed=True)
    for model in dict.fromkeys(point.model for point in points):
        members = [point for point in points if point.model == model]
        blocks += [Heading(f"Sweep, {model}", 2), sweep_table(members)]
    note = Paragraph(
        "Averages over the tasks that were run, their number in brackets if there are several. The paper's axis "
        "is log10(lambda / 2); it states four of its points, averages of 11 datasets. Failed: runs that broke off and "
        "have no accuracy."
    )
    return [Heading("Sweeps"), note, *blocks] if blocks else []


# Figures


def _sweep_curves(cells: Sequence[MeasuredCell]) -> dict[str, Any]:
    """Title -> figure; none without matplotlib."""
    try:
        return sweep_curves(sweep_points(cells))
    except ImportError:
        return {}


def _figure_blocks(groups: Sequence[Group], curves: dict[str, Any]) -> list[Block]:
    """Overview bars and the curves of sweeps; without matplotlib, which is an extra, a line that says so."""
    try:
        from .plots import method_bars
    except ImportError:
        return [Paragraph("No figures: pip install 'orion-hf[plots]'.")]
    bars: dict[str, dict[str, float]] = {}
    names = {BASELINE: "baseline", "averaged": "averaged prompts", ORION: "ORION"}
    for group in groups:
        if not group.was_run or group.table == "svd_per_dataset":
            continue
        last = [line for line in group.lines if line.measured and not line.is_extra][-1]
        sizes = {last.measured[variant].datasets for variant in names if variant in last.measured}
        if len(sizes) == 1 and len(last.measured) > 1:  # bars side by side are of the same datasets
            bar = {names[v]: m.mean for v, m in last.measured.items() if v in names}
            bars[_bar_label(group, sizes.pop(), bars)] = bar
    blocks: list[Block] = []
    if bars:
        blocks.append(picture(method_bars(bars), "Averages over the datasets that were run, gains over the baseline."))
    for title, figure in curves.items():
        blocks.append(picture(figure, f"Accuracy against {title}."))
    return [Heading("Figures"), *blocks] if blocks else []


def _bar_label(group: Group, datasets: int, taken: Container[str]) -> str:
    """Method, model and number of datasets, in few words; numbered if another group has the same."""
    method, setting, model = method_name(group.method), group.title, paper_backbone(group.model)
    if group.table == "zero_shot":
        setting = ""
    elif group.table == "other":
        setting = setting.removeprefix(f"{method}, {group.model}").lstrip(", ")
    elif setting.endswith(method):  # "4-shot CLAP"
        method, setting = setting, ""
    if model in (None, "MetaCLIP"):  # of which there are several
        model = re.split("[/:]", group.model.rstrip("/"))[-1]
    words = [method, setting, model, f"{datasets} {'dataset' if datasets == 1 else 'datasets'}"]
    name = ", ".join(filter(None, words))
    numbered = (f"{name}, #{number}" for number in itertools.count(2))
    return next(each for each in itertools.chain([name], numbered) if each not in taken)


def _pictures_beside(files: Sequence[Path], sweeps: Container[str], drawn: Container[str]) -> list[Block]:
    """PNGs in the folder ``plots`` beside a results file; drawn from the adapter there if it has none.

    Args:
        files: results files.
        sweeps: those of them that hold sweeps.
        drawn: axes of the sweeps' curves that are on the page already.
    """
    blocks: list[Block] = []
    for file in files:
        found: list[Block] = [
            Picture(path.read_bytes(), CAPTIONS.get(path.stem, path.stem))
            for path in sorted((file.parent / "plots").glob("*.png"))
            if path.stat().st_size < _LARGEST_PICTURE
            and path.read_bytes()[:8] == _PNG
            and not (str(file) in sweeps and re.sub("-[0-9]+$", "", path.stem) in drawn)
        ] or adapter_pictures(file.parent)
        if found:
            blocks += [Heading(f"What happened to the classes: {file.parent.name}"), *found]
    return blocks


def adapter_pictures(folder: Path) -> list[Block]:
    """Figures of the model saved in ``folder``, as far as its files go."""
    if not (folder / ORION_CONFIG_NAME).is_file() or not (folder / PROTOTYPES_NAME).is_file():
        return []
    task = OrionConfig.from_json_file(folder / ORION_CONFIG_NAME).task
    x = read_tensors(folder / PROTOTYPES_NAME).get("prototypes")
    if task is None or x is None:
        return []
    after, before = read_prototypes(folder / PROTOTYPES_NAME, (task.num_classes, x.shape[-1]))
    return class_pictures(before, after, task.class_names, folder / LOG_NAME)


def class_pictures(before: Tensor, after: Tensor, class_names: Sequence[str], log: Path | None = None) -> list[Block]:
    """Gram matrices, displacement and, from a training log, the curves of a run; none without matplotlib.

    Args:
        before: V, ``(K, d)``.
        after: X, ``(K, d)``.
        class_names: K names.
        log: a ``training_log.jsonl``, if there is one.
    """
    try:
        from .plots import accuracy_against_displacement, displacement_chart, gram_heatmaps, training_curves
    except ImportError:
        return [Paragraph("No figures: pip install 'orion-hf[plots]'.")]
    blocks: list[Block] = []
    if len(class_names) > 1:
        heatmaps, moved = gram_heatmaps(before, after, class_names), displacement_chart(before, after, class_names)
        blocks += [
            picture(heatmaps, CAPTIONS["gram"]),
            picture(moved, CAPTIONS["displacement"]),
        ]
    rows = [] if log is None else read_log(log)
    if validations_of(rows):
        blocks.append(picture(accuracy_against_displacement(rows), CAPTIONS["accuracy"]))
    if steps_of(rows):
        blocks.append(picture(training_curves(rows), CAPTIONS["training"]))
    return blocks

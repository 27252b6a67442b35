"""Sweeps: zero-shot accuracy against the settings of the training, as a table and as the paper's curve."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .card import paper_tables
from .cells import ORION, MeasuredCell, canonical
from .layout import Table
from .tables import Line, Measured, average_line, notes_of, paper_backbone, paper_column, plain, series_of, shown

_LAMBDA = "orthogonality_weight"


@dataclass(frozen=True)
class SweepPoint:
    """Zero-shot accuracy with one choice of the swept settings, averaged over tasks, and its gain over CLIP.

    Attributes:
        settings: those that the sweep varied.
        accuracy: None if all runs failed.
        tasks: that were measured.
        failed: number of runs that have no accuracy, because their training broke off.
        fixed: settings that the sweep did not vary, of which other points of the same model have other values.
        note: what else tells the point from others with its settings, such as the number of images.
    """

    model: str
    settings: Mapping[str, Any]
    accuracy: Measured | None
    gain: Measured | None
    tasks: tuple[str, ...]
    failed: int = 0
    fixed: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def described(self) -> dict[str, Any]:
        """All that tells it from the other points of its model."""
        return {**self.settings, **self.fixed, **({"measured on": self.note} if self.note else {})}


def sweep_points(cells: Sequence[MeasuredCell], with_failed: bool = False) -> list[SweepPoint]:
    """Points of all sweeps, those of a model together, ordered by their settings.

    Args:
        cells: of :func:`~orion_hf.cells.read_results`.
        with_failed: whether points of which all runs failed are among them.
    """
    swept = [cell for cell in cells if cell.sweep is not None]
    choices: dict[tuple, list[MeasuredCell]] = {}
    for cell in swept:
        if cell.prototypes == ORION:
            choices.setdefault((cell.setting, canonical(cell.training)), []).append(cell)
    points, notes = [], _image_notes(swept)
    for (setting, _), tuned in choices.items():
        # The baseline is not trained: all sweeps that measured the same images share it.
        other = [cell for cell in swept if cell.setting == setting and cell.prototypes != ORION]
        fixed = _differing(tuned[0], [members[0] for members in choices.values()])
        points += _points_of(tuned, other, fixed, notes)
    points = [point for point in points if with_failed or point.accuracy is not None]
    return sorted(points, key=lambda point: (point.model, [_sortable(v) for v in point.described.values()]))


def _differing(cell: MeasuredCell, others: Iterable[MeasuredCell]) -> dict[str, Any]:
    """What else than the swept settings tells a cell from others of its model that swept the same settings."""

    swept = set(cell.sweep or ())

    def fixed(each: MeasuredCell) -> dict[str, Any]:
        return {name: value for name, value in {**each.conditions, **each.training}.items() if name not in swept}

    rivals = [fixed(each) for each in others if each.model == cell.model and set(each.sweep or ()) == swept]
    names = {name for each in rivals for name in each}
    return {
        name: fixed(cell).get(name) for name in sorted(names) if len({canonical(each.get(name)) for each in rivals}) > 1
    }


def _image_notes(cells: Sequence[MeasuredCell]) -> dict[tuple[str, ...], str]:
    """What to call the images of a cell, by :func:`_images`; empty if its task was measured on no others."""
    tasks: dict[tuple[str, ...], dict[str, MeasuredCell]] = {}
    for cell in cells:
        *task, facts = _images(cell)
        tasks.setdefault(tuple(task), {}).setdefault(facts, cell)
    return {
        (*task, facts): note
        for task, kinds in tasks.items()
        for facts, note in zip(kinds, notes_of([[cell] for cell in kinds.values()]), strict=True)
    }


def _images(cell: MeasuredCell) -> tuple[str, ...]:
    return cell.model, canonical(sorted(cell.sweep or ())), cell.task, canonical(cell.facts)


def _points_of(
    tuned: Sequence[MeasuredCell],
    other: Sequence[MeasuredCell],
    fixed: Mapping[str, Any],
    image_notes: Mapping[tuple[str, ...], str],
) -> list[SweepPoint]:
    """The point of one choice of settings; more of them if a task was measured on several sets of images."""
    parts: dict[str, list[list[MeasuredCell]]] = {}
    for task in dict.fromkeys(cell.task for cell in tuned):
        measured = [cell for cell in (*tuned, *other) if cell.task == task and cell.error is None]
        found = [part for part in series_of(measured) if any(cell.prototypes == ORION for cell in part)]
        parts[task] = found
    failed = sum(cell.error is not None for cell in tuned)
    model, settings = tuned[0].model, json.loads(canonical(tuned[0].sweep))
    points = []
    for number in range(max(map(len, parts.values()))):
        run = {task: found[number] for task, found in parts.items() if number < len(found)}
        line = average_line(run)
        notes = [image_notes[_images(part[0])] for part in run.values()]
        points.append(
            SweepPoint(
                model,
                settings,
                line.measured[ORION],
                line.gains.get(ORION),
                tuple(run),
                failed if number == 0 else 0,
                fixed,
                "; ".join(dict.fromkeys(filter(None, notes))),
            )
        )
    return points or [SweepPoint(model, settings, None, None, (), failed, fixed)]


def sweep_table(points: Sequence[SweepPoint]) -> Table:
    """Points of one model as a table, the paper's figures beside those of its own backbone and tasks."""
    names = list(dict.fromkeys(name for point in points for name in point.described))
    columns: dict[str, list[str]] = {
        _axis(name): [plain(point.described.get(name, "")) for point in points] for name in names
    }
    line = Line("")  # of one dataset: averages of more say of how many
    columns["ORION"] = [shown(point.accuracy, line) for point in points]
    columns["gain"] = [shown(point.gain, line, signed=True) for point in points]
    runs = [0 if point.accuracy is None else point.accuracy.runs for point in points]
    if max(runs, default=0) > 1:
        columns["runs"] = list(map(str, runs))
    if any(point.failed for point in points):
        columns["failed"] = [str(point.failed) for point in points]
    printed = [printed_sweep(point) for point in points]
    if any(figure is not None for figure in printed):
        columns["paper (average of 11 datasets)"] = ["" if figure is None else f"{figure}" for figure in printed]
    return Table(tuple(columns), tuple(zip(*columns.values(), strict=True)), names=len(names))


def sweep_curves(points: Sequence[SweepPoint]) -> dict[str, Any]:
    """Title -> figure of accuracy against lambda, or if that was not swept, the setting with the most values.

    There is one for each choice of the other settings.
    """
    from .plots import lambda_sweep, setting_sweep

    points = [point for point in points if point.accuracy is not None]

    def values_of(name: str) -> int:
        return len({canonical(point.settings.get(name)) for point in points})

    series: dict[tuple[str, str], list[SweepPoint]] = {}
    for point in points:
        name = _LAMBDA if _LAMBDA in point.settings else max(point.settings, key=values_of)
        others = "".join(f", {_axis(key)} {plain(value)}" for key, value in point.described.items() if key != name)
        series.setdefault((name, f"{point.model}{others}, {', '.join(point.tasks)}"), []).append(point)
    curves = {}
    for (name, title), members in series.items():
        values = [point.settings[name] for point in members]
        accuracies = [point.accuracy for point in members if point.accuracy is not None]
        means, half_widths = [value.mean for value in accuracies], [value.half_width for value in accuracies]
        is_lambda = name == _LAMBDA and all(isinstance(value, (int, float)) for value in values)
        if sum(not is_lambda or value > 0 for value in values) > 1:
            curves[f"{_axis(name)}: {title}"] = (
                lambda_sweep(values, means, half_widths, title=title)
                if is_lambda
                else setting_sweep(_axis(name), values, means, half_widths, title=title)
            )
    return curves


def _axis(name: str) -> str:
    return "lambda" if name == _LAMBDA else name


def printed_sweep(point: SweepPoint) -> float | None:
    """The paper's figure for this lambda, if nothing else was varied; its sweep is over 11 datasets with ViT-B/16."""
    if set(point.settings) != {_LAMBDA} or paper_backbone(point.model) != "CLIP ViT-B/16":
        return None
    if not point.tasks or not all(paper_column(task) for task in point.tasks):
        return None
    stated = {p["lambda_stated"]: p["accuracy"] for p in paper_tables()["lambda_sweep"]["points_given_in_text"]}
    return stated.get(point.settings[_LAMBDA])


def _sortable(value: Any) -> tuple[int, float, str]:
    number = isinstance(value, (int, float))
    return (0, float(value), "") if number else (1, 0.0, str(value))

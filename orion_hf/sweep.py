"""Sweeps: zero-shot accuracy against the settings of the training, as a table and as the paper's curve."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .card import paper_tables
from .cells import ORION, MeasuredCell, canonical
from .layout import Table
from .tables import Line, Measured, average_line, paper_backbone, plain, shown

_LAMBDA = "orthogonality_weight"


@dataclass(frozen=True)
class SweepPoint:
    """Zero-shot accuracy with one choice of the swept settings, averaged over tasks, and its gain over CLIP."""

    model: str
    settings: Mapping[str, Any]
    accuracy: Measured
    gain: Measured | None
    tasks: tuple[str, ...]


def sweep_points(cells: Sequence[MeasuredCell]) -> list[SweepPoint]:
    """Points of all sweeps, those of a model together, ordered by their settings."""
    swept = [cell for cell in cells if cell.sweep is not None]
    keys = dict.fromkeys((cell.model, canonical(cell.sweep)) for cell in swept if cell.prototypes == ORION)
    points = []
    for model, settings in keys:
        by_task: dict[str, list[MeasuredCell]] = {}
        for cell in swept:
            if cell.model == model and canonical(cell.sweep) == settings:
                by_task.setdefault(cell.task, []).append(cell)
        run = {task: members for task, members in by_task.items() if any(c.prototypes == ORION for c in members)}
        line = average_line(run)
        points.append(SweepPoint(model, json.loads(settings), line.measured[ORION], line.gains.get(ORION), tuple(run)))
    return sorted(points, key=lambda point: (point.model, [_sortable(v) for v in point.settings.values()]))


def sweep_table(points: Sequence[SweepPoint]) -> Table:
    """Points of one model as a table, the paper's figures beside those of its own backbone and tasks."""
    names = list(dict.fromkeys(name for point in points for name in point.settings))
    printed = [_printed_sweep(point) for point in points]
    rows = []
    for point, figure in zip(points, printed, strict=True):
        settings = [plain(point.settings.get(name, "")) for name in names]
        line = Line("")  # of one dataset: averages of more say of how many
        rows.append((*settings, shown(point.accuracy, line), shown(point.gain, line, signed=True), figure))
    header = [*map(_axis, names), "ORION", "gain", "paper"]
    if not any(printed):
        header, rows = header[:-1], [row[:-1] for row in rows]
    return Table(tuple(header), tuple(rows), names=len(names))


def sweep_curves(points: Sequence[SweepPoint]) -> dict[str, Any]:
    """Title -> figure of accuracy against lambda, or if that was not swept, the setting with the most values.

    There is one for each choice of the other settings.
    """
    from .plots import lambda_sweep, setting_sweep

    def values_of(name: str) -> int:
        return len({canonical(point.settings.get(name)) for point in points})

    series: dict[tuple[str, str], list[SweepPoint]] = {}
    for point in points:
        name = _LAMBDA if _LAMBDA in point.settings else max(point.settings, key=values_of)
        others = "".join(f", {_axis(key)} {plain(value)}" for key, value in point.settings.items() if key != name)
        series.setdefault((name, f"{point.model}{others}, {', '.join(point.tasks)}"), []).append(point)
    curves = {}
    for (name, title), members in series.items():
        values = [point.settings[name] for point in members]
        means = [point.accuracy.mean for point in members]
        half_widths = [point.accuracy.half_width or 0.0 for point in members]
        is_lambda = name == _LAMBDA
        if sum(not is_lambda or value > 0 for value in values) > 1:
            curves[f"{_axis(name)}: {title}"] = (
                lambda_sweep(values, means, half_widths)
                if is_lambda
                else setting_sweep(_axis(name), values, means, half_widths)
            )
    return curves


def _axis(name: str) -> str:
    return "lambda" if name == _LAMBDA else name


def _printed_sweep(point: SweepPoint) -> str:
    """The paper's figure for this lambda, if nothing else was varied; its sweep is over 11 datasets with ViT-B/16."""
    if set(point.settings) != {_LAMBDA} or paper_backbone(point.model) != "CLIP ViT-B/16":
        return ""
    stated = {p["lambda_stated"]: p["accuracy"] for p in paper_tables()["lambda_sweep"]["points_given_in_text"]}
    figure = stated.get(point.settings[_LAMBDA])
    return "" if figure is None else f"{figure}"


def _sortable(value: Any) -> tuple[int, float, str]:
    number = isinstance(value, (int, float))
    return (0, float(value), "") if number else (1, 0.0, str(value))

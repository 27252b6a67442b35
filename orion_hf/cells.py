"""Measured cells: reading the results files of evaluate, fewshot, sweep and the demo.

for cell in read_results(["out/eurosat/results.json", "out/dtd"]):
    print(cell.task, cell.method, cell.prototypes, cell.top1)
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .files import read_json
from .results import PROTOTYPES, RESULTS_NAME

BASELINE, ORION = "clip", "orion"  # kinds of prototypes; gains are over the first
_LARGEST_FILE = 256 * 2**20


@dataclass(frozen=True)
class MeasuredCell:
    """One measurement: a classifier on the images of a task.

    Attributes:
        task, model, method: what was measured; ``model`` is the base model.
        prototypes: a key of :data:`~orion_hf.results.PROTOTYPES`.
        top1: percent.
        seed: of the run.
        protocol: "full", "batch" or "online".
        conditions: what else must be equal for cells to be averaged or compared: options, batch size, shots, ...
        adapter: which ORION weights the prototypes are from.
        half_width, gain_half_width: of the cell's own intervals, over images, tasks or streams, in points.
        sweep: training settings that a sweep varied; None for other runs.
        source: file it was read from.
    """

    task: str
    model: str
    method: str
    prototypes: str
    top1: float
    seed: int = 0
    protocol: str = "full"
    conditions: Mapping[str, Any] = field(default_factory=dict)
    num_images: int | None = None
    adapter: str | None = None
    half_width: float | None = None
    gain_half_width: float | None = None
    sweep: Mapping[str, Any] | None = None
    source: str = ""

    @property
    def setting(self) -> tuple[str, ...]:
        """What is equal in all cells of one table: model, method, protocol and its conditions."""
        conditions = dict(self.conditions)
        if "class_prompts" in conditions:  # every task has a file of its own
            conditions["class_prompts"] = True
        return self.model, self.method, self.protocol, canonical(conditions), canonical(self.sweep)

    @property
    def pair(self) -> tuple[str, ...]:
        """What is equal in the two cells of a pair: setting, task, seed, number of images, prompts."""
        return *self.setting, self.task, str(self.seed), str(self.num_images), canonical(self.conditions)


def canonical(value: Any) -> str:
    """JSON in which equal values are equal texts."""
    return json.dumps(value, sort_keys=True, default=str)


def read_results(paths: Iterable[str | os.PathLike]) -> list[MeasuredCell]:
    """Cells of results files; of a folder, all ``results.json`` in it and below.

    A cell that several files hold is taken once; two that differ in nothing but their accuracy are an error.
    """
    cells: dict[tuple, MeasuredCell] = {}
    for path in results_files(paths):
        for cell in _read_file(path):
            key = (cell.pair, cell.prototypes, cell.adapter)
            known = cells.setdefault(key, cell)
            if known.top1 != cell.top1:
                raise ValueError(
                    f"{known.source} and {cell.source} disagree on {cell.method} with {cell.prototypes} prototypes, "
                    f"task {cell.task!r}, seed {cell.seed}: {known.top1:.2f} and {cell.top1:.2f}. Leave one out."
                )
    if not cells:
        raise ValueError("the results hold no measured cell: run orion-hf evaluate, fewshot or sweep first")
    return list(cells.values())


def results_files(paths: Iterable[str | os.PathLike]) -> list[Path]:
    """The files meant by ``paths``: themselves, or those called ``results.json`` below a folder."""
    files = []
    for path in map(Path, paths):
        found = sorted(path.rglob(RESULTS_NAME)) if path.is_dir() else [path]
        if not found:
            raise ValueError(f"{path} has no {RESULTS_NAME}, nor has a folder below it")
        files += found
    return list(dict.fromkeys(files))


def read_header(path: str | os.PathLike) -> dict[str, Any]:
    """What a results file says of itself besides its cells."""
    data = _read_json(path)
    return {key: value for key, value in data.items() if key not in ("cells", "comparisons", "top1")}


def _read_json(path: str | os.PathLike) -> dict[str, Any]:
    data = read_json(path, _LARGEST_FILE, "Give a results.json.")
    if isinstance(data, list):
        data = {"cells": data}
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds no results: expected a JSON object with 'cells'")
    return data


def _read_file(path: Path) -> list[MeasuredCell]:
    data = _read_json(path)
    rows = data.get("cells")
    if rows is None and isinstance(data.get("top1"), dict):
        if "model" not in data:  # the summary beside an adapter; its cells are where they were measured
            return []
        rows = _rows_of_summary(data)
    if not isinstance(rows, list):
        raise ValueError(f"{path} holds no results: expected a JSON object with 'cells'")
    cells, intervals = [], _gain_half_widths(data.get("comparisons"))
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"{path}: cell {number} is no JSON object")
        if row.get("top1") is not None:  # a run that failed has none
            cells.append(_cell(row, data, intervals, f"{path}: cell {number}", str(path)))
    return cells


def _rows_of_summary(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Cells of ``{"task", "model", "seed", "images", "top1": {"CLIP": percent, ...}}``, as model cards read it."""
    keys = {label.casefold(): key for key, label in PROTOTYPES.items()}
    values = {name: value.get("mean") if isinstance(value, dict) else value for name, value in data["top1"].items()}
    figures = {name: value for name, value in values.items() if isinstance(value, (int, float))}
    return [
        {
            **data,
            "prototypes": keys.get(name.casefold(), name),
            "num_images": data.get("images"),
            "top1": value / 100,
            "protocol": None,  # here a sentence for people
        }
        for name, value in figures.items()
    ]


def _cell(
    row: dict[str, Any], header: dict[str, Any], gain_half_widths: dict[str, float | None], where: str, source: str
) -> MeasuredCell:
    def read(key: str, kind: Any, default: Any = None) -> Any:
        value = row.get(key, header.get(key))
        value = default if value is None else value
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise ValueError(f"{where}: {key!r} must be {_kind_name(kind)}, got {value!r}"[:300])
        return value

    task, model = read("task", str), read("model", str)
    if task is None or model is None:
        raise ValueError(f"{where}: 'task' or 'model' is missing")
    top1 = read("top1", (int, float))
    if not 0 <= top1 <= 1:
        raise ValueError(f"{where}: 'top1' must be a share from 0 to 1, got {top1}")
    protocol = read("protocol", dict, {})
    conditions = {**read("options", dict, {}), **{key: value for key, value in protocol.items() if key != "kind"}}
    views, dataset = read("views", dict, {}), read("dataset", dict, {})
    if "count" in views:  # whether they are mixed depends on the task
        conditions["num_views"] = views["count"]
    if dataset.get("split", "test") != "test":
        conditions["split"] = dataset["split"]
    if read("mixed_precision", str, "no") != "no":
        conditions["mixed_precision"] = read("mixed_precision", str)
    return MeasuredCell(
        task=task,
        model=model,
        method=read("method", str, "zero_shot"),
        prototypes=read("prototypes", str, BASELINE),
        top1=100 * top1,
        seed=read("seed", int, 0),
        protocol=str(protocol.get("kind", "full")),
        conditions=conditions,
        num_images=read("num_images", int),
        adapter=read("adapter_weights", str) or read("adapter", str),
        half_width=_half_width(row),
        gain_half_width=gain_half_widths.get(str(row.get("id"))),
        sweep=read("sweep", dict),
        source=source,
    )


def _gain_half_widths(comparisons: Any) -> dict[str, float | None]:
    """Cell id -> interval of its paired difference, which only the file's outcomes can give; of single seeds."""
    entries = comparisons if isinstance(comparisons, list) else []
    return {
        str(entry["cells"][0]): _half_width(entry)
        for entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("cells"), list) and len(entry["cells"]) == 1
    }


def _half_width(row: dict[str, Any]) -> float | None:
    low, high = row.get("low"), row.get("high")
    numbers = isinstance(low, (int, float)) and isinstance(high, (int, float))
    return 50 * (high - low) if numbers else None  # type: ignore[operator]


def _kind_name(kind: Any) -> str:
    return {str: "text", dict: "an object", int: "a whole number"}.get(kind, "a number")

"""Measured cells: reading the results files of evaluate, fewshot, sweep and the demo.

for cell in read_results(["out/eurosat/results.json", "out/dtd"]):
    print(cell.task, cell.method, cell.prototypes, cell.top1)
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .files import read_json
from .protocols import effective_classes
from .published import published_options
from .results import FORMAT_VERSION, PROTOTYPES, RESULTS_NAME

BASELINE, ORION = "clip", "orion"  # kinds of prototypes; gains are over the first
_LARGEST_FILE = 256 * 2**20
# What came out of a run, or only numbers it; all else that is recorded says which cell it is.
_OUTCOMES = {
    "id", "run", "top1", "stderr", "low", "high", "unit", "n_tasks", "unreadable", "seconds", "error",
    "stopped", "steps", "displacement", "mean_cosine",
}  # fmt: skip
_OF_HEADER = ("task", "model", "method", "seed", "protocol", "options", "views", "dataset", "num_images", "adapter")


@dataclass(frozen=True)
class MeasuredCell:
    """One measurement: a classifier on the images of a task.

    Attributes:
        task, model, method: what was measured; ``model`` is the base model.
        prototypes: a key of :data:`~orion_hf.results.PROTOTYPES`.
        top1: percent.
        seed: of the run.
        protocol: "full", "batch" or "online".
        conditions: what else must be equal in all cells of a table: options, batch size, shots, ...
        num_images: how many were classified.
        origin: what else must be equal in all seeds of a task: source of the images, weights, versions, ...
        draw: what a seed may change: which images, which support set.
        adapter: which ORION weights the prototypes are from; ``adapter_name`` is what people call them.
        half_width, gain_half_width: of the cell's own intervals, over images, tasks or streams, in points.
        pooled, pooled_gain_half_width: ids of the seeds that the file compared together, and the interval of that.
        sweep: training settings that a sweep varied; None for other runs. ``training``: those that it did not.
        error: why a run of a sweep has no accuracy; ``top1`` is NaN then.
        id: the file's name of the cell.
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
    origin: Mapping[str, Any] = field(default_factory=dict)
    draw: Mapping[str, Any] = field(default_factory=dict)
    adapter: str | None = None
    adapter_name: str | None = None
    half_width: float | None = None
    gain_half_width: float | None = None
    pooled: frozenset[str] = frozenset()
    pooled_gain_half_width: float | None = None
    sweep: Mapping[str, Any] | None = None
    training: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    id: str | None = None
    source: str = ""

    @property
    def setting(self) -> tuple[str, ...]:
        """What is equal in all cells of one table: model, method, protocol and its conditions."""
        conditions = dict(self.conditions)
        if "class_prompts" in conditions:  # every task has a file of its own
            conditions["class_prompts"] = True
        return self.model, self.method, self.protocol, canonical(conditions), canonical(self.sweep)

    @property
    def facts(self) -> dict[str, Any]:
        """What is equal in all seeds of one task besides the setting."""
        return {"images": self.num_images, **self.origin, "class_prompts": self.conditions.get("class_prompts")}

    @property
    def pair(self) -> tuple[str, ...]:
        """What is equal in the two cells of a pair: setting, task, seed, images, support set, prompts."""
        return *self.setting, self.task, str(self.seed), canonical(self.facts), canonical(self.draw)


def canonical(value: Any) -> str:
    """JSON in which equal values are equal texts."""
    return json.dumps(value, sort_keys=True, default=str)


def read_results(paths: Iterable[str | os.PathLike]) -> list[MeasuredCell]:
    """Cells of results files; of a folder, all ``results.json`` in it and below.

    A cell that several files hold is taken once; two that differ in nothing but their accuracy are an error. Runs of a
    sweep that failed are among them, with their ``error``.
    """
    cells: dict[str, MeasuredCell] = {}
    for path in results_files(paths):
        for identity, cell in _read_file(path):
            known = cells.setdefault(identity, cell)
            if known.error is None and cell.error is None and not math.isclose(known.top1, cell.top1, abs_tol=1e-9):
                files = dict.fromkeys([known.source, cell.source])
                raise ValueError(
                    f"{' and '.join(files)} disagree on {cell.method} with {cell.prototypes} prototypes, "
                    f"task {cell.task!r}, seed {cell.seed}: {known.top1:.2f} and {cell.top1:.2f}. Leave one out."
                )
    if all(cell.error is not None for cell in cells.values()):
        raise ValueError("the results hold no measured cell: run orion-hf evaluate, fewshot or sweep first")
    return list(cells.values())


def results_files(paths: Iterable[str | os.PathLike]) -> list[Path]:
    """The files meant by ``paths``: themselves, or those called ``results.json`` below a folder."""
    files = []
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"{path}: no such file or folder. Give a {RESULTS_NAME}, or a folder that holds some.")
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
    version = data.get("format_version", FORMAT_VERSION)
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise ValueError(
            f"{path} has format_version {str(version)[:20]}, and this orion-hf reads up to {FORMAT_VERSION}: update it."
        )
    return data


def _read_file(path: Path) -> list[tuple[str, MeasuredCell]]:
    """Cells, each with what tells it from all others."""
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
        if row.get("top1") is None and not row.get("sweep"):  # not finished; of a sweep it is a run that failed
            continue
        cell = _cell(row, data, intervals, f"{path}: cell {number}", str(path))
        recorded = {key: data[key] for key in _OF_HEADER if key in data} | row
        recorded = {key: value for key, value in recorded.items() if key not in _OUTCOMES}
        # Two names of one scenario are no difference.
        cells.append((canonical([recorded | {"protocol": cell.protocol}, cell.conditions]), cell))
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
    row: dict[str, Any],
    header: dict[str, Any],
    intervals: dict[str, tuple[frozenset[str], float | None]],
    where: str,
    source: str,
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
    failed = row.get("top1") is None
    top1 = math.nan if failed else read("top1", (int, float))
    if not failed and not 0 <= top1 <= 1:
        raise ValueError(f"{where}: 'top1' must be a share from 0 to 1, got {top1}")
    protocol = read("protocol", dict, {})
    views, support = read("views", dict, {}), read("support", dict, {})
    texts = dict(read("measured_on", dict, {}))  # of a sweep: images and texts
    images = {"source": texts.pop("images", None), "split": texts.pop("split", None) or "test"}
    dataset = read("dataset", dict, images)
    sweep, training = read("sweep", dict), read("training", dict, {})
    compared, gain_half_width = intervals.get(str(row.get("id")), (frozenset(), None))
    alone = len(compared) < 2
    method, options = read("method", str, "zero_shot"), dict(read("options", dict, {}))
    if method == "zero_shot":
        options.pop("logit_scale", None)  # the nearest prototype is the same at any scale
    # What is published for one task is said by the task, and None means as published: tables are over tasks.
    own = published_options(method, task)
    options = {
        key: value
        for key, value in options.items()
        if value is not None and (key not in own or canonical(value) != canonical(own[key]))
    }
    return MeasuredCell(
        task=task,
        model=model,
        method=method,
        prototypes=read("prototypes", str, BASELINE),
        top1=100 * top1,
        seed=read("seed", int, 0),
        protocol=str(protocol.get("kind", "full")),
        conditions=_conditions(options, protocol, views, dataset, support, read("mixed_precision", str, "no"), where),
        num_images=read("num_images", int),
        origin={
            "source": dataset.get("source"),
            "crops": support.get("area"),
            "augmix": views.get("augmix"),
            "unlabelled images": row.get("unlabeled") is not None,
            "orion_hf": row.get("orion_hf"),
            "task": row.get("task_digest"),
            "revision": row.get("revision"),
            "weights": row.get("weights"),
            **texts,
        },
        draw={
            "fingerprint": dataset.get("fingerprint"),
            "support": support.get("fingerprint"),
            "support set": support.get("draw"),
            "views": views.get("seed"),
            "unlabelled images": row.get("unlabeled"),
        },
        adapter=read("adapter_weights", str) or read("adapter", str),
        adapter_name=read("adapter", str) or read("adapter_weights", str),
        half_width=_half_width(row),
        gain_half_width=gain_half_width if alone else None,
        pooled=compared,
        pooled_gain_half_width=gain_half_width,
        sweep=sweep,
        training={key: value for key, value in training.items() if key not in (sweep or {}) and key != "seed"},
        error=str(row.get("error") or "failed") if failed else None,
        id=None if row.get("id") is None else str(row["id"]),
        source=source,
    )


def _conditions(
    options: dict[str, Any],
    protocol: dict[str, Any],
    views: dict[str, Any],
    dataset: dict[str, Any],
    support: dict[str, Any],
    mixed_precision: str,
    where: str,
) -> dict[str, Any]:
    conditions = {**options, **{key: value for key, value in protocol.items() if key != "kind"}}
    if conditions.get("k_eff") is not None:
        try:
            classes = effective_classes(str(conditions["k_eff"]))
        except ValueError as error:
            raise ValueError(f"{where}: 'k_eff': {error}") from error
        conditions["k_eff"] = "all" if classes is None else f"{classes[0]}-{classes[1]}"
    if "count" in views:  # whether they are mixed depends on the task
        conditions["num_views"] = views["count"]
    if dataset.get("split", "test") != "test":
        conditions["split"] = dataset["split"]
    if support.get("split", "train") != "train":
        conditions["support_split"] = support["split"]
    if mixed_precision != "no":
        conditions["mixed_precision"] = mixed_precision
    return conditions


def _gain_half_widths(comparisons: Any) -> dict[str, tuple[frozenset[str], float | None]]:
    """Cell id -> ids of the cells compared with it, and the interval, which only the file's outcomes can give."""
    found: dict[str, tuple[frozenset[str], float | None]] = {}
    for entry in comparisons if isinstance(comparisons, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("cells"), list):
            members = frozenset(map(str, entry["cells"]))
            found |= dict.fromkeys(members, (members, _half_width(entry)))
    return found


def _half_width(row: dict[str, Any]) -> float | None:
    low, high = row.get("low"), row.get("high")
    numbers = isinstance(low, (int, float)) and isinstance(high, (int, float))
    return 50 * (high - low) if numbers else None  # type: ignore[operator]


def _kind_name(kind: Any) -> str:
    return {str: "text", dict: "an object", int: "a whole number"}.get(kind, "a number")

"""What `orion-hf evaluate` and `fewshot` write: measured cells, what is needed to repeat them, paired comparisons.

`results.json` in the output folder::

    {"format_version": 1,
     "runs":  [{"command": "orion-hf evaluate ...", "versions": {"torch": ..., ...}, "settings": {...}}, ...],
     "cells": [{"id": "5e1f...", "run": 0,
                "task": "eurosat", "task_digest": ...,          # digest of class names and templates
                "model": "openai/clip-vit-base-patch16", "revision": ..., "weights": ...,
                "method": "stata", "prototypes": "clip" | "averaged" | "svd" | "orion",
                "adapter": null | "org/orion-eurosat", "adapter_revision": ..., "adapter_weights": ...,
                "protocol": {"kind": "full"} | {"kind": "batch", "k_eff": "1-4", "batch_size": 64, "num_tasks": 1000}
                            | {"kind": "online", "correlation": "low", "batch_size": 128, "num_tasks": 100}
                            | {"kind": "full", "shots": 4, "passes": 20},        # of fewshot
                                                                # with --class_prompts also its file's name
                "options": {"alpha": 1.0, ...}, "views": null | {"count": 64, "augmix": false, "seed": 0},
                "seed": 0, "mixed_precision": "no", "orion_hf": "0.1.0",
                "dataset": {"source": ..., "split": "test", "fingerprint": ...}, "unlabeled": null | fingerprint,
                "support": {"split": "train", "fingerprint": ..., "draw": ..., "area": [0.08, 1.0]},    # of fewshot
                "top1": 0.473, "stderr": 0.006, "low": 0.462, "high": 0.484,    # shares, 95 % interval
                "unit": "image" | "task" | "stream" | "support set", "n_tasks": 1, "num_images": 8100, "unreadable": [],
                "seconds": 1.2}, ...],
     "comparisons": [{"task": ..., "model": ..., "method": ..., "protocol": {...}, "adapter": ...,
                      "prototypes": "orion", "against": "clip", "cells": ["5e1f...", ...], "seeds": [0, 1],
                      "unit": "image", "difference": 0.021, "stderr": ..., "low": ..., "high": ..., "n": 16200}, ...]}

A cell is the classifier of one method with one kind of prototypes on one seed. All keys before ``top1`` but ``id`` and
``run`` say what was measured; their hash is the cell's ``id``, and a rerun skips cells whose id is there. The outcome
of every image, task, stream or support set, which comparisons pair, is in `outcomes/ID.safetensors`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .files import write_json, write_whole
from .layout import aligned_table
from .protocols import Summary, summarize

RESULTS_NAME = "results.json"
FORMAT_VERSION = 1
PROTOTYPES = {"clip": "CLIP", "averaged": "averaged prompts", "svd": "SVD", "orion": "ORION"}

Cell = dict[str, Any]


class Results:
    """The content of an output folder; `add` writes it after every cell."""

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)
        self.path = self.folder / RESULTS_NAME
        self.runs: list[dict[str, Any]] = []
        self.cells: dict[str, Cell] = {}
        self._measured: dict[str, Tensor] = {}
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{self.folder} is a file: choose another --output_dir.")
        if self.path.is_file():
            self._read()

    def _read(self) -> None:
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            if data["format_version"] > FORMAT_VERSION:
                raise ValueError("it was written by a newer orion-hf")
            self.runs = data["runs"]
            self.cells = {cell["id"]: cell for cell in data["cells"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.path} is not a file of this command ({error}): choose another --output_dir, or remove it."
            ) from error

    def outcomes(self, cell_id: str) -> Tensor | None:
        """What was measured of a cell, ``(n,)``; None if it is not finished."""
        if cell_id not in self.cells:
            return None
        if cell_id not in self._measured:
            try:
                self._measured[cell_id] = load_file(self._outcomes_path(cell_id))["outcomes"].double()
            except (FileNotFoundError, SafetensorError, KeyError):
                return None
        return self._measured[cell_id]

    def add(self, cell_id: str, cell: Cell, outcomes: Tensor, run: dict[str, Any], write: bool = True) -> None:
        """Keep a finished cell, and write it: its outcomes first, then the record that says they are there.

        ``write=False`` is for all processes but one.
        """
        if run not in self.runs:
            self.runs.append(run)
        summary = summarize(outcomes)
        measured = {"top1": summary.mean, "stderr": summary.standard_error, "low": summary.low, "high": summary.high}
        described = {"id": cell_id, "run": self.runs.index(run)}
        self.cells[cell_id] = described | cell | {key: _json_number(value) for key, value in measured.items()}
        self._measured[cell_id] = outcomes.double()
        if not write:
            return
        path = self._outcomes_path(cell_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda temporary: save_file({"outcomes": outcomes.double().contiguous()}, temporary))
        self.save()

    def save(self) -> None:
        """Write `results.json`, whole or not at all."""
        data = {
            "format_version": FORMAT_VERSION,
            "runs": self.runs,
            "cells": list(self.cells.values()),
            "comparisons": comparisons(list(self.cells.values()), self.outcomes),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.path, data)

    def _outcomes_path(self, cell_id: str) -> Path:
        return self.folder / "outcomes" / f"{cell_id}.safetensors"


# Arithmetic


def pool_seeds(outcomes: Sequence[Tensor], draws: Sequence[str]) -> Tensor:
    """Outcomes of several seeds as independent values, ``(n,)``.

    Outcomes of the same draw of images (a seed that changed the views only) are averaged image by image, because one
    image measured twice is not two images; those of different draws are put one after the other.

    Example:
        >>> pool_seeds([torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])], ["a", "a"])
        tensor([1.0000, 0.5000])
    """
    groups: dict[str, list[Tensor]] = {}
    for values, draw in zip(outcomes, draws, strict=True):
        groups.setdefault(draw, []).append(values)
    return torch.cat([torch.stack(values).mean(dim=0) for values in groups.values()])


def paired_difference(ours: Tensor, theirs: Tensor) -> Summary:
    """Mean of ``ours - theirs`` with its 95 % interval; both ``(n,)``, on the same images or tasks.

    Example:
        >>> paired_difference(torch.tensor([1.0, 1.0, 0.0]), torch.tensor([0.0, 1.0, 0.0])).mean
        0.3333333333333333
    """
    if ours.shape != theirs.shape:
        raise ValueError(f"outcomes are not paired: {len(ours)} against {len(theirs)}")
    return summarize(ours.double() - theirs.double())


def comparisons(cells: Sequence[Cell], outcomes: Callable[[str], Tensor | None]) -> list[dict[str, Any]]:
    """Every kind of prototypes against CLIP's, for the same task, model, method, protocol and options.

    Args:
        cells: of `results.json`.
        outcomes: from a cell's id to its values; cells without are left out.
    """
    found = []
    baselines = {_group(cell, with_seed=True): cell for cell in cells if cell["prototypes"] == "clip"}
    groups: dict[str, list[tuple[Cell, Cell]]] = {}
    for cell in cells:
        baseline = baselines.get(_group(cell, with_seed=True))
        if cell["prototypes"] != "clip" and baseline is not None:
            kind = f"{_group(cell)} {cell['prototypes']} {cell['adapter_weights']}"
            groups.setdefault(kind, []).append((cell, baseline))
    for pairs in groups.values():
        known = [(cell, outcomes(cell["id"]), outcomes(baseline["id"])) for cell, baseline in pairs]
        kept = [(cell, ours, theirs) for cell, ours, theirs in known if ours is not None and theirs is not None]
        if kept:
            found.append(_comparison(kept))
    return found


def _comparison(kept: Sequence[tuple[Cell, Tensor, Tensor]]) -> dict[str, Any]:
    cell = kept[0][0]
    draws = [_draw(each) for each, _, _ in kept]
    ours, theirs = (pool_seeds([values[side] for values in kept], draws) for side in (1, 2))  # type: ignore[misc]
    summary = paired_difference(ours, theirs)
    shared = ("task", "model", "method", "protocol", "adapter", "prototypes")
    return {key: cell[key] for key in shared} | {
        "against": "clip",
        "cells": [each["id"] for each, _, _ in kept],
        "seeds": [each["seed"] for each, _, _ in kept],
        "unit": cell["unit"],
        "difference": summary.mean,
        "stderr": _json_number(summary.standard_error),
        "low": _json_number(summary.low),
        "high": _json_number(summary.high),
        "n": summary.n,
    }


def _group(cell: Cell, with_seed: bool = False) -> str:
    """Cells that may be compared: all but prototypes and, unless asked for, seeds and what these draw are equal."""
    keys = ["task", "task_digest", "model", "weights", "method", "protocol", "options", "mixed_precision", "orion_hf"]
    views = None if cell["views"] is None else {key: value for key, value in cell["views"].items() if key != "seed"}
    record = [cell[key] for key in keys] + [cell["dataset"]["source"], cell["dataset"]["split"]]
    support = {key: value for key, value in cell.get("support", {}).items() if with_seed or key != "draw"}
    record += [views, support, cell["num_images"], cell["unlabeled"] is None]
    if with_seed:
        record += [cell["seed"], cell["dataset"]["fingerprint"], cell["views"], cell["unlabeled"]]
    return json.dumps(record, sort_keys=True)


def _draw(cell: Cell) -> str:
    """Names the independent draw a cell's outcomes come from: its images, or for tasks and streams its seed."""
    fingerprint = cell["dataset"]["fingerprint"]
    return fingerprint if cell["unit"] == "image" else f"{fingerprint} {cell['seed']}"


def pooled_summary(cells: Sequence[Cell], outcomes: Callable[[str], Tensor | None]) -> Summary:
    """Top-1 over the seeds of otherwise equal cells, as a share."""
    values = [(outcomes(cell["id"]), _draw(cell)) for cell in cells]
    known = [(each, draw) for each, draw in values if each is not None]
    return summarize(pool_seeds([each for each, _ in known], [draw for _, draw in known]))


# For people


def results_table(cells: Sequence[Cell], outcomes: Callable[[str], Tensor | None]) -> str:
    """A Markdown table: a line for each task, method and protocol, a column for each kind of prototypes.

    Percent correct; beside it the paired difference to CLIP's prototypes and half its 95 % interval.
    """
    differences: dict[tuple[str, str], str] = {}
    for entry in comparisons(cells, outcomes):
        half = None if entry["low"] is None else 100 * (entry["high"] - entry["low"]) / 2
        key = (json.dumps([entry["task"], entry["model"], entry["method"], entry["protocol"]]), entry["prototypes"])
        differences[key] = f" ({100 * entry['difference']:+.1f}" + (")" if half is None else f" ± {half:.1f})")
    lines: dict[str, dict[str, list[Cell]]] = {}
    for cell in cells:
        line = json.dumps([cell["task"], cell["model"], cell["method"], cell["protocol"]])
        lines.setdefault(line, {}).setdefault(cell["prototypes"], []).append(cell)
    rows = [["task", "method", "images", *PROTOTYPES.values()]]
    for line, kinds in lines.items():
        first = next(iter(kinds.values()))[0]
        seeds = len(next(iter(kinds.values())))
        images = str(first["num_images"]) if seeds == 1 else f"{seeds} x {first['num_images']}"
        row = [first["task"], first["method"], images]
        for kind in PROTOTYPES:
            if kind not in kinds:
                row.append("-")
                continue
            top1 = f"{100 * pooled_summary(kinds[kind], outcomes).mean:.1f}"
            row.append(top1 + differences.get((line, kind), ""))
        rows.append(row)
    return aligned_table(rows)


def card_results(cells: Sequence[Cell], outcomes: Callable[[str], Tensor | None], command: str) -> dict[str, Any]:
    """Zero-shot cells of one task in the form that a model card reads from the `results.json` beside an adapter.

    Percentages with half the 95 % interval; see `card.Results`.
    """
    kinds: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell["method"] == "zero_shot" and cell["protocol"]["kind"] == "full":
            kinds.setdefault(cell["prototypes"], []).append(cell)
    if "orion" not in kinds:
        raise ValueError("nothing to write beside the adapter: evaluate zero_shot with --protocol full and --orion")
    top1 = {}
    for kind, name in PROTOTYPES.items():
        if kind in kinds:
            summary = pooled_summary(kinds[kind], outcomes)
            half = None if math.isnan(summary.low) else round(50 * (summary.high - summary.low), 4)
            top1[name] = {"mean": round(100 * summary.mean, 4), "interval": half}
    cell = kinds["orion"][0]
    seeds = len(kinds["orion"])
    source = cell["dataset"]["source"] or ""
    on_hub = "/" in source and not Path(source).exists()  # a Hub id, and neither a folder nor a task rendered here
    return {
        "top1": top1,
        "protocol": f"zero-shot top-1 over {cell['num_images']} images"
        + (f" of each of {seeds} seeds" if seeds > 1 else "")
        + f", {cell['model']}; 95 % interval over images",
        "command": command,
        "dataset": {"name": cell["task"], "id": source if on_hub else None, "split": cell["dataset"]["split"]},
    }


def _json_number(value: float) -> float | None:
    """JSON has no NaN: the interval of a single value is null."""
    return None if math.isnan(value) else value

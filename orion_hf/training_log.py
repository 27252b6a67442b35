"""`training_log.jsonl`: a line of JSON for every step of a run and, with validation images, for every epoch.

    {"step": 1, "epoch": 1, "loss": ..., "fidelity": ..., "orthogonality": ..., "displacement": ..., ...}
    {"step": 1, "epoch": 1, "accuracy": 61.5, "displacement": 0.003}

The displacement of a step is that of the prototypes it started from; of a validation it is measured with the accuracy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .files import is_finite

LOG_NAME = "training_log.jsonl"
_STEP = {"epoch", "fidelity", "orthogonality", "mean_cosine", "max_cosine", "displacement"}
_VALIDATION = {"epoch", "accuracy", "displacement"}


def read_log(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The lines of a log that hold a record of finite numbers; none if there is no file.

    A log may come from a stranger's repository, or end in half a line of a killed run: what cannot be read is left out.
    """
    rows = []
    if Path(path).is_file():
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(row, dict) and all(is_finite(value) for value in row.values()):
                    rows.append(row)
    return rows


def steps_of(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows of steps that have all a figure needs."""
    return [row for row in rows if row.keys() >= _STEP]


def validations_of(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows of validations that have all a figure needs.

    Example:
        >>> validations_of([{"epoch": 1, "loss": 2.0}, {"epoch": 1, "accuracy": 61.5, "displacement": 0.003}])
        [{'epoch': 1, 'accuracy': 61.5, 'displacement': 0.003}]
    """
    return [row for row in rows if row.keys() >= _VALIDATION]

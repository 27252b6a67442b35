"""Files that are there whole or not at all, and JSON that strangers wrote."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_whole(path: str | os.PathLike[str], write: Callable[[Path], Any]) -> None:
    """Let ``write(temporary_path)`` make the file, then rename it to ``path``; a failure leaves what was there.

    Example:
        >>> write_whole("note.txt", lambda path: path.write_text("done"))  # doctest: +SKIP
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str | os.PathLike[str], data: Any) -> None:
    """Write JSON values; NaN and infinity, which JSON lacks, are refused."""
    text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_json(path: str | os.PathLike[str], largest: int, advice: str) -> Any:
    """JSON values from a file that anyone may have written.

    Args:
        path: the file.
        largest: bytes above which it is not read.
        advice: what to do about a file that cannot be used; the end of the error message.
    """
    if os.path.getsize(path) > largest:
        raise ValueError(f"{path}: more than {largest} bytes. {advice}")
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}). {advice}") from error


def is_finite(value: Any) -> bool:
    """Whether a JSON value is a number that a float can hold.

    Example:
        >>> is_finite(0.5), is_finite(True), is_finite(float("nan")), is_finite(10**400)
        (True, False, False, False)
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False

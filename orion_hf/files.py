"""Files that are there whole or not at all."""

from __future__ import annotations

import json
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

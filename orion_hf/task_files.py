"""Reading class names from files: the text of a file in, a list of names or a record out.

Every error is a ValueError that says what is wrong with the text; the caller puts the file's name before it.
"""

from __future__ import annotations

import csv
import io
import json
from typing import Any


def decode_text(content: bytes) -> str:
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"not UTF-8 text, byte 0x{content[error.start]:02x} at position {error.start} cannot be decoded; "
            "save the file as UTF-8"
        ) from None


def read_txt(text: str) -> list[str]:
    names = [line.strip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
    while names and not names[-1]:
        names.pop()
    if "" in names:
        raise ValueError(f"line {names.index('') + 1} is blank; remove it, the position of a name is its label")
    return names


def read_csv(text: str, column: str | None = None) -> list[str]:
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        raise ValueError(f"not a CSV table ({error})") from None
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    if not rows:
        raise ValueError("the table is empty; write a header row, then a row for each class")
    header = [cell.strip() for cell in rows[0]]
    index = _csv_column(header, column)
    for number, row in enumerate(rows[1:], start=2):
        if len(row) != len(header):
            raise ValueError(
                f"row {number} has {len(row)} cells, the header {len(header)}; quote names that hold commas"
            )
    return [row[index] for row in rows[1:]]


def _csv_column(header: list[str], column: str | None) -> int:
    if column is None:
        lower = [cell.lower() for cell in header]
        usual = [cell for cell in ("class_name", "name", "label", "class", "category") if cell in lower]
        if not usual and len(header) == 1:
            # A list without header would lose its first class, and every label would be off by one.
            raise ValueError(
                f"the first row, {header[0]!r}, is read as the header: write class_name there (columns are "
                "separated by commas), or give column="
            )
        if not usual:
            raise ValueError(f"which column holds the class names? Give column=, one of {', '.join(header)}")
        return lower.index(usual[0])
    if header.count(column) != 1:
        raise ValueError(f"{header.count(column) or 'no'} columns are called {column!r}, there are {', '.join(header)}")
    return header.index(column)


def read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON, {error.msg} at line {error.lineno} column {error.colno}") from None
    except RecursionError:
        raise ValueError("not a task, the JSON is nested too deeply") from None


def read_yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML, {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ValueError("not a task, the YAML is nested too deeply") from None


READERS = {
    ".txt": read_txt,
    ".csv": read_csv,
    ".json": read_json,
    ".yaml": read_yaml,
    ".yml": read_yaml,
}

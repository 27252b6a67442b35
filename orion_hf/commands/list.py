"""List the ORION repositories of an author on the Hub."""

import argparse
import json
from dataclasses import asdict


def main(argv: list[str] | None = None) -> int:
    """``orion-hf list --author org [--json]``: task, base, classes and top-1 as their cards state them."""
    parser = argparse.ArgumentParser(prog="orion-hf list", description=__doc__, allow_abbrev=False)
    parser.add_argument("--author", required=True, help="user or organisation")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    args = parser.parse_args(argv)

    from ..escaping import printable
    from ..hub import list_repositories

    found = list_repositories(args.author)
    if args.json:
        print("\n".join(json.dumps(asdict(listed)) for listed in found))
        return 0
    if not found:
        print(f"{printable(args.author)} has no ORION repositories.")
        return 0
    rows = [("repository", "task", "base", "classes", "top-1")]
    for listed in found:
        top1 = "" if listed.top1 is None else f"{listed.top1:.2f}"
        private = " (private)" if listed.private else ""
        cells = (listed.repo_id + private, listed.task, listed.base, listed.classes, top1)
        rows.append(tuple("" if cell is None else printable(str(cell), 60) for cell in cells))  # type: ignore[arg-type]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0

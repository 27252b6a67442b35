"""Lay out results as the paper's tables: measured beside printed.

orion-hf report out/eurosat/results.json out/dtd --output report.html
orion-hf report out --format latex
"""

import argparse
from pathlib import Path
from typing import Any

_SUFFIXES: dict[str, Any] = {".md": "md", ".html": "html", ".htm": "html", ".tex": "latex", ".csv": "csv"}


def main(argv: list[str] | None = None) -> int:
    """``orion-hf report RESULTS... [--format md|html|latex|csv] [--output FILE] [--full]``."""
    parser = argparse.ArgumentParser(prog="orion-hf report", description=__doc__.split("\n")[0])
    parser.add_argument("results", nargs="+", metavar="RESULTS", help="results.json files, or folders that hold some")
    parser.add_argument("--format", choices=["md", "html", "latex", "csv"], help="default: by --output, else md")
    parser.add_argument("--output", metavar="FILE", help="write there instead of to the screen")
    parser.add_argument("--full", action="store_true", help="also the paper's tables of which nothing was run")
    args = parser.parse_intermixed_args(argv)
    chosen: Any = args.format or ("md" if args.output is None else _SUFFIXES.get(Path(args.output).suffix.lower()))
    if chosen is None:
        raise ValueError(f"--output {args.output}: the name must end in {', '.join(_SUFFIXES)}, or give --format.")

    from ..cells import read_results, results_files
    from ..layout import write_text
    from ..report import report

    text = report(
        read_results(args.results),
        chosen,
        files=results_files(args.results),
        full=args.full,
    )
    if args.output is None:
        print(text, end="")
    else:
        print(f"report    {write_text(args.output, text)}")
    return 0

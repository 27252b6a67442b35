"""What every benchmark needs: interleaved timing, a line about the machine, tables into ``benchmarks/README.md``."""

import argparse
import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
README = Path(__file__).with_name("README.md")


def interleaved(
    steps: Mapping[str, Callable[[], Any]], repeats: int, once: Sequence[str] = ()
) -> dict[str, dict[str, float]]:
    """Seconds of every step: all warmed up, then run in turn, so that a busy moment of the machine hits all alike.

    Args:
        steps: name -> what to time.
        repeats: rounds.
        once: steps too slow for that: no warm-up, and in the first round only.
    """
    for name, run in steps.items():
        if name not in once:
            run()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats):
        for name, run in steps.items():
            if repeat and name in once:
                continue
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {
        name: {"best": min(runs), "median": statistics.median(runs), "runs": len(runs)}
        for name, runs in seconds.items()
    }


def machine(threads: int) -> str:
    """Processor, cores, threads and library versions, for the line above a table."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and (found := re.search(r"model name\s*: (.*)", cpuinfo.read_text())):
        cpu = found[1]
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{cpu}, {os.cpu_count()} cores, {threads} threads, {versions}"


def replace_file(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def update_readme(name: str, section: str) -> None:
    """Put ``section`` between the markers of ``name`` in ``benchmarks/README.md``."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    text = README.read_text(encoding="utf-8")
    if begin not in text or end not in text:
        raise SystemExit(f"{README.name} has no lines {begin} and {end}: put them where the tables belong.")
    head, tail = text.split(begin)[0], text.split(end)[1]
    replace_file(README, f"{head}{begin}\n{section}\n{end}{tail}")


def arguments(description: str, repeats: int = 5) -> argparse.ArgumentParser:
    """A parser with the options all benchmarks have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="write the measurements here")
    parser.add_argument("--markdown", action="store_true", help="put the tables into benchmarks/README.md")
    return parser


def report(name: str, result: dict, section: str, args: argparse.Namespace) -> None:
    """Print the tables, and write what the options ask for."""
    print(section)
    if args.json:
        replace_file(args.json, json.dumps(result, indent=1) + "\n")
    if args.markdown:
        update_readme(name, section)


def command_line(name: str) -> str:
    """The command that is running, as a reader would type it."""
    return " ".join([f"python -m benchmarks.{name}", *sys.argv[1:]])

"""Fine-tune over ranges of settings and seeds, and measure each on a task's images.

orion-hf sweep --lambda 0 0.2 2 20 200 2000 20000 --task eurosat dtd --seeds 3 --output_dir out/sweep
accelerate launch --num_processes 4 training/sweep.py ...     # each process takes a share of the runs on its device

Every combination of the values given is trained and measured zero-shot with the task's evaluation template. Options
that --help does not list are those of orion-hf finetune, the same in all runs. The paper's own lambda grows by 1.15 an
epoch; --orthogonality_growth 1 keeps it at the value swept. The same command continues an interrupted sweep.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from .. import __version__
from ..cells import read_results
from ..checkpoint import checkpoints
from ..features import ImageEncoder, digest_of
from ..labelled import LabelledFeatures
from ..layout import as_text, write_text
from ..modeling_orion import OrionCLIPTextModel
from ..results import RESULTS_NAME
from ..sweep import sweep_curves, sweep_points, sweep_table
from ..tasks import OrionTask
from ..trainer import OrionTrainer, TrainingError, build_accelerator
from ..training_args import OrionTrainingArguments
from .finetune import FinetuneArguments, load_base, parse_arguments, read_tasks

_INTERRUPTED = 130
_LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
# Option -> setting of the training and what its values are.
_SWEPT: dict[str, tuple[str, Any]] = {
    "--lambda": ("orthogonality_weight", float),
    "--learning_rate": ("learning_rate", float),
    "--lora_rank": ("lora_rank", int),
    "--num_train_epochs": ("num_train_epochs", int),
    "--class_text": ("class_text", str),
    "--target_displacement": ("target_displacement", float),
}


@dataclass(frozen=True)
class Run:
    """One training: its task, its settings, those of them that the sweep varies, and where its cell is kept."""

    task: OrionTask
    args: OrionTrainingArguments
    swept: dict[str, Any]
    cell: Path


def main(argv: list[str] | None = None) -> int:
    """Train and measure what is not there yet. 0: all done, 1: some runs failed, 130: interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    options, rest = _parser().parse_known_args(argv)
    share, shares = _share_of_launch()
    script, args = parse_arguments(rest)
    runs = plan(options, script, args)
    output_dir = Path(args.output_dir)
    missing = [run for run in runs if not run.cell.is_file()]
    if share == 0:
        print(f"{len(runs)} runs, {len(runs) - len(missing)} of them done; {output_dir}", file=sys.stderr)
    if missing:
        base, accelerator = load_base(script), build_accelerator(args)
        encoder = ImageEncoder.from_pretrained(script.model, script.revision)
        images: dict[str, LabelledFeatures] = {}
        for run in runs[share::shares]:
            if run.cell.is_file():
                continue
            if run.task.name not in images:
                images[run.task.name] = LabelledFeatures.of_task(  # the same images for every seed
                    encoder,
                    run.task,
                    options.split,
                    source=options.images,
                    images_per_class=options.images_per_class,
                )
            if not measure(run, base, images[run.task.name], script, accelerator):
                print("Interrupted; the same command continues.", file=sys.stderr)
                return _INTERRUPTED
    if not all(run.cell.is_file() for run in runs):
        return 0  # another process has the last runs, and will write the results
    return finish(runs, output_dir, ["orion-hf", "sweep", *argv])


def plan(options: argparse.Namespace, script: FinetuneArguments, args: OrionTrainingArguments) -> list[Run]:
    """All runs, in the order of tasks, settings and seeds. A cell's name depends on all that its figure depends on."""
    if script.training_free is not None:
        raise ValueError("--training_free trains nothing, so there is nothing to sweep.")
    if script.class_prompts is not None:
        raise ValueError("--class_prompts does not go with a sweep: leave it out, or use orion-hf finetune.")
    if script.validation is not None:
        raise ValueError("--validation does not go with a sweep: every run is measured on --images at its end.")
    if args.push_to_hub:
        raise ValueError("--push_to_hub does not go with a sweep: push the setting you chose with orion-hf finetune.")
    if options.seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {options.seeds}.")
    given = {name: values for name, _ in _SWEPT.values() if (values := getattr(options, name)) is not None}
    if not given:
        raise ValueError(f"nothing to sweep: give values to one of {', '.join(_SWEPT)}.")
    args = replace(args, **{name: values[0] for name, values in given.items()})
    swept = {name: list(dict.fromkeys(values)) for name, values in given.items() if len(values) > 1} or given
    output_dir = Path(args.output_dir)
    measured_on = {key: getattr(options, key) for key in ("images", "split", "images_per_class")} | {
        "model": script.model,
        "revision": script.revision,
    }
    runs = []
    for task in read_tasks(script):
        for values in itertools.product(*swept.values()):
            settings = dict(zip(swept, values, strict=True))
            for seed in range(options.seeds):
                run_args = replace(args, **settings, seed=seed)
                key = digest_of({"task": task.to_dict(), "settings": run_args.settings(), **measured_on})[:16]
                folder = output_dir / "running" / key
                runs.append(
                    Run(
                        task,
                        replace(run_args, output_dir=str(folder), resume_from_checkpoint=None),
                        settings,
                        output_dir / "cells" / f"{_file_name(task.name)}-{key}.json",
                    )
                )
    return runs


def measure(
    run: Run, base: OrionCLIPTextModel, images: LabelledFeatures, script: FinetuneArguments, accelerator: Accelerator
) -> bool:
    """Train a run, measure it and keep its cells; False if it was interrupted. One that diverges is kept as failed."""
    model = copy.deepcopy(base)
    folder = Path(run.args.output_dir)
    resume = "latest" if checkpoints(folder) else None
    args = replace(run.args, resume_from_checkpoint=resume, overwrite_output_dir=resume is None)
    common = {
        "task": run.task.name,
        "model": script.model,
        "method": "zero_shot",
        "seed": args.seed,
        "num_images": len(images),
        "sweep": run.swept,
    }
    model.task = run.task
    cells = [
        {**common, "prototypes": "clip", "top1": images.top1(model.prototypes())},
        {**common, "prototypes": "averaged", "top1": images.top1(model.prototypes(run.task.templates))},
    ]
    try:
        result = OrionTrainer(model, run.task, args, accelerator).train()
    except TrainingError as error:
        cells.append({**common, "prototypes": "orion", "top1": None, "error": str(error), "training": args.settings()})
    else:
        if result.stopped == "interrupted":
            return False
        cells.append(
            {
                **common,
                "prototypes": "orion",
                "top1": images.top1(model.prototypes()),
                "stopped": result.stopped,
                "steps": result.steps,
                "displacement": result.after.mean_displacement,
                "mean_cosine": result.after.mean_cosine,
                "training": args.settings(),
            }
        )
    write_text(run.cell, json.dumps(cells, indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    return True


def finish(runs: list[Run], output_dir: Path, command: list[str]) -> int:
    """Gather the cells into results.json, draw the curves, print the table."""
    cells = [cell for run in runs for cell in json.loads(run.cell.read_text(encoding="utf-8"))]
    results = {"kind": "sweep", "orion_hf_version": __version__, "command": shlex.join(command), "cells": cells}
    path = write_text(output_dir / RESULTS_NAME, json.dumps(results, indent=2) + "\n")
    failed = [cell for cell in cells if cell["top1"] is None]
    points = sweep_points(read_results([path])) if len(failed) < len(runs) else []
    if points:
        print(as_text([sweep_table(points)]))
        print(
            "\nORION: mean top-1 in percent ± half of its 95 % interval over seeds (tasks, if several); gain over CLIP."
        )
        for plot in _write_curves(points, output_dir):
            print(f"plot      {plot}")
    print(f"results   {path}")
    for cell in failed:
        print(f"failed: {cell['task']}, seed {cell['seed']}, {cell['sweep']}: {cell['error']}", file=sys.stderr)
    shutil.rmtree(output_dir / "running", ignore_errors=True)
    return 1 if failed else 0


def _write_curves(points: list[Any], output_dir: Path) -> Iterator[Path]:
    try:
        from ..plots import save_figure

        curves = sweep_curves(points)
    except ImportError:
        print("no plots: pip install 'orion-hf[plots]'", file=sys.stderr)
        return
    folder = output_dir / "plots"
    seen: Counter[str] = Counter()
    for title, figure in curves.items():
        folder.mkdir(parents=True, exist_ok=True)
        setting = title.split(":")[0]
        seen[setting] += 1
        yield save_figure(figure, folder / f"{setting}{f'-{seen[setting]}' if seen[setting] > 1 else ''}.png")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="orion-hf sweep", description=__doc__.split("\n")[0], allow_abbrev=False)
    for flag, (name, kind) in _SWEPT.items():
        parser.add_argument(flag, dest=name, type=kind, nargs="+", metavar="VALUE", help=f"values of {name}")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each setting, seeds 0, 1, ... (default: 3)")
    parser.add_argument("--images", metavar="SOURCE", help="image folder or Hub dataset instead of the task's own")
    parser.add_argument("--split", default="test", help="split of the images (default: test)")
    parser.add_argument("--images_per_class", type=int, help="at most so many images of each class")
    parser.epilog = "Further options, such as --model, --task, --output_dir, --config: orion-hf finetune --help"
    return parser


def _share_of_launch() -> tuple[int, int]:
    """Number of this process and of all in an Accelerate launch; (0, 1) without.

    Runs are small and independent: instead of training each on all devices, every process trains its own on one. So
    the variables that would make them one distributed run are taken away before Accelerate sees them.
    """
    share, shares = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if shares > 1 and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    for variable in _LAUNCH:
        os.environ.pop(variable, None)
    return share, shares


def _file_name(task: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in task)[:40]

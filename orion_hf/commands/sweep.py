"""Fine-tune over ranges of settings and seeds, and measure each on a task's images.

orion-hf sweep --lambda 0 0.2 2 20 200 2000 20000 --task eurosat dtd --seeds 3 --output_dir out/sweep
accelerate launch --num_processes 4 training/sweep.py ...     # each process takes a share of the runs on its device

Every combination of the values given is trained and measured zero-shot with the task's evaluation template. Options
that --help does not list are those of orion-hf finetune, the same in all runs. The paper's own lambda grows by 1.15 an
epoch; --orthogonality_growth 1 keeps it at the value swept. The same command continues an interrupted sweep and tries
failed runs again; another command with the same --output_dir adds its runs to those that are there.
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
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from .. import __version__
from ..cells import canonical, read_results
from ..checkpoint import checkpoints
from ..escaping import printable
from ..features import ImageEncoder, digest_of
from ..files import read_json
from ..labelled import LabelledFeatures
from ..layout import as_text, write_text
from ..modeling_orion import OrionCLIPTextModel
from ..options import parse_dataclasses
from ..results import RESULTS_NAME
from ..sweep import sweep_curves, sweep_points, sweep_table
from ..tables import plain
from ..tasks import OrionTask
from ..trainer import OrionTrainer, TrainingError, build_accelerator
from ..training_args import OrionTrainingArguments, setting_choices
from .finetune import FinetuneArguments, load_base, read_tasks

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
_SHORT = {name: flag.removeprefix("--") for flag, (name, _) in _SWEPT.items()}
_LARGEST_CELL = 2**20

Cell = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        task, args: what is trained, and its settings.
        swept: those of the settings that the sweep varies.
        measured_on: what else its figures depend on: images, texts, revision of the model.
        cell: where its figures are kept.
    """

    task: OrionTask
    args: OrionTrainingArguments
    swept: dict[str, Any]
    measured_on: dict[str, Any]
    cell: Path


def main(argv: list[str] | None = None) -> int:
    """Train and measure what is not there yet. 0: all done, 1: some runs failed, 130: interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    options, rest = _parser().parse_known_args(argv)
    share, shares = _share_of_launch()
    script, args = parse_dataclasses(
        (FinetuneArguments, OrionTrainingArguments),
        rest,
        prog="orion-hf sweep",
        description=__doc__.split("\n")[0],
        config=True,
    )
    runs = plan(options, script, args)
    output_dir = Path(args.output_dir)
    mine = runs[share::shares]
    done = sum(run.cell.is_file() for run in runs)
    failed = [run for run in mine if run.cell.is_file() and _has_failed(read_cells(run.cell))]
    if share == 0:
        again = f"{len(failed)} that failed are tried again; " if failed else ""
        print(f"{len(runs)} runs, {done - len(failed)} of them done; {again}{output_dir}", file=sys.stderr)
    if failed or not all(run.cell.is_file() for run in mine):
        base, accelerator = load_base(script), build_accelerator(args)
        encoder = ImageEncoder.from_pretrained(script.model, script.revision)
        images: dict[str, LabelledFeatures] = {}
        for run in failed:  # no other process takes them for done
            run.cell.unlink(missing_ok=True)
        for run in mine:
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
    if options.images_per_class is not None and options.images_per_class < 1:
        raise ValueError(f"--images_per_class must be at least 1, got {options.images_per_class}.")
    given = {name: values for name, _ in _SWEPT.values() if (values := getattr(options, name)) is not None}
    if not given:
        raise ValueError(f"nothing to sweep: give values to one of {', '.join(_SWEPT)}.")
    args = replace(args, **{name: values[0] for name, values in given.items()})
    swept = {name: list(dict.fromkeys(values)) for name, values in given.items() if len(values) > 1} or given
    output_dir = Path(args.output_dir)
    images = {key: getattr(options, key) for key in ("images", "split", "images_per_class")}
    model = {"model": script.model, "revision": script.revision}
    runs = []
    for task in read_tasks(script):
        measured_on = images | {
            "revision": script.revision,
            "classes": digest_of({"names": task.class_names})[:8],
            "templates": "; ".join(task.templates),
            "eval_template": task.eval_template,
        }
        for values in itertools.product(*swept.values()):
            settings = dict(zip(swept, values, strict=True))
            for seed in range(options.seeds):
                run_args = replace(args, **settings, seed=seed)
                key = digest_of({"task": task.to_dict(), "settings": run_args.settings(), **images, **model})[:16]
                folder = output_dir / "running" / key
                runs.append(
                    Run(
                        task,
                        replace(run_args, output_dir=str(folder), resume_from_checkpoint=None),
                        settings,
                        measured_on,
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
        "measured_on": run.measured_on,
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
    """Gather the cells of the folder into results.json, draw the curves, print the table."""
    own = [run.cell for run in runs]
    earlier = sorted(set((output_dir / "cells").glob("*.json")).difference(own))  # of other commands
    measured = apart([read_cells(path) for path in (*own, *earlier)])
    cells = [cell for run in measured for cell in run]
    results = {"kind": "sweep", "orion_hf_version": __version__, "command": shlex.join(command), "cells": cells}
    path = write_text(output_dir / RESULTS_NAME, json.dumps(results, indent=2) + "\n")
    points = sweep_points(read_results([path]), with_failed=True)
    if points:
        print(as_text([sweep_table(points)]))
        print(
            "\nORION: mean top-1 in percent ± half of its 95 % interval over seeds (tasks, if several); gain over CLIP."
        )
        for plot in _write_curves(points, output_dir):
            print(f"plot      {plot}")
    if earlier:
        print(f"earlier   {len(earlier)} of the {len(measured)} runs are of other commands in this folder")
    failed = [run[-1] for run in measured if _has_failed(run)]
    if failed:
        print(f"failed    {len(failed)} of {len(measured)} runs, of which there is no figure:")
    seeds: dict[str, list[int]] = {}
    for cell in failed:
        settings = ", ".join(f"{_SHORT.get(name, name)} {plain(value)}" for name, value in cell["sweep"].items())
        seeds.setdefault(printable(f"{cell['task']}, {settings}"), []).append(cell["seed"])
    for name, numbers in seeds.items():
        print(f"          {name}: seed {', '.join(map(str, numbers))}")
    print(f"results   {path}")
    for cell in failed:
        print(f"failed: {cell['task']}, seed {cell['seed']}, {cell['sweep']}: {cell.get('error')}", file=sys.stderr)
    for run in runs:
        shutil.rmtree(run.args.output_dir, ignore_errors=True)
    with suppress(OSError):  # not empty: it holds a checkpoint of another command that was interrupted
        (output_dir / "running").rmdir()
    return 1 if any(map(_has_failed, measured[: len(runs)])) else 0


def read_cells(path: Path) -> list[Cell]:
    """What is kept of one run: the cells of CLIP and of averaged prompts, then that of the training."""
    advice = "Remove this file; the sweep it is of measures it again."
    cells = read_json(path, _LARGEST_CELL, advice)
    needed = {"task": str, "model": str, "seed": int, "sweep": dict}
    valid = isinstance(cells, list) and all(
        isinstance(cell, dict) and "top1" in cell and all(isinstance(cell.get(k), kind) for k, kind in needed.items())
        for cell in cells
    )
    valid = valid and len(cells) > 0 and isinstance(cells[-1].get("training"), dict)
    if not valid or not isinstance(cells[-1].get("measured_on", {}), dict):
        raise ValueError(f"{path}: not the cells of a run of a sweep. {advice}")
    return cells


def _has_failed(cells: list[Cell]) -> bool:
    return cells[-1]["top1"] is None


def apart(runs: Sequence[list[Cell]]) -> list[list[Cell]]:
    """The cells of runs, with all settings in which any two of the runs differ as what was swept.

    Commands that share a folder may differ in more than what each of them varied: cells that were told apart by that
    alone would seem to be two figures of the same setting. If no setting differs, what was swept is kept.
    """
    values: dict[tuple[str, ...], set[str]] = {}
    order: dict[str, None] = {name: None for run in runs for name in run[-1]["sweep"]}
    swept = set(order)
    for *_, cell in runs:
        for name, value in cell["training"].items():
            values.setdefault((name,), set()).add(canonical(value))
        for name, value in cell.get("measured_on", {}).items():  # tasks differ in templates and models in revisions
            values.setdefault((name, cell["task"], cell["model"]), set()).add(canonical(value))
    order |= {name: None for name, *_ in values}
    varied = {name for (name, *_), found in values.items() if len(found) > 1} - {"seed"} or swept
    named = []
    for run in runs:
        settings = {**run[-1].get("measured_on", {}), **run[-1]["training"]}
        sweep = {name: "none" if (value := settings.get(name)) is None else value for name in order if name in varied}
        named.append([{**cell, "sweep": sweep} for cell in run])
    return named


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
        choices = setting_choices().get(name)
        metavar = None if choices else "VALUE"
        parser.add_argument(
            flag, dest=name, type=kind, nargs="+", choices=choices, metavar=metavar, help=f"values of {name}"
        )
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

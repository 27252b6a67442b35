"""Classify test images with CLIP's and with ORION's prototypes, by zero-shot and test-time methods.

orion-hf evaluate --model openai/clip-vit-base-patch16 --orion org/orion-eurosat --task eurosat \\
    --methods zero_shot mta tpt stata zlap
orion-hf evaluate ... --methods stata --protocol batch --k_eff 1-4 --batch_size 64 --num_tasks 1000
accelerate launch training/evaluate.py ...                                  # the same on several GPUs
orion-hf evaluate --model embedded:tiny-clip --task tiny-land --orion out/demo --seeds 3    # no network

A table comes on the screen, everything else into `results.json` (layout: `orion_hf/results.py`). The same command again
measures only what is missing there.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from datasets import Dataset

from ..card import RESULTS_NAME as CARD_RESULTS_NAME
from ..evaluation import Evaluation, Protocol, TunedText, read_methods
from ..features import ImageEncoder
from ..files import write_json
from ..images import task_images
from ..launch import start_accelerator
from ..measuring import MeasuringArguments, measure_each, read_adapters, read_tasks, versions
from ..modeling_orion import OrionCLIPTextModel
from ..options import parse_dataclasses
from ..results import Cell, Results, card_results, results_table
from ..tasks import OrionTask
from .finetune import read_class_prompts


@dataclass
class EvaluateArguments(MeasuringArguments):
    """Which methods, and on which of the images at a time."""

    methods: list[str] = field(
        default_factory=lambda: ["zero_shot"], metadata={"help": "zero_shot mta tpt stata transclip zlap"}
    )
    options: list[str] = field(
        default_factory=list,
        metadata={"help": "Options of methods: stata.alpha=2 zlap.setup=inductive zlap.unlabeled_features=train"},
    )
    protocol: Literal["full", "batch", "online"] = field(
        default="full",
        metadata={"help": "All test images at once, independent batches of few classes, or correlated streams."},
    )
    k_eff: str | None = field(
        default=None, metadata={"help": "Classes in a batch: 1-4, or very-low ... very-high, all. Default: very-low."}
    )
    correlation: str | None = field(
        default=None, metadata={"help": "Of a stream: low, medium, high, separate. Default: low."}
    )
    batch_size: int | None = field(
        default=None, metadata={"help": "Images a method sees at once. Default: 64 (batch), 128 (online)."}
    )
    num_tasks: int | None = field(
        default=None, metadata={"help": "Batches or streams. Default: 1000 (batch), 100 (online)."}
    )
    seeds: list[int] = field(
        default_factory=lambda: [0],
        metadata={"help": "How many (3: 0, 1 and 2) or, if several, which: they seed views, batches, tiny images."},
    )
    num_views: int = field(default=64, metadata={"help": "Views of an image, itself included (mta, tpt)."})
    output_dir: str = field(default="out/evaluate", metadata={"help": "Folder of results.json."})
    save_to_adapter: bool = field(
        default=False, metadata={"help": "Write the zero-shot result beside each adapter, for its model card."}
    )
    mixed_precision: Literal["no", "fp16", "bf16"] | None = field(
        default=None, metadata={"help": "Of the vision tower. Default: as accelerate is configured."}
    )


def main(argv: list[str] | None = None) -> int:
    """Parse, load both towers, measure task by task, save. 0: all done, 1: a task failed."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse_arguments(argv)
    protocol = Protocol.from_options(
        args.protocol,
        k_eff=args.k_eff,
        correlation=args.correlation,
        batch_size=args.batch_size,
        num_tasks=args.num_tasks,
    )
    read_methods(args.methods, args.options, logit_scale=1.0)  # a misspelt one should not cost the loading of a model
    adapters = read_adapters(args.orion or ())
    tasks = read_tasks(args, adapters)
    results = Results(args.output_dir)
    accelerator = start_accelerator(mixed_precision=args.mixed_precision)
    encoder = ImageEncoder.from_pretrained(args.model, args.revision)
    base = OrionCLIPTextModel.from_pretrained(args.model, revision=args.revision, dtype=torch.float32)
    command = shlex.join(["orion-hf", "evaluate", *argv])
    evaluation = Evaluation(
        encoder,
        base.to(accelerator.device).requires_grad_(False),
        read_methods(args.methods, args.options, encoder.logit_scale),
        protocol,
        results,
        {"command": command, "versions": versions(), "settings": asdict(args)},
        accelerator,
        args.num_views,
        {"batch_size": args.image_batch_size, "num_workers": args.num_workers, "cache_dir": args.cache_dir},
    )

    def measure(task: OrionTask) -> list[Cell]:
        measured = evaluate_task(evaluation, task, adapters.get(task.name), args)
        if args.save_to_adapter and task.name in adapters and accelerator.is_main_process:
            save_to_adapter(adapters[task.name], card_results(measured, results.outcomes, command))
        return measured

    cells, failed = measure_each(tasks, measure, accelerator)
    if cells:
        accelerator.print(f"{args.model}, protocol {protocol.to_dict()}, seeds {args.seeds}\n")
        accelerator.print(results_table(cells, results.outcomes))
        accelerator.print("\npercent correct (difference to CLIP's prototypes on the same images ± 95 %)")
        accelerator.print(f"results   {results.path}")
    accelerator.end_training()
    return 1 if failed else 0


def evaluate_task(evaluation: Evaluation, task: OrionTask, adapter: str | None, args: EvaluateArguments) -> list[Cell]:
    """The cells of one task, all seeds."""
    base = evaluation.base
    task.check_context(base.tokenizer, base.config.max_position_embeddings)
    tuned = None if adapter is None else TunedText.load(adapter, base, task)
    source = args.source(task)
    prompts = read_class_prompts(args.class_prompts, task, base, evaluation.accelerator)
    class_prompts = None if prompts is None else (Path(str(args.class_prompts)).name, prompts)
    cells = []
    for seed in args.seeds:
        images_of: Callable[[str], Dataset] = partial(
            task_images, task, source=args.images, seed=seed, images_per_class=args.images_per_class
        )
        cells += evaluation.run_task(
            task, images_of, source=source, split=args.split, seed=seed, tuned=tuned, class_prompts=class_prompts
        )
    return cells


def parse_arguments(argv: Sequence[str]) -> EvaluateArguments:
    """Flags as a dataclass.

    Example:
        >>> parse_arguments("--model embedded:tiny-clip --task tiny-land --seeds 2".split()).seeds
        [0, 1]
    """
    description = __doc__.split("\n")[0]
    (args,) = parse_dataclasses([EvaluateArguments], argv, prog="orion-hf evaluate", description=description)
    if min(args.seeds) < 0 or len(set(args.seeds)) < len(args.seeds):
        raise ValueError(f"--seeds must be different numbers from 0 up, not {args.seeds}")
    if len(args.seeds) == 1:  # a count, as in the other commands
        args.seeds = list(range(max(1, args.seeds[0])))
    if args.save_to_adapter and args.class_prompts is not None:
        raise ValueError("--save_to_adapter is about the classifier of the task's template: leave out --class_prompts")
    args.check_positive("images_per_class", "image_batch_size")
    return args


def save_to_adapter(adapter: str, results: dict) -> None:
    """Put what was measured beside a local adapter, where `orion-hf card` and `push` find it."""
    if not Path(adapter).is_dir():
        raise ValueError(f"--save_to_adapter: {adapter} is not a local folder; download it and give the folder")
    write_json(Path(adapter) / CARD_RESULTS_NAME, results)

"""Classify test images with CLIP's and with ORION's prototypes, by zero-shot and test-time methods.

orion-hf evaluate --model openai/clip-vit-base-patch16 --orion org/orion-eurosat --task eurosat \\
    --methods zero_shot mta tpt stata zlap
orion-hf evaluate ... --methods stata --protocol batch --k_eff 1-4 --batch_size 64 --num_tasks 1000
accelerate launch training/evaluate.py ...                                  # the same on several GPUs
orion-hf evaluate --model embedded:tiny-clip --task tiny-land --orion out/demo --seeds 0 1 2    # no network

A table comes on the screen, everything else into `results.json` (layout: `orion_hf/results.py`). The same command again
measures only what is missing there.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Literal

import torch
from accelerate import Accelerator
from datasets import Dataset

from ..card import RESULTS_NAME as CARD_RESULTS_NAME
from ..evaluation import Evaluation, Protocol, TunedText, read_methods
from ..features import ImageEncoder
from ..files import write_json
from ..images import task_images, tiny_task_names
from ..modeling_orion import OrionCLIPTextModel
from ..options import parse_dataclasses
from ..repository import read_orion_config
from ..results import Cell, Results, card_results, results_table
from ..tasks import OrionTask
from .finetune import read_class_prompts

_PACKAGES = ("orion-hf", "torch", "transformers", "peft", "accelerate", "datasets", "numpy", "pillow")


@dataclass
class EvaluateArguments:
    """What to evaluate on what."""

    model: str = field(metadata={"help": "CLIP or MetaCLIP: a Hub id, a folder, or embedded:tiny-clip."})
    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of the model."})
    task: list[str] | None = field(
        default=None,
        metadata={"help": "Built-in tasks; all: every benchmark of the paper. Default: those of the adapters."},
    )
    orion: list[str] | None = field(
        default=None,
        metadata={"help": "Adapters (folders or Hub ids), each used for the task in its orion_config.json."},
    )
    methods: list[str] = field(
        default_factory=lambda: ["zero_shot"], metadata={"help": "zero_shot mta tpt stata transclip zlap"}
    )
    options: list[str] = field(
        default_factory=list,
        metadata={"help": "Options of methods: stata.alpha=2 zlap.setup=inductive zlap.unlabeled_features=train"},
    )
    class_prompts: str | None = field(
        default=None,
        metadata={"help": "JSON file {class name: [sentences]}: prototypes are of these, not of the templates."},
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
        metadata={"help": "Seed views and protocols; of the tiny tasks also the images."},
    )
    images: str | None = field(
        default=None, metadata={"help": "Hub dataset id or image folder (a sub-folder a class) to use instead."}
    )
    split: str = field(default="test", metadata={"help": "Split of the images."})
    images_per_class: int | None = field(default=None, metadata={"help": "At most so many images of a class."})
    num_views: int = field(default=64, metadata={"help": "Views of an image, itself included (mta, tpt)."})
    output_dir: str = field(default="out/evaluate", metadata={"help": "Folder of results.json."})
    save_to_adapter: bool = field(
        default=False, metadata={"help": "Write the zero-shot result beside each adapter, for its model card."}
    )
    cache_dir: str | None = field(default=None, metadata={"help": "Folder of image features."})
    image_batch_size: int = field(default=64, metadata={"help": "Pictures in a forward pass of the vision tower."})
    num_workers: int = field(default=0, metadata={"help": "Processes that decode images."})
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
    adapters = read_adapters(args.orion or ())
    tasks = read_tasks(args, adapters)
    results = Results(args.output_dir)
    accelerator = Accelerator(mixed_precision=args.mixed_precision)
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

    cells: list[Cell] = []
    failures = []
    for task in tasks:
        try:
            measured = evaluate_task(evaluation, task, adapters.get(task.name), args)
            if args.save_to_adapter and task.name in adapters and accelerator.is_main_process:
                save_to_adapter(adapters[task.name], card_results(measured, results.outcomes, command))
        except (ValueError, OSError, RuntimeError) as error:
            if len(tasks) == 1:
                raise
            failures.append(f"{task.name} failed: {error}")
            continue
        cells += measured
    if cells:
        accelerator.print(f"{args.model}, protocol {protocol.to_dict()}, seeds {args.seeds}\n")
        accelerator.print(results_table(cells, results.outcomes))
        accelerator.print("\npercent correct (difference to CLIP's prototypes on the same images ± 95 %)")
        accelerator.print(f"results   {results.path}")
    for failure in failures:
        accelerator.print(failure, file=sys.stderr)
    accelerator.end_training()
    return 1 if failures else 0


def evaluate_task(evaluation: Evaluation, task: OrionTask, adapter: str | None, args: EvaluateArguments) -> list[Cell]:
    """The cells of one task, all seeds."""
    base = evaluation.base
    task.check_context(base.tokenizer, base.config.max_position_embeddings)
    tuned = None if adapter is None else TunedText.load(adapter, base, task)
    source = args.images or next((copy.id for copy in task.hub_datasets), None)
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
        >>> parse_arguments("--model embedded:tiny-clip --task tiny-land --seeds 0 1".split()).seeds
        [0, 1]
    """
    description = __doc__.split("\n")[0]
    (args,) = parse_dataclasses([EvaluateArguments], argv, prog="orion-hf evaluate", description=description)
    if min(args.seeds) < 0 or len(set(args.seeds)) < len(args.seeds):
        raise ValueError(f"--seeds must be different numbers from 0 up, not {args.seeds}")
    if args.save_to_adapter and args.class_prompts is not None:
        raise ValueError("--save_to_adapter is about the classifier of the task's template: leave out --class_prompts")
    for name in ("images_per_class", "image_batch_size"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, not {getattr(args, name)}")
    return args


def read_adapters(names: Sequence[str]) -> dict[str, str]:
    """Task name -> adapter."""
    adapters: dict[str, str] = {}
    for name in names:
        config = read_orion_config(name)
        if config is None or config.task is None:
            raise ValueError(f"--orion {name}: it has no orion_config.json that names its task")
        if config.task.name in adapters:
            raise ValueError(
                f"--orion {adapters[config.task.name]} and {name} are both of task {config.task.name}: "
                "evaluate one after the other, with the same --output_dir"
            )
        adapters[config.task.name] = name
    return adapters


def read_tasks(args: EvaluateArguments, adapters: Mapping[str, str]) -> list[OrionTask]:
    """The tasks asked for, or those of the adapters; every adapter must have its task among them."""
    if args.task is None:
        if not adapters:
            raise ValueError("Give --task, for example eurosat, or --orion with adapters that bring their tasks.")
        configs = [read_orion_config(adapter) for adapter in adapters.values()]
        return [config.task for config in configs if config is not None and config.task is not None]
    names = list(args.task)
    if names == ["all"]:
        # The embedded model knows its own small world and nothing else, and other models do not know that.
        tiny = args.model.startswith("embedded:")
        names = [name for name in OrionTask.available() if (name in tiny_task_names()) == tiny]
    tasks = [OrionTask.from_name(name) for name in dict.fromkeys(names)]
    for name, adapter in adapters.items():
        if name not in [task.name for task in tasks]:
            raise ValueError(f"--orion {adapter} is of task {name}, which is not among --task {' '.join(names)}")
    return tasks


def save_to_adapter(adapter: str, results: dict) -> None:
    """Put what was measured beside a local adapter, where `orion-hf card` and `push` find it."""
    if not Path(adapter).is_dir():
        raise ValueError(f"--save_to_adapter: {adapter} is not a local folder; download it and give the folder")
    write_json(Path(adapter) / CARD_RESULTS_NAME, results)


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    return {"python": python_version()} | {package: version(package) for package in _PACKAGES}

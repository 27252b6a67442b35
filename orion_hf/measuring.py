"""What `orion-hf evaluate` and `orion-hf fewshot` share: which model on which tasks, adapters and images."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from platform import python_version

from accelerate import Accelerator

from .images import tiny_task_names
from .repository import read_orion_config
from .results import Cell
from .tasks import OrionTask

_PACKAGES = ("orion-hf", "torch", "transformers", "peft", "accelerate", "datasets", "numpy", "pillow")


@dataclass
class MeasuringArguments:
    """What is measured on what."""

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
    class_prompts: str | None = field(
        default=None,
        metadata={"help": "JSON file {class name: [sentences]}: prototypes are of these, not of the templates."},
    )
    images: str | None = field(
        default=None, metadata={"help": "Hub dataset id or image folder (a sub-folder a class) to use instead."}
    )
    split: str = field(default="test", metadata={"help": "Split of the test images."})
    images_per_class: int | None = field(default=None, metadata={"help": "At most so many test images of a class."})
    cache_dir: str | None = field(default=None, metadata={"help": "Folder of image features."})
    image_batch_size: int = field(default=64, metadata={"help": "Pictures in a forward pass of the vision tower."})
    num_workers: int = field(default=0, metadata={"help": "Processes that decode test images."})

    def check_positive(self, *names: str) -> None:
        """Refuse a number below 1, by its flag."""
        for name in names:
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ValueError(f"--{name} must be at least 1, not {number}")

    def source(self, task: OrionTask) -> str | None:
        """Where the images come from; None if they are rendered here."""
        return self.images or next((copy.id for copy in task.hub_datasets), None)


def read_adapters(names: Sequence[str]) -> dict[str, str]:
    """Task name -> adapter."""
    adapters: dict[str, str] = {}
    for name in names:
        try:
            config = read_orion_config(name)
        except OSError as error:
            raise ValueError(f"--orion {error}") from error
        if config is None or config.task is None:
            raise ValueError(f"--orion {name}: it has no orion_config.json that names its task")
        if config.task.name in adapters:
            raise ValueError(
                f"--orion {adapters[config.task.name]} and {name} are both of task {config.task.name}: "
                "measure one after the other, with the same --output_dir"
            )
        adapters[config.task.name] = name
    return adapters


def read_tasks(args: MeasuringArguments, adapters: Mapping[str, str]) -> list[OrionTask]:
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


def measure_each(
    tasks: Sequence[OrionTask], measure: Callable[[OrionTask], list[Cell]], accelerator: Accelerator
) -> tuple[list[Cell], bool]:
    """The cells of all tasks, and whether one failed, which is said and does not stop the others; if alone, raised."""
    cells: list[Cell] = []
    failed = False
    for task in tasks:
        try:
            cells += measure(task)
        except (ValueError, OSError, RuntimeError) as error:
            if len(tasks) == 1 or accelerator.num_processes > 1:  # other processes would wait for this one
                raise
            failed = True
            accelerator.print(f"{task.name} failed: {error}", file=sys.stderr)
    return cells, failed


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    return {"python": python_version()} | {package: version(package) for package in _PACKAGES}

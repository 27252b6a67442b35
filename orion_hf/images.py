"""Labelled images for a task: the embedded tiny tasks, a dataset on the Hub, or a local image folder.

Labels are matched to the task's classes **by name**: copies of the same benchmark order their classes differently.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .tasks import HubDataset, OrionTask, builtin_record

if TYPE_CHECKING:
    from datasets import Dataset

IMAGE_COLUMNS = ("image", "img", "webp", "jpg", "png")
LABEL_COLUMNS = ("label", "labels", "cls", "class", "fine_label")


def task_images(
    task: OrionTask,
    split: str = "test",
    *,
    source: str | None = None,
    seed: int = 0,
    images_per_class: int | None = None,
    token: str | bool | None = None,
) -> Dataset:
    """Images of a task as a dataset with columns ``image`` and ``label``, labels in the order of ``task.class_names``.

    Args:
        task: the task; `tiny-*` tasks are rendered here, others come from the first Hub copy the task names.
        split: ``"test"`` or ``"train"``, or a split of ``source``.
        source: a Hub dataset id or a local image folder (one sub-folder a class) to use instead.
        seed: for the tiny tasks: which images are rendered.
        images_per_class: for the tiny tasks: how many; elsewhere: at most so many of each class, the first ones.
        token: access token for gated or private datasets.

    Example:
        >>> images = task_images(OrionTask.from_name("tiny-land"), images_per_class=2)
        >>> images.features["label"].names[0] == OrionTask.from_name("tiny-land").class_names[0]
        True
    """
    if source is None and task.name in tiny_task_names():
        from .tiny_world import tiny_dataset

        sizes = {} if images_per_class is None else {"images_per_class": images_per_class}
        return tiny_dataset(task.name, split=split, seed=seed, **sizes)
    copy = HubDataset(id=source) if source is not None else _first_copy(task)
    dataset = align_labels(_load(copy, split, token), task, copy)
    return dataset if images_per_class is None else _first_of_each_class(dataset, images_per_class)


def tiny_task_names() -> tuple[str, ...]:
    """Names of the tasks whose images the package renders itself."""
    return tuple(name for name in OrionTask.available() if name.startswith("tiny-"))


def align_labels(dataset: Dataset, task: OrionTask, copy: HubDataset | None = None) -> Dataset:
    """The dataset with columns ``image`` and ``label``, its labels renumbered to ``task.class_names`` by name.

    Case, spaces and punctuation do not matter. Classes of the task that the dataset lacks are fine; a label of the
    dataset that is no class of the task is an error which shows the nearest names.
    """
    from datasets import ClassLabel

    copy = copy or HubDataset(id="the dataset")
    image_column = _column(dataset, copy.image_column, IMAGE_COLUMNS, "image", copy.id)
    label_column = _column(dataset, copy.label_column, LABEL_COLUMNS, "label", copy.id)
    feature = dataset.features[label_column]
    if not isinstance(feature, ClassLabel):
        raise ValueError(
            f"{copy.id}: column {label_column!r} holds no class names, so labels cannot be matched by name; "
            "cast it to a datasets.ClassLabel"
        )
    index = _class_index(feature.names, task, copy.id)
    dataset = dataset.select_columns([image_column, label_column])
    if unlabelled := sum(label is None or label < 0 for label in dataset[label_column]):
        raise ValueError(f"{copy.id}: {unlabelled} of its {len(dataset)} images have no label; choose another split")
    if index != list(range(task.num_classes)):
        labels = [index[label] for label in dataset[label_column]]
        dataset = dataset.remove_columns([label_column]).add_column(label_column, labels)
    dataset = dataset.cast_column(label_column, ClassLabel(names=list(task.label_names)))
    return dataset.rename_columns(
        {old: new for old, new in ((image_column, "image"), (label_column, "label")) if old != new}
    )


def _class_index(names: Sequence[str], task: OrionTask, source: str) -> list[int]:
    """For each label name of the dataset, the position of its class in the task."""
    lists = [task.label_names, task.class_names]
    record = builtin_record(task.name)
    for key in ("class_names_unique", "folder_names", "wordnet_ids"):
        if record is not None and len(record.get(key) or ()) == task.num_classes:
            lists.append(record[key])
    exact = {name: k for known in reversed(lists) for k, name in reversed(list(enumerate(known)))}
    # Spellings of several classes (C, C++ and C# without their signs) name none of them.
    loose: dict[str, set[int]] = {}
    for name, k in exact.items():
        loose.setdefault(_plain(name), set()).add(k)
    spellings = {name: next(iter(found)) for name, found in loose.items() if name and len(found) == 1}
    index = [exact.get(name, spellings.get(_plain(name))) for name in names]
    unknown = [name for name, k in zip(names, index, strict=True) if k is None]
    if unknown:
        nearest = difflib.get_close_matches(_plain(unknown[0]), spellings, n=3, cutoff=0.3)
        shown = ", ".join(repr(task.class_names[spellings[match]]) for match in nearest) or "none is near"
        raise ValueError(
            f"{source}: {len(unknown)} of its {len(names)} label names are no class of {task.name}, "
            f"first {unknown[0]!r} (nearest: {shown}); rename its labels or the task's classes"
        )
    return [k for k in index if k is not None]


def _plain(name: str) -> str:
    return re.sub(r"[\W_]+", "", name.casefold())


def _first_copy(task: OrionTask) -> HubDataset:
    if not task.hub_datasets:
        raise ValueError(f"task {task.name!r} names no images; pass a Hub dataset id or an image folder as source")
    return task.hub_datasets[0]


def _load(copy: HubDataset, split: str, token: str | bool | None) -> Dataset:
    from datasets import load_dataset

    split = {"test": copy.test_split, "train": copy.train_split}.get(split) or split
    try:
        if Path(copy.id).is_dir() and not any(Path(copy.id).glob("*.parquet")):
            return load_dataset("imagefolder", data_dir=copy.id, split=split)
        return load_dataset(copy.id, copy.config, revision=copy.revision, split=split, token=token)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"cannot load images from {copy.id!r}, split {split!r}: {reason}") from error


def _column(dataset: Dataset, name: str | None, usual: Sequence[str], what: str, source: str) -> str:
    if name is None:
        name = next((candidate for candidate in usual if candidate in dataset.features), None)
    if name is None or name not in dataset.features:
        raise ValueError(f"{source}: which column holds the {what}? It has {', '.join(dataset.features)}")
    return name


def _first_of_each_class(dataset: Dataset, count: int) -> Dataset:
    seen: dict[int, int] = {}
    kept = []
    for row, label in enumerate(dataset["label"]):
        if seen.setdefault(label, 0) < count:
            seen[label] += 1
            kept.append(row)
    return dataset.select(kept)

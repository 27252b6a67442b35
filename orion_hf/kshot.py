"""K-shot support sets: which images are drawn, and the features of their augmented copies.

The draw is CoOp's: seeded once, the classes in order of first appearance, ``random.sample`` in each. A split is saved
as JSON, so that a run can be repeated; the test split is never touched.

    split = k_shot_split(train["label"], shots=16, seed=1, validation_labels=val["label"])
    split.save_json("dtd-16-1.json")
    features = augmented_features(train.select(split.train)["image"], encode, passes=20, seed=1)   # (20, N, d)
    CLAP().fit(features, labels[split.train], prototypes)
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .files import read_json, write_whole

if TYPE_CHECKING:
    from PIL.Image import Image

SHOTS = (1, 2, 4, 8, 16)
COOP_CROP_AREA = (0.08, 1.0)
TIP_ADAPTER_CROP_AREA = (0.5, 1.0)
FILLS = ("smaller", "replacement")
LARGEST_JSON = 64 * 2**20  # bytes; a position takes about ten
_ADVICE = "Give a file written by save_json(), or draw a new split."
_CROP_RATIO = (3 / 4, 4 / 3)


@dataclass(frozen=True)
class KShotSplit:
    """A drawn support set.

    Attributes:
        shots: images a class, K.
        seed: of the draw.
        fill: what happened to classes with fewer images, see [`k_shot_split`].
        train: positions in the training labels, in drawing order.
        validation: positions in the validation labels (in the training labels if ``validation_from_train``).
        validation_from_train: the dataset has no validation split, so these are training images left over.
        labels_digest: SHA-256 of the labels it was drawn from; [`check`] compares it.
    """

    shots: int
    seed: int
    fill: str
    train: list[int]
    validation: list[int]
    validation_from_train: bool
    labels_digest: str

    def check(self, labels: Iterable[int], validation_labels: Iterable[int] | None = None) -> None:
        """Raise if the split was drawn from other labels than these: its positions would mean other images."""
        given, held_out = _indices(labels), _indices(validation_labels)
        if _digest(given, held_out) != self.labels_digest:
            raise ValueError(
                f"This {self.shots}-shot split (seed {self.seed}) was drawn from other labels: "
                "use the dataset and order it was made for, or draw a new one."
            )
        sizes = {"train": len(given), "validation": len(given if self.validation_from_train else held_out)}
        for name, size in sizes.items():
            if outside := [position for position in getattr(self, name) if not 0 <= position < size]:
                raise ValueError(
                    f"This {self.shots}-shot split (seed {self.seed}) has {len(outside)} {name} positions that are not "
                    f"among {size} images, the first is {outside[0]}: it was changed after the draw; draw a new one."
                )

    def save_json(self, path: str | Path) -> Path:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"
        write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
        return path

    @classmethod
    def from_json(cls, path: str | Path) -> KShotSplit:
        """Read what `save_json` wrote; [`check`] then says whether it belongs to a dataset."""
        record = read_json(path, LARGEST_JSON, _ADVICE)
        names = [field.name for field in fields(cls)]
        if not isinstance(record, dict) or sorted(record) != sorted(names):
            raise ValueError(f"{path} is no K-shot split: it must have {', '.join(names)}. {_ADVICE}")
        wanted = {
            "shots": (_is_count(record["shots"]) and record["shots"] >= 1, "an integer of at least 1"),
            "seed": (isinstance(record["seed"], int) and not isinstance(record["seed"], bool), "an integer"),
            "fill": (record["fill"] in FILLS, f"one of {', '.join(FILLS)}"),
            "train": (_are_positions(record["train"]) and record["train"], "a list of positions, not empty"),
            "validation": (_are_positions(record["validation"]), "a list of positions"),
            "validation_from_train": (isinstance(record["validation_from_train"], bool), "true or false"),
            "labels_digest": (isinstance(record["labels_digest"], str), "a SHA-256 digest"),
        }
        for name, (good, what) in wanted.items():
            if not good:
                raise ValueError(f"{path} is no K-shot split: {name} must be {what}. {_ADVICE}")
        return cls(**record)


def k_shot_split(
    labels: Iterable[int],
    shots: int,
    seed: int,
    *,
    validation_labels: Iterable[int] | None = None,
    validation_from_train: bool = False,
    fill: str = "smaller",
) -> KShotSplit:
    """Draw ``shots`` images of every class, and ``min(shots, 4)`` for validation with the same generator going on.

    Args:
        labels: class indices of the training images, from [`read_labels`] or anything that lists them.
        shots: K; published: 1, 2, 4, 8, 16.
        seed: published: 1, 2, 3.
        validation_labels: class indices of the validation images, if the dataset has such a split.
        validation_from_train: draw the validation images from the training images not taken.
        fill: a class with fewer than K images is taken whole, without drawing (``smaller``, CoOp and CLAP), or filled
            to K by drawing with replacement (``replacement``, Tip-Adapter).

    Example:
        >>> k_shot_split([0, 0, 1, 1, 1, 2], shots=2, seed=1).train
        [0, 1, 3, 2, 5]
    """
    shots, seed = _integer("shots", shots), _integer("seed", seed)
    if shots < 1:
        raise ValueError(f"shots must be at least 1, got {shots}.")
    if fill not in FILLS:
        raise ValueError(f"fill {fill!r} is not known: choose 'smaller' or 'replacement'.")
    if validation_from_train and validation_labels is not None:
        raise ValueError("Give validation_labels or validation_from_train, not both.")
    labels, validation = _indices(labels), _indices(validation_labels)
    if not labels:
        raise ValueError("labels is empty: there is nothing to draw from.")
    rng = random.Random(seed)
    train = _draw(range(len(labels)), labels, shots, rng, fill)
    few = min(shots, 4)
    if validation_from_train:
        taken = set(train)
        held_out = _draw([i for i in range(len(labels)) if i not in taken], labels, few, rng, "smaller")
    else:
        held_out = _draw(range(len(validation)), validation, few, rng, fill)
    return KShotSplit(shots, seed, fill, train, held_out, validation_from_train, _digest(labels, validation))


def read_labels(source: Any, column: str = "label", class_names: Sequence[str] | None = None) -> list[int]:
    """Class indices of a `datasets.Dataset`, of a safetensors feature file with a tensor ``labels``, or of a sequence.

    Args:
        source: the dataset, the path of the file, or the labels.
        column: of a dataset.
        class_names: what the indices of labels that are names refer to; default: the names that occur, sorted. Give
            the same for every split of a dataset.

    Example:
        >>> read_labels(torch.tensor([2, 0])), read_labels(["dog", "cat", "dog"])
        ([2, 0], [1, 0, 1])
    """
    where = "labels"
    if isinstance(source, str | Path):
        where, source = f"{source}: labels", _labels_of_file(source)
    elif (names := getattr(source, "column_names", None)) is not None:
        if column not in names:
            raise ValueError(f"The dataset has no column {column!r}, only {names}.")
        where, source = f"column {column!r}", list(source[column])
    labels = source.tolist() if hasattr(source, "tolist") else list(source)
    if labels and all(isinstance(label, str) for label in labels):
        order = {name: index for index, name in enumerate(class_names or sorted(set(labels)))}
        if missing := sorted(set(labels) - set(order)):
            raise ValueError(f"{where}: {missing[0]!r} is not among the {len(order)} class_names.")
        return [order[label] for label in labels]
    return _indices(labels, where)


def _labels_of_file(path: str | Path) -> Tensor:
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such file; give a safetensors file with a tensor 'labels'.")
    try:
        with safe_open(str(path), "pt") as file:
            names = sorted(file.keys())
            if "labels" in names:
                return file.get_tensor("labels")
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a safetensors file ({error}). Files of torch.save and pickle (.pt, .pth, .pkl) are not "
            "read: write the labels with safetensors.torch.save_file({'labels': labels}, ...)."
        ) from error
    raise ValueError(f"{path} holds no tensor 'labels', only {names}.")


def augmented_features(
    images: Sequence[Image],
    encode: Callable[[list[Image]], Tensor],
    *,
    passes: int = 20,
    area: tuple[float, float] = COOP_CROP_AREA,
    size: int = 224,
    seed: int = 0,
    batch_size: int = 64,
) -> Tensor:
    """Features of ``passes`` augmented copies of every image: ``(passes, N, d)``, as CLAP and Tip-Adapter cache them.

    CLAP takes 20 passes with CoOp's crops (`COOP_CROP_AREA`), Tip-Adapter 10 with `TIP_ADAPTER_CROP_AREA`. Pass and
    image seed the crop, so the result does not depend on ``batch_size``.

    Args:
        images: N images.
        encode: images (already cropped to ``size``) to features ``(B, d)``, un-normalised.
        size: side of the crops, that of the image encoder.
    """
    if not len(images) or passes < 1:
        raise ValueError(f"Need at least one image and one pass, got {len(images)} images and {passes} passes.")
    rows = []
    for step in range(passes):
        for start in range(0, len(images), batch_size):
            positions = range(start, min(start + batch_size, len(images)))
            rngs = [random.Random(f"{seed}-{step}-{i}") for i in positions]
            crops = [
                random_crop_and_flip(images[i], rng, size=size, area=area)
                for i, rng in zip(positions, rngs, strict=True)
            ]
            rows.append(encode(crops).detach())
    return torch.cat(rows).reshape(passes, len(images), -1)


def random_crop_and_flip(
    image: Image, rng: random.Random, *, size: int = 224, area: tuple[float, float] = COOP_CROP_AREA
) -> Image:
    """CoOp's training augmentation: a random resized crop, bicubic, and a mirror image half of the time.

    The crop covers a uniform share of the image within ``area``, at an aspect ratio log-uniform in 3/4..4/3. If ten
    tries do not fit into the image, it is the largest centred crop of an allowed ratio.
    """
    from PIL import Image as pil

    crop = image.convert("RGB").resize((size, size), pil.Resampling.BICUBIC, box=_crop_box(image.size, rng, area))
    return crop.transpose(pil.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else crop


def _crop_box(extent: tuple[int, int], rng: random.Random, area: tuple[float, float]) -> tuple[int, int, int, int]:
    width, height = extent
    for _ in range(10):
        pixels = width * height * rng.uniform(*area)
        ratio = math.exp(rng.uniform(*map(math.log, _CROP_RATIO)))
        w, h = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = rng.randint(0, width - w), rng.randint(0, height - h)
            return left, top, left + w, top + h
    w = min(width, round(height * _CROP_RATIO[1]))
    h = min(height, round(width / _CROP_RATIO[0]))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def _draw(positions: Iterable[int], labels: list[int], shots: int, rng: random.Random, fill: str) -> list[int]:
    by_class: dict[int, list[int]] = {}
    for position in positions:
        by_class.setdefault(labels[position], []).append(position)
    drawn = []
    for items in by_class.values():
        if len(items) >= shots:
            drawn += rng.sample(items, shots)
        else:
            drawn += items if fill == "smaller" else rng.choices(items, k=shots)
    return drawn


def _indices(labels: Iterable[int] | None, where: str = "labels") -> list[int]:
    """Class indices as a list of Python's integers."""
    if labels is None:
        return []
    found = []
    for position, label in enumerate(labels.tolist() if hasattr(labels, "tolist") else labels):
        try:
            found.append(operator.index(label))
        except TypeError as error:
            advice = ": read_labels() turns names into them" if isinstance(label, str) else ""
            raise ValueError(f"{where}[{position}] is {label!r}, but labels are class indices{advice}.") from error
        if found[-1] < 0:
            raise ValueError(
                f"{where}[{position}] is {label}, which stands for an unknown class: take a split that has labels."
            )
    return found


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError as error:
        raise ValueError(f"{name} must be an integer, got {value!r}.") from error


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_positions(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _digest(labels: list[int], validation_labels: list[int]) -> str:
    return hashlib.sha256(json.dumps([labels, validation_labels]).encode()).hexdigest()

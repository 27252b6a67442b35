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
import os
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

SHOTS = (1, 2, 4, 8, 16)
COOP_CROP_AREA = (0.08, 1.0)
TIP_ADAPTER_CROP_AREA = (0.5, 1.0)
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
        if _digest(_as_list(labels), _as_list(validation_labels)) != self.labels_digest:
            raise ValueError(
                f"This {self.shots}-shot split (seed {self.seed}) was drawn from other labels: "
                "use the dataset and order it was made for, or draw a new one."
            )

    def save_json(self, path: str | Path) -> Path:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(asdict(self), indent=1, sort_keys=True) + "\n", encoding="utf-8")
        os.replace(temporary, path)
        return path

    @classmethod
    def from_json(cls, path: str | Path) -> KShotSplit:
        try:
            return cls(**json.loads(Path(path).read_text(encoding="utf-8")))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} is no K-shot split: give a file written by save_json().") from error


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
    if shots < 1:
        raise ValueError(f"shots must be at least 1, got {shots}.")
    if fill not in ("smaller", "replacement"):
        raise ValueError(f"fill {fill!r} is not known: choose 'smaller' or 'replacement'.")
    if validation_from_train and validation_labels is not None:
        raise ValueError("Give validation_labels or validation_from_train, not both.")
    labels, validation = _as_list(labels), _as_list(validation_labels)
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


def read_labels(source: Any, column: str = "label") -> list[int]:
    """Class indices of a `datasets.Dataset`, of a safetensors feature file with a tensor ``labels``, or of a sequence.

    Example:
        >>> read_labels(torch.tensor([2, 0]))
        [2, 0]
    """
    if isinstance(source, str | Path):
        from safetensors import safe_open

        with safe_open(str(source), "pt") as file:
            if "labels" not in file.keys():  # noqa: SIM118
                raise ValueError(f"{source} holds no tensor 'labels', only {sorted(file.keys())}.")
            return file.get_tensor("labels").tolist()
    names = getattr(source, "column_names", None)
    if names is not None:
        if column not in names:
            raise ValueError(f"The dataset has no column {column!r}, only {names}.")
        return list(source[column])
    return _as_list(source)


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


def _as_list(labels: Iterable[int] | None) -> list[int]:
    if labels is None:
        return []
    return labels.tolist() if hasattr(labels, "tolist") else [int(label) for label in labels]


def _digest(labels: list[int], validation_labels: list[int]) -> str:
    return hashlib.sha256(json.dumps([labels, validation_labels]).encode()).hexdigest()

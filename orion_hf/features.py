"""Image features from a CLIP vision tower, kept on disk.

    encoder = ImageEncoder.from_pretrained("openai/clip-vit-base-patch16")
    found = image_features(encoder, task_images(task))
    found.features                                  # (N, d), unit rows; labels are those of the rows found.rows

A cache folder is named by a hash of everything the features depend on (see `feature_key`), so a change of any of it
never meets old features. It holds shards of about a thousand pictures, each written whole or not at all: an interrupted
extraction goes on where it stopped, also with another number of processes. Processes share the shards among
themselves and must see the same cache folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from datasets import Dataset
from datasets import Image as ImageFeature
from huggingface_hub import cached_assets_path
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset
from tqdm import tqdm
from transformers import AutoImageProcessor, AutoModelForZeroShotImageClassification, CLIPModel

from .files import write_json, write_whole
from .repository import Repository
from .views import Views, augmented_views

FORMAT_VERSION = 1  # of the cache; part of the key
SHARD_PICTURES = 1024  # pictures of a shard, so at most what an interruption loses
_NAMED = 5


@dataclass
class ImageEncoder:
    """A CLIP's vision tower with its preprocessing.

    Attributes:
        clip: the model; its text tower is not used.
        processor: turns a picture into ``pixel_values``.
        name, revision: where it came from; the revision is the commit on the Hub, None for a folder.
    """

    clip: CLIPModel
    processor: Any
    name: str
    revision: str | None = None

    @classmethod
    def from_pretrained(cls, name: str, revision: str | None = None, **options: Any) -> ImageEncoder:
        """Load in float32 from a folder, the Hub, or ``embedded:tiny-clip``; options as ``token``, ``cache_dir``."""
        repository = Repository.open(name, revision, **options)
        try:
            clip = AutoModelForZeroShotImageClassification.from_pretrained(
                repository.path, dtype=torch.float32, **repository.loading
            )
            processor = AutoImageProcessor.from_pretrained(repository.path, **repository.loading)
        except (OSError, ValueError) as error:
            raise OSError(f"no vision tower could be loaded from {name}: {str(error).splitlines()[0]}") from error
        if not isinstance(clip, CLIPModel):
            raise ValueError(f"{name} is a {type(clip).__name__}: choose a CLIP or MetaCLIP model.")
        return cls(clip.eval().requires_grad_(False), processor, name, repository.commit)

    @property
    def logit_scale(self) -> float:
        """``exp`` of the learned log-scale: 100 for the published models."""
        return self.clip.logit_scale.exp().item()

    @property
    def image_size(self) -> int:
        vision_config: Any = self.clip.config.vision_config
        return vision_config.image_size

    @cached_property
    def weights(self) -> str:
        """A hash of the vision weights: folders change without a revision, and a branch moves."""
        tower = nn.ModuleList([self.clip.vision_model, self.clip.visual_projection])
        return weights_digest(tower.state_dict())

    def encode(self, pixel_values: Tensor) -> Tensor:
        """Unit embeddings ``(N, d)`` in float32, whatever precision the tower runs in."""
        image_embeds: Any = self.clip.get_image_features(pixel_values=pixel_values.to(self.clip.device))
        return normalize(image_embeds.pooler_output.float(), dim=-1)


@dataclass(frozen=True)
class ImageFeatures:
    """Features of the readable images of a dataset.

    Attributes:
        features: ``(N, d)`` float32 unit rows; ``(N, V, d)`` float16 with views, which are many.
        rows: ``(N,)``, where each image is in the dataset: its label is ``labels[rows]``.
        unreadable: the images left out, by row and file name.
    """

    features: Tensor
    rows: Tensor
    unreadable: tuple[str, ...]


def image_features(
    encoder: ImageEncoder,
    dataset: Dataset,
    *,
    split: str = "test",
    views: Views | None = None,
    batch_size: int = 64,
    num_workers: int = 0,
    cache_dir: str | os.PathLike | None = None,
    accelerator: Accelerator | None = None,
    progress: bool = True,
) -> ImageFeatures:
    """Features of all images, from the cache as far as they are there.

    Args:
        encoder: the vision tower; it is moved to the device of this process.
        dataset: with a column ``image``.
        split: its name, part of the key.
        views: None for the images themselves, or which augmented views of each.
        batch_size: pictures in a forward pass; views count.
        num_workers: processes that decode and augment for each process that encodes.
        cache_dir: None: the assets folder of the Hugging Face cache.
        accelerator: gives the mixed precision, none without; processes are those of the launch either way.
        progress: show a bar.

    Example:
        >>> encoder = ImageEncoder.from_pretrained("embedded:tiny-clip")  # doctest: +SKIP
        >>> image_features(encoder, tiny_dataset("tiny-land")).features.shape  # doctest: +SKIP
        torch.Size([200, 64])
    """
    state = PartialState()
    precision = "no" if accelerator is None else str(accelerator.mixed_precision)
    key = feature_key(encoder, dataset, split, views, precision)
    base = cached_assets_path("orion-hf", "features") if cache_dir is None else Path(cache_dir)
    folder = base / digest_of(key)
    folder.mkdir(parents=True, exist_ok=True)
    if state.is_main_process:
        write_json(folder / "key.json", key)

    rows_per_shard = max(1, SHARD_PICTURES // (views.count if views else 1))
    shards = [
        _Shard(folder / f"{start:09d}.safetensors", range(start, min(start + rows_per_shard, len(dataset))))
        for start in range(0, len(dataset), rows_per_shard)
    ]
    # Whose a shard is depends on its number alone: what other processes have finished meanwhile does not matter.
    missing = [shard for shard in shards[state.process_index :: state.num_processes] if shard.read() is None]
    if missing:
        encoder.clip.to(state.device)
        pictures = _Pictures(dataset, encoder, views)
        autocast = nullcontext() if accelerator is None else accelerator.autocast()
        with torch.inference_mode(), autocast:
            _extract(encoder, pictures, missing, batch_size, num_workers, progress and state.is_main_process)
    state.wait_for_everyone()
    return _gather(shards, warn=state.is_main_process)


def feature_key(
    encoder: ImageEncoder, dataset: Dataset, split: str, views: Views | None, mixed_precision: str
) -> dict[str, Any]:
    """Everything that features depend on."""
    return {
        "format_version": FORMAT_VERSION,
        "dataset": dataset._fingerprint,
        "split": split,
        "model": encoder.name,
        "revision": encoder.revision,
        "weights": encoder.weights,
        "preprocessing": json.loads(encoder.processor.to_json_string()),
        "image_size": encoder.image_size,
        "views": None if views is None else asdict(views),
        "mixed_precision": mixed_precision,
    }


def digest_of(record: Any) -> str:
    """A short hash of JSON values; the order of keys does not matter.

    Example:
        >>> digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})
        True
    """
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:32]


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """A hash of a state dict: names, types, shapes and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


# Extraction


class _Pictures(TorchDataset):
    """Each row as ``pixel_values`` ``(V, 3, size, size)``, or as the name of an image that cannot be read.

    It knows the processor and not the model, which would be copied to every worker.
    """

    def __init__(self, dataset: Dataset, encoder: ImageEncoder, views: Views | None):
        self.images = dataset.select_columns(["image"]).cast_column("image", ImageFeature(decode=False))
        self.processor, self.size, self.views = encoder.processor, encoder.image_size, views

    def __getitem__(self, row: int) -> Tensor | str:
        stored = self.images[row]["image"]
        try:
            image = ImageFeature().decode_example(stored).convert("RGB")
        except Exception as error:  # decoders raise whatever a damaged file trips them over
            path = stored.get("path") if stored else None
            return f"row {row}{f' ({path})' if path else ''}: {type(error).__name__}"
        return pixel_values(image, row, self.processor, self.size, self.views)


def pixel_values(image: Any, row: int, processor: Any, size: int, views: Views | None) -> Tensor:
    """An RGB image and, if asked for, its views, as the model takes them: ``(V, 3, size, size)``, V = 1 without."""
    plain = processor(image, return_tensors="pt")["pixel_values"]
    if views is None:
        return plain
    mean = torch.tensor(processor.image_mean).view(3, 1, 1)
    std = torch.tensor(processor.image_std).view(3, 1, 1)
    return torch.cat([plain, (augmented_views(image, row, size, views) - mean) / std])


@dataclass(frozen=True)
class _Shard:
    """A file of features of consecutive rows of the dataset."""

    path: Path
    rows: range

    def write(self, features: Tensor, rows: Sequence[int], unreadable: Sequence[str]) -> None:
        tensors = {"features": features.cpu().contiguous(), "rows": torch.tensor(rows, dtype=torch.int64)}
        metadata = {"unreadable": json.dumps(list(unreadable))}
        write_whole(self.path, lambda path: save_file(tensors, path, metadata))

    def read(self) -> ImageFeatures | None:
        """None if it is not there or damaged."""
        try:
            with safe_open(self.path, framework="pt") as file:
                unreadable = tuple(json.loads(file.metadata()["unreadable"]))
                return ImageFeatures(file.get_tensor("features"), file.get_tensor("rows"), unreadable)
        except (FileNotFoundError, SafetensorError):
            return None


def _extract(
    encoder: ImageEncoder,
    pictures: _Pictures,
    shards: Sequence[_Shard],
    batch_size: int,
    num_workers: int,
    progress: bool,
) -> None:
    views = pictures.views.count if pictures.views else 1
    images_at_once = max(1, batch_size // views)
    batches = [
        list(shard.rows[start : start + images_at_once])
        for shard in shards
        for start in range(0, len(shard.rows), images_at_once)
    ]
    loader: Iterator[list[Tensor | str]] = iter(
        DataLoader(pictures, batch_sampler=batches, collate_fn=list, num_workers=num_workers)
    )
    total = sum(len(shard.rows) for shard in shards)
    with tqdm(total=total, desc="images", unit="image", disable=not progress) as bar:
        for shard in shards:
            features: list[Tensor] = [_no_features(encoder, pictures.views)]
            rows: list[int] = []
            unreadable: list[str] = []
            for start in range(0, len(shard.rows), images_at_once):
                batch = next(loader)
                names = [item for item in batch if isinstance(item, str)]
                readable = [item for item in batch if isinstance(item, Tensor)]
                unreadable += names
                rows += [
                    row
                    for row, item in zip(shard.rows[start : start + images_at_once], batch, strict=True)
                    if isinstance(item, Tensor)
                ]
                if readable:
                    features.append(_encode(encoder, torch.stack(readable), pictures.views))
                bar.update(len(batch))
            shard.write(torch.cat(features), rows, unreadable)


def _encode(encoder: ImageEncoder, pixels: Tensor, views: Views | None) -> Tensor:
    """``(n, V, 3, size, size)`` -> ``(n, d)``, or ``(n, V, d)`` with views."""
    image_embeds = encoder.encode(pixels.flatten(0, 1))
    if not image_embeds.isfinite().all():
        bad = int((~image_embeds.isfinite().all(dim=-1)).sum())
        raise ValueError(
            f"{bad} of {len(image_embeds)} features are NaN or infinite: half precision overflows in this model. "
            "Use --mixed_precision no or bf16."
        )
    if views is None:
        return image_embeds.cpu()
    return image_embeds.half().unflatten(0, pixels.shape[:2]).cpu()


def _no_features(encoder: ImageEncoder, views: Views | None) -> Tensor:
    """Zero rows of the right shape, for a shard without a readable image."""
    width = encoder.clip.visual_projection.out_features
    if views is None:
        return torch.empty(0, width)
    return torch.empty(0, views.count, width, dtype=torch.float16)


def _gather(shards: Sequence[_Shard], warn: bool) -> ImageFeatures:
    parts = []
    for shard in shards:
        part = shard.read()
        if part is None:
            raise OSError(f"{shard.path} was not written: all processes must share the cache folder.")
        parts.append(part)
    unreadable = tuple(name for part in parts for name in part.unreadable)
    rows = torch.cat([part.rows for part in parts]) if parts else torch.empty(0, dtype=torch.int64)
    if len(rows) == 0:
        why = f"all {len(unreadable)} are unreadable, first {unreadable[0]}" if unreadable else "there are none"
        raise ValueError(f"the dataset has no image to classify: {why}")
    if unreadable and warn:
        named = "; ".join(unreadable[:_NAMED]) + ("; ..." if len(unreadable) > _NAMED else "")
        warnings.warn(f"{len(unreadable)} unreadable images were left out: {named}", stacklevel=3)
    return ImageFeatures(torch.cat([part.features for part in parts]), rows, unreadable)

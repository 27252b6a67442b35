"""Explain one model: its classes and settings, what training did to them and, with images, to the predictions.

orion-hf inspect org/orion-eurosat
orion-hf inspect out/demo --images --html demo.html            # the task's own images
orion-hf inspect out/orion-pets --images photos --split train   # a folder with a sub-folder for each class
"""

from __future__ import annotations

import argparse
import os
import re
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ..configuration_orion import OrionConfig
from ..features import ImageEncoder
from ..geometry import MEASURE_NAMES, cosine_dispersion, displacement, feature_scatter, prototype_geometry
from ..labelled import LabelledFeatures
from ..layout import Block, Heading, Paragraph, Table, as_html, as_text, picture, write_text
from ..modeling_orion import LORA_TARGETS, OrionCLIPTextModel
from ..report import CAPTIONS, class_pictures
from ..repository import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_WEIGHTS_NAME,
    PROTOTYPES_NAME,
    Adapter,
    Repository,
    is_hub_id,
    read_orion_config,
    read_prototypes,
    read_tensors,
)
from ..tasks import OrionTask
from ..training_log import LOG_NAME

_MOST = 10
_BLOCK = 1024  # rows of a K x K matrix held at once


@dataclass(frozen=True)
class Subject:
    """A repository as far as it could be read.

    Attributes:
        kind: "adapter", "merged model" or "prototypes without training".
        needs: name of the model that the adapter needs, or whose vision tower goes with the prototypes.
        base: that model, if it is within reach; of a merged model itself.
        before, after: V and X, ``(K, d)``: means over the training templates.
        model: the text encoder; None for prototypes alone, or if the base could not be had.
        problem: why there is no model or no base.
    """

    repository: Repository
    config: OrionConfig
    task: OrionTask
    kind: str
    needs: str | None
    base: Repository | None
    before: Tensor
    after: Tensor
    model: OrionCLIPTextModel | None
    problem: str | None = None


def main(argv: list[str] | None = None) -> int:
    """``orion-hf inspect REPO_OR_FOLDER [--images [SOURCE]] [--html FILE]``."""
    parser = argparse.ArgumentParser(prog="orion-hf inspect", description=__doc__.split("\n")[0])
    parser.add_argument("model", metavar="REPO_OR_FOLDER", help="an ORION adapter or merged model")
    parser.add_argument("--revision", help="branch, tag or commit of the repository")
    parser.add_argument(
        "--images",
        nargs="?",
        const="",
        metavar="SOURCE",
        help="image folder or Hub dataset to classify; without a value, the task's own images",
    )
    parser.add_argument("--split", default="test", help="split of the images (default: test)")
    parser.add_argument("--images_per_class", type=int, help="at most so many images of each class")
    parser.add_argument("--html", metavar="FILE", help="write a page with figures as well")
    args = parser.parse_args(argv)
    if args.images_per_class is not None and args.images_per_class < 1:
        raise ValueError(f"--images_per_class must be at least 1, got {args.images_per_class}.")

    subject = open_subject(args.model, args.revision)
    blocks = [*settings_blocks(subject), *geometry_blocks(subject), *class_blocks(subject)]
    figures: list[Block] = []
    if args.html is not None:
        log = subject.repository.file(LOG_NAME)
        figures += class_pictures(subject.before, subject.after, subject.task.class_names, Path(log) if log else None)
    if args.images is not None:
        images = load_images(subject, args.images or None, args.split, args.images_per_class)
        blocks += image_blocks(subject, images)
        if args.html is not None and subject.task.num_classes > 1:
            figures += _map(subject, images)
    if args.html is not None:  # before the text, whose reader may be a pipe that closes early
        write_text(args.html, as_html(f"ORION: {args.model}", [*blocks, Heading("Figures"), *figures]))
    print(as_text(blocks))
    if args.html is not None:
        print(f"\npage      {args.html}")
    return 0


# Reading


def open_subject(name: str, revision: str | None = None) -> Subject:
    """Read a repository: its files first, then its weights if their base is within reach."""
    repository = Repository.open(name, revision)
    config = read_orion_config(repository)
    if config is None or config.task is None:
        raise ValueError(f"{name} has no orion_config.json that names its classes: give an ORION adapter or model.")
    adapter = Adapter.find(repository)
    if adapter is not None:
        kind, needs = "adapter", adapter.config.base_model_name_or_path
    else:
        merged = repository.file("config.json") is not None
        kind, needs = "merged model" if merged else "prototypes without training", config.base_model
    base: Repository | None = None
    model, problem = None, None
    try:
        if adapter is not None:
            base = adapter.base(repository, config)
            needs = base.name
        else:
            base = repository if kind == "merged model" else _base_of_prototypes(repository, config)
        if kind != "prototypes without training":
            model = OrionCLIPTextModel.from_pretrained(name, revision=revision, dtype=torch.float32)
    except OSError as error:
        problem = str(error).splitlines()[0]
    before, after = _prototypes(repository, config.task, model, problem)
    return Subject(repository, config, config.task, kind, needs, base, before, after, model, problem)


def _base_of_prototypes(repository: Repository, config: OrionConfig) -> Repository | None:
    """The base in orion_config.json; one from the Hub may not name a folder of this machine."""
    name = config.base_model or ""
    known = name.startswith("embedded:") or is_hub_id(name) or (repository.is_local and os.path.isdir(name))
    return Repository.open(name, config.base_revision) if known else None


def _prototypes(
    repository: Repository, task: OrionTask, model: OrionCLIPTextModel | None, problem: str | None
) -> tuple[Tensor, Tensor]:
    """V and X from the file, else from the model."""
    path = repository.file(PROTOTYPES_NAME)
    if path is not None:
        stored = read_tensors(path).get("prototypes")
        after, before = read_prototypes(path, (task.num_classes, 0 if stored is None else stored.shape[-1]))
        return before, after
    if model is None:
        raise ValueError(f"{repository.name} has no {PROTOTYPES_NAME}, and its model could not be loaded: {problem}")
    return _without_adapter(model, task.templates), model.prototypes(task.templates)


def _without_adapter(model: OrionCLIPTextModel, templates: Any = None) -> Tensor:
    if not model.has_lora:
        raise ValueError("a merged model without prototypes.safetensors does not know what it was: save it again")
    model.disable_adapters()
    try:
        return model.prototypes(templates)
    finally:
        model.enable_adapters()


def load_images(subject: Subject, source: str | None, split: str, images_per_class: int | None) -> LabelledFeatures:
    """Images of the model's classes, through the vision tower of its base."""
    if subject.base is None and subject.problem is not None:
        raise ValueError(f"images cannot be encoded: {subject.problem}")
    if subject.base is None:
        raise ValueError(f"{subject.repository.name} does not say which base model it needs: images cannot be encoded.")
    encoder = ImageEncoder.from_pretrained(subject.base.name, subject.base.commit)
    return LabelledFeatures.of_task(encoder, subject.task, split, source=source, images_per_class=images_per_class)


# What is said


def settings_blocks(subject: Subject) -> list[Block]:
    """What it is, what it needs, how large it is, how it was trained."""
    config, task, model = subject.config, subject.task, subject.model
    base = subject.needs
    revision = config.base_revision or (subject.base.commit if subject.base is not None else None)
    facts = [
        ("repository", subject.repository.name),
        ("kind", subject.kind),
        ("needs", "nothing else" if subject.kind == "merged model" else f"{base or 'a base model that is not named'}"),
        ("base model", f"{base or 'not named'}" + (f" at {revision}" if revision else "")),
        ("task", f"{task.name}, {task.num_classes} classes"),
        ("training templates", "; ".join(task.templates)),
        ("evaluation template", task.eval_template),
    ]
    if model is not None:
        lora = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
        rest = sum(p.numel() for name, p in model.named_parameters() if "lora_" not in name)
        facts.append(("parameters of the text encoder", f"{rest:,}"))
        if lora:
            facts.append(("trained (LoRA)", f"{lora:,}, {100 * lora / (lora + rest):.2f} % of all"))
        elif subject.kind == "merged model":
            facts.append(("trained (LoRA)", _merged_lora(model, config, rest)))
    if subject.problem is not None:
        facts.append(("not loaded", subject.problem))
    for name in (ADAPTER_WEIGHTS_NAME, "model.safetensors", PROTOTYPES_NAME, ADAPTER_CONFIG_NAME):
        path = subject.repository.file(name)
        if path is not None:
            facts.append((name, f"{os.path.getsize(path):,} bytes"))
    training = [(key, str(value)) for key, value in config.training.items() if isinstance(value, (str, int, float))]
    blocks: list[Block] = [Heading("What it is"), Table(("", ""), tuple(facts), names=2)]
    if training:
        blocks += [Heading("Training"), Table(("setting", "value"), tuple(training), names=2)]
    return blocks


def _merged_lora(model: OrionCLIPTextModel, config: OrionConfig, parameters: int) -> str:
    """What the settings of the training tell of a LoRA that is in the weights now."""
    rank = config.training.get("lora_rank")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        return "merged into the weights; its rank is not recorded"
    sides = [m.weight.shape for name, m in model.named_modules() if re.fullmatch(LORA_TARGETS, name)]
    lora = sum(rank * (rows + columns) for rows, columns in sides)
    share = 100 * lora / (lora + parameters)
    return f"merged into the weights; rank {rank}, {lora:,} when trained, {share:.2f} % of all"


def geometry_blocks(subject: Subject) -> list[Block]:
    """Geometry before and after, and the pairs of classes that were and are hardest to tell apart."""
    names = subject.task.class_names
    if len(names) < 2:
        return []
    before, after = prototype_geometry(subject.before), prototype_geometry(subject.after, subject.before)
    rows = [(label, f"{asdict(before)[key]:.4f}", f"{asdict(after)[key]:.4f}") for key, label in MEASURE_NAMES.items()]
    blocks: list[Block] = [
        Heading("Geometry of the class prototypes"),
        Paragraph("Means over the training templates, before training (V) and after (X)."),
        Table(("", "before", "after"), tuple(rows)),
    ]
    v, x = (normalize(prototypes.double(), dim=-1) for prototypes in (subject.before, subject.after))
    for title, ranked in (("before", v), ("after", x)):
        pairs = [
            (names[i], names[j], f"{(v[i] @ v[j]).item():.3f}", f"{(x[i] @ x[j]).item():.3f}")
            for i, j in entangled_pairs(ranked, _MOST)
        ]
        blocks.append(Heading(f"The most entangled pairs {title}", 2))
        blocks.append(Table(("class", "and", "cosine before", "after"), tuple(pairs), names=2))
    return blocks


def class_blocks(subject: Subject) -> list[Block]:
    """The classes, in label order."""
    moved = displacement(subject.after, subject.before)
    rows = [
        (str(label), name, f"{distance:.4f}")
        for label, (name, distance) in enumerate(zip(subject.task.class_names, moved.tolist(), strict=True))
    ]
    return [Heading("Classes"), Table(("label", "class", "moved by"), tuple(rows), names=2)]


def image_blocks(subject: Subject, images: LabelledFeatures) -> list[Block]:
    """Accuracy, which confusions were mended and which introduced, and the scatter of the predicted groups."""
    readings = prototypes_by_reading(subject)
    features, labels = images.features, images.labels
    predicted = {name: images.predictions(prototypes) for name, prototypes in readings.items()}
    first, *_, last = readings
    before, after = predicted[first], predicted[last]
    accuracy = tuple(
        (name, f"{100 * (guess == labels).double().mean().item():.2f}") for name, guess in predicted.items()
    )
    right_before, right_after = before == labels, after == labels
    mended, introduced = confusion_changes(labels, before, after, subject.task.class_names)
    blocks: list[Block] = [
        Heading("Accuracy"),
        Paragraph(f"Top-1 in percent on {len(labels)} images."),
        Table(("classifier", "top-1"), accuracy),
        Paragraph(
            f"From {first} to {last}: {int((~right_before & right_after).sum())} images were mended, "
            f"{int((right_before & ~right_after).sum())} were right and are wrong now."
        ),
    ]
    for title, changes in (("mended", mended), ("introduced", introduced)):
        blocks.append(Heading(f"Confusions {title}", 2))
        header = ("class", "taken for", "images before", "after")
        blocks.append(Table(header, tuple(changes), names=2) if changes else Paragraph("None."))
    groups = {"true classes": labels, f"predicted, {first}": before, f"predicted, {last}": after}
    rows = []
    for name, assignment in groups.items():
        scatter, dispersion = feature_scatter(features, assignment), cosine_dispersion(features, assignment)
        per_image = [value / len(labels) for value in (scatter.within, scatter.between, scatter.total)]
        rows.append((name, *(f"{value:.4f}" for value in per_image), f"{dispersion:.4f}"))
    return [
        *blocks,
        Heading("Scatter of the image features"),
        Paragraph(
            "Sums of squared distances for each image; within + between = total (Huygens). The image encoder is "
            "frozen: only the grouping by prediction can change."
        ),
        Table(("groups", "within", "between", "total", "cosine dispersion"), tuple(rows)),
    ]


def prototypes_by_reading(subject: Subject) -> dict[str, Tensor]:
    """Classifiers by name; the first and the last, which are compared, are of the same prompts.

    CLIP with the evaluation template is known of an adapter alone: of what a merged model was there is V and no more.
    """
    averaged = {"averaged prompts": subject.before}
    if subject.model is None or not subject.model.has_lora:
        own = {} if subject.model is None else {"this model": subject.model.prototypes()}
        return {**averaged, **own, "this model, averaged prompts": subject.after}
    clip = {"CLIP": _without_adapter(subject.model)}
    return {**clip, **averaged, "ORION, averaged prompts": subject.after, "ORION": subject.model.prototypes()}


# Arithmetic


def entangled_pairs(prototypes: Tensor, count: int) -> list[tuple[int, int]]:
    """The ``count`` pairs of rows with the largest cosine, largest first, each with i < j.

    Args:
        prototypes: ``(K, d)``, unit rows.

    Example:
        >>> entangled_pairs(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]]), 2)
        [(1, 2), (0, 2)]
    """
    num_classes = len(prototypes)
    best: list[tuple[float, int, int]] = []
    for start in range(0, num_classes, _BLOCK):
        cosines = prototypes[start : start + _BLOCK] @ prototypes.T
        rows = torch.arange(start, start + len(cosines)).unsqueeze(1)
        cosines[torch.arange(num_classes).unsqueeze(0) <= rows] = -torch.inf
        values, places = cosines.flatten().topk(min(count, cosines.numel()))
        best += [
            (value, start + place // num_classes, place % num_classes)
            for value, place in zip(values.tolist(), places.tolist(), strict=True)
            if value > -torch.inf
        ]
    return [(i, j) for _, i, j in sorted(best, key=lambda pair: (-pair[0], pair[1:]))[:count]]


def confusion_changes(
    labels: Tensor, before: Tensor, after: Tensor, class_names: Any, count: int = _MOST
) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Confusions (true class taken for another) that fell most in number of images, and those that rose most.

    Example:
        >>> labels, before, after = torch.tensor([0, 0]), torch.tensor([1, 1]), torch.tensor([0, 1])
        >>> confusion_changes(labels, before, after, ["cat", "dog"])
        ([('cat', 'dog', '2', '1')], [])
    """
    counts = [
        Counter((t, p) for t, p in zip(labels.tolist(), guess.tolist(), strict=True) if t != p)
        for guess in (before, after)
    ]
    changes = {pair: counts[1][pair] - counts[0][pair] for pair in {*counts[0], *counts[1]}}

    def ranked(sign: int) -> list[tuple[str, ...]]:
        chosen = sorted((pair for pair, change in changes.items() if sign * change > 0),
                        key=lambda pair: (-sign * changes[pair], pair))[:count]  # fmt: skip
        return [(class_names[t], class_names[p], f"{counts[0][t, p]}", f"{counts[1][t, p]}") for t, p in chosen]

    return ranked(-1), ranked(1)


def _map(subject: Subject, images: LabelledFeatures) -> list[Block]:
    try:
        from ..plots import prototype_map
    except ImportError:
        return []
    figure = prototype_map(images.features, images.labels, subject.before, subject.after, subject.task.class_names)
    return [picture(figure, CAPTIONS["prototypes"])]

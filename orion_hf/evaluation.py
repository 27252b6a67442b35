"""Methods with one kind of prototypes after another: same images, same seeds, same protocol.

The unit of evaluation is a cell: one method, one kind of prototypes, one seed (see `results`). What a method is given
depends on what it says it needs: features of a batch, features of augmented views, or views and a text model.
"""

from __future__ import annotations

import inspect
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor
from torch.nn.functional import normalize
from tqdm import tqdm

from . import __version__
from .class_prompts import ClassPrompts, class_prompt_prototypes
from .features import ImageEncoder, ImageFeatures, digest_of, image_features, weights_digest
from .files import is_finite
from .methods import MethodInfo, available
from .methods.tpt import context_prompts
from .modeling_orion import OrionCLIPTextModel
from .protocols import CORRELATIONS, batch_tasks, effective_classes, online_streams
from .prototypes import svd_prototypes
from .results import Cell, Results
from .tasks import OrionTask
from .views import Views

IMAGES_AT_ONCE = 64  # images whose views are classified in one call

Item = TypeVar("Item")
Result = TypeVar("Result")


# Which images a method sees together


@dataclass(frozen=True)
class Protocol:
    """How the test images are given to a method.

    Attributes:
        kind: ``full``: all at once; ``batch``: independent batches of few classes; ``online``: streams of batches with
            correlated labels.
        k_eff: of ``batch``: effective classes, such as ``1-4`` or ``very-low``.
        correlation: of ``online``: ``low``, ``medium``, ``high`` or ``separate``.
        batch_size, num_tasks: of ``batch`` and ``online``; tasks or streams.
    """

    kind: str = "full"
    k_eff: str | None = None
    correlation: str | None = None
    batch_size: int | None = None
    num_tasks: int | None = None

    @classmethod
    def from_options(cls, kind: str, **options: Any) -> Protocol:
        """Fill in the published settings; an option of another protocol is an error.

        Example:
            >>> Protocol.from_options("batch", k_eff="2-10")
            Protocol(kind='batch', k_eff='2-10', correlation=None, batch_size=64, num_tasks=1000)
        """
        published: dict[str, dict[str, Any]] = {
            "full": {},
            "batch": {"k_eff": "very-low", "batch_size": 64, "num_tasks": 1000},
            "online": {"correlation": "low", "batch_size": 128, "num_tasks": 100},
        }
        if options.get("k_eff") == "all":  # the whole test set, once: no batches are drawn
            published["batch"] = {"k_eff": "all", "num_tasks": 1}
        if kind not in published:
            raise ValueError(f"no protocol {kind!r}: choose {', '.join(published)}")
        given = {name: value for name, value in options.items() if value is not None}
        for name in given:
            if name not in published[kind]:
                raise ValueError(f"--{name} is no option of --protocol {kind}")
        protocol = cls(kind, **published[kind] | given)
        if protocol.k_eff is not None:
            effective_classes(protocol.k_eff)
        if protocol.correlation is not None and protocol.correlation not in CORRELATIONS:
            raise ValueError(f"no correlation {protocol.correlation!r}: choose {', '.join(CORRELATIONS)}")
        if any(number is not None and number < 1 for number in (protocol.batch_size, protocol.num_tasks)):
            raise ValueError("--batch_size and --num_tasks must be at least 1")
        return protocol

    @property
    def unit(self) -> str:
        """What one outcome is of."""
        return {"full": "image", "batch": "task", "online": "stream"}[self.kind]

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    def units(self, labels: Tensor, seed: int) -> Iterator[list[Tensor]]:
        """The batches of each task or stream, as rows of the test set."""
        size, tasks = self.batch_size or len(labels), self.num_tasks or 1
        if self.kind == "batch":
            batches = batch_tasks(labels, self.k_eff or "all", batch_size=size, num_tasks=tasks, seed=seed)
            return ([batch] for batch in batches)
        gamma = CORRELATIONS[self.correlation or "low"]
        return online_streams(labels, gamma, batch_size=size, num_streams=tasks, seed=seed)

    def outcomes(self, predict: Callable[[Tensor], Tensor], labels: Tensor, seed: int) -> Tensor:
        """Share of correct predictions of each unit, ``(n,)``: 0 or 1 of an image.

        Args:
            predict: from rows of the test set, one batch, to class indices.
            labels: ``(N,)``, used to draw batches and to score.
        """
        if self.kind == "full":
            return (predict(torch.arange(len(labels))).cpu() == labels).double()

        def accuracy(batches: list[Tensor]) -> float:
            hits = torch.cat([predict(batch).cpu() == labels[batch] for batch in batches])
            return hits.double().mean().item()

        return torch.tensor(shared(list(self.units(labels, seed)), accuracy), dtype=torch.float64)


def shared(items: Sequence[Item], work: Callable[[Item], Result], progress: str | None = None) -> list[Result]:
    """``[work(item) for item in items]``, spread over the processes of the launch; each gets the whole list."""
    state = PartialState()
    numbers = range(state.process_index, len(items), state.num_processes)
    bar = tqdm(numbers, desc=progress, disable=progress is None or len(items) == 1 or not state.is_main_process)
    mine = [(number, work(items[number])) for number in bar]
    everything = mine if state.num_processes == 1 else gather_object(mine)
    return [result for _, result in sorted(everything, key=lambda pair: pair[0])]


# Classifiers


@dataclass(frozen=True)
class TunedText:
    """An adapter to evaluate: where it came from, a hash of its weights, and the model, merged for speed."""

    name: str
    revision: str | None
    weights: str
    model: OrionCLIPTextModel

    @classmethod
    def load(cls, name: str, base: OrionCLIPTextModel, task: OrionTask) -> TunedText:
        """Load an adapter or merged model of ``task``, which must have been trained on ``base``."""
        model = OrionCLIPTextModel.from_pretrained(name, dtype=torch.float32)
        if model.task is None or model.task.class_names != task.class_names:
            raise ValueError(f"{name}: its classes are not those of task {task.name}; train one on these names")
        # Of a merged model nothing can be said: all its weights are its own.
        if model.has_lora and weights_digest(_base_weights(model)) != weights_digest(_base_weights(base)):
            trained_on = model.orion_config.base_model
            raise ValueError(f"{name} was trained on {trained_on!r}, whose weights are not those of --model")
        weights = weights_digest(model.state_dict())
        if model.has_lora:
            model.merge_lora()
        repository = model._repository
        revision = None if repository is None else repository.commit
        return cls(name, revision, weights, model.to(base.device).requires_grad_(False).eval())


def _base_weights(model: OrionCLIPTextModel) -> dict[str, Tensor]:
    weights = model.state_dict().items()
    return {name.replace(".base_layer", ""): tensor.cpu() for name, tensor in weights if ".lora_" not in name}


@dataclass(frozen=True)
class Classifier:
    """One kind of prototypes, ``(K, d)`` unit rows, and the text model they come from, if one gives just these."""

    prototypes: Tensor
    text_model: OrionCLIPTextModel | None = None


def classifiers(
    base: OrionCLIPTextModel, task: OrionTask, tuned: TunedText | None = None, prompts: ClassPrompts | None = None
) -> dict[str, Classifier]:
    """CLIP's prototypes (evaluation template), averaged prompts, SVD and, with an adapter, ORION's.

    With ``prompts`` both encoders' prototypes are of the sentences, whose averages are CLIP's; SVD is of these.
    """
    base.task = task
    if prompts is not None:
        of_sentences = class_prompt_prototypes(base, base.tokenizer, prompts).prototypes
        found = {
            "clip": Classifier(of_sentences),
            "svd": Classifier(normalize(svd_prototypes(of_sentences).prototypes, dim=-1)),
        }
        if tuned is not None:
            tuned_prototypes = class_prompt_prototypes(tuned.model, tuned.model.tokenizer, prompts).prototypes
            found["orion"] = Classifier(tuned_prototypes)
        return found
    averaged = base.prototypes(task.templates)
    found = {
        "clip": Classifier(base.prototypes(), base),
        "averaged": Classifier(averaged),
        # Unit rows already, unless there are more classes than dimensions.
        "svd": Classifier(normalize(svd_prototypes(averaged).prototypes, dim=-1)),
    }
    if tuned is not None:
        found["orion"] = Classifier(tuned.model.prototypes(task.eval_template), tuned.model)
    return found


# Cells


def read_methods(names: Sequence[str], assignments: Sequence[str], logit_scale: float) -> dict[str, dict[str, Any]]:
    """Options of each method: the published ones, the model's own ``logit_scale``, and what the user assigns.

    Args:
        names: of methods.
        assignments: such as ``stata.alpha=2``.
        logit_scale: of the model, for methods that use one.

    Example:
        >>> read_methods(["zero_shot"], ["zero_shot.logit_scale=50"], 100.0)
        {'zero_shot': {'logit_scale': 50.0}}
    """
    known = {name: info for name, info in available().items() if info.inputs != "few-shot"}
    for name in names:
        if name not in known:
            raise ValueError(f"no method {name!r} to evaluate: choose among {', '.join(known)}")
    chosen = {
        name: {option: value for option, value in known[name].options.items() if option != "initial_probabilities"}
        for name in dict.fromkeys(names)
    }
    for options in chosen.values():
        if "logit_scale" in options:
            options["logit_scale"] = round(logit_scale, 4)
    assign_options(chosen, assignments, {name: known[name].function for name in chosen})
    return chosen


def assign_options(
    chosen: Mapping[str, dict[str, Any]], assignments: Sequence[str], functions: Mapping[str, Callable[..., Any]]
) -> None:
    """Carry out ``METHOD.OPTION=VALUE`` on the options of each method, as the types of its ``functions`` say.

    Example:
        >>> options = {"stata": {"alpha": 1.0}}
        >>> assign_options(options, ["stata.alpha=2"], {"stata": available()["stata"].function})
        >>> options
        {'stata': {'alpha': 2.0}}
    """
    for assignment in assignments:
        where, equals, word = assignment.partition("=")
        method, _, option = where.partition(".")
        if not equals or method not in chosen or option not in chosen[method]:
            known = ", ".join(f"{name}.{key}" for name, options in chosen.items() for key in options)
            raise ValueError(f"--options {assignment}: write METHOD.OPTION=VALUE, with {known}")
        annotation = str(inspect.signature(functions[method]).parameters[option].annotation)
        kind = next(kind for kind in _OPTION_KINDS if kind in annotation or kind == "str")
        what, read = _OPTION_KINDS[kind]
        try:
            chosen[method][option] = None if word == "none" and "None" in annotation else read(word)
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"--options {assignment}: {method}.{option} is {what}, not {word!r}") from None


def _finite(word: str) -> float:
    number = float(word)
    if not math.isfinite(number):
        raise ValueError
    return number


def _pair(values: Any) -> list[float]:
    if not isinstance(values, list) or len(values) != 2 or not all(map(is_finite, values)):
        raise ValueError
    return values


# What stands in the annotation of an option -> what to call it, and how to read it from a command line.
_OPTION_KINDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "tuple": ("a pair of numbers such as [0.9, 0.999]", lambda word: _pair(json.loads(word))),
    "bool": ("true or false", lambda word: {"true": True, "false": False}[word.lower()]),
    "int": ("a whole number", int),
    "float": ("a number", _finite),
    "str": ("a word", str),
}


def describe_cell(
    task: OrionTask,
    encoder: ImageEncoder,
    weights: str,
    method: str,
    options: dict[str, Any],
    kind: str,
    tuned: TunedText | None,
    protocol: dict[str, Any],
    seed: int,
    class_prompts: tuple[str, ClassPrompts] | None = None,
) -> Cell:
    """What the accuracy of a cell depends on, but for its images; layout in `results`.

    Args:
        encoder, weights: the model and a hash of both its towers.
        method, options: the method and all its options.
        kind, tuned: of the prototypes, and where ORION's come from.
        protocol, seed: how images are drawn.
        class_prompts: name of a prompt file and its sentences, if these take the place of the templates.
    """
    task_digest = digest_of(task.to_dict())
    if class_prompts is not None:
        task_digest = digest_of([task_digest, class_prompts[1].sentences])
        protocol = protocol | {"class_prompts": class_prompts[0]}
    return {
        "task": task.name,
        "task_digest": task_digest,
        "model": encoder.name,
        "revision": encoder.revision,
        "weights": weights,
        "method": method,
        "prototypes": kind,
        "adapter": None if tuned is None else tuned.name,
        "adapter_revision": None if tuned is None else tuned.revision,
        "adapter_weights": None if tuned is None else tuned.weights,
        "protocol": protocol,
        "options": options,
        "views": None,
        "seed": seed,
        "mixed_precision": "no",
        "orion_hf": __version__,
        "unlabeled": None,
    }


def uses_augmix(task: OrionTask) -> bool:
    """TPT mixes its views on the fine-grained benchmarks, not on ImageNet and its variants."""
    return not task.name.startswith("imagenet")


class LabelledImages:
    """Images of one task and seed; features are computed when a cell first needs them.

    Args:
        dataset: columns ``image`` and ``label``.
        encode: from a dataset, its split and the views wanted to features.
    """

    def __init__(self, dataset: Dataset, split: str, encode: Callable[..., ImageFeatures], num_classes: int):
        self.dataset, self.split, self._encode = dataset, split, encode
        self._views: dict[Views, Tensor] = {}
        labels = torch.tensor(dataset["label"][:])
        if ((labels < 0) | (labels >= num_classes)).any():
            raise ValueError(f"split {split!r} has images without a label: choose another --split")
        self._all_labels = labels

    @cached_property
    def plain(self) -> ImageFeatures:
        return self._encode(self.dataset, self.split, None)

    @property
    def labels(self) -> Tensor:
        return self._all_labels[self.plain.rows]

    def of_views(self, views: Views) -> Tensor:
        """``(N, V, d)``; only the last kind of views is kept, for there are many."""
        if views not in self._views:
            self._views = {views: self._encode(self.dataset, self.split, views).features}
        return self._views[views]


@dataclass
class Evaluation:
    """Runs the cells of one command.

    Attributes:
        encoder, base: both towers of the model.
        methods: method -> its options.
        protocol: see there.
        results: where finished cells are kept.
        run: command, versions and settings, for `results.json`.
        num_views: of MTA and TPT.
        extraction: options of `image_features`.
    """

    encoder: ImageEncoder
    base: OrionCLIPTextModel
    methods: Mapping[str, dict[str, Any]]
    protocol: Protocol
    results: Results
    run: dict[str, Any]
    accelerator: Accelerator
    num_views: int
    extraction: dict[str, Any]
    _rehearsed: set[str] = field(default_factory=set)  # methods that have been tried with their options

    @cached_property
    def _weights(self) -> str:
        return digest_of([self.encoder.weights, weights_digest(self.base.state_dict())])

    def run_task(
        self,
        task: OrionTask,
        images_of: Callable[[str], Dataset],
        *,
        source: str | None,
        split: str,
        seed: int,
        tuned: TunedText | None = None,
        class_prompts: tuple[str, ClassPrompts] | None = None,
    ) -> list[Cell]:
        """Measure what is not in the results yet; all cells of this task and seed come back.

        Args:
            images_of: from a split to its images, labels in the task's order.
            source, split, seed: where they come from.
            tuned: gives ORION's prototypes; without, there are none.
            class_prompts: name of a prompt file and the sentences in it, to be used instead of the templates.
        """
        images = LabelledImages(images_of(split), split, self._features, task.num_classes)
        kinds = classifiers(self.base, task, tuned, None if class_prompts is None else class_prompts[1])
        dataset = {"source": source, "split": split, "fingerprint": images.dataset._fingerprint}
        cells = []
        # Methods outside, because those that share views come one after the other.
        for name, options in self.methods.items():
            info = available()[name]
            if class_prompts is not None and "text model" in info.inputs:
                raise ValueError(f"{name} tunes the words around a class name: it does not go with --class_prompts")
            views = self._views(info, task, seed)
            unlabeled = images_of(options["unlabeled_features"]) if options.get("unlabeled_features") else None
            for kind, classifier in kinds.items():
                if "text model" in info.inputs and classifier.text_model is None:
                    continue  # averaged and orthogonalised prototypes are of no text model that could be tuned
                cell = describe_cell(
                    task,
                    self.encoder,
                    self._weights,
                    name,
                    options,
                    kind,
                    tuned if kind == "orion" else None,
                    self.protocol.to_dict(),
                    seed,
                    class_prompts,
                ) | {
                    "views": None if views is None else asdict(views),
                    "mixed_precision": str(self.accelerator.mixed_precision),
                    "dataset": dataset,
                    "unlabeled": None if unlabeled is None else unlabeled._fingerprint,
                }
                cell_id = digest_of(cell)
                if self.results.outcomes(cell_id) is None:
                    self._measure(cell_id, cell, info, classifier, images, views, unlabeled, task)
                cells.append(self.results.cells[cell_id])
        return cells

    def _views(self, info: MethodInfo, task: OrionTask, seed: int) -> Views | None:
        if "views" not in info.inputs:
            return None
        return Views(self.num_views, augmix="text model" in info.inputs and uses_augmix(task), seed=seed)

    def _features(self, dataset: Dataset, split: str, views: Views | None) -> ImageFeatures:
        return image_features(
            self.encoder, dataset, split=split, views=views, accelerator=self.accelerator, **self.extraction
        )

    def _measure(
        self,
        cell_id: str,
        cell: Cell,
        info: MethodInfo,
        classifier: Classifier,
        images: LabelledImages,
        views: Views | None,
        unlabeled: Dataset | None,
        task: OrionTask,
    ) -> None:
        options = dict(cell["options"])
        if info.name not in self._rehearsed:
            self._rehearse(info, classifier, options, views, task)
        features = images.plain if views is None else images.of_views(views)
        if unlabeled is not None:
            found = self._features(unlabeled, options["unlabeled_features"], None)
            options["unlabeled_features"] = found.features.to(self.accelerator.device)
        start = time.perf_counter()
        if isinstance(features, ImageFeatures):
            predict = self._batch_predictor(info, features.features, classifier, options)
        else:
            predict = self._view_predictor(info, features, classifier, options, task)
        outcomes = self.protocol.outcomes(predict, images.labels, cell["seed"])
        measured = {
            "unit": self.protocol.unit,
            "n_tasks": 1 if self.protocol.kind == "full" else len(outcomes),
            "num_images": len(images.labels),
            "unreadable": list(images.plain.unreadable),
            "seconds": round(time.perf_counter() - start, 3),
        }
        self.results.add(cell_id, cell | measured, outcomes, self.run, write=self.accelerator.is_main_process)

    def _rehearse(
        self, info: MethodInfo, classifier: Classifier, options: dict[str, Any], views: Views | None, task: OrionTask
    ) -> None:
        """One call on random features: an option out of range should not cost the extraction of all images."""
        count = (8,) if views is None else (1, views.count)
        rng = torch.Generator().manual_seed(0)
        rows = normalize(torch.randn(*count, classifier.prototypes.shape[1], generator=rng), dim=-1)
        if options.get("unlabeled_features"):
            options = options | {"unlabeled_features": rows.to(self.accelerator.device)}
        if views is None:
            self._batch_predictor(info, rows, classifier, options)(torch.arange(len(rows)))
        else:
            self._view_predictor(info, rows, classifier, options, task)
        self._rehearsed.add(info.name)

    def _batch_predictor(
        self, info: MethodInfo, features: Tensor, classifier: Classifier, options: dict[str, Any]
    ) -> Callable[[Tensor], Tensor]:
        features = features.to(self.accelerator.device)
        prototypes = classifier.prototypes.to(self.accelerator.device)
        return lambda rows: info.function(features[rows.to(features.device)], prototypes, **options).predictions

    def _view_predictor(
        self, info: MethodInfo, features: Tensor, classifier: Classifier, options: dict[str, Any], task: OrionTask
    ) -> Callable[[Tensor], Tensor]:
        """Each image is classified by itself, so all are at once and batches look their images up."""
        device = self.accelerator.device
        against: Any = classifier.prototypes.to(device)
        if "text model" in info.inputs and classifier.text_model is not None:
            text_model = classifier.text_model
            against = context_prompts(text_model, text_model.tokenizer, task.class_names)

        def classify(block: Tensor) -> Tensor:
            rows = normalize(block.to(device).float(), dim=-1)
            return info.function(rows, against, **options).predictions.cpu()

        predictions = torch.cat(shared(features.split(IMAGES_AT_ONCE), classify, progress=info.name))
        return lambda rows: predictions[rows]

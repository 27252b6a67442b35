"""Zero-shot image classification that encodes its labels once.

The stock pipeline encodes all K labels again for every image. Here the label embeddings are computed through the prefix
tree the first time a label set is seen and kept, so an image costs one pass of the vision tower and one
``(1, d) x (d, K)`` product.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoImageProcessor, AutoModelForZeroShotImageClassification, AutoTokenizer, CLIPModel
from transformers.image_utils import load_image
from transformers.pipelines import PIPELINE_REGISTRY
from transformers.pipelines.zero_shot_image_classification import ZeroShotImageClassificationPipeline

from .class_prompts import check_sentences, class_prompt_prototypes, match_class_prompts, read_prompt_file
from .configuration_orion import ORION_CONFIG_NAME, OrionConfig
from .embedded import resolve_model_id
from .prompt_tree import build_packs, encode_packs, trim_prompts
from .repository import Adapter, Repository, read_orion_config, weights_version
from .tasks import OrionTask, format_prompt

TASK = "orion-zero-shot-image-classification"
STOCK_TEMPLATE = "This is a photo of {}."
KEPT_LABEL_SETS = 16
_OPTIONS = ("candidate_labels", "class_prompts", "hypothesis_template", "timeout", "tokenizer_kwargs", "top_k")


class UnreadableImageError(ValueError):
    """An input that is no readable image; the message names it."""


class OrionZeroShotImageClassificationPipeline(ZeroShotImageClassificationPipeline):
    """The stock zero-shot pipeline with the labels encoded once and, for an ORION repository, given by default.

    Scores are those of the stock pipeline for the same labels and template: ``softmax(exp(logit_scale) * image_embeds @
    text_embeds.T)`` with unit rows. Inputs, ``batch_size``, ``device`` and the rest are the stock pipeline's.

    Args:
        model: a `CLIPModel`, or the id or folder of one, or of an ORION adapter or merged repository.
        orion_task: the class names and evaluation template used by default; read from the repository when ``model`` is
            an id or folder.
        class_prompts: ``{class name: [sentences]}``, or a JSON file of it: the embedding of a label is then the unit
            mean over its sentences, and there is no template.

    Example:
        >>> from orion_hf import OrionZeroShotImageClassificationPipeline
        >>> classify = OrionZeroShotImageClassificationPipeline("org/orion-eurosat")  # doctest: +SKIP
        >>> classify("field.jpg", top_k=3)  # doctest: +SKIP
        [{'score': 0.93, 'label': 'Annual Crop Land'}, ...]
        >>> classify("field.jpg", candidate_labels=["a farm", "a city"])  # doctest: +SKIP
    """

    model: CLIPModel
    tokenizer: Any
    image_processor: Any

    def __init__(
        self,
        model: Any,
        *args: Any,
        orion_task: OrionTask | None = None,
        class_prompts: str | Path | Mapping[str, Sequence[str]] | None = None,
        **kwargs: Any,
    ):
        if isinstance(model, (str, os.PathLike)):
            model = resolve_model_id(os.fspath(model))
            hub = {name: kwargs.pop(name) for name in _HUB_OPTIONS if name in kwargs}
            dtype = kwargs.get("dtype", "auto")
            repository, model = (
                model,
                OrionClassifierLoader.from_pretrained(model, dtype=dtype, **hub, **kwargs.pop("model_kwargs", {})),
            )
            kwargs.setdefault("tokenizer", AutoTokenizer.from_pretrained(repository, **hub))
            kwargs.setdefault("image_processor", AutoImageProcessor.from_pretrained(repository, **hub))
        if not (hasattr(model, "text_model") and hasattr(model, "text_projection")):
            raise ValueError(
                f"{type(model).__name__} is not a CLIP model (no text_model and text_projection); "
                'use pipeline("zero-shot-image-classification") for it.'
            )
        self.orion_task = orion_task if orion_task is not None else getattr(model, "orion_task", None)
        # Read now: a file that cannot be used is an error here, not at the first image.
        self.class_prompts = None if class_prompts is None else _Sentences.read(class_prompts)
        self._label_embeds: OrderedDict[tuple, Tensor] = OrderedDict()
        super().__init__(model=model, *args, **kwargs)  # noqa: B026 (the parent takes them in this order too)

    def __call__(self, image: Any = None, candidate_labels: Sequence[str] | str | None = None, **kwargs: Any):  # type: ignore[override]
        """Classify one image or many; as the stock pipeline, plus ``top_k``, with ``candidate_labels`` optional.

        Args:
            image: path, URL, PIL image, or a list, generator or dataset of them.
            candidate_labels: default: the repository's class names. A string is split at commas.
            hypothesis_template: default: the repository's evaluation template, else the stock pipeline's.
            class_prompts: sentences of the labels for this call; default: those the pipeline was made with.
            top_k: how many labels to return, best first; default: all.
            batch_size, num_workers, timeout, tokenizer_kwargs: as the stock pipeline's.
        """
        if candidate_labels is not None:
            kwargs["candidate_labels"] = candidate_labels
        elif "candidate_labels" not in kwargs and "labels" not in self._forward_params:
            kwargs["candidate_labels"] = self._default_labels()
        image = kwargs.pop("images", image)
        if image is None:
            raise ValueError(f"{TASK} needs an image: a path, a URL, a PIL image, or a list of them.")
        return super(ZeroShotImageClassificationPipeline, self).__call__(image, **kwargs)

    def _default_labels(self) -> Sequence[str]:
        if self.orion_task is None:
            raise ValueError(
                "candidate_labels is missing, and the model is not an ORION repository that brings class names; "
                "pass candidate_labels=[...]."
            )
        return self.orion_task.class_names

    def _sanitize_parameters(self, tokenizer_kwargs: dict | None = None, **kwargs: Any):
        preprocess: dict[str, Any] = {}
        forward: dict[str, Any] = {}
        postprocess: dict[str, Any] = {}
        if unknown := sorted(set(kwargs) - set(_OPTIONS)):
            raise ValueError(
                f"{TASK} has no option {', '.join(map(repr, unknown))}: choose from {', '.join(_OPTIONS)}, "
                "batch_size, num_workers."
            )
        if "timeout" in kwargs:
            preprocess["timeout"] = kwargs["timeout"]
        if kwargs.get("candidate_labels") is not None:
            forward["labels"] = postprocess["labels"] = _checked_labels(
                kwargs["candidate_labels"],
                repeats_allowed=self.orion_task.class_names if self.orion_task is not None else None,
            )
        if kwargs.get("class_prompts") is not None:
            forward["class_prompts"] = _Sentences.read(kwargs["class_prompts"])
        if kwargs.get("hypothesis_template") is not None:
            forward["template"] = kwargs["hypothesis_template"]
        if tokenizer_kwargs is not None:
            forward["tokenizer_kwargs"] = tokenizer_kwargs
        if kwargs.get("top_k") is not None:
            if kwargs["top_k"] < 1:
                raise ValueError(f"top_k must be at least 1, got {kwargs['top_k']}.")
            postprocess["top_k"] = kwargs["top_k"]
        return preprocess, forward, postprocess

    def preprocess(self, image: Any, timeout: float | None = None) -> Any:  # type: ignore[override]
        try:
            loaded = load_image(image, timeout=timeout)
        except Exception as error:
            name = image if isinstance(image, str) and len(image) < 300 else type(image).__name__
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            # transformers takes a name that is no file for base64 and complains about that.
            if isinstance(image, str) and len(image) < 300 and "://" not in image and not os.path.exists(image):
                reason = "no such file"
            raise UnreadableImageError(
                f"cannot read image {name!r} ({reason}); remove it from the input or repair it."
            ) from error
        return self.image_processor(images=[loaded], return_tensors="pt").to(self.dtype)

    def _forward(  # type: ignore[override]
        self,
        model_inputs: dict,
        labels: tuple[str, ...] = (),
        template: str | None = None,
        tokenizer_kwargs: dict | None = None,
        class_prompts: Mapping[str, Sequence[str]] | None = None,
    ) -> dict:
        text_embeds = self.label_embeds(labels, template, class_prompts, **(tokenizer_kwargs or {}))
        image_embeds = self.model.get_image_features(**model_inputs).pooler_output
        image_embeds = image_embeds / image_embeds.norm(dim=-1, keepdim=True)
        return {"logits": self.model.logit_scale.exp() * image_embeds @ text_embeds.T}

    def postprocess(self, model_outputs: dict, labels: tuple[str, ...] = (), top_k: int | None = None) -> list[dict]:  # type: ignore[override]
        scores, order = model_outputs["logits"][0].softmax(dim=-1).topk(min(top_k or len(labels), len(labels)))
        return [{"score": score, "label": labels[i]} for score, i in zip(scores.tolist(), order.tolist(), strict=True)]

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """As the stock pipeline, and the task beside it, so that the labels are there again when it is loaded."""
        super().save_pretrained(save_directory, **kwargs)
        if self.orion_task is not None:
            config = getattr(self.model, "orion_config", None) or OrionConfig()
            replace(config, task=self.orion_task).save_json(os.path.join(save_directory, ORION_CONFIG_NAME))

    def label_embeds(
        self,
        labels: Sequence[str],
        template: str | None = None,
        class_prompts: str | Path | Mapping[str, Sequence[str]] | None = None,
        **tokenizer_kwargs: Any,
    ) -> Tensor:
        """Unit text embeddings ``(K, d)`` of the labels, computed once per label set, sentences and weights.

        Args:
            labels: the K labels.
            template: default: the repository's evaluation template, else the stock pipeline's; none if the labels
                have sentences of their own.
            class_prompts: sentences of the labels; default: those the pipeline was made with, if any.
        """
        given = self.class_prompts if class_prompts is None else class_prompts
        sentences = None if given is None else _Sentences.read(given)
        if sentences is not None and template is not None:
            raise ValueError("hypothesis_template does not go with class_prompts, whose sentences are used as they are")
        if sentences is not None and tokenizer_kwargs:
            raise ValueError(
                "tokenizer_kwargs do not go with class_prompts, whose sentences are tokenized as CLIP does"
            )
        if template is None:
            template = self.orion_task.eval_template if self.orion_task is not None else STOCK_TEMPLATE
        key = (
            tuple(labels),
            template if sentences is None else sentences.digest,
            repr(sorted(tokenizer_kwargs.items())),
            weights_version(self.model.text_model),
            weights_version(self.model.text_projection),
        )
        if key not in self._label_embeds:
            if sentences is not None:
                text_embeds = self._sentence_embeds(labels, sentences)
            else:
                prompts = [format_prompt(template, label) for label in labels]
                token_ids = self.tokenizer(prompts, **tokenizer_kwargs)["input_ids"]
                packs = build_packs(trim_prompts(token_ids, self.model.text_model.config.eos_token_id))
                with torch.inference_mode():
                    text_embeds = encode_packs(self.model, [pack.to(self.device) for pack in packs])
            self._label_embeds[key] = text_embeds / text_embeds.norm(dim=-1, keepdim=True)
            if len(self._label_embeds) > KEPT_LABEL_SETS:
                self._label_embeds.popitem(last=False)
        self._label_embeds.move_to_end(key)
        return self._label_embeds[key]

    def _sentence_embeds(self, labels: Sequence[str], sentences: _Sentences) -> Tensor:
        text_model: Any = self.model
        prompts = match_class_prompts(sentences, labels, source=sentences.source)
        found = class_prompt_prototypes(text_model, self.tokenizer, prompts)
        if found.truncated:
            limit = self.model.text_model.config.max_position_embeddings
            warnings.warn(
                f"{sentences.source}: {found.truncated} of {sum(map(len, prompts.sentences))} sentences are longer "
                f"than {limit} tokens and were cut there.",
                stacklevel=2,
            )
        return found.prototypes


class _Sentences(dict[str, list[str]]):
    """Checked ``{class name: sentences}``, where they are from, and a digest that tells them from others."""

    source: str
    digest: str

    @classmethod
    def read(cls, given: str | os.PathLike[str] | Mapping[str, Sequence[str]]) -> _Sentences:
        if isinstance(given, cls):
            return given
        if isinstance(given, Mapping):
            sentences = cls(check_sentences(given, "class_prompts"))
            sentences.source = "class_prompts"
        elif isinstance(given, (str, os.PathLike)):
            sentences = cls(read_prompt_file(Path(given)))
            sentences.source = os.fspath(given)
        else:
            kind = type(given).__name__
            raise ValueError(f"class_prompts must be {{class name: [sentence, ...]}} or a JSON file of it, not {kind}.")
        sentences.digest = hashlib.sha256(json.dumps(sentences).encode()).hexdigest()
        return sentences


_HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "force_download")


def _checked_labels(labels: Sequence[str] | str, repeats_allowed: Sequence[str] | None) -> tuple[str, ...]:
    """The labels as a tuple; refuses an empty list, a blank label and repeats (but for a task's own published list)."""
    labels = tuple(part.strip() for part in labels.split(",")) if isinstance(labels, str) else tuple(labels)
    if not labels:
        raise ValueError("candidate_labels is empty; pass at least one label.")
    if blank := [i for i, label in enumerate(labels) if not isinstance(label, str) or not label.strip()]:
        raise ValueError(f"candidate_labels[{blank[0]}] is {labels[blank[0]]!r}; every label is a non-empty string.")
    if len(set(labels)) < len(labels) and labels != repeats_allowed:
        repeated = sorted({label for label in labels if labels.count(label) > 1})
        raise ValueError(f"candidate_labels repeats {', '.join(map(repr, repeated))}; give each label once.")
    return labels


class OrionClassifierLoader:
    """What `pipeline()` calls to load a repository: the stock `CLIPModel`, with the repository's task beside it."""

    @classmethod
    def from_pretrained(cls, repository: str, **kwargs: Any):
        opened = Repository.open(repository, **{name: kwargs[name] for name in _HUB_OPTIONS if name in kwargs})
        config, adapter = read_orion_config(opened), Adapter.find(opened)
        base = adapter.base(opened, config) if adapter is not None else None  # refuses what none may name
        if adapter is None and config is not None:
            kwargs["use_safetensors"] = True  # of a repository of ours no pickle is read
        embedded = base is not None and base.name.startswith("embedded:")
        hub = {name: kwargs.pop(name) for name in _HUB_OPTIONS if embedded and name in kwargs}
        try:
            model = AutoModelForZeroShotImageClassification.from_pretrained(
                base.path if base is not None and embedded else repository, **kwargs
            )
            if embedded:  # a name that stock code cannot resolve, so the adapter is added here
                model.load_adapter(repository, adapter_kwargs={key: hub[key] for key in hub if hub[key] is not None})
        except SafetensorError as error:
            raise ValueError(f"{repository}: weights truncated or corrupt ({error}). Download them again.") from error
        model.orion_config = config
        model.orion_task = config.task if config is not None else None
        return model


def register_pipeline() -> None:
    """Make ``pipeline("orion-zero-shot-image-classification", model=...)`` known to transformers."""
    if TASK in PIPELINE_REGISTRY.supported_tasks:
        return
    PIPELINE_REGISTRY.register_pipeline(
        TASK,
        pipeline_class=OrionZeroShotImageClassificationPipeline,
        pt_model=OrionClassifierLoader,
        type="multimodal",
    )
    # With this attribute transformers writes a copy of our code into every saved pipeline, to be run as remote code.
    delattr(OrionZeroShotImageClassificationPipeline, "_registered_impl")


register_pipeline()

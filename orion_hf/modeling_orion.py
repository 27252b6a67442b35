"""`OrionCLIPTextModel`: CLIP's text encoder with a LoRA adapter, a task and fast prompt encoding.

    model = OrionCLIPTextModel.from_pretrained("org/orion-eurosat")  # or any CLIP checkpoint
    model.prototypes()  # (K, d), one unit row per class: the classifier
    model.encode(["a photo of a cat"])  # (1, d)

The forward pass is transformers' own, and so are the files: every repository written here loads with stock
transformers and peft.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig
from peft.helpers import rescale_adapter_scale
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    CLIPConfig,
    CLIPModel,
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    PreTrainedConfig,
)
from transformers.utils import logging

from .configuration_orion import ORION_CONFIG_NAME, OrionConfig
from .prompt_tree import build_packs, encode_packs, trim_prompts
from .prototypes import mean_prototypes
from .repository import (
    HUB_OPTIONS,
    PROTOTYPES_NAME,
    Adapter,
    Repository,
    read_orion_config,
    read_prototypes,
    read_tensors,
    staged_folder,
    weights_version,
    write_prototypes,
)
from .tasks import OrionTask

if TYPE_CHECKING:
    from .hub import Push

logger = logging.get_logger(__name__)

# Attention and MLP projections of the text tower. Named from the tower down, so that the pattern means the
# same modules in `CLIPTextModelWithProjection` and in `CLIPModel`, and none of the vision tower.
LORA_TARGETS = r"(.*\.)?text_model\.encoder\.layers\.\d+\.(self_attn\.(q|k|v|out)_proj|mlp\.fc[12])"

_KEPT_PROTOTYPES = 4


class OrionCLIPTextModel(CLIPTextModelWithProjection):
    """A CLIP text encoder that knows its classes.

    Attributes:
        orion_config: the content of `orion_config.json`: task, base model, training settings.

    Example:
        >>> from orion_hf import OrionCLIPTextModel, OrionTask
        >>> model = OrionCLIPTextModel.from_pretrained("embedded:tiny-clip")
        >>> model.task = OrionTask.from_names(["cat", "dog"])
        >>> model.add_lora(rank=4)
        >>> model.save_pretrained("orion-pets")  # doctest: +SKIP
    """

    # A `CLIPModel` checkpoint holds the other tower too; that is no reason for a page of warnings.
    _keys_to_ignore_on_load_unexpected = [  # noqa: RUF012 (transformers' own declaration)
        r"^(clip\.)?(vision_model\.|visual_projection\.|logit_scale$)",
        r"position_ids$",
    ]

    def __init__(self, config: CLIPTextConfig):
        super().__init__(config)
        self.orion_config = OrionConfig()
        self._repository: Repository | None = None  # what was loaded
        self._base: Repository | None = None  # where its full weights are: the same, or the adapter's base
        self._processor: Any = None
        self._tokenizer: Any = None
        self._anchors: Tensor | None = None
        self._stored_prototypes: tuple[int, Tensor] | None = None  # version of the weights, X of the file
        self._kept_prototypes: dict[Any, Tensor] = {}
        self._kept_version: int | None = None

    @classmethod
    def is_custom_code(cls) -> bool:
        """False: weights are initialised by transformers' own code. Where they are not, it skips modules
        without parameters of their own, and `text_projection` would start otherwise than in the parent."""
        return cls.is_remote_code()

    # Loading

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None,
        *model_args: Any,
        merge: bool = False,
        is_trainable: bool = False,
        **kwargs: Any,
    ):
        """Load a CLIP checkpoint, an ORION adapter or a merged ORION model, from a folder or the Hub.

        Args:
            pretrained_model_name_or_path: a folder, a Hub id, or ``embedded:tiny-clip``. Any `CLIPModel` or
                `CLIPTextModelWithProjection` checkpoint; or an adapter, whose base model is found in its
                `adapter_config.json`.
            merge: merge the adapter into the weights.
            is_trainable: leave the adapter trainable, to train it further.
            kwargs: of transformers' `from_pretrained` (``token``, ``dtype``, ``device_map``, ``cache_dir``,
                ``local_files_only``, ``attn_implementation``, ...). ``revision`` is that of the repository
                named; the base model of an adapter is loaded at the revision in `adapter_config.json`.
        """
        if pretrained_model_name_or_path is None:  # transformers' way to load from `config` and `state_dict`
            return super().from_pretrained(None, *model_args, **kwargs)
        options = {name: kwargs.pop(name) for name in HUB_OPTIONS if name in kwargs}
        repository = Repository.open(pretrained_model_name_or_path, kwargs.pop("revision", None), **options)
        orion = read_orion_config(repository)
        adapter = Adapter.find(repository)
        base = repository if adapter is None else adapter.base(repository, orion)
        if orion is not None and adapter is None:
            if orion.training.get("method") in ("mean", "svd"):
                raise OSError(
                    f"{repository.name} holds prototypes without a model (--training_free): read its "
                    f"{PROTOTYPES_NAME}, or load its base model {orion.base_model!r}."
                )
            kwargs["use_safetensors"] = True  # of an ORION repository no pickle is read
        output_loading_info = kwargs.pop("output_loading_info", False)

        try:
            kwargs = {**kwargs, "output_loading_info": True, **_text_config(base, kwargs)}
            loaded: Any = super().from_pretrained(base.path, *model_args, **base.loading, **kwargs)
        except SafetensorError as error:
            raise ValueError(
                f"{base.name}: its weights are truncated or corrupt ({error}). Save or download them again."
            ) from error
        except OSError as error:
            if adapter is None:
                raise
            raise OSError(
                f"{repository.name}: its base model {base.name!r} could not be loaded. Connect to the Hub, "
                f"or write a folder that holds it into adapter_config.json. ({str(error).splitlines()[0]})"
            ) from error

        model, loading_info = loaded
        model._repository, model._base = repository, base
        model.orion_config = orion or OrionConfig(base_model=_portable_name(base), base_revision=base.commit)
        if adapter is not None:
            model._load_lora(adapter, is_trainable)
        if orion is not None:
            model._load_prototypes()
        if merge and adapter is not None:
            model.merge_lora()
        return (model, loading_info) if output_loading_info else model

    def _load_lora(self, adapter: Adapter, is_trainable: bool) -> None:
        tensors = {
            name: tensor
            for name, tensor in read_tensors(adapter.weights).items()
            if not name.startswith("base_model.model.vision_model.")  # of an adapter trained on both towers
        }
        self._check_lora(adapter, tensors)
        problem: Any
        try:
            info = self.load_adapter(
                peft_config=adapter.config,  # type: ignore[arg-type]
                adapter_state_dict=tensors,
                is_trainable=is_trainable,
                dtype=self.dtype,
            )
            problem = info.missing_keys | info.unexpected_keys
        except Exception as error:  # peft trusts its config; whatever it trips over, the file is at fault
            problem = [f"{error}".partition("\n")[0]]
        if problem:
            raise ValueError(
                f"{adapter.weights}: its tensors are not those that adapter_config.json describes "
                f"(for example: {min(problem)}). Save or download the adapter again."
            )

    def _check_lora(self, adapter: Adapter, tensors: dict[str, Tensor]) -> None:
        """Say in one line that an adapter was made for another base, before peft says it in many."""
        modules = dict(self.named_modules())
        for name, tensor in tensors.items():
            module_name, _, matrix = name.removeprefix("base_model.model.").partition(".lora_")
            if matrix not in ("A.weight", "B.weight"):
                continue
            side, attribute = (-1, "in_features") if matrix == "A.weight" else (0, "out_features")
            expected = getattr(modules.get(module_name), attribute, None)
            if tensor.ndim != 2 or tensor.shape[side] != expected:
                needs = f"a side of {expected}" if expected else "no such tensor"
                raise ValueError(
                    f"{adapter.weights}: {name} {tuple(tensor.shape)} does not fit the base model "
                    f"{adapter.config.base_model_name_or_path!r}, which needs {needs}. Write the base "
                    "that the adapter was trained on into adapter_config.json."
                )

    def _load_prototypes(self) -> None:
        path = self._repository.file(PROTOTYPES_NAME) if self._repository else None
        if path is not None and self.task is not None:
            shape = (len(self.task.class_names), self.text_projection.out_features)
            stored, anchors = read_prototypes(path, shape)
            self._stored_prototypes = (weights_version(self), stored)
            self._anchors = anchors

    # The task

    @property
    def task(self) -> OrionTask | None:
        """The classes and templates; None for a plain CLIP. Set it to give the model a task."""
        return self.orion_config.task

    @task.setter
    def task(self, task: OrionTask | None) -> None:
        if task is not None and not isinstance(task, OrionTask):
            raise TypeError(
                f"model.task is an OrionTask, not {type(task).__name__}: OrionTask.from_name(...) gives one."
            )
        if task != self.orion_config.task:
            self._anchors = self._stored_prototypes = None
        self.orion_config = replace(self.orion_config, task=task)

    @property
    def class_names(self) -> list[str] | None:
        """The names of the task's K classes, in label order; None without a task."""
        return None if self.task is None else list(self.task.class_names)

    @property
    def anchors(self) -> Tensor | None:
        """V, ``(K, d)``: unit prototypes before training. Set by training, read from the repository."""
        return self._anchors

    @anchors.setter
    def anchors(self, anchors: Tensor | None) -> None:
        self._anchors = None if anchors is None else anchors.detach()

    @torch.no_grad()
    def prototypes(self, template: str | Sequence[str] | None = None) -> Tensor:
        """The classifier's weights: one unit row per class, kept until the weights or the task change.

        Args:
            template: a template such as ``"a photo of a {}."``; several are averaged as in eq. 1 of the
                paper; None is the task's evaluation template.

        Returns:
            ``(K, d)``, without gradient (train through [`encode`]).

        Example:
            >>> model.prototypes(model.task.templates)  # X of the paper  # doctest: +SKIP
        """
        if self.task is None:
            raise ValueError("The model has no task: set model.task, for example to OrionTask.from_names([...]).")
        version = weights_version(self)
        if version != self._kept_version:
            self._kept_prototypes.clear()
            self._kept_version = version
        templates = (template,) if template is None or isinstance(template, str) else tuple(template)
        key = (self.task, templates)
        if key not in self._kept_prototypes:
            prompts = [prompt for one in templates for prompt in self.task.prompts(one)]
            was_training = self.training
            self.eval()
            try:
                text_embeds = self.encode(prompts).unflatten(0, (len(templates), -1))
            finally:
                self.train(was_training)
            while len(self._kept_prototypes) >= _KEPT_PROTOTYPES:
                self._kept_prototypes.pop(next(iter(self._kept_prototypes)))
            mean = text_embeds[0] if len(templates) == 1 else mean_prototypes(text_embeds)
            self._kept_prototypes[key] = mean
        return self._kept_prototypes[key].clone()

    def encode(
        self,
        inputs: str | Sequence[str] | Sequence[Sequence[int]] | Tensor | Mapping[str, Any],
        normalize: bool = True,
        tokenizer: Any = None,
        soft_embeds: Tensor | None = None,
    ) -> Tensor:
        """Text embeddings through the prefix tree: those of the padded forward, without its repeated work.

        Args:
            inputs: N prompts: strings, token-id lists, a padded ``(N, L)`` ``input_ids`` tensor, or what a tokenizer
                returns. The token id ``-1 - j`` stands for row ``j`` of ``soft_embeds``.
            normalize: give unit rows.
            tokenizer: for strings; the one beside the weights if None.
            soft_embeds: ``(m, hidden_size)`` learnable context vectors (CoOp, TPT).

        Returns:
            ``(N, d)`` ``text_embeds``, differentiable.
        """
        prompts: Any = inputs["input_ids"] if isinstance(inputs, Mapping) else inputs
        if isinstance(prompts, str):
            prompts = [prompts]
        if isinstance(prompts, Tensor) and prompts.is_floating_point():
            raise ValueError(f"inputs are {prompts.dtype}; give strings or token ids (vectors go into soft_embeds).")
        if not isinstance(prompts, Tensor) and len(prompts) and isinstance(prompts[0], int):
            raise ValueError("inputs are numbers; give a list of token-id lists, one for each prompt.")
        if not isinstance(prompts, Tensor) and len(prompts) and isinstance(prompts[0], str):
            prompts = (tokenizer or self.tokenizer)(list(prompts), verbose=False)["input_ids"]
        packs = build_packs(trim_prompts(prompts, self.config.eos_token_id))  # type: ignore[arg-type]
        text_embeds = encode_packs(self, packs, soft_embeds)
        return F.normalize(text_embeds, dim=-1) if normalize else text_embeds

    @property
    def tokenizer(self) -> Any:
        """The tokenizer beside the weights, loaded on first use; set it for a model made from a config."""
        if self._tokenizer is None:
            self._tokenizer = getattr(self._processor, "tokenizer", self._processor) or self._load_beside(
                AutoTokenizer, "tokenizer", ("tokenizer.json", "tokenizer_config.json", "vocab.json")
            )
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def processor(self) -> Any:
        """The processor (images and text) beside the weights; the tokenizer for a text-only checkpoint."""
        if self._processor is None:
            try:
                self._processor = self._load_beside(
                    AutoProcessor, "processor", ("processor_config.json", "preprocessor_config.json")
                )
            except FileNotFoundError:
                self._processor = self.tokenizer
        return self._processor

    @processor.setter
    def processor(self, processor: Any) -> None:
        self._processor, self._tokenizer = processor, None

    def _load_beside(self, auto_class: Any, kind: str, filenames: Sequence[str]) -> Any:
        for repository in (self._repository, self._base):
            if repository is not None and any(repository.file(filename) for filename in filenames):
                return auto_class.from_pretrained(repository.path, trust_remote_code=False, **repository.loading)
        name = self._repository.name if self._repository else "a model made from a config"
        raise FileNotFoundError(f"{name} has no {kind} files: set model.{kind}, or save them beside the weights.")

    # LoRA

    def add_lora(self, rank: int = 8, alpha: float | None = None, dropout: float = 0.0) -> None:
        """Add a LoRA adapter to the attention and MLP projections and freeze everything else.

        Args:
            rank: of the update ``W + alpha / rank * B A``; 8 in the paper.
            alpha: the paper does not say; None takes ``alpha = rank``, an update that is not scaled.
            dropout: on the input of ``A``.
        """
        if rank < 1:
            raise ValueError(f"LoRA rank must be at least 1, got {rank}.")
        if self.has_lora:
            raise ValueError("The model has a LoRA adapter already: load the base model to start afresh.")
        self.add_adapter(
            LoraConfig(
                r=rank,
                lora_alpha=rank if alpha is None else alpha,  # type: ignore[arg-type]
                lora_dropout=dropout,
                target_modules=LORA_TARGETS,
            )
        )

    @property
    def has_lora(self) -> bool:
        return any(True for _ in self._lora_layers())

    @property
    def is_merged(self) -> bool:
        """True while the LoRA update is added to the weights."""
        return any(layer.merged for _, layer in self._lora_layers())

    def merge_lora(self) -> None:
        """Add the LoRA update to the weights: the same outputs at the speed of the base model."""
        if not self.has_lora:
            raise ValueError("The model has no LoRA adapter to merge: call add_lora() or load an adapter repository.")
        if not self.is_merged:
            for _, layer in self._lora_layers():
                layer.merge()

    def unmerge_lora(self) -> None:
        """Take the LoRA update out of the weights again (up to rounding), to train on."""
        if self.is_merged:
            for _, layer in self._lora_layers():
                layer.unmerge()

    def _lora_layers(self):
        return ((name, module) for name, module in self.named_modules() if isinstance(module, LoraLayer))

    # Saving

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | os.PathLike,
        merged: bool = False,
        prototypes: Tensor | None = None,
        anchors: Tensor | None = None,
        is_main_process: bool = True,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """Write a repository that stock transformers and peft load. The folder changes whole or not at all.

        A model with LoRA is saved as an adapter, or with ``merged=True`` as a full `CLIPModel` whose vision
        tower is the base's (a base without one gives a `CLIPTextModelWithProjection`). A model without LoRA
        but with a task is saved as full weights, one without either as transformers does.

        Args:
            save_directory: the folder.
            merged: write full weights with the LoRA update added.
            prototypes: X for `prototypes.safetensors`; computed with the training templates if None.
            anchors: V; [`anchors`] or, if None too, computed with the adapter switched off.
            kwargs: of transformers' `save_pretrained`.
        """
        if not self.has_lora and self.task is None and not merged:
            super().save_pretrained(save_directory, is_main_process=is_main_process, push_to_hub=push_to_hub, **kwargs)
            return
        if is_main_process:
            with staged_folder(save_directory) as stage:
                if self.has_lora and not merged:
                    config = self._save_adapter(stage, **kwargs)
                else:
                    config = self._save_full(stage, **kwargs)
                self._save_processor(stage)
                if self.task is not None:
                    config.save_json(stage / ORION_CONFIG_NAME)
                    write_prototypes(
                        stage / PROTOTYPES_NAME,
                        self._trained_prototypes() if prototypes is None else prototypes,
                        self._frozen_prototypes() if anchors is None else anchors,
                    )
            if push_to_hub:
                from .hub import push_folder

                repo_id = kwargs.get("repo_id", os.path.basename(os.path.abspath(save_directory)))
                names = {"private", "token", "revision", "create_pr", "commit_message", "license"}
                push_folder(save_directory, repo_id, **{name: kwargs[name] for name in names & kwargs.keys()})

    def push_to_hub(self, repo_id: str, **options: Any) -> Push:  # type: ignore[override]
        """Push the adapter, or full weights for a model without LoRA, with its card in one commit.

        Args:
            repo_id: ``org/name``; created if it does not exist.
            options: of [`hub.push_folder`]: ``merged`` (full weights as well, on the revision ``merged``),
                ``private``, ``token``, ``revision``, ``create_pr``, ``commit_message``, ``license``.

        Example:
            >>> model.push_to_hub("org/orion-eurosat", merged=True).url  # doctest: +SKIP
        """
        from .hub import push_model

        return push_model(self, repo_id, **options)

    def _save_adapter(self, stage: os.PathLike, **kwargs: Any) -> OrionConfig:
        base = self._base
        [adapter] = self.active_adapters()
        peft_config: Any = self.peft_config[adapter]
        if base is not None:
            peft_config.base_model_name_or_path = os.path.abspath(base.path) if base.is_local else base.path
            peft_config.revision = base.commit
        trainable, peft_config.inference_mode = not peft_config.inference_mode, True  # as peft writes it
        try:
            super().save_pretrained(stage, **kwargs)
        finally:
            peft_config.inference_mode = not trainable
        if base is None:
            return self.orion_config
        return replace(self.orion_config, base_model=_portable_name(base), base_revision=base.commit)

    def _save_full(self, stage: os.PathLike, **kwargs: Any) -> OrionConfig:
        if kwargs.get("state_dict") is not None:
            raise ValueError("state_dict does not go with full weights: load it into the model, then save.")
        full = self._full_model()
        full.load_state_dict(self._merged_state_dict(), strict=False)
        full.save_pretrained(stage, **kwargs)
        return self.orion_config

    def _full_model(self) -> CLIPModel | CLIPTextModelWithProjection:
        """The base model as transformers knows it, to take our text weights."""
        if self._base is None or not _is_two_towers(self._base):
            text_only: Any = CLIPTextModelWithProjection(copy.deepcopy(self.config))
            return text_only.to(self.dtype)
        full: Any = CLIPModel.from_pretrained(self._base.path, dtype=self.dtype, **self._base.loading)
        # Some published configs leave text_config.projection_dim at its default; stock text classes read it.
        full.config.text_config.projection_dim = full.config.projection_dim
        return full

    def _merged_state_dict(self) -> dict[str, Tensor]:
        """Weights under the base model's names. Not by merging and unmerging, which would round our own."""
        layers = dict(self._lora_layers())
        weights = {}
        for name, tensor in self.state_dict().items():
            if ".lora_" in name:
                continue
            module, found, leaf = name.rpartition(".base_layer.")
            if found and leaf == "weight" and not layers[module].merged:
                tensor = tensor + layers[module].get_delta_weight(self.active_adapters()[0]).to(tensor.dtype)
            weights[f"{module}.{leaf}" if found else name] = tensor
        return weights

    def _save_processor(self, stage: os.PathLike) -> None:
        try:
            self.processor.save_pretrained(stage)
        except FileNotFoundError as error:
            logger.warning(f"Saved without processor and tokenizer: {error}")

    def _trained_prototypes(self) -> Tensor:
        if self._stored_prototypes is not None and self._stored_prototypes[0] == weights_version(self):
            return self._stored_prototypes[1]
        return self.prototypes(self.task.templates)  # type: ignore[union-attr]

    def _frozen_prototypes(self) -> Tensor:
        if self._anchors is not None:
            return self._anchors
        templates = self.task.templates  # type: ignore[union-attr]
        if not self.has_lora:
            return self.prototypes(templates)
        was_merged = self.is_merged
        self.unmerge_lora()
        with rescale_adapter_scale(self, 0.0):
            anchors = self.prototypes(templates)
        if was_merged:
            self.merge_lora()
        return anchors


def _text_config(base: Repository, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments that make transformers read the text tower of a two-tower config rightly."""
    config = kwargs.get("config")
    if isinstance(config, CLIPConfig):
        text_config: Any = copy.deepcopy(config.text_config)
        text_config.projection_dim = config.projection_dim
        return {"config": text_config}
    if config is not None:
        return {}
    options = {key: value for key, value in base.loading.items() if key != "force_download"}
    stored, _ = PreTrainedConfig.get_config_dict(base.path, **options)
    kind = stored.get("model_type", "clip")
    if kind not in ("clip", "clip_text_model"):
        raise ValueError(f"{base.name} is a {kind!r} checkpoint: choose a CLIP or MetaCLIP model.")
    # The projection belongs to both towers; the copy in text_config is not always right.
    if "text_config" in stored and "projection_dim" in stored and "projection_dim" not in kwargs:
        return {"projection_dim": stored["projection_dim"]}
    return {}


def _is_two_towers(base: Repository) -> bool:
    stored, _ = PreTrainedConfig.get_config_dict(base.path, **base.loading)
    return "vision_config" in stored


def _portable_name(base: Repository) -> str:
    """The base model as `orion_config.json` names it: folders by full path, everything else as it is."""
    return os.path.abspath(base.path) if base.is_local and base.path == base.name else base.name

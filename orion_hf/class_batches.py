"""Which prompts a step encodes: class names tokenised once, mixed into batches, packed as prefix trees."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from .prompt_tree import PromptPack, build_packs, trim_prompts
from .tasks import OrionTask
from .training_args import setting_choices


class ClassBatches:
    """The prompts of a run, batch by batch. Everything drawn is a function of the seed and the epoch or step.

    Args:
        task: class names and templates.
        tokenizer: any Hugging Face tokenizer.
        eos_token_id: where the encoder reads a prompt; ``model.config.eos_token_id``.
        class_text: ``template_mean``: all templates of a class; ``template``: one drawn for each class and
            step; ``name``: the bare name.
        batch_size: classes in a step.
        node_budget: of a prefix tree.
        seed: of the order of classes and the drawn templates.

    Example:
        >>> batches = ClassBatches(task, tokenizer, eos_token_id=49407, batch_size=64)  # doctest: +SKIP
        >>> [len(classes) for classes in batches.of_epoch(0)]  # of 100 classes  # doctest: +SKIP
        [50, 50]
    """

    def __init__(
        self,
        task: OrionTask,
        tokenizer: Any,
        eos_token_id: int,
        class_text: Literal["template_mean", "template", "name"] = "template_mean",
        batch_size: int = 64,
        node_budget: int = 512,
        seed: int = 0,
    ):
        choices = setting_choices()["class_text"]
        if class_text not in choices:
            raise ValueError(f"class_text must be one of {', '.join(choices)}, got {class_text!r}.")

        def tokenize(texts: list[str]) -> list[list[int]]:
            return trim_prompts(tokenizer(texts, verbose=False)["input_ids"], eos_token_id)

        self.num_classes = task.num_classes
        self.steps_per_epoch = math.ceil(task.num_classes / batch_size)
        self._class_text, self._node_budget, self._seed = class_text, node_budget, seed
        self._templates = [tokenize(prompts) for prompts in task.training_prompts()]  # [template][class]
        self._texts = [tokenize(list(task.class_names))] if class_text == "name" else self._templates
        self._kept: dict[tuple[int, ...], list[PromptPack]] = {}

    def of_epoch(self, epoch: int) -> list[Tensor]:
        """All classes in a new order, in batches of nearly equal size, each in ascending order.

        Nearly equal, so that no batch is left with a single class, which would have no pairs.
        """
        generator = torch.Generator().manual_seed(mixed_seed(self._seed, epoch))
        order = torch.randperm(self.num_classes, generator=generator)
        return [batch.sort().values for batch in order.tensor_split(self.steps_per_epoch)]

    def packs(self, classes: Tensor, step: int) -> list[PromptPack]:
        """Prefix trees of the prompts of some classes, template by template.

        Kept when an epoch is one step, because then every epoch has the same ones. Otherwise the classes are
        mixed anew in every epoch, so that in time each meets each, and a batch has trees of its own.
        """
        key = tuple(classes.tolist())
        if key in self._kept:
            return self._kept[key]
        if self._class_text == "template":
            # One draw for all classes, the same on all processes, whose shares of a batch must fit together.
            generator = torch.Generator().manual_seed(mixed_seed(self._seed, step, -1))
            drawn = torch.randint(len(self._texts), (self.num_classes,), generator=generator).tolist()
            return build_packs([self._texts[drawn[c]][c] for c in key], self._node_budget)
        packs = build_packs([text[c] for text in self._texts for c in key], self._node_budget)
        if self.steps_per_epoch == 1:
            self._kept[key] = packs
        return packs

    def anchor_packs(self) -> list[PromptPack]:
        """Prefix trees of all training prompts, template by template."""
        return build_packs([ids for template in self._templates for ids in template], self._node_budget)

    def count_tokens(self, classes: Tensor) -> int:
        """Tokens of the prompts of a step, from start to end of text."""
        tokens = sum(len(text[c]) for text in self._texts for c in classes.tolist())
        return tokens // len(self._texts) if self._class_text == "template" else tokens


def mixed_seed(*parts: int) -> int:
    """One seed from several numbers, the same on every machine.

    Example:
        >>> mixed_seed(1, 2) == mixed_seed(2, 1)
        False
    """
    seed = 0
    for part in parts:
        seed = (seed * 1_000_003 + part + 1) % 2**63
    return seed

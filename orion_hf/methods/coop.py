"""CoOp: learn the context words of the prompt instead of writing them.

The prompt of a class is ``[v_1] ... [v_M] class name .``; the text encoder is frozen, the vectors v are learnt from a
few labelled images by SGD on the cross-entropy of ``s <x / |x|, t_c / |t_c|>``, t_c the text embedding of class c.

ORION enters as the encoder: give `CoOp` an ORION text model, LoRA merged or not.

The published code encodes K prompts of 77 tokens at every step. Here the prompts are a prefix tree: the tokens every
class shares, the learnt ones among them, are computed once, and nothing is computed after the end of a prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ._inputs import check_range
from .estimator import (
    Estimator,
    check_counts,
    check_order,
    epoch_learning_rates,
    generator,
    labelled_features,
    query_features,
)

if TYPE_CHECKING:
    from transformers import CLIPTextModelWithProjection, PreTrainedTokenizerBase

    from orion_hf.prompt_tree import PromptPack

PAPER = "Zhou et al., Learning to Prompt for Vision-Language Models, IJCV 2022"
INPUTS = "few-shot"
POSITIONS = ("end", "middle", "front")
# Activations of this many tokens are kept for the backward pass (about 4 GB for ViT-B); with more, as class-specific
# contexts of a thousand classes have, each pack is encoded again for its gradient.
KEPT_NODES = 8192


def published_epochs(shots: int) -> int:
    """Epochs by images a class: 50 for 1, 100 for 2 and 4, 200 for 8 and 16. (ImageNet takes 50 for any.)"""
    return 50 if shots <= 1 else 100 if shots <= 4 else 200


def place_context(
    token_ids: Sequence[int], name_length: int, n_ctx: int, position: str = "end", first_row: int = 0
) -> list[int]:
    """Put the learnt vectors into a tokenized prompt ``start, n_ctx placeholders, name, rest``.

    Args:
        token_ids: the tokenized prompt.
        name_length: number of tokens of the class name.
        position: of the name: ``end``, ``middle`` (after half of the context) or ``front``.
        first_row: row of the first learnt vector; row j is written as token ``-1 - j``.

    Example:
        >>> place_context([0, 7, 7, 5, 6, 8, 9], name_length=2, n_ctx=2, position="middle")
        [0, -1, 5, 6, -2, 8, 9]
    """
    if position not in POSITIONS:
        raise ValueError(f"class_token_position {position!r} is not known: choose from {POSITIONS}.")
    start, name, rest = (
        token_ids[:1],
        token_ids[1 + n_ctx :][:name_length],
        token_ids[1 + n_ctx + name_length :],
    )
    context = [-1 - first_row - j for j in range(n_ctx)]
    before = {"end": n_ctx, "middle": n_ctx // 2, "front": 0}[position]
    return [*start, *context[:before], *name, *context[before:], *rest]


def context_prototypes(text_model: CLIPTextModelWithProjection, packs: Sequence[PromptPack], ctx: Tensor) -> Tensor:
    """Text embeddings ``(K, d)``, unit rows, of prompts with the context ``(M, dim)`` or ``(K, M, dim)``."""
    from orion_hf.prompt_tree import encode_packs

    return F.normalize(encode_packs(text_model, packs, soft_embeds=ctx.flatten(0, -2)), dim=1)


class CoOp(Estimator):
    """Learnt context on a frozen text encoder.

    Args:
        text_model: CLIP's or ORION's text encoder; only `fit` needs it.
        tokenizer: its tokenizer; the same.
        class_names: K names; underscores become spaces.
        n_ctx: M, the number of learnt vectors.
        ctx_init: words to start from, such as ``"a photo of a"``: M becomes their number and the context is shared by
            all classes. Default: random vectors.
        class_token_position: ``end``, ``middle`` or ``front``.
        class_specific: one context a class instead of one for all.
        lr, momentum, weight_decay: of SGD.
        epochs: default: [`published_epochs`] of the images a class.
        batch_size: a last, smaller batch is dropped, unless it is the only one.
        warmup_epochs, warmup_lr: see [`epoch_learning_rates`].
        logit_scale: s, frozen.
        random_state: seed of the random context and the batches.

    Example:
        >>> coop = CoOp(model, tokenizer, ["cat", "dog"], ctx_init="a photo of a")      # doctest: +SKIP
        >>> coop.fit(features, labels).predict(test_features)                             # doctest: +SKIP
    """

    def __init__(
        self,
        text_model: CLIPTextModelWithProjection | None,
        tokenizer: PreTrainedTokenizerBase | None,
        class_names: Sequence[str],
        *,
        n_ctx: int = 16,
        ctx_init: str | None = None,
        class_token_position: str = "end",
        class_specific: bool = False,
        lr: float = 0.002,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        epochs: int | None = None,
        batch_size: int = 32,
        warmup_epochs: int = 1,
        warmup_lr: float = 1e-5,
        logit_scale: float = 100.0,
        random_state: int | None = 0,
    ):
        self.text_model = text_model
        self.tokenizer = tokenizer
        self.class_names = class_names
        self.n_ctx = n_ctx
        self.ctx_init = ctx_init
        self.class_token_position = class_token_position
        self.class_specific = class_specific
        self.lr = lr
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.epochs = epochs
        self.batch_size = batch_size
        self.warmup_epochs = warmup_epochs
        self.warmup_lr = warmup_lr
        self.logit_scale = logit_scale
        self.random_state = random_state

    def __sklearn_clone__(self) -> CoOp:
        """A clone shares the frozen encoder."""
        return CoOp(**self.get_params())

    def fit(
        self,
        features: Tensor,
        labels: Tensor,
        prototypes: Tensor | None = None,
        *,
        shuffle: Tensor | None = None,
        initial: Mapping[str, Tensor] | None = None,
    ) -> CoOp:
        """Learn the context from a support set.

        Args:
            features: ``(N, d)`` image features, or ``(E, N, d)`` of E augmentation passes, used in turn, one an epoch
                (the published code encodes newly augmented images at every step); not necessarily normalised.
            labels: ``(N,)`` class indices.
            prototypes: not used; there so that all few-shot methods are called alike.
            shuffle: ``(epochs, N)`` order of the images in each epoch instead of random ones, to repeat a run; with
                fewer rows than `epochs` the training stops after them.
            initial: ``{"ctx": ...}``, a context to start from.

        Returns:
            self, with ``ctx_``, ``prototypes_`` (unit rows), ``loss_per_step_`` and ``lr_per_step_``.
        """
        self._check_options()
        width = self._encoder.text_projection.weight.shape[0]
        features, labels = labelled_features(features, labels, len(self.class_names), "class_names")
        if features.shape[2] != width:
            raise ValueError(
                f"features are {features.shape[2]} wide, but the text encoder gives {width}: "
                "take both from the same CLIP model."
            )
        features = F.normalize(features, dim=2)
        images = features.shape[1]
        epochs = published_epochs(int(labels.bincount().max())) if self.epochs is None else self.epochs
        batches = max(1, images // self.batch_size)
        rates = epoch_learning_rates(epochs, self.lr, self.warmup_epochs, self.warmup_lr)
        rng = generator(self.random_state)
        packs = self.prompt_packs()
        ctx = self.initial_context(rng).to(features)
        shuffle = check_order("shuffle", shuffle, images)
        if initial is not None:
            if set(initial) != {"ctx"}:
                raise ValueError(f"initial must hold 'ctx', the context to start from, not {sorted(initial)}.")
            given = torch.as_tensor(initial["ctx"])
            if given.shape != ctx.shape:
                raise ValueError(f"initial['ctx'] must be {tuple(ctx.shape)}, got {tuple(given.shape)}.")
            ctx = given.detach().to(ctx, copy=True)
        sgd = torch.optim.SGD([ctx], lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        losses: list[Tensor] = []
        lr_per_step: list[float] = []
        with _frozen(self._encoder):
            for epoch in range(epochs if shuffle is None else min(epochs, len(shuffle))):
                order = torch.randperm(images, generator=rng) if shuffle is None else shuffle[epoch]
                for batch in order[: batches * self.batch_size].to(features.device).split(int(self.batch_size)):
                    x = features[epoch % len(features), batch]
                    loss, ctx.grad = self.loss_and_gradient(x, labels[batch], packs, ctx)
                    sgd.param_groups[0]["lr"] = rates[epoch]
                    sgd.step()
                    losses.append(loss)
                    lr_per_step.append(rates[epoch])
            with torch.no_grad():
                prototypes = context_prototypes(self._encoder, packs, ctx).to(features)
        ctx.grad = None
        self._set_fitted(
            ctx_=ctx,
            prototypes_=prototypes,
            loss_per_step_=torch.stack(losses).double().cpu(),
            lr_per_step_=torch.tensor(lr_per_step, dtype=torch.float64),
        )
        return self

    @classmethod
    def load(cls, folder: str | Path, device: str | torch.device = "cpu", **params: Any) -> CoOp:
        """Read what `save` wrote; a new `fit` needs ``text_model`` and ``tokenizer`` again, `predict` does not."""
        return super().load(folder, device, **{"text_model": None, "tokenizer": None} | params)

    @torch.no_grad()
    def decision_function(self, features: Tensor) -> Tensor:
        """Logits ``(B, K)`` of image features ``(B, d)``; needs no text encoder."""
        self._check_fitted()
        features = query_features(features, self.prototypes_)
        return self.logit_scale * F.normalize(features, dim=1) @ self.prototypes_.T

    def prompt_packs(self) -> list[PromptPack]:
        """The K prompts, learnt vectors in place, as prefix trees."""
        from orion_hf.prompt_tree import build_packs

        rows = self.n_context if self._is_class_specific else 0
        prompts = [
            place_context(ids, length, self.n_context, self.class_token_position, first_row=rows * k)
            for k, (ids, length) in enumerate(zip(*self.tokenize(), strict=True))
        ]
        return build_packs(prompts)

    def tokenize(self) -> tuple[list[list[int]], list[int]]:
        """Token ids of ``placeholders name.``, cut after the end of text, and the number of tokens of every name."""
        from orion_hf.prompt_tree import trim_prompts

        names = [name.replace("_", " ") for name in self.class_names]
        words = " ".join(["X"] * self.n_ctx) if self.ctx_init is None else self._initial_words
        prompts = [f"{words} {name}." for name in names]
        sentences = self._tokenizer(prompts, padding=False, truncation=False)["input_ids"]
        limit = self._encoder.text_model.config.max_position_embeddings
        for name, ids in zip(self.class_names, sentences, strict=True):
            if len(ids) > limit:
                raise ValueError(f"The prompt of {name!r} has {len(ids)} tokens, more than {limit}: lower n_ctx.")
        lengths = [len(ids) - 2 for ids in self._tokenizer(names, padding=False, truncation=False)["input_ids"]]
        return trim_prompts(sentences, self._encoder.text_model.config.eos_token_id), lengths

    def initial_context(self, rng: torch.Generator) -> Tensor:
        """Embeddings of `ctx_init`, or a normal draw of standard deviation 0.02: ``(M, dim)`` or ``(K, M, dim)``."""
        embedding = self._encoder.text_model.embeddings.token_embedding
        if self.ctx_init is not None:
            ids = self._tokenizer([self._initial_words], padding=False, truncation=False)["input_ids"][0]
            if len(ids) - 2 != self.n_context:
                raise ValueError(f"Every word of ctx_init must be one token; {self.ctx_init!r} has {len(ids) - 2}.")
            return embedding(torch.tensor(ids[1:-1], device=embedding.weight.device)).detach().clone()
        classes = [len(self.class_names)] if self._is_class_specific else []
        shape = [*classes, self.n_context, embedding.weight.shape[1]]
        return 0.02 * torch.randn(shape, generator=rng, dtype=torch.float64)

    def loss_and_gradient(
        self, features: Tensor, labels: Tensor, packs: Sequence[PromptPack], ctx: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Cross-entropy of a batch of unit features ``(B, d)``, and its gradient with respect to the context."""
        keep = sum(map(len, packs)) <= KEPT_NODES
        with torch.set_grad_enabled(keep):
            leaf = ctx.detach().requires_grad_()
            prototypes = context_prototypes(self._encoder, packs, leaf).to(features)
        with torch.enable_grad():
            if not keep:
                prototypes.requires_grad_()
            loss = F.cross_entropy(self.logit_scale * features @ prototypes.T, labels)
            if keep:
                return loss.detach(), torch.autograd.grad(loss, leaf)[0]
            (of_prototypes,) = torch.autograd.grad(loss, prototypes)
            gradient = torch.zeros_like(leaf)
            for pack in packs:
                # Rows of a single pack come out in the order of its prompts.
                rows = pack.rows.sort().values.to(of_prototypes.device)
                own = context_prototypes(self._encoder, [pack], leaf).to(features)
                gradient += torch.autograd.grad(own, leaf, of_prototypes[rows])[0]
        return loss.detach(), gradient

    @property
    def n_context(self) -> int:
        """M: the number of words of `ctx_init`, else `n_ctx`."""
        return self.n_ctx if self.ctx_init is None else len(self._initial_words.split())

    @property
    def _encoder(self) -> CLIPTextModelWithProjection:
        if self.text_model is None:
            raise ValueError("text_model is None: give CoOp the text encoder and tokenizer to learn a context with.")
        return self.text_model

    @property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise ValueError("tokenizer is None: give CoOp the text encoder and tokenizer to learn a context with.")
        return self.tokenizer

    @property
    def _initial_words(self) -> str:
        return (self.ctx_init or "").replace("_", " ")

    @property
    def _is_class_specific(self) -> bool:
        return self.class_specific and self.ctx_init is None

    def _check_options(self) -> None:
        if isinstance(self.class_names, str) or not len(self.class_names):
            raise ValueError(f"class_names must be a list of at least one name, not {self.class_names!r}.")
        if self.ctx_init is not None and not self._initial_words.strip():
            raise ValueError("ctx_init is empty: give words to start from, or None for random vectors.")
        if self.epochs is not None:
            check_counts(epochs=self.epochs)
        check_counts(n_ctx=self.n_ctx, batch_size=self.batch_size)
        check_counts(0, warmup_epochs=self.warmup_epochs)
        check_range(0, lr=self.lr, warmup_lr=self.warmup_lr, momentum=self.momentum, weight_decay=self.weight_decay)
        check_range(0, above=True, logit_scale=self.logit_scale)

    def _saved_params(self) -> dict[str, Any]:
        params = {name: value for name, value in self.get_params().items() if name not in ("text_model", "tokenizer")}
        return params if isinstance(self.class_names, tuple) else params | {"class_names": list(self.class_names)}

    ctx_: Tensor
    prototypes_: Tensor


coop = CoOp


@contextmanager
def _frozen(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients for the weights, so that activations only they need are not kept."""
    training = model.training
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.eval()
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        model.train(training)
        for parameter in trainable:
            parameter.requires_grad_(True)

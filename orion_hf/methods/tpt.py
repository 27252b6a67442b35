"""TPT: tune the context vectors of the prompt on each test image, then forget them.

The prompt of class c is ``[start] C name_c . [end]`` with C, ``(n, hidden)``, shared by all classes. On the
share of an image's views with the lowest entropy, one AdamW step on C lowers the entropy of the mean
prediction

    a_k = logsumexp_v log p_vk - log n_views,       loss = -sum_k a_k exp(a_k)

and view 0 is classified with the tuned prompts. Only the text encoder is differentiated. The start and the
context are the trunk of a prefix tree, so a pass costs about the tokens of the class names instead of 77
tokens a class, and the first pass, from the same C for all images, is made once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import CLIPTextModelWithProjection, PreTrainedTokenizerBase

from orion_hf.methods import MethodOutput
from orion_hf.methods._inputs import check_inputs, check_range
from orion_hf.prompt_tree import PromptPack, build_packs, encode_packs, trim_prompts

PAPER = "Shu et al., Test-Time Prompt Tuning for Zero-Shot Generalization in Vision-Language Models, NeurIPS 2022"
INPUTS = "views and text model"

CLASS_MARK = "[CLS]"  # where the class name goes, if not at the end


@dataclass(frozen=True)
class TPTOutput(MethodOutput):
    """Logits of view 0 with the tuned prompts as ``scores``.

    Attributes:
        contexts: ``(N, n, hidden)``, the tuned context of each image.
        losses: ``(N, steps)``, before each step.
        selected: ``(N, m)``, the views tuned on, most confident first.
    """

    contexts: Tensor
    losses: Tensor
    selected: Tensor


@dataclass(frozen=True)
class ContextPrompts:
    """Prompts with a learnable context; what :func:`tpt` takes in place of prototypes.

    Attributes:
        text_model: The text encoder, tuned by ORION or not.
        packs: Prefix trees of the K prompts, with soft tokens for the context.
        context: ``(n, hidden)``, the context to start from.
    """

    text_model: CLIPTextModelWithProjection
    packs: list[PromptPack]
    context: Tensor

    def prototypes(self, context: Tensor) -> Tensor:
        """Unit text features, ``(K, d)``, of the prompts with this context; differentiable."""
        return normalize(encode_packs(self.text_model, self.packs, soft_embeds=context), dim=1)


def tpt(
    features: Tensor,
    prompts: ContextPrompts,
    *,
    selection_p: float = 0.1,
    steps: int = 1,
    lr: float = 5e-3,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    logit_scale: float = 100.0,
) -> TPTOutput:
    """Tune the context on each image alone and classify its view 0.

    Args:
        features: Features of the views, ``(N, V, d)``; view 0 is the image without augmentation.
        prompts: From :func:`context_prompts`.
        selection_p: Share of the views to tune on; ``int(V * selection_p)`` of them.
        steps: Optimiser steps; the views chosen at the first are kept.
        lr: Learning rate of AdamW.
        weight_decay: Of AdamW; 0.01, the library's default, is active in the published runs.
        betas: Of AdamW.
        eps: Of AdamW.
        logit_scale: s.

    Example:
        >>> prompts = context_prompts(text_model, tokenizer, ["cat", "dog"])        # doctest: +SKIP
        >>> tpt(view_features, prompts).predictions     # doctest: +SKIP
    """
    if not isinstance(prompts, ContextPrompts):
        raise TypeError("tpt tunes the words of prompts: give context_prompts(text_model, ...), not prototypes.")
    (features,) = check_inputs(features=features)
    if features.dim() != 3:
        raise ValueError(f"features must be (N, V, d), V views an image; got shape {tuple(features.shape)}.")
    check_range(0, steps=steps, lr=lr, weight_decay=weight_decay)
    check_range(0, 1, above=True, selection_p=selection_p)
    if int(features.shape[1] * selection_p) < 1:
        raise ValueError(f"{features.shape[1]} views are too few: selection_p={selection_p} of them is none.")
    features = normalize(features, dim=2)
    start = prompts.context.detach().clone().requires_grad_()
    # All images begin at the same context: one forward pass serves the first step of each.
    start_prototypes = prompts.prototypes(start)
    if start_prototypes.shape[1] != features.shape[2]:
        raise ValueError(
            f"Image features are {features.shape[2]} wide, the text model's {start_prototypes.shape[1]}: "
            "they must come from the same CLIP model."
        )

    scores, contexts, losses, selections = [], [], [], []
    for views in features:
        context = start.detach().clone()
        optimizer = torch.optim.AdamW([context], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        selected = confident_views(logit_scale * views @ start_prototypes.detach().to(views).T, selection_p)
        image_losses = []
        for step in range(steps):
            leaf = start if step == 0 else context.detach().clone().requires_grad_()
            prototypes = start_prototypes if step == 0 else prompts.prototypes(leaf)
            loss = mean_prediction_entropy(logit_scale * views[selected] @ prototypes.to(views).T)
            (context.grad,) = torch.autograd.grad(loss, leaf, retain_graph=step == 0)
            optimizer.step()
            image_losses.append(loss.detach())
        with torch.no_grad():
            scores.append(logit_scale * views[0] @ prompts.prototypes(context).to(views).T)
        contexts.append(context.detach())
        losses.append(torch.stack(image_losses) if image_losses else views.new_empty(0))
        selections.append(selected)
    return TPTOutput(torch.stack(scores), torch.stack(contexts), torch.stack(losses), torch.stack(selections))


def confident_views(logits: Tensor, share: float) -> Tensor:
    """Indices of the ``int(V * share)`` rows of ``(V, K)`` logits of lowest entropy, in ascending order."""
    return view_entropies(logits).argsort()[: int(len(logits) * share)]


def view_entropies(logits: Tensor) -> Tensor:
    """Entropy of each row's softmax, ``(V,)``."""
    log_probabilities = logits.log_softmax(dim=1)
    return -(log_probabilities * log_probabilities.exp()).sum(dim=1)


def mean_prediction_entropy(logits: Tensor) -> Tensor:
    """Entropy of the mean of the rows' softmax, a scalar; the mean is taken in the log domain."""
    average = logits.log_softmax(dim=1).logsumexp(dim=0) - math.log(len(logits))
    average = average.clamp_min(torch.finfo(average.dtype).min)
    return -(average * average.exp()).sum()


def context_prompts(
    text_model: CLIPTextModelWithProjection,
    tokenizer: PreTrainedTokenizerBase,
    class_names: Sequence[str],
    *,
    words: str = "a photo of a",
    n_random: int = 4,
    generator: torch.Generator | None = None,
) -> ContextPrompts:
    """Prompts ``"<words> <name>."`` whose words are the learnable context.

    Args:
        text_model: The text encoder.
        tokenizer: Its tokenizer.
        class_names: K names; underscores become spaces.
        words: Context words, one token each; underscores become spaces. With ``[CLS]`` among them the class
            name stands there instead of at the end. ``""``: a random context.
        n_random: Vectors of a random context, drawn with standard deviation 0.02.
        generator: Source of a random context.

    Example:
        >>> context_prompts(model, tokenizer, ["cat"], words="a [CLS] in a scene")  # doctest: +SKIP
    """
    if not len(class_names):
        raise ValueError("class_names is empty: give at least one name.")
    context_words = words.replace("_", " ").split() or ["X"] * n_random
    if context_words.count(CLASS_MARK) > 1 or context_words == [CLASS_MARK]:
        raise ValueError(f"words={words!r} must hold a context word, and {CLASS_MARK} at most once.")
    split = context_words.index(CLASS_MARK) if CLASS_MARK in context_words else None
    context_words = [word for word in context_words if word != CLASS_MARK]
    context_tokens = tokenizer(" ".join(context_words)).input_ids
    if len(context_tokens) - 2 != len(context_words):
        raise ValueError(
            f"Every context word must be one token of this tokenizer, but the {len(context_words)} words of "
            f"{words!r} are {len(context_tokens) - 2} tokens. Use other words."
        )
    names = [name.replace("_", " ") for name in class_names]
    token_ids = tokenizer([f"{' '.join(context_words)} {name}." for name in names]).input_ids
    name_lengths = [len(tokenizer(name).input_ids) - 2 for name in names]
    if words.strip():
        context = _embed(text_model, context_tokens[1:-1])
    else:
        hidden = text_model.config.hidden_size
        context = 0.02 * torch.randn(n_random, hidden, generator=generator).to(text_model.device)
    return splice_context(text_model, token_ids, context, split=split, name_lengths=name_lengths)


def splice_context(
    text_model: CLIPTextModelWithProjection,
    token_ids: Tensor | Sequence[Sequence[int]],
    context: Tensor,
    *,
    split: int | None = None,
    name_lengths: Sequence[int] | None = None,
) -> ContextPrompts:
    """Put soft tokens where tokenised sentences ``[start] <n context words> name . [end]`` have their
    context.

    Args:
        text_model: The text encoder.
        token_ids: K sentences, padded or not.
        context: ``(n, hidden)``, the context to start from; a context learnt by CoOp fits as well.
        split: Context vectors before the class name; all, if ``None``. Only blocks move: the sentence given
            still has the name last.
        name_lengths: Tokens of each name; needed with ``split``.
    """
    return ContextPrompts(
        text_model,
        build_packs(soft_prompts(text_model, token_ids, len(context), split, name_lengths)),
        context,
    )


def soft_prompts(
    text_model: CLIPTextModelWithProjection,
    token_ids: Tensor | Sequence[Sequence[int]],
    n_context: int,
    split: int | None = None,
    name_lengths: Sequence[int] | None = None,
) -> list[list[int]]:
    """Token ids of each prompt up to its end token, with ``-1 - j`` for context vector j."""
    sentences = trim_prompts(token_ids, cast(int, text_model.config.eos_token_id))
    soft = [-1 - j for j in range(n_context)]
    if split is None:
        return [[ids[0], *soft, *ids[1 + n_context :]] for ids in sentences]
    if name_lengths is None or len(name_lengths) != len(sentences):
        raise ValueError("A context around the class name needs name_lengths, the tokens of each class name.")
    prompts = []
    for ids, length in zip(sentences, name_lengths, strict=True):
        name, rest = ids[1 + n_context :][:length], ids[1 + n_context + length :]
        prompts.append([ids[0], *soft[:split], *name, *soft[split:], *rest])
    return prompts


def _embed(text_model: CLIPTextModelWithProjection, token_ids: Sequence[int]) -> Tensor:
    embedding = text_model.text_model.embeddings.token_embedding
    return embedding(torch.tensor(token_ids, device=embedding.weight.device)).detach()

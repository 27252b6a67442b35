"""Encode prompts as the nodes of their prefix tree: exact CLIP text embeddings without repeated work.

CLIP's text encoder is causal and is read at one token, the end of text. So tokens after it never matter, and
prompts that begin alike ("a photo of a ...") share every hidden state of their common beginning. A pack lays
the prefix tree of many prompts out as one sequence, parents before children::

    <s> a photo of a cat . </s>         node      0    1  2      3   4  5    6  7     8    9  10
    <s> a photo of a dog . </s>   ->    token    <s>   a  photo  of  a  cat  .  </s>  dog  .  </s>
                                        position  0    1  2      3   4  5    6  7     5    6  7

A node sits at the position of its depth and attends to its ancestors and itself, which is what the token saw
in its own prompt. The encoder's own modules do the rest, so LoRA layers, gradients, checkpointing and
autocast work as usual.

    packs = build_packs(trim_prompts(input_ids, model.config.eos_token_id))  # once
    text_embeds = encode_packs(model, packs)  # every step

Learnable context vectors (CoOp, TPT) take any position of a prompt: the token id ``-1 - j`` stands for row
``j`` of the ``soft_embeds`` given to [`encode_packs`]. Rows used by all classes are computed once;
class-specific contexts are simply other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import CLIPModel, CLIPTextModelWithProjection

# Measured, see the table of budgets in benchmarks/README.md: smaller packs repeat more prefixes and leave the
# matrix products thin, larger ones pay for the square of the attention.
DEFAULT_NODE_BUDGET = 512


@dataclass(frozen=True, eq=False)
class PromptPack:
    """The prefix tree of some prompts, its ``n`` nodes in depth-first order.

    Attributes:
        token_ids: ``(n,)``, the token of each node; ``-1 - j`` is row ``j`` of the soft embeddings.
        position_ids: ``(n,)``, the depth of each node.
        subtree_ends: ``(n,)``, one past the last descendant; ``i`` sees ``j`` iff ``j <= i < end_j``.
        leaves: ``(r,)``, the node at which each of the pack's ``r`` prompts is read; equal prompts share it.
        rows: ``(r,)``, the row of each of these prompts in the input of [`build_packs`].
        longest: tokens of the longest prompt.
        soft_rows: rows of soft embeddings needed, 0 without soft tokens.
    """

    token_ids: Tensor
    position_ids: Tensor
    subtree_ends: Tensor
    leaves: Tensor
    rows: Tensor
    longest: int
    soft_rows: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    def to(self, device: torch.device | str) -> PromptPack:
        names = ("token_ids", "position_ids", "subtree_ends", "leaves", "rows")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def ancestors(self) -> Tensor:
        """``(n, n)`` bool, true where the column's node is the row's node or an ancestor of it."""
        nodes = torch.arange(len(self), device=self.subtree_ends.device)
        return (nodes <= nodes[:, None]) & (nodes[:, None] < self.subtree_ends)


def trim_prompts(input_ids: Tensor | Sequence[Sequence[int]], eos_token_id: int) -> list[list[int]]:
    """Cut every prompt after the token at which CLIP reads it, so that padding costs nothing.

    The token is the one transformers pools: the first ``eos_token_id`` of the row (the first token of all if
    there is none), or, for the old checkpoints whose config says ``eos_token_id = 2``, the first of the row's
    highest ids. Soft tokens have negative ids, so they are never it.

    Args:
        input_ids: ``(N, L)`` padded tensor, or N token-id lists of any lengths.
        eos_token_id: ``model.config.eos_token_id``.

    Example:
        >>> trim_prompts([[0, 5, 9, 9, 9], [0, 5, 6, 9, 9]], eos_token_id=9)
        [[0, 5, 9], [0, 5, 6, 9]]
    """
    if isinstance(input_ids, Tensor):
        if input_ids.ndim != 2:
            raise ValueError(f"input_ids must be (prompts, tokens), got shape {tuple(input_ids.shape)}.")
        input_ids = input_ids.tolist()
    trimmed = []
    for row, ids in enumerate(input_ids):
        ids = list(ids)
        if not ids:
            raise ValueError(f"input_ids[{row}] is an empty prompt: give it at least the end-of-text token.")
        pooled = max(ids) if eos_token_id == 2 else eos_token_id
        trimmed.append(ids[: ids.index(pooled) + 1] if pooled in ids else ids[:1])
    return trimmed


def build_packs(token_ids: Sequence[Sequence[int]], node_budget: int = DEFAULT_NODE_BUDGET) -> list[PromptPack]:
    """Pack prompts into prefix trees of at most ``node_budget`` nodes (a longer prompt gets its own tree).

    Prompts are sorted, so those that share a prefix fall into the same pack, and equal prompts are encoded
    once. Packs depend on the tokens alone: build them once and use them at every step.

    Args:
        token_ids: N prompts, each read at its last token (see [`trim_prompts`]).
        node_budget: bound on the nodes, and so on the attention matrix and activations, of one pack.

    Example:
        >>> [pack] = build_packs([[0, 5, 6, 9], [0, 5, 7, 9]])
        >>> pack.token_ids.tolist(), pack.position_ids.tolist(), pack.leaves.tolist()
        ([0, 5, 6, 9, 7, 9], [0, 1, 2, 3, 2, 3], [3, 5])
    """
    if node_budget < 1:
        raise ValueError(f"node_budget must be at least 1, got {node_budget}.")
    rows_of: dict[tuple[int, ...], list[int]] = {}
    for row, ids in enumerate(token_ids):
        rows_of.setdefault(tuple(map(int, ids)), []).append(row)
    if not rows_of:
        raise ValueError("token_ids holds no prompts: give at least one.")
    if () in rows_of:
        row = rows_of[()][0]
        raise ValueError(f"token_ids[{row}] is an empty prompt: give it at least the end-of-text token.")

    groups: list[list[tuple[int, ...]]] = []
    nodes = node_budget
    previous: tuple[int, ...] = ()
    for prompt in sorted(rows_of):
        new = len(prompt) - _shared_length(previous, prompt)
        if groups and nodes + new <= node_budget:
            groups[-1].append(prompt)
            nodes += new
        else:
            groups.append([prompt])
            nodes = len(prompt)
        previous = prompt
    return [_build_pack(prompts, rows_of) for prompts in groups]


def encode_packs(
    model: CLIPTextModelWithProjection | CLIPModel, packs: Sequence[PromptPack], soft_embeds: Tensor | None = None
) -> Tensor:
    """Text embeddings of packed prompts, equal to the padded forward of ``model`` and as differentiable.

    Args:
        model: the text encoder, or anything with its ``text_model`` and ``text_projection`` (``CLIPModel``, a
            peft model); attention implementation "sdpa" or "eager".
        packs: from [`build_packs`].
        soft_embeds: ``(m, hidden_size)``, learnable token embeddings; row j is the token ``-1 - j``.

    Returns:
        ``(N, d)`` ``text_embeds``, not normalised, in the order of the prompts given to [`build_packs`]. Some
        of the packs alone give their own prompts, in that order.
    """
    if not packs:
        raise ValueError("packs is empty: build them from at least one prompt.")
    config = model.text_model.config
    if config._attn_implementation not in ("sdpa", "eager"):
        raise ValueError(
            f"Attention implementation {config._attn_implementation!r} takes no tree mask: "
            'load the text encoder with attn_implementation="sdpa".'
        )
    text_embeds = [_encode_pack(model, pack.to(model.device), soft_embeds) for pack in packs]
    rows = torch.cat([pack.rows for pack in packs])
    return torch.cat(text_embeds)[rows.argsort().to(text_embeds[0].device)]


def _shared_length(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    length = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        length += 1
    return length


def _build_pack(prompts: list[tuple[int, ...]], rows_of: dict[tuple[int, ...], list[int]]) -> PromptPack:
    """Lay sorted prompts out depth first; ``path`` holds the nodes of the prompt at hand."""
    token_ids: list[int] = []
    position_ids: list[int] = []
    subtree_ends: list[int] = []
    leaves: list[int] = []
    rows: list[int] = []
    path: list[int] = []
    previous: tuple[int, ...] = ()
    for prompt in prompts:
        shared = _shared_length(previous, prompt)
        for node in path[shared:]:
            subtree_ends[node] = len(token_ids)
        del path[shared:]
        for position in range(shared, len(prompt)):
            path.append(len(token_ids))
            token_ids.append(prompt[position])
            position_ids.append(position)
            subtree_ends.append(-1)
        leaves += [path[-1]] * len(rows_of[prompt])
        rows += rows_of[prompt]
        previous = prompt
    for node in path:
        subtree_ends[node] = len(token_ids)
    return PromptPack(
        token_ids=torch.tensor(token_ids),
        position_ids=torch.tensor(position_ids),
        subtree_ends=torch.tensor(subtree_ends),
        leaves=torch.tensor(leaves),
        rows=torch.tensor(rows),
        longest=max(position_ids) + 1,
        soft_rows=max(0, -min(token_ids)),
    )


def _encode_pack(
    model: CLIPTextModelWithProjection | CLIPModel, pack: PromptPack, soft_embeds: Tensor | None
) -> Tensor:
    """``(r, d)`` text embeddings of one pack, in the order of its leaves."""
    text_model = model.text_model
    limit = text_model.config.max_position_embeddings
    if pack.longest > limit:
        row = pack.rows[pack.position_ids[pack.leaves].argmax()].item()
        raise ValueError(
            f"Prompt {row} has {pack.longest} tokens, the text encoder has {limit} positions: "
            "shorten it, or tokenize with truncation."
        )
    # Not through text_model.embeddings: it refuses more tokens than positions, and a tree has more.
    inputs_embeds = _embed_tokens(text_model.embeddings.token_embedding, pack, soft_embeds)
    inputs_embeds = inputs_embeds + text_model.embeddings.position_embedding(pack.position_ids)
    # Additive, because eager attention adds it; sdpa takes it as well.
    mask = torch.zeros(len(pack), len(pack), dtype=inputs_embeds.dtype, device=inputs_embeds.device)
    mask.masked_fill_(~pack.ancestors(), torch.finfo(mask.dtype).min)
    hidden_states = text_model.encoder(
        inputs_embeds=inputs_embeds[None], attention_mask=mask[None, None], is_causal=False
    ).last_hidden_state[0]
    pooled = text_model.final_layer_norm(hidden_states[pack.leaves.to(hidden_states.device)])
    return model.text_projection(pooled)


def _embed_tokens(token_embedding: torch.nn.Module, pack: PromptPack, soft_embeds: Tensor | None) -> Tensor:
    if not pack.soft_rows:
        return token_embedding(pack.token_ids)
    given = 0 if soft_embeds is None else len(soft_embeds)
    if soft_embeds is None or given < pack.soft_rows:
        raise ValueError(
            f"The prompts use soft token {-pack.soft_rows}, row {pack.soft_rows - 1} of soft_embeds, "
            f"which has {given} rows: pass soft_embeds with at least {pack.soft_rows}."
        )
    hard = token_embedding(pack.token_ids.clamp(min=0))
    soft = soft_embeds.to(hard)[(-1 - pack.token_ids).clamp(min=0)]
    return torch.where((pack.token_ids < 0)[:, None], soft, hard)

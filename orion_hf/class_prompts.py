"""Prototypes from sentences about each class (CuPL, Pratt et al., ICCV 2023) instead of one template for all.

A prompt file is JSON, ``{class name: [sentence, ...]}``. Sentences are used as they are, repeated ones weigh more::

    prompts = load_class_prompts("dtd.json", task.class_names)
    prompts.unmapped                                     # classes the file has no sentences for
    class_prompt_prototypes(model, tokenizer, prompts)   # prototypes (K, d), sentences cut at 77 tokens counted

No prompt files are shipped: those of the paper carry no licence. They spell some classes otherwise than the usual task
files do, so names are matched by spelling: underscores, case, ``hotel (outdoor)`` for ``outdoor hotel``, the year of
a car at the end, punctuation and spaces, and at last a short list of other names for the same class.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .prompt_tree import build_packs, encode_packs
from .tasks import format_prompt

if TYPE_CHECKING:
    from transformers import CLIPTextModelWithProjection, PreTrainedTokenizerBase

LARGEST_FILE = 64 * 2**20  # bytes; the files of the paper have at most a few megabytes
_ADVICE = "Give a UTF-8 file {class name: [sentence, ...]}."
# Class of a built-in task -> the key of the CuPL file, where no rule of spelling connects them. Caltech101's "face" is
# missing on purpose: the file has a centered and an off-center face, and which one is meant is for the user to say.
OTHER_NAMES = {
    "ball moss": "air plant",
    "car side": "side of a car",
    "cougar body": "body of a cougar cat",
    "cougar face": "face of a cougar cat",
    "crocodile head": "head of a crocodile",
    "flamingo head": "head of a flamingo",
    "pink-yellow dahlia": "pink and yellow dahlia",
    "projectile": "missile",
    "snoopy": "snoopy (cartoon beagle)",
    "sunglass": "sunglasses",
    "yin yang": "yin and yang symbol",
}


@dataclass(frozen=True)
class ClassPrompts:
    """Sentences of every class of a task.

    Attributes:
        class_names: K names, in label order.
        sentences: for each class its sentences; none where the file has none.
        keys: for each class the spelling in the file, or None.
        unused_keys: names in the file that are no class of the task.
        source: where the sentences are from, for messages.
    """

    class_names: tuple[str, ...]
    sentences: tuple[tuple[str, ...], ...]
    keys: tuple[str | None, ...]
    unused_keys: tuple[str, ...] = ()
    source: str = "The prompt file"

    @property
    def unmapped(self) -> tuple[str, ...]:
        """Classes without a key in the file."""
        return tuple(name for name, key in zip(self.class_names, self.keys, strict=True) if key is None)

    def require_all(self) -> None:
        """Raise one error that names every unmapped class and the nearest unused names of the file."""
        if not self.unmapped:
            return
        lines = []
        for name in self.unmapped:
            near = [key for key in self.unused_keys if _lower(name) in _lower(key)][:3]
            near = near or difflib.get_close_matches(name, self.unused_keys, n=3, cutoff=0.5)
            lines.append(f"{name!r}" + (f" (near: {', '.join(map(repr, near))})" if near else ""))
        raise ValueError(
            f"{self.source} has no sentences for {len(lines)} of {len(self.class_names)} classes: "
            f"{'; '.join(lines)}. Rename the keys there to the names of the classes "
            "(in Python, load_class_prompts(..., aliases={class name: key}) does without)."
        )

    def flat(self) -> tuple[list[str], Tensor]:
        """All sentences, and the class index ``(S,)`` of each."""
        counts = torch.tensor([len(sentences) for sentences in self.sentences])
        return [s for sentences in self.sentences for s in sentences], torch.arange(len(counts)).repeat_interleave(
            counts
        )

    def with_templates(self, templates: Sequence[str]) -> ClassPrompts:
        """The union with prompts made from templates: every sentence weighs the same."""
        sentences = tuple(
            (*(format_prompt(template, name) for template in templates), *own)
            for name, own in zip(self.class_names, self.sentences, strict=True)
        )
        return replace(self, sentences=sentences)


def load_class_prompts(
    path: str | Path, class_names: Sequence[str], aliases: Mapping[str, str] | None = None
) -> ClassPrompts:
    """Read a prompt file and match its names to the classes of a task.

    Args:
        path: UTF-8 JSON, ``{class name: [sentence, ...]}``.
        class_names: K names in label order.
        aliases: ``{class name: name in the file}``, before any rule.
    """
    return match_class_prompts(read_prompt_file(path), class_names, aliases, source=str(path))


def read_prompt_file(path: str | Path) -> dict[str, list[str]]:
    """The sentences of a prompt file as they are; what cannot be used is one error that names the file."""
    # Not `files.read_json`: editors write these files, so a byte-order mark is fine and a repeated key is likely.
    if os.path.getsize(path) > LARGEST_FILE:
        raise ValueError(f"{path}: more than {LARGEST_FILE} bytes. {_ADVICE}")
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8-sig"), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a prompt file ({error}). {_ADVICE}") from error
    return check_sentences(record, path)


def check_sentences(record: Any, source: str | Path) -> dict[str, list[str]]:
    """``{class name: [sentence, ...]}`` or a ValueError that names ``source`` and the class at fault.

    Example:
        >>> check_sentences({"dog": "A dog."}, "dogs.json")
        Traceback (most recent call last):
        ValueError: dogs.json: 'dog' must have a list of at least one sentence.
    """
    if not isinstance(record, Mapping) or not record:
        raise ValueError(f"{source} must hold an object {{class name: [sentence, ...]}}, with at least one class.")
    for name, sentences in record.items():
        if not isinstance(name, str):
            raise ValueError(f"{source}: the class name {name!r} is not a string.")
        if (
            not isinstance(sentences, Sequence)
            or isinstance(sentences, (str, bytes))
            or not sentences
            or not all(isinstance(sentence, str) for sentence in sentences)
        ):
            raise ValueError(f"{source}: {name!r} must have a list of at least one sentence.")
        if any(map(_SURROGATE.search, (name, *sentences))):
            raise ValueError(
                f"{source}: {name!a} has text with half a character (an unpaired surrogate, \\ud800 to \\udfff), "
                "which cannot be tokenized: write the whole character."
            )
    return {name: list(sentences) for name, sentences in record.items()}


def match_class_prompts(
    record: Mapping[str, Sequence[str]],
    class_names: Sequence[str],
    aliases: Mapping[str, str] | None = None,
    source: str = "The prompt file",
) -> ClassPrompts:
    """Match ``{name: sentences}`` to class names, the strictest rule of spelling first.

    A class that a rule connects to two names of the file stays unmapped.

    Args:
        record: the sentences.
        class_names: K names in label order.
        aliases: ``{class name: name in the record}``, before any rule.
        source: where the record is from, for messages.

    Example:
        >>> match_class_prompts({"Hotel (outdoor)": ["An inn."]}, ["outdoor_hotel", "abbey"]).keys
        ('Hotel (outdoor)', None)
    """
    aliases = dict(aliases or {})
    for name, key in aliases.items():
        if name not in class_names or key not in record:
            missing = f"class {name!r}" if name not in class_names else f"name {key!r} in {source}"
            raise ValueError(f"aliases maps {name!r} to {key!r}, but there is no {missing}.")
    tables = []
    for rule in _RULES:
        table: dict[str, set[str]] = {}
        for key in record:
            table.setdefault(rule(key), set()).add(key)
        tables.append((rule, table))
    keys = tuple(aliases.get(name) or _find_key(name, tables) for name in class_names)
    sentences = tuple(() if key is None else tuple(record[key]) for key in keys)
    used = set(keys)
    return ClassPrompts(tuple(class_names), sentences, keys, tuple(key for key in record if key not in used), source)


def sentence_prototypes(text_embeds: Tensor, class_index: Tensor, num_classes: int) -> Tensor:
    """``t_c = normalize(mean_{i in c} normalize(e_i))``.

    Args:
        text_embeds: ``(S, d)``, one embedding a sentence, of any length.
        class_index: ``(S,)``, the class of each sentence.

    Returns:
        ``(K, d)``, unit rows.

    Example:
        >>> sentence_prototypes(torch.tensor([[3.0, 0.0], [0.0, 1.0], [0.0, 2.0]]), torch.tensor([0, 0, 1]), 2)
        tensor([[0.7071, 0.7071],
                [0.0000, 1.0000]])
    """
    empty = sorted(set(range(num_classes)) - set(class_index.tolist()))
    if empty:
        raise ValueError(f"{len(empty)} classes have no sentence, the first is number {empty[0]}.")
    sums = text_embeds.new_zeros(num_classes, text_embeds.shape[1])
    return F.normalize(sums.index_add(0, class_index.to(sums.device), F.normalize(text_embeds, dim=1)), dim=1)


class TokenizedSentences(NamedTuple):
    """Token ids of each sentence, start and end of text included, and how many sentences had to be cut."""

    token_ids: list[list[int]]
    truncated: int


def tokenize_sentences(
    tokenizer: PreTrainedTokenizerBase, sentences: Sequence[str], max_length: int = 77
) -> TokenizedSentences:
    """Tokenize as CLIP does: a sentence longer than ``max_length`` loses its tail and keeps its end-of-text token."""
    full = tokenizer(list(sentences), padding=False, truncation=False, verbose=False)["input_ids"]
    cut = [ids if len(ids) <= max_length else [*ids[: max_length - 1], ids[-1]] for ids in full]
    return TokenizedSentences(cut, sum(len(ids) > max_length for ids in full))


class ClassPromptPrototypes(NamedTuple):
    """Prototypes ``(K, d)``, unit rows, and the number of sentences cut at the context length."""

    prototypes: Tensor
    truncated: int


@torch.no_grad()
def class_prompt_prototypes(
    model: CLIPTextModelWithProjection,
    tokenizer: PreTrainedTokenizerBase,
    prompts: ClassPrompts,
    templates: Sequence[str] = (),
) -> ClassPromptPrototypes:
    """Prototypes of the sentences alone, or of their union with templates (CuPL's "both").

    Args:
        model: text encoder, CLIP's or ORION's.
        prompts: every class needs a sentence, unless there are templates.
        templates: with one ``{}`` each.
    """
    if templates:
        prompts = prompts.with_templates(templates)
    else:
        prompts.require_all()
    sentences, class_index = prompts.flat()
    tokens = tokenize_sentences(tokenizer, sentences, model.text_model.config.max_position_embeddings)
    text_embeds = encode_packs(model, build_packs(tokens.token_ids))
    prototypes = sentence_prototypes(text_embeds, class_index, len(prompts.class_names))
    return ClassPromptPrototypes(prototypes, tokens.truncated)


def _spaces(name: str) -> str:
    return " ".join(name.replace("_", " ").split())


def _lower(name: str) -> str:
    return _spaces(name).casefold()


def _reordered(name: str) -> str:
    """``hotel (outdoor)`` -> ``outdoor hotel``; ``audi tt 2012`` -> ``2012 audi tt``."""
    name = re.sub(r"^(.*\S)\s*\((.+)\)$", r"\2 \1", _lower(name))
    return re.sub(r"^(.*\S)\s+((?:19|20)\d\d)$", r"\2 \1", name)


def _letters(name: str) -> str:
    return re.sub(r"[\W_]+", "", _reordered(name))


_SURROGATE = re.compile(r"[\ud800-\udfff]")
_RULES: tuple[Callable[[str], str], ...] = (_spaces, _lower, _reordered, _letters)


def _find_key(name: str, tables: Sequence[tuple[Callable[[str], str], dict[str, set[str]]]]) -> str | None:
    """The file's name for a class, by the first rule that connects it to any."""
    for spelling in (name, OTHER_NAMES.get(_lower(name))):
        if spelling is None:
            continue
        for rule, table in tables:
            found = table.get(rule(spelling), set())
            if found:
                return next(iter(found)) if len(found) == 1 else None
    return None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; of a repeated key `json` would keep the last sentences and say nothing."""
    record = dict(pairs)
    if len(record) < len(pairs):
        ((repeated, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{repeated!a} is there more than once: put all its sentences under one key")
    return record

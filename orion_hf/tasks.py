"""Class names as a dataset: what a zero-shot task is called, its classes in label order, and its prompts.

    >>> task = OrionTask.from_name("EuroSAT")
    >>> task.prompts()[1]
    'a centered satellite photo of Forest.'

Names and templates are data. A prompt is ``template.replace("{}", class_name)``, so braces, percent signs,
quotes and emoji in a class name mean nothing. Whitespace around a name is stripped; line breaks and other
control characters are refused.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import unicodedata
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .files import write_json
from .task_files import READERS, decode_text, read_csv

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

_DATA = resources.files("orion_hf") / "data"

DEFAULT_TEMPLATES = ("a photo of a {}", "a picture of a {}", "an image of a {}")
DEFAULT_EVAL_TEMPLATE = "a photo of a {}."

# The paper's short name first. Case, spaces, "-" and "_" are ignored, so one spelling of each is enough.
ALIASES = {
    "caltech101": ("Caltech",),
    "dtd": ("DTD", "describable textures"),
    "eurosat": ("EuroSAT", "eurosat rgb"),
    "fgvc_aircraft": ("Aircraft", "aircrafts", "fgvc"),
    "flowers102": ("Flowers", "oxford flowers", "oxford flowers 102", "oxford 102 flowers", "102 flowers"),
    "food101": ("Food",),
    "imagenet": ("ImageNet", "imagenet 1k", "imagenet 1000", "ilsvrc 2012", "in1k"),
    "oxford_pets": ("Pets", "pet", "oxford pet", "oxford iiit pet", "oxford iiit pets"),
    "stanford_cars": ("Cars",),
    "sun397": ("SUN",),
    "ucf101": ("UCF",),
}


@dataclass(frozen=True)
class HubDataset:
    """A copy of a task's images on the Hugging Face Hub; ``None`` means not known."""

    id: str
    config: str | None = None
    revision: str | None = None
    train_split: str | None = None
    test_split: str | None = None
    image_column: str | None = None
    label_column: str | None = None


@dataclass(frozen=True, repr=False)
class OrionTask:
    """A zero-shot classification task: ``K`` class names and the templates that turn them into prompts.

    Immutable and hashable; lists given for tuples are converted. Repeated class names are refused, because
    their prototypes are equal and no training can separate them. The one exception is a benchmark's list
    exactly as published (ImageNet repeats two names), which keeps published numbers comparable.

    Args:
        name: What the task is called.
        class_names: ``K >= 2`` names in label order.
        templates: The ``T >= 1`` training templates, each with exactly one ``{}``.
        eval_template: The template of the classifier's prompts.
        hub_datasets: Where images live on the Hub.

    Example:
        >>> OrionTask("pets", ["cat", "dog"], ["a photo of a {}"], "a photo of a {}.").prompts()
        ['a photo of a cat.', 'a photo of a dog.']
    """

    name: str
    class_names: tuple[str, ...]
    templates: tuple[str, ...]
    eval_template: str
    hub_datasets: tuple[HubDataset, ...] = ()

    def __post_init__(self) -> None:
        class_names = _clean_texts(self.class_names, "class name")
        if len(class_names) < 2:
            raise ValueError(
                f"a task needs at least two class names, got {len(class_names)}; "
                "a classifier has nothing to choose from otherwise"
            )
        repeated = _repeated(class_names)
        if repeated and _unique_spelling(class_names) is None:
            raise ValueError(f"class names must differ: {_describe_repeated(repeated)}; rename or remove them")
        templates = _clean_texts(self.templates, "template")
        if not templates:
            raise ValueError("a task needs at least one template, such as 'a photo of a {}'")
        for template in (*templates, self.eval_template):
            _check_template(template)
        object.__setattr__(self, "name", _clean_text(self.name, "task name"))
        object.__setattr__(self, "class_names", class_names)
        object.__setattr__(self, "templates", templates)
        object.__setattr__(self, "eval_template", self.eval_template.strip())
        object.__setattr__(self, "hub_datasets", tuple(self.hub_datasets))

    def __repr__(self) -> str:
        shown = [_quote(name) for name in self.class_names]
        if len(shown) > 4:
            shown = [*shown[:3], "...", shown[-1]]
        return (
            f"OrionTask({self.name!r}, {self.num_classes} classes: {', '.join(shown)}; "
            f"{len(self.templates)} templates, eval {self.eval_template!r})"
        )

    @classmethod
    def available(cls) -> list[str]:
        """Names of the built-in tasks.

        Example:
            >>> "eurosat" in OrionTask.available()
            True
        """
        folder = _DATA / "datasets"
        return sorted(file.name.removesuffix(".json") for file in folder.iterdir() if file.name.endswith(".json"))

    @classmethod
    def from_name(cls, name: str, *, unique_names: bool = False) -> OrionTask:
        """A built-in task, by its name or a common spelling of it ("EuroSAT", "Pets", "fgvc-aircraft").

        Args:
            name: Case, spaces, ``-`` and ``_`` do not matter.
            unique_names: ImageNet's published list names two classes "missile" (657, 744) and two
                "sunglasses" (836, 837). ``False`` keeps that list, as every published number does, and warns;
                ``True`` takes the WordNet words "projectile" (744) and "sunglass" (836) for one of each pair.
                Label order is the same. Tasks without repeated names are not affected.

        Example:
            >>> OrionTask.from_name("Pets").class_names[0]
            'abyssinian'
        """
        record = _builtin(_resolve_name(name))
        class_names = record["class_names"]
        if "class_names_unique" in record:
            if unique_names:
                class_names = record["class_names_unique"]
            else:
                warnings.warn(
                    f"{record['name']}: the published class names are used, which repeat "
                    f"{_describe_repeated(_repeated(class_names))}; these classes cannot be told apart, "
                    "unique_names=True takes distinct ones",
                    stacklevel=2,
                )
        return cls(
            name=record["name"],
            class_names=class_names,
            templates=record["orion_templates"],
            eval_template=record["eval_template"],
            hub_datasets=tuple(_published_copy(copy) for copy in record.get("hub_datasets") or ()),
        )

    @classmethod
    def from_names(
        cls,
        class_names: Iterable[str],
        *,
        templates: Iterable[str] | None = None,
        eval_template: str | None = None,
        name: str = "custom",
    ) -> OrionTask:
        """A task from a list of class names, in label order.

        Args:
            class_names: At least two names, no two equal.
            templates: Training templates; ``DEFAULT_TEMPLATES`` if not given.
            eval_template: Template of the classifier; if not given, the first of ``templates``, or
                ``DEFAULT_EVAL_TEMPLATE`` where these are not given either.
            name: What to call the task.

        Example:
            >>> OrionTask.from_names(["oak", "elm"], templates=["a leaf of {}"]).prompts()
            ['a leaf of oak', 'a leaf of elm']
        """
        training = DEFAULT_TEMPLATES if templates is None else _clean_texts(templates, "template")
        if eval_template is None:
            # An empty list of templates is reported by the constructor.
            eval_template = training[0] if templates is not None and training else DEFAULT_EVAL_TEMPLATE
        return cls(name, tuple(_as_list(class_names, "class name")), training, eval_template)

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        *,
        column: str | None = None,
        templates: Iterable[str] | None = None,
        eval_template: str | None = None,
        name: str | None = None,
    ) -> OrionTask:
        """A task from a UTF-8 file of class names, in label order.

        - ``.txt``: a name a line.
        - ``.csv``: a column under a header row, which is never a class: ``column``, or the only one, or
          the one called ``class_name``, ``name`` or ``label``.
        - ``.json``: a list of names; or an object with ``class_names`` and optionally ``name``,
          ``templates``, ``eval_template``, ``hub_datasets``, as `save_json` writes it.
        - ``.yaml``, ``.yml``: the same as ``.json``.

        Args:
            path: The file.
            column: Column of a ``.csv``.
            templates, eval_template, name: Instead of what the file says; defaults as in `from_names`, and
                the file's stem for the name.

        Example:
            >>> OrionTask.from_file("trees.txt", templates=["a leaf of {}"])  # doctest: +SKIP
        """
        path = Path(path)
        reader = READERS.get(path.suffix.lower())
        if reader is None:
            raise ValueError(f"{path}: cannot read class names from this kind of file, use {', '.join(READERS)}")
        if column is not None and reader is not read_csv:
            raise ValueError(f"{path}: column={column!r} is only for .csv files")
        try:
            text = decode_text(path.read_bytes())
            content = read_csv(text, column) if reader is read_csv else reader(text)
            if isinstance(content, list):
                content = {"class_names": content}
            given = {"templates": templates, "eval_template": eval_template, "name": name}
            overrides = {key: value for key, value in given.items() if value is not None}
            return cls.from_dict({"name": path.stem, **_check_record(content), **overrides})
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def from_hub(
        cls,
        dataset_id: str,
        label_column: str | None = None,
        *,
        config: str | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        templates: Iterable[str] | None = None,
        eval_template: str | None = None,
        name: str | None = None,
        keep_underscores: bool = False,
    ) -> OrionTask:
        """A task from the ``ClassLabel`` column that a Hub dataset declares; no image is downloaded.

        Args:
            dataset_id: ``owner/name`` on the Hub, or a local dataset folder.
            label_column: Column of the labels; not needed where only one column is a ``ClassLabel``.
            config: Configuration of the dataset, where it has several.
            revision: Branch, tag or commit.
            token: Access token for gated or private datasets, as in ``datasets.load_dataset``.
            templates, eval_template: As in `from_names`.
            name: The last part of ``dataset_id`` if not given.
            keep_underscores: By default ``annual_crop`` becomes ``annual crop``, because CLIP learned from
                captions; ``True`` keeps the label names as they are.

        Example:
            >>> OrionTask.from_hub("ethz/food101")  # doctest: +SKIP
        """
        from datasets import ClassLabel, Image, load_dataset_builder

        info = load_dataset_builder(dataset_id, config, revision=revision, token=token).info
        if info.features is None:
            raise ValueError(
                f"{dataset_id}: the dataset card does not declare its features, so the class names cannot be "
                "read without downloading images; give them with from_names or from_file"
            )
        columns = ", ".join(info.features)
        if label_column is None:
            labels = [column for column, feature in info.features.items() if isinstance(feature, ClassLabel)]
            if not labels:
                raise ValueError(f"{dataset_id}: none of the columns {columns} is a ClassLabel; use from_names")
            if len(labels) > 1:
                raise ValueError(f"{dataset_id}: several ClassLabel columns, label_column= {' or '.join(labels)}?")
            label_column = labels[0]
        if label_column not in info.features:
            raise ValueError(f"{dataset_id}: no column {label_column!r}, the columns are {columns}")
        feature = info.features[label_column]
        if not isinstance(feature, ClassLabel):
            raise ValueError(
                f"{dataset_id}: column {label_column!r} is a {type(feature).__name__}, not a ClassLabel, and "
                "holds no class names; give them with from_names"
            )
        class_names = [label if keep_underscores else label.replace("_", " ") for label in feature.names]
        images = [column for column, feature in info.features.items() if isinstance(feature, Image)]
        splits = info.splits or {}
        try:
            task = cls.from_names(
                class_names,
                templates=templates,
                eval_template=eval_template,
                name=name or Path(dataset_id).name,
            )
        except ValueError as error:
            raise ValueError(f"{dataset_id}, column {label_column!r}: {error}") from None
        copy = HubDataset(
            id=dataset_id,
            config=config,
            revision=revision,
            train_split="train" if "train" in splits else None,
            test_split=next((split for split in ("test", "validation") if split in splits), None),
            image_column=images[0] if len(images) == 1 else None,
            label_column=label_column,
        )
        return replace(task, hub_datasets=(copy,))

    @property
    def num_classes(self) -> int:
        """``K``."""
        return len(self.class_names)

    @property
    def label_names(self) -> tuple[str, ...]:
        """``K`` distinct names for label tables (``id2label``, ``ClassLabel``), where equal ones would merge.

        Equal to ``class_names``, but for ImageNet's published list, whose repeated names get the spelling of
        ``from_name("imagenet", unique_names=True)``.
        """
        return _unique_spelling(self.class_names) or self.class_names

    def prompts(self, template: str | None = None) -> list[str]:
        """``K`` prompts of one template, in label order; the evaluation template if none is given.

        Example:
            >>> OrionTask.from_names(["oak", "elm"]).prompts("a {} tree")
            ['a oak tree', 'a elm tree']
        """
        template = self.eval_template if template is None else template
        _check_template(template)
        return [template.replace("{}", class_name) for class_name in self.class_names]

    def training_prompts(self) -> list[list[str]]:
        """``T`` lists of ``K`` prompts, one for each training template."""
        return [self.prompts(template) for template in self.templates]

    def check_context(self, tokenizer: PreTrainedTokenizerBase, max_length: int = 77) -> None:
        """Refuse prompts that the text encoder would have to cut.

        Args:
            tokenizer: Any Hugging Face tokenizer.
            max_length: The encoder's context, ``max_position_embeddings`` of its configuration; start and end
                tokens count.

        Raises:
            ValueError: Names the longest prompt, its class and its number of tokens.
        """
        templates = list(dict.fromkeys([*self.templates, self.eval_template]))
        prompts = [(k, prompt) for template in templates for k, prompt in enumerate(self.prompts(template))]
        token_ids = tokenizer([prompt for _, prompt in prompts], truncation=False, verbose=False)["input_ids"]
        lengths = [len(ids) for ids in token_ids]
        too_long = sum(length > max_length for length in lengths)
        if too_long:
            longest = lengths.index(max(lengths))
            class_id, prompt = prompts[longest]
            raise ValueError(
                f"{self.name}: class {class_id} {_quote(self.class_names[class_id])} makes a prompt of "
                f"{lengths[longest]} tokens, more than the model's {max_length}: {_quote(prompt)} "
                f"({too_long} of {len(prompts)} prompts are too long); shorten the class name or the template"
            )

    def to_dataset(self) -> Dataset:
        """The ``T * K`` training prompts, template by template, as a ``datasets.Dataset``.

        Columns: ``class_id`` (``ClassLabel`` of `label_names`), ``class_name``, ``template_id``, ``prompt``.
        """
        from datasets import ClassLabel, Dataset, Features, Value

        columns = {
            "class_id": list(range(self.num_classes)) * len(self.templates),
            "class_name": list(self.class_names) * len(self.templates),
            "template_id": [t for t in range(len(self.templates)) for _ in self.class_names],
            "prompt": [prompt for prompts in self.training_prompts() for prompt in prompts],
        }
        features = Features(
            {
                "class_id": ClassLabel(names=list(self.label_names)),
                "class_name": Value("string"),
                "template_id": Value("int32"),
                "prompt": Value("string"),
            }
        )
        return Dataset.from_dict(columns, features=features)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and strings, for JSON; `from_dict` gives an equal task back."""
        return {
            "name": self.name,
            "class_names": list(self.class_names),
            "templates": list(self.templates),
            "eval_template": self.eval_template,
            "hub_datasets": [asdict(copy) for copy in self.hub_datasets],
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> OrionTask:
        """The inverse of `to_dict`; all but ``class_names`` may be missing, defaults as in `from_names`.

        Example:
            >>> OrionTask.from_dict({"class_names": ["oak", "elm"]}).templates == DEFAULT_TEMPLATES
            True
        """
        options = dict(_check_record(record))
        copies = [_hub_dataset(copy) for copy in _as_list(options.pop("hub_datasets", ()), "hub_datasets entry")]
        task = cls.from_names(options.pop("class_names"), **options)
        return replace(task, hub_datasets=tuple(copies))

    def save_json(self, path: str | os.PathLike[str]) -> Path:
        """Write the task for `from_file`, which gives an equal task back; returns the path."""
        path = Path(path)
        if path.suffix.lower() != ".json":
            raise ValueError(f"{path}: a task is saved as .json, so that from_file knows how to read it")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, self.to_dict())
        return path


def format_prompt(template: str, class_name: str) -> str:
    """Put ``class_name`` in the place of the template's one ``{}``; nothing in the name is interpreted.

    Example:
        >>> format_prompt("a photo of a {}.", "100% {wool} sock")
        'a photo of a 100% {wool} sock.'
    """
    _check_template(template)
    return template.replace("{}", class_name)


def imagenet_templates(collection: str = "openai_80") -> tuple[str, ...]:
    """CLIP's ImageNet templates: ``openai_80``, or ``subset_7``, the usual seven of them.

    Example:
        >>> imagenet_templates("subset_7")[0]
        'itap of a {}.'
    """
    if collection not in ("openai_80", "subset_7"):
        raise ValueError(f"no template collection {collection!r}, use 'openai_80' or 'subset_7'")
    file = _DATA / "imagenet_templates.json"
    return tuple(json.loads(file.read_text(encoding="utf-8"))[collection])


# Built-in tasks


def builtin_record(name: str) -> dict[str, Any] | None:
    """All that is known of a built-in task (other spellings of its classes, sizes, licences); None for other names.

    Example:
        >>> builtin_record("eurosat")["folder_names"][0]
        'AnnualCrop'
    """
    return _builtin(name) if name in OrionTask.available() else None


@cache
def _builtin(stem: str) -> dict[str, Any]:
    file = _DATA / "datasets" / f"{stem}.json"
    return json.loads(file.read_text(encoding="utf-8"))


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", "", name.casefold())


def _resolve_name(name: str) -> str:
    available = OrionTask.available()
    spellings = {_plain(alias): stem for stem, aliases in ALIASES.items() for alias in aliases}
    spellings |= {_plain(stem): stem for stem in available}
    if not isinstance(name, str):
        raise ValueError(f"a task name is text, got {type(name).__name__}; built in are {', '.join(available)}")
    if _plain(name) not in spellings:
        nearest = dict.fromkeys(spellings[match] for match in difflib.get_close_matches(_plain(name), spellings))
        guess = f"; did you mean {' or '.join(nearest)}?" if nearest else "."
        raise ValueError(
            f"no built-in task {_quote(name)}{guess} Built in are {', '.join(available)}; "
            "your own class names come with from_file, from_names or from_hub"
        )
    return spellings[_plain(name)]


def _published_copy(record: Mapping[str, Any]) -> HubDataset:
    known: dict[str, Any] = {field.name: record.get(field.name) for field in fields(HubDataset)}
    # Some copies store images under a key that depends on the shard; the data file says so in a sentence.
    if known["image_column"] and " " in known["image_column"]:
        known["image_column"] = None
    return HubDataset(**known)


def _unique_spelling(class_names: tuple[str, ...]) -> tuple[str, ...] | None:
    """Distinct names for a benchmark's published list that repeats some; ``None`` for any other list."""
    record = _builtin("imagenet")
    return tuple(record["class_names_unique"]) if class_names == tuple(record["class_names"]) else None


# Checks


def _quote(text: str, limit: int = 60) -> str:
    return repr(text if len(text) <= limit else text[: limit - 3] + "...")


def _as_list(values: Any, what: str) -> list[Any]:
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise ValueError(f"expected a list with one {what} each, got {type(values).__name__}")
    return list(values)


def _clean_texts(values: Any, what: str) -> tuple[str, ...]:
    return tuple(_clean_text(value, f"{what} {i}") for i, value in enumerate(_as_list(values, what)))


def _clean_text(value: Any, what: str) -> str:
    """Strip surrounding whitespace; refuse what is not text, is blank, or holds control characters."""
    if not isinstance(value, str):
        shown = f" {value}" if isinstance(value, (bool, int, float)) else ""
        raise ValueError(f"{what} must be text, got {type(value).__name__}{shown}; put it in quotes")
    categories = {character: unicodedata.category(character) for character in value}
    # Cc: control; Zl, Zp: line and paragraph breaks; Cs: half of a surrogate pair, which UTF-8 cannot hold.
    refused = [c for c, category in categories.items() if category in ("Cc", "Zl", "Zp", "Cs")]
    if refused:
        raise ValueError(f"{what} {_quote(value)} holds a line break or control character ({refused[0]!a}); remove it")
    # Invisible characters alone (C: zero-width space and the like, Z: spaces) are as blank as spaces.
    if all(category[0] in "CZ" for category in categories.values()):
        raise ValueError(f"{what} is empty or blank; remove it or fill it in")
    return value.strip()


def _check_template(template: Any) -> None:
    _clean_text(template, "template")
    if template.count("{}") != 1:
        raise ValueError(
            f"template {_quote(template)} has {template.count('{}')} places for the class name; "
            "write exactly one {}, as in 'a photo of a {}'"
        )


def _repeated(class_names: Sequence[str]) -> dict[str, list[int]]:
    positions: dict[str, list[int]] = {}
    for position, class_name in enumerate(class_names):
        # CLIP's tokenizers fold case and white space, so names that differ in nothing else are one prompt.
        positions.setdefault(" ".join(unicodedata.normalize("NFC", class_name).casefold().split()), []).append(position)
    return {class_name: where for class_name, where in positions.items() if len(where) > 1}


def _describe_repeated(repeated: Mapping[str, Sequence[int]], limit: int = 5) -> str:
    described = [
        f"{_quote(class_name)} at {', '.join(map(str, where[:limit]))}{', ...' if len(where) > limit else ''}"
        for class_name, where in list(repeated.items())[:limit]
    ]
    more = [f"and {len(repeated) - limit} more"] if len(repeated) > limit else []
    return ", ".join([*described, *more])


def _check_record(record: Any) -> Mapping[str, Any]:
    if not isinstance(record, Mapping):
        raise ValueError(f"expected a list of class names or an object with class_names, got {type(record).__name__}")
    known = [field.name for field in fields(OrionTask)]
    unknown = [str(key) for key in record if key not in known]
    if unknown:
        raise ValueError(f"unknown key {', '.join(map(_quote, unknown[:5]))}; a task has {', '.join(known)}")
    if "class_names" not in record:
        raise ValueError("class_names is missing")
    return record


def _hub_dataset(record: Any) -> HubDataset:
    known = [field.name for field in fields(HubDataset)]
    if not isinstance(record, Mapping) or "id" not in record or any(key not in known for key in record):
        raise ValueError(f"an entry of hub_datasets is an object with id and optionally {', '.join(known[1:])}")
    if not all(isinstance(value, str) or (value is None and key != "id") for key, value in record.items()):
        raise ValueError("the values of an entry of hub_datasets are text or null")
    return HubDataset(**record)

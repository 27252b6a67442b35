"""What `orion_config.json` holds: the task, the base model, how the weights were made.

The file is read from repositories that anyone can publish, so nothing in it is trusted: sizes and types are
checked, unknown keys are kept and ignored, and a format newer than ours is refused.

Example:
    >>> from orion_hf.tasks import OrionTask
    >>> config = OrionConfig(task=OrionTask.from_names(["cat", "dog"]), base_model="org/clip")
    >>> OrionConfig.from_dict(config.to_dict()) == config
    True
"""

from __future__ import annotations

import json
import os
import unicodedata
from dataclasses import dataclass, field
from typing import Any

from .tasks import OrionTask

ORION_CONFIG_NAME = "orion_config.json"
FORMAT_VERSION = 1

# Bounds for what a stranger's file may ask of us; the largest task we know of has 21,841 classes.
MAX_FILE_BYTES = 64 * 2**20
MAX_CLASSES = 100_000
MAX_TEMPLATES = 10_000
MAX_TEXT_LENGTH = 1_000
MAX_DEPTH = 32
MAX_HUB_DATASETS = 100


@dataclass
class OrionConfig:
    """Content of `orion_config.json`.

    Attributes:
        task: class names, training templates and evaluation template; None for a plain CLIP.
        base_model: id or folder of the weights the adapter belongs to (or the merged model came from).
        base_revision: commit, tag or branch of it; None for a folder.
        training: the settings of the run, any JSON values; nothing here is used to load the model.
        format_version: of this file.
        extra: keys we do not know, written back as they were read.
    """

    task: OrionTask | None = None
    base_model: str | None = None
    base_revision: str | None = None
    training: dict[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION
    extra: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of this config; `from_dict` reads it back."""
        known = {
            "format_version": self.format_version,
            "base_model": self.base_model,
            "base_revision": self.base_revision,
            "task": None if self.task is None else self.task.to_dict(),
            "training": self.training,
        }
        return known | {key: value for key, value in self.extra.items() if key not in known}

    @classmethod
    def from_dict(cls, data: dict[str, Any], source: str = ORION_CONFIG_NAME) -> OrionConfig:
        """Check ``data`` and build the config.

        Args:
            data: the parsed JSON.
            source: name of the file, for error messages.
        """
        if not isinstance(data, dict):
            raise ValueError(f"{source}: expected a JSON object, not {type(data).__name__}. Save it again.")
        _check_depth(data, source)
        version = data.get("format_version")
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise ValueError(f"{source}: format_version must be a positive integer. Save the model again.")
        if version > FORMAT_VERSION:
            raise ValueError(
                f"{source}: format version {version} is newer than {FORMAT_VERSION}, the newest that this "
                "orion-hf reads. Upgrade with `pip install -U orion-hf`."
            )
        for key in ("base_model", "base_revision"):
            if data.get(key) is not None:
                _check_text(data[key], key, source)
        if not isinstance(data.get("training", {}), dict):
            raise ValueError(f"{source}: training must be a JSON object. Save the model again.")
        known = {"format_version", "base_model", "base_revision", "task", "training"}
        return cls(
            task=_read_task(data.get("task"), source),
            base_model=data.get("base_model"),
            base_revision=data.get("base_revision"),
            training=data.get("training", {}),
            format_version=version,
            extra={key: value for key, value in data.items() if key not in known},
        )

    @classmethod
    def from_json_file(cls, path: str | os.PathLike) -> OrionConfig:
        """Read and check an `orion_config.json`."""
        size = os.path.getsize(path)
        if size > MAX_FILE_BYTES:
            raise ValueError(f"{path}: {size} bytes, more than the {MAX_FILE_BYTES} we load. Save it again.")
        try:
            with open(path, encoding="utf-8") as file:
                data = json.load(file)
        except (
            ValueError,
            RecursionError,
        ) as error:
            raise ValueError(f"{path}: not valid JSON ({error}). Save or download it again.") from error
        return cls.from_dict(data, source=str(path))

    def save_json(self, path: str | os.PathLike) -> None:
        """Write the file; the caller puts it in place (see `repository.staged_folder`)."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.to_dict(), file, indent=2, ensure_ascii=False)
            file.write("\n")


def _check_depth(data: Any, source: str) -> None:
    """Refuse nesting that Python could read but not write or copy; level by level, so without recursion."""
    level: list[Any] = [data]
    for _ in range(MAX_DEPTH):
        level = [
            value
            for container in level
            if isinstance(container, (dict, list))
            for value in (container.values() if isinstance(container, dict) else container)
            if isinstance(value, (dict, list))
        ]
        if not level:
            return
    raise ValueError(f"{source}: nested more than {MAX_DEPTH} levels deep. Save the model again.")


def _read_task(task: Any, source: str) -> OrionTask:
    names = task.get("class_names") if isinstance(task, dict) else None
    if not names:
        raise ValueError(
            f"{source}: task.class_names is missing or empty: without names there is no classifier. "
            "Add the list of class names, or remove the file to load the weights as a plain CLIP."
        )
    _check_texts(names, "task.class_names", MAX_CLASSES, source)
    _check_texts(task.get("templates"), "task.templates", MAX_TEMPLATES, source)
    copies = task.get("hub_datasets") or []
    if not isinstance(copies, list) or len(copies) > MAX_HUB_DATASETS:
        raise ValueError(f"{source}: task.hub_datasets must be a list of at most {MAX_HUB_DATASETS} objects.")
    for index, copy in enumerate(copies):
        for key, value in copy.items() if isinstance(copy, dict) else ():
            if value is not None:
                _check_text(value, f"task.hub_datasets[{index}][{key!a}]", source)
    _check_text(task.get("name"), "task.name", source)
    _check_text(task.get("eval_template"), "task.eval_template", source)
    try:
        return OrionTask.from_dict(task)
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(f"{source}: task is not valid: {error}") from error


def _check_texts(value: Any, key: str, limit: int, source: str) -> None:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{source}: {key} must be a list of strings, not {type(value).__name__}.")
    if len(value) > limit:
        raise ValueError(f"{source}: {key} has {len(value)} entries, at most {limit} load.")
    for index, text in enumerate(value):
        _check_text(text, f"{key}[{index}]", source)


def _check_text(value: Any, key: str, source: str) -> None:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{source}: {key} must be a string that is not empty.")
    if len(value) > MAX_TEXT_LENGTH:
        raise ValueError(f"{source}: {key} has {len(value)} characters, at most {MAX_TEXT_LENGTH} load.")
    # Control characters drive terminals, surrogates cannot be written back: neither belongs in a name.
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in value):
        raise ValueError(f"{source}: {key} contains control characters: {value!a}. Remove them.")

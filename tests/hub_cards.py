"""The Hub's rules for the metadata of a card, and what the Hub makes of that metadata."""

import re
from collections.abc import Mapping
from typing import Any

import yaml

_ALLOWED = {
    "license": """
        afl-3.0 agpl-3.0 apache-2.0 artistic-2.0 bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsl-1.0
        cc cc-by-2.0 cc-by-3.0 cc-by-4.0 cc-by-nc-4.0 cc-by-nc-nd-4.0 cc-by-nc-sa-4.0 cc-by-nd-4.0
        cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 creativeml-openrail-m gpl gpl-2.0 gpl-3.0 lgpl-3.0 mit mpl-2.0
        odbl openrail other pddl unknown unlicense""",
    "pipeline_tag": """
        feature-extraction image-classification image-feature-extraction image-segmentation
        image-text-to-text image-to-text object-detection other sentence-similarity text-classification
        text-generation text-to-image visual-question-answering zero-shot-classification
        zero-shot-image-classification zero-shot-object-detection""",
    "base_model_relation": "adapter finetune merge quantized",
}
_REPO_ID = re.compile(r"(?:[\w.-]+/)?[\w.-]{1,96}")
_FRONT_MATTER = re.compile(r"\A\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)


def read_card(readme: bytes) -> dict[str, Any]:
    """The metadata at the top of a ``README.md``; empty when there is none."""
    match = _FRONT_MATTER.match(readme.decode(errors="replace"))
    try:
        card = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError:
        card = None
    return card if isinstance(card, dict) else {}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def card_tags(card: Mapping[str, Any], library: str | None) -> list[str]:
    """What ``list_models(filter=...)`` matches against."""
    relation = card.get("base_model_relation", "finetune")
    tags = [library, card.get("pipeline_tag"), *_listed(card.get("tags"))]
    tags += [f"dataset:{name}" for name in _listed(card.get("datasets"))]
    for name in _listed(card.get("base_model")):
        tags += [f"base_model:{name}", f"base_model:{relation}:{name}"]
    tags += [f"license:{name}" for name in _listed(card.get("license"))]
    return list(dict.fromkeys(tag for tag in tags if isinstance(tag, str)))


def check_card(text: str) -> tuple[list[str], list[str]]:
    """Errors and warnings of the Hub's metadata rules for a ``README.md``, as far as ours can break them."""
    match = _FRONT_MATTER.match(text)
    if not match:
        return [], ["empty or missing yaml metadata in repo card"]
    try:
        card = yaml.safe_load(match[1])
    except yaml.YAMLError as error:
        return [f"YAML Metadata Error: {error}"], []
    if not isinstance(card, dict):
        return ["YAML Metadata Error: metadata must be an object"], []
    errors: list[str] = []
    for key, names in _ALLOWED.items():
        if any(str(value) not in names.split() for value in _listed(card.get(key))):
            errors.append(f'"{key}" must be one of [{", ".join(names.split())}]')
    for key in ("tags", "datasets"):
        value = card.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            errors.append(f'"{key}" must be an array of strings')
    for key in ("base_model", "datasets"):
        for value in _listed(card.get(key)):
            if not isinstance(value, str) or not _REPO_ID.fullmatch(value):
                errors.append(f'"{key}" with value {value!r} is not valid. Use a repository id')
    for m, model in enumerate(_listed(card.get("model-index"))):
        where = f"model-index[{m}]"
        if not isinstance(model, dict) or not isinstance(model.get("name"), str) or not model["name"]:
            errors.append(f'"{where}.name" is required')
            continue
        for r, result in enumerate(_listed(model.get("results"))):
            errors += _check_result(f"{where}.results[{r}]", result)
    return errors, []


def _check_result(where: str, result: Any) -> list[str]:
    result = result if isinstance(result, dict) else {}
    required = [(f"{where}.task.type", result.get("task"), "type")]
    required += [(f"{where}.dataset.{key}", result.get("dataset"), key) for key in ("name", "type")]
    metrics = _listed(result.get("metrics"))
    for i, metric in enumerate(metrics):
        required += [(f"{where}.metrics[{i}].{key}", metric, key) for key in ("type", "value")]
    errors = [
        f'"{name}" is required'
        for name, owner, key in required
        if not isinstance(owner, dict) or owner.get(key) in (None, "")
    ]
    return errors + ([] if metrics else [f'"{where}.metrics" is required'])

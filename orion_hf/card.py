"""Model cards: what a repository is, how it was made and what was measured, from its own files.

    card = model_card("out/orion-eurosat", "org/orion-eurosat")
    card.save("README.md")

Nothing is invented: a figure that was not measured is not in the card, and the paper's figures are labelled
as the paper's. The same files always give the same card. Names in it are text, never Markdown, HTML or YAML.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.utils import validate_repo_id
from PIL import Image
from torch import Tensor

from .configuration_orion import ORION_CONFIG_NAME, OrionConfig
from .escaping import markdown
from .files import is_finite, read_json
from .geometry import MEASURE_NAMES, GeometryReport, prototype_geometry
from .repository import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_WEIGHTS_NAME,
    PROTOTYPES_NAME,
    is_hub_id,
    is_revision,
    read_prototypes,
    read_tensors,
)
from .tasks import OrionTask, builtin_record
from .training_log import LOG_NAME, read_log

CARD_NAME = "README.md"
RESULTS_NAME = "results.json"
HEATMAP_NAME = "gram_heatmaps.png"
PIPELINE_TAG = "zero-shot-image-classification"
MERGED_REVISION = "merged"

_PACKAGE = resources.files("orion_hf")
_MARK = "<!-- Made by orion-hf"
_FOLD_ABOVE = 20
_MOST_SETTINGS = 60
_LONGEST_TEXT = 300
_LARGEST_JSON = 8 * 2**20
# Row of the paper's zero-shot table -> what the ids of its base models look like.
_PAPER_BASES = {
    "CLIP ViT-B/16": r"clip-vit-base-patch16(-\d+)?",
    "CLIP ViT-L/14": r"clip-vit-large-patch14",
    "MetaCLIP": r"metaclip-.*",
}

Kind = Literal["adapter", "merged"]


@dataclass(frozen=True)
class Results:
    """What was measured: content of `results.json`.

    Attributes:
        top1: name of a classifier -> (top-1 accuracy in percent, half width of its interval or None). The one
            called "ORION" (in any case) is the repository's own.
        protocol, command: how it was measured, and the command that repeats it.
        dataset_name, dataset_id, split: on what; the id is that of a Hub dataset, if it is on the Hub.
    """

    top1: dict[str, tuple[float, float | None]]
    protocol: str | None = None
    command: str | None = None
    dataset_name: str | None = None
    dataset_id: str | None = None
    split: str | None = None

    @property
    def own(self) -> float | None:
        """Top-1 of the repository's own classifier."""
        return next((value for name, (value, _) in self.top1.items() if name.casefold() == "orion"), None)

    @classmethod
    def from_json_file(cls, path: str | os.PathLike) -> Results:
        """Read ``{"top1": {"CLIP": 41.3, "ORION": {"mean": 51.3, "interval": 0.4}}, ...}``.

        Optional are ``protocol`` and ``command``, both text, and ``dataset``: ``{"name": "EuroSAT", "id":
        "org/eurosat", "split": "test"}``.
        """
        data = _read_json(path)
        top1 = data.get("top1")
        if not isinstance(top1, dict) or not top1:
            raise ValueError(f"{path}: 'top1' must map classifiers to percentages, such as {{\"ORION\": 51.3}}.")
        measured = {name: _percentage(value, f"{path}: top1 of {name!a}") for name, value in top1.items()}
        if all(value <= 1 for value, _ in measured.values()):
            raise ValueError(f"{path}: no 'top1' is above 1 %, so these look like shares: write percentages.")
        dataset = data.get("dataset")
        dataset = dataset if isinstance(dataset, dict) else {}
        return cls(
            measured,
            protocol=_text(data.get("protocol")),
            command=_text(data.get("command")),
            dataset_name=_text(dataset.get("name")),
            dataset_id=_text(dataset.get("id")) if is_hub_id(dataset.get("id")) else None,
            split=_text(dataset.get("split")),
        )


def model_card(
    folder: str | os.PathLike,
    repo_id: str,
    *,
    license: str | None = None,
    revision: str | None = None,
    merged_revision: bool = False,
) -> ModelCard:
    """The card of a saved model.

    Args:
        folder: an adapter or merged model as `OrionCLIPTextModel.save_pretrained` writes it; `results.json`,
            `training_log.jsonl` and `gram_heatmaps.png` beside it are used if they are there.
        repo_id: where it is or will be on the Hub.
        license: of the weights, such as ``mit``; none is stated if None, unless the base is the embedded model.
        revision: the revision that the lines under "Use" name; None for ``main``.
        merged_revision: the repository has full weights on the revision ``merged``, and the card may say so.

    Example:
        >>> print(model_card("out/orion-eurosat", "org/orion-eurosat"))  # doctest: +SKIP
    """
    validate_repo_id(repo_id)  # it is written into code that people copy
    folder = Path(folder)
    kind, config = read_folder(folder)
    task = config.task
    assert task is not None  # read_folder has seen to it
    base_id, base_revision = base_of(folder, kind, config)
    results = read_results(folder)
    prototypes = _prototypes(folder, task)
    facts = {
        "repo_id": repo_id,
        "title": f"ORION for {markdown(_display_name(task))}",
        "task": markdown(_display_name(task)),
        "num_classes": task.num_classes,
        "adapter": kind == "adapter",
        "base_link": _link(base_id),
        "base_id": base_id,
        "base_revision": base_revision,
        "base_revision_argument": f', revision="{base_revision}"' if base_revision else "",
        "stock": kind == "merged" or is_hub_id(base_id),
        "revision_argument": f', revision="{revision}"' if revision not in (None, "main") else "",
        "merged_revision": merged_revision,
        "fold_classes": task.num_classes > _FOLD_ABOVE,
        "classes": " · ".join(f"`{label}` {markdown(name)}" for label, name in enumerate(task.class_names)),
        "templates": "; ".join(f"“{markdown(template)}”" for template in task.templates),
        "eval_template": f"“{markdown(task.eval_template)}”",
        "settings": _settings(config.training, folder / LOG_NAME),
        "geometry": [] if prototypes is None else _geometry_rows(*prototypes),
        "heatmap": HEATMAP_NAME if (folder / HEATMAP_NAME).is_file() else None,
        "dimension_note": _dimension_note(task.num_classes, prototypes),
        **_accuracy(results),
        **_paper(task, base_id),
    }
    template = (_PACKAGE / "assets" / "card_template.md").read_text(encoding="utf-8")
    data = _metadata(task, kind, repo_id, base_id, results, license)
    return ModelCard.from_template(data, template_str=template, **facts)


def read_folder(folder: str | os.PathLike) -> tuple[Kind, OrionConfig]:
    """Whether a folder holds an adapter or merged weights, and its checked `orion_config.json`."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: give the folder that a model was saved to.")
    if not (folder / ORION_CONFIG_NAME).is_file():
        raise ValueError(f"{folder} has no {ORION_CONFIG_NAME}: give the folder of an adapter or merged model.")
    adapter = (folder / ADAPTER_CONFIG_NAME).is_file() and (folder / ADAPTER_WEIGHTS_NAME).is_file()
    merged = (folder / "config.json").is_file() and any(folder.glob("model*.safetensors"))
    if adapter == merged:
        found = "both an adapter and" if adapter else "neither an adapter nor"
        raise ValueError(f"{folder} holds {found} full weights in safetensors: save one of them to a folder.")
    config = OrionConfig.from_json_file(folder / ORION_CONFIG_NAME)
    return ("adapter" if adapter else "merged"), config


def base_of(folder: str | os.PathLike, kind: Kind, config: OrionConfig) -> tuple[str | None, str | None]:
    """Id and revision of the base model; the id is that of the Hub or ``embedded:...``, None for a folder."""
    name, revision = config.base_model, config.base_revision
    embedded = re.fullmatch(r"embedded:[\w.-]+", name or "", re.ASCII) is not None
    if kind == "adapter" and not embedded:
        adapter = _read_json(Path(folder) / ADAPTER_CONFIG_NAME)
        name, revision = adapter.get("base_model_name_or_path"), adapter.get("revision")
    if not embedded and not is_hub_id(name):
        return None, None
    return name, revision if is_revision(revision) else None


def read_results(folder: str | os.PathLike) -> Results | None:
    """The measured results beside a model, None if nothing was measured."""
    path = Path(folder) / RESULTS_NAME
    return Results.from_json_file(path) if path.is_file() else None


def is_generated(card: str) -> bool:
    """Whether a `README.md` is ours to write anew: it still has the line that says so."""
    return _MARK in card


def write_heatmap(folder: str | os.PathLike, path: str | os.PathLike) -> bool:
    """Draw the Gram matrices of the prototypes in ``folder``; False without prototypes or matplotlib."""
    _, config = read_folder(folder)
    prototypes = _prototypes(Path(folder), config.task) if config.task is not None else None
    if prototypes is None or find_spec("matplotlib") is None or find_spec("scipy") is None:
        return False
    from .plots import gram_heatmaps, save_figure

    x, v = prototypes
    save_figure(gram_heatmaps(v, x, config.task.class_names), path)  # type: ignore[union-attr]
    with Image.open(path) as image:  # of a thousand classes: 0.4 MB instead of 1.2, and no difference to see
        few_colors = image.convert("RGB").quantize(32, dither=Image.Dither.NONE)
    few_colors.save(path, optimize=True)
    return True


# The metadata


def _metadata(
    task: OrionTask,
    kind: Kind,
    repo_id: str,
    base_id: str | None,
    results: Results | None,
    license: str | None,
) -> ModelCardData:
    on_hub = is_hub_id(base_id)
    embedded = (base_id or "").startswith("embedded:")
    datasets = [] if results is None or results.dataset_id is None else [results.dataset_id]
    if builtin_record(task.name) is None:  # then the class names were read from these
        datasets += [copy.id for copy in task.hub_datasets if is_hub_id(copy.id)]
    own = None if results is None else results.own
    return ModelCardData(
        library_name="peft" if kind == "adapter" else "transformers",
        pipeline_tag=PIPELINE_TAG,
        base_model=base_id if on_hub else None,
        base_model_relation=("adapter" if kind == "adapter" else "finetune") if on_hub else None,
        datasets=list(dict.fromkeys(datasets)) or None,
        license=license or ("apache-2.0" if embedded else None),
        tags=["orion", "clip", "lora"],
        orion={"task": task.name, "classes": task.num_classes, **({"base": base_id} if embedded else {})},
        model_name=None if own is None else repo_id.split("/")[-1],
        eval_results=None
        if results is None or own is None
        else [
            EvalResult(
                task_type=PIPELINE_TAG,
                dataset_name=results.dataset_name or _display_name(task),
                dataset_type=results.dataset_id or task.name,
                dataset_split=results.split,
                metric_type="accuracy",
                metric_name="top-1 accuracy (%)",
                metric_value=round(own, 2),
            )
        ],
    )


# The text


def _display_name(task: OrionTask) -> str:
    record = builtin_record(task.name)
    return record["full_name"] if record and task.class_names == tuple(record["class_names"]) else task.name


def _link(base_id: str | None) -> str:
    if is_hub_id(base_id):
        return f"[{base_id}](https://huggingface.co/{base_id})"
    if (base_id or "").startswith("embedded:"):
        return f"`{base_id}`, the small CLIP that comes with orion-hf"
    return "A CLIP model"


def _settings(training: dict[str, Any], log: Path) -> list[tuple[str, str]]:
    plain = {key: value for key, value in training.items() if isinstance(value, (str, int, float))}
    rows = [
        (markdown(str(key), _LONGEST_TEXT), markdown(str(value), _LONGEST_TEXT))
        for key, value in list(plain.items())[:_MOST_SETTINGS]
    ]
    penalties = _penalties(log)
    if penalties is not None:
        rows.append(("orthogonality term at the first and last step", f"{penalties[0]:.4g} and {penalties[1]:.4g}"))
    return rows


def _penalties(log: Path) -> tuple[float, float] | None:
    """The orthogonality term of the first and of the last logged step; None if the log has none."""
    values = [float(row["orthogonality"]) for row in read_log(log) if "orthogonality" in row]
    return (values[0], values[-1]) if values else None


def _prototypes(folder: Path, task: OrionTask) -> tuple[Tensor, Tensor] | None:
    """X and V of the folder, None if it has no such file."""
    path = folder / PROTOTYPES_NAME
    if not path.is_file():
        return None
    stored = read_tensors(path).get("prototypes")
    dimension = stored.shape[-1] if stored is not None and stored.ndim == 2 else 0
    return read_prototypes(path, (task.num_classes, dimension))


def _geometry_rows(prototypes: Tensor, anchors: Tensor) -> list[tuple[str, str, str]]:
    before, after = prototype_geometry(anchors), prototype_geometry(prototypes, anchors)

    def cell(report: GeometryReport, key: str) -> str:
        return f"{asdict(report)[key]:.3f}"

    return [(name, cell(before, key), cell(after, key)) for key, name in MEASURE_NAMES.items()]


def _dimension_note(num_classes: int, prototypes: tuple[Tensor, Tensor] | None) -> str:
    if prototypes is None:
        return " can be orthonormal only if the embedding has at least as many dimensions."
    dimension = prototypes[0].shape[1]
    if num_classes > dimension:
        return f" in {dimension} dimensions cannot be orthonormal; they are spread as far as they go."
    return f" fit into {dimension} dimensions, so they can be orthonormal; the table says how near they came."


def _accuracy(results: Results | None) -> dict[str, Any]:
    if results is None:
        return {"measured": [], "measured_limit": "No accuracy was measured, so none is claimed."}
    rows = [
        (markdown(name, _LONGEST_TEXT), f"{value:.2f}" + ("" if spread is None else f" ± {spread:.2f}"))
        for name, (value, spread) in results.top1.items()
    ]
    where = [results.dataset_name or results.dataset_id, results.split]
    named = ", ".join(markdown(part, _LONGEST_TEXT) for part in where if part)
    return {
        "measured": rows,
        "measured_on": f" on {named}" if named else "",
        "protocol": markdown(results.protocol, 2_000) if results.protocol else None,
        "command": markdown(results.command, 2_000) if results.command else None,
        "measured_limit": "The accuracy is of one data set under one protocol; other images give other figures.",
    }


# The paper


@cache
def paper_tables() -> dict[str, Any]:
    """Every number that the paper prints: ``["tables"]["zero_shot"]["CLIP ViT-B/16"]["EuroSAT"]``."""
    return json.loads((_PACKAGE / "data" / "paper_tables.json").read_text(encoding="utf-8"))


def paper_zero_shot(column: str) -> dict[str, tuple[float, float]]:
    """The paper's zero-shot figures of one of its data sets: backbone -> (base, with ORION).

    Example:
        >>> paper_zero_shot("EuroSAT")["CLIP ViT-B/16"]
        (41.3, 51.33)
    """
    table = paper_tables()["tables"]["zero_shot"]
    return {row: (table[row][column], table[f"{row} + ORION"][column]) for row in _PAPER_BASES}


def _paper(task: OrionTask, base_id: str | None) -> dict[str, Any]:
    """The paper's figures for this task and this base, if it has any."""
    record = builtin_record(task.name)
    columns = paper_tables()["_about"]["columns"]
    if record is None or record["display_name"] not in columns or task.class_names != tuple(record["class_names"]):
        return {"paper": []}
    name = (base_id or "").split("/")[-1]
    rows = [
        (_paper_row(row), f"{base}", f"{tuned}")
        for row, (base, tuned) in paper_zero_shot(record["display_name"]).items()
        if re.fullmatch(_PAPER_BASES[row], name)
    ]
    return {"paper": rows, "paper_column": record["full_name"]}


def _paper_row(row: str) -> str:
    return f"{row} (architecture not stated)" if row == "MetaCLIP" else row


# Pages of the built-in data sets

_DOMAINS = {
    "caltech101": "objects, one to a picture",
    "dtd": "textures, by the adjective that describes them",
    "eurosat": "land use in satellite images (Sentinel-2)",
    "fgvc_aircraft": "models of aircraft",
    "flowers102": "species of flowers",
    "food101": "dishes",
    "imagenet": "objects and animals",
    "oxford_pets": "breeds of cats and dogs",
    "stanford_cars": "makes, models and years of cars",
    "sun397": "scenes, indoors and outdoors",
    "ucf101": "human actions, in a frame of a video",
}


def dataset_names() -> list[str]:
    """The built-in data sets that have a page: the benchmarks of the paper."""
    return sorted(_DOMAINS)


def dataset_page(name: str) -> str:
    """A short page on a built-in data set: classes, templates, licence of its images, the paper's figures."""
    record = builtin_record(name)
    if record is None or name not in _DOMAINS:
        raise ValueError(f"no page for {name!r}: the data sets are {', '.join(dataset_names())}.")
    names = record["class_names"]
    classes = " · ".join(f"`{label}` {markdown(text)}" for label, text in enumerate(names))
    if len(names) > _FOLD_ABOVE:
        classes = f"<details><summary>{len(names)} classes in label order</summary>\n\n{classes}\n\n</details>"
    in_paper = record["num_classes_paper"]
    differs = f" (the paper's table says {in_paper})" if in_paper != len(names) else ""
    lines = [
        "<!-- Made by `orion-hf card --all`; do not edit. -->",
        "",
        f"# {record['full_name']}",
        "",
        "| | |",
        "|---|---|",
        f"| task | `{name}` |",
        f"| domain | {_DOMAINS[name]} |",
        f"| classes | {len(names)}{differs} |",
        f"| test images | {record['num_test_samples']:,} in the paper |",
        f"| training templates | {'; '.join(f'“{markdown(t)}”' for t in record['orion_templates'])} |",
        f"| evaluation template | “{markdown(record['eval_template'])}” |",
        f"| licence of the images | {markdown(record['license_note'])} |",
        "",
        "```bash",
        f"orion-hf finetune --model openai/clip-vit-base-patch16 --task {name} --output_dir out/orion-{name}",
        f"orion-hf push out/orion-{name} YOUR_NAME/orion-{name}",
        "```",
        "",
        "## The paper's figures",
        "",
        "Zero-shot top-1 accuracy in percent, printed in the paper (mean of 3 seeds), not measured here.",
        "",
        "| backbone | base | with ORION | gain |",
        "|---|---|---|---|",
    ]
    for row, (base, tuned) in paper_zero_shot(record["display_name"]).items():
        lines.append(f"| {_paper_row(row)} | {base} | {tuned} | {tuned - base:+.2f} |")
    lines += ["", "## Classes", "", classes, ""]
    return "\n".join(lines)


def dataset_index() -> str:
    """The page that lists the pages: one row a data set with the paper's ViT-B/16 figures."""
    lines = [
        "<!-- Made by `orion-hf card --all`; do not edit. -->",
        "",
        "# Model cards",
        "",
        "One page for each built-in data set. The card of a model you train is written by `orion-hf push`,",
        "or by `orion-hf card FOLDER` without pushing, from [its template](../orion_hf/assets/card_template.md).",
        "",
        "The figures are the paper's zero-shot top-1 in percent for CLIP ViT-B/16, not measured here.",
        "",
        "| data set | domain | classes | base | with ORION |",
        "|---|---|---|---|---|",
    ]
    for name in dataset_names():
        record: Any = builtin_record(name)
        base, tuned = paper_zero_shot(record["display_name"])["CLIP ViT-B/16"]
        cells = [
            f"[{record['full_name']}]({name}.md)",
            _DOMAINS[name],
            len(record["class_names"]),
            base,
            tuned,
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, ""])


# Reading what others wrote


def _read_json(path: str | os.PathLike) -> dict[str, Any]:
    data = read_json(path, _LARGEST_JSON, "Write it again.")
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected a JSON object, not {type(data).__name__}. Write it again.")
    return data


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value.strip() else None


def _percentage(value: Any, source: str) -> tuple[float, float | None]:
    spread = None
    if isinstance(value, dict):
        value, spread = value.get("mean"), value.get("interval")
    if not is_finite(value) or not 0 <= value <= 100 or not (spread is None or is_finite(spread)):
        raise ValueError(f"{source} must be a percentage from 0 to 100, or have it as 'mean'.")
    return float(value), None if spread is None else float(spread)

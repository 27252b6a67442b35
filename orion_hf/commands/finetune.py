"""Fine-tune a CLIP text encoder on class names and save the adapter.

orion-hf finetune --model openai/clip-vit-base-patch16 --task eurosat --output_dir out/orion-eurosat
accelerate launch training/finetune.py ...                                  # the same on several GPUs
orion-hf finetune --config training/configs/paper.yaml --task pets dtd --output_dir out
"""

from __future__ import annotations

import copy
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from accelerate import Accelerator
from huggingface_hub import get_token
from torch.nn import functional as F

from ..checkpoint import clear_run
from ..class_prompts import ClassPrompts, class_prompt_prototypes, load_class_prompts, tokenize_sentences
from ..configuration_orion import ORION_CONFIG_NAME
from ..geometry import prototype_geometry
from ..layout import aligned_table
from ..modeling_orion import OrionCLIPTextModel
from ..options import parse_dataclasses
from ..prototypes import svd_prototypes
from ..repository import PROTOTYPES_NAME, staged_folder, write_prototypes
from ..tasks import OrionTask
from ..trainer import OrionTrainer, build_accelerator, sentences_fingerprint
from ..training_args import OrionTrainingArguments

if TYPE_CHECKING:
    from ..labelled import LabelledFeatures

_INTERRUPTED = 130  # exit code, as shells give it


@dataclass
class FinetuneArguments:
    """What to fine-tune on what; the settings of the training itself are [`OrionTrainingArguments`]."""

    model: str = field(metadata={"help": "CLIP or MetaCLIP: a Hub id, a folder, or embedded:tiny-clip."})
    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of the model."})
    task: list[str] | None = field(
        default=None,
        metadata={"help": "Built-in tasks, for example eurosat dtd pets; all: every benchmark of the paper."},
    )
    class_names_file: str | None = field(
        default=None,
        metadata={"help": "Your own class names instead: .txt (a name a line), .csv, .json, .yaml."},
    )
    templates: list[str] | None = field(
        default=None,
        metadata={"help": 'Training templates, such as "a photo of a {}", instead of the task\'s.'},
    )
    eval_template: str | None = field(default=None, metadata={"help": "Template of the classifier's prompts."})
    class_prompts: str | None = field(
        default=None,
        metadata={"help": "JSON file {class name: [sentences]}: the text of each class instead of the templates."},
    )
    training_free: Literal["mean", "svd"] | None = field(
        default=None,
        metadata={"help": "Do not train: save the averaged prompts, or the orthonormal matrix nearest to them."},
    )
    validation: str | None = field(
        default=None,
        metadata={
            "help": "Labelled images whose accuracy is logged every epoch and changes nothing else: a Hub dataset, "
            "an image folder (a sub-folder a class), or task for those of the task itself."
        },
    )
    validation_split: str = field(default="train", metadata={"help": "Split of the validation images."})
    validation_images_per_class: int = field(default=16, metadata={"help": "At most so many of each class."})


@dataclass(frozen=True)
class Outcome:
    """One line of the summary."""

    task: str
    classes: int
    steps: int
    ended: str
    displacement: float
    cosine_before: float
    cosine_after: float
    seconds: float
    folder: str


def main(argv: list[str] | None = None) -> int:
    """Parse, load the base once, then train, save and push task by task. 0: all done, 1: a task failed."""
    script, args = parse_arguments(sys.argv[1:] if argv is None else argv)
    if args.push_to_hub and not get_token():
        raise ValueError("--push_to_hub needs a token: log in with `hf auth login`, or set HF_TOKEN.")
    tasks = read_tasks(script)
    accelerator = build_accelerator(args)
    base = load_base(script)

    outcomes, failures = [], []
    for task in tasks:
        run_args = args if len(tasks) == 1 else _arguments_of(task, args)
        # The last task may have the base itself: no second copy of the weights for a single task.
        model = base if task is tasks[-1] else copy.deepcopy(base)
        try:
            prompts = read_class_prompts(script.class_prompts, task, base, accelerator)
            validation = read_validation(script, task)
            outcome = run_task(model, task, run_args, accelerator, script.training_free, prompts, validation)
        except (ValueError, OSError, RuntimeError) as error:
            if len(tasks) == 1:
                raise
            failures.append(f"{task.name}: {error}")
            accelerator.print(f"{task.name} failed: {error}", file=sys.stderr)
            continue
        outcomes.append(outcome)
        if outcome.ended == "interrupted":
            break
    accelerator.print(summary_table(outcomes))
    accelerator.end_training()
    if outcomes and outcomes[-1].ended == "interrupted":
        accelerator.print("Interrupted; the same command with --resume_from_checkpoint continues.", file=sys.stderr)
        return _INTERRUPTED
    for failure in failures:
        accelerator.print(f"failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


def run_task(
    model: OrionCLIPTextModel,
    task: OrionTask,
    args: OrionTrainingArguments,
    accelerator: Accelerator,
    training_free: Literal["mean", "svd"] | None = None,
    class_prompts: ClassPrompts | None = None,
    validation: LabelledFeatures | None = None,
) -> Outcome:
    """Train (or average, or solve) one task, save it in ``args.output_dir`` and push it if asked."""
    if training_free is not None:
        return save_training_free(model, task, args, accelerator, training_free, class_prompts)
    trainer = OrionTrainer(model, task, args, accelerator, class_prompts, validation)
    result = trainer.train()
    if result.stopped != "interrupted":
        prototypes = trainer.prototypes if class_prompts is not None else None
        model.save_pretrained(args.output_dir, prototypes=prototypes, is_main_process=accelerator.is_main_process)
        if args.push_to_hub and accelerator.is_main_process:
            from ..hub import push_folder  # what was saved, with its log

            push_folder(args.output_dir, str(args.hub_model_id), private=args.hub_private_repo or None)
        accelerator.wait_for_everyone()
    return Outcome(
        task.name,
        task.num_classes,
        result.steps,
        result.stopped,
        result.after.mean_displacement,
        result.before.mean_cosine,
        result.after.mean_cosine,
        result.seconds,
        args.output_dir,
    )


def save_training_free(
    model: OrionCLIPTextModel,
    task: OrionTask,
    args: OrionTrainingArguments,
    accelerator: Accelerator,
    method: Literal["mean", "svd"],
    class_prompts: ClassPrompts | None = None,
) -> Outcome:
    """Save prototypes made without training. The folder has no weights: they are those of the base model."""
    folder = Path(args.output_dir)
    if folder.is_dir() and any(folder.iterdir()) and not args.overwrite_output_dir:
        raise ValueError(f"{folder} is not empty: start afresh with --overwrite_output_dir.")
    if args.push_to_hub:
        raise ValueError("--push_to_hub pushes an adapter, and --training_free makes none.")
    model.task = task
    task.check_context(model.tokenizer, model.config.max_position_embeddings)
    model.to(accelerator.device)
    if class_prompts is None:
        anchors = model.prototypes(task.templates)
    else:
        anchors = class_prompt_prototypes(model, model.tokenizer, class_prompts).prototypes
    training: dict[str, object] = {"method": method}
    if class_prompts is not None:
        training["class_prompts"] = sentences_fingerprint(class_prompts)
    prototypes = anchors.clone()
    if method == "svd":
        solution = svd_prototypes(anchors)
        prototypes = F.normalize(solution.prototypes, dim=-1)  # unit already, unless there are more classes than d
        training["row_orthonormal"] = solution.row_orthonormal
    before, after = prototype_geometry(anchors), prototype_geometry(prototypes, anchors)
    training |= {"geometry_before": asdict(before), "geometry_after": asdict(after)}
    if accelerator.is_main_process:
        clear_run(folder)
        with staged_folder(folder) as stage:
            replace(model.orion_config, training=training).save_json(stage / ORION_CONFIG_NAME)
            write_prototypes(stage / PROTOTYPES_NAME, prototypes, anchors)
            model.processor.save_pretrained(stage)
    return Outcome(
        task.name,
        task.num_classes,
        0,
        f"training-free {method}",
        after.mean_displacement,
        before.mean_cosine,
        after.mean_cosine,
        0.0,
        args.output_dir,
    )


def parse_arguments(argv: list[str]) -> tuple[FinetuneArguments, OrionTrainingArguments]:
    """Flags over the values of ``--config FILE.yaml`` over the defaults.

    Example:
        >>> flags = "--model embedded:tiny-clip --task tiny-land --output_dir out --seed 1".split()
        >>> parse_arguments(flags)[1].seed
        1
    """
    kinds = (FinetuneArguments, OrionTrainingArguments)
    description = __doc__.split("\n")[0]
    script, args = parse_dataclasses(kinds, argv, prog="orion-hf finetune", description=description, config=True)
    return script, args


def read_tasks(script: FinetuneArguments) -> list[OrionTask]:
    """The tasks asked for, each with the templates given instead of its own."""
    if (script.task is None) == (script.class_names_file is None):
        raise ValueError("Give either --task (a built-in one) or --class_names_file (your own names).")
    if script.class_names_file is not None:
        return [
            OrionTask.from_file(script.class_names_file, templates=script.templates, eval_template=script.eval_template)
        ]
    names = list(script.task or ())
    if names == ["all"]:
        # The embedded model knows its own small world and nothing else, and other models do not know that.
        tiny = script.model.startswith("embedded:")
        names = [name for name in OrionTask.available() if name.startswith("tiny-") == tiny]
    tasks = [OrionTask.from_name(name) for name in dict.fromkeys(names)]
    changes = {
        "templates": tuple(script.templates) if script.templates else None,
        "eval_template": script.eval_template,
    }
    changes = {key: value for key, value in changes.items() if value is not None}
    return [replace(task, **changes) for task in tasks]  # type: ignore[arg-type]


def read_class_prompts(
    path: str | None, task: OrionTask, base: OrionCLIPTextModel, accelerator: Accelerator
) -> ClassPrompts | None:
    """The sentences of every class of a task from ``--class_prompts``; says how many of them are cut."""
    if path is None:
        return None
    prompts = load_class_prompts(path, task.class_names)
    prompts.require_all()
    sentences, limit = prompts.flat()[0], base.config.max_position_embeddings
    cut = tokenize_sentences(base.tokenizer, sentences, limit).truncated
    unused = ", ".join(prompts.unused_keys[:5]) + (", ..." if len(prompts.unused_keys) > 5 else "")
    accelerator.print(
        f"{path}: {len(sentences)} sentences for {task.num_classes} classes, {cut} of them cut at {limit} tokens"
        + (f"; not used: {unused}" if unused else "")
    )
    return prompts


def read_validation(script: FinetuneArguments, task: OrionTask) -> LabelledFeatures | None:
    """The images of ``--validation``, through the vision tower of the same model."""
    if script.validation is None:
        return None
    if script.training_free is not None:
        raise ValueError("--validation is looked at during training, and --training_free has none.")
    if script.validation_images_per_class < 1:
        raise ValueError(f"--validation_images_per_class must be at least 1, not {script.validation_images_per_class}")
    from ..features import ImageEncoder  # brings datasets, which training without images does not need
    from ..labelled import LabelledFeatures

    return LabelledFeatures.of_task(
        ImageEncoder.from_pretrained(script.model, script.revision),
        task,
        script.validation_split,
        source=None if script.validation == "task" else script.validation,
        images_per_class=script.validation_images_per_class,
    )


def load_base(script: FinetuneArguments) -> OrionCLIPTextModel:
    """The text encoder to start from, in float32."""
    try:
        return OrionCLIPTextModel.from_pretrained(script.model, revision=script.revision, dtype=torch.float32)
    except OSError as error:
        raise OSError(f"--model {script.model} could not be loaded: {str(error).splitlines()[0]}") from error


def summary_table(outcomes: list[Outcome]) -> str:
    """The outcomes as a Markdown table."""
    header = ["task", "classes", "steps", "ended", "displacement", "mean cosine", "seconds", "folder"]
    rows = [
        [
            outcome.task,
            str(outcome.classes),
            str(outcome.steps),
            outcome.ended,
            f"{outcome.displacement:.4f}",
            f"{outcome.cosine_before:.3f} -> {outcome.cosine_after:.3f}",
            f"{outcome.seconds:.1f}",
            outcome.folder,
        ]
        for outcome in outcomes
    ]
    return aligned_table([header, *rows])


def _arguments_of(task: OrionTask, args: OrionTrainingArguments) -> OrionTrainingArguments:
    """Settings of one of several tasks: a folder and a repository of its own."""
    if args.resume_from_checkpoint not in (None, "latest"):
        raise ValueError("--resume_from_checkpoint takes no folder when there are several tasks.")
    repository = None if args.hub_model_id is None else f"{args.hub_model_id.split('/')[0]}/orion-{task.name}"
    return replace(args, output_dir=str(Path(args.output_dir) / f"orion-{task.name}"), hub_model_id=repository)

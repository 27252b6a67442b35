"""Fine-tune on class names, compare four classifiers on held-out images, and show the result."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import pipeline

from ..card import RESULTS_NAME
from ..cells import read_results
from ..features import ImageEncoder
from ..files import write_json
from ..images import task_images
from ..labelled import LabelledFeatures
from ..layout import write_text
from ..modeling_orion import OrionCLIPTextModel
from ..prototypes import svd_prototypes
from ..report import report
from ..tasks import OrionTask
from ..trainer import OrionTrainer, TrainingResult
from ..training_args import OrionTrainingArguments
from ..training_log import LOG_NAME, read_log

# Those of training/configs/recommended.yaml: prototypes are moved by a set distance, whatever model and task.
SETTINGS = {"learning_rate": 1e-4, "target_displacement": 0.02, "num_train_epochs": 200}


def main(argv: list[str] | None = None) -> int:
    """The package's main job end to end; everything it makes is in ``--output_dir``."""
    parser = argparse.ArgumentParser(prog="orion-hf demo", description=__doc__)
    parser.add_argument("--model", default="embedded:tiny-clip", help="a CLIP: Hub id, folder, or embedded:tiny-clip")
    parser.add_argument("--task", default="tiny-land", help="a built-in task")
    parser.add_argument("--output_dir", default="out/demo", help="adapter, results.json and plots")
    parser.add_argument("--images_per_class", type=int, default=40, help="test images of each class at most")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    output_dir = Path(args.output_dir)
    torch.manual_seed(args.seed)

    task = OrionTask.from_name(args.task)
    model = OrionCLIPTextModel.from_pretrained(args.model, dtype=torch.float32)
    encoder = ImageEncoder.from_pretrained(args.model)
    chosen = {"seed": args.seed, "images_per_class": args.images_per_class}
    test = LabelledFeatures.of_task(encoder, task, "test", **chosen)
    validation = LabelledFeatures.of_task(encoder, task, "train", **chosen)

    model.task = task
    prototypes = {
        "CLIP": model.prototypes(),
        "averaged prompts": model.prototypes(task.templates),
        "SVD": normalize(svd_prototypes(model.prototypes(task.templates)).prototypes, dim=-1),
    }
    settings = OrionTrainingArguments(str(output_dir), overwrite_output_dir=True, seed=args.seed, save_epochs=0)
    settings = replace(settings, **SETTINGS)  # type: ignore[arg-type]
    training = OrionTrainer(model, task, settings, validation=validation).train()
    model.save_pretrained(output_dir)
    prototypes["ORION"] = model.prototypes()

    top1 = {name: test.top1(rows) for name, rows in prototypes.items()}
    results = {
        "task": task.name,
        "model": args.model,
        "seed": args.seed,
        "images": len(test),
        "top1": {name: round(100 * hit, 2) for name, hit in top1.items()},
        "protocol": f"zero-shot, {len(test)} test images, evaluation template",
        "command": f"orion-hf demo --model {args.model} --task {task.name} --seed {args.seed}",
        "dataset": {"name": task.name, "split": "test"},
    }
    write_json(output_dir / RESULTS_NAME, results)
    plots = write_plots(output_dir, task, test, prototypes["averaged prompts"], model)

    print(table(task, args.model, len(test), top1, training))
    print(stock_pipeline_says(output_dir, task, task_images(task, "test", seed=args.seed, images_per_class=1)[0]))
    print(f"\nadapter   {output_dir}")
    print("\n".join(f"plot      {plot}" for plot in plots))
    files = [output_dir / RESULTS_NAME]
    print(f"report    {write_text(output_dir / 'report.html', report(read_results(files), 'html', files=files))}")
    return 0


def table(task: OrionTask, model: str, images: int, top1: dict[str, float], training: TrainingResult) -> str:
    lines = [f"\n{task.name}: {task.num_classes} classes, {images} images, {model}", ""]
    lines += ["| classifier       |  top-1 | against CLIP |", "|------------------|-------:|-------------:|"]
    lines += [
        f"| {name:<16} | {100 * hit:5.1f}% | {100 * (hit - top1['CLIP']):+11.1f}  |" for name, hit in top1.items()
    ]
    before, after = training.before, training.after
    lines += [
        "",
        f"ORION: {training.steps} steps in {training.seconds:.1f} s; prototypes moved by "
        f"{after.mean_displacement:.3f} on average, mean cosine between classes "
        f"{before.mean_cosine:.3f} -> {after.mean_cosine:.3f}",
    ]
    return "\n".join(lines)


def stock_pipeline_says(folder: Path, task: OrionTask, example: dict) -> str:
    """One image through transformers' own pipeline, which knows nothing of this package."""
    classify = pipeline("zero-shot-image-classification", model=str(folder))
    best = classify(example["image"], candidate_labels=list(task.label_names), hypothesis_template=task.eval_template)[
        0
    ]
    return (
        f"\nthe stock pipeline on one image of {task.class_names[example['label']]!r}: "
        f"{best['label']!r} ({100 * best['score']:.0f} %)"
    )


def write_plots(
    folder: Path,
    task: OrionTask,
    images: LabelledFeatures,
    before: Tensor,
    model: OrionCLIPTextModel,
) -> list[Path]:
    """Figures of what changed; none without matplotlib, which is an extra."""
    try:
        from .. import plots
    except ImportError:
        print("no plots: pip install 'orion-hf[plots]'", file=sys.stderr)
        return []
    after, log = model.prototypes(task.templates), read_log(folder / LOG_NAME)
    figures = {
        "accuracy": plots.accuracy_against_displacement(log),
        "displacement": plots.displacement_chart(before, after, task.class_names),
        "gram": plots.gram_heatmaps(before, after, task.class_names),
        "prototypes": plots.prototype_map(images.features, images.labels, before, after, task.class_names),
        "training": plots.training_curves(log),
    }
    (folder / "plots").mkdir(exist_ok=True)
    return [plots.save_figure(figure, folder / "plots" / f"{name}.png") for name, figure in figures.items()]

"""Zero-shot top-1 on the tiny tasks: CLIP, averaged prompts, SVD, ORION as in the paper, ORION by displacement.

    python -m benchmarks.tiny_accuracy --markdown --json tiny_accuracy.json

The embedded tiny-clip, its three tasks (classes that were never captioned in its pre-training), several seeds; a seed
draws the test images and is the seed of the training. Seeds 0 to 2 are left out: the tiny world was tuned on them.
Each classifier is read in two ways: with the task's evaluation template, as the paper does, and with the mean over
the training templates. For CLIP the first is zero-shot CLIP and the second are the averaged prompts.

ORION by displacement is ``--target_displacement``: for each learning rate and lambda one run is stopped at every target
in turn, which is the same as stopping a run of its own at each, because nothing else depends on the target.

Which setting to use on a task is chosen without its labels: the one with the best mean gain on the other two tasks.
"""

import copy
import itertools
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoProcessor, CLIPModel

from orion_hf.embedded import resolve_model_id
from orion_hf.geometry import displacement
from orion_hf.modeling_orion import OrionCLIPTextModel
from orion_hf.prototypes import svd_prototypes
from orion_hf.tasks import OrionTask
from orion_hf.tiny_world import tiny_dataset
from orion_hf.trainer import OrionTrainer, OrionTrainingArguments, TrainingError

from .harness import arguments, command_line, machine, report

NAME = "tiny-accuracy"
FIRST_SEED = 3
TASKS = ("tiny-shapes", "tiny-textures", "tiny-land")
READINGS = ("evaluation template", "template mean")
BASELINE, PAPER = "CLIP", "ORION, paper's settings"


def image_features(clip: str, task_name: str, seed: int, images_per_class: int) -> tuple[Tensor, Tensor]:
    """Unit image features ``(N, d)`` and labels ``(N,)`` of the test images."""
    processor = AutoProcessor.from_pretrained(clip)
    model = CLIPModel.from_pretrained(clip, dtype=torch.float32).eval()
    dataset = tiny_dataset(task_name, "test", seed, images_per_class)
    features = []
    for start in range(0, len(dataset), 64):
        images = dataset[start : start + 64]["image"]
        pixel_values = processor(images=images, return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            pooled = model.vision_model(pixel_values=pixel_values).pooler_output
            features.append(F.normalize(model.visual_projection(pooled), dim=-1))
    return torch.cat(features), torch.tensor(dataset["label"])


def both_readings(model: OrionCLIPTextModel) -> dict[str, Tensor]:
    return {READINGS[0]: model.prototypes(), READINGS[1]: model.prototypes(model.task.templates)}


def methods(base: OrionCLIPTextModel, task: OrionTask, seed: int, args) -> Iterator[tuple[str, dict, float]]:
    """Name, prototypes in both readings, and mean displacement of every method."""
    base.task = task
    anchors = both_readings(base)
    yield BASELINE, anchors, 0.0
    solved = {reading: F.normalize(svd_prototypes(v).prototypes, dim=-1) for reading, v in anchors.items()}
    yield "SVD", solved, displacement(solved[READINGS[1]], anchors[READINGS[1]]).mean().item()
    with tempfile.TemporaryDirectory() as folder:
        paper = OrionTrainingArguments(folder, seed=seed, disable_tqdm=True)
        trainer = OrionTrainer(copy.deepcopy(base), task, paper)
        result = trainer.train()
        yield PAPER, both_readings(trainer.model), result.after.mean_displacement
        for learning_rate, weight in itertools.product(args.learning_rates, args.weights):
            settings = {"learning_rate": learning_rate, "orthogonality_weight": weight}
            trainer = OrionTrainer(copy.deepcopy(base), task, replace(paper, **settings, num_train_epochs=args.epochs))
            for target in sorted(args.targets):
                trainer.args.target_displacement = target
                if not train_to_target(trainer):
                    break
                prototypes = both_readings(trainer.model.eval())
                moved = displacement(prototypes[READINGS[1]], trainer.anchors).mean().item()
                yield f"ORION, lr {learning_rate:g}, lambda {weight:g}, to {target:g}", prototypes, moved


def train_to_target(trainer: OrionTrainer) -> bool:
    """Train until the displacement is reached; False if the epochs end first or the run diverges."""
    total_steps = trainer.args.num_train_epochs * trainer.batches.steps_per_epoch
    try:
        while trainer.step < total_steps:
            if trainer.training_step() is None:
                return True
    except TrainingError as error:
        print(f"{trainer.task.name}: {error}")
    return False


def measure(args) -> dict[str, dict[str, dict[str, list[float]]]]:
    """``{method: {task: {reading or "displacement": one value a seed}}}``, accuracies in percent."""
    clip = resolve_model_id(args.model)
    base = OrionCLIPTextModel.from_pretrained(args.model, dtype=torch.float32)
    results: dict[str, dict[str, dict[str, list[float]]]] = {}
    for task_name, seed in itertools.product(TASKS, range(FIRST_SEED, FIRST_SEED + args.seeds)):
        features, labels = image_features(clip, task_name, seed, args.images_per_class)
        for method, prototypes, moved in methods(base, OrionTask.from_name(task_name), seed, args):
            values = results.setdefault(method, {}).setdefault(task_name, {"displacement": []})
            values["displacement"].append(moved)
            for reading, x in prototypes.items():
                correct = (features @ x.T).argmax(dim=1) == labels
                values.setdefault(reading, []).append(100 * correct.double().mean().item())
        print(f"{task_name}, seed {seed}: done", flush=True)
    # A run that did not get to a target on every task and seed has no row.
    return {
        method: tasks
        for method, tasks in results.items()
        if len(tasks) == len(TASKS) and all(len(v["displacement"]) == args.seeds for v in tasks.values())
    }


def gain(results: dict, method: str, task_name: str, reading: str) -> float:
    """Mean over seeds of the method's accuracy minus CLIP's in the same reading, on the same images."""
    pairs = zip(results[method][task_name][reading], results[BASELINE][task_name][reading], strict=True)
    return statistics.mean(ours - clip for ours, clip in pairs)


def chosen_elsewhere(results: dict, task_name: str, reading: str) -> str:
    """The displacement setting with the best mean gain on the other tasks."""
    others = [other for other in TASKS if other != task_name]
    candidates = [method for method in results if method.startswith("ORION, lr")]
    return max(candidates, key=lambda m: statistics.mean(gain(results, m, other, reading) for other in others))


def cell(values: list[float], digits: int = 1) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{digits}f} ± {spread:.{digits}f}"


def markdown(result: dict) -> str:
    results = result["results"]
    lines = [
        f"`{result['command']}` on {result['machine']}. Top-1 in percent, mean ± standard deviation over "
        f"{result['seeds']} seeds; moved: mean displacement of the prototypes."
    ]
    for reading in READINGS:
        lines += ["", f"Classifier from the {reading}:", ""]
        lines += ["| method | " + " | ".join(f"{task} | moved" for task in TASKS) + " | mean gain |"]
        lines += ["|---|" + "--:|--:|" * len(TASKS) + "--:|"]
        for method, tasks in results.items():
            cells = [f"{cell(tasks[t][reading])} | {statistics.mean(tasks[t]['displacement']):.4f}" for t in TASKS]
            mean_gain = statistics.mean(gain(results, method, task, reading) for task in TASKS)
            name = "Averaged prompts" if method == BASELINE and reading == READINGS[1] else method
            lines.append(f"| {name} | {' | '.join(cells)} | {mean_gain:+.1f} |")
    if any(method.startswith("ORION, lr") for method in results):
        lines += ["", "Setting chosen on the other two tasks, and its gain on the third:", ""]
        lines += ["| task | reading | chosen | gain |", "|---|---|---|--:|"]
        for task, reading in itertools.product(TASKS, READINGS):
            method = chosen_elsewhere(results, task, reading)
            lines.append(f"| {task} | {reading} | {method} | {gain(results, method, task, reading):+.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", default="embedded:tiny-clip")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--images_per_class", type=int, default=20)
    parser.add_argument("--targets", type=float, nargs="+", default=[0.02, 0.05, 0.1, 0.15, 0.23, 0.35])
    parser.add_argument("--learning_rates", type=float, nargs="+", default=[1e-4, 1e-3])
    parser.add_argument("--weights", type=float, nargs="+", default=[0.02, 2.0], help="lambda of the first epoch")
    parser.add_argument("--epochs", type=int, default=200, help="at most, on the way to the largest target")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result = {
        "command": command_line("tiny_accuracy"),
        "machine": machine(args.threads),
        "seeds": args.seeds,
        "results": measure(args),
    }
    report(NAME, result, markdown(result), args)


if __name__ == "__main__":
    main()

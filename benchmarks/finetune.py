"""Time and memory of fine-tuning: the plain loop with prompts padded to 77 tokens, the same trimmed, and ours.

    python -m benchmarks.finetune --markdown --json finetune.json   # everything, some ten minutes on a quiet machine
    python -m benchmarks.finetune --classes 10 100 --repeats 1      # without the 1000 classes

All three train the same: eq. 2 on batches of up to 64 classes, the mean over three templates, LoRA of rank 8 on a
text encoder of ViT-B size (12 layers, width 512, 8 heads) with random weights, AdamW; the losses of every step are
compared. ``padded`` is the way the field does it (peft, ``model(input_ids)``, a plain loop), ``trimmed`` cuts a batch
after its longest prompt, ``orion`` is [`OrionTrainer`]. Steps are interleaved. An epoch of the baselines with many
steps is extrapolated from its first steps, which the table marks. Peak memory is that of a process of its own which
runs one step.
"""

import argparse
import copy
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPTextConfig

from orion_hf.loss import orthonormality_loss
from orion_hf.modeling_orion import OrionCLIPTextModel
from orion_hf.prototypes import mean_prototypes
from orion_hf.tasks import OrionTask
from orion_hf.trainer import OrionTrainer, OrionTrainingArguments

from .harness import ROOT, arguments, command_line, machine, report
from .text_encoding import BOS, CONTEXT_LENGTH, EOS, pad, tokenize

NAME = "finetune"
TASKS = {10: "eurosat", 100: "caltech101", 1000: "imagenet"}
VARIANTS = ("padded", "trimmed", "orion")
BASELINE_STEPS = 2  # of an epoch, at most; the rest is extrapolated


class PromptTokenizer:
    """Stands in for CLIP's tokenizer, whose vocabulary is not needed: the benchmark's prompts and their tokens."""

    def __init__(self, task: OrionTask):
        prompts = [prompt for texts in [*task.training_prompts(), task.prompts()] for prompt in texts]
        self.token_ids = dict(zip(prompts, tokenize(prompts), strict=True))

    def __call__(self, texts: list[str], **_: object) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.token_ids[text] for text in texts]}


def build_trainer(num_classes: int, folder: str, epochs: int) -> OrionTrainer:
    task = OrionTask.from_name(TASKS[num_classes])
    torch.manual_seed(0)
    model = OrionCLIPTextModel(CLIPTextConfig(vocab_size=49408, bos_token_id=BOS, eos_token_id=EOS))
    model.tokenizer = PromptTokenizer(task)
    # A larger rate than the paper's, so that the losses of later steps depend on the gradients of earlier ones.
    args = OrionTrainingArguments(folder, num_train_epochs=epochs, learning_rate=1e-4, disable_tqdm=True)
    return OrionTrainer(model, task, args)


class PlainLoop:
    """The same training as it is usually written: pad, encode, differentiate, step."""

    def __init__(self, trainer: OrionTrainer, padded: bool):
        self.trainer, self.padded = trainer, padded
        self.model = copy.deepcopy(trainer.model).train()  # with the same LoRA initialisation
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            parameters, lr=trainer.args.learning_rate, weight_decay=trainer.args.weight_decay
        )
        tokenizer = trainer.model.tokenizer
        self.token_ids = [tokenizer(prompts)["input_ids"] for prompts in trainer.task.training_prompts()]
        self.step = 0

    def training_step(self) -> float:
        batches = self.trainer.batches
        epoch, batch = divmod(self.step, batches.steps_per_epoch)
        classes = batches.of_epoch(epoch)[batch]
        rows = [template[c] for template in self.token_ids for c in classes.tolist()]
        input_ids = pad(rows, CONTEXT_LENGTH if self.padded else max(map(len, rows)))
        text_embeds = self.model(input_ids=input_ids).text_embeds
        prototypes = mean_prototypes(text_embeds.unflatten(0, (-1, len(classes))))
        weight = self.trainer.args.orthogonality_weight_at(epoch)
        loss = orthonormality_loss(prototypes, self.trainer.anchors[classes], weight).total
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return loss.item()


def matmul_peak() -> float:
    """Best FLOP/s of a large float32 product on this machine, the roof of everything else."""
    size = 1536
    a, b = torch.randn(size, size), torch.randn(size, size)
    best = math.inf
    for _ in range(10):
        start = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def measure(num_classes: int, repeats: int, peak: float) -> dict:
    """Seconds per epoch of each variant, losses compared step by step."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(num_classes, folder, epochs=repeats + 2)
        loops = {"padded": PlainLoop(trainer, padded=True), "trimmed": PlainLoop(trainer, padded=False)}
        steps_per_epoch = trainer.batches.steps_per_epoch
        compared = min(steps_per_epoch * repeats, BASELINE_STEPS)

        def timed(step: Callable[[], float]) -> tuple[float, float]:
            start = time.perf_counter()
            loss = step()
            return time.perf_counter() - start, loss

        runs: dict[str, list[tuple[float, float]]] = {variant: [] for variant in VARIANTS}
        steps: dict[str, Callable[[], float]] = {name: loop.training_step for name, loop in loops.items()}
        steps["orion"] = lambda: trainer.training_step()["loss"]
        for index in range(steps_per_epoch * max(repeats, 1)):
            for variant, step in steps.items():
                if index < compared or variant == "orion" or (variant == "trimmed" and steps_per_epoch <= 2):
                    runs[variant].append(timed(step))
        differences = [
            abs(runs[variant][i][1] - runs["orion"][i][1]) / abs(runs["padded"][i][1])
            for i in range(compared)
            for variant in ("trimmed", "orion")
        ]
        nodes = sum(len(pack) for pack in trainer.batches.packs(trainer.batches.of_epoch(0)[0], step=0))
        tokens = sum(trainer.batches.count_tokens(classes) for classes in trainer.batches.of_epoch(0))
        with FlopCounterMode(display=False) as counter:
            trainer.training_step()
        best_step = {variant: min(seconds for seconds, _ in runs[variant]) for variant in VARIANTS}
        return {
            "classes": num_classes,
            "steps_per_epoch": steps_per_epoch,
            "tokens_per_epoch": tokens,
            "tree_nodes_per_step": nodes,
            "largest_relative_loss_difference": max(differences),
            "compared_steps": compared,
            "extrapolated": compared < steps_per_epoch,
            "seconds_per_epoch": {variant: seconds * steps_per_epoch for variant, seconds in best_step.items()},
            "matmul_flops_per_step": counter.get_total_flops(),
            "fraction_of_matmul_peak": counter.get_total_flops() / best_step["orion"] / peak,
        }


def peak_memory(variant: str, num_classes: int, threads: int) -> float:
    """MiB that one step adds to a fresh process with the model loaded.

    Called before this process has a model of its own: Linux lets a child start with its parent's peak.
    """
    command = [sys.executable, "-m", "benchmarks.finetune", "--threads", str(threads)]
    command += ["--measure-memory", variant, str(num_classes)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    return float(done.stdout.split()[-1])


def print_memory(variant: str, num_classes: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(num_classes, folder, epochs=1)
        step = trainer.training_step if variant == "orion" else PlainLoop(trainer, variant == "padded").training_step
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        step()
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def markdown(result: dict) -> str:
    lines = [
        f"`{result['command']}` on {result['machine']}. Seconds are of the best step times the steps of an epoch "
        f"(\\*: of the first {BASELINE_STEPS} steps); ratios say how much faster, or smaller, `orion` is.",
        "",
        "| classes | variant | seconds an epoch | faster | tokens/s | memory of a step, MiB | smaller |",
        "|--:|---|--:|--:|--:|--:|--:|",
    ]
    for run in result["runs"]:
        seconds, memory = run["seconds_per_epoch"], run["memory_mib"]
        for variant in VARIANTS:
            ours = variant == "orion"
            star = "\\*" if run["extrapolated"] and not ours else ""
            faster = "" if ours else f"{seconds[variant] / seconds['orion']:.1f}x"
            smaller = "" if ours else f"{memory[variant] / memory['orion']:.1f}x"
            lines.append(
                f"| {run['classes']} | {variant} | {seconds[variant]:.2f}{star} | {faster} "
                f"| {run['tokens_per_epoch'] / seconds[variant]:,.0f} | {memory[variant]:,.0f} | {smaller} |"
            )
    lines.append("")
    for run in result["runs"]:
        lines.append(
            f"- {run['classes']} classes: losses of {run['compared_steps']} steps differ by at most "
            f"{run['largest_relative_loss_difference']:.1e} (relative); a step has {run['tree_nodes_per_step']} tree "
            f"nodes and {run['matmul_flops_per_step'] / 1e9:.0f} GFLOP in matrix products, done at "
            f"{100 * run['fraction_of_matmul_peak']:.0f} % of this machine's peak of "
            f"{result['matmul_peak'] / 1e9:.0f} GFLOP/s."
        )
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__, repeats=3)
    parser.add_argument("--classes", type=int, nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--measure-memory", nargs=2, metavar=("VARIANT", "CLASSES"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.measure_memory:
        print_memory(args.measure_memory[0], int(args.measure_memory[1]))
        return
    memory = {k: {variant: peak_memory(variant, k, args.threads) for variant in VARIANTS} for k in args.classes}
    peak = matmul_peak()
    runs = [{**measure(k, args.repeats, peak), "memory_mib": memory[k]} for k in args.classes]
    result = {"command": command_line(NAME), "machine": machine(args.threads), "matmul_peak": peak, "runs": runs}
    report(NAME, result, markdown(result), args)


if __name__ == "__main__":
    main()

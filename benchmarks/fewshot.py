"""Few-shot training on CPU: a step of CoOp against the published way, and a whole run of CLAP.

    python -m benchmarks.fewshot --markdown --json fewshot.json      # everything, some ten minutes
    python -m benchmarks.fewshot --parts coop --classes 10 100      # a part of it

CoOp: text encoder of ViT-B size with random weights, 16 shared context vectors, a batch of 32 image features, the
first K ImageNet names. The published way encodes K prompts padded to 77 tokens at every step; at K = 1000 its
activations do not fit into the memory of most machines, so only ours is run there. Both give the same gradient, which
is checked. Peak memory is that of a process of its own that runs one step.

CLAP: 16 shots of 1000 classes, 20 augmentation passes over features of width 512, batches of 256, 300 epochs.
Prototypes and features are random; time does not depend on what they are.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import CLIPTextConfig, CLIPTextModelWithProjection

from benchmarks.harness import ROOT, arguments, command_line, interleaved, machine, report
from benchmarks.text_encoding import BOS, CONTEXT_LENGTH, EOS, tokenize
from orion_hf.methods.clap import CLAP
from orion_hf.methods.coop import CoOp, place_context
from orion_hf.tasks import builtin_record

BATCH = 32
LARGEST_PUBLISHED = 100


def text_model() -> CLIPTextModelWithProjection:
    torch.manual_seed(0)
    config = CLIPTextConfig(vocab_size=49408, bos_token_id=BOS, eos_token_id=EOS)
    return CLIPTextModelWithProjection(config).eval().requires_grad_(False)


def coop_steps(classes: int) -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
    """One step each, the loss and its gradient with respect to the context."""
    names = builtin_record("imagenet")["class_names"][:classes]
    coop = CoOp(text_model(), lambda texts, **_: {"input_ids": tokenize(texts)}, names)
    rng = torch.Generator().manual_seed(0)
    ctx = coop.initial_context(rng).float()
    features = F.normalize(torch.randn(BATCH, 512, generator=rng), dim=1)
    labels = torch.randint(classes, (BATCH,), generator=rng)
    packs = coop.prompt_packs()

    token_ids, name_lengths = coop.tokenize()
    placed = [place_context(ids, n, coop.n_ctx) for ids, n in zip(token_ids, name_lengths, strict=True)]
    padded = torch.tensor([[*ids, *[0] * (CONTEXT_LENGTH - len(ids))] for ids in placed])
    ends = torch.tensor([len(ids) - 1 for ids in placed])

    def published() -> tuple[Tensor, Tensor]:
        encoder = coop.text_model.text_model
        leaf = ctx.detach().requires_grad_()
        embeds = encoder.embeddings.token_embedding(padded.clamp(min=0))
        embeds = torch.where((padded < 0)[..., None], leaf[(-1 - padded).clamp(min=0)], embeds)
        embeds = embeds + encoder.embeddings.position_embedding.weight
        causal = torch.full((CONTEXT_LENGTH, CONTEXT_LENGTH), torch.finfo(torch.float32).min).triu(1)
        hidden = encoder.encoder(inputs_embeds=embeds, attention_mask=causal[None, None], is_causal=False)
        pooled = encoder.final_layer_norm(hidden.last_hidden_state)[torch.arange(classes), ends]
        prototypes = F.normalize(coop.text_model.text_projection(pooled), dim=1)
        loss = F.cross_entropy(coop.logit_scale * features @ prototypes.T, labels)
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    steps = {"ours": lambda: coop.loss_and_gradient(features, labels, packs, ctx)}
    if classes <= LARGEST_PUBLISHED:
        steps["published"] = published
    return steps


def measure_memory(variant: str, classes: int) -> dict[str, float]:
    run = coop_steps(classes)[variant]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak": peak / 1024, "over_model": (peak - before) / 1024}


def peak_memory(variant: str, classes: int, threads: int) -> dict[str, float]:
    """MiB of a fresh process. Called before this one grows: Linux lets a child start with its parent's peak."""
    command = [sys.executable, "-m", "benchmarks.fewshot", "--threads", str(threads)]
    command += ["--measure-memory", variant, str(classes)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure_coop(classes: int, repeats: int, memory: dict[str, dict[str, float]]) -> dict:
    steps = coop_steps(classes)
    difference = None
    if "published" in steps:
        (_, ours), (_, theirs) = steps["ours"](), steps["published"]()
        difference = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    slow = ("published",) if classes >= LARGEST_PUBLISHED else ()
    return {
        "classes": classes,
        "seconds": interleaved(steps, repeats, once=slow),
        "memory": memory,
        "largest_gradient_difference": difference,
    }


def measure_clap(epochs: int, classes: int = 1000, shots: int = 16, passes: int = 20, width: int = 512) -> dict:
    rng = torch.Generator().manual_seed(0)
    prototypes = torch.randn(classes, width, generator=rng)
    labels = torch.arange(classes).repeat(shots)
    features = torch.randn(passes, len(labels), width, generator=rng).mul_(2).add_(prototypes[labels])
    before = matrix_products(classes, width)
    start = time.perf_counter()
    clap = CLAP(epochs=epochs).fit(features, labels, prototypes)
    seconds = time.perf_counter() - start
    after = matrix_products(classes, width)
    return {
        "classes": classes,
        "shots": shots,
        "epochs": epochs,
        "steps": len(clap.loss_per_step_),
        "seconds": seconds,
        "products_seconds": (before + after) / 2 * len(clap.loss_per_step_),
    }


def matrix_products(classes: int, width: int, batch: int = 256, steps: int = 500) -> float:
    """Seconds of the two matrix products of a step and nothing else: what no implementation can do without."""
    weights, features = torch.randn(classes, width), torch.randn(batch, width)
    logits, gradient = torch.empty(classes, batch), torch.zeros(classes, width)
    start = time.perf_counter()
    for _ in range(steps):
        torch.mm(weights, features.T, out=logits)
        gradient.addmm_(logits, features, beta=0.0)
    return (time.perf_counter() - start) / steps


def to_markdown(result: dict, command: str) -> str:
    lines = [f"`{command}` on {result['machine']}."]
    if result["coop"]:
        lines += [
            "",
            "| CoOp step, K | published, s | ours, s | faster by | published, MiB | ours, MiB | less by "
            "| gradients differ by |",
            "|--:|--:|--:|--:|--:|--:|--:|--:|",
        ]
    for row in result["coop"]:
        seconds, memory = row["seconds"], row["memory"]
        ours, ours_mib = seconds["ours"]["best"], memory["ours"]["over_model"]
        if "published" in seconds:
            theirs, theirs_mib = seconds["published"]["best"], memory["published"]["over_model"]
            cells = [
                f"{theirs:.2f}",
                f"{ours:.3f}",
                f"{theirs / ours:.1f}x",
                f"{theirs_mib:.0f}",
                f"{ours_mib:.0f}",
            ]
            cells += [f"{theirs_mib / ours_mib:.1f}x", f"{row['largest_gradient_difference']:.0e}"]
        else:
            cells = ["", f"{ours:.3f}", "", "", f"{ours_mib:.0f}", "", ""]
        lines += [f"| {row['classes']} | {' | '.join(cells)} |"]
    if result["coop"]:
        whole = ", ".join(f"{row['memory']['ours']['peak']:.0f} MiB at K = {row['classes']}" for row in result["coop"])
        lines += [
            "",
            f"Memory is over that of the loaded model; the whole process peaks at {whole} with ours.",
        ]
    if result["clap"]:
        row = result["clap"]
        lines += [
            "",
            f"CLAP, {row['shots']} shots, K = {row['classes']}, {row['epochs']} epochs ({row['steps']} steps): "
            f"{row['seconds']:.0f} s, of which the matrix products alone are {row['products_seconds']:.0f} s.",
        ]
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--parts", nargs="+", choices=("coop", "clap"), default=["coop", "clap"])
    parser.add_argument("--classes", nargs="+", type=int, default=[10, 100, 1000], help="K of the CoOp steps")
    parser.add_argument("--epochs", type=int, default=300, help="of CLAP")
    parser.add_argument("--measure-memory", nargs=2, metavar=("VARIANT", "K"), help="used by the benchmark itself")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.measure_memory:
        print(json.dumps(measure_memory(args.measure_memory[0], int(args.measure_memory[1]))))
        return
    coop_classes = args.classes if "coop" in args.parts else []
    memory = {
        classes: {
            variant: peak_memory(variant, classes, args.threads)
            for variant in ("ours", "published")
            if variant == "ours" or classes <= LARGEST_PUBLISHED
        }
        for classes in coop_classes
    }
    result = {
        "machine": machine(args.threads),
        "coop": [measure_coop(classes, args.repeats, memory[classes]) for classes in coop_classes],
        "clap": measure_clap(args.epochs) if "clap" in args.parts else None,
    }
    report("fewshot", result, to_markdown(result, command_line("fewshot")), args)


if __name__ == "__main__":
    main()

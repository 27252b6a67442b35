"""Time and memory of encoding class prompts: padded to 77 tokens, trimmed to the longest, prefix tree.

    python -m benchmarks.text_encoding --markdown --json text_encoding.json   # everything, some ten minutes
    python -m benchmarks.text_encoding --quick                               # the 64-prompt workloads only

A text encoder of ViT-B size (12 layers, width 512, 8 heads) with random weights and LoRA of rank 8 on every
projection; time does not depend on what the weights are. CLIP's vocabulary is not needed either, only how
long prompts are and what they share: a word is one token, or two if it has more than 7 letters (CLIP's
vocabulary gives about 1.3 tokens a word), a punctuation mark or digit is one token. Variants are interleaved,
and peak memory is that of a process of its own.
"""

import argparse
import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModelWithProjection

import orion_hf
from benchmarks.harness import ROOT, arguments, command_line, interleaved, machine, report
from orion_hf.prompt_tree import DEFAULT_NODE_BUDGET, build_packs, encode_packs

BOS, EOS, CONTEXT_LENGTH, BATCH = 49406, 49407, 77, 64
VARIANTS = ("padded", "trimmed", "tree")
BUDGETS = (128, 256, 512, 1024, 2048)


def tokenize(prompts: Sequence[str]) -> list[list[int]]:
    """Stand-in for CLIP's tokenizer with the same token counts; ids are given out in order of appearance."""
    vocabulary: dict[str, int] = {}
    token_ids = []
    for prompt in prompts:
        pieces = []
        for word in re.findall(r"[a-z]+|[^a-z\s]", prompt.lower()):
            half = (len(word) + 1) // 2
            pieces += [word[:half], "##" + word[half:]] if len(word) > 7 else [word]
        token_ids.append([BOS, *(vocabulary.setdefault(piece, len(vocabulary)) for piece in pieces), EOS])
    return token_ids


def imagenet_prompts() -> tuple[list[list[int]], list[list[int]]]:
    """64 prompts of the first ImageNet classes, and 1000 names x 3 templates."""
    task = json.loads((Path(orion_hf.__file__).parent / "data/datasets/imagenet.json").read_text("utf-8"))
    names = task["class_names"]
    few = tokenize([f"a photo of a {name}." for name in names[:64]])
    many = tokenize([template.format(name) for template in task["orion_templates"] for name in names])
    return few, many


def lora_text_model() -> CLIPTextModelWithProjection:
    torch.manual_seed(0)
    model = CLIPTextModelWithProjection(CLIPTextConfig(vocab_size=49408, bos_token_id=BOS, eos_token_id=EOS))
    projections = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
    # Random LoRA weights: with the usual B = 0 half of the gradients would be zero.
    get_peft_model(model, LoraConfig(r=8, target_modules=projections, init_lora_weights=False))
    return model.eval()


def pad(token_ids: Sequence[Sequence[int]], length: int) -> Tensor:
    return torch.tensor([[*ids, *[EOS] * (length - len(ids))] for ids in token_ids])


def batches(variant: str, token_ids: list[list[int]]) -> list[Tensor]:
    chunks = [token_ids[start : start + BATCH] for start in range(0, len(token_ids), BATCH)]
    return [pad(chunk, CONTEXT_LENGTH if variant == "padded" else max(map(len, chunk))) for chunk in chunks]


def encoder(
    variant: str, model: CLIPTextModelWithProjection, token_ids: list[list[int]], node_budget: int
) -> Callable[[], Tensor]:
    """A function that encodes the prompts; the tree's includes packing them."""
    if variant == "tree":
        return lambda: encode_packs(model, build_packs(token_ids, node_budget))
    inputs = batches(variant, token_ids)
    return lambda: torch.cat([model(input_ids).text_embeds for input_ids in inputs])


def step(
    variant: str,
    model: CLIPTextModelWithProjection,
    token_ids: list[list[int]],
    train: bool,
    node_budget: int = DEFAULT_NODE_BUDGET,
) -> Callable[[], Tensor]:
    """A function that runs inference, or forward and backward, once."""
    encode = encoder(variant, model, token_ids, node_budget)

    def run() -> Tensor:
        model.zero_grad(set_to_none=True)
        with torch.set_grad_enabled(train):
            text_embeds = encode()
            if train:
                text_embeds.square().sum().backward()
        return text_embeds.detach()

    return run


def largest_difference(model: CLIPTextModelWithProjection, token_ids: list[list[int]]) -> dict[str, float]:
    """Tree against padded: largest deviation of outputs and LoRA gradients over the largest entry."""
    results = {}
    for variant in ("padded", "tree"):
        text_embeds = step(variant, model, token_ids, train=True)()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
        results[variant] = (text_embeds, gradients)
    model.zero_grad(set_to_none=True)
    pairs = zip(("text_embeds", "lora_gradients"), results["padded"], results["tree"], strict=True)
    return {name: ((a - b).abs().max() / a.abs().max()).item() for name, a, b in pairs}


def peak_memory(variant: str, workload: str, threads: int) -> dict[str, float]:
    """MiB of a fresh process that loads the model and runs the workload once.

    Called before this process has a model of its own: Linux lets a child start with its parent's peak.
    """
    command = [sys.executable, "-m", "benchmarks.text_encoding", "--threads", str(threads)]
    command += ["--measure-memory", variant, workload]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure_memory(variant: str, workload: str) -> dict[str, float]:
    few, many = imagenet_prompts()
    run = step(variant, lora_text_model(), many if workload == "many" else few, train=workload == "train")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak": peak / 1024, "over_model": (peak - before) / 1024}


def workload(name: str, token_ids: list[list[int]], seconds: dict[str, dict]) -> dict:
    tokens = {variant: sum(b.numel() for b in batches(variant, token_ids)) for variant in ("padded", "trimmed")}
    tokens["tree"] = sum(map(len, build_packs(token_ids)))
    ratios = {
        variant: {key: seconds[variant][key] / seconds["tree"][key] for key in ("best", "median")}
        for variant in ("padded", "trimmed")
    }
    return {"name": name, "tokens": tokens, "seconds": seconds, "speedup_over": ratios}


def measure(quick: bool, repeats: int, threads: int) -> dict:
    memory = {"64 prompts, forward and backward": {v: peak_memory(v, "train", threads) for v in VARIANTS}}
    memory["64 prompts, inference"] = {v: peak_memory(v, "inference", threads) for v in VARIANTS}
    if not quick:
        memory["3000 prompts, inference"] = {v: peak_memory(v, "many", threads) for v in ("trimmed", "tree")}

    model = lora_text_model()
    few, many = imagenet_prompts()
    result: dict = {"machine": machine(threads), "node_budget": DEFAULT_NODE_BUDGET, "workloads": []}
    for name, train in (("64 prompts, forward and backward", True), ("64 prompts, inference", False)):
        steps = {variant: step(variant, model, few, train) for variant in VARIANTS}
        result["workloads"].append(workload(name, few, interleaved(steps, repeats)))
    result["relative_difference"] = largest_difference(model, few)
    if not quick:
        steps = {variant: step(variant, model, many, train=False) for variant in VARIANTS}
        seconds = interleaved(steps, repeats, once=("padded",))
        result["workloads"].append(workload("3000 prompts, inference", many, seconds))
        result["budgets"] = measure_budgets(model, many[:1000], repeats)
    result["peak_memory_mib"] = memory
    return result


def measure_budgets(model: CLIPTextModelWithProjection, token_ids: list[list[int]], repeats: int) -> dict:
    """Best milliseconds a prompt for every node budget, inference and forward+backward."""
    result: dict[str, dict[str, float]] = {}
    for mode, train in (("inference", False), ("forward and backward", True)):
        steps = {str(budget): step("tree", model, token_ids, train, budget) for budget in BUDGETS}
        seconds = interleaved(steps, repeats)
        result[mode] = {budget: 1000 * seconds[budget]["best"] / len(token_ids) for budget in steps}
    return result


def to_markdown(result: dict, command: str) -> str:
    """The measurements as tables, for people."""
    lines = [f"`{command}` on {result['machine']}. Seconds are best (median) of the runs; ratios are of the best."]
    lines += [
        "",
        "| workload | variant | tokens | seconds | runs | tree is faster by |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for load in result["workloads"]:
        for variant in VARIANTS:
            run = load["seconds"][variant]
            ratio = "" if variant == "tree" else f"{load['speedup_over'][variant]['best']:.1f}x"
            seconds = f"{run['best']:.3f} ({run['median']:.3f})"
            tokens = f"{load['tokens'][variant]:,}"
            lines += [f"| {load['name']} | {variant} | {tokens} | {seconds} | {run['runs']} | {ratio} |"]
    lines += ["", "| peak memory, MiB | variant | process | over the loaded model |", "|---|---|--:|--:|"]
    for name, variants in result["peak_memory_mib"].items():
        for variant, mib in variants.items():
            lines += [f"| {name} | {variant} | {mib['peak']:.0f} | {mib['over_model']:.0f} |"]
    difference = result["relative_difference"]
    lines += [
        "",
        f"Largest relative difference between tree and padded: {difference['text_embeds']:.1e} in the text "
        f"embeddings, {difference['lora_gradients']:.1e} in the LoRA gradients.",
    ]
    if "budgets" in result:
        budget = result["node_budget"]
        lines += ["", f"Milliseconds a prompt by node budget of a pack (default {budget}), 1000 prompts:", ""]
        lines += [f"| nodes | {' | '.join(map(str, BUDGETS))} |", "|---|" + "--:|" * len(BUDGETS)]
        for mode, cost in result["budgets"].items():
            lines += [f"| {mode} | {' | '.join(f'{cost[str(b)]:.2f}' for b in BUDGETS)} |"]
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--quick", action="store_true", help="only the 64-prompt workloads")
    parser.add_argument("--measure-memory", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.measure_memory:
        print(json.dumps(measure_memory(*args.measure_memory)))
        return
    result = measure(args.quick, args.repeats, args.threads)
    report("text-encoding", result, to_markdown(result, command_line("text_encoding")), args)


if __name__ == "__main__":
    main()

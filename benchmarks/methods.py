"""Test-time adaptation: ours against plain transcriptions of the papers' formulas.

    python -m benchmarks.methods --markdown --json methods.json     # some twenty minutes on two cores
    python -m benchmarks.methods --quick                            # without the largest sizes

A transcription keeps the N x K x d arrays of StatA and TransCLIP, works on one image at a time (MTA), pads
every prompt to 77 tokens (TPT) and holds the whole graph as a dense matrix (ZLaP). `verify` holds each of them
to the golden vectors of ``tests/golden``; the tests do the same for ours. Features are synthetic.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import normalize
from transformers import CLIPTextConfig, CLIPTextModelWithProjection

from benchmarks.harness import ROOT, arguments, command_line, interleaved, machine, report
from orion_hf.methods.mta import mta
from orion_hf.methods.stata import stata
from orion_hf.methods.tpt import ContextPrompts, soft_prompts, splice_context, tpt
from orion_hf.methods.transclip import transclip
from orion_hf.methods.zlap import zlap
from orion_hf.protocols import batch_tasks, run_tasks

WIDTH = 512
GOLDEN = ROOT / "tests" / "golden"
CONTEXT_LENGTH = 77


def plain_stata(
    x: Tensor,
    t: Tensor,
    *,
    alpha: float = 1.0,
    soft_beta: bool = False,
    lambda_y_hat: float = 1.0,
    lambda_laplacian: float = 1.0,
    n_neighbors: int = 3,
    max_iter: int = 10,
) -> Tensor:
    """StatA with its N x K x d arrays."""
    y = (100 * x @ t.T).softmax(1)
    z, mu = y, t
    initial = (y[:, :, None] * (x[:, None, :] - t[None, :, :]) ** 2).sum((0, 1)) / len(x)
    cov = initial.expand_as(t)
    w = plain_affinity(x, n_neighbors)
    for iteration in range(max_iter + 1):
        likelihood = -0.5 * ((x[:, None, :] - mu[None, :, :]) ** 2 / cov[None, :, :]).sum(2)
        likelihood = likelihood - 0.5 * cov.log().sum(1)
        z = plain_assignments(z, y, likelihood, w, lambda_y_hat, lambda_laplacian, n_neighbors)
        if iteration == max_iter:
            break
        counts = z.sum(0) if soft_beta else torch.bincount(z.argmax(1), minlength=len(t)).to(x)
        beta = (counts / (alpha + counts + 1e-12))[:, None]
        mass = z.sum(0)
        v = normalize((z[:, :, None] * x[:, None, :]).sum(0) / mass[:, None], dim=1)
        mu = normalize(beta * v + (1 - beta) * t, dim=1)
        spread = (z[:, :, None] * (x[:, None, :] - mu[None, :, :]) ** 2).sum(0) / mass[:, None]
        cov = beta * spread + (1 - beta) * (initial + (t - mu) ** 2)
    return z


def plain_transclip(
    x: Tensor,
    t: Tensor,
    *,
    lambda_y_hat: float = 1.0,
    lambda_laplacian: float = 1.0,
    n_neighbors: int = 3,
    max_iter: int = 10,
) -> Tensor:
    """TransCLIP, text-init, with its N x K x d arrays."""
    y = (100 * x @ t.T).softmax(1)
    z, mu = y, t
    cov = torch.full_like(x[0], 1 / x.shape[1])
    w = plain_affinity(x, n_neighbors)
    for iteration in range(max_iter + 1):
        likelihood = -0.5 * ((x[:, None, :] - mu[None, :, :]) ** 2 / cov).sum(2)
        z = plain_assignments(z, y, likelihood, w, lambda_y_hat, lambda_laplacian, n_neighbors)
        if iteration == max_iter:
            break
        mu = normalize((z[:, :, None] * x[:, None, :]).sum(0) / z.sum(0)[:, None], dim=1)
        cov = (z[:, :, None] * (x[:, None, :] - mu[None, :, :]) ** 2).sum((0, 1)) / len(x)
    return z


def plain_affinity(x: Tensor, n_neighbors: int) -> Tensor:
    """Dense W: the n + 1 best cosines of each row but the first."""
    top = (x @ x.T).topk(n_neighbors + 1, dim=1)
    return torch.zeros(len(x), len(x)).to(x).scatter(1, top.indices[:, 1:], top.values[:, 1:])


def plain_assignments(
    z: Tensor, y: Tensor, likelihood: Tensor, w: Tensor, lambda_y: float, lambda_laplacian: float, n: int
) -> Tensor:
    for _ in range(5):
        a = likelihood + lambda_laplacian * (50 / (2 * n)) * (w.T @ z + w @ z)
        z = y**lambda_y * ((a - a.max(1, keepdim=True).values) / 50).exp()
        z = z / z.sum(1, keepdim=True)
    return z


def plain_mta(
    views: Tensor, t: Tensor, *, lambda_q: float = 4.0, lambda_y: float = 0.2, logit_scale: float = 100.0
) -> Tensor:
    """MTA of one image, ``(V, d)``: its logits, ``(K,)``."""
    q = (logit_scale * views @ t.T).softmax(1)
    affinity = q @ q.T
    distances = torch.cdist(views, views, compute_mode="donot_use_mm_for_euclid_dist").sort(1).values[:, 1:]
    width = (distances[:, : int(0.3 * (len(views) - 1))] ** 2).mean(1)
    y = torch.full_like(width, 1 / len(views))
    mode = views[0]
    for _ in range(5):
        density = (-((views - mode) ** 2).sum(1) / width).exp()
        for _ in range(5):
            previous, y = y, ((density + lambda_q * affinity @ y) / lambda_y).softmax(0)
            if (y - previous).norm() < 1e-6:
                break
        for _ in range(5):
            weight = (-((views - mode) ** 2).sum(1) / width).exp() * y
            previous, mode = mode, normalize((weight[:, None] * views).sum(0) / weight.sum(), dim=0)
            if (mode - previous).norm() < 1e-6:
                break
    return logit_scale * mode @ t.T


def plain_zlap(x: Tensor, t: Tensor, *, k: int = 5, gamma: float = 5.0, alpha: float = 0.3) -> Tensor:
    """ZLaP, transductive, without scaling: a dense graph and a dense solve."""
    classes, nodes = len(t), len(t) + len(x)
    graph = torch.zeros(nodes, nodes, dtype=torch.float64)
    images, texts = (x @ x.T).topk(min(k, len(x)), dim=1), (x @ t.T).topk(min(k, classes), dim=1)
    graph[classes:, classes:].scatter_(1, images.indices, images.values.double().clamp_min(0))
    graph[classes:, :classes].scatter_(1, texts.indices, texts.values.double().clamp_min(0) ** gamma)
    graph = (graph + graph.T).fill_diagonal_(0)
    degrees = graph.sum(1)
    scale = degrees.where(degrees > 0, torch.ones_like(degrees)).rsqrt()
    laplacian = torch.eye(nodes, dtype=torch.float64) - alpha * scale[:, None] * graph * scale
    seeds = torch.eye(nodes, classes, dtype=torch.float64)
    return torch.linalg.solve(laplacian, seeds)[classes:]


def plain_tpt(
    views: Tensor,
    model: CLIPTextModelWithProjection,
    prompts: list[list[int]],
    context: Tensor,
    *,
    length: int = CONTEXT_LENGTH,
    selection_p: float = 0.1,
    steps: int = 1,
    lr: float = 5e-3,
    logit_scale: float = 100.0,
) -> Tensor:
    """TPT of one image, ``(V, d)``: every prompt padded to ``length``; logits of view 0, ``(K,)``."""
    ids = torch.tensor([prompt + [0] * (length - len(prompt)) for prompt in prompts])
    ends = torch.tensor([len(prompt) - 1 for prompt in prompts])
    table = model.text_model.embeddings.token_embedding

    def prototypes(context: Tensor) -> Tensor:
        hard, soft = table(ids.clamp_min(0)), context[(-1 - ids).clamp_min(0)]
        embedded = model.text_model.embeddings(inputs_embeds=hard.where(ids[:, :, None] >= 0, soft))
        hidden = model.text_model.encoder(inputs_embeds=embedded, is_causal=True).last_hidden_state
        pooled = model.text_model.final_layer_norm(hidden)[torch.arange(len(ids)), ends]
        return normalize(model.text_projection(pooled), dim=1)

    views = normalize(views, dim=1)
    context = context.clone().requires_grad_()
    optimizer = torch.optim.AdamW([context], lr=lr)
    for step in range(steps):
        log_p = (logit_scale * views @ prototypes(context).T).log_softmax(1)
        if step == 0:
            entropies = -(log_p * log_p.exp()).sum(1)
            selected = entropies.argsort()[: int(len(views) * selection_p)]
        average = log_p[selected].exp().mean(0)
        optimizer.zero_grad()
        (-(average * average.log()).sum()).backward(inputs=[context])
        optimizer.step()
    with torch.no_grad():
        return logit_scale * views[0] @ prototypes(context).T


def golden(prefix: str) -> list[tuple[dict, dict[str, Tensor]]]:
    """Options and tensors of the golden files with this prefix."""
    cases = []
    for path in sorted(GOLDEN.glob(f"{prefix}*.safetensors")):
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            options = json.loads(metadata.get("hyperparameters") or metadata["hparams"])
            names = list(file.keys())
            cases.append((options, {name: file.get_tensor(name) for name in names}))
    return cases


def verify() -> dict[str, float]:
    """Largest deviation of the transcriptions from the golden vectors; raises if one is not the method."""
    deviations: dict[str, list[float]] = {name: [] for name in ("stata", "transclip", "mta", "zlap", "tpt")}

    def compare(name: str, ours: Tensor, expected: Tensor, tolerance: float) -> None:
        torch.testing.assert_close(ours.float(), expected, rtol=0, atol=tolerance)
        deviations[name].append((ours.float() - expected).abs().max().item())

    for options, case in golden("stata_"):
        if len(case["features"]) <= 2500:  # above, the golden vectors follow the published chunking
            compare("stata", plain_stata(case["features"], case["prototypes"], **options), case["z"], 5e-4)
    for options, case in golden("transclip_k"):
        if len(case["features"]) <= 2500 and options.pop("variant") == "text-init":
            z = plain_transclip(case["features"], case["prototypes"], **options)
            compare("transclip", z, case["z"], 5e-4)
    for options, case in golden("mta_"):
        chosen = {name: options[name] for name in ("lambda_q", "lambda_y", "logit_scale")}
        logits = plain_mta(case["in.image_features"], case["in.text_features"], **chosen)
        compare("mta", logits, case["out.logits"], 3e-4)
    for options, case in golden("zlap_transductive"):
        if not options["scale_sim"]:
            chosen = {name: options[name] for name in ("k", "gamma", "alpha")}
            compare("zlap", plain_zlap(case["features"], case["prototypes"], **chosen), case["z"], 5e-6)
    for options, case in golden("tpt_step"):
        model = CLIPTextModelWithProjection(CLIPTextConfig(**options["text_config"])).eval()
        model.load_state_dict({name[2:]: case[name] for name in case if name.startswith("w.")})
        place = (options["n_ctx"], options["split_idx"], options["name_lens"])
        prompts = soft_prompts(model, case["in.token_ids"], *place)
        chosen = {name: options[name] for name in ("selection_p", "steps", "lr", "logit_scale")}
        logits = plain_tpt(
            case["in.view_features"],
            model,
            prompts,
            case["in.ctx_init"],
            length=options["context_length"],
            **chosen,
        )
        compare("tpt", logits, case["out.logits_view0_after"], 3e-4)
    return {name: max(values) for name, values in deviations.items()}


def synthetic(images: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """CLIP-like features, prototypes and labels: two clouds with a gap, images near their class."""
    generator = torch.Generator().manual_seed(seed)

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / WIDTH**0.5

    gap_image, gap_text, directions = gaussian(1, WIDTH), gaussian(1, WIDTH), gaussian(classes, WIDTH)
    labels = torch.arange(images) % classes
    prototypes = normalize(gap_text + 0.7 * directions, dim=1)
    features = normalize(gap_image + 0.4 * directions[labels] + 0.4 * gaussian(images, WIDTH), dim=1)
    return features, prototypes, labels


def measure_stata(repeats: int, quick: bool) -> list[dict]:
    rows = []
    for images, classes in ((64, 1000), (1000, 100), (1000, 1000)):
        features, prototypes, _ = synthetic(images, classes)
        once = ("plain",)
        steps: dict[str, Callable] = {
            "ours": lambda x=features, t=prototypes: stata(x, t),
            "ours, soft counts": lambda x=features, t=prototypes: stata(x, t, soft_beta=True),
        }
        if not (quick and images * classes == 10**6):
            steps["plain"] = lambda x=features, t=prototypes: plain_stata(x, t)
        rows.append({"method": "StatA", "size": f"N={images}, K={classes}, d={WIDTH}"} | timed(steps, repeats, once))
    return rows


def measure_transclip(repeats: int) -> dict:
    features, prototypes, _ = synthetic(1000, 100)
    steps = {
        "ours": lambda: transclip(features, prototypes),
        "plain": lambda: plain_transclip(features, prototypes),
    }
    return {"method": "TransCLIP", "size": f"N=1000, K=100, d={WIDTH}"} | timed(steps, repeats, ("plain",))


def measure_mta(repeats: int) -> dict:
    features, prototypes, _ = synthetic(1000, 1000)
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(1000, 64, WIDTH, generator=generator) / WIDTH**0.5
    views = normalize(features[:, None] + 0.5 * noise, dim=-1)
    steps = {
        "ours": lambda: mta(views, prototypes),
        "plain": lambda: [plain_mta(image, prototypes) for image in views],
    }
    return {"method": "MTA", "size": "1000 images, 64 views, K=1000"} | timed(steps, repeats, ("plain",))


def measure_zlap(repeats: int) -> dict:
    features, prototypes, _ = synthetic(4000, 1000)
    steps = {"ours": lambda: zlap(features, prototypes), "plain": lambda: plain_zlap(features, prototypes)}
    return {"method": "ZLaP", "size": f"N=4000, K=1000, d={WIDTH}"} | timed(steps, repeats, ("plain",))


def measure_tpt(repeats: int, classes: int = 100) -> dict:
    """One image, one step: text encoder of ViT-B's size with random weights, names of 1 to 4 tokens."""
    torch.manual_seed(0)
    config = CLIPTextConfig(projection_dim=WIDTH, bos_token_id=49406, eos_token_id=49407)
    model = CLIPTextModelWithProjection(config).eval()
    names = [torch.randint(1000, 40000, (1 + i % 4,)).tolist() for i in range(classes)]
    token_ids = [[49406, 320, 1125, 539, 320, *name, 269, 49407] for name in names]
    context = model.text_model.embeddings.token_embedding.weight[token_ids[0][1:5]].detach()
    prompts: ContextPrompts = splice_context(model, token_ids, context)
    ids = soft_prompts(model, token_ids, 4)
    views = normalize(torch.randn(64, WIDTH), dim=1)
    steps = {
        "ours": lambda: tpt(views[None], prompts),
        "plain": lambda: plain_tpt(views, model, ids, context),
    }
    difference = (tpt(views[None], prompts).scores[0] - plain_tpt(views, model, ids, context)).abs().max().item()
    row = {"method": "TPT", "size": f"1 image, 64 views, K={classes}"} | timed(steps, repeats, ("plain",))
    return row | {"difference": difference}


def timed(steps: dict[str, Callable], repeats: int, once: tuple[str, ...] = ()) -> dict:
    seconds = interleaved(steps, repeats, [name for name in once if name in steps])
    row: dict = {"seconds": seconds}
    if "plain" in seconds:
        row["speedup"] = seconds["plain"]["best"] / seconds["ours"]["best"]
    return row


def measure_protocol(tasks: int) -> dict:
    """Seconds of the batch-realistic protocol with StatA, K = 1000, in the scenarios with batches of 64."""
    features, prototypes, labels = synthetic(50_000, 1000)
    seconds = {}
    for scenario in ("very-low", "low", "medium"):
        start = time.perf_counter()
        run_tasks(stata, features, prototypes, labels, batch_tasks(labels, scenario, num_tasks=tasks))
        seconds[scenario] = time.perf_counter() - start
    return {"tasks": tasks, "seconds": seconds}


PEAK = """
import re, time, torch
from orion_hf.methods.{method} import {method}
torch.set_num_threads({threads})
torch.manual_seed(0)
prototypes = torch.nn.functional.normalize(torch.randn({classes}, {width}), dim=1)
noise = torch.randn({images}, {width}).div_({width} ** 0.5)
features = torch.nn.functional.normalize(noise.add_(prototypes[torch.arange({images}) % {classes}]), dim=1)
del noise
start = time.perf_counter()
{method}(features, prototypes)
seconds = time.perf_counter() - start
peak = re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1]
print(seconds, int(peak) / 1024)
"""


def measure_peak(method: str, images: int, classes: int, threads: int) -> dict:
    """Seconds and peak memory (MiB, the whole process with torch) of one call in a process of its own.

    The peak is Linux's VmHWM: ru_maxrss of a child starts at what its parent held.
    """
    code = PEAK.format(method=method, images=images, classes=classes, width=WIDTH, threads=threads)
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    seconds, peak = map(float, run.stdout.split())
    return {"method": method, "images": images, "classes": classes, "seconds": seconds, "peak_mib": peak}


def to_markdown(result: dict, command: str) -> str:
    lines = [
        f"`{command}` on {result['machine']}.",
        "",
        "| method | size | plain, s | ours, s | times faster |",
        "|---|---|---|---|---|",
    ]
    for row in result["times"]:
        seconds = row["seconds"]
        plain = f"{seconds['plain']['best']:.2f}" if "plain" in seconds else ""
        speedup = f"{row['speedup']:.0f}" if "speedup" in row else ""
        lines.append(f"| {row['method']} | {row['size']} | {plain} | {seconds['ours']['best']:.3f} | {speedup} |")
        if "ours, soft counts" in seconds:
            soft = seconds["ours, soft counts"]["best"]
            lines.append(f"| {row['method']}, soft counts | {row['size']} | | {soft:.3f} | |")
    lines += ["", "| one call, alone in a process | s | peak memory, MiB |", "|---|---|---|"]
    for row in result["peaks"]:
        size = f"{row['method']}, N={row['images']}, K={row['classes']}, d={WIDTH}"
        lines.append(f"| {size} | {row['seconds']:.1f} | {row['peak_mib']:.0f} |")
    protocol = result["protocol"]
    times = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in protocol["seconds"].items())
    deviations = ", ".join(f"{name} {value:.0e}" for name, value in result["deviations"].items())
    lines += [
        "",
        f"Batch-realistic protocol, StatA, {protocol['tasks']} tasks of 64 images, K=1000: {times}.",
        "",
        f"Largest deviation of the plain transcriptions from the golden vectors: {deviations}.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__ or "", repeats=3)
    parser.add_argument("--quick", action="store_true", help="leave the slowest transcription and sizes out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    deviations = verify()
    times = [
        *measure_stata(args.repeats, args.quick),
        measure_transclip(args.repeats),
        measure_tpt(args.repeats),
    ]
    times += [measure_mta(args.repeats), measure_zlap(args.repeats)]
    peaks = [measure_peak("stata", 1000, 1000, args.threads)]
    if not args.quick:
        peaks.append(measure_peak("zlap", 50_000, 1000, args.threads))
    result = {
        "machine": machine(args.threads),
        "deviations": deviations,
        "times": times,
        "peaks": peaks,
        "protocol": measure_protocol(100 if args.quick else 1000),
    }
    report("methods", result, to_markdown(result, command_line("methods")), args)


if __name__ == "__main__":
    main()

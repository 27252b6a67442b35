"""Pre-train the embedded CLIP from scratch on the procedural world, or measure it.

    python training/pretrain_tiny.py               # write orion_hf/assets/tiny-clip; resumes when stopped
    python training/pretrain_tiny.py --evaluate    # zero-shot accuracy on three seeds of test images

Which images and captions step ``s`` sees depends on ``s`` alone, so a resumed run equals an unbroken one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from numpy.random import RandomState
from safetensors.torch import safe_open, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.nn.functional import normalize
from tqdm import tqdm
from transformers import CLIPConfig, CLIPModel, CLIPProcessor, CLIPTokenizer
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from orion_hf import tiny_world  # noqa: E402
from orion_hf.embedded import load_embedded_clip  # noqa: E402
from orion_hf.tasks import OrionTask  # noqa: E402
from orion_hf.tiny_captions import caption  # noqa: E402
from orion_hf.tiny_world import SIZE, TASKS, pretraining_scene, render, tiny_dataset  # noqa: E402

SEED = 0
NUM_IMAGES = 60_000
WORKERS = 2
BATCH_SIZE = 64  # of each worker; its images are contrasted with its own captions
STEPS = 1_200
WARMUP_STEPS = 100
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.1
MAX_LOGIT_SCALE = math.log(100)
VOCABULARY_SIZE = 1_400
CHECKPOINT_EVERY = 100
VISION = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 3, "patch_size": 8}
TEXT = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 3}
PROJECTION_DIM = 64


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", default=load_embedded_clip(), help="model folder to write, or to evaluate")
    parser.add_argument("--work_dir", default=".cache/pretrain_tiny", help="rendered images and the checkpoint")
    parser.add_argument("--steps", type=int, default=STEPS, help="length of the whole schedule")
    parser.add_argument("--num_images", type=int, default=NUM_IMAGES, help="pre-training images to render")
    parser.add_argument("--evaluate", action="store_true", help="no training: print zero-shot accuracies")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if not args.evaluate:
        pretrain(Path(args.output_dir), Path(args.work_dir), args.steps, args.num_images)
    for line in evaluate(args.output_dir):
        print(line)
    return 0


def pretrain(output_dir: Path, work_dir: Path, steps: int, num_images: int) -> None:
    """Render, learn the vocabulary, then train in ``WORKERS`` processes of one thread each."""
    work_dir.mkdir(parents=True, exist_ok=True)
    render_images(images_path(work_dir, num_images), num_images)
    scenes = [pretraining_scene(i)[0] for i in range(min(num_images, 20_000))]
    processor = build_processor(learn_tokenizer([caption(s, RandomState([SEED, i])) for i, s in enumerate(scenes)]))
    processor.save_pretrained(work_dir / "processor")
    (work_dir / "rendezvous").unlink(missing_ok=True)
    torch.multiprocessing.spawn(train, (output_dir, work_dir, steps, num_images), nprocs=WORKERS)


def train(rank: int, output_dir: Path, work_dir: Path, steps: int, num_images: int) -> None:
    """The CLIP loss on rendered images and random captions; workers average gradients and so stay equal."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    meeting_point = f"file://{(work_dir / 'rendezvous').resolve()}"
    torch.distributed.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=WORKERS)
    images = np.load(images_path(work_dir, num_images), mmap_mode="r")
    scenes = [pretraining_scene(i)[0] for i in range(num_images)]
    processor = CLIPProcessor.from_pretrained(work_dir / "processor")
    mean = torch.tensor(processor.image_processor.image_mean).view(3, 1, 1)
    std = torch.tensor(processor.image_processor.image_std).view(3, 1, 1)
    model = CLIPModel(build_config(processor.tokenizer))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.98),
    )
    checkpoint = work_dir / "checkpoint.safetensors"
    first_step = load_checkpoint(checkpoint, model, optimizer, steps)
    progress = tqdm(range(first_step, steps), "pre-training", initial=first_step, total=steps, disable=rank > 0)
    for step in progress:
        rng = RandomState([SEED, 1, step, rank])
        rows = rng.randint(0, num_images, BATCH_SIZE)
        tokens = processor.tokenizer([caption(scenes[row], rng) for row in rows], padding=True, return_tensors="pt")
        pixels = torch.from_numpy(images[rows]).permute(0, 3, 1, 2) / 255
        loss = model(pixel_values=(pixels - mean) / std, **tokens, return_loss=True).loss
        loss.backward()
        gradient = torch.nn.utils.parameters_to_vector([p.grad for p in parameters])
        torch.distributed.all_reduce(gradient)
        torch.nn.utils.vector_to_parameters(gradient / WORKERS, [p.grad for p in parameters])
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        optimizer.step()
        optimizer.zero_grad()
        model.logit_scale.data.clamp_(0, MAX_LOGIT_SCALE)
        progress.set_postfix(loss=f"{loss.item():.3f}", scale=f"{model.logit_scale.exp().item():.1f}")
        if rank == 0 and ((step + 1) % CHECKPOINT_EVERY == 0 or step + 1 == steps):
            save_checkpoint(checkpoint, model, optimizer, step + 1, steps)
    if rank == 0:
        save_folder(output_dir, model, processor)
    torch.distributed.destroy_process_group()


def learning_rate(step: int, steps: int) -> float:
    if step < WARMUP_STEPS:
        return LEARNING_RATE * (step + 1) / WARMUP_STEPS
    return LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)))


def render_one(index: int) -> np.ndarray:
    return render(*pretraining_scene(index))


def images_path(work_dir: Path, num_images: int) -> Path:
    """Named after the code that draws them, so that a changed world is rendered again."""
    world = hashlib.sha256(Path(tiny_world.__file__).read_bytes()).hexdigest()[:12]
    return work_dir / f"images-{num_images}-{world}.npy"


def render_images(path: Path, num_images: int) -> None:
    """All pre-training images, ``(num_images, 64, 64, 3)`` uint8, rendered once by one process a core."""
    if not path.exists():
        images = np.empty((num_images, SIZE, SIZE, 3), np.uint8)
        with get_context("spawn").Pool(os.cpu_count()) as pool:
            rendered = pool.imap(render_one, range(num_images), chunksize=250)
            for i, image in enumerate(tqdm(rendered, total=num_images, desc="rendering")):
                images[i] = image
        temporary = path.with_suffix(".tmp.npy")
        np.save(temporary, images)
        temporary.replace(path)


def learn_tokenizer(captions: list[str], vocabulary_size: int = VOCABULARY_SIZE) -> CLIPTokenizer:
    """CLIP's byte-level BPE with a vocabulary learned on captions; other words split into known bytes."""
    blank = CLIPTokenizer().backend_tokenizer
    learner = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    learner.normalizer, learner.pre_tokenizer = blank.normalizer, blank.pre_tokenizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    learner.train_from_iterator(
        captions,
        trainers.BpeTrainer(
            vocab_size=vocabulary_size - 258,
            initial_alphabet=alphabet,
            end_of_word_suffix="</w>",
            show_progress=False,
        ),
    )
    learned = json.loads(learner.to_str())["model"]
    # As in OpenAI's vocabulary: bytes, bytes that end a word, merges, then the two special tokens.
    merges = [tuple(pair) for pair in learned["merges"]]
    words = [*alphabet, *(byte + "</w>" for byte in alphabet)]
    words += [word for word in dict.fromkeys(a + b for a, b in merges) if word not in set(words)]
    vocabulary = {word: i for i, word in enumerate([*words, "<|startoftext|>", "<|endoftext|>"])}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=77)


def build_processor(tokenizer: CLIPTokenizer) -> CLIPProcessor:
    side = {"height": SIZE, "width": SIZE}
    image_processor = CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size=side)
    return CLIPProcessor(image_processor=image_processor, tokenizer=tokenizer)


def build_config(tokenizer: CLIPTokenizer) -> CLIPConfig:
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    text = TEXT | ids | {"pad_token_id": tokenizer.pad_token_id, "vocab_size": len(tokenizer)}
    text |= {"intermediate_size": 4 * TEXT["hidden_size"], "projection_dim": PROJECTION_DIM}
    vision = VISION | {
        "intermediate_size": 4 * VISION["hidden_size"],
        "image_size": SIZE,
        "projection_dim": PROJECTION_DIM,
    }
    return CLIPConfig(text_config=text, vision_config=vision, projection_dim=PROJECTION_DIM)


def save_checkpoint(path: Path, model: CLIPModel, optimizer: torch.optim.Optimizer, step: int, steps: int) -> None:
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for i, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{i}.{name}": tensor.clone() for name, tensor in state.items()}
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary, metadata={"step": str(step), "steps": str(steps)})
    temporary.replace(path)


def load_checkpoint(path: Path, model: CLIPModel, optimizer: torch.optim.Optimizer, steps: int) -> int:
    """Restore model and optimizer; the step to go on from, 0 when there is no checkpoint."""
    if not path.exists():
        return 0
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    if int(metadata["steps"]) != steps:
        raise SystemExit(
            f"{path} is of a run of {metadata['steps']} steps: delete it or pass --steps {metadata['steps']}"
        )
    model.load_state_dict({n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")})
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, i, key = name.split(".")
            state.setdefault(int(i), {})[key] = tensor
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
    return int(metadata["step"])


def save_folder(folder: Path, model: CLIPModel, processor: CLIPProcessor) -> None:
    """Weights are stored in fp16 to stay small; config.json says float32, which they are loaded in."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        model.half().save_pretrained(temporary)
        processor.save_pretrained(temporary)
        config = json.loads(Path(temporary, "config.json").read_text("utf-8"))
        for part in (config, config["text_config"], config["vision_config"]):
            part["dtype"] = "float32"
        Path(temporary, "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        digest = hashlib.sha256(Path(temporary, "model.safetensors").read_bytes()).hexdigest()
        Path(temporary, "checksums.json").write_text(json.dumps({"model.safetensors": digest}, indent=2) + "\n")
        for file in sorted(Path(temporary).iterdir()):
            file.chmod(0o644)
            file.replace(folder / file.name)


@torch.no_grad()
def evaluate(folder: str | Path, seeds: tuple[int, ...] = (0, 1, 2), images_per_class: int = 40) -> list[str]:
    """A Markdown table: zero-shot top-1 with the evaluation template, mean cosine between prototypes."""
    model, processor = CLIPModel.from_pretrained(folder).eval(), CLIPProcessor.from_pretrained(folder)
    lines = ["| task | classes | chance | " + " | ".join(f"seed {seed}" for seed in seeds) + " | mean | cosine |"]
    lines.append("|---" * (5 + len(seeds)) + "|")
    for name in TASKS:
        task = OrionTask.from_name(name)
        tokens = processor.tokenizer(task.prompts(), padding=True, return_tensors="pt")
        prototypes = normalize(model.get_text_features(**tokens).pooler_output, dim=-1)
        accuracies = []
        for seed in seeds:
            data = tiny_dataset(name, "test", seed=seed, images_per_class=images_per_class)
            pixels = processor.image_processor(data["image"][:], return_tensors="pt")["pixel_values"]
            image_embeds = torch.cat([model.get_image_features(p).pooler_output for p in pixels.split(256)])
            hits = (image_embeds @ prototypes.T).argmax(-1) == torch.tensor(data["label"][:])
            accuracies.append(100 * hits.float().mean().item())
        k = len(prototypes)
        cosine = ((prototypes @ prototypes.T).sum() - k).item() / (k * (k - 1))
        figures = " | ".join(f"{a:.1f} %" for a in accuracies)
        lines.append(f"| {name} | {k} | {100 / k:.1f} % | {figures} | {np.mean(accuracies):.1f} % | {cosine:.2f} |")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())

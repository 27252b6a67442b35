"""Zero-shot classification of images against 1000 labels: the stock pipeline, ours, and the bare vision tower.

    python -m benchmarks.pipeline --markdown --json pipeline.json     # some ten minutes, mostly the stock pipeline

Models of ViT-B/32 and ViT-B/16 size with random weights, the 1000 ImageNet names in "a photo of a {}.", and CLIP's
tokenizer class with a vocabulary learned on these prompts. "Tower" is the floor: preprocessing and
``get_image_features``, no text. Ours is timed from the second image on; the first call, which encodes the labels, is
shown apart.
"""

import time
import warnings

import numpy as np
import torch
from PIL import Image
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer, pipeline
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from benchmarks.harness import arguments, command_line, interleaved, machine, report
from orion_hf import OrionTask, OrionZeroShotImageClassificationPipeline
from training.pretrain_tiny import learn_tokenizer

BATCH = 32
VOCABULARY_SIZE = 4_096


def imagenet_task() -> OrionTask:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return OrionTask.from_name("imagenet", unique_names=True)


def clip_of_base_size(patch_size: int, tokenizer: CLIPTokenizer) -> CLIPModel:
    """CLIP ViT-B with random weights; speed does not depend on what they are."""
    torch.manual_seed(0)
    text = {
        "vocab_size": 49_408,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    return CLIPModel(CLIPConfig(text_config=text, vision_config={"patch_size": patch_size})).eval()


def pictures(count: int) -> list[Image.Image]:
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 255, (375, 500, 3), dtype=np.uint8)) for _ in range(count)]


def measure(patch_size: int, repeats: int) -> dict:
    task = imagenet_task()
    tokenizer = learn_tokenizer(task.prompts(), VOCABULARY_SIZE)
    model, image_processor = clip_of_base_size(patch_size, tokenizer), CLIPImageProcessorPil()
    parts = {"model": model, "tokenizer": tokenizer, "image_processor": image_processor, "device": "cpu"}
    stock = pipeline("zero-shot-image-classification", **parts)
    ours = OrionZeroShotImageClassificationPipeline(**parts, orion_task=task)
    call = {"candidate_labels": list(task.class_names), "hypothesis_template": task.eval_template}
    images = pictures(BATCH)

    def tower(batch: list[Image.Image]) -> None:
        with torch.inference_mode():
            for image in batch:
                model.get_image_features(**image_processor(images=[image], return_tensors="pt"))

    def tower_batched(batch: list[Image.Image]) -> None:
        with torch.inference_mode():
            pixel_values = torch.cat(
                [image_processor(images=[image], return_tensors="pt")["pixel_values"] for image in batch]
            )
            model.get_image_features(pixel_values)

    start = time.perf_counter()
    ours(images[0], **call)
    first = time.perf_counter() - start
    one = interleaved(
        {
            "stock pipeline": lambda: stock(images[0], **call),
            "ours": lambda: ours(images[0], **call),
            "tower": lambda: tower(images[:1]),
        },
        repeats,
        once=("stock pipeline",),
    )
    many = interleaved(
        {
            "ours": lambda: ours(images, batch_size=BATCH, **call),
            "tower": lambda: tower_batched(images),
        },
        repeats,
    )
    expected = {entry["label"]: entry["score"] for entry in stock(images[1], **call)}
    difference = max(abs(expected[entry["label"]] - entry["score"]) for entry in ours(images[1], **call))
    return {
        "first_call": first,
        "one_image": one,
        f"batch_of_{BATCH}": many,
        "largest_score_difference": difference,
    }


def to_markdown(result: dict, command: str) -> str:
    lines = [
        f"`{command}` on {result['machine']}. Seconds are best (median) of the runs; ratios are of the best.",
        "",
    ]
    lines += [
        "| model | workload | variant | seconds | ours is faster by | over the tower |",
        "|---|---|---|--:|--:|--:|",
    ]
    for name, found in result["models"].items():
        for workload in ("one_image", f"batch_of_{BATCH}"):
            runs = found[workload]
            for variant, run in runs.items():
                faster = "" if variant != "stock pipeline" else f"{run['best'] / runs['ours']['best']:.0f}x"
                over = "" if variant == "tower" else f"{run['best'] / runs['tower']['best']:.2f}x"
                seconds = f"{run['best']:.3f} ({run['median']:.3f})"
                lines += [f"| {name} | {workload.replace('_', ' ')} | {variant} | {seconds} | {faster} | {over} |"]
    for name, found in result["models"].items():
        lines += [
            "",
            f"{name}: the first call of ours, which encodes the 1000 labels, took {found['first_call']:.2f} s; largest "
            f"difference of a score from the stock pipeline's: {found['largest_score_difference']:.1e}.",
        ]
    return "\n".join(lines)


def main() -> None:
    args = arguments(__doc__).parse_args()
    torch.set_num_threads(args.threads)
    models = {f"ViT-B/{patch_size}": measure(patch_size, args.repeats) for patch_size in (32, 16)}
    result = {"machine": machine(args.threads), "models": models}
    report("pipeline", result, to_markdown(result, command_line("pipeline")), args)


if __name__ == "__main__":
    main()

"""A tiny CLIP with random weights, saved the way the Hub's CLIP repositories are."""

from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPProcessor,
    CLIPTextConfig,
    CLIPTokenizer,
    CLIPVisionConfig,
)

from orion_hf.tasks import OrionTask

TASK = OrionTask(
    name="pets",
    class_names=("cat", "dog", "sea lion"),
    templates=("a photo of a {}", "a picture of a {}", "an image of a {}"),
    eval_template="a photo of a {}.",
)


def tiny_tokenizer() -> CLIPTokenizer:
    """CLIP's tokenizer with bytes for words: every text has tokens, and the end of text is the highest id."""
    letters = sorted(ByteLevel.alphabet())
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={word: index for index, word in enumerate(words)}, merges=[], model_max_length=77)


def tiny_config(tokenizer: CLIPTokenizer, width: int = 32, projection_dim: int = 16) -> CLIPConfig:
    towers = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": 2}
    text = CLIPTextConfig(
        **towers,
        num_hidden_layers=2,
        vocab_size=len(tokenizer),
        projection_dim=projection_dim,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    vision = CLIPVisionConfig(**towers, num_hidden_layers=1, image_size=16, patch_size=8)
    return CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=projection_dim)


def save_tiny_clip(folder: Path, seed: int = 0, width: int = 32, projection_dim: int = 16) -> Path:
    """Write a `CLIPModel` with its processor; weights depend on ``seed`` only."""
    torch.manual_seed(seed)
    tokenizer = tiny_tokenizer()
    model = CLIPModel(tiny_config(tokenizer, width, projection_dim))
    model.save_pretrained(folder)
    images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    CLIPProcessor(images, tokenizer).save_pretrained(folder)
    return folder


def train_a_little(model) -> None:
    """Give the LoRA matrices known values, B too: it starts at zero and would hide every mistake."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)

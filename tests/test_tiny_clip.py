"""The embedded CLIP: an ordinary folder, the recorded weights, and zero-shot accuracy with room both ways."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoProcessor, AutoTokenizer, CLIPModel, CLIPTokenizer, pipeline

from orion_hf.embedded import load_embedded_clip, resolve_model_id
from orion_hf.tasks import OrionTask
from orion_hf.tiny_world import TASKS, tiny_dataset

FOLDER = Path(load_embedded_clip())
# Zero-shot top-1 of the shipped weights on seed 0: far above chance, clearly below the ceiling.
ACCURACY = {"tiny-shapes": (0.45, 0.80), "tiny-textures": (0.45, 0.80), "tiny-land": (0.45, 0.80)}


@pytest.fixture(scope="module")
def clip():
    return CLIPModel.from_pretrained(FOLDER).eval(), AutoProcessor.from_pretrained(FOLDER)


def test_weights_are_the_recorded_ones_and_small():
    recorded = json.loads((FOLDER / "checksums.json").read_text("utf-8"))
    assert hashlib.sha256((FOLDER / "model.safetensors").read_bytes()).hexdigest() == recorded["model.safetensors"]
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 8_000_000


def test_stored_in_half_precision_run_in_single(clip):
    from safetensors import safe_open

    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"F16"}  # noqa: SIM118
    assert clip[0].dtype == torch.float32


def test_config_and_tokenizer_agree(clip):
    model, processor = clip
    text, tokenizer = model.config.text_config, processor.tokenizer
    assert (text.bos_token_id, text.eos_token_id, text.pad_token_id, text.vocab_size) == (
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        len(tokenizer),
    )
    assert text.eos_token_id != 2 and text.max_position_embeddings == tokenizer.model_max_length == 77
    assert model.config.vision_config.image_size == processor.image_processor.crop_size["height"] == 64


def test_tokenizer_round_trips_and_knows_no_unknown_word():
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    assert isinstance(tokenizer, CLIPTokenizer) and isinstance(CLIPTokenizer.from_pretrained(FOLDER), CLIPTokenizer)
    for prompt in OrionTask.from_name("tiny-land").prompts():
        ids = tokenizer(prompt)["input_ids"]
        assert ids[0] == tokenizer.bos_token_id and ids[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(ids, skip_special_tokens=True).replace(" .", ".") == prompt
        assert len(ids) <= 24  # frequent words of the world are single tokens, rare ones a few
    for text in (
        "Überraschung 42 'quoted' xyzzy",
        "a photo of a \N{SNOWMAN} and \N{GRINNING FACE}",
        "日本語",
    ):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids and tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids).replace(" ", "") == text.lower().replace(" ", "")


@pytest.mark.parametrize("name", TASKS)
def test_zero_shot_accuracy_is_far_above_chance_and_below_the_ceiling(clip, name):
    model, processor = clip
    task = OrionTask.from_name(name)
    data = tiny_dataset(name, "test", images_per_class=max(10, 400 // len(task.class_names)))
    inputs = processor(text=task.prompts(), images=data["image"][:], padding=True, return_tensors="pt")
    with torch.no_grad():
        predicted = model(**inputs).logits_per_image.argmax(-1)
    accuracy = (predicted == torch.tensor(data["label"][:])).float().mean().item()
    low, high = ACCURACY[name]
    assert low < accuracy < high


def test_stock_pipeline_classifies_an_image():
    task = OrionTask.from_name("tiny-land")
    data = tiny_dataset("tiny-land", "test", images_per_class=4)
    classify = pipeline("zero-shot-image-classification", model=str(FOLDER))
    answers = classify(
        data["image"][:], candidate_labels=list(task.class_names), hypothesis_template=task.eval_template
    )
    hits = [answer[0]["label"] == task.class_names[label] for answer, label in zip(answers, data["label"], strict=True)]
    assert sum(hits) / len(hits) > 0.35
    assert sum(scored["score"] for scored in answers[0]) == pytest.approx(1, abs=1e-4)


def test_model_names():
    assert resolve_model_id("embedded:tiny-clip") == load_embedded_clip() == str(FOLDER)
    assert resolve_model_id("openai/clip-vit-base-patch16") == "openai/clip-vit-base-patch16"
    with pytest.raises(ValueError, match=r"unknown embedded model 'embedded:huge'; choose embedded:tiny-clip"):
        resolve_model_id("embedded:huge")


def test_pretraining_goes_on_from_a_checkpoint_as_if_never_stopped(clip, tmp_path):
    from training.pretrain_tiny import load_checkpoint, save_checkpoint

    tokens = clip[1].tokenizer(["a red star", "a river of sand"], padding=True, return_tensors="pt")

    def fresh():
        torch.manual_seed(0)
        model = CLIPModel(clip[0].config)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(model, optimizer):
        model(**tokens, pixel_values=torch.ones(2, 3, 64, 64), return_loss=True).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = fresh()
    step(model, optimizer)
    save_checkpoint(tmp_path / "checkpoint.safetensors", model, optimizer, step=1, steps=2)
    step(model, optimizer)

    resumed, resumed_optimizer = fresh()
    assert load_checkpoint(tmp_path / "missing", resumed, resumed_optimizer, steps=2) == 0
    assert load_checkpoint(tmp_path / "checkpoint.safetensors", resumed, resumed_optimizer, steps=2) == 1
    step(resumed, resumed_optimizer)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.safetensors"]
    with pytest.raises(SystemExit, match="run of 2 steps"):
        load_checkpoint(tmp_path / "checkpoint.safetensors", resumed, resumed_optimizer, steps=3)

"""Cards: what they say and must not say, the Hub's rules for their metadata, and the pages checked in."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from hub_cards import check_card
from huggingface_hub import ModelCard, constants
from safetensors.torch import save_file
from torch.nn import functional as F

from orion_hf import card as card_module
from orion_hf import cli
from orion_hf.card import Results, dataset_names, dataset_page, model_card, paper_tables, write_heatmap
from orion_hf.configuration_orion import OrionConfig
from orion_hf.hub import _stage
from orion_hf.repository import write_prototypes
from orion_hf.tasks import OrionTask

B16, COMMIT = "openai/clip-vit-base-patch16", "57c216476eefef5ab752ec549e440a49ae4ae5f3"
RESULTS = {
    "top1": {"CLIP": 40.98, "averaged prompts": 43, "ORION": {"mean": 50.876, "interval": 0.42}},
    "protocol": "zero-shot on the test split, 3 seeds",
    "command": "orion-hf evaluate --task eurosat | tee log",
    "dataset": {"name": "EuroSAT", "id": "org/eurosat", "split": "test"},
}


def save_model(folder: Path, task: OrionTask | None = None, base: str = B16, merged: bool = False, **extra) -> Path:
    """A repository as `save_pretrained` leaves it, of tensors that nobody trained."""
    task = task or OrionTask.from_name("eurosat")
    folder.mkdir(parents=True, exist_ok=True)
    training = {"method": "orion", "learning_rate": 5e-6, "num_train_epochs": 20, "geometry_before": {"a": 1}}
    config = OrionConfig(task, base, None if base.startswith("embedded:") else COMMIT, training)
    config.save_json(folder / "orion_config.json")
    if merged:
        (folder / "config.json").write_text("{}")
        save_file({"x": torch.zeros(1)}, folder / "model.safetensors")
    else:
        adapter = {"peft_type": "LORA", "base_model_name_or_path": base, "revision": config.base_revision}
        (folder / "adapter_config.json").write_text(json.dumps(adapter))
        save_file({"x": torch.zeros(1)}, folder / "adapter_model.safetensors")
    anchors = F.normalize(torch.ones(task.num_classes, 12) + torch.eye(task.num_classes, 12), dim=-1)
    write_prototypes(folder / "prototypes.safetensors", torch.eye(task.num_classes, 12), anchors)
    for name, content in extra.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def metadata(text: str) -> dict:
    return yaml.safe_load(text.split("---\n")[1])


def section(text: str, title: str) -> str:
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_card_of_an_adapter_with_measured_results(tmp_path):
    save_model(tmp_path, results=RESULTS)
    (tmp_path / "training_log.jsonl").write_text('{"orthogonality": 80.5}\nbroken\n{"orthogonality": 0.25}\n')
    text = str(model_card(tmp_path, "org/orion-eurosat", license="mit"))
    assert metadata(text) == {
        "license": "mit",
        "library_name": "peft",
        "pipeline_tag": "zero-shot-image-classification",
        "base_model": B16,
        "base_model_relation": "adapter",
        "datasets": ["org/eurosat"],
        "tags": ["orion", "clip", "lora"],
        "orion": {"task": "eurosat", "classes": 10},
        "model-index": [
            {
                "name": "orion-eurosat",
                "results": [
                    {
                        "task": {"type": "zero-shot-image-classification"},
                        "dataset": {"name": "EuroSAT", "type": "org/eurosat", "split": "test"},
                        "metrics": [{"type": "accuracy", "value": 50.88, "name": "top-1 accuracy (%)"}],
                    }
                ],
            }
        ],
    }
    accuracy = section(text, "Accuracy")
    assert "| ORION | 50.88 ± 0.42 |" in accuracy and "| CLIP | 40.98 |" in accuracy
    assert "3 seeds" in accuracy and "&#124; tee log" in accuracy
    measured, paper = accuracy.split("**The paper's figures**")
    assert "| CLIP ViT-B/16 | 41.3 | 51.33 |" in paper and "not measured here" in paper and "51.33" not in measured
    assert "ViT-L" not in paper and "MetaCLIP" not in paper
    training = section(text, "Training")
    assert "| learning&#95;rate | 5e-06 |" in training and "80.5 and 0.25" in training and "geometry" not in training
    assert "| distance to orthonormality |" in text and "| effective rank |" in text
    assert re.search(
        r"\| mean cosine between two classes \| 0\.93\d \| 0\.000 \|",
        section(text, "Geometry of the prototypes"),
    )
    assert "`0` Annual Crop Land · `1` Forest" in text and "<details>" not in text
    assert f'revision="{COMMIT}"' in text and "2602.19530" in text
    assert "revision `merged`" not in text
    assert str(model_card(tmp_path, "org/orion-eurosat", license="mit")) == text, "cards are deterministic"


def test_what_was_not_measured_is_not_in_the_card(tmp_path):
    text = str(model_card(save_model(tmp_path), "org/orion-eurosat"))
    data = metadata(text)
    assert data.keys().isdisjoint({"model-index", "model_name", "license", "datasets"})
    assert "has not been measured" in section(text, "Accuracy").split("**The paper's")[0]
    (tmp_path / "prototypes.safetensors").unlink()
    assert "## Geometry" not in str(model_card(tmp_path, "org/orion-eurosat"))
    (tmp_path / "results.json").write_text(json.dumps({"top1": {"CLIP": 40}}))
    text = str(model_card(tmp_path, "org/orion-eurosat"))
    assert "| CLIP | 40.00 |" in text and "model-index" not in metadata(text)


@pytest.mark.parametrize(
    ("base", "rows"),
    [
        (B16, ["CLIP ViT-B/16"]),
        ("openai/clip-vit-large-patch14", ["CLIP ViT-L/14"]),
        ("facebook/metaclip-b16-400m", ["MetaCLIP (architecture not stated)"]),
        ("openai/clip-vit-base-patch32", []),
        ("openai/clip-vit-large-patch14-336", []),
    ],
)
def test_the_papers_figures_are_for_the_papers_models_and_classes_only(tmp_path, base, rows):
    text = str(model_card(save_model(tmp_path / "a", base=base), "org/x"))
    assert [
        row for row in re.findall(r"^\| (.+?) \|", section(text, "Accuracy"), re.MULTILINE) if "CLIP" in row
    ] == rows
    other = replace(OrionTask.from_name("eurosat"), class_names=("wood", "field"))
    assert "paper's figures" not in str(model_card(save_model(tmp_path / "b", other, base), "org/x"))


def test_merged_and_embedded(tmp_path):
    text = str(model_card(save_model(tmp_path / "full", merged=True), "org/x", revision="merged"))
    data = metadata(text)
    assert (data["library_name"], data["base_model_relation"]) == ("transformers", "finetune")
    assert 'model="org/x", revision="merged"' in text and "peft" not in section(text, "Use")

    embedded = save_model(tmp_path / "tiny", OrionTask.from_name("tiny-land"), "embedded:tiny-clip", results=RESULTS)
    text = str(model_card(embedded, "org/x", merged_revision=True))
    data = metadata(text)
    assert (
        data["license"] == "apache-2.0" and "base_model" not in data and data["orion"]["base"] == "embedded:tiny-clip"
    )
    assert "from transformers import pipeline" not in text, "stock tools cannot find this base"
    assert 'revision="merged"' in text and "paper's figures" not in text and check_card(text) == ([], [])

    many = OrionTask.from_names([f"kind {i}" for i in range(21)])
    text = str(model_card(save_model(tmp_path / "many", many), "org/x"))
    assert "<details><summary>21 classes" in text and "21 prototypes in 12 dimensions cannot" in text


def test_cards_pass_the_hubs_validation(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    for number, (base, merged) in enumerate(
        [(B16, False), (B16, True), ("embedded:tiny-clip", False), ("/data/x", True)]
    ):
        folder = save_model(tmp_path / str(number), base=base, merged=merged, results=RESULTS)
        card = model_card(folder, "org/x", license="cc-by-4.0")
        card.validate()
        assert check_card(str(card)) == ([], []) and "/data/x" not in str(card)
        assert ModelCard(str(card)).data.eval_results[0].metric_value == 50.88
    with pytest.raises(ValueError, match="license"):
        model_card(folder, "org/x", license="mine").validate()


@pytest.mark.parametrize(
    "content",
    [
        [], {}, {"top1": {}}, {"top1": 50}, {"top1": {"ORION": "50"}}, {"top1": {"ORION": 101}},
        {"top1": {"ORION": -1}},
        {"top1": {"ORION": float("nan")}}, {"top1": {"ORION": True}}, {"top1": {"ORION": {"mean": 1, "interval": "x"}}},
        {"top1": {"ORION": 10**400}}, {"top1": {"CLIP": 0.41, "ORION": 0.51}},
    ],
)  # fmt: skip
def test_wrong_results_are_refused(tmp_path, content):
    (tmp_path / "results.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"results\.json"):
        Results.from_json_file(tmp_path / "results.json")


def test_heatmap_is_drawn_if_it_can_be(tmp_path, monkeypatch):
    folder = save_model(tmp_path)
    assert write_heatmap(folder, tmp_path / "gram_heatmaps.png")
    first = (tmp_path / "gram_heatmaps.png").read_bytes()
    assert first.startswith(b"\x89PNG") and "](gram_heatmaps.png)" in str(model_card(folder, "org/x"))
    (tmp_path / "gram_heatmaps.png").unlink()
    assert (
        write_heatmap(folder, tmp_path / "gram_heatmaps.png") and (tmp_path / "gram_heatmaps.png").read_bytes() == first
    )
    (tmp_path / "gram_heatmaps.png").unlink()
    monkeypatch.setattr(card_module, "find_spec", lambda name: None)
    assert not write_heatmap(folder, tmp_path / "gram_heatmaps.png")
    assert "gram_heatmaps.png" not in str(model_card(folder, "org/x"))


def test_pages_of_the_data_sets_are_up_to_date(root, tmp_path, capsys):
    assert cli.main(["card", "--all", "--output", str(root / "model_cards"), "--check"]) == 0
    assert len(dataset_names()) == 11
    printed = paper_tables()["tables"]["zero_shot"]
    for name, column in (("eurosat", "EuroSAT"), ("oxford_pets", "Pets"), ("imagenet", "ImageNet")):
        page = dataset_page(name)
        for row in ("CLIP ViT-B/16", "CLIP ViT-L/14"):
            assert f"| {row} | {printed[row][column]} | {printed[f'{row} + ORION'][column]} |" in page
        task = OrionTask.from_name(name, unique_names=False) if name != "imagenet" else None
        assert task is None or all(template in page for template in task.templates)
    assert cli.main(["card", "--all", "--output", str(tmp_path), "--check"]) == 1
    assert cli.main(["card", "--all", "--output", str(tmp_path)]) == 0
    assert cli.main(["card", "--all", "--output", str(tmp_path), "--check"]) == 0
    (tmp_path / "dtd.md").write_text("stale")
    capsys.readouterr()
    assert cli.main(["card", "--all", "--output", str(tmp_path), "--check"]) == 1
    assert capsys.readouterr().err == f"orion-hf card: {tmp_path / 'dtd.md'} is not up to date\n"


def test_card_command_for_a_model(tmp_path, capsys):
    folder = save_model(tmp_path / "orion-eurosat")
    assert cli.main(["card", str(folder), "--license", "mit"]) == 0
    text = (folder / "README.md").read_text()
    assert 'model="your-name/orion-eurosat"' in text and (folder / "gram_heatmaps.png").is_file()
    assert cli.main(["card", str(folder), "--license", "mit", "--check"]) == 0
    assert cli.main(["card", str(folder), "--repo", "org/y", "--output", str(tmp_path / "y.md")]) == 0
    assert 'model="org/y"' in (tmp_path / "y.md").read_text()
    capsys.readouterr()
    for argv in ([], [str(tmp_path)], [str(folder), "--repo", "a b"]):
        assert cli.main(["card", *argv]) == 2
    assert capsys.readouterr().err.count("orion-hf card: ") == 3


def test_the_repository_of_a_vit_b16_is_under_8_mb(tmp_path):
    """Rank 8 on 12 layers of width 512, CLIP's tokenizer (tokens longer than the real ones), ImageNet's classes."""
    with pytest.warns(UserWarning, match="missile"):
        task = OrionTask.from_name("imagenet")
    folder = save_model(tmp_path / "imagenet", task)
    shapes = [*[(8, 512), (512, 8)] * 4, (8, 512), (2048, 8), (8, 2048), (512, 8)]
    save_file(
        {f"layer{n}.{i}": torch.randn(shape) for n in range(12) for i, shape in enumerate(shapes)},
        folder / "adapter_model.safetensors",
    )
    write_prototypes(folder / "prototypes.safetensors", torch.randn(1000, 512), torch.randn(1000, 512))
    vocab = {f"{i:05x}</w>": i for i in range(49408)}
    merges = [[f"{i % 4096:04x}", f"{i // 4096:02x}</w>"] for i in range(48894)]
    tokenizer = {"version": "1.0", "model": {"type": "BPE", "vocab": vocab, "merges": merges}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, indent=2))
    stage = tmp_path / "stage"
    stage.mkdir()
    _stage(folder, stage, "org/orion-imagenet", "main", None, merged_revision=False)
    sizes = {path.name: path.stat().st_size for path in stage.iterdir()}
    assert sizes["adapter_model.safetensors"] > 3_500_000 and sizes["tokenizer.json"] > 1_700_000
    assert sum(sizes.values()) < 8_000_000, sizes
    assert json.loads((stage / "tokenizer.json").read_text()) == tokenizer

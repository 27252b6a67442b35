"""Inspecting a model: what its files say, geometry and predictions as computed by hand."""

import io
import itertools
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from huggingface_hub import HfApi, constants
from PIL import Image
from tiny_clip_folder import TASK, save_tiny_clip, train_a_little
from transformers import AutoImageProcessor, CLIPModel
from transformers.utils import hub as transformers_hub

from orion_hf.commands import inspect
from orion_hf.geometry import prototype_geometry
from orion_hf.modeling_orion import OrionCLIPTextModel
from orion_hf.repository import PROTOTYPES_NAME
from orion_hf.tasks import OrionTask

HOSTILE = "<img src=x onerror=alert(1)> | [a](b)"


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return save_tiny_clip(tmp_path_factory.mktemp("clip") / "tiny")


def adapter(clip, task=TASK):
    model = OrionCLIPTextModel.from_pretrained(clip, dtype=torch.float32)
    model.task = task
    model.add_lora(rank=4)
    train_a_little(model)
    return model


@pytest.fixture(scope="module")
def saved(clip, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    model = adapter(clip)
    model.save_pretrained(folder / "adapter")
    model.save_pretrained(folder / "merged", merged=True)
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Four noisy images of each class, as a folder with a sub-folder a class."""
    folder, noise = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for name, number in itertools.product(TASK.class_names, range(4)):
        (folder / name).mkdir(exist_ok=True)
        Image.fromarray(noise.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(folder / name / f"{number}.png")
    return folder


def cell(text, name):
    """What stands right of a name in the printed tables."""
    return re.search(rf"^{re.escape(name)}  +(.*)$", text, re.MULTILINE)[1].split("  ")


def test_says_what_it_is_and_what_it_needs(clip, saved, capsys):
    assert inspect.main([str(saved / "adapter")]) == 0
    text = capsys.readouterr().out
    model = OrionCLIPTextModel.from_pretrained(clip)
    lora = sum(4 * sum(m.weight.shape) for n, m in model.named_modules() if re.search(r"_proj$|fc[12]$", n))
    total = sum(p.numel() for p in model.parameters())
    assert cell(text, "kind") == ["adapter"] and cell(text, "needs") == [str(clip)]
    assert cell(text, "parameters of the text encoder") == [f"{total:,}"]
    assert cell(text, "trained (LoRA)") == [f"{lora:,}, {100 * lora / (lora + total):.2f} % of all"]
    size = (saved / "adapter" / "adapter_model.safetensors").stat().st_size
    assert cell(text, "adapter_model.safetensors") == [f"{size:,} bytes"]
    assert all(name in text for name in TASK.class_names)


def test_geometry_and_pairs(clip, saved, capsys):
    inspect.main([str(saved / "adapter")])
    text = capsys.readouterr().out
    before = OrionCLIPTextModel.from_pretrained(clip)
    before.task = TASK
    v, x = before.prototypes(TASK.templates), adapter(clip).prototypes(TASK.templates)
    geometry = prototype_geometry(x, v)
    assert float(cell(text, "mean displacement of a class")[-1]) == pytest.approx(geometry.mean_displacement, abs=1e-4)
    first, last = (cell(text, "largest cosine between two classes")[i] for i in (0, -1))
    assert float(first) == pytest.approx(prototype_geometry(v).max_cosine, abs=1e-4)
    assert float(last) == pytest.approx(geometry.max_cosine, abs=1e-4)
    i, j = max(itertools.combinations(range(3), 2), key=lambda pair: (v[pair[0]] @ v[pair[1]]).item())
    ranked = text.split("The most entangled pairs before")[1].splitlines()[4]
    assert re.split("  +", ranked) == [
        TASK.class_names[i], TASK.class_names[j], f"{(v[i] @ v[j]).item():.3f}", f"{(x[i] @ x[j]).item():.3f}"
    ]  # fmt: skip


def test_entangled_pairs_are_those_of_all_pairs(monkeypatch):
    monkeypatch.setattr(inspect, "_BLOCK", 7)
    rows = torch.nn.functional.normalize(torch.randn(40, 5, generator=torch.Generator().manual_seed(0)), dim=-1)
    cosines = {(i, j): (rows[i] @ rows[j]).item() for i, j in itertools.combinations(range(40), 2)}
    found = inspect.entangled_pairs(rows, 10)
    assert [cosines[pair] for pair in found] == pytest.approx(sorted(cosines.values(), reverse=True)[:10], abs=1e-6)
    assert inspect.entangled_pairs(rows[:3], 10) == sorted(
        inspect.entangled_pairs(rows[:3], 3), key=lambda p: -cosines[p]
    )


def test_confusions_by_hand():
    labels = torch.tensor([0, 0, 0, 1, 1, 2])
    before, after = torch.tensor([1, 1, 2, 1, 0, 2]), torch.tensor([0, 0, 2, 2, 2, 2])
    mended, introduced = inspect.confusion_changes(labels, before, after, ["a", "b", "c"])
    assert mended == [("a", "b", "2", "0"), ("b", "a", "1", "0")]
    assert introduced == [("b", "c", "0", "2")]  # a taken for c once before and once after is no change


def test_images(clip, saved, pictures, capsys, tmp_path):
    flags = ["--images", str(pictures), "--split", "train", "--html", str(tmp_path / "page.html")]
    assert inspect.main([str(saved / "adapter"), *flags]) == 0
    text = capsys.readouterr().out
    processor, towers = AutoImageProcessor.from_pretrained(clip), CLIPModel.from_pretrained(clip)
    paths = [(k, path) for k, name in enumerate(TASK.class_names) for path in sorted((pictures / name).iterdir())]
    with torch.inference_mode():
        pixel_values = processor([Image.open(path) for _, path in paths], return_tensors="pt")["pixel_values"]
        features = towers.get_image_features(pixel_values=pixel_values).pooler_output
    labels = torch.tensor([k for k, _ in paths])
    base = OrionCLIPTextModel.from_pretrained(clip)
    base.task = TASK
    right = {}
    for name, prototypes in (("CLIP", base.prototypes()), ("ORION", adapter(clip).prototypes())):
        right[name] = (features @ prototypes.T).argmax(1) == labels
        assert cell(text, name)[-1].strip() == f"{100 * right[name].double().mean().item():.2f}"
    mended = int((~right["CLIP"] & right["ORION"]).sum())
    assert f"From CLIP to ORION: {mended} images were mended" in text
    within, between, total = map(float, (v for v in cell(text, "true classes")[:-1] if v))
    assert within + between == pytest.approx(total, abs=2e-4) and total > 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 3 and "Confusions introduced" in page


def test_merged_and_training_free(clip, saved, pictures, capsys, tmp_path):
    assert inspect.main([str(saved / "merged"), "--images", str(pictures), "--split", "train"]) == 0
    merged = capsys.readouterr().out
    assert cell(merged, "kind") == ["merged model"] and cell(merged, "needs") == ["nothing else"]
    inspect.main([str(saved / "adapter"), "--images", str(pictures), "--split", "train"])
    apart = capsys.readouterr().out
    assert cell(merged, "averaged prompts") == cell(apart, "averaged prompts")
    assert cell(merged, "this model")[-1].strip() == cell(apart, "ORION")[-1].strip()
    assert "From averaged prompts to this model, averaged prompts: " in merged  # the same prompts in both
    assert cell(merged, "trained (LoRA)") == ["merged into the weights; its rank is not recorded"]

    from orion_hf.commands.finetune import main as finetune

    flags = [
        "--model",
        str(clip),
        "--task",
        "tiny-land",
        "--training_free",
        "svd",
        "--output_dir",
        str(tmp_path / "svd"),
    ]
    assert finetune(flags) == 0
    capsys.readouterr()
    assert inspect.main([str(tmp_path / "svd"), "--images", "--images_per_class", "1"]) == 0
    text = capsys.readouterr().out
    assert cell(text, "kind") == ["prototypes without training"] and "Top-1 in percent on 10 images" in text
    assert float(cell(text, "distance to orthonormality")[-1]) < 1e-3


def test_a_merged_model_tells_what_is_recorded_of_its_lora(clip, tmp_path, capsys):
    model = adapter(clip)
    model.orion_config = replace(model.orion_config, training={"lora_rank": 4})
    model.save_pretrained(tmp_path / "adapter")
    model.save_pretrained(tmp_path / "merged", merged=True)
    inspect.main([str(tmp_path / "adapter")])
    trained = cell(capsys.readouterr().out, "trained (LoRA)")[0]
    inspect.main([str(tmp_path / "merged")])
    known = cell(capsys.readouterr().out, "trained (LoRA)")
    assert known == ["merged into the weights; rank 4, " + trained.replace(", ", " when trained, ")]


def test_the_page_is_there_when_the_reader_of_the_text_goes_away(saved, tmp_path, monkeypatch):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", Closed())
    with pytest.raises(BrokenPipeError):
        inspect.main([str(saved / "adapter"), "--html", str(tmp_path / "page.html")])
    assert "sea lion" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_an_adapter_on_the_hub(hub, clip, saved, tmp_path, monkeypatch, capsys):
    address = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(transformers_hub, "_hf_api", HfApi(endpoint=hub.endpoint))
    base = hub.add_repo("org/base", clip)
    files = {path.name: path.read_bytes() for path in (saved / "adapter").iterdir()}
    config = json.loads(files["adapter_config.json"]) | {"base_model_name_or_path": "org/base", "revision": base}
    files["adapter_config.json"] = json.dumps(config).encode()
    logged = ("loss", "fidelity", "orthogonality", "orthogonality_weight", "mean_cosine", "max_cosine", "displacement")
    rows = [{"step": step, "epoch": step, **dict.fromkeys(logged, 0.5 / step)} for step in (1, 2)]
    files["training_log.jsonl"] = "\n".join(map(json.dumps, rows)).encode()
    hub.add_repo("org/adapter", files)

    assert inspect.main(["org/adapter", "--html", str(tmp_path / "page.html")]) == 0
    text = capsys.readouterr().out
    assert cell(text, "repository") == ["org/adapter"] and cell(text, "needs") == ["org/base"]
    assert cell(text, "base model") == [f"org/base at {base}"] and "not loaded" not in text
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 3 and "ORION: org/adapter" in page

    for name, message in (
        ("org/none", "org/none: there is no such folder, and the Hub shows no such repository"),
        ("none", "none: there is no such folder, and the Hub shows no such repository"),
    ):
        with pytest.raises(OSError, match=message):
            inspect.main([name])
    with pytest.raises(OSError, match=r"nope"):
        inspect.main(["org/adapter", "--revision", "nope"])
    hub.faults.add("GET", "/api/", "reset", times=None)
    with pytest.raises(OSError, match="the Hub could not be reached"):
        inspect.main(["org/other"])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match=r"org/other: .* offline only"):
        inspect.main(["org/other"])
    assert inspect.main(["org/adapter"]) == 0  # cached
    assert cell(capsys.readouterr().out, "needs") == ["org/base"]


def test_hostile_class_names(clip, tmp_path, capsys):
    task = OrionTask.from_names([HOSTILE, "dog"], templates=["a {}"])
    adapter(clip, task).save_pretrained(tmp_path / "adapter")
    assert inspect.main([str(tmp_path / "adapter"), "--html", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<img src=x" not in page and "&lt;img src=x onerror=alert(1)&gt; | [a](b)" in page
    capsys.readouterr()


def test_what_cannot_be_inspected_says_why(clip, saved, tmp_path, capsys):
    with pytest.raises(ValueError, match=r"has no orion_config\.json"):
        inspect.main([str(clip)])
    for name in (str(tmp_path / "gone"), "./gone", "a/b/c"):
        with pytest.raises(OSError, match=f"{name}: there is no such folder, and it is no Hub id"):
            inspect.main([name])
    with pytest.raises(ValueError, match="--images_per_class must be at least 1"):
        inspect.main([str(saved / "adapter"), "--images", "--images_per_class", "0"])
    # Without its base an adapter still tells what its own files hold.
    folder = tmp_path / "alone"
    folder.mkdir()
    for path in (saved / "adapter").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace(str(clip), str(tmp_path / "gone")))
    assert inspect.main([str(folder)]) == 0
    text = capsys.readouterr().out
    assert "could not be loaded" in cell(text, "not loaded")[0] and cell(text, "needs") == [str(tmp_path / "gone")]
    with pytest.raises(ValueError, match=r"images cannot be encoded: .* could not be loaded"):
        inspect.main([str(folder), "--images"])
    (folder / PROTOTYPES_NAME).unlink()
    with pytest.raises(ValueError, match="its model could not be loaded"):
        inspect.main([str(folder)])

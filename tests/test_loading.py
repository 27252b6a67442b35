"""What must load what: our repositories with stock tools, bit for bit, from folders and from a Hub.

One subprocess makes repositories with orion_hf and pushes them to a Hub on loopback, another one that never
imports orion_hf loads them.
"""

import json
import pickle
import subprocess
import sys
import textwrap

import pytest
from hub_server import HubServer
from tiny_clip_folder import TASK, save_tiny_clip, train_a_little

from orion_hf.embedded import load_embedded_clip
from orion_hf.modeling_orion import OrionCLIPTextModel
from orion_hf.tasks import OrionTask

MAKE = """
    import json, os, sys
    from pathlib import Path

    import pytest
    import torch
    from huggingface_hub import HfApi
    from safetensors.torch import save_file
    from tiny_clip_folder import TASK, train_a_little

    from orion_hf.modeling_orion import OrionCLIPTextModel

    work, token, commits = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    load = OrionCLIPTextModel.from_pretrained

    def push(folder, repo):
        HfApi(token=token).create_repo(repo, exist_ok=True)
        return HfApi(token=token).upload_folder(folder_path=folder, repo_id=repo).oid

    def trained(repo, **kwargs):
        model = load(repo, **kwargs)
        model.task = TASK
        model.add_lora(rank=2)
        train_a_little(model)
        return model

    # An adapter of a Hub model knows its base by id and commit.
    model = trained("org/base")
    model.save_pretrained(work / "adapter")
    model.save_pretrained(work / "merged", merged=True)
    written = json.loads((work / "adapter" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == "org/base" and written["revision"] == commits["base"]
    assert model.orion_config.base_model == "org/base" and model.orion_config.base_revision == commits["base"]
    first = push(work / "adapter", "org/adapter")
    push(work / "merged", "org/merged")

    batch = model.tokenizer(TASK.prompts(), padding=True, return_tensors="pt")

    @torch.no_grad()
    def embeds(model):
        return model(**batch).text_embeds

    expected = {"adapter": embeds(model), "merged": embeds(load("org/adapter", merge=True))}
    for repo in ("org/adapter", work / "adapter", str(work / "adapter")):
        assert torch.equal(embeds(load(repo)), expected["adapter"]), repo
    for repo in ("org/merged", work / "merged"):
        assert torch.equal(embeds(load(repo)), expected["merged"]), repo
    assert load("org/merged").task == load("org/adapter").task == TASK
    assert type(load("org/adapter").processor).__name__ == "CLIPProcessor"
    save_file({**expected, **batch}, work / "expected.safetensors")

    # `revision` is the adapter's own; the base is loaded at the commit it was trained on, wherever main went.
    with torch.no_grad():
        model.text_model.encoder.layers[0].mlp.fc1.lora_B["default"].weight.mul_(3)
    model.save_pretrained(work / "adapter2")
    push(work / "adapter2", "org/adapter")
    assert not torch.equal(embeds(load("org/adapter")), expected["adapter"])
    assert torch.equal(embeds(load("org/adapter", revision=first)), expected["adapter"])
    push(work / "adapter", "org/adapter")
    old = trained("org/moving", revision=commits["moving"])
    old.save_pretrained(work / "old")
    push(work / "old", "org/old")
    assert torch.equal(embeds(load("org/old")), embeds(old))
    assert not torch.equal(embeds(trained("org/moving")), embeds(old))

    # Private repositories, a cache of one's own, and offline from it.
    with pytest.raises(OSError):
        load("org/private")
    private = load("org/private", token=token, cache_dir=work / "cache")
    assert token not in repr(private._repository)
    assert private.encode("cat", tokenizer=model.tokenizer).shape == private.encode("cat").shape
    for repo in ("org/adapter", "org/merged"):
        online = embeds(load(repo, cache_dir=work / "cache"))
        assert torch.equal(embeds(load(repo, cache_dir=work / "cache", local_files_only=True)), online)
    with pytest.raises(OSError, match="its base model 'org/base' could not be loaded"):
        load(work / "adapter", cache_dir=work / "empty", local_files_only=True)

    # What strangers may not do.
    for repo, message in (
        ("org/pickled", "reading a pickle can run code"),
        ("org/rooted", "may not name a local folder"),
        ("org/climbing", "may not name a local folder"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            load(repo)
        assert repo in str(error.value) and "\\n" not in str(error.value)
"""

STOCK = """
    import sys
    from pathlib import Path

    import torch
    from peft import PeftModel
    from PIL import Image
    from safetensors.torch import load_file
    from transformers import (
        AutoModelForZeroShotImageClassification,
        AutoProcessor,
        CLIPModel,
        CLIPTextModelWithProjection,
        pipeline,
    )

    work = Path(sys.argv[1])
    expected = load_file(work / "expected.safetensors")
    batch = {name: expected.pop(name) for name in ("input_ids", "attention_mask")}
    image = Image.new("RGB", (20, 20), "green")

    @torch.no_grad()
    def two_towers(model):
        return model.get_text_features(**batch).pooler_output

    def check(found, kind, what):
        assert torch.equal(found, expected[kind]), what

    for repo, kind in (
        (str(work / "adapter"), "adapter"),
        (str(work / "merged"), "merged"),
        ("org/adapter", "adapter"),
        ("org/merged", "merged"),
    ):
        with torch.no_grad():
            check(CLIPTextModelWithProjection.from_pretrained(repo)(**batch).text_embeds, kind, repo)
        check(two_towers(AutoModelForZeroShotImageClassification.from_pretrained(repo)), kind, repo)
        classify = pipeline("zero-shot-image-classification", model=repo)
        check(two_towers(classify.model), kind, repo)
        scores = classify(image, candidate_labels=["cat", "dog"])
        assert abs(sum(score["score"] for score in scores) - 1) < 1e-5
        processor = AutoProcessor.from_pretrained(repo)
        assert type(processor).__name__ == "CLIPProcessor"
        pixels = processor(text=["cat"], images=image, return_tensors="pt")["pixel_values"]
        assert pixels.shape == (1, 3, 16, 16)
        if kind == "adapter":
            peft = PeftModel.from_pretrained(CLIPModel.from_pretrained("org/base"), repo).eval()
            check(two_towers(peft.base_model.model), kind, repo)
            check(two_towers(peft.merge_and_unload()), "merged", repo)

    assert not any(name.split(".")[0] == "orion_hf" for name in sys.modules)
"""


def run(script: str, *arguments: str, env: dict[str, str]) -> None:
    command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def test_stock_tools_load_the_same_embeddings(root, tmp_path):
    base = save_tiny_clip(tmp_path / "base")
    other = save_tiny_clip(tmp_path / "other", seed=1)
    local = OrionCLIPTextModel.from_pretrained(base)
    local.task = TASK
    local.add_lora(rank=2)
    train_a_little(local)
    hostile = tmp_path / "hostile"
    local.save_pretrained(hostile)
    files = {path.name: path.read_bytes() for path in hostile.iterdir()}
    config = json.loads(files["adapter_config.json"])

    with HubServer() as hub:
        commits = {"base": hub.add_repo("org/base", base), "moving": hub.add_repo("org/moving", base)}
        hub.add_repo("org/moving", other)
        hub.add_repo("org/private", base, private=True)
        for repo, path in (("org/rooted", str(base)), ("org/climbing", "../base")):
            named = json.dumps(config | {"base_model_name_or_path": path}).encode()
            hub.add_repo(repo, files | {"adapter_config.json": named})
        files["adapter_config.json"] = json.dumps(config | {"base_model_name_or_path": "org/base"}).encode()
        files["adapter_model.bin"] = pickle.dumps({})
        del files["adapter_model.safetensors"]
        hub.add_repo("org/pickled", files)

        env = hub.env(OMP_NUM_THREADS="1")
        env["PYTHONPATH"] = f"{root / 'tests'}:{env['PYTHONPATH']}"
        run(MAKE, str(tmp_path), hub.token, json.dumps(commits), env=env)
        assert not any("adapter_model.bin" in request.path for request in hub.requests)
        run(STOCK, str(tmp_path), env=hub.env(OMP_NUM_THREADS="1"))


def test_adapter_of_the_embedded_model(tmp_path):
    model = OrionCLIPTextModel.from_pretrained("embedded:tiny-clip")
    model.task = OrionTask.from_name("tiny-land")
    model.add_lora()
    model.save_pretrained(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == load_embedded_clip()  # a folder, for stock tools
    orion = json.loads((tmp_path / "adapter" / "orion_config.json").read_text())
    assert orion["base_model"] == "embedded:tiny-clip"  # a name that holds on every machine

    config["base_model_name_or_path"] = "/on/another/machine/tiny-clip"
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    assert OrionCLIPTextModel.from_pretrained(tmp_path / "adapter").prototypes().shape[0] == len(model.class_names)


def test_unknown_embedded_model():
    with pytest.raises(ValueError, match="unknown embedded model"):
        OrionCLIPTextModel.from_pretrained("embedded:huge-clip")


def test_what_is_nowhere_is_named(tmp_path):
    with pytest.raises(OSError, match="gone: there is no such folder, and it is no Hub id"):
        OrionCLIPTextModel.from_pretrained(tmp_path / "gone")
    for name in ("org/gone", "gone"):  # ids without an organisation are legal
        with pytest.raises(OSError, match=f"^{name}: there is no such folder, and offline only what is cached"):
            OrionCLIPTextModel.from_pretrained(name, local_files_only=True, cache_dir=tmp_path / "cache")
    model = OrionCLIPTextModel.from_pretrained(save_tiny_clip(tmp_path / "base"))
    model.task = TASK
    model.add_lora(rank=2)
    model.save_pretrained(tmp_path / "adapter")
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"adapter: its base model '.*base' could not be loaded.*no such folder"):
        OrionCLIPTextModel.from_pretrained(tmp_path / "adapter")

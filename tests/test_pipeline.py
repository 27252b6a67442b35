"""The pipeline: the stock pipeline's scores, labels encoded once, clear errors, and the command line on top."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tiny_clip_folder import TASK, save_tiny_clip, train_a_little
from transformers import pipeline

import orion_hf
from orion_hf import OrionCLIPTextModel, OrionZeroShotImageClassificationPipeline, cli
from orion_hf import pipeline as pipeline_module
from orion_hf.pipeline import KEPT_LABEL_SETS, UnreadableImageError


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(save_tiny_clip(tmp_path_factory.mktemp("pipeline") / "base"))


@pytest.fixture(scope="module")
def repositories(base, tmp_path_factory):
    """An adapter and a merged repository of the same model."""
    folder = tmp_path_factory.mktemp("repositories")
    model = OrionCLIPTextModel.from_pretrained(base)
    model.task = TASK
    model.add_lora()
    train_a_little(model)
    model.save_pretrained(folder / "adapter")
    model.save_pretrained(folder / "merged", merged=True)
    return {"adapter": str(folder / "adapter"), "merged": str(folder / "merged")}


@pytest.fixture(scope="module")
def images():
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 255, (20, 24, 3), dtype=np.uint8)) for _ in range(5)]


@pytest.fixture(scope="module")
def ours(repositories):
    return OrionZeroShotImageClassificationPipeline(repositories["adapter"], device="cpu")


def scores(predictions):
    return {entry["label"]: entry["score"] for entry in predictions}


@pytest.mark.parametrize("kind", ["adapter", "merged"])
def test_scores_are_the_stock_pipelines(kind, repositories, images):
    call = {
        "candidate_labels": ["cat", "dog", "a much longer name"],
        "hypothesis_template": "a drawing of a {}",
    }
    stock = pipeline("zero-shot-image-classification", model=repositories[kind], device="cpu")
    ours = pipeline("orion-zero-shot-image-classification", model=repositories[kind], device="cpu")
    assert isinstance(ours, OrionZeroShotImageClassificationPipeline)
    for expected, found in zip(stock(images, **call), ours(images, **call), strict=True):
        assert [entry["label"] for entry in found] == [entry["label"] for entry in expected]
        assert scores(found) == pytest.approx(scores(expected), abs=1e-5)


def test_labels_and_template_default_to_the_repository(ours, repositories, images):
    stock = pipeline("zero-shot-image-classification", model=repositories["adapter"], device="cpu")
    expected = stock(images[0], candidate_labels=list(TASK.class_names), hypothesis_template=TASK.eval_template)
    assert scores(ours(images[0])) == pytest.approx(scores(expected), abs=1e-5)


def test_labels_are_encoded_once(ours, images, monkeypatch):
    calls = []
    encode = pipeline_module.encode_packs
    monkeypatch.setattr(pipeline_module, "encode_packs", lambda *args: calls.append(1) or encode(*args))
    ours(images, candidate_labels=["one", "two"])
    ours(images[0], candidate_labels=["one", "two"])
    assert len(calls) == 1
    ours(images[0], candidate_labels=["one", "two"], hypothesis_template="{}")
    assert len(calls) == 2


def test_kept_label_sets_are_bounded(ours, images):
    for number in range(KEPT_LABEL_SETS + 3):
        ours(images[0], candidate_labels=["one", f"number {number}"])
    assert len(ours._label_embeds) == KEPT_LABEL_SETS


def test_kept_embeddings_follow_the_weights(base, images):
    classify = OrionZeroShotImageClassificationPipeline(base, device="cpu", orion_task=TASK)
    before = scores(classify(images[0]))
    with torch.no_grad():
        classify.model.text_model.encoder.layers[0].mlp.fc1.weight.mul_(3.0)
    changed = scores(classify(images[0]))
    assert changed != pytest.approx(before, abs=1e-4)
    with torch.no_grad():
        classify.model.text_projection.weight.mul_(-1.0)
    assert scores(classify(images[0])) != pytest.approx(changed, abs=1e-4)


def test_inputs_of_every_kind(ours, images, tmp_path):
    paths = []
    for number, image in enumerate(images):
        paths.append(str(tmp_path / f"{number}.png"))
        image.save(paths[-1])
    expected = [scores(ours(image)) for image in images]
    inputs = {"pictures": images, "paths": paths, "generator": (image for image in images)}
    for batch_size in (1, 2, 5):
        for kind, given in inputs.items():
            if kind == "generator":
                given = (image for image in images)
            found = [scores(entry) for entry in ours(given, batch_size=batch_size)]
            for one, other in zip(found, expected, strict=True):
                assert one == pytest.approx(other, abs=1e-5), (kind, batch_size)


def test_a_dataset_streams(ours, images):
    from datasets import Dataset
    from transformers.pipelines.pt_utils import KeyDataset

    dataset = KeyDataset(Dataset.from_dict({"image": images}), "image")
    found = [scores(entry) for entry in ours(dataset, batch_size=2)]
    assert len(found) == len(images)
    assert found[3] == pytest.approx(scores(ours(images[3])), abs=1e-5)


def test_top_k_and_options_at_construction(repositories, images):
    classify = OrionZeroShotImageClassificationPipeline(
        repositories["merged"], device="cpu", candidate_labels=["sea", "sky", "land"], top_k=2
    )
    assert len(classify(images[0])) == 2
    assert {entry["label"] for entry in classify(images[0], top_k=3)} == {"sea", "sky", "land"}
    assert {entry["label"] for entry in classify(images[0], candidate_labels="red, blue")} == {"red", "blue"}


def test_a_saved_pipeline_keeps_its_task_and_needs_no_code_of_ours(ours, images, tmp_path):
    ours.save_pretrained(tmp_path / "saved")
    assert not list((tmp_path / "saved").glob("*.py"))
    again = OrionZeroShotImageClassificationPipeline(tmp_path / "saved", device="cpu")
    assert scores(again(images[0])) == pytest.approx(scores(ours(images[0])), abs=1e-5)


def test_an_adapter_of_the_embedded_model_as_it_is_pushed(images, tmp_path):
    """Its base is the name `embedded:tiny-clip`, because a path of this machine would help nobody else."""
    model = OrionCLIPTextModel.from_pretrained("embedded:tiny-clip")
    model.task = TASK
    model.add_lora()
    train_a_little(model)
    model.save_pretrained(tmp_path / "adapter")
    expected = scores(OrionZeroShotImageClassificationPipeline(tmp_path / "adapter", device="cpu")(images[0]))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = "embedded:tiny-clip"
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    pushed = OrionZeroShotImageClassificationPipeline(tmp_path / "adapter", device="cpu")
    assert scores(pushed(images[0])) == pytest.approx(expected, abs=1e-6)
    plain = OrionZeroShotImageClassificationPipeline("embedded:tiny-clip", device="cpu", orion_task=TASK)
    assert scores(plain(images[0])) != pytest.approx(expected, abs=1e-4)


def test_no_pickle_of_an_orion_repository_is_read(repositories, tmp_path):
    folder = tmp_path / "pickled"
    shutil.copytree(repositories["merged"], folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises((OSError, ValueError), match="safetensors"):
        OrionZeroShotImageClassificationPipeline(folder, device="cpu")


def test_corrupt_weights_are_named(repositories, tmp_path):
    folder = tmp_path / "cut"
    shutil.copytree(repositories["merged"], folder)
    (folder / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ValueError, match=r"cut: weights truncated or corrupt"):
        OrionZeroShotImageClassificationPipeline(folder, device="cpu")


def test_the_embedded_model_is_a_model_like_any_other(images):
    classify = OrionZeroShotImageClassificationPipeline("embedded:tiny-clip", device="cpu")
    assert len(classify(images[0], candidate_labels=["forest", "lake"])) == 2
    text_model = OrionCLIPTextModel.from_pretrained("embedded:tiny-clip")
    assert classify.model.dtype == text_model.dtype == torch.float32


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([], "candidate_labels is empty"),
        (["cat", "dog", "cat"], "candidate_labels repeats 'cat'"),
        (["cat", " "], r"candidate_labels\[1\] is ' '"),
    ],
)
def test_bad_labels_are_one_clear_line(ours, images, labels, message):
    with pytest.raises(ValueError, match=message):
        ours(images[0], candidate_labels=labels)


def test_plain_clip_asks_for_labels(base, images):
    classify = OrionZeroShotImageClassificationPipeline(base, device="cpu")
    assert classify.orion_task is None
    with pytest.raises(ValueError, match="pass candidate_labels"):
        classify(images[0])
    assert len(classify(images[0], candidate_labels=["cat", "dog"])) == 2


def test_bad_template_and_top_k(ours, images):
    with pytest.raises(ValueError, match="exactly one"):
        ours(images[0], hypothesis_template="a photo")
    with pytest.raises(ValueError, match="top_k must be at least 1, got 0"):
        ours(images[0], top_k=0)


def test_unknown_options_are_refused_and_the_stock_ones_are_not(ours, repositories, images):
    with pytest.raises(ValueError, match=r"has no option 'class_prompt', 'topk': choose from candidate_labels, "):
        ours(images[0], topk=3, class_prompt={})
    with pytest.raises(ValueError, match="has no option 'topk'"):
        OrionZeroShotImageClassificationPipeline(repositories["merged"], device="cpu", topk=2)
    expected = scores(ours(images[0]))
    given = {"batch_size": 2, "num_workers": 0, "timeout": 5.0, "tokenizer_kwargs": {"padding": False}}
    assert scores(ours(images=images, **given)[0]) == pytest.approx(expected, abs=1e-5)
    classify = pipeline(
        "orion-zero-shot-image-classification",
        model=repositories["merged"], device="cpu", batch_size=2, num_workers=0, dtype=torch.float32, timeout=5.0,
    )  # fmt: skip
    assert scores(classify(images[0])) == pytest.approx(expected, abs=1e-5)


def test_an_unreadable_image_is_named(ours, images, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"not a picture")
    with pytest.raises(UnreadableImageError, match=r"cannot read image .*broken\.png"):
        ours([images[0], str(broken)])


def test_a_model_that_is_no_clip_is_refused():
    with pytest.raises(ValueError, match="Linear is not a CLIP model"):
        OrionZeroShotImageClassificationPipeline(torch.nn.Linear(2, 2))


def test_importing_the_package_registers_the_task(base):
    """Without loading transformers' pipelines, and whichever of the two modules is asked for first."""
    code = """
import sys
import orion_hf
assert "transformers.pipelines" not in sys.modules
from orion_hf import OrionZeroShotImageClassificationPipeline
from transformers import pipeline
classify = pipeline("orion-zero-shot-image-classification", model=sys.argv[1], device="cpu")
print(type(classify).__name__)
"""
    output = subprocess.check_output([sys.executable, "-c", code, base], text=True)
    assert output.strip() == "OrionZeroShotImageClassificationPipeline"
    assert "OrionZeroShotImageClassificationPipeline" in orion_hf.__all__


def test_command_line(repositories, images, ours, tmp_path, capsys):
    images[0].save(tmp_path / "one.png")
    (tmp_path / "bad.png").write_bytes(b"")
    call = ["classify", str(tmp_path / "one.png"), "--model", repositories["adapter"], "--device", "cpu"]
    assert cli.main([*call, "--json", "--top-k", "2"]) == 0
    line = json.loads(capsys.readouterr().out)
    expected = ours(images[0], top_k=2)
    assert [entry["label"] for entry in line["predictions"]] == [entry["label"] for entry in expected]
    assert scores(line["predictions"]) == pytest.approx(scores(expected), abs=1e-5)

    assert cli.main([*call, str(tmp_path / "bad.png"), "--labels", "red,green"]) == 1
    output = capsys.readouterr()
    assert "red" in output.out and "green" in output.out
    assert "bad.png" in output.err

    assert cli.main(["classify", "x.png", "--model", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in (error := capsys.readouterr().err) and error.count("\n") == 1

"""The few-shot command on the embedded CLIP: same draws for CLIP and ORION, resumable, and what it says it measures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_clip_folder import train_a_little

from orion_hf import cli
from orion_hf.cells import read_results
from orion_hf.commands import fewshot
from orion_hf.features import ImageEncoder, digest_of, image_features
from orion_hf.images import task_images
from orion_hf.kshot import TIP_ADAPTER_CROP_AREA, KShotSplit, augmented_features
from orion_hf.methods.clap import CLAP
from orion_hf.methods.coop import CoOp
from orion_hf.methods.tip_adapter import TipAdapter
from orion_hf.modeling_orion import OrionCLIPTextModel
from orion_hf.protocols import student_t_975
from orion_hf.results import comparisons
from orion_hf.tasks import OrionTask

MODEL = "embedded:tiny-clip"
TASK = OrionTask.from_name("tiny-land")
QUICK = {"clap.epochs": 20, "coop.epochs": 3, "coop.n_ctx": 4}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> str:
    model = OrionCLIPTextModel.from_pretrained(MODEL)
    model.task = TASK
    model.add_lora()
    train_a_little(model)
    folder = str(tmp_path_factory.mktemp("adapter") / "orion")
    model.save_pretrained(folder)
    return folder


def command(folder: Path, *flags: str) -> list[str]:
    settings = ["--model", MODEL, "--task", TASK.name, "--passes", "2", "--images_per_class", "5"]
    return ["fewshot", *settings, "--output_dir", str(folder), "--cache_dir", str(folder.parent / "cache"), *flags]


@pytest.fixture(scope="module")
def flags(adapter) -> list[str]:
    options = [f"{name}={value}" for name, value in QUICK.items()]
    return ["--orion", adapter, "--shots", "1", "2", "--seeds", "2", "--options", *options]


@pytest.fixture(scope="module")
def folder(flags, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("fewshot") / "out"
    assert cli.main(command(folder, *flags)) == 0
    return folder


def read(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


@pytest.fixture
def measured(monkeypatch) -> list[str]:
    """Ids of the cells that were measured, not found."""
    ids: list[str] = []
    measure = fewshot.FewShot._measure

    def counting(self, cell, *arguments):
        ids.append(digest_of(cell))
        return measure(self, cell, *arguments)

    monkeypatch.setattr(fewshot.FewShot, "_measure", counting)
    return ids


def test_every_cell_is_there_and_clip_and_orion_share_their_draws(folder):
    cells = read(folder)["cells"]
    found = {(c["method"], c["protocol"]["shots"], c["seed"], c["prototypes"]): c for c in cells}
    assert len(cells) == len(found) == 3 * 2 * 2 * 2
    for (method, shots, seed, kind), cell in found.items():
        assert cell["unit"] == "support set" and cell["num_images"] == 50 and 0 <= cell["top1"] <= 1
        assert cell["support"] == found[method, shots, seed, "clip"]["support"]
        assert cell["support"]["area"] == ([0.5, 1.0] if method == "tip_adapter" else [0.08, 1.0])
        assert (cell["adapter_weights"] is None) == (kind == "clip")
    assert len({c["support"]["draw"] for c in cells}) == 4  # one for each number of shots and seed
    assert any(found[m, s, i, "clip"]["top1"] != found[m, s, i, "orion"]["top1"] for m, s, i, _ in found)

    labels = task_images(TASK, "train")["label"][:]
    for shots in (1, 2):
        drawn = [KShotSplit.from_json(folder / "splits" / f"{TASK.name}-{shots}-{seed}.json") for seed in (1, 2)]
        assert drawn[0].train != drawn[1].train
        for split in drawn:
            split.check(labels)
            assert sorted(labels[row] for row in split.train) == sorted([*range(TASK.num_classes)] * shots)
            assert not set(split.train) & set(split.validation)


def test_differences_are_paired_over_seeds(folder):
    data = read(folder)
    assert len(data["comparisons"]) == 6
    for entry in data["comparisons"]:
        cells = [c for c in data["cells"] if (c["method"], c["protocol"]) == (entry["method"], entry["protocol"])]
        top1 = {(c["prototypes"], c["seed"]): c["top1"] for c in cells}
        gains = torch.tensor([top1["orion", seed] - top1["clip", seed] for seed in (1, 2)], dtype=torch.float64)
        half = student_t_975(1) * gains.std().item() / 2**0.5
        assert (entry["seeds"], entry["n"], entry["unit"]) == ([1, 2], 2, "support set")
        assert entry["difference"] == pytest.approx(gains.mean().item(), abs=1e-12)
        assert entry["high"] - entry["low"] == pytest.approx(2 * half, abs=1e-12)


def test_the_table_and_the_report_show_what_was_measured(folder, flags, measured, capsys):
    assert cli.main(command(folder, *flags)) == 0
    assert measured == []  # all cells were found
    lines = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("| tiny-land")]
    assert [[part.strip() for part in line[:3]] for line in lines] == [
        [TASK.name, method, shots] for method in ("clap", "coop", "tip_adapter") for shots in ("1", "2")
    ]
    entry = read(folder)["comparisons"][0]
    half = 50 * (entry["high"] - entry["low"])
    row = next(x for x in lines if [y.strip() for y in x[1:3]] == [entry["method"], str(entry["protocol"]["shots"])])
    assert row[-1].strip() == f"{100 * entry['difference']:+.1f} ± {half:.1f}"
    shown = read_results([folder])
    assert len(shown) == 24 and {cell.conditions["shots"] for cell in shown} == {1, 2}


def test_only_missing_cells_are_measured_again_to_the_same_value(folder, flags, measured):
    before = read(folder)
    lost = [cell for cell in before["cells"] if cell["seed"] == 2 and cell["protocol"]["shots"] == 2]
    kept = [cell for cell in before["cells"] if cell not in lost]
    (folder / "results.json").write_text(json.dumps(before | {"cells": kept}))
    assert cli.main(command(folder, *flags)) == 0
    assert sorted(measured) == sorted(cell["id"] for cell in lost) and len(lost) == 6
    top1 = {cell["id"]: cell["top1"] for cell in read(folder)["cells"]}
    assert top1 == {cell["id"]: cell["top1"] for cell in before["cells"]}


@pytest.mark.parametrize("kind", ["clip", "orion"])
def test_a_cell_is_what_the_estimators_give_by_hand(kind, folder, adapter):
    """ORION's prototypes start CLAP and Tip-Adapter, its encoder is under CoOp's context."""
    encoder = ImageEncoder.from_pretrained(MODEL)
    name = adapter if kind == "orion" else MODEL
    text_model = OrionCLIPTextModel.from_pretrained(name, merge=True, dtype=torch.float32)
    train, test = task_images(TASK, "train"), task_images(TASK, "test", images_per_class=5)
    split = KShotSplit.from_json(folder / "splits" / f"{TASK.name}-2-1.json")
    labels = torch.tensor(train["label"][:])[split.train]
    images = train.select(split.train)["image"][:]
    features = image_features(encoder, test, progress=False).features
    test_labels = torch.tensor(test["label"][:])
    with torch.no_grad():
        prototypes = text_model.encode(TASK.prompts(), normalize=False)

    def support(**area):
        def encode(crops):
            pixel_values = encoder.processor(crops, return_tensors="pt")["pixel_values"]
            return encoder.clip.get_image_features(pixel_values=pixel_values).pooler_output

        return augmented_features(images, encode, passes=2, size=64, seed=1, **area)

    common = {"logit_scale": round(encoder.logit_scale, 4)}
    estimators = {
        "clap": CLAP(epochs=20, random_state=1, **common).fit(support(), labels, prototypes),
        "coop": CoOp(
            text_model, text_model.tokenizer, TASK.class_names, epochs=3, n_ctx=4, random_state=1, **common
        ).fit(support(), labels),
        "tip_adapter": TipAdapter(**common).fit(support(area=TIP_ADAPTER_CROP_AREA), labels, prototypes),
    }
    # Accuracy alone would not tell the crops of one method from those of the other.
    cached = [load_file(path)["features"] for path in (folder.parent / "cache" / "support").iterdir()]
    for expected in (support(), support(area=TIP_ADAPTER_CROP_AREA)):
        assert any(each.shape == expected.shape and torch.allclose(each, expected, atol=1e-4) for each in cached)
    for method, estimator in estimators.items():
        [cell] = [
            cell
            for cell in read(folder)["cells"]
            if (cell["method"], cell["prototypes"], cell["seed"]) == (method, kind, 1)
            and cell["protocol"]["shots"] == 2
        ]
        assert cell["top1"] == pytest.approx(estimator.score(features, test_labels), abs=1e-9)


def test_selection_uses_images_outside_the_support_set(folder, tmp_path, monkeypatch):
    given = []
    fit = TipAdapter.fit

    def spy(self, features, labels, prototypes, **labelled):
        given.append((features.shape, labelled))
        return fit(self, features, labels, prototypes, **labelled)

    monkeypatch.setattr(TipAdapter, "fit", spy)
    options = ["tip_adapter.selection=validation", "tip_adapter.search_step=[3,3]"]
    flags = ["--method", "tip_adapter", "--shots", "2", "--seeds", "1", "--options", *options]
    assert cli.main(command(tmp_path / "out", *flags)) == 0
    [(shape, labelled)] = given  # without --orion there is CLIP's row alone
    assert shape == (2, 20, 64) and labelled.keys() == {"validation"}
    features, labels = labelled["validation"]
    assert features.shape == (20, 64) and labels.bincount().tolist() == [2] * 10
    [cell] = read(tmp_path / "out")["cells"]
    assert cell["options"]["selection"] == "validation" and cell["low"] is None


def test_wrong_input_is_one_line_that_says_what_to_do(folder, tmp_path, capsys):
    for flags, message in {
        ("--method", "tipp"): "no few-shot method 'tipp': choose among clap, coop, tip_adapter",
        ("--options", "clap.epoch=3"): "--options clap.epoch=3: write METHOD.OPTION=VALUE",
        ("--shots", "0"): "--shots must be different numbers from 1 up",
        ("--seeds", "0"): "--seeds must be at least 1",
    }.items():
        assert cli.main(command(tmp_path / "out", *flags)) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("orion-hf fewshot: ") and message in error
    splits = tmp_path / "out" / "splits"
    splits.mkdir(parents=True)
    drawn = json.loads((folder / "splits" / f"{TASK.name}-1-1.json").read_text())
    (splits / f"{TASK.name}-1-1.json").write_text(json.dumps(drawn | {"labels_digest": "of other images"}))
    assert cli.main(command(tmp_path / "out", "--method", "tip_adapter", "--shots", "1", "--seeds", "1")) == 2
    assert f"{TASK.name}-1-1.json: This 1-shot split (seed 1) was drawn from other labels" in capsys.readouterr().err


def test_two_processes_share_the_draws(flags, folder, tmp_path, root):
    config = root / "training" / "configs" / "accelerate_cpu.yaml"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    done = subprocess.run(
        [*launch, str(root / "training" / "fewshot.py"), *command(tmp_path / "out", *flags)[1:]],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("| tiny-land | clap") == 2  # once, with one line for each number of shots
    one, two = ({cell["id"]: cell["top1"] for cell in read(place)["cells"]} for place in (folder, tmp_path / "out"))
    assert one == pytest.approx(two)


def test_published_options_of_a_task_give_way_to_the_users():
    assert fewshot.published_options("tip_adapter", "flowers102")["alpha"] == 10.0
    assert fewshot.published_options("tip_adapter_f", "eurosat")["epochs"] == 100
    assert fewshot.published_options("tip_adapter", "tiny-land") == {}
    args = fewshot.parse_arguments(["--model", MODEL, "--task", "eurosat", "--options", "tip_adapter.alpha=3"])
    methods = fewshot.read_methods(["tip_adapter", "coop"], args.options, 100.0)
    run = fewshot.FewShot(args, None, None, methods, None, {}, None)
    options = run._options("tip_adapter", OrionTask.from_name("eurosat"))
    assert (options["alpha"], options["search_scale"]) == (3.0, (12.0, 10.0))
    assert run._options("coop", OrionTask.from_name("eurosat"))["epochs"] is None


def test_the_test_set_is_not_learnt_from(capsys):
    assert cli.main(["fewshot", "--model", MODEL, "--task", TASK.name, "--train_split", "test"]) == 2
    assert "must not be tested on" in capsys.readouterr().err


def test_another_support_split_is_another_experiment(folder):
    cells = read(folder)["cells"]
    others = [
        cell | {"id": f"other-{cell['id']}", "support": cell["support"] | {"split": "validation", "draw": cell["seed"]}}
        for cell in cells
    ]
    found = comparisons([*cells, *others], lambda cell_id: torch.zeros(1) if "other" in cell_id else torch.ones(1))
    assert len(found) == 12 and all(entry["seeds"] == [1, 2] for entry in found)

"""Sweeps: every combination once, measured as by hand, continued where they stopped."""

import json

import pytest
import torch
from tiny_clip_folder import save_tiny_clip

from orion_hf.cells import read_results
from orion_hf.commands import sweep
from orion_hf.features import ImageEncoder, image_features
from orion_hf.images import task_images
from orion_hf.modeling_orion import OrionCLIPTextModel
from orion_hf.sweep import sweep_points
from orion_hf.tasks import OrionTask
from orion_hf.trainer import OrionTrainer, TrainingError
from orion_hf.training_args import OrionTrainingArguments

SWEPT = ["--lambda", "0", "2", "20", "--seeds", "2", "--images_per_class", "2"]
FIXED = ["--task", "tiny-shapes", "--num_train_epochs", "2", "--learning_rate", "1e-2", "--disable_tqdm"]


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return str(save_tiny_clip(tmp_path_factory.mktemp("clip") / "tiny"))


@pytest.fixture(autouse=True)
def no_launch(monkeypatch):
    for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)


def run(clip, folder, *more):
    return sweep.main([*SWEPT, *FIXED, "--model", clip, "--output_dir", str(folder), *more])


@pytest.fixture(scope="module")
def finished(clip, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep") / "out"
    assert run(clip, folder) == 0
    return folder


def cells_of(folder):
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))["cells"]


def test_every_combination_is_there_once(finished):
    cells = cells_of(finished)
    tuned = [(c["sweep"]["orthogonality_weight"], c["seed"]) for c in cells if c["prototypes"] == "orion"]
    assert tuned == [(weight, seed) for weight in (0.0, 2.0, 20.0) for seed in (0, 1)]
    assert len(cells) == 18 and all(
        c["num_images"] == 2 * OrionTask.from_name("tiny-shapes").num_classes for c in cells
    )
    assert (finished / "plots" / "lambda.png").stat().st_size > 1000
    assert not (finished / "running").exists()
    # Only lambda has several values, so it alone is what a point is named by.
    assert [point.settings for point in sweep_points(read_results([finished]))] == [
        {"orthogonality_weight": weight} for weight in (0.0, 2.0, 20.0)
    ]


def test_other_settings_have_curves_too(clip, tmp_path):
    settings = ["--class_text", "template_mean", "name", "--lora_rank", "2", "4", "8", "--seeds", "1"]
    assert (
        sweep.main([*settings, *FIXED, "--images_per_class", "2", "--model", clip, "--output_dir", str(tmp_path)]) == 0
    )
    # Along the setting with the most values, one for each value of the other.
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == ["lora_rank-2.png", "lora_rank.png"]


def test_a_cell_is_what_training_by_hand_gives(clip, finished, tmp_path):
    task = OrionTask.from_name("tiny-shapes")
    model = OrionCLIPTextModel.from_pretrained(clip, dtype=torch.float32)
    images = task_images(task, images_per_class=2)
    features = image_features(ImageEncoder.from_pretrained(clip), images, cache_dir=tmp_path / "cache").features
    labels = torch.tensor(images["label"][:])

    def top1(prototypes):
        return ((features @ prototypes.T).argmax(1) == labels).double().mean().item()

    model.task = task
    before = top1(model.prototypes())
    settings = {"orthogonality_weight": 20.0, "seed": 1, "num_train_epochs": 2, "learning_rate": 1e-2}
    result = OrionTrainer(
        model, task, OrionTrainingArguments(str(tmp_path / "run"), disable_tqdm=True, **settings)
    ).train()
    cells = {
        c["prototypes"]: c for c in cells_of(finished) if c["seed"] == 1 and c["sweep"]["orthogonality_weight"] == 20
    }
    assert cells["clip"]["top1"] == before
    assert cells["orion"]["top1"] == top1(model.prototypes())
    assert cells["orion"]["displacement"] == pytest.approx(result.after.mean_displacement, rel=1e-5)
    assert cells["orion"]["displacement"] > 0.01


def test_a_finished_sweep_trains_nothing(clip, finished, monkeypatch, capsys):
    before = (finished / "results.json").read_bytes()
    monkeypatch.setattr(sweep, "measure", lambda *_: pytest.fail("trained again"))
    assert run(clip, finished) == 0
    assert (finished / "results.json").read_bytes() == before
    assert "6 runs, 6 of them done" in capsys.readouterr().err


def test_an_interrupted_sweep_is_continued(clip, finished, tmp_path, monkeypatch):
    trained = []
    measure = sweep.measure

    def interrupted(run, *rest):
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append(run.cell.name)
        return measure(run, *rest)

    monkeypatch.setattr(sweep, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(clip, tmp_path / "out")
    assert not (tmp_path / "out" / "results.json").exists()
    monkeypatch.setattr(sweep, "measure", lambda run, *rest: trained.append(run.cell.name) or measure(run, *rest))
    assert run(clip, tmp_path / "out") == 0
    assert len(trained) == len(set(trained)) == 6
    assert cells_of(tmp_path / "out") == cells_of(finished)


def test_a_run_goes_on_from_its_checkpoint(clip, finished, tmp_path, monkeypatch):
    steps = []
    training_step = OrionTrainer.training_step

    def killed(trainer):
        if len(steps) == 1:
            raise KeyboardInterrupt
        steps.append(trainer.step)
        return training_step(trainer)

    monkeypatch.setattr(OrionTrainer, "training_step", killed)
    with pytest.raises(KeyboardInterrupt):
        run(clip, tmp_path, "--lambda", "20", "--seeds", "1", "--save_epochs", "1")
    monkeypatch.setattr(
        OrionTrainer, "training_step", lambda trainer: steps.append(trainer.step) or training_step(trainer)
    )
    assert run(clip, tmp_path, "--lambda", "20", "--seeds", "1", "--save_epochs", "1") == 0
    assert steps == [0, 1]
    whole = next(
        c for c in cells_of(finished) if c["sweep"]["orthogonality_weight"] == 20 and c["prototypes"] == "orion"
    )
    assert cells_of(tmp_path)[-1]["displacement"] == pytest.approx(whole["displacement"], rel=1e-5)


def test_processes_of_a_launch_share_the_runs(clip, finished, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    for rank in ("0", "1"):
        assert not (folder / "results.json").exists()
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "2")):
            monkeypatch.setenv(name, value)
        assert run(clip, folder) == 0
        assert len(list((folder / "cells").iterdir())) == 3 * (int(rank) + 1)
    assert cells_of(folder) == cells_of(finished)


def test_another_setting_is_another_run(clip, finished, monkeypatch):
    asked = []
    monkeypatch.setattr(sweep, "measure", lambda run, *_: asked.append(run))
    assert run(clip, finished, "--weight_decay", "0.5") == 130  # stopped at the first, which was not there
    assert asked[0].args.weight_decay == 0.5 and not asked[0].cell.exists()


def test_a_run_that_diverges_is_named_and_the_others_stay(clip, tmp_path, monkeypatch, capsys):
    def diverge(trainer):
        if trainer.args.orthogonality_weight == 20:
            raise TrainingError("the loss is NaN at step 1")
        return train(trainer)

    train = OrionTrainer.train
    monkeypatch.setattr(OrionTrainer, "train", diverge)
    assert run(clip, tmp_path, "--overwrite_output_dir") == 1
    assert "orthogonality_weight': 20.0}: the loss is NaN" in capsys.readouterr().err
    assert sum(c["top1"] is None for c in cells_of(tmp_path)) == 2
    assert len(sweep_points(read_results([tmp_path]))) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seeds", "2"], "nothing to sweep"),
        (["--lambda", "2", "--seeds", "0"], "--seeds must be at least 1"),
        (["--lambda", "2", "--training_free", "svd"], "nothing to sweep"),
        (["--lambda", "2", "-1"], "orthogonality_weight must be 0 or more"),
        (["--class_text", "name", "--target_displacement", "0.1"], "needs --class_text template_mean"),
    ],
)
def test_bad_options_are_one_clear_error(flags, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        sweep.main([*flags, "--task", "tiny-land", "--model", "embedded:tiny-clip", "--output_dir", str(tmp_path)])

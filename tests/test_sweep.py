"""Sweeps: every combination once, measured as by hand, continued where they stopped."""

import json
import shutil

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


def test_another_command_in_the_folder_adds_its_runs(clip, finished, tmp_path, monkeypatch, capsys):
    folder = shutil.copytree(finished, tmp_path / "out")
    measure, trained = sweep.measure, []
    monkeypatch.setattr(sweep, "measure", lambda run, *rest: trained.append(run.args) or measure(run, *rest))

    def points():
        return {(p.settings["orthogonality_weight"], p.settings.get("weight_decay")) for p in found}

    assert run(clip, folder, "--lambda", "2", "20", "--seeds", "1") == 0
    assert not trained and "4 of the 6 runs are of other commands" in capsys.readouterr().out
    cells = cells_of(folder)
    assert sorted(map(json.dumps, cells)) == sorted(map(json.dumps, cells_of(finished)))
    assert [c["sweep"]["orthogonality_weight"] for c in cells[:6]] == [2.0] * 3 + [20.0] * 3  # those asked for first
    found = sweep_points(read_results([folder]))
    assert points() == {(0.0, None), (2.0, None), (20.0, None)}

    # What the other command changed without sweeping it is now what tells the runs apart.
    assert run(clip, folder, "--lambda", "2", "--seeds", "1", "--weight_decay", "0.5") == 0
    assert [args.weight_decay for args in trained] == [0.5] and len(cells_of(folder)) == 21
    found = sweep_points(read_results([folder]))
    assert points() == {(0.0, 0.01), (2.0, 0.01), (20.0, 0.01), (2.0, 0.5)}
    assert {p.accuracy.runs for p in found if p.settings["weight_decay"] == 0.01} == {2}

    # So are the images.
    assert run(clip, folder, "--lambda", "2", "--seeds", "1", "--images_per_class", "1") == 0
    counts = {(c["sweep"]["images_per_class"], c["num_images"]) for c in cells_of(folder)}
    classes = OrionTask.from_name("tiny-shapes").num_classes
    assert counts == {(2, 2 * classes), (1, classes)}


def test_a_file_that_is_no_cell_is_named(clip, finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "out")
    for text in ("[", "{}", "[]", '[{"top1": 1}]'):
        (folder / "cells" / "odd.json").write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=r"odd\.json: .* Remove this file"):
            run(clip, folder)


def test_checkpoints_of_another_command_stay(clip, finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "out")
    (folder / "running" / "another").mkdir(parents=True)
    assert run(clip, folder) == 0
    assert (folder / "running" / "another").is_dir()


def test_a_run_that_diverges_is_named_and_the_others_stay(clip, tmp_path, monkeypatch, capsys):
    def diverge(trainer):
        if trainer.args.orthogonality_weight == 20:
            raise TrainingError("the loss is NaN at step 1")
        return train(trainer)

    train = OrionTrainer.train
    monkeypatch.setattr(OrionTrainer, "train", diverge)
    assert run(clip, tmp_path, "--overwrite_output_dir") == 1
    printed = capsys.readouterr()
    assert "orthogonality_weight': 20.0}: the loss is NaN" in printed.err
    assert "failed    2 of 6 runs" in printed.out and "tiny-shapes, lambda 20.0: seed 0, 1\n" in printed.out
    assert sum(c["top1"] is None for c in cells_of(tmp_path)) == 2
    assert len(sweep_points(read_results([tmp_path]))) == 2

    # Tried again with the same command, and only they.
    again = []
    monkeypatch.setattr(OrionTrainer, "train", lambda trainer: again.append(trainer.args.seed) or train(trainer))
    assert run(clip, tmp_path, "--overwrite_output_dir") == 0
    printed = capsys.readouterr()
    assert again == [0, 1] and "4 of them done; 2 that failed are tried again" in printed.err
    assert "failed" not in printed.out and all(c["top1"] is not None for c in cells_of(tmp_path))
    assert len(sweep_points(read_results([tmp_path]))) == 3


def test_each_process_tries_its_own_failed_runs_again(clip, finished, tmp_path, monkeypatch):
    folder = shutil.copytree(finished, tmp_path / "out")
    for path in (folder / "cells").iterdir():
        cells = json.loads(path.read_text(encoding="utf-8"))
        if cells[-1]["sweep"]["orthogonality_weight"] == 0:  # the first two runs, one of each process
            cells[-1] |= {"top1": None, "error": "the loss is NaN"}
            path.write_text(json.dumps(cells), encoding="utf-8")
    trained = []
    measure = sweep.measure
    monkeypatch.setattr(sweep, "measure", lambda run, *rest: trained.append(run.cell) or measure(run, *rest))
    for rank, code in (("0", 1), ("1", 0)):
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "2")):
            monkeypatch.setenv(name, value)
        assert run(clip, folder) == code
        assert len(set(trained)) == len(trained) == int(rank) + 1
    assert cells_of(folder) == cells_of(finished)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seeds", "2"], "nothing to sweep"),
        (["--lambda", "2", "--seeds", "0"], "--seeds must be at least 1"),
        (["--lambda", "2", "--images_per_class", "0"], "--images_per_class must be at least 1, got 0"),
        (["--lambda", "2", "--training_free", "svd"], "nothing to sweep"),
        (["--lambda", "2", "-1"], "orthogonality_weight must be 0 or more"),
        (["--class_text", "name", "--target_displacement", "0.1"], "needs --class_text template_mean"),
    ],
)
def test_bad_options_are_one_clear_error(flags, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        sweep.main([*flags, "--task", "tiny-land", "--model", "embedded:tiny-clip", "--output_dir", str(tmp_path)])


def test_words_that_are_no_choice_and_missing_options(tmp_path, capsys):
    with pytest.raises(SystemExit):
        sweep.main(["--class_text", "template_mean", "foo", "--output_dir", str(tmp_path)])
    assert "orion-hf sweep: error: argument --class_text: invalid choice: 'foo'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        sweep.main(["--help"])
    assert "--class_text {template_mean,template,name}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        sweep.main(["--lambda", "2", "--output_dir", str(tmp_path)])
    assert "orion-hf sweep: error: the following arguments are required: --model" in capsys.readouterr().err
    with pytest.raises(ValueError, match="unknown option: --nope; orion-hf sweep --help"):
        sweep.main(["--lambda", "2", "--model", "embedded:tiny-clip", "--output_dir", str(tmp_path), "--nope"])

"""Fine-tuning: the gradient is that of eq. 2; runs repeat, resume and stop as asked; errors are clear."""

import copy
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from tiny_clip_folder import save_tiny_clip

from orion_hf import class_batches
from orion_hf import trainer as trainer_module
from orion_hf.checkpoint import checkpoints, load_checkpoint
from orion_hf.labelled import LabelledFeatures
from orion_hf.loss import orthonormality_loss
from orion_hf.modeling_orion import OrionCLIPTextModel
from orion_hf.plots import accuracy_against_displacement
from orion_hf.prototypes import mean_prototypes
from orion_hf.tasks import OrionTask
from orion_hf.trainer import OrionTrainer, OrionTrainingArguments, TrainingError, build_accelerator

NAMES = [
    "cat",
    "dog",
    "sea lion",
    "oak tree",
    "elm tree",
    "red car",
    "green car",
    "house",
    "tall house",
    "river",
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return OrionCLIPTextModel.from_pretrained(save_tiny_clip(tmp_path_factory.mktemp("clip") / "tiny"))


@pytest.fixture
def make(base, tmp_path):
    """A trainer on a copy of the base; settings that move a tiny random model visibly in a few steps."""

    def build(names=NAMES, accelerator=None, folder="run", validation=None, **settings):
        settings = {"learning_rate": 1e-3, "num_train_epochs": 4, "disable_tqdm": True, **settings}
        args = OrionTrainingArguments(str(tmp_path / folder), **settings)
        return OrionTrainer(copy.deepcopy(base), OrionTask.from_names(names), args, accelerator, validation=validation)

    return build


def lora(trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def gradients(trainer) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def log_of(trainer) -> list[dict]:
    return [json.loads(line) for line in (trainer.output_dir / "training_log.jsonl").read_text().splitlines()]


def make_lora_count(trainer) -> None:
    """B starts at zero, which would hide half of the gradient."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)


# --- the step ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("class_text", ["template_mean", "name"])
def test_gradient_of_a_step_is_that_of_the_padded_encoder(make, class_text):
    trainer = make(class_text=class_text, node_budget=40)
    make_lora_count(trainer)
    model, task = trainer.model, trainer.task
    loss, prototypes, backward = trainer._batch_loss(torch.arange(len(NAMES)), 2.0)
    backward()
    got = gradients(trainer)
    model.zero_grad()

    groups = [list(task.class_names)] if class_text == "name" else task.training_prompts()
    ids = [model.tokenizer(texts, padding="max_length", return_tensors="pt")["input_ids"] for texts in groups]
    x = mean_prototypes(torch.stack([model(input_ids=one).text_embeds for one in ids]))
    expected = orthonormality_loss(x, trainer.anchors, 2.0)
    expected.total.backward()
    torch.testing.assert_close(prototypes, x.detach(), atol=1e-5, rtol=0)
    assert loss.total.item() == pytest.approx(expected.total.item(), rel=1e-5)
    for name, gradient in gradients(trainer).items():
        assert (got[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6, name


def test_anchors_are_the_averaged_prompts_of_the_frozen_encoder(make, base):
    trainer = make()
    embeds = torch.stack([base.encode(prompts, normalize=False) for prompts in trainer.task.training_prompts()])
    torch.testing.assert_close(trainer.anchors, mean_prototypes(embeds), atol=1e-6, rtol=0)
    trainer.train()
    torch.testing.assert_close(trainer.anchors, mean_prototypes(embeds), atol=1e-6, rtol=0)


@pytest.mark.parametrize("normalize", [False, True])
def test_exact_gram_has_the_one_shot_gradient(make, normalize):
    """Packs of 30 nodes: a dozen re-encodings against one graph over everything."""
    one_shot = make(normalize_by_classes=normalize)
    exact = make(normalize_by_classes=normalize, exact_gram=True, node_budget=30)
    for trainer in (one_shot, exact):
        make_lora_count(trainer)
    loss, prototypes, backward = one_shot._batch_loss(torch.arange(len(NAMES)), 2.0)
    backward()
    exact_loss, exact_prototypes, exact_backward = exact._exact_loss(torch.arange(len(NAMES)), 2.0)
    assert len(exact.batches.packs(torch.arange(len(NAMES)), step=0)) > 10
    exact_backward()
    torch.testing.assert_close(exact_prototypes, prototypes, atol=1e-5, rtol=0)
    assert exact_loss.total.item() == pytest.approx(loss.total.item(), rel=1e-5)
    expected = gradients(one_shot)
    scale = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in gradients(exact).items():
        assert (gradient - expected[name]).abs().max() <= 1e-5 * scale, name


def test_a_batch_has_distinct_classes_and_an_epoch_has_all(make):
    names = [f"kind {i}" for i in range(65)]
    trainer = make(names, per_device_train_batch_size=16)
    first, second = trainer.batches.of_epoch(0), trainer.batches.of_epoch(1)
    assert [len(batch) for batch in first] == [13] * 5
    assert sorted(torch.cat(first).tolist()) == list(range(65))
    assert any(not torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, trainer.batches.of_epoch(0), strict=True))
    # 65 classes do not leave a last batch of one, which would have no pairs.
    assert [len(batch) for batch in make(names).batches.of_epoch(0)] == [33, 32]


def test_batch_larger_than_the_task_takes_all_classes_and_keeps_its_packs(make, monkeypatch):
    built = []
    build_packs = class_batches.build_packs
    trainer = make(per_device_train_batch_size=1000)
    monkeypatch.setattr(class_batches, "build_packs", lambda *args: built.append(1) or build_packs(*args))
    assert trainer.train().steps == 4
    assert len(built) == 1


def test_a_drawn_template_changes_from_step_to_step_and_not_from_run_to_run(make):
    def tokens_of(trainer, step):
        packs = trainer.batches.packs(torch.arange(len(NAMES)), step)
        return [pack.token_ids.tolist() for pack in packs]

    one, other = make(class_text="template"), make(class_text="template")
    assert tokens_of(one, 0) == tokens_of(other, 0)
    assert tokens_of(one, 0) != tokens_of(one, 1)


# --- the run ----------------------------------------------------------------------------------------------


def test_only_lora_moves_and_the_log_tells_the_story(make, base):
    trainer = make(num_train_epochs=6, per_device_train_batch_size=5, lr_scheduler_type="linear", warmup_steps=2)
    before = {name: p.clone() for name, p in base.named_parameters()}
    result = trainer.train()
    assert (result.stopped, result.steps) == ("finished", 12)
    for name, parameter in trainer.model.named_parameters():
        if "lora_" not in name:
            assert torch.equal(parameter, before[name.replace(".base_layer", "")]), name
    assert result.after.distance_to_orthonormality < result.before.distance_to_orthonormality

    log = log_of(trainer)
    assert [record["step"] for record in log] == list(range(1, 13))
    assert log[0]["orthogonality_weight"] == 2.0
    assert log[-1]["orthogonality_weight"] == pytest.approx(2.0 * 1.15**5)
    assert [record["learning_rate"] for record in log[:4]] == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 0.9e-3])
    assert log[0]["displacement"] == pytest.approx(0, abs=1e-5)
    for record in log:
        total = record["fidelity"] + record["orthogonality_weight"] * record["orthogonality"]
        assert record["loss"] == pytest.approx(total, rel=1e-5)
        assert -1 <= record["mean_cosine"] <= record["max_cosine"] <= 1 + 1e-6
        assert record["tokens_per_second"] > 0
    training = trainer.model.orion_config.training
    assert training["geometry_after"]["mean_displacement"] == result.after.mean_displacement
    json.dumps(training)


def test_validation_is_logged_every_epoch_and_changes_nothing(make, base):
    torch.manual_seed(0)
    features = torch.nn.functional.normalize(torch.randn(200, base.config.projection_dim), dim=-1)
    images = LabelledFeatures(features, torch.randint(len(NAMES), (200,)))
    settings = {"num_train_epochs": 3, "per_device_train_batch_size": 5, "learning_rate": 1e-2}
    plain, watched = make(**settings), make(folder="watched", validation=images, **settings)
    plain.train()
    watched.train()
    for name, parameter in lora(plain).items():
        assert torch.equal(parameter, lora(watched)[name]), name

    log = log_of(watched)
    validated = [record for record in log if "accuracy" in record]
    assert [(record["step"], record["epoch"]) for record in validated] == [(0, 0), (2, 1), (4, 2), (6, 3)]
    assert len(log) == 6 + 4
    start, end = validated[0], validated[-1]
    assert start["displacement"] == pytest.approx(0, abs=1e-5)
    model, task = watched.model, watched.task
    moved = (model.prototypes(task.templates) - watched.anchors).norm(dim=1).mean().item()
    assert end["displacement"] == pytest.approx(moved, abs=1e-5)
    scores = features @ model.prototypes().T  # of the evaluation template
    assert end["accuracy"] == pytest.approx(100 * (scores.argmax(1) == images.labels).double().mean().item())
    assert start["accuracy"] != end["accuracy"]
    assert accuracy_against_displacement(log) is not None

    with pytest.raises(ValueError, match="validation features are 7 wide and the text encoder's are"):
        make(folder="narrow", validation=LabelledFeatures(torch.eye(7), torch.arange(7)))


def test_schedules():
    args = OrionTrainingArguments("unused", learning_rate=1.0, warmup_steps=4, lr_scheduler_type="cosine")
    rates = [args.learning_rate_at(step, 24) for step in range(24)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[14] == pytest.approx(0.5)
    assert rates == sorted(rates[:5]) + sorted(rates[5:], reverse=True)
    paper = OrionTrainingArguments("unused")
    assert paper.learning_rate_at(19, 20) == 5e-6
    assert paper.orthogonality_weight_at(19) == pytest.approx(28.464, abs=1e-3)


def test_same_seed_same_bits(make):
    runs = [make(folder=f"run{i}", seed=seed, lora_dropout=0.1) for i, seed in enumerate((1, 1, 2))]
    for trainer in runs:
        torch.rand(17)  # whatever else used the global generator
        trainer.train()
    one, two, other = map(lora, runs)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


def test_target_displacement_stops_at_the_first_step_that_reaches_it(make):
    trainer = make(target_displacement=0.05, num_train_epochs=500, learning_rate=2e-4, save_epochs=0)
    result = trainer.train()
    assert result.stopped == "target_displacement"
    assert result.steps < 500
    assert 0.05 <= result.after.mean_displacement < 0.06
    assert log_of(trainer)[-1]["displacement"] < 0.05
    assert [path.name for path in checkpoints(trainer.output_dir)] == [f"checkpoint-{result.steps}"]


def test_gradient_checkpointing_changes_memory_and_not_the_result(make):
    plain, frugal = make(folder="a"), make(folder="b", gradient_checkpointing=True)
    plain.train(), frugal.train()
    for name, weights in lora(frugal).items():
        torch.testing.assert_close(weights, lora(plain)[name], atol=1e-6, rtol=0)


class Notebook(GeneralTracker):
    name = "notebook"
    requires_logging_directory = False
    main_process_only = True
    tracker = None

    def __init__(self):
        super().__init__()
        self.config, self.lines, self.closed = None, [], False

    def store_init_configuration(self, values):
        self.config = values

    def log(self, values, step=None, **kwargs):
        self.lines.append((step, values))

    def finish(self):
        self.closed = True


def test_trackers_get_every_step(make):
    notebook = Notebook()
    trainer = make(accelerator=Accelerator(cpu=True, log_with=notebook))
    trainer.train()
    assert notebook.config["learning_rate"] == 1e-3
    assert [step for step, _ in notebook.lines] == [1, 2, 3, 4]
    assert notebook.lines[-1][1]["loss"] == log_of(trainer)[-1]["loss"]
    assert notebook.closed


# --- interruption -----------------------------------------------------------------------------------------


def interrupt_at(trainer, step, number):
    """Send ourselves a signal in the middle of a step."""
    log = trainer._log

    def log_and_signal(record):
        log(record)
        if trainer.step == step:
            os.kill(os.getpid(), number)

    trainer._log = log_and_signal


@pytest.mark.parametrize(
    ("number", "settings"),
    [
        (signal.SIGTERM, {"class_text": "template", "lora_dropout": 0.2, "lr_scheduler_type": "cosine"}),
        (signal.SIGINT, {"exact_gram": True}),
        (signal.SIGTERM, {"target_displacement": 0.3}),
    ],
)
def test_interrupted_and_resumed_is_bit_identical(make, number, settings):
    settings |= {"per_device_train_batch_size": 4, "num_train_epochs": 8}
    whole = make(folder="whole", **settings)
    expected = whole.train()

    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    first = make(folder="cut", **settings)
    interrupt_at(first, 5, number)  # in the middle of an epoch of three steps
    assert first.train().stopped == "interrupted"
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    assert [path.name for path in checkpoints(first.output_dir)] == ["checkpoint-5"]

    second = make(folder="cut", resume_from_checkpoint="latest", **settings)
    result = second.train()
    assert (result.stopped, result.steps) == (expected.stopped, expected.steps)
    for name, weights in lora(whole).items():
        assert torch.equal(weights, lora(second)[name]), name
    kept = [{k: v for k, v in record.items() if k != "tokens_per_second"} for record in log_of(second)]
    assert kept == [{k: v for k, v in r.items() if k != "tokens_per_second"} for r in log_of(whole)]


def test_resume_from_a_named_checkpoint_drops_what_came_after(make):
    settings = {"num_train_epochs": 4, "save_epochs": 1, "save_total_limit": 4}
    first = make(**settings)
    first.train()
    with open(first.output_dir / "training_log.jsonl", "a") as file:
        file.write('{"step": 5, "lo')  # a process killed while writing
    named = str(first.output_dir / "checkpoint-2")
    second = make(resume_from_checkpoint=named, **settings)
    second._open_output_dir()
    assert second.step == 2
    assert [path.name for path in checkpoints(second.output_dir)] == ["checkpoint-1", "checkpoint-2"]
    assert [record["step"] for record in log_of(second)] == [1, 2]
    second = make(resume_from_checkpoint=named, **settings)
    second.train()
    assert all(torch.equal(weights, lora(second)[name]) for name, weights in lora(first).items())


def test_checkpoints_are_safetensors_and_json_and_few(make):
    trainer = make(num_train_epochs=5, save_epochs=1)
    trainer.train()
    found = checkpoints(trainer.output_dir)
    assert [path.name for path in found] == ["checkpoint-4", "checkpoint-5"]
    assert sorted(path.name for path in found[-1].iterdir()) == ["state.json", "state.safetensors"]
    assert not [path for path in trainer.output_dir.iterdir() if path.name.startswith(".")]


def test_kill_9_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    """Twenty children are killed at random moments of a run that saves after every step.

    They are forks of one process that has everything imported: starting Python anew would take seconds each
    and hit the imports instead of the training. That process is a fresh one with a single thread, because a
    fork of several threads is unsafe.
    """
    code = f"""
        import os, random, signal, sys, time
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        import torch
        torch.set_num_threads(1)
        from pathlib import Path
        from tiny_clip_folder import save_tiny_clip
        from orion_hf.checkpoint import checkpoints, load_checkpoint
        from orion_hf.modeling_orion import OrionCLIPTextModel
        from orion_hf.tasks import OrionTask
        from orion_hf.trainer import OrionTrainer, OrionTrainingArguments

        folder = Path({str(tmp_path)!r})
        base = OrionCLIPTextModel.from_pretrained(save_tiny_clip(folder / "clip"))
        base.tokenizer
        task = OrionTask.from_names(["cat", "dog", "sea lion"])
        output_dir = folder / "run"

        def run(epochs):
            args = OrionTrainingArguments(str(output_dir), resume_from_checkpoint="latest", save_epochs=1,
                                          num_train_epochs=epochs, learning_rate=1e-4, disable_tqdm=True)
            OrionTrainer(base, task, args).train()

        moments = random.Random(0)
        newest, halves, steps = -1, 0, []
        for _ in range(20):
            child = os.fork()
            if child == 0:
                run(100_000)
                os._exit(0)
            deadline = time.monotonic() + 120
            while not any(int(path.name.split("-")[1]) > newest for path in checkpoints(output_dir)):
                assert time.monotonic() < deadline, "the child makes no progress"
                time.sleep(0.01)
            time.sleep(moments.uniform(0, 0.1))
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            assert os.WTERMSIG(status) == signal.SIGKILL
            halves += any(path.name.startswith(".") for path in output_dir.iterdir())
            found = checkpoints(output_dir)
            for path in found:
                tensors, numbers = load_checkpoint(path)
                assert path.name == f"checkpoint-{{numbers['step']}}"
                assert all(tensor.isfinite().all() for tensor in tensors.values())
            assert numbers["step"] > newest, "the run went back"
            newest = numbers["step"]
            steps.append(newest)
        assert halves > 0, "no child was killed while it was saving; the test proves nothing"
        print(halves, steps)
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]


# --- errors -----------------------------------------------------------------------------------------------


def test_weights_that_are_not_finite_are_not_saved(make):
    trainer = make(num_train_epochs=8, save_epochs=1)
    sum_gradients = trainer._sum_gradients

    def overflow_in_the_fifth_step():
        sum_gradients()
        if trainer.step == 4:
            trainer._parameters[0].grad.fill_(float("inf"))

    trainer._sum_gradients = overflow_in_the_fifth_step
    with pytest.raises(TrainingError, match=r"not finite after step 5\. Try a lower --learning_rate"):
        trainer.train()
    last = checkpoints(trainer.output_dir)[-1]
    assert last.name == "checkpoint-4"
    assert all(tensor.isfinite().all() for tensor in load_checkpoint(last)[0].values())
    resumed = make(num_train_epochs=8, save_epochs=1, resume_from_checkpoint="latest")
    assert resumed.train().stopped == "finished"


def test_a_nan_in_the_forward_pass_is_an_error_at_once(make):
    trainer = make()
    with torch.no_grad():
        trainer._parameters[0].fill_(float("nan"))
    with pytest.raises(TrainingError, match=r"The loss is nan at step 1 \(epoch 1\)\. Try a lower"):
        trainer.train()
    assert checkpoints(trainer.output_dir) == []


def test_a_full_disk_leaves_the_earlier_checkpoint(make):
    """The file-size limit makes real writes fail in the middle of a file, as a full disk does."""
    trainer = make(num_train_epochs=2, save_epochs=1)
    trainer.train()
    before = load_checkpoint(checkpoints(trainer.output_dir)[-1])[0]

    settings = {"num_train_epochs": 2, "save_epochs": 1}
    trainer = make(**settings, folder="full")
    save = trainer._save_checkpoint
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def save_on_a_full_disk():
        if trainer.step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
        save()

    trainer._save_checkpoint = save_on_a_full_disk
    try:
        with pytest.raises(OSError, match=r"checkpoint-2 could not be saved .*Make room"):
            trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in trainer.output_dir.glob("*checkpoint*")] == ["checkpoint-1"]
    assert not list(trainer.output_dir.glob(".saving*"))
    resumed = make(**settings, folder="full", resume_from_checkpoint="latest")
    resumed.train()
    after = load_checkpoint(checkpoints(resumed.output_dir)[-1])[0]
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_resume_with_other_settings_lists_the_differences(make):
    make().train()
    with pytest.raises(
        ValueError, match=r"other settings: learning_rate was 0\.001, is 0\.002; lora_rank was 8, is 4\."
    ):
        make(learning_rate=2e-3, lora_rank=4, resume_from_checkpoint="latest").train()
    with pytest.raises(ValueError, match=r"class_names was \['cat', .*, is \['a', 'b'\]"):
        make(["a", "b"], resume_from_checkpoint="latest").train()
    with pytest.raises(ValueError, match=r"checkpoint-77: no such checkpoint; .* has checkpoint-4\."):
        make(resume_from_checkpoint="checkpoint-77").train()


def test_a_broken_checkpoint_is_named(make):
    trainer = make()
    trainer.train()
    path = checkpoints(trainer.output_dir)[-1] / "state.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="checkpoint-4 is not a checkpoint that can be read"):
        make(resume_from_checkpoint="latest").train()


def test_an_earlier_run_is_not_overwritten_unasked(make):
    first = make()
    first.train()
    with pytest.raises(ValueError, match="continue with --resume_from_checkpoint, or start afresh with --overwrite"):
        make().train()
    again = make(overwrite_output_dir=True, num_train_epochs=1)
    again.train()
    assert [path.name for path in checkpoints(again.output_dir)] == ["checkpoint-1"]
    assert len(log_of(again)) == 1


@pytest.mark.parametrize("raise_it", [lambda: torch.empty(2**50), lambda: torch.OutOfMemoryError("CUDA out of memory")])
def test_out_of_memory_says_which_option_to_lower(make, monkeypatch, raise_it):
    trainer = make()

    def encode_packs(*args):
        raise raise_it()

    monkeypatch.setattr(trainer_module, "encode_packs", encode_packs)
    with pytest.raises(TrainingError, match=r"lower --node_budget \(now 512\) or --per_device_train_batch_size"):
        trainer.train()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_rank": 0}, "--lora_rank must be at least 1, got 0"),
        ({"num_train_epochs": 0}, "--num_train_epochs must be at least 1"),
        ({"learning_rate": -1.0}, "--learning_rate must be above 0"),
        ({"learning_rate": float("nan")}, "--learning_rate must be above 0"),
        ({"orthogonality_weight": -0.1}, "--orthogonality_weight must be 0 or more"),
        ({"target_displacement": 3.0}, "below 2"),
        ({"target_displacement": 0.1, "class_text": "name"}, "needs --class_text template_mean"),
        ({"exact_gram": True, "lora_dropout": 0.1}, "--exact_gram"),
        ({"overwrite_output_dir": True, "resume_from_checkpoint": "latest"}, "give one of them"),
        ({"push_to_hub": True}, "needs --hub_model_id"),
    ],
)
def test_settings_out_of_range_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        OrionTrainingArguments("unused", **settings)


def test_precision_and_trackers_that_are_not_there_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="fp16 does not train on a CPU: use --mixed_precision no"):
        build_accelerator(OrionTrainingArguments("unused", mixed_precision="fp16"))
    monkeypatch.setattr(trainer_module, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--report_to wandb needs `pip install wandb`"):
        build_accelerator(OrionTrainingArguments("unused", report_to="wandb"))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(ValueError, match="fp16 does not train on a CPU"):
        build_accelerator(OrionTrainingArguments("unused"))


def test_the_base_must_be_a_base_and_prompts_must_fit(make, base):
    trained = copy.deepcopy(base)
    trained.add_lora()
    with pytest.raises(ValueError, match="has a LoRA adapter already"):
        OrionTrainer(trained, OrionTask.from_names(NAMES), OrionTrainingArguments("unused"))
    with pytest.raises(ValueError, match="more than the model's 77"):
        make(["cat", "x" * 100])
    with pytest.raises(ValueError, match="at least two class names"):
        make(["cat"])

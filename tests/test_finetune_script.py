"""The command: options and YAML, several tasks, several processes, published configurations, errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from hub_server import HubServer
from safetensors.torch import load_file, save_file
from tiny_clip_folder import save_tiny_clip
from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPConfig, CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

from orion_hf import cli, hub
from orion_hf.commands import finetune
from orion_hf.features import ImageEncoder
from orion_hf.labelled import LabelledFeatures
from orion_hf.modeling_orion import OrionCLIPTextModel
from orion_hf.tasks import OrionTask
from orion_hf.training_log import read_log

NAMES = [f"{colour} {thing}" for colour in ("red", "green", "old", "tall") for thing in ("car", "tree", "house")]


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> str:
    return str(save_tiny_clip(tmp_path_factory.mktemp("clip") / "tiny"))


@pytest.fixture
def names_file(tmp_path) -> str:
    path = tmp_path / "things.txt"
    path.write_text("\n".join(NAMES))
    return str(path)


def prototypes_of(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = load_file(folder / "prototypes.safetensors")
    return tensors["prototypes"], tensors["anchors"]


QUICK = ["--num_train_epochs", "2", "--learning_rate", "1e-3", "--disable_tqdm"]


# --- options ----------------------------------------------------------------------------------------------


def test_flags_win_over_the_yaml_file_which_wins_over_the_defaults(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("model: org/clip\ntask: [dtd, pets]\nlearning_rate: 5e-4\nlora_rank: 4\noutput_dir: here\n")
    script, args = finetune.parse_arguments(["--config", str(path), "--lora_rank", "2", "--task", "eurosat"])
    assert (script.model, script.task) == ("org/clip", ["eurosat"])
    assert (args.output_dir, args.learning_rate, args.lora_rank, args.weight_decay) == ("here", 5e-4, 2, 0.01)
    assert args.resume_from_checkpoint is None
    flags = ["--config", str(path), "--resume_from_checkpoint"]
    assert finetune.parse_arguments(flags)[1].resume_from_checkpoint == "latest"

    path.write_text("learning_rte: 1\n")
    with pytest.raises(ValueError, match="no option 'learning_rte', did you mean 'learning_rate'"):
        finetune.parse_arguments(["--config", str(path)])
    path.write_text("- a list\n")
    with pytest.raises(ValueError, match="must hold options as `name: value`"):
        finetune.parse_arguments(["--config", str(path)])


def test_the_configs_that_come_along_are_valid(root):
    flags = ["--model", "m", "--task", "eurosat", "--output_dir", "out"]
    folder = root / "training" / "configs"
    files = {path.stem: path for path in folder.glob("*.yaml") if not path.name.startswith("accelerate_")}
    assert {"paper", "demo"} <= files.keys()
    settings = {name: finetune.parse_arguments(["--config", str(path), *flags])[1] for name, path in files.items()}
    assert settings["paper"] == finetune.parse_arguments(flags)[1]


def test_accelerate_configs_are_valid(root):
    from accelerate.commands.config.config_args import load_config_from_file

    files = sorted((root / "training" / "configs").glob("accelerate_*.yaml"))
    assert len(files) == 3
    for path in files:
        assert load_config_from_file(str(path)).num_processes == yaml.safe_load(path.read_text())["num_processes"]


def test_tasks_are_built_in_ones_or_a_file(names_file):
    def tasks(*flags):
        return finetune.read_tasks(finetune.parse_arguments([*flags, "--output_dir", "out"])[0])

    assert len(tasks("--model", "m", "--task", "all")) == 11
    assert all(task.name.startswith("tiny-") for task in tasks("--model", "embedded:tiny-clip", "--task", "all"))
    [task] = tasks("--model", "m", "--task", "EuroSAT", "--templates", "one {}", "two {}")
    assert (task.name, task.templates) == ("eurosat", ("one {}", "two {}"))
    [task] = tasks("--model", "m", "--class_names_file", names_file, "--eval_template", "the {}")
    assert (task.name, list(task.class_names), task.eval_template) == ("things", NAMES, "the {}")
    for flags in (["--task", "dtd", "--class_names_file", names_file], []):
        with pytest.raises(ValueError, match=r"either --task .* or --class_names_file"):
            tasks("--model", "m", *flags)


# --- runs -------------------------------------------------------------------------------------------------


def test_one_task_becomes_an_adapter_that_loads(clip, names_file, tmp_path, capsys):
    out = tmp_path / "out"
    flags = ["--model", clip, "--class_names_file", names_file, "--output_dir", str(out), *QUICK]
    assert finetune.main(flags) == 0
    table = capsys.readouterr().out
    assert "| things | 12      | 2     | finished |" in table
    model = OrionCLIPTextModel.from_pretrained(out)
    assert model.class_names == NAMES
    stored, anchors = prototypes_of(out)
    torch.testing.assert_close(model.prototypes(model.task.templates), stored, atol=1e-6, rtol=0)
    base = OrionCLIPTextModel.from_pretrained(clip)
    base.task = model.task
    torch.testing.assert_close(base.prototypes(model.task.templates), anchors, atol=1e-6, rtol=0)
    training = model.orion_config.training
    assert training["learning_rate"] == 1e-3
    assert training["geometry_after"]["mean_displacement"] == pytest.approx(
        float((stored - anchors).norm(dim=1).mean()), abs=1e-5
    )
    assert len((out / "training_log.jsonl").read_text().splitlines()) == 2

    assert cli.run("finetune", flags) == 2  # the folder is not empty
    assert finetune.main([*flags, "--overwrite_output_dir"]) == 0
    assert finetune.main([*flags, "--resume_from_checkpoint"]) == 0  # nothing left to do


def test_several_tasks_load_the_base_once_and_one_failure_stops_no_other(clip, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    loads, pushes = [], []
    load_base = finetune.load_base
    monkeypatch.setattr(finetune, "load_base", lambda script: loads.append(1) or load_base(script))
    monkeypatch.setattr(hub, "push_folder", lambda folder, repo, **options: pushes.append((folder, repo, options)))
    (tmp_path / "orion-dtd").mkdir()
    (tmp_path / "orion-dtd" / "mine.txt").write_text("keep")
    flags = ["--model", clip, "--task", "eurosat", "dtd", "pets", "--output_dir", str(tmp_path), *QUICK]
    flags += ["--push_to_hub", "--hub_model_id", "org/orion", "--hub_private_repo"]
    assert finetune.main(flags) == 1
    captured = capsys.readouterr()
    assert captured.err.count("dtd") >= 1
    assert "orion-dtd is not empty" in captured.err
    assert len(loads) == 1
    rows = [line.split("|")[1].strip() for line in captured.out.splitlines() if line.startswith("|")]
    assert rows == ["task", "-" * len(rows[1]), "eurosat", "oxford_pets"]
    for name in ("eurosat", "oxford_pets"):
        model = OrionCLIPTextModel.from_pretrained(tmp_path / f"orion-{name}")
        assert model.task == OrionTask.from_name(name)
    assert [repo for _, repo, _ in pushes] == ["org/orion-eurosat", "org/orion-oxford_pets"]
    assert [folder for folder, _, _ in pushes] == [str(tmp_path / repo.split("/")[1]) for _, repo, _ in pushes]
    assert all(options["private"] is True for _, _, options in pushes)


def test_a_task_after_another_has_the_weights_it_would_have_alone(clip, tmp_path):
    common = ["--model", clip, *QUICK]
    assert finetune.main([*common, "--task", "eurosat", "dtd", "--output_dir", str(tmp_path / "both")]) == 0
    assert finetune.main([*common, "--task", "dtd", "--output_dir", str(tmp_path / "alone")]) == 0
    both = load_file(tmp_path / "both" / "orion-dtd" / "adapter_model.safetensors")
    alone = load_file(tmp_path / "alone" / "adapter_model.safetensors")
    assert all(torch.equal(both[name], alone[name]) for name in alone)


@pytest.mark.parametrize("method", ["mean", "svd"])
def test_training_free_prototypes(clip, names_file, tmp_path, method):
    out = tmp_path / "out"
    flags = [
        "--model",
        clip,
        "--class_names_file",
        names_file,
        "--output_dir",
        str(out),
        "--training_free",
        method,
    ]
    assert finetune.main(flags) == 0
    prototypes, anchors = prototypes_of(out)
    if method == "mean":
        assert torch.equal(prototypes, anchors)
    else:
        torch.testing.assert_close(prototypes @ prototypes.T, torch.eye(len(NAMES)), atol=1e-4, rtol=0)
    training = json.loads((out / "orion_config.json").read_text())["training"]
    assert training["method"] == method
    assert not (out / "adapter_model.safetensors").exists()
    with pytest.raises(OSError, match="holds prototypes without a model"):
        OrionCLIPTextModel.from_pretrained(out)


def test_an_interrupted_command_says_how_to_continue(clip, names_file, tmp_path, capsys, monkeypatch):
    import signal

    log = finetune.OrionTrainer._log

    def log_and_signal(trainer, record):
        log(trainer, record)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(finetune.OrionTrainer, "_log", log_and_signal)
    out = tmp_path / "out"
    flags = ["--model", clip, "--class_names_file", names_file, "--output_dir", str(out), *QUICK]
    assert finetune.main(flags) == 130
    assert "--resume_from_checkpoint continues" in capsys.readouterr().err
    assert not (out / "adapter_model.safetensors").exists()
    monkeypatch.setattr(finetune.OrionTrainer, "_log", log)
    assert finetune.main([*flags, "--resume_from_checkpoint"]) == 0
    assert (out / "adapter_model.safetensors").exists()


def test_two_processes_with_32_classes_equal_one_with_64(clip, tmp_path, root):
    """71 classes: two steps an epoch, of 36 and 35 classes, in shares of 18 and 18 or 18 and 17."""
    names = tmp_path / "things.txt"
    names.write_text("\n".join(f"thing {i} {'xyz'[i % 3]}" for i in range(71)))
    flags = ["--model", clip, "--class_names_file", str(names), "--learning_rate", "1e-4", "--disable_tqdm"]
    config = root / "training" / "configs" / "accelerate_cpu.yaml"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    script = [str(root / "training" / "finetune.py"), "--per_device_train_batch_size", "32"]
    done = subprocess.run(
        [*launch, *script, *flags, "--output_dir", str(tmp_path / "two")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("| things |") == 1, "only one process prints"

    alone = ["--per_device_train_batch_size", "64", "--output_dir", str(tmp_path / "one")]
    assert finetune.main([*flags, *alone]) == 0
    one, two = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("one", "two"))
    moved = max(one[name].abs().max() for name in one if "lora_B" in name)
    assert moved > 1e-3
    assert max((one[name] - two[name]).abs().max() for name in one) < 1e-5
    logs = [(tmp_path / folder / "training_log.jsonl").read_text().splitlines() for folder in ("one", "two")]
    for first, second in zip(*logs, strict=True):
        assert json.loads(first)["loss"] == pytest.approx(json.loads(second)["loss"], rel=1e-5)


# --- published base models --------------------------------------------------------------------------------

# Text towers as published: what the config files of these repositories say.
BASE = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "projection_dim": 512}
LARGE = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "projection_dim": 768}
OPENAI_IDS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
METACLIP_IDS = {"bos_token_id": 49406, "pad_token_id": 1, "eos_token_id": 49407}
PUBLISHED = {
    "openai/clip-vit-base-patch16": {**BASE, **OPENAI_IDS},
    "openai/clip-vit-large-patch14": {**LARGE, **OPENAI_IDS},
    "facebook/metaclip-b16-400m": {**BASE, **METACLIP_IDS},
}


def published_repo(folder: Path, text: dict) -> dict[str, bytes]:
    """A CLIP repository with the published text configuration, random weights, a vocabulary of letters."""
    config = CLIPTextConfig(**text, num_hidden_layers=12, vocab_size=49408, hidden_act="quick_gelu")
    with torch.device("meta"):
        model = CLIPTextModelWithProjection(config)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.ones(p.shape, dtype=torch.float16)
        if "norm" in name and name.endswith("weight")
        else torch.empty(p.shape, dtype=torch.float16).normal_(std=0.02, generator=generator)
        for name, p in model.named_parameters()
    }
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    CLIPConfig(text_config=config.to_dict(), projection_dim=text["projection_dim"]).save_pretrained(folder)
    letters = sorted(ByteLevel.alphabet())
    vocab = {word: index for index, word in enumerate([*letters, *(f"{letter}</w>" for letter in letters)])}
    vocab |= {"<|startoftext|>": 49406, "<|endoftext|>": 49407}
    CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77).save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_published_configurations_train_from_a_hub(tmp_path, names_file):
    """In one fresh process: the Hub's address is read when huggingface_hub is imported."""
    code = """
import json, sys, torch
from orion_hf.commands import finetune
from orion_hf.modeling_orion import OrionCLIPTextModel

for name, width in json.loads(sys.argv[1]).items():
    out = sys.argv[2] + "/" + name.split("/")[1]
    flags = ["--model", name, "--class_names_file", sys.argv[3], "--output_dir", out, "--disable_tqdm"]
    assert finetune.main([*flags, "--num_train_epochs", "2", "--learning_rate", "1e-4"]) == 0
    model = OrionCLIPTextModel.from_pretrained(out, dtype=torch.float32)
    prototypes = model.prototypes()
    assert prototypes.shape == (12, width)
    trained = sum(p.numel() for n, p in model.named_parameters() if "lora_" in n)
    assert 0 < trained < 0.05 * sum(p.numel() for p in model.parameters())
    # Read at the end of text, whichever way the config names it: transformers' padded forward agrees.
    prompts = model.task.prompts()[:2]
    padded = model.tokenizer(prompts, padding="max_length", max_length=77, return_tensors="pt")
    with torch.no_grad():
        expected = torch.nn.functional.normalize(model(input_ids=padded["input_ids"]).text_embeds, dim=-1)
    torch.testing.assert_close(prototypes[:2], expected, atol=1e-5, rtol=0)
    adapter = json.load(open(out + "/adapter_config.json"))
    assert (adapter["base_model_name_or_path"], len(adapter["revision"])) == (name, 40)
    training = json.load(open(out + "/orion_config.json"))["training"]
    assert training["geometry_after"]["mean_displacement"] > 0
"""
    widths = {name: text["projection_dim"] for name, text in PUBLISHED.items()}
    with HubServer() as server:
        for name, text in PUBLISHED.items():
            server.add_repo(name, published_repo(tmp_path / name, text))
        done = subprocess.run(
            [sys.executable, "-c", code, json.dumps(widths), str(tmp_path), names_file],
            env=server.env(),
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr[-2000:]


def test_validation_images_are_those_of_the_flags(tmp_path):
    out = tmp_path / "out"
    flags = ["--model", "embedded:tiny-clip", "--task", "tiny-land", "--output_dir", str(out), *QUICK]
    assert finetune.main([*flags, "--validation", "task", "--validation_images_per_class", "3"]) == 0
    rows = [row for row in read_log(out / "training_log.jsonl") if "accuracy" in row]
    assert [row["epoch"] for row in rows] == [0, 1, 2]
    model = OrionCLIPTextModel.from_pretrained(out, dtype=torch.float32)
    encoder = ImageEncoder.from_pretrained("embedded:tiny-clip")
    images = LabelledFeatures.of_task(encoder, model.task, "train", images_per_class=3)
    assert rows[-1]["accuracy"] == pytest.approx(100 * images.top1(model.prototypes()))

    for more, message in {
        ("--training_free", "svd"): "--training_free has none",
        ("--validation_images_per_class", "0"): "--validation_images_per_class must be at least 1",
        ("--validation_split", "no-such"): "no-such",
    }.items():
        with pytest.raises(ValueError, match=message):
            finetune.main([*flags, "--overwrite_output_dir", "--validation", "task", *more])


# --- errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--task": "eurosta"}, "eurosat"),
        ({"--model": "/no/such/model"}, "--model /no/such/model could not be loaded"),
        ({"--lora_rank": "0"}, "--lora_rank must be at least 1"),
        ({"--mixed_precision": "fp16"}, "fp16 does not train on a CPU"),
        ({"--config": "/no/such/file.yaml"}, "/no/such/file.yaml"),
    ],
)
def test_errors_are_one_line(clip, tmp_path, capsys, change, message):
    options = {"--model": clip, "--task": "eurosat", "--output_dir": str(tmp_path / "out"), **change}
    assert cli.run("finetune", [text for option in options.items() for text in option]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert len(error.splitlines()) == 1, error


def test_one_class_is_refused(clip, tmp_path, capsys):
    path = tmp_path / "one.txt"
    path.write_text("cat\n")
    flags = ["--model", clip, "--class_names_file", str(path), "--output_dir", str(tmp_path / "out")]
    assert cli.run("finetune", flags) == 2
    assert "at least two class names" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

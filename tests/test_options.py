"""Options of commands: YAML values are checked as flags are, tokens are refused unread."""

import pytest

from orion_hf.class_batches import ClassBatches
from orion_hf.commands.finetune import parse_arguments
from orion_hf.tasks import OrionTask
from orion_hf.training_args import OrionTrainingArguments

FLAGS = ["--model", "embedded:tiny-clip", "--output_dir", "out"]


def parsed(tmp_path, text, *flags):
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return parse_arguments([*FLAGS, "--config", str(path), *flags])


def test_yaml_values_become_what_the_flags_would_give(tmp_path):
    text = "task: tiny-land\nmixed_precision: no\nresume_from_checkpoint: true\nlearning_rate: 1e-4\nexact_gram: true\n"
    script, args = parsed(tmp_path, text)
    assert script.task == ["tiny-land"]
    assert (args.mixed_precision, args.resume_from_checkpoint, args.exact_gram) == ("no", "latest", True)
    assert args.learning_rate == 1e-4


def test_flags_win_over_yaml(tmp_path):
    script, args = parsed(tmp_path, "task: [tiny-land]\nseed: 1\n", "--seed", "2", "--task", "tiny-shapes")
    assert (script.task, args.seed) == (["tiny-shapes"], 2)


@pytest.mark.parametrize(
    "line",
    ["class_text: foo", "num_train_epochs: 2.5", "learning_rate: null", "lora_rank: [8]", "templates: [[a]]", "lr: 1"],
)
def test_bad_yaml_values_are_named(tmp_path, line):
    with pytest.raises(ValueError, match=rf"config.yaml: .*{line.split(':')[0]}"):
        parsed(tmp_path, line + "\n")


@pytest.mark.parametrize("option", ["--token", "--hub_token"])
def test_a_token_is_refused_and_not_repeated(option, capsys):
    with pytest.raises(SystemExit):
        parse_arguments([*FLAGS, option, "hf_SENTINEL"])
    assert "HF_TOKEN" in (error := capsys.readouterr().err) and "hf_SENTINEL" not in error


def test_unknown_options_are_named_without_their_values():
    with pytest.raises(ValueError, match="unknown option: --api_key") as error:
        parse_arguments([*FLAGS, "--api_key", "hf_SENTINEL"])
    assert "hf_SENTINEL" not in str(error.value)


@pytest.mark.parametrize("setting", ["class_text", "lr_scheduler_type", "mixed_precision", "report_to"])
def test_words_that_are_no_choice_are_refused_in_code_too(setting):
    with pytest.raises(ValueError, match=f"--{setting} must be one of .*, got foo"):
        OrionTrainingArguments("out", **{setting: "foo"})


def test_batches_of_an_unknown_class_text_are_refused():
    with pytest.raises(ValueError, match="class_text must be one of template_mean, template, name, got 'foo'"):
        ClassBatches(OrionTask.from_names(["cat", "dog"]), None, 0, class_text="foo")

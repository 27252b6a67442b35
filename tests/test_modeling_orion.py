"""`OrionCLIPTextModel`: loading, LoRA, prototypes, saving, and one clear line for all that can be wrong."""

import copy
import json
import logging
import os
import pickle
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_clip_folder import TASK, save_tiny_clip, train_a_little
from torch.nn import functional as F
from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPTextModelWithProjection

from orion_hf import modeling_orion
from orion_hf.configuration_orion import MAX_CLASSES, OrionConfig
from orion_hf.modeling_orion import OrionCLIPTextModel
from orion_hf.tasks import OrionTask

PROMPTS = ["a photo of a cat", "a photo of a sea lion", "dog", "a photo of a cat"]
ADAPTER_FILES = {"adapter_config.json", "adapter_model.safetensors"}
FULL_FILES = {"config.json", "model.safetensors"}
ORION_FILES = {"orion_config.json", "prototypes.safetensors"}
PROCESSOR_FILES = {"processor_config.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_tiny_clip(tmp_path_factory.mktemp("hub") / "base")


def trained_model(base, **kwargs) -> OrionCLIPTextModel:
    model = OrionCLIPTextModel.from_pretrained(base, **kwargs)
    model.task = TASK
    model.add_lora(rank=2)
    train_a_little(model)
    return model


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "adapter"
    trained_model(base).save_pretrained(folder)
    return folder


@pytest.fixture
def adapter_copy(adapter, tmp_path):
    return shutil.copytree(adapter, tmp_path / "copy")


@pytest.fixture
def model(base):
    return trained_model(base)


@torch.no_grad()
def padded_embeds(model, prompts=PROMPTS) -> torch.Tensor:
    return model(**model.tokenizer(prompts, padding=True, return_tensors="pt")).text_embeds


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def contents(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def one_line(error) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


# Loading


def test_plain_clip_loads_without_a_page_of_warnings(base, tmp_path, caplog):
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        model, info = OrionCLIPTextModel.from_pretrained(base, output_loading_info=True)
    finally:
        logger.removeHandler(caplog.handler)
    assert not caplog.records
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.task is None and model.class_names is None and not model.has_lora and not model.is_merged
    stock = CLIPTextModelWithProjection.from_pretrained(base)
    assert torch.equal(padded_embeds(model), stock(**model.tokenizer(PROMPTS, padding=True, return_tensors="pt"))[0])

    stock.save_pretrained(tmp_path / "text-only")
    text_only = OrionCLIPTextModel.from_pretrained(tmp_path / "text-only")
    text_only.tokenizer = model.tokenizer
    assert torch.equal(padded_embeds(text_only), padded_embeds(model))


def test_projection_of_the_two_tower_config_counts(base, tmp_path):
    folder = shutil.copytree(base, tmp_path / "base")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["projection_dim"] = 99  # as in published configs that left the default there
    (folder / "config.json").write_text(json.dumps(config))
    assert OrionCLIPTextModel.from_pretrained(folder).encode("cat").shape == (1, 16)
    assert OrionCLIPTextModel.from_pretrained(folder, config=CLIPConfig.from_pretrained(folder)).encode(
        [[512, 3, 513]]
    ).shape == (1, 16)

    model = trained_model(folder)
    model.save_pretrained(tmp_path / "merged", merged=True)
    assert CLIPTextModelWithProjection.from_pretrained(tmp_path / "merged").config.projection_dim == 16


def test_pickled_base_loads_as_transformers_loads_it(base, tmp_path):
    folder = shutil.copytree(base, tmp_path / "base")
    torch.save(CLIPModel.from_pretrained(base).state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    pickled, safe = OrionCLIPTextModel.from_pretrained(folder), OrionCLIPTextModel.from_pretrained(base)
    assert torch.equal(padded_embeds(pickled), padded_embeds(safe))


def test_transformers_options_reach_base_and_adapter(adapter):
    model = OrionCLIPTextModel.from_pretrained(
        adapter, dtype=torch.bfloat16, attn_implementation="eager", device_map="cpu"
    )
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.config._attn_implementation == "eager"
    assert model.encode("cat").dtype == torch.bfloat16


def test_adapter_round_trip(base, adapter, model):
    assert set(os.listdir(adapter)) == ADAPTER_FILES | ORION_FILES | PROCESSOR_FILES
    loaded = OrionCLIPTextModel.from_pretrained(adapter)
    assert loaded.has_lora and not loaded.is_merged
    assert loaded.task == TASK and loaded.class_names == list(TASK.class_names)
    assert torch.equal(padded_embeds(loaded), padded_embeds(model))
    assert not torch.allclose(padded_embeds(loaded), padded_embeds(OrionCLIPTextModel.from_pretrained(base)))
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert loaded.orion_config.base_model == str(base)

    trainable = OrionCLIPTextModel.from_pretrained(adapter, is_trainable=True)
    assert {name.split(".")[-3] for name, p in trainable.named_parameters() if p.requires_grad} == {
        "lora_A",
        "lora_B",
    }


def test_adapter_config_is_for_stock_tools(base, adapter):
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base) and "revision" in config
    assert all(
        name.startswith("base_model.model.text_model.") for name in load_file(adapter / "adapter_model.safetensors")
    )


def test_base_beside_the_adapter(adapter_copy, base, tmp_path, monkeypatch):
    shutil.copytree(base, adapter_copy / "clip")
    edit_json(adapter_copy / "adapter_config.json", base_model_name_or_path="clip")
    assert OrionCLIPTextModel.from_pretrained(adapter_copy).has_lora
    monkeypatch.chdir(adapter_copy)
    assert OrionCLIPTextModel.from_pretrained(".").has_lora


def test_processor_of_the_base_serves_an_adapter_without(adapter_copy):
    for name in PROCESSOR_FILES:
        (adapter_copy / name).unlink()
    model = OrionCLIPTextModel.from_pretrained(adapter_copy)
    assert model.encode("cat").shape == (1, 16)
    assert type(model.processor).__name__ == "CLIPProcessor"
    assert type(model.processor.image_processor).__name__ == "CLIPImageProcessorPil"  # no torchvision here


# Encoding


def test_encode_takes_strings_ids_and_tensors(model):
    expected = padded_embeds(model)
    batch = model.tokenizer(PROMPTS, padding=True, return_tensors="pt")["input_ids"]
    for inputs in (PROMPTS, tuple(PROMPTS), model.tokenizer(PROMPTS)["input_ids"], batch):
        torch.testing.assert_close(model.encode(inputs, normalize=False), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.encode(PROMPTS), F.normalize(expected, dim=-1), rtol=1e-5, atol=1e-6)
    assert torch.equal(model.encode("dog"), model.encode(["dog"]))
    assert torch.equal(model.encode(PROMPTS, tokenizer=model.tokenizer), model.encode(PROMPTS))


def test_encode_is_differentiable_for_lora_and_soft_prompts(model):
    soft = torch.zeros(2, 32, requires_grad=True)
    model.encode([[512, -1, -2, 3, 513], [512, -1, -2, 4, 513]], soft_embeds=soft)[:, 0].sum().backward()
    assert soft.grad.abs().sum() > 0
    gradients = [p.grad for name, p in model.named_parameters() if "lora_B" in name]
    assert gradients and all(gradient.abs().sum() > 0 for gradient in gradients)


def test_encode_says_what_is_missing(base):
    with pytest.raises(ValueError, match="no prompts"):
        OrionCLIPTextModel.from_pretrained(base).encode([])
    with pytest.raises(FileNotFoundError, match=r"no tokenizer files: set model.tokenizer"):
        OrionCLIPTextModel(CLIPTextConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2)).encode("cat")


# LoRA


@pytest.mark.parametrize("width,heads,layers", [(512, 8, 12), (768, 12, 12)])
def test_lora_trains_under_five_percent_of_real_sizes(width, heads, layers):
    with torch.device("meta"):
        config = CLIPTextConfig(
            hidden_size=width,
            intermediate_size=4 * width,
            num_attention_heads=heads,
            num_hidden_layers=layers,
            projection_dim=width,
        )
        model = OrionCLIPTextModel(config)
        model.add_lora()
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert 0 < trainable < 0.05 * model.num_parameters()
    assert sum(1 for _ in model._lora_layers()) == layers * 6
    assert all("lora_" in name for name, parameter in model.named_parameters() if parameter.requires_grad)


def test_new_lora_changes_nothing_until_trained(base):
    model = OrionCLIPTextModel.from_pretrained(base)
    before = padded_embeds(model)
    model.add_lora(rank=3, alpha=12, dropout=0.1)
    assert torch.equal(padded_embeds(model.eval()), before)
    [config] = model.peft_config.values()
    assert (config.r, config.lora_alpha, config.lora_dropout) == (3, 12, 0.1)


def test_merge_and_unmerge(model):
    unmerged = padded_embeds(model)
    model.merge_lora()
    model.merge_lora()  # once is enough
    assert model.is_merged
    torch.testing.assert_close(padded_embeds(model), unmerged, rtol=1e-5, atol=1e-5)
    model.unmerge_lora()
    assert not model.is_merged
    torch.testing.assert_close(padded_embeds(model), unmerged, rtol=1e-5, atol=1e-5)


def test_lora_misuse(base, model):
    plain = OrionCLIPTextModel.from_pretrained(base)
    with pytest.raises(ValueError, match="no LoRA adapter to merge"):
        plain.merge_lora()
    plain.unmerge_lora()
    with pytest.raises(ValueError, match="rank must be at least 1, got 0"):
        plain.add_lora(rank=0)
    with pytest.raises(ValueError, match="has a LoRA adapter already"):
        model.add_lora()


# Prototypes


@pytest.fixture
def encodings(monkeypatch):
    """Counts the passes through the text encoder."""
    calls = []
    encode = modeling_orion.encode_packs
    monkeypatch.setattr(modeling_orion, "encode_packs", lambda *args: calls.append(1) or encode(*args))
    return calls


def test_prototypes_are_unit_rows_of_the_evaluation_template(model, encodings):
    prototypes = model.prototypes()
    assert prototypes.shape == (3, 16) and not prototypes.requires_grad
    torch.testing.assert_close(prototypes.norm(dim=-1), torch.ones(3))
    expected = F.normalize(padded_embeds(model, TASK.prompts()), dim=-1)
    torch.testing.assert_close(prototypes, expected, rtol=1e-5, atol=1e-6)
    prototypes.zero_()  # the caller's own copy
    assert torch.equal(model.prototypes().norm(dim=-1) > 0.9, torch.tensor([True] * 3))
    assert len(encodings) == 1

    mean = torch.stack([model.prototypes(template) for template in TASK.templates]).mean(dim=0)
    torch.testing.assert_close(model.prototypes(TASK.templates), F.normalize(mean, dim=-1))


def replace_by_state_dict(model):
    model.load_state_dict({name: tensor + 0.01 for name, tensor in model.state_dict().items()})


def optimizer_step(model):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model.encode(PROMPTS)[:, 0].sum().backward()
    optimizer.step()


def edit_data(model):
    model.text_projection.weight.data += torch.eye(16, 32)


def switch_adapter_off(model):
    model.disable_adapters()


def new_names(model):
    model.task = OrionTask.from_names(["bus", "car", "train"])


@pytest.mark.parametrize("change", [replace_by_state_dict, optimizer_step, edit_data, switch_adapter_off, new_names])
def test_kept_prototypes_follow_every_change(model, change):
    before = model.prototypes()
    change(model)
    after = model.prototypes()
    assert (after - before).abs().max() > 1e-4
    torch.testing.assert_close(
        after, F.normalize(padded_embeds(model, model.task.prompts()), dim=-1), rtol=1e-4, atol=1e-5
    )


def test_prototypes_are_computed_again_after_merging_and_ignore_dropout(base, encodings):
    model = OrionCLIPTextModel.from_pretrained(base)
    model.task = TASK
    model.add_lora(rank=2, dropout=0.5)
    train_a_little(model)
    model.train()
    first = model.prototypes()
    assert model.training
    model.merge_lora()
    torch.testing.assert_close(model.prototypes(), first, rtol=1e-5, atol=1e-5)
    assert len(encodings) == 2


def test_prototypes_need_a_task(base):
    with pytest.raises(ValueError, match=r"no task: set model.task"):
        OrionCLIPTextModel.from_pretrained(base).prototypes()


# Saving


def test_saved_prototypes_are_those_before_and_after_training(base, adapter):
    stored = load_file(adapter / "prototypes.safetensors")
    before = OrionCLIPTextModel.from_pretrained(base)
    before.task = TASK
    after = OrionCLIPTextModel.from_pretrained(adapter)
    torch.testing.assert_close(stored["anchors"], before.prototypes(TASK.templates))
    torch.testing.assert_close(stored["prototypes"], after.prototypes(TASK.templates))
    assert torch.equal(after.anchors, stored["anchors"])


def test_given_prototypes_are_saved_and_kept(base, tmp_path):
    model = OrionCLIPTextModel.from_pretrained(base)
    model.task = TASK
    given = torch.eye(3, 16)
    model.save_pretrained(tmp_path / "first", prototypes=given)
    OrionCLIPTextModel.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    assert torch.equal(load_file(tmp_path / "second" / "prototypes.safetensors")["prototypes"], given)
    assert set(os.listdir(tmp_path / "second")) == FULL_FILES | ORION_FILES | PROCESSOR_FILES


def test_merged_repository_is_a_whole_clip(base, adapter, model, tmp_path):
    model.save_pretrained(tmp_path / "merged", merged=True)
    assert set(os.listdir(tmp_path / "merged")) == FULL_FILES | ORION_FILES | PROCESSOR_FILES
    assert not model.is_merged
    merged = OrionCLIPTextModel.from_pretrained(tmp_path / "merged")
    assert not merged.has_lora and merged.task == TASK and torch.equal(merged.anchors, model._frozen_prototypes())
    assert torch.equal(padded_embeds(merged), padded_embeds(OrionCLIPTextModel.from_pretrained(adapter, merge=True)))
    stock, original = CLIPModel.from_pretrained(tmp_path / "merged"), CLIPModel.from_pretrained(base)
    for name, tensor in original.vision_model.state_dict().items():
        assert torch.equal(tensor, stock.vision_model.state_dict()[name])
    assert torch.equal(stock.logit_scale, original.logit_scale)


def test_saving_while_merged_writes_the_same_files(adapter, tmp_path):
    loaded = OrionCLIPTextModel.from_pretrained(adapter)
    loaded.save_pretrained(tmp_path / "unmerged")
    loaded.save_pretrained(tmp_path / "full-unmerged", merged=True)
    loaded.merge_lora()
    loaded.save_pretrained(tmp_path / "merged")
    loaded.save_pretrained(tmp_path / "full-merged", merged=True)
    assert loaded.is_merged
    for name in ADAPTER_FILES | {"orion_config.json"}:
        assert (tmp_path / "merged" / name).read_bytes() == (adapter / name).read_bytes()
    assert contents(tmp_path / "unmerged") == contents(adapter)
    full = [load_file(tmp_path / name / "model.safetensors") for name in ("full-unmerged", "full-merged")]
    assert all(torch.equal(tensor, full[1][name]) for name, tensor in full[0].items())


def test_adapter_on_a_merged_model_has_that_as_its_base(model, tmp_path):
    model.save_pretrained(tmp_path / "merged", merged=True)
    again = OrionCLIPTextModel.from_pretrained(tmp_path / "merged")
    again.add_lora(rank=1)
    train_a_little(again)
    again.save_pretrained(tmp_path / "again")
    loaded = OrionCLIPTextModel.from_pretrained(tmp_path / "again")
    assert loaded.orion_config.base_model == str(tmp_path / "merged")
    assert torch.equal(padded_embeds(loaded), padded_embeds(again))


def test_text_only_base_merges_to_a_text_model(base, tmp_path):
    CLIPTextModelWithProjection.from_pretrained(base).save_pretrained(tmp_path / "text")
    model = OrionCLIPTextModel.from_pretrained(tmp_path / "text")
    model.tokenizer = OrionCLIPTextModel.from_pretrained(base).tokenizer
    model.task = TASK
    model.add_lora(rank=2)
    train_a_little(model)
    model.save_pretrained(tmp_path / "merged", merged=True)
    stock = CLIPTextModelWithProjection.from_pretrained(tmp_path / "merged")
    assert stock.config.architectures == ["CLIPTextModelWithProjection"]
    loaded = OrionCLIPTextModel.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(padded_embeds(loaded), padded_embeds(model), rtol=1e-5, atol=1e-5)


def fail(*args):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("merged", [False, True])
def test_failed_save_leaves_everything_as_it_was(base, merged, tmp_path, monkeypatch):
    model = trained_model(base)
    model.save_pretrained(tmp_path / "out", merged=merged)
    before = contents(tmp_path)
    with torch.no_grad():
        model.text_projection.weight.mul_(2)
    monkeypatch.setattr(modeling_orion, "write_prototypes", fail)
    with pytest.raises(OSError, match="No space left"):
        model.save_pretrained(tmp_path / "out", merged=merged)
    with pytest.raises(OSError, match="No space left"):
        model.save_pretrained(tmp_path / "new", merged=merged)
    assert contents(tmp_path) == before and sorted(os.listdir(tmp_path)) == ["out"]


def test_saving_again_replaces_ours_and_keeps_the_rest(model, tmp_path):
    model.save_pretrained(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "plots").mkdir()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(2)
    model.save_pretrained(tmp_path)
    assert set(os.listdir(tmp_path)) == ADAPTER_FILES | ORION_FILES | PROCESSOR_FILES | {"notes.txt", "plots"}
    assert torch.equal(padded_embeds(OrionCLIPTextModel.from_pretrained(tmp_path)), padded_embeds(model))


def test_stale_shards_do_not_survive(model, tmp_path):
    model.save_pretrained(tmp_path, merged=True, max_shard_size="50KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    model.save_pretrained(tmp_path, merged=True)
    assert set(os.listdir(tmp_path)) == FULL_FILES | ORION_FILES | PROCESSOR_FILES


def test_adapter_and_full_weights_do_not_share_a_folder(base, model, tmp_path):
    folder = shutil.copytree(base, tmp_path / "base")
    before = contents(folder)
    with pytest.raises(ValueError, match=r"holds config.json.*Save to another"):
        model.save_pretrained(folder)
    assert contents(folder) == before
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"holds adapter_config.json.*Save to another"):
        model.save_pretrained(tmp_path / "adapter", merged=True)
    with pytest.raises(ValueError, match="is a file"):
        model.save_pretrained(tmp_path / "adapter" / "orion_config.json")


def test_lora_without_a_task_is_a_plain_adapter(base, tmp_path):
    model = OrionCLIPTextModel.from_pretrained(base)
    model.add_lora(rank=1)
    model.save_pretrained(tmp_path / "adapter")
    assert set(os.listdir(tmp_path / "adapter")) == ADAPTER_FILES | PROCESSOR_FILES
    loaded = OrionCLIPTextModel.from_pretrained(tmp_path / "adapter")
    assert loaded.has_lora and loaded.task is None


def test_only_the_main_process_saves(model, tmp_path):
    model.save_pretrained(tmp_path / "out", is_main_process=False)
    assert not (tmp_path / "out").exists()


# orion_config.json


def test_config_round_trip_keeps_unknown_keys(adapter_copy):
    edit_json(adapter_copy / "orion_config.json", training={"lr": 5e-6}, from_the_future={"a": [1]})
    model = OrionCLIPTextModel.from_pretrained(adapter_copy)
    assert model.orion_config.training == {"lr": 5e-6}
    model.save_pretrained(adapter_copy)
    assert json.loads((adapter_copy / "orion_config.json").read_text())["from_the_future"] == {"a": [1]}


def task_dict(**changes):
    return TASK.to_dict() | changes


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"format_version": 2}, r"format version 2 is newer than 1.*Upgrade"),
        ({"format_version": "1"}, r"format_version must be a positive integer"),
        ({"format_version": True}, r"format_version must be a positive integer"),
        ({"task": None}, r"task.class_names is missing or empty"),
        ({"task": task_dict(class_names=None)}, r"task.class_names is missing or empty"),
        ({"task": task_dict(class_names=[])}, r"task.class_names is missing or empty"),
        ({"task": task_dict(class_names="cat")}, r"task.class_names must be a list of strings"),
        ({"task": task_dict(class_names=["cat", 3])}, r"task.class_names\[1\] must be a string"),
        ({"task": task_dict(class_names=["cat"] * (MAX_CLASSES + 1))}, r"100001 entries"),
        ({"task": task_dict(class_names=["cat", "x" * 2000])}, r"2000 characters"),
        ({"task": task_dict(class_names=["cat", "\x1b[2J"])}, r"control characters: '\\x1b\[2J'"),
        ({"task": task_dict(class_names=["cat", "cat"])}, r"task is not valid: .*cat"),
        ({"task": task_dict(eval_template="no slot")}, r"task is not valid"),
        ({"base_model": ["a"]}, r"base_model must be a string"),
        ({"training": []}, r"training must be a JSON object"),
    ],
)
def test_bad_config_is_refused_in_one_line(adapter_copy, changes, message):
    edit_json(adapter_copy / "orion_config.json", **changes)
    with pytest.raises(ValueError, match=message) as error:
        OrionCLIPTextModel.from_pretrained(adapter_copy)
    assert str(adapter_copy / "orion_config.json") in one_line(error)


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "[]", '{"format_version": 1e999}', "\udcff"])
def test_broken_json_is_refused_in_one_line(adapter_copy, text):
    (adapter_copy / "orion_config.json").write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match=r"orion_config\.json") as error:
        OrionCLIPTextModel.from_pretrained(adapter_copy)
    one_line(error)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
task_values = st.dictionaries(
    st.sampled_from(["name", "class_names", "templates", "eval_template", "hub_datasets", "x"]),
    json_values | st.lists(st.text(max_size=5), max_size=3),
)


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["format_version", "base_model", "base_revision", "task", "training", "y"]),
        json_values | task_values | st.just(1),
    )
)
def test_any_config_gives_a_task_or_a_value_error(data):
    try:
        config = OrionConfig.from_dict(data)
    except ValueError as error:
        assert str(error).startswith("orion_config.json: ")
    else:
        assert len(config.task.class_names) >= 1
        assert OrionConfig.from_dict(config.to_dict()) == config


# Repositories that are wrong


def test_adapter_for_another_base(adapter_copy, tmp_path):
    other = save_tiny_clip(tmp_path / "other", width=48)
    edit_json(adapter_copy / "adapter_config.json", base_model_name_or_path=str(other))
    with pytest.raises(ValueError, match=r"does not fit the base model .*adapter was trained on") as error:
        OrionCLIPTextModel.from_pretrained(adapter_copy)
    assert str(adapter_copy / "adapter_model.safetensors") in one_line(error) and str(other) in str(error.value)


@pytest.mark.parametrize("name", ["org/not-here", "/not/here", ""])
def test_missing_base_offline(adapter_copy, name):
    edit_json(adapter_copy / "adapter_config.json", base_model_name_or_path=name)
    with pytest.raises((OSError, ValueError)) as error:
        OrionCLIPTextModel.from_pretrained(adapter_copy, local_files_only=True)
    message = one_line(error)
    assert str(adapter_copy) in message and name in message and "adapter_config.json" in message


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "prototypes.safetensors"])
@pytest.mark.parametrize("damage", ["truncate", "garbage"])
def test_damaged_safetensors(adapter_copy, name, damage):
    data = (adapter_copy / name).read_bytes()
    (adapter_copy / name).write_bytes(data[: len(data) // 2] if damage == "truncate" else b"\xff" * len(data))
    with pytest.raises(ValueError, match=r"truncated or corrupt.*again") as error:
        OrionCLIPTextModel.from_pretrained(adapter_copy)
    assert str(adapter_copy / name) in one_line(error)


def test_damaged_base(base, adapter_copy, tmp_path):
    folder = shutil.copytree(base, tmp_path / "base")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])
    edit_json(adapter_copy / "adapter_config.json", base_model_name_or_path=str(folder))
    for repository in (folder, adapter_copy):
        with pytest.raises(ValueError, match=r"truncated or corrupt") as error:
            OrionCLIPTextModel.from_pretrained(repository)
        assert str(folder) in one_line(error)


class Trap:
    """Unpickling it writes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def test_pickled_adapter_is_refused_unread(adapter_copy, tmp_path):
    (adapter_copy / "adapter_model.bin").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    assert OrionCLIPTextModel.from_pretrained(adapter_copy).has_lora  # from the safe file beside it
    (adapter_copy / "adapter_model.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"adapter_model.bin\) are refused, because reading a pickle can run code"
    ) as error:
        OrionCLIPTextModel.from_pretrained(adapter_copy)
    assert str(adapter_copy) in one_line(error)
    assert not (tmp_path / "sprung").exists()


def test_pickled_merged_repository_is_refused_unread(model, tmp_path):
    model.save_pretrained(tmp_path / "merged", merged=True)
    (tmp_path / "merged" / "model.safetensors").unlink()
    (tmp_path / "merged" / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(OSError, match="safetensors"):
        OrionCLIPTextModel.from_pretrained(tmp_path / "merged")
    assert not (tmp_path / "sprung").exists()


def test_incomplete_or_foreign_adapters(adapter_copy):
    weights = adapter_copy / "adapter_model.safetensors"
    tensors = load_file(weights)
    save_file(dict(list(tensors.items())[2:]), weights)
    with pytest.raises(ValueError, match=r"not those that adapter_config.json describes") as error:
        OrionCLIPTextModel.from_pretrained(adapter_copy)
    one_line(error)
    save_file(tensors, weights)
    edit_json(adapter_copy / "adapter_config.json", target_modules="(")
    with pytest.raises(ValueError, match=r"not those that adapter_config.json describes"):
        OrionCLIPTextModel.from_pretrained(adapter_copy)
    edit_json(adapter_copy / "adapter_config.json", r=5, target_modules=modeling_orion.LORA_TARGETS)
    with pytest.raises(ValueError, match=r"not those that adapter_config.json describes") as error:
        OrionCLIPTextModel.from_pretrained(adapter_copy)
    one_line(error)
    (adapter_copy / "adapter_config.json").write_text('{"peft_type": "IA3", "target_modules": ["q_proj"]}')
    with pytest.raises(ValueError, match="only LoRA adapters"):
        OrionCLIPTextModel.from_pretrained(adapter_copy)
    (adapter_copy / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="not an adapter config"):
        OrionCLIPTextModel.from_pretrained(adapter_copy)


def test_prototypes_of_another_shape(adapter_copy):
    save_file(
        {"prototypes": torch.zeros(3, 16), "anchors": torch.zeros(4, 16)},
        adapter_copy / "prototypes.safetensors",
    )
    with pytest.raises(ValueError, match=r"'anchors' must have the shape \(3, 16\)") as error:
        OrionCLIPTextModel.from_pretrained(adapter_copy)
    one_line(error)
    (adapter_copy / "prototypes.safetensors").unlink()
    assert OrionCLIPTextModel.from_pretrained(adapter_copy).anchors is None


def test_not_a_clip(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match=r"is a 'bert' checkpoint: choose a CLIP"):
        OrionCLIPTextModel.from_pretrained(tmp_path)


def test_model_can_be_copied_and_pickled_without_its_token(base):
    model = OrionCLIPTextModel.from_pretrained(base, token="hf_sentinel")
    model.task = TASK
    twin = copy.deepcopy(model)
    assert torch.equal(twin.prototypes(), model.prototypes())
    pickled = pickle.dumps(OrionCLIPTextModel.from_pretrained(base, token="hf_sentinel"))
    assert b"hf_sentinel" not in pickled
    assert pickle.loads(pickled).encode("cat").shape == (1, 16)

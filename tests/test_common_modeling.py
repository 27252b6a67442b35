"""What transformers' common model tests ask of a CLIP text model, asked of ours and of its parent."""

import copy
import inspect

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_clip_folder import TASK, tiny_config, tiny_tokenizer
from transformers import CLIPTextConfig, CLIPTextModelWithProjection

from orion_hf.modeling_orion import OrionCLIPTextModel

INPUT_IDS = torch.tensor([[512, 7, 8, 9, 513], [512, 7, 513, 513, 513]])


@pytest.fixture
def config() -> CLIPTextConfig:
    return tiny_config(tiny_tokenizer()).text_config


@pytest.fixture
def pair(config) -> tuple[OrionCLIPTextModel, CLIPTextModelWithProjection]:
    """Our model and its parent with the same weights."""
    ours, parent = OrionCLIPTextModel(config).eval(), CLIPTextModelWithProjection(config).eval()
    parent.load_state_dict(ours.state_dict())
    return ours, parent


def test_class_is_the_parent_to_transformers(config, pair):
    ours, parent = pair
    assert OrionCLIPTextModel.config_class is CLIPTextConfig
    for name in (
        "base_model_prefix",
        "main_input_name",
        "supports_gradient_checkpointing",
        "_supports_sdpa",
        "_supports_flash_attn",
        "_supports_attention_backend",
        "_no_split_modules",
        "_tied_weights_keys",
        "input_modalities",
    ):
        assert getattr(OrionCLIPTextModel, name) == getattr(CLIPTextModelWithProjection, name)
    assert inspect.signature(OrionCLIPTextModel.forward) == inspect.signature(CLIPTextModelWithProjection.forward)
    assert OrionCLIPTextModel.forward is CLIPTextModelWithProjection.forward
    assert list(ours.state_dict()) == list(parent.state_dict())
    assert not OrionCLIPTextModel.is_remote_code()
    assert type(OrionCLIPTextModel._from_config(config, attn_implementation="eager")) is OrionCLIPTextModel


@pytest.mark.parametrize("missing", [False, True])
def test_initial_weights_are_the_parents(config, missing):
    weights = []
    for model_class in (OrionCLIPTextModel, CLIPTextModelWithProjection):
        torch.manual_seed(0)
        model = model_class.from_pretrained(None, config=config, state_dict={}) if missing else model_class(config)
        weights.append(model.state_dict())
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_head_of_a_headless_checkpoint_is_reported_missing(pair, tmp_path):
    pair[1].base_model.save_pretrained(tmp_path)
    loaded, info = OrionCLIPTextModel.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == {"text_projection.weight"}
    assert torch.equal(loaded.get_input_embeddings().weight, pair[1].get_input_embeddings().weight)


def test_attention_can_be_switched(pair):
    ours, _ = pair
    before = ours.encode(INPUT_IDS)
    ours.set_attn_implementation("eager")
    torch.testing.assert_close(ours.encode(INPUT_IDS), before, rtol=1e-4, atol=1e-5)
    assert ours(INPUT_IDS, output_attentions=True).attentions[0].shape == (2, 2, 5, 5)


def test_outputs_are_the_parents(pair):
    ours, parent = pair
    options = {"output_hidden_states": True, "attention_mask": torch.ones_like(INPUT_IDS)}
    left, right = ours(INPUT_IDS, **options), parent(INPUT_IDS, **options)
    assert list(left) == list(right)
    assert torch.equal(left.text_embeds, right.text_embeds)
    assert torch.equal(left.hidden_states[-1], right.hidden_states[-1])
    assert torch.equal(ours(INPUT_IDS, return_dict=False)[0], left.text_embeds)


def test_save_and_load_as_the_parent_does(pair, tmp_path):
    ours, parent = pair
    ours.save_pretrained(tmp_path / "ours")
    parent.save_pretrained(tmp_path / "parent")
    files = sorted(path.name for path in (tmp_path / "parent").iterdir())
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == files
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "parent"))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())

    for model_class in (OrionCLIPTextModel, CLIPTextModelWithProjection):
        loaded, info = model_class.from_pretrained(tmp_path / "ours", output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        assert torch.equal(loaded(INPUT_IDS).text_embeds, parent(INPUT_IDS).text_embeds)

    ours.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").exists()
    loaded = OrionCLIPTextModel.from_pretrained(tmp_path / "shards")
    assert torch.equal(loaded(INPUT_IDS).text_embeds, parent(INPUT_IDS).text_embeds)

    ours.save_pretrained(tmp_path / "given", state_dict={k: v * 0 for k, v in ours.state_dict().items()})
    assert OrionCLIPTextModel.from_pretrained(tmp_path / "given").text_projection.weight.abs().max() == 0


def test_loading_options_of_transformers(pair, config, tmp_path):
    ours, _ = pair
    ours.save_pretrained(tmp_path)
    from_state = OrionCLIPTextModel.from_pretrained(None, config=config, state_dict=ours.state_dict())
    assert torch.equal(from_state(INPUT_IDS).text_embeds, ours(INPUT_IDS).text_embeds)
    given = OrionCLIPTextModel.from_pretrained(tmp_path, config=config, use_safetensors=True)
    assert torch.equal(given(INPUT_IDS).text_embeds, ours(INPUT_IDS).text_embeds)
    assert OrionCLIPTextModel.from_pretrained(str(tmp_path), dtype="float16").dtype == torch.float16
    assert OrionCLIPTextModel.from_pretrained(tmp_path, attention_dropout=0.5).config.attention_dropout == 0.5
    with pytest.raises(RuntimeError):
        OrionCLIPTextModel.from_pretrained(tmp_path, vocab_size=10)
    other = OrionCLIPTextModel.from_pretrained(tmp_path, vocab_size=10, ignore_mismatched_sizes=True)
    assert other.get_input_embeddings().num_embeddings == 10
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["head.weight"] = tensors.pop("text_projection.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    mapped = OrionCLIPTextModel.from_pretrained(tmp_path, key_mapping={"^head": "text_projection"})
    assert torch.equal(mapped.text_projection.weight, ours.text_projection.weight)


def test_sdpa_equals_eager(pair, tmp_path):
    pair[0].save_pretrained(tmp_path)
    sdpa, eager = (OrionCLIPTextModel.from_pretrained(tmp_path, attn_implementation=name) for name in ("sdpa", "eager"))
    torch.testing.assert_close(sdpa(INPUT_IDS).text_embeds, eager(INPUT_IDS).text_embeds, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sdpa.encode(INPUT_IDS), eager.encode(INPUT_IDS), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("way", ["forward", "encode"])
def test_gradient_checkpointing_gives_the_same_gradients(config, lora, way):
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = OrionCLIPTextModel(config).train()
        if lora:
            model.add_lora(rank=2)
        if checkpointing:
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
        output = model(INPUT_IDS).text_embeds if way == "forward" else model.encode(INPUT_IDS, normalize=False)
        output.square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and gradients[0]
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-5)


def test_resized_vocabulary(pair, tmp_path):
    ours, parent = pair
    ours.resize_token_embeddings(520)
    parent.resize_token_embeddings(520)
    assert ours.config.vocab_size == parent.config.vocab_size == 520
    assert torch.equal(ours(INPUT_IDS).text_embeds, parent(INPUT_IDS).text_embeds)
    ours.save_pretrained(tmp_path)
    assert OrionCLIPTextModel.from_pretrained(tmp_path).get_input_embeddings().num_embeddings == 520


def test_compiled_forward(pair):
    ours, _ = pair
    compiled = torch.compile(copy.deepcopy(ours), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(INPUT_IDS).text_embeds, ours(INPUT_IDS).text_embeds)


def test_a_model_made_from_a_config_can_be_saved_with_a_task(config, tmp_path):
    model = OrionCLIPTextModel(config)
    model.tokenizer = tiny_tokenizer()
    model.task = TASK
    model.save_pretrained(tmp_path)
    loaded = OrionCLIPTextModel.from_pretrained(tmp_path)
    assert loaded.task == TASK
    torch.testing.assert_close(loaded.prototypes(), model.eval().prototypes())

"""The prefix tree must give what the padded stock forward gives: values, gradients, order."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPTextModelWithProjection

from orion_hf.prompt_tree import build_packs, encode_packs, trim_prompts

BOS, EOS, PAD, VOCAB = 97, 98, 5, 99
PREFIX = [BOS, 11, 12, 13]
PROMPTS = [
    [*PREFIX, 20, 8, EOS],
    [*PREFIX, 21, 22, 23, 8, EOS],
    [*PREFIX, 20, 24, 8, EOS],
    [BOS, 30, EOS],
    [*PREFIX, 20, 8, EOS],  # again
    [BOS, EOS],
    [*PREFIX, 21, 22, 8, EOS],
]
FULL = [BOS, *range(10, 85), EOS]
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]


def text_config(**changes) -> CLIPTextConfig:
    options = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, projection_dim=16)
    options |= dict(num_hidden_layers=2, num_attention_heads=4, pad_token_id=PAD)
    options |= dict(bos_token_id=BOS, eos_token_id=EOS)
    return CLIPTextConfig(**(options | changes))


def text_model(attn: str = "sdpa", lora: bool = True, **changes) -> CLIPTextModelWithProjection:
    torch.manual_seed(0)
    model = CLIPTextModelWithProjection._from_config(text_config(**changes), attn_implementation=attn)
    for parameter in model.parameters():  # far from the tiny initial values, so that a wrong mask shows
        torch.nn.init.normal_(parameter, std=0.2)
    if lora:
        get_peft_model(model, LoraConfig(r=4, target_modules=PROJECTIONS, init_lora_weights=False))
    return model.eval()


@pytest.fixture(scope="module")
def model() -> CLIPTextModelWithProjection:
    return text_model()


def pad(prompts: list[list[int]], length: int = 77, token: int = PAD) -> Tensor:
    return torch.tensor([[*ids, *[token] * (length - len(ids))] for ids in prompts])


def gradients_of(model: torch.nn.Module, text_embeds: Tensor) -> dict[str, Tensor]:
    # A weight for every entry, so that exchanged rows or dimensions cannot cancel.
    weights = torch.linspace(-1, 2, text_embeds.numel()).view_as(text_embeds)
    model.zero_grad(set_to_none=True)
    (text_embeds.float() * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_near(ours: Tensor, theirs: Tensor, tolerance: float = 1e-5) -> None:
    assert ours.shape == theirs.shape
    error = (ours - theirs).abs().max() / theirs.abs().max()
    assert error <= tolerance, f"relative error {error:.1e}"


def assert_same_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert ours.keys() == theirs.keys()
    largest = max(gradient.abs().max() for gradient in theirs.values())
    for name, gradient in theirs.items():
        # Some are zero but for rounding (keys' biases, queries of a single token): hence the floor.
        error = (ours[name] - gradient).abs().max() / max(gradient.abs().max(), 0.01 * largest)
        assert error <= tolerance, f"{name}: relative error {error:.1e}"


def assert_same_as_padded(
    model: CLIPTextModelWithProjection, prompts: list[list[int]], tolerance: float = 1e-5, **packing
) -> None:
    """Values and gradients of the tree against ``model(input_ids)`` with every prompt padded to 77 tokens."""
    input_ids = pad(prompts)
    expected = model(input_ids).text_embeds
    expected_gradients = gradients_of(model, expected)
    packs = build_packs(trim_prompts(input_ids, model.config.eos_token_id), **packing)
    ours = encode_packs(model, packs)
    assert_near(ours, expected, tolerance)
    assert_same_gradients(gradients_of(model, ours), expected_gradients, tolerance)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("eos_token_id", [EOS, 2])
def test_equals_the_padded_forward(attn, eos_token_id):
    assert_same_as_padded(text_model(attn, eos_token_id=eos_token_id), PROMPTS)


@pytest.mark.parametrize("node_budget", [1, 9, 16, 10_000])
def test_any_node_budget_gives_the_same(model, node_budget):
    assert_same_as_padded(model, PROMPTS, node_budget=node_budget)


@pytest.mark.parametrize("prompts", [[PROMPTS[0]], [FULL], [FULL, *PROMPTS], [[EOS]], [PROMPTS[3]] * 3])
def test_single_full_length_and_repeated_prompts(model, prompts):
    assert_same_as_padded(model, prompts)


def test_all_weights_get_the_padded_gradients_without_lora():
    assert_same_as_padded(text_model(lora=False), PROMPTS)


def test_custom_vocabulary_with_an_end_token_that_is_not_the_highest():
    prompts = [[1, 400, 3], [1, 400, 401, 3], [1, 2, 3]]
    assert_same_as_padded(text_model(vocab_size=500, bos_token_id=1, eos_token_id=3), prompts)


def test_old_checkpoints_pool_the_highest_id_even_if_it_is_no_end_token():
    model = text_model(eos_token_id=2)
    assert_same_as_padded(model, [[1, 40, 2, 50, 50, 3], [7, 6, 5], [1, 40, 2]])


def test_a_row_without_end_token_is_read_at_its_first_token_as_in_transformers(model):
    assert_same_as_padded(model, [[BOS, 20, 21], PROMPTS[0], [30, 31]])


def test_gradient_checkpointing_in_training_mode():
    model = text_model()
    expected = gradients_of(model, model(pad(PROMPTS)).text_embeds)
    calls = []
    model.text_model.encoder.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    model.gradient_checkpointing_enable()
    model.train()
    gradients = gradients_of(model, encode_packs(model, build_packs(PROMPTS)))
    assert len(calls) == 2, "the layer runs again in the backward pass"
    assert_same_gradients(gradients, expected)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_as_near_to_float32_as_the_padded_forward(attn, dtype):
    model = text_model(attn)
    exact = model(pad(PROMPTS)).text_embeds
    exact_gradients = gradients_of(model, exact)
    with torch.autocast("cpu", dtype=dtype):
        ours = encode_packs(model, build_packs(PROMPTS))
    gradients = gradients_of(model, ours)
    tolerance = 16 * torch.finfo(dtype).eps
    assert ours.dtype == dtype
    assert_near(ours.float(), exact, tolerance)
    assert_same_gradients(gradients, exact_gradients, 2 * tolerance)


def test_half_precision_weights():
    model = text_model(lora=False).to(torch.bfloat16)
    with torch.no_grad():
        ours = encode_packs(model, build_packs(PROMPTS))
        expected = model(pad(PROMPTS)).text_embeds
    assert ours.dtype == torch.bfloat16
    assert_near(ours.float(), expected.float(), 16 * torch.finfo(torch.bfloat16).eps)


def test_works_on_a_clip_model_and_through_a_peft_wrapper():
    small = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    vision = dict(small, image_size=16, patch_size=8)
    clip = CLIPModel(CLIPConfig(text_config=text_config().to_dict(), vision_config=vision, projection_dim=16))
    clip.eval()
    with torch.no_grad():
        expected = clip.get_text_features(pad(PROMPTS)).pooler_output
        assert_near(encode_packs(clip, build_packs(PROMPTS)), expected)

    wrapped = get_peft_model(text_model(lora=False), LoraConfig(r=4, target_modules=PROJECTIONS))
    with torch.no_grad():
        expected = wrapped(input_ids=pad(PROMPTS)).text_embeds
        assert_near(encode_packs(wrapped, build_packs(PROMPTS)), expected)


def padded_soft_forward(model: CLIPTextModelWithProjection, prompts: list[list[int]], soft: Tensor) -> Tensor:
    """The stock forward with soft vectors put in place of the token embeddings by a hook."""
    input_ids = pad(prompts)

    def insert(module, inputs, output):
        rows = (-1 - input_ids).clamp(min=0)
        return torch.where((input_ids < 0)[..., None], soft[rows], output)

    hook = model.text_model.embeddings.token_embedding.register_forward_hook(insert)
    try:
        return model(input_ids.clamp(min=0)).text_embeds
    finally:
        hook.remove()


@pytest.mark.parametrize(
    ("prompts", "nodes"),
    [
        # one context for all classes, name at the end: bos and context are computed once
        ([[BOS, -1, -2, -3, name, 8, EOS] for name in (20, 21, 22)], 4 + 3 * 3),
        # class-specific contexts are other rows
        ([[BOS, -1 - 2 * k, -2 - 2 * k, 20 + k, 8, EOS] for k in range(3)], 1 + 3 * 5),
        # name in the middle, name in front
        ([[BOS, -1, name, -2, 8, EOS] for name in (20, 21)], 2 + 2 * 4),
        ([[BOS, name, -1, -2, 8, EOS] for name in (20, 21)], 1 + 2 * 5),
        # hard prompts beside soft ones
        ([[BOS, -2, 20, EOS], [BOS, 11, 20, EOS]], 1 + 2 * 3),
    ],
)
@pytest.mark.parametrize("eos_token_id", [EOS, 2])
def test_soft_prompts_values_and_gradients(prompts, nodes, eos_token_id):
    model = text_model(eos_token_id=eos_token_id)
    soft = torch.randn(6, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    packs = build_packs(trim_prompts(pad(prompts), eos_token_id))
    assert sum(map(len, packs)) == nodes

    expected = padded_soft_forward(model, prompts, soft)
    gradients_of(model, expected)
    expected_slope, soft.grad = soft.grad, None
    ours = encode_packs(model, packs, soft_embeds=soft)
    gradients_of(model, ours)
    assert_near(ours, expected)
    assert_near(soft.grad, expected_slope)


def test_soft_vectors_of_another_dtype_are_cast_to_that_of_the_tokens():
    model = text_model(lora=False).to(torch.bfloat16)
    soft = torch.randn(1, 32, requires_grad=True)
    encode_packs(model, build_packs([[BOS, -1, EOS]]), soft_embeds=soft).float().sum().backward()
    assert soft.grad.dtype == torch.float32
    assert soft.grad.abs().sum() > 0


@st.composite
def sharing_prompts(draw) -> list[list[int]]:
    """Prompts that continue earlier ones from a random point, over few tokens, so that they share a lot."""
    prompts: list[list[int]] = []
    for _ in range(draw(st.integers(1, 12))):
        source = draw(st.sampled_from(prompts)) if prompts else []
        kept = source[: draw(st.integers(0, len(source)))]
        ids = kept + draw(st.lists(st.integers(0, 4) | st.just(EOS), max_size=8))
        prompts.append(ids[:76] or [EOS])
    return [ids if draw(st.booleans()) else [*ids, EOS] for ids in prompts]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(prompts=sharing_prompts(), node_budget=st.integers(1, 60), old=st.booleans())
def test_random_prompts_with_random_sharing(prompts, node_budget, old):
    model = RANDOM_MODELS[old]
    input_ids = pad(prompts, length=max(map(len, prompts)), token=0)
    packs = build_packs(trim_prompts(input_ids, model.config.eos_token_id), node_budget)
    with torch.no_grad():
        assert_near(encode_packs(model, packs), model(input_ids).text_embeds)


RANDOM_MODELS = {old: text_model(eos_token_id=2 if old else EOS) for old in (False, True)}


@settings(max_examples=100, deadline=None, derandomize=True)
@given(prompts=sharing_prompts(), node_budget=st.integers(1, 60))
def test_packs_are_the_prefix_tree_of_their_prompts(prompts, node_budget):
    packs = build_packs(prompts, node_budget)
    assert sorted(torch.cat([pack.rows for pack in packs]).tolist()) == list(range(len(prompts)))
    for pack in packs:
        own = {tuple(prompts[row]) for row in pack.rows.tolist()}
        assert len(pack) == len({ids[:end] for ids in own for end in range(1, len(ids) + 1)})
        assert len(pack) <= node_budget or len(own) == 1
        assert pack.longest == max(map(len, own))
        ancestors = pack.ancestors()
        for row, leaf in zip(pack.rows.tolist(), pack.leaves.tolist(), strict=True):
            path = ancestors[leaf].nonzero().flatten()
            assert pack.token_ids[path].tolist() == prompts[row]
            assert pack.position_ids[path].tolist() == list(range(len(prompts[row])))


def test_trim_prompts():
    padded = [[BOS, 20, EOS, EOS, EOS], [BOS, 20, 21, EOS, PAD]]
    expected = [[BOS, 20, EOS], [BOS, 20, 21, EOS]]
    assert trim_prompts(torch.tensor(padded), EOS) == trim_prompts(padded, EOS) == expected
    assert trim_prompts(padded, 2) == expected
    assert trim_prompts([[BOS, -1, EOS, PAD], [BOS, EOS]], EOS) == [[BOS, -1, EOS], [BOS, EOS]]
    assert trim_prompts([[3, 4, 5]], EOS) == [[3]]


def test_some_packs_alone_give_their_own_prompts_in_input_order(model):
    packs = build_packs(PROMPTS, node_budget=12)
    assert len(packs) > 2
    with torch.no_grad():
        everything = encode_packs(model, packs)
        for pack in packs:
            assert_near(encode_packs(model, [pack]), everything[pack.rows.sort().values])


def test_packing_is_fast_and_shares():
    names = [[2 + i % 40, 42 + i // 40 % 40, 8, EOS] for i in range(1000)]
    prompts = [[BOS, *template, *name] for template in ([11, 12], [13, 14, 15], [16]) for name in names]
    start = time.process_time()
    packs = build_packs(prompts)
    assert time.process_time() - start < 0.5  # measured 0.03 s; the slack is for slow machines
    assert sum(map(len, packs)) < 0.6 * sum(map(len, prompts))


def test_packs_move_between_devices():
    [pack] = build_packs(PROMPTS)
    moved = pack.to("meta")
    tensors = (moved.token_ids, moved.position_ids, moved.subtree_ends, moved.leaves, moved.rows)
    assert all(t.is_meta for t in tensors)
    assert (moved.longest, moved.soft_rows) == (pack.longest, pack.soft_rows)


def test_bad_input_is_refused_with_one_clear_line(model):
    too_long = [BOS] + [20] * 77 + [EOS]
    with pytest.raises(ValueError, match="Prompt 1 has 79 tokens, the text encoder has 77 positions"):
        encode_packs(model, build_packs([PROMPTS[0], too_long]))
    with pytest.raises(ValueError, match="no prompts"):
        build_packs([])
    with pytest.raises(ValueError, match="packs is empty"):
        encode_packs(model, [])
    with pytest.raises(ValueError, match=r"token_ids\[1\] is an empty prompt"):
        build_packs([[BOS, EOS], []])
    with pytest.raises(ValueError, match=r"input_ids\[0\] is an empty prompt"):
        trim_prompts([[]], EOS)
    with pytest.raises(ValueError, match=r"\(prompts, tokens\)"):
        trim_prompts(torch.tensor([BOS, EOS]), EOS)
    with pytest.raises(ValueError, match="node_budget"):
        build_packs(PROMPTS, node_budget=0)
    soft = build_packs([[BOS, -3, EOS]])
    with pytest.raises(ValueError, match="row 2 of soft_embeds, which has 0 rows"):
        encode_packs(model, soft)
    with pytest.raises(ValueError, match="which has 2 rows: pass soft_embeds with at least 3"):
        encode_packs(model, soft, soft_embeds=torch.zeros(2, 32))


def test_attention_that_takes_no_mask_is_refused():
    model = text_model(lora=False)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match='attn_implementation="sdpa"'):
        encode_packs(model, build_packs(PROMPTS))

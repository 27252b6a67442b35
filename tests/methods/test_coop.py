"""CoOp against golden vectors, its prompts, and as an estimator."""

import numpy as np
import pytest
import torch
from sklearn.base import clone
from torch.nn import functional as F
from transformers import CLIPTextConfig, CLIPTextModelWithProjection

from orion_hf import methods
from orion_hf.methods import coop as coop_module
from orion_hf.methods.coop import CoOp, context_prototypes, place_context, published_epochs
from orion_hf.methods.estimator import epoch_learning_rates
from orion_hf.prompt_tree import build_packs


class WordTokenizer:
    """Word-level tokenizer of the golden files: a full stop is a word, vocab - 2 starts and vocab - 1 ends a text."""

    def __init__(self, vocabulary: dict[str, int], size: int):
        self.vocabulary, self.size = vocabulary, size

    def __call__(self, texts, **_):
        words = [text.replace(".", " .").split() for text in texts]
        ids = [[self.size - 2, *map(self.vocabulary.__getitem__, row), self.size - 1] for row in words]
        return {"input_ids": ids}


def coop_of(case, dtype) -> CoOp:
    options, config = case.options, CLIPTextConfig(**case.options["text_config"])
    model = CLIPTextModelWithProjection(config)
    weights = {name[2:]: value for name, value in case.tensors.items() if name.startswith("w.")}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and all("position_ids" in name for name in missing)
    return CoOp(
        model.to(dtype),
        WordTokenizer(options["toy_vocab"], config.vocab_size),
        options["class_names"],
        n_ctx=options["n_ctx_requested"],
        ctx_init=options["ctx_init"] or None,
        class_token_position=options["class_token_position"],
        class_specific=options["class_specific"],
        lr=options["lr"],
        momentum=options["momentum"],
        weight_decay=options["weight_decay"],
        epochs=options["max_epoch"],
        batch_size=options["batch_size"],
        warmup_epochs=options["warmup_epoch"],
        warmup_lr=options["warmup_lr"],
        logit_scale=options["logit_scale"],
    )


@pytest.mark.golden("coop_")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_golden(case, dtype):
    {"coop": check_training, "lr_table": check_learning_rates}[case.options["method"]](case, dtype)


def check_learning_rates(case, dtype):
    for epochs, lr in case.options["base_lr"].items():
        rates = epoch_learning_rates(int(epochs), lr, case.options["warmup_epoch"], case.options["warmup_lr"])
        case.close(f"out.lr_epochs_{epochs}", torch.tensor(rates, dtype=torch.float64), 1e-15)


def close(case, name, value, float32_tolerance):
    """Float64 against ``out64`` where the file has it, float32 against ``out``."""
    exact = value.dtype == torch.float64 and f"out64.{name}" in case.tensors
    expected = case[f"out64.{name}" if exact else f"out.{name}"].to(value.dtype)
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-9 if exact else float32_tolerance)


def check_training(case, dtype):
    coop, options = coop_of(case, dtype), case.options
    features, labels = case["in.image_features"].to(dtype), case["in.labels"]
    start = {"ctx": case["in.ctx_init"].to(dtype)}
    if coop.ctx_init:
        assert torch.equal(coop.initial_context(torch.Generator()), start["ctx"])
    assert coop.initial_context(torch.Generator()).shape == start["ctx"].shape

    token_ids, name_lengths = coop.tokenize()
    assert name_lengths == options["name_lens"]
    layout = [coop.n_context, options["class_token_position"]]
    embedding = coop.text_model.text_model.embeddings.token_embedding
    for k, (ids, padded) in enumerate(zip(token_ids, case["in.token_ids"].tolist(), strict=True)):
        assert padded == ids + [0] * (len(padded) - len(ids))
        assert len(ids) - 1 == case["out.eos_position"][k]
        sources = place_context([1000 + p for p in range(len(padded))], name_lengths[k], *layout)
        assert [-1 - s if s < 0 else s for s in sources] == case["out.source_map"][k].tolist()
        context = start["ctx"][k] if start["ctx"].ndim == 3 else start["ctx"]
        placed = place_context(padded, name_lengths[k], *layout)
        rows = [context[-1 - token] if token < 0 else embedding.weight[token].detach() for token in placed]
        torch.testing.assert_close(torch.stack(rows), case["out.prompts_first"][k].to(dtype), rtol=0, atol=1e-7)

    size, batches = options["batch_size"], options["batches_per_epoch"]
    unit = F.normalize(features, dim=1)
    with torch.no_grad():
        prototypes = context_prototypes(coop.text_model, coop.prompt_packs(), start["ctx"])
    close(case, "logits_first_batch", options["logit_scale"] * unit[:size] @ prototypes.T, 3e-4)
    _, gradient = coop.loss_and_gradient(unit[:size], labels[:size], coop.prompt_packs(), start["ctx"])
    close(case, "ctx_grad_first", gradient, 1e-4 * case["out.ctx_grad_first"].abs().max().item())

    order = torch.arange(len(features)).expand(options["epochs_run"], -1)
    contexts, loss_and_gradient = [], coop.loss_and_gradient

    def recorded(features, labels, packs, ctx):
        contexts.append(ctx.detach().clone())
        return loss_and_gradient(features, labels, packs, ctx)

    coop.loss_and_gradient = recorded
    coop.fit(features, labels, shuffle=order, initial=start)
    close(case, "ctx_trajectory", torch.stack([*contexts, coop.ctx_]), 5e-6)
    assert len(contexts) == options["epochs_run"] * batches
    case.close("out.lr_per_step", coop.lr_per_step_, 1e-15)
    exact = dtype == torch.float64
    case.close("out64.loss_per_step" if exact else "out.loss_per_step", coop.loss_per_step_, 1e-9 if exact else 1e-4)
    close(case, "logits_final", coop.decision_function(features), 3e-4)


NAMES = ["red_cat", "dog", "blue bird", "old stone bridge", "cat"]


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(0)
    config = CLIPTextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=24, projection_dim=16, bos_token_id=62, eos_token_id=63, pad_token_id=0,
    )  # fmt: skip
    model = CLIPTextModelWithProjection(config).double()
    words = ["X", "a", "photo", "of", ".", "red", "cat", "dog", "blue", "bird", "old", "stone", "bridge"]
    return model.train(), WordTokenizer({word: 1 + i for i, word in enumerate(words)}, 64)


@pytest.fixture(scope="module")
def support():
    torch.manual_seed(1)
    labels = torch.arange(5).repeat(4)
    return torch.randn(5, 16).double()[labels] + 0.3 * torch.randn(2, 20, 16).double(), labels


VARIANTS = [
    {},
    {"n_ctx": 5, "class_token_position": "middle"},
    {"n_ctx": 3, "class_token_position": "front", "class_specific": True},
    {"ctx_init": "a_photo of a", "class_specific": True},
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_estimator_contract(encoder, support, options, tmp_path):
    model, tokenizer = encoder
    features, labels = support
    before = {name: value.clone() for name, value in model.state_dict().items()}
    coop = CoOp(model, tokenizer, NAMES, **{"n_ctx": 16, "epochs": 6, "batch_size": 8} | options)
    logits = coop.fit(features, labels).decision_function(features[0])
    assert len(coop.loss_per_step_) == 6 * (20 // 8) and logits.dtype == torch.float64
    assert model.training and all(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())

    copy = clone(coop)
    assert copy.text_model is model and not hasattr(copy, "ctx_")
    assert torch.equal(copy.fit(features, labels).ctx_, coop.ctx_)
    assert not torch.equal(copy.set_params(random_state=7).fit(features, labels).ctx_, coop.ctx_)
    loaded = CoOp.load(coop.save(tmp_path / "coop"), text_model=model, tokenizer=tokenizer)
    assert torch.equal(loaded.decision_function(features[0]), logits)
    assert loaded.get_params() == coop.get_params()

    alone = CoOp.load(tmp_path / "coop")
    assert torch.equal(alone.decision_function(features[0]), logits) and alone.text_model is None
    with pytest.raises(ValueError, match="text_model is None"):
        alone.fit(features, labels)
    with pytest.raises(ValueError, match="tokenizer is None"):
        alone.set_params(text_model=model).fit(features, labels)


def test_class_names_stay_a_tuple_and_may_be_an_array(encoder, support, tmp_path):
    for names, loaded in ((tuple(NAMES), tuple(NAMES)), (np.array(NAMES), NAMES)):
        coop = CoOp(*encoder, names, n_ctx=np.int64(2), epochs=1, random_state=np.int64(3)).fit(*support)
        params = CoOp.load(coop.save(tmp_path / "coop")).get_params()
        assert params["class_names"] == loaded and params["random_state"] == 3


def test_recomputed_packs_give_the_same_gradient(encoder, support, monkeypatch):
    model, tokenizer = encoder
    features, labels = F.normalize(support[0][0], dim=1), support[1]
    coop = CoOp(model, tokenizer, NAMES, n_ctx=4, class_specific=True)
    ctx = coop.initial_context(torch.Generator().manual_seed(0))
    token_ids, lengths = coop.tokenize()
    prompts = [
        place_context(ids, n, 4, "end", 4 * k) for k, (ids, n) in enumerate(zip(token_ids, lengths, strict=True))
    ]
    packs = build_packs(prompts, node_budget=25)
    assert len(packs) > 1
    kept = coop.loss_and_gradient(features, labels, packs, ctx)
    monkeypatch.setattr(coop_module, "KEPT_NODES", 0)
    recomputed = coop.loss_and_gradient(features, labels, packs, ctx)
    torch.testing.assert_close(recomputed, kept, rtol=0, atol=1e-12)


def test_shared_context_is_encoded_once(encoder):
    model, tokenizer = encoder
    [pack] = CoOp(model, tokenizer, NAMES, n_ctx=16).prompt_packs()
    own_tokens = [2, 1, 2, 3, 1]
    assert len(pack) <= 17 + sum(own_tokens) + 2 * len(NAMES)


def test_training_lowers_the_loss(encoder, support):
    coop = CoOp(*encoder, NAMES, n_ctx=4, epochs=40, lr=0.02, logit_scale=20.0).fit(*support)
    assert coop.loss_per_step_[-5:].mean() < 0.9 * coop.loss_per_step_[:5].mean()


def test_published_epochs_and_listing():
    assert [published_epochs(shots) for shots in (1, 2, 4, 8, 16)] == [50, 100, 100, 200, 200]
    listed = methods.available()["coop"]
    assert listed.function is CoOp and listed.inputs == "few-shot" and listed.options["weight_decay"] == 5e-4


def test_bad_inputs_are_named(encoder, support):
    features, labels = support
    for options, word in (
        ({"class_token_position": "back"}, "back"),
        ({"n_ctx": 22}, "n_ctx"),
        ({"n_ctx": 0}, "n_ctx must be an integer of at least 1, not 0"),
        ({"n_ctx": 1.5}, "n_ctx must be an integer"),
        ({"ctx_init": " _"}, "ctx_init is empty"),
        ({"batch_size": 0}, "batch_size"),
        ({"epochs": 0}, "epochs"),
        ({"lr": float("nan")}, "lr must be at least 0"),
    ):
        with pytest.raises(ValueError, match=word):
            CoOp(*encoder, NAMES, **{"epochs": 1} | options).fit(features, labels)
    for names in ("cat", []):
        with pytest.raises(ValueError, match="class_names must be a list of at least one name"):
            CoOp(*encoder, names, epochs=1).fit(features, labels)
    with pytest.raises(ValueError, match="features are 15 wide, but the text encoder gives 16"):
        CoOp(*encoder, NAMES, epochs=1).fit(features[..., 1:], labels)
    for initial in ({}, {"context": torch.zeros(16, 32)}):
        with pytest.raises(ValueError, match="initial must hold 'ctx'"):
            CoOp(*encoder, NAMES, epochs=1).fit(features, labels, initial=initial)
    with pytest.raises(ValueError, match="shuffle must order 20 vectors"):
        CoOp(*encoder, NAMES, epochs=1).fit(features, labels, shuffle=torch.arange(19)[None])
    broken = features.clone()
    broken[1, 3:5] = 0
    with pytest.raises(ValueError, match="2 of 40 rows of features are NaN, infinite or zero"):
        CoOp(*encoder, NAMES, epochs=1).fit(broken, labels)
    with pytest.raises(ValueError, match="labels run from 0 to 4, but there are 3 class_names"):
        CoOp(*encoder, NAMES[:3], epochs=1).fit(features, labels)
    with pytest.raises(ValueError, match="initial"):
        CoOp(*encoder, NAMES, epochs=1).fit(features, labels, initial={"ctx": torch.zeros(2, 2)})
    with pytest.raises(ValueError, match="one token"):
        CoOp(*encoder, NAMES, epochs=1, ctx_init="a photo.").fit(features, labels)

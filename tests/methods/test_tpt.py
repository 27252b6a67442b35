import re
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import normalize
from transformers import CLIPTextConfig, CLIPTextModelWithProjection

from orion_hf.methods.tpt import (
    confident_views,
    context_prompts,
    mean_prediction_entropy,
    soft_prompts,
    splice_context,
    tpt,
    view_entropies,
)

OPTIONS = ("selection_p", "steps", "lr", "weight_decay", "betas", "eps", "logit_scale")


@pytest.mark.golden("tpt_loss_")
def test_golden_loss(case):
    share = case.options["selection_p"]
    logits = case["in.logits"].requires_grad_()
    selected = confident_views(logits, share)
    assert torch.equal(selected, case["out.selected"])
    case.close("out.entropy", view_entropies(logits).detach(), 1e-4)
    loss = mean_prediction_entropy(logits[selected])
    case.close("out.loss", loss.detach(), 1e-4)
    (gradient,) = torch.autograd.grad(loss, logits)
    case.close("out.grad_logits", gradient, 1e-4 * case["out.grad_logits"].abs().max().item())

    logits = case["in.logits"].detach().double()
    case.close("out64.loss", mean_prediction_entropy(logits[confident_views(logits, share)]), 1e-9)


class ToyTokenizer:
    """Words and full stops to ids, as INDEX_fewshot_views.md says."""

    def __init__(self, options):
        self.vocab = options["toy_vocab"]
        self.ends = [options["text_config"][name] for name in ("bos_token_id", "eos_token_id")]

    def __call__(self, text):
        if not isinstance(text, str):
            return SimpleNamespace(input_ids=[self(sentence).input_ids for sentence in text])
        return SimpleNamespace(
            input_ids=[self.ends[0], *map(self.vocab.get, re.findall(r"\w+|\.", text)), self.ends[1]]
        )


def load_prompts(case, dtype):
    model = CLIPTextModelWithProjection(CLIPTextConfig(**case.options["text_config"])).eval()
    model.load_state_dict({name[2:]: weight for name, weight in case.tensors.items() if name.startswith("w.")})
    context = case["in.ctx_init"].to(dtype)
    place = {"split": case.options["split_idx"], "name_lengths": case.options["name_lens"]}
    ids = soft_prompts(model, case["in.token_ids"], len(context), **place)
    return splice_context(model.to(dtype), case["in.token_ids"], context, **place), ids


@pytest.mark.golden("tpt_step_")
def test_golden_step(case):
    options = {name: case.options[name] for name in OPTIONS}
    prompts, ids = load_prompts(case, torch.float32)
    table = prompts.text_model.text_model.embeddings.token_embedding.weight
    for prompt, expected in zip(ids, case["out.prompts"], strict=True):
        embedded = torch.stack([prompts.context[-1 - i] if i < 0 else table[i] for i in prompt])
        torch.testing.assert_close(embedded.detach(), expected[: len(prompt)], rtol=0, atol=1e-6)

    tokenizer, names, words = ToyTokenizer(case.options), case.options["class_names"], case.options["ctx_init"]
    if words:
        named = context_prompts(prompts.text_model, tokenizer, names, words=words)
        assert torch.equal(named.context, prompts.context)
        for ours, given in zip(named.packs, prompts.packs, strict=True):
            assert torch.equal(ours.token_ids, given.token_ids) and torch.equal(ours.rows, given.rows)

    views = normalize(case["in.view_features"], dim=1)
    before = prompts.prototypes(prompts.context).detach()
    case.close("out.text_features_before", before, 2e-5)
    case.close("out.logits_before", options["logit_scale"] * views @ before.T, 3e-4)
    output = tpt(views[None], prompts, **options)
    assert torch.equal(output.selected[0], case["out.selected"])
    case.close("out.loss", output.losses[0], 1e-4)
    case.close("out.ctx_after", output.contexts[0], 5e-7)
    case.close("out.text_features_after", prompts.prototypes(output.contexts[0]).detach(), 2e-5)
    case.close("out.logits_view0_after", output.scores[0], 3e-4)
    assert output.predictions[0] == case["out.pred"]

    prompts, _ = load_prompts(case, torch.float64)
    views = normalize(case["in.view_features"].double(), dim=1)
    context = prompts.context.clone().requires_grad_()
    kept = views[case["out.selected"]]
    loss = mean_prediction_entropy(options["logit_scale"] * kept @ prompts.prototypes(context).T)
    (gradient,) = torch.autograd.grad(loss, context)
    torch.testing.assert_close(gradient, case["out64.ctx_grad"][0], rtol=0, atol=1e-9)
    exact = tpt(torch.stack([views.flip(0), views]), prompts, **options)  # the image before it leaves no trace
    case.close("out64.loss", exact.losses[1], 1e-9)
    case.close("out64.ctx_after", exact.contexts[1], 1e-9)
    case.close("out64.logits_view0_after", exact.scores[1], 1e-9)


@pytest.fixture(scope="module")
def tiny_prompts():
    torch.manual_seed(0)
    config = CLIPTextConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        projection_dim=16,
        max_position_embeddings=16,
        bos_token_id=62,
        eos_token_id=63,
    )
    model = CLIPTextModelWithProjection(config).eval()
    return splice_context(model, [[62, 1, 2, 5, 63], [62, 1, 2, 6, 7, 63], [62, 1, 2, 8, 63]], torch.randn(2, 16))


def test_without_steps_it_is_zero_shot_of_view_0_and_weights_never_change(tiny_prompts):
    views = normalize(torch.randn(2, 12, 16), dim=-1)
    before = {name: weight.clone() for name, weight in tiny_prompts.text_model.state_dict().items()}
    output = tpt(views, tiny_prompts, steps=0)
    expected = 100 * views[:, 0] @ tiny_prompts.prototypes(tiny_prompts.context).detach().T
    torch.testing.assert_close(output.scores, expected)
    tuned = tpt(views, tiny_prompts, steps=2, logit_scale=5.0)
    assert tuned.losses.shape == (2, 2) and not torch.equal(tuned.contexts[0], tuned.contexts[1])
    assert all(torch.equal(before[name], weight) for name, weight in tiny_prompts.text_model.state_dict().items())
    assert all(weight.grad is None for weight in tiny_prompts.text_model.parameters())


def test_errors_name_the_input(tiny_prompts):
    model = tiny_prompts.text_model
    with pytest.raises(ValueError, match="9 views are too few"):
        tpt(normalize(torch.randn(1, 9, 16), dim=-1), tiny_prompts)
    with pytest.raises(ValueError, match="8 wide, the text model's 16"):
        tpt(normalize(torch.randn(1, 12, 8), dim=-1), tiny_prompts)
    with pytest.raises(ValueError, match=r"\(N, V, d\)"):
        tpt(normalize(torch.randn(12, 16), dim=-1), tiny_prompts)
    with pytest.raises(ValueError, match="name_lengths"):
        splice_context(model, [[62, 1, 2, 5, 63]], torch.randn(2, 16), split=1)
    split_words = ToyTokenizer({"toy_vocab": {}, "text_config": {"bos_token_id": 62, "eos_token_id": 63}})
    with pytest.raises(ValueError, match="one token"):
        context_prompts(model, split_words, ["cat"], words="a.b photo")

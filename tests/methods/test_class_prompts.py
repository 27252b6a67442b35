"""Prompt files: matching of names, truncation, prototypes against golden vectors."""

import json

import pytest
import torch
from transformers import CLIPTextConfig, CLIPTextModelWithProjection

from orion_hf import class_prompts as class_prompts_module
from orion_hf.class_prompts import (
    class_prompt_prototypes,
    load_class_prompts,
    match_class_prompts,
    sentence_prototypes,
    tokenize_sentences,
)
from orion_hf.tasks import builtin_record


@pytest.mark.golden("cupl_")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_golden(case, dtype):
    sentences, class_of_sentence = case["in.prompt_embeddings"].to(dtype), case["in.prompt_class"]
    templates = case["in.template_embeddings"].to(dtype)
    num_classes, count, _ = templates.shape
    class_of_template = torch.arange(num_classes).repeat_interleave(count)
    sets = {
        "cupl": (sentences, class_of_sentence),
        "templates": (templates.flatten(0, 1), class_of_template),
        "both": (
            torch.cat([templates.flatten(0, 1), sentences]),
            torch.cat([class_of_template, class_of_sentence]),
        ),
    }
    for variant, (text_embeds, class_index) in sets.items():
        prototypes = sentence_prototypes(text_embeds, class_index, num_classes)
        assert prototypes.dtype == dtype
        case.close(f"out.prototypes_{variant}", prototypes, 5e-7)


@pytest.mark.parametrize(
    ("task", "key", "name"),
    [
        ("sun397", "hotel (outdoor)", "outdoor hotel"),
        ("sun397", "Theater (indoor procenium)", "indoor procenium theater"),
        ("stanford_cars", "Ram CV Cargo Van Minivan 2012", "2012 Ram C/V Cargo Van Minivan"),
        ("stanford_cars", "Audi 100 Sedan 1994", "1994 Audi 100 Sedan"),
        ("oxford_pets", "Egyptian Mau", "egyptian mau"),
        ("flowers102", "globe flower", "globe-flower"),
        ("flowers102", "pink and yellow dahlia", "pink-yellow dahlia"),
        ("flowers102", "air plant", "ball moss"),
        ("caltech101", "side of a car", "car side"),
        ("caltech101", "body of a cougar cat", "cougar body"),
        ("caltech101", "face of a cougar cat", "cougar face"),
        ("caltech101", "head of a crocodile", "crocodile head"),
        ("caltech101", "head of a flamingo", "flamingo head"),
        ("caltech101", "snoopy (cartoon beagle)", "snoopy"),
        ("caltech101", "yin and yang symbol", "yin yang"),
        ("ucf101", "Hand Stand Pushups", "Handstand Pushups"),
        ("dtd", "polka-dotted", "polka-dotted"),
    ],
)
def test_spellings_of_the_paper_map_to_the_tasks(task, key, name):
    """With all other classes in the file under their own names: one key, one class, nothing left."""
    names = builtin_record(task)["class_names"]
    assert name in names
    record = {other: ["x."] for other in names if other != name} | {key: ["y."]}
    prompts = match_class_prompts(record, names)
    assert prompts.keys[names.index(name)] == key
    assert prompts.unmapped == () and prompts.unused_keys == ()


def test_ambiguous_and_missing_classes_are_listed(tmp_path):
    record = {
        "centered face": ["a."],
        "off-center face": ["b."],
        "CAR": ["c."],
        "Car": ["d."],
        "dog": ["e.", "f."],
    }
    (tmp_path / "p.json").write_text(json.dumps(record), encoding="utf-8")
    prompts = load_class_prompts(tmp_path / "p.json", ["face", "car", "dog"])
    assert prompts.unmapped == ("face", "car") and prompts.unused_keys == (
        "centered face",
        "off-center face",
        "CAR",
        "Car",
    )
    with pytest.raises(ValueError, match=r"2 of 3 classes: 'face' \(near: 'centered face'"):
        prompts.require_all()
    chosen = load_class_prompts(tmp_path / "p.json", ["face", "car", "dog"], {"face": "off-center face", "car": "Car"})
    chosen.require_all()
    assert chosen.flat()[0] == ["b.", "d.", "e.", "f."] and chosen.flat()[1].tolist() == [0, 1, 2, 2]
    with pytest.raises(ValueError, match=r"p\.json has no sentences for 2 of 3 .* Rename the keys there .*in Python"):
        prompts.with_templates([]).require_all()
    for aliases in ({"face": "no such"}, {"no such": "dog"}):
        with pytest.raises(ValueError, match="no such"):
            load_class_prompts(tmp_path / "p.json", ["face", "car", "dog"], aliases)


def test_repeated_class_names_share_their_sentences():
    prompts = match_class_prompts({"missile": ["m."], "sunglasses": ["s."]}, ["missile", "missile", "sunglass"])
    assert prompts.sentences == (("m.",), ("m.",), ("s.",))


@pytest.mark.parametrize(
    "content",
    ["[1]", "{}", '{"a": "b"}', '{"a": []}', '{"a": [1]}', '{"a": {"b": 1}}', "{", b"\xff\xfe{}", "[" * 100_000],
)
def test_bad_files_are_named(tmp_path, content):
    path = tmp_path / "bad.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"bad\.json"):
        load_class_prompts(path, ["a", "b"])


def test_a_large_file_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(class_prompts_module, "LARGEST_FILE", 10)
    (tmp_path / "large.json").write_text('{"a": ["a."]}')
    with pytest.raises(ValueError, match=r"large\.json: more than 10 bytes"):
        load_class_prompts(tmp_path / "large.json", ["a"])


def test_a_byte_order_mark_is_no_part_of_the_file(tmp_path):
    (tmp_path / "p.json").write_text('{"a": ["é."]}', encoding="utf-8-sig")
    assert load_class_prompts(tmp_path / "p.json", ["a"]).sentences == (("é.",),)


def test_a_repeated_key_is_refused(tmp_path):
    (tmp_path / "p.json").write_text('{"a": ["1."], "b": ["2."], "a": ["3."]}')
    with pytest.raises(ValueError, match=r"p\.json: not a prompt file \('a' is there more than once"):
        load_class_prompts(tmp_path / "p.json", ["a", "b"])


@pytest.mark.parametrize(("content", "name"), [(r'{"a": ["x", "\ud83d"]}', "'a'"), (r'{"\ud83d": ["x"]}', r"ud83d")])
def test_half_a_character_is_refused_with_its_class(tmp_path, content, name):
    (tmp_path / "p.json").write_text(content)
    with pytest.raises(ValueError, match=rf"p\.json: .*{name}.* unpaired surrogate") as raised:
        load_class_prompts(tmp_path / "p.json", ["a"])
    str(raised.value).encode()  # it can be printed
    (tmp_path / "p.json").write_text(r'{"a": ["\ud83d\ude00"]}')
    assert load_class_prompts(tmp_path / "p.json", ["a"]).sentences == (("😀",),)


class LetterTokenizer:
    """Every letter is a token; 30 starts and 31 ends a text."""

    def __call__(self, texts, **_):
        return {"input_ids": [[30, *(1 + ord(letter) % 29 for letter in text), 31] for text in texts]}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = CLIPTextConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=12, projection_dim=8, bos_token_id=30, eos_token_id=31, pad_token_id=31,
    )  # fmt: skip
    return CLIPTextModelWithProjection(config).double().eval()


def test_long_sentences_are_cut_and_counted():
    tokens = tokenize_sentences(LetterTokenizer(), ["short", "exactly te", "exactly ten"], max_length=12)
    assert [len(ids) for ids in tokens.token_ids] == [7, 12, 12] and tokens.truncated == 1
    assert all(ids[-1] == 31 for ids in tokens.token_ids)
    assert tokens.token_ids[2][:-1] == tokens.token_ids[1][:-1]


def test_prototypes_from_a_text_encoder(model):
    prompts = match_class_prompts({"b": ["x is b", "b b", "b b"], "A": ["a sentence too long"]}, ["a", "b"])
    prototypes, truncated = class_prompt_prototypes(model, LetterTokenizer(), prompts)
    embeds = [
        torch.nn.functional.normalize(model(input_ids=torch.tensor([ids])).text_embeds, dim=1)[0]
        for ids in tokenize_sentences(LetterTokenizer(), prompts.flat()[0], 12).token_ids
    ]
    expected = torch.stack([embeds[0], (embeds[1] + embeds[2] + embeds[3]) / 3]).detach()
    torch.testing.assert_close(prototypes, torch.nn.functional.normalize(expected, dim=1), rtol=0, atol=1e-12)
    assert truncated == 1

    both, _ = class_prompt_prototypes(model, LetterTokenizer(), prompts, templates=["a {}", "the {}"])
    assert not torch.allclose(both, prototypes)
    missing = match_class_prompts({"b": ["b b"]}, ["a", "b"])
    with pytest.raises(ValueError, match="'a'"):
        class_prompt_prototypes(model, LetterTokenizer(), missing)
    filled, _ = class_prompt_prototypes(model, LetterTokenizer(), missing, templates=["a {}"])
    assert filled.shape == (2, 8)
    with pytest.raises(ValueError, match="number 1"):
        sentence_prototypes(torch.ones(2, 3), torch.tensor([0, 2]), 3)

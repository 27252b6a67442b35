"""Hostile repositories: a clear refusal, or text shown escaped; never code, never another folder."""

import html
import json
import pickle
import re
import string
import unicodedata
from pathlib import Path

import pytest
import torch
import yaml
from hub_cards import check_card
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from safetensors.torch import save_file
from test_card import B16, save_model
from tiny_clip_folder import TASK, save_tiny_clip

from orion_hf.card import model_card
from orion_hf.configuration_orion import MAX_DEPTH, OrionConfig
from orion_hf.escaping import markdown, printable
from orion_hf.modeling_orion import OrionCLIPTextModel
from orion_hf.repository import Adapter, Repository, read_orion_config, read_prototypes
from orion_hf.tasks import OrionTask

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
GOOD = OrionConfig(task=TASK, base_model=B16, training={"lr": 1e-3}).to_dict()

texts = st.text(max_size=20) | st.sampled_from(
    ["", " ", "\x1b[31m", "\ud800", "<b>", "{}", "../..", "embedded:x", "a" * 1001]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
task_keys = st.sampled_from(["name", "class_names", "templates", "eval_template", "hub_datasets", "other"])
config_keys = st.sampled_from(["format_version", "base_model", "base_revision", "task", "training", "other"])


def read(data: object, path: Path) -> OrionConfig | None:
    """What `from_json_file` makes of ``data``: a config, or None for a refusal in one line."""
    path.write_text(json.dumps(data), encoding="utf-8")
    try:
        return OrionConfig.from_json_file(path)
    except ValueError as error:
        assert str(error).startswith(str(path))
        assert "\n" not in str(error) and "\x1b" not in str(error) and len(str(error)) < 2_500
        return None


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "orion_config.json"


@QUICK
@given(values)
def test_any_json_is_a_config_or_one_clear_refusal(path, data):
    assert read(data, path) is None


@QUICK
@given(st.dictionaries(config_keys, values, max_size=3), st.dictionaries(task_keys, values, max_size=3))
def test_a_config_changed_anywhere_is_read_or_refused(path, changes, task_changes):
    data = {**GOOD, "task": {**GOOD["task"], **task_changes}, **changes}
    config = read(data, path)
    if config is not None:
        again = OrionConfig.from_dict(json.loads(json.dumps(config.to_dict())))
        assert json.dumps(again.to_dict()) == json.dumps(config.to_dict())
        assert config.task is not None and len(config.task.class_names) >= 2


def nested(depth: int) -> list:
    inner: list = []
    for _ in range(depth):
        inner = [inner]
    return inner


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"task": {**GOOD["task"], "class_names": ["c"] * 10**6}}, "1000000 entries"),
        ({"task": {**GOOD["task"], "templates": ["{}"] * 10_001}}, "10001 entries"),
        ({"task": {**GOOD["task"], "class_names": ["cat", "x" * 1001]}}, "1001 characters"),
        ({"task": {**GOOD["task"], "class_names": ["cat", "\x1b]0;title\x07"]}}, "control characters"),
        ({"task": {**GOOD["task"], "hub_datasets": [{"id": "a"}] * 101}}, "at most 100"),
        ({"task": {**GOOD["task"], "hub_datasets": [{"id": "a\x1b[2J"}]}}, "control characters"),
        ({"training": {"deep": nested(MAX_DEPTH)}}, "levels deep"),
        ({"unknown": nested(900)}, "levels deep"),
        ({"base_model": "\x1b[2J"}, "control characters"),
        ({"base_model": ["org/x"]}, "must be a string"),
        ({"format_version": 2}, "newer"),
        ({"format_version": True}, "positive integer"),
    ],
)
def test_hostile_configs_are_refused(path, change, says):
    path.write_text(json.dumps(GOOD | change))
    with pytest.raises(ValueError, match=says) as refused:
        OrionConfig.from_json_file(path)
    assert len(str(refused.value)) < 500 and str(refused.value).isprintable()


def test_files_that_are_no_json_are_refused(path):
    for content in (b"[" * 10**6, b'{"a":' * 10**5, b"\xff\xfe", b"", b"{", b"1" * 10**5):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="JSON"):
            OrionConfig.from_json_file(path)
    with open(path, "wb") as file:
        file.truncate(65 * 2**20)
    with pytest.raises(ValueError, match="more than"):
        OrionConfig.from_json_file(path)


def test_unknown_keys_are_kept_and_ignored(path):
    config = read(GOOD | {"future": {"a": [1]}, "__class__": "x", "auto_map": {"AutoModel": "evil.Model"}}, path)
    assert config is not None and config.to_dict()["future"] == {"a": [1]} and type(config) is OrionConfig


# Text shown to people


@settings(max_examples=500, deadline=None)
@given(st.text())
def test_escaped_text_has_no_power(text):
    shown = printable(text)
    hidden = {unicodedata.category(c) for c in set(shown) - set("\u200c\u200d")}
    assert hidden.isdisjoint({"Cc", "Cf", "Cs", "Zl", "Zp"})
    assert not set(shown) & set("\x1b\n\r\t\x9b\u202e\u2066\u2028")
    escaped = markdown(text)
    assert html.unescape(escaped) == shown
    left = re.sub(r"&#\d+;", "", escaped)
    assert not set(left) & (set(string.punctuation) - set(".,;'()-/{}"))
    assert "www." not in escaped.lower()


HOSTILE = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "</details><h1>x", "[link](javascript:alert(1))",
    "![x](http://evil/x.png)", "a | b | c", "`code` ```", "# heading", "---", "key: value", "- item", "{{ 7*7 }}",
    "{% include 'x' %}", "\u202egnp.exe", "www.evil.example", "http://evil.example", "<!-- -->", "&lt;b&gt;", "$$x$$",
    "'''", '"quoted"', "@someone", "*bold* _it_ ~~s~~", "a\\b", "!!python/object:os.system", "&anchor *alias", "%TAG",
]  # fmt: skip


def hostile_card(folder: Path, names: list[str], text: str) -> str:
    task = OrionTask(text, tuple(names), (f"{text.replace('{}', '')} {{}}",), "{} of " + text.replace("{}", ""))
    results = {
        "top1": {"ORION": 1.0, text: 2.0},
        "protocol": text,
        "command": text,
        "dataset": {"name": text, "id": text},
    }
    save_model(folder, task, results=results)
    config = json.loads((folder / "orion_config.json").read_text())
    config["training"] = {text: text, "nested": {text: text}, "long": text * 200}
    (folder / "orion_config.json").write_text(json.dumps(config))
    adapter = {"base_model_name_or_path": B16, "revision": f'x"); import os; os.system("{text}'}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    return str(model_card(folder, "org/x"))


def check_harmless(card: str, names: list[str], text: str) -> None:
    front, body = card.split("\n---\n", 1)
    data = yaml.safe_load(front.removeprefix("---\n"))
    assert check_card(card) == ([], [])
    assert data["orion"] == {"task": text.strip(), "classes": len(names)}
    known = "base_model base_model_relation library_name pipeline_tag tags orion model-index datasets"
    assert data.keys() <= set(known.split())
    prose = re.sub(r"```.*?```", "", body, flags=re.DOTALL)
    folded = ["<details>", "<summary>", "</summary>", "</details>"] if len(names) > 20 else []
    mark = "<!-- Made by orion-hf from the files beside it. Remove this line to keep text of your own. -->"
    assert re.findall(r"<[^>]*>", prose) == [mark, *folded]
    assert re.findall(r"\]\(([^)]*)\)", prose) == [f"https://huggingface.co/{B16}"]
    assert [line for line in body.splitlines() if line.startswith("#")] == [
        line
        for line in body.splitlines()
        if re.match(r"(# ORION for |## (Use|Classes|Training|Geometry|Accuracy|Limits|Citation))", line)
    ]
    assert len(re.findall("^```", body, re.MULTILINE)) == 8 and "os.system" not in "".join(
        re.findall("```python.*?```", body, re.DOTALL)
    )
    for line in body.splitlines():
        if line.startswith("|"):
            assert line.count("|") in (3, 4), line
    if len(names) <= 20:
        shown = re.findall(
            r"`\d+` (.*?)(?= · `|$)", next(line for line in body.splitlines() if line.startswith("`0` "))
        )
        assert [html.unescape(name) for name in shown] == [printable(name) for name in names]


def test_a_card_of_hostile_names_has_no_markup_of_theirs(tmp_path):
    for number, text in enumerate(HOSTILE):
        names = [HOSTILE[number], *(name for name in HOSTILE[:9] if name != text)]
        check_harmless(hostile_card(tmp_path / str(number), names, text), names, text)
    check_harmless(hostile_card(tmp_path / "all", HOSTILE, "x"), HOSTILE, "x")


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.text(min_size=1, max_size=30), min_size=2, max_size=8), st.text(min_size=1, max_size=40))
def test_a_card_of_any_names_has_no_markup_of_theirs(tmp_path, names, text):
    try:
        card = hostile_card(tmp_path, names, text)
    except ValueError:
        return  # refused: blank, repeated, control characters
    check_harmless(card, [name.strip() for name in names], text)


# Files


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("/etc", "not a Hub id"), ("../x", "not a Hub id"), ("./x", "not a Hub id"), ("~/x", "not a Hub id"),
        ("a/b/c", "not a Hub id"), ("C:\\x", "not a Hub id"), ("org/..", "not a Hub id"), ("x\x1b[2J", "not a Hub id"),
        ("file:///etc", "not a Hub id"), ("", "is missing"), (None, "is missing"), (7, "is missing"),
        ("tests/golden", "not a Hub id"),
    ],
)  # fmt: skip
def test_an_adapter_of_the_hub_cannot_name_a_folder_of_ours(root, monkeypatch, name, says):
    monkeypatch.chdir(root)
    adapter = Adapter(LoraConfig(base_model_name_or_path=name), "weights")
    with pytest.raises(ValueError, match=says) as refused:
        adapter.base(Repository("org/evil"), None)
    assert str(refused.value).isprintable()


def test_revisions_and_embedded_names_cannot_leave_their_place():
    for revision in ("../../../../tmp/x", "a/../../b", "/etc", "x y", "", "a" * 300):
        with pytest.raises(ValueError, match="is no revision"):
            Adapter(LoraConfig(base_model_name_or_path="org/x", revision=revision), "w").base(
                Repository("org/evil"), None
            )
    for name in ("embedded:../../tests", "embedded:/etc", "embedded:"):
        config = OrionConfig(task=TASK, base_model=name)
        with pytest.raises(ValueError, match="unknown embedded model"):
            Adapter(LoraConfig(base_model_name_or_path="org/x"), "w").base(Repository("org/evil"), config)


def test_prototypes_of_another_shape_are_refused(tmp_path):
    good = torch.eye(3, 16)
    for number, tensors in enumerate(
        [
            {"prototypes": good, "anchors": good[:2]},
            {"prototypes": good.T.contiguous(), "anchors": good.T.contiguous()},
            {"prototypes": good / 0, "anchors": good},
            {"anchors": good},
            {"prototypes": torch.zeros(3, 16, 1), "anchors": good},
        ]
    ):
        file = tmp_path / f"{number}.safetensors"
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, file)
        with pytest.raises(ValueError, match=f"{number}.safetensors"):
            read_prototypes(file, (3, 16))
    folder = save_model(tmp_path / "model", TASK)
    for tensors in (
        {"prototypes": good[:2], "anchors": good[:2]},
        {"prototypes": good[0], "anchors": good[0]},
        {},
    ):
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "prototypes.safetensors")
        with pytest.raises(ValueError, match=r"prototypes\.safetensors"):
            model_card(folder, "org/x")


class Payload:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    """A merged ORION model."""
    folder = tmp_path_factory.mktemp("merged")
    model = OrionCLIPTextModel.from_pretrained(save_tiny_clip(folder / "base"))
    model.task = TASK
    model.save_pretrained(folder / "model")
    return folder / "model"


def copy(folder: Path, target: Path) -> Path:
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def test_no_pickle_is_read(merged, tmp_path):
    marker = tmp_path / "ran"
    full = copy(merged, tmp_path / "full")
    (full / "model.safetensors").unlink()
    (full / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(marker)))
    with pytest.raises((OSError, ValueError)):
        OrionCLIPTextModel.from_pretrained(full)
    adapter = save_model(tmp_path / "adapter", TASK, base=str(merged))
    (adapter / "adapter_model.safetensors").unlink()
    (adapter / "adapter_model.bin").write_bytes(pickle.dumps(Payload(marker)))
    with pytest.raises(ValueError, match="pickle"):
        OrionCLIPTextModel.from_pretrained(adapter)
    with pytest.raises(ValueError, match="neither an adapter"):
        model_card(adapter, "org/x")
    assert not marker.exists()


def test_no_code_of_a_repository_runs(merged, tmp_path):
    marker = tmp_path / "ran"
    folder = copy(merged, tmp_path / "evil")
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil:\n    pass\n")
    keys = ("AutoConfig", "AutoModel", "AutoTokenizer", "AutoProcessor", "AutoImageProcessor")
    for name in ("config.json", "tokenizer_config.json", "processor_config.json", "orion_config.json"):
        content = json.loads((folder / name).read_text())
        content["auto_map"] = {
            key: ["evil.Evil", "evil.Evil"] if key == "AutoTokenizer" else "evil.Evil" for key in keys
        }
        (folder / name).write_text(json.dumps(content))
    model = OrionCLIPTextModel.from_pretrained(folder)
    assert model.prototypes().shape == (3, 16) and type(model.processor).__name__ == "CLIPProcessor"
    assert not marker.exists()


@pytest.mark.parametrize("shard", ["../base/model.safetensors", "/etc/passwd", "sub/model.safetensors", 7, "x.bin"])
def test_shards_stay_in_their_folder(merged, tmp_path, shard):
    folder = copy(merged, tmp_path / "sharded")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {"x": shard}}))
    with pytest.raises(ValueError, match="weight_map"):
        read_orion_config(folder)
    with pytest.raises(ValueError, match="weight_map"):
        OrionCLIPTextModel.from_pretrained(folder)

import dataclasses
import json
import subprocess
import sys
import unicodedata
import warnings

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from orion_hf.tasks import (
    ALIASES,
    DEFAULT_EVAL_TEMPLATE,
    DEFAULT_TEMPLATES,
    HubDataset,
    OrionTask,
    format_prompt,
    imagenet_templates,
)

BENCHMARKS = {
    "caltech101": 100,
    "dtd": 47,
    "eurosat": 10,
    "fgvc_aircraft": 100,
    "flowers102": 102,
    "food101": 101,
    "imagenet": 1000,
    "oxford_pets": 37,
    "stanford_cars": 196,
    "sun397": 397,
    "ucf101": 101,
}

# Any text that is a name: no control characters, line breaks or lone surrogates, and something visible.
visible = st.characters(exclude_categories=("C", "Z"))
inner = st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp"))
names = st.builds(lambda head, middle, tail: head + middle + tail, visible, st.text(inner, max_size=12), visible)
fixed_text = st.text(visible, max_size=8).filter(lambda text: "{" not in text and "}" not in text)
templates = st.builds(lambda left, right: left + "{}" + right, fixed_text, fixed_text)


def folded(name):
    return " ".join(unicodedata.normalize("NFC", name).casefold().split())


tasks = st.builds(
    OrionTask,
    name=names,
    class_names=st.lists(names, min_size=2, max_size=6, unique_by=folded),
    templates=st.lists(templates, min_size=1, max_size=3),
    eval_template=templates,
    hub_datasets=st.lists(st.builds(HubDataset, id=names, config=st.none() | names), max_size=2),
)


def published_imagenet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return OrionTask.from_name("imagenet")


# Built-in tasks


@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmark_has_the_published_classes_and_three_templates(name):
    task = published_imagenet() if name == "imagenet" else OrionTask.from_name(name)
    assert task.name == name
    assert task.num_classes == len(task.class_names) == BENCHMARKS[name]
    assert len(task.templates) == 3
    assert [len(prompts) for prompts in task.training_prompts()] == [BENCHMARKS[name]] * 3
    assert all("{}" not in prompt for prompt in task.prompts())
    assert task.hub_datasets and all("/" in copy.id for copy in task.hub_datasets)
    assert all(" " not in (copy.image_column or "") for copy in task.hub_datasets)


def test_eurosat_prompts_in_label_order():
    task = OrionTask.from_name("EuroSAT")
    assert task.prompts()[:2] == [
        "a centered satellite photo of Annual Crop Land.",
        "a centered satellite photo of Forest.",
    ]
    assert task.training_prompts()[1][9] == "an aerial photo of Sea or Lake"
    assert task.prompts("{}!")[-1] == "Sea or Lake!"


def test_available_lists_every_benchmark_and_each_one_loads():
    available = OrionTask.available()
    assert set(BENCHMARKS) <= set(available) and available == sorted(available)
    assert set(ALIASES) <= set(available)
    for name in set(available) - {"imagenet"}:
        assert OrionTask.from_name(name).name == name


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("Pets", "oxford_pets"),
        ("SUN", "sun397"),
        ("Aircraft", "fgvc_aircraft"),
        ("DTD", "dtd"),
        ("EuroSAT", "eurosat"),
        ("Cars", "stanford_cars"),
        ("Food", "food101"),
        ("Flowers", "flowers102"),
        ("Caltech", "caltech101"),
        ("UCF", "ucf101"),
        ("OxfordPets", "oxford_pets"),
        ("oxford-iiit-pet", "oxford_pets"),
        ("fgvc-aircraft", "fgvc_aircraft"),
        ("FGVCAircraft", "fgvc_aircraft"),
        ("Stanford Cars", "stanford_cars"),
        ("food-101", "food101"),
        (" Oxford_Flowers-102 ", "flowers102"),
        ("SUN 397", "sun397"),
    ],
)
def test_common_spellings(spelling, name):
    assert OrionTask.from_name(spelling).name == name


@pytest.mark.parametrize("spelling", ["ImageNet", "imagenet-1k", "ILSVRC 2012"])
def test_imagenet_spellings(spelling):
    assert OrionTask.from_name(spelling, unique_names=True).name == "imagenet"


def test_unknown_name_lists_the_nearest_and_all():
    with pytest.raises(ValueError, match=r"'euro_sad'; did you mean eurosat\?") as error:
        OrionTask.from_name("euro_sad")
    assert all(name in str(error.value) for name in BENCHMARKS)
    with pytest.raises(ValueError, match=r"no built-in task 'qqqqq'\. Built in are caltech101"):
        OrionTask.from_name("qqqqq")
    with pytest.raises(ValueError, match="a task name is text, got int"):
        OrionTask.from_name(101)


def test_imagenet_keeps_the_published_list_and_says_so_once():
    with pytest.warns(UserWarning) as caught:
        task = OrionTask.from_name("imagenet")
    (message,) = [str(warning.message) for warning in caught]
    assert "'missile' at 657, 744, 'sunglasses' at 836, 837" in message and "unique_names=True" in message
    assert (task.class_names[657], task.class_names[744]) == ("missile", "missile")
    assert (task.class_names[836], task.class_names[837]) == ("sunglasses", "sunglasses")


def test_imagenet_unique_names_differ_in_two_places_only():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unique = OrionTask.from_name("imagenet", unique_names=True)
        assert OrionTask.from_name("dtd", unique_names=True) == OrionTask.from_name("dtd")
    published = published_imagenet()
    changed = {
        k: (a, b) for k, (a, b) in enumerate(zip(published.class_names, unique.class_names, strict=True)) if a != b
    }
    assert changed == {744: ("missile", "projectile"), 836: ("sunglasses", "sunglass")}
    assert len(set(unique.class_names)) == 1000
    assert published.label_names == unique.label_names == unique.class_names


def test_published_repeats_survive_a_round_trip_but_no_other_list_may_repeat(tmp_path):
    published = published_imagenet()
    assert OrionTask.from_file(published.save_json(tmp_path / "imagenet.json")) == published
    with pytest.raises(ValueError, match="'missile' at 657, 744"):
        OrionTask.from_names(published.class_names[:999])


def test_names_that_tokenise_alike_are_repeats():
    with pytest.raises(ValueError, match="class names must differ: 'sea lake' at 0, 2"):
        OrionTask.from_names(["Sea Lake", "river", "sea  lake"])


def test_repr_is_short_for_a_thousand_classes():
    text = repr(published_imagenet())
    assert text == (
        "OrionTask('imagenet', 1000 classes: 'tench', 'goldfish', 'great white shark', ..., 'toilet paper'; "
        "3 templates, eval 'a photo of a {}.')"
    )
    assert "'cat', 'dog';" in repr(OrionTask.from_names(["cat", "dog"]))


def test_imagenet_templates():
    assert len(imagenet_templates()) == 80
    assert set(imagenet_templates("subset_7")) <= set(imagenet_templates())
    assert len(set(imagenet_templates("subset_7"))) == 7
    with pytest.raises(ValueError, match="no template collection 'all'"):
        imagenet_templates("all")


# The value itself


def test_frozen_hashable_and_made_of_tuples():
    task = OrionTask("pets", ["cat", "dog"], ["a {}"], "a {}.")
    assert task.class_names == ("cat", "dog") and task.templates == ("a {}",) and task.hub_datasets == ()
    assert {task: 1}[OrionTask.from_names(("cat", "dog"), templates=["a {}"], eval_template="a {}.", name="pets")] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        task.name = "other"
    assert dataclasses.replace(task, name="other").class_names == task.class_names


def test_default_templates():
    task = OrionTask.from_names(name for name in ("cat", "dog"))
    assert (task.templates, task.eval_template) == (DEFAULT_TEMPLATES, DEFAULT_EVAL_TEMPLATE)
    assert len(DEFAULT_TEMPLATES) == 3
    assert OrionTask.from_names(["a", "b"], templates=["x {}", "y {}"]).eval_template == "x {}"
    assert OrionTask.from_names(["a", "b"], eval_template="x {}").templates == DEFAULT_TEMPLATES


def test_surrounding_spaces_are_stripped_and_then_compared():
    assert OrionTask.from_names([" cat", "dog\u00a0"]).class_names == ("cat", "dog")
    with pytest.raises(ValueError, match="'cat' at 0, 1"):
        OrionTask.from_names(["cat", "cat "])


@pytest.mark.parametrize(
    ("class_names", "message"),
    [
        ([], "at least two class names, got 0"),
        (["cat"], "at least two class names, got 1"),
        (["cat", ""], "class name 1 is empty or blank"),
        (["cat", " \u00a0"], "class name 1 is empty or blank"),
        (["\u200b", "cat"], "class name 0 is empty or blank"),
        (["cat", "dog", "cat", "dog", "cat"], "'cat' at 0, 2, 4, 'dog' at 1, 3; rename or remove"),
        ([f"c{i // 2}" for i in range(40)], "'c4' at 8, 9, and 15 more"),
        (["cat", "dog\n"], r"class name 1 'dog\\n' holds a line break or control character \('\\n'\)"),
        (["a\u2028b", "c"], r"class name 0 .* control character \('\\u2028'\)"),
        (["cat", "\x00"], "class name 1 .* control character"),
        (["cat", "\ud800"], "class name 1 .* control character"),
        (["cat", 747], "class name 1 must be text, got int 747; put it in quotes"),
        (["cat", None], "class name 1 must be text, got NoneType"),
        ("cat", "expected a list with one class name each, got str"),
        ({"cat": 0}, "expected a list with one class name each, got dict"),
        (7, "expected a list with one class name each, got int"),
    ],
)
def test_bad_class_names_give_one_clear_line(class_names, message):
    with pytest.raises(ValueError, match=message) as error:
        OrionTask.from_names(class_names)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("a photo", "template 'a photo' has 0 places"),
        ("{} and {}", "has 2 places for the class name; write exactly one {}"),
        ("a {name}", "has 0 places"),
        ("", "template.* is empty or blank"),
        ("a\n{}", "template.* holds a line break"),
        (None, "template.* must be text, got NoneType"),
    ],
)
def test_bad_templates(template, message):
    with pytest.raises(ValueError, match=message):
        OrionTask.from_names(["cat", "dog"], templates=["a {}", template])
    with pytest.raises(ValueError, match=message):
        format_prompt(template, "cat")
    with pytest.raises(ValueError, match=message):
        OrionTask("pets", ("cat", "dog"), ("a {}",), template)


def test_bad_templates_argument_and_task_name():
    with pytest.raises(ValueError, match="expected a list with one template each, got str"):
        OrionTask.from_names(["cat", "dog"], templates="a {}")
    with pytest.raises(ValueError, match="at least one template"):
        OrionTask.from_names(["cat", "dog"], templates=[])
    with pytest.raises(ValueError, match="task name is empty or blank"):
        OrionTask.from_names(["cat", "dog"], name=" ")
    with pytest.raises(ValueError, match="has 0 places"):
        OrionTask.from_names(["cat", "dog"]).prompts("photo")


@pytest.mark.parametrize("name", ["{}", "{0}", "{name!r}", "100% %s %(x)d", '"it\'s"', "\\n \\", "猫 🐈‍⬛", "$x #1"])
def test_nothing_in_a_name_is_interpreted(name):
    assert OrionTask.from_names([name, "dog"]).prompts("a {}.") == [f"a {name}.", "a dog."]


def test_other_braces_of_a_template_are_text():
    template = "{0} a {b} } {} {"
    assert format_prompt(template, "cat") == "{0} a {b} } cat {"
    assert OrionTask.from_names(["cat", "dog"]).prompts(template)[1] == "{0} a {b} } dog {"


@given(template=templates, name=names)
@settings(deadline=None)
def test_a_prompt_is_the_template_around_the_name(template, name):
    left, right = template.split("{}")
    prompt = format_prompt(template, name)
    assert prompt == left + name + right
    assert OrionTask.from_names([name, name + "2"]).prompts(template)[0] == prompt


@given(task=tasks)
@settings(deadline=None)
def test_dict_round_trip_is_exact(task):
    restored = OrionTask.from_dict(json.loads(json.dumps(task.to_dict())))
    assert restored == task and hash(restored) == hash(task)


@given(task=tasks)
@settings(max_examples=40, deadline=None)
def test_json_file_round_trip_is_exact(task, tmp_path_factory):
    path = tmp_path_factory.mktemp("tasks") / "task.json"
    assert OrionTask.from_file(task.save_json(path)) == task
    assert list(path.parent.iterdir()) == [path]


@given(class_names=st.lists(names.filter(lambda name: name[0] != "\ufeff"), min_size=2, max_size=6, unique_by=folded))
@settings(max_examples=40, deadline=None)
def test_text_and_csv_files_keep_any_name(class_names, tmp_path_factory):
    folder = tmp_path_factory.mktemp("names")
    (folder / "t.txt").write_bytes("\r\n".join(class_names).encode())
    quoted = ['"' + name.replace('"', '""') + '"' for name in class_names]
    (folder / "t.csv").write_bytes("\n".join(["name", *quoted]).encode())
    (folder / "t.yaml").write_text(yaml.safe_dump(class_names, allow_unicode=True), encoding="utf-8")
    for file in ("t.txt", "t.csv", "t.yaml"):
        assert OrionTask.from_file(folder / file).class_names == tuple(class_names)


def test_save_json_leaves_nothing_behind_on_failure(tmp_path):
    task = OrionTask.from_names(["cat", "dog"])
    with pytest.raises(ValueError, match=r"saved as \.json"):
        task.save_json(tmp_path / "task.txt")
    (tmp_path / "task.json").mkdir()
    with pytest.raises(OSError):
        task.save_json(tmp_path / "task.json")
    assert [file.name for file in tmp_path.iterdir()] == ["task.json"]
    assert task.save_json(tmp_path / "new" / "task.json").is_file()


# Files


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("t.txt", "cat\ndog\n"),
        ("t.TXT", "\ufeffcat  \r\n\tdog\r\n\r\n"),
        ("t.csv", "name\ncat\ndog\n"),
        ("t.csv", "\ufeffid,class_name,label\n0,cat,x\n1, dog,y\n"),
        ("t.csv", "id,Label\r\n0,cat\r\n1,dog\r\n\r\n"),
        ("t.json", '["cat", "dog"]'),
        ("t.json", '{"name": "t", "class_names": ["cat", "dog"]}'),
        ("t.yaml", "- cat\n- dog\n"),
        ("t.yml", "class_names: [cat, dog]\n"),
    ],
)
def test_every_kind_of_file(tmp_path, file, content):
    (tmp_path / file).write_bytes(content.encode())
    assert OrionTask.from_file(tmp_path / file) == OrionTask.from_names(["cat", "dog"], name="t")
    assert OrionTask.from_file(str(tmp_path / file), templates=["a {}"], name="n").templates == ("a {}",)


def test_csv_column(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text('code,breed\nx,"terrier, wire"\ny,"say ""hi"""\n')
    assert OrionTask.from_file(path, column="breed").class_names == ("terrier, wire", 'say "hi"')
    with pytest.raises(ValueError, match=r"t\.csv: no columns are called 'name', there are code, breed"):
        OrionTask.from_file(path, column="name")
    with pytest.raises(ValueError, match=r"which column holds the class names.* code, breed"):
        OrionTask.from_file(path)


def test_templates_of_a_file_and_arguments_instead(tmp_path):
    path = tmp_path / "t.yaml"
    path.write_text("name: pets\nclass_names: [cat, dog]\ntemplates: ['a {}', 'the {}']\neval_template: '{}.'\n")
    task = OrionTask.from_file(path)
    assert (task.name, task.templates, task.eval_template) == ("pets", ("a {}", "the {}"), "{}.")
    other = OrionTask.from_file(path, eval_template="my {}", name="mine")
    assert (other.name, other.templates, other.eval_template) == ("mine", ("a {}", "the {}"), "my {}")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("t.txt", b"cat\nd\xffg\n", "not UTF-8 text, byte 0xff at position 5"),
        ("t.csv", b"\xef\xbb\xbfname\nd\xe9j\xe0\n", "not UTF-8 text, byte 0xe9 at position 9"),
        ("t.txt", b"", "at least two class names, got 0"),
        ("t.txt", b"cat\n", "at least two class names, got 1"),
        ("t.txt", b"cat\n\ndog\n", "line 2 is blank"),
        ("t.txt", b"cat\ndog\ncat", "'cat' at 0, 2"),
        ("t.txt", b"cat\nd\x07g", "control character"),
        ("t.csv", b"", "the table is empty"),
        ("t.csv", b"cat\ndog\n", "the first row, 'cat', is read as the header"),
        ("t.csv", b"id;name\n1;cat\n2;dog\n", "columns are separated by commas"),
        ("t.csv", b"name\ncat\n\ndog\n", "row 3 has 0 cells, the header 1"),
        (
            "t.csv",
            b"name\ncat\nwire, terrier\n",
            "row 3 has 2 cells, the header 1; quote names that hold commas",
        ),
        ("t.csv", b'name,id\ncat,1\n"a\nb",2\n', "class name 1 .* holds a line break"),
        ("t.csv", b'name\n"cat\n', "not a CSV table"),
        ("t.csv", b"id,name\n1,cat\n2,\n3,dog\n", "class name 1 is empty or blank"),
        ("t.json", b"[1,", "not JSON, Expecting value at line 1 column 4"),
        ("t.json", b"[" * 200_000, "nested too deeply"),
        ("t.json", b"7", "expected a list of class names or an object with class_names, got int"),
        ("t.json", b"{}", "class_names is missing"),
        (
            "t.json",
            b'{"class_names": ["a", "b"], "template": "x {}"}',
            "unknown key 'template'; a task has name, ",
        ),
        ("t.json", b'{"class_names": ["a", "b"], "hub_datasets": [{}]}', "an object with id"),
        ("t.json", b'{"class_names": ["a", "b"], "hub_datasets": [{"id": 3}]}', "are text or null"),
        ("t.yaml", b"- cat\n- no\n", "class name 1 must be text, got bool False; put it in quotes"),
        ("t.yaml", b"- [cat\n", "not YAML, "),
        ("t.yaml", b"- !!python/object/apply:os.getcwd []\n", "not YAML, could not determine a constructor"),
        ("t.xlsx", b"PK", "use .txt, .csv, .json, .yaml, .yml"),
        ("names", b"cat", "use .txt, .csv, .json, .yaml, .yml"),
    ],
)
def test_bad_files_give_one_clear_line_that_names_the_file(tmp_path, file, content, message):
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        OrionTask.from_file(tmp_path / file)
    assert str(error.value).startswith(f"{tmp_path / file}: ") and "\n" not in str(error.value)


def test_missing_file_and_column_of_a_text_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.txt"):
        OrionTask.from_file(tmp_path / "nothing.txt")
    with pytest.raises(ValueError, match=r"column='name' is only for \.csv"):
        OrionTask.from_file(tmp_path / "nothing.txt", column="name")


# Hugging Face


def test_to_dataset(tmp_path):
    task = OrionTask.from_names(["cat", "dog", "{} 🐟"], templates=["a {}", "the {}"])
    dataset = task.to_dataset()
    assert dataset.column_names == ["class_id", "class_name", "template_id", "prompt"]
    assert dataset.features["class_id"].names == list(task.class_names)
    assert dataset["class_id"][:] == [0, 1, 2, 0, 1, 2]
    assert dataset["template_id"][:] == [0, 0, 0, 1, 1, 1]
    assert dataset[5] == {"class_id": 2, "class_name": "{} 🐟", "template_id": 1, "prompt": "the {} 🐟"}
    assert dataset["prompt"][:] == [prompt for prompts in task.training_prompts() for prompt in prompts]


def test_to_dataset_of_a_list_with_published_repeats():
    dataset = published_imagenet().to_dataset()
    assert len(dataset) == 3000
    assert dataset.features["class_id"].int2str(744) == "projectile"
    assert dataset[744]["class_name"] == "missile" and dataset[744]["prompt"] == "a photo of a missile"


CARD = """---
dataset_info:
  features:
  - name: picture
    dtype: image
  - name: land_cover
    dtype:
      class_label:
        names:
          '0': annual_crop
          '1': sea_or_lake
  - name: size
    dtype: int32
{more}
---
"""
SECOND_LABEL = (
    "  - name: season\n    dtype:\n      class_label:\n        names:\n          '0': dry\n          '1': wet"
)


@pytest.fixture
def hub_dataset(tmp_path, monkeypatch):
    """Writes a dataset folder, whose only data file is unreadable: nothing but the card may be needed."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def write(card):
        folder = tmp_path / "my-land"
        folder.mkdir()
        (folder / "train.parquet").write_bytes(b"not parquet")
        if card is not None:
            (folder / "README.md").write_text(card)
        return str(folder)

    return write


def test_from_hub_reads_the_class_label_without_the_data(hub_dataset):
    folder = hub_dataset(CARD.format(more=""))
    task = OrionTask.from_hub(folder, templates=["a satellite photo of {}"])
    assert (task.name, task.class_names) == ("my-land", ("annual crop", "sea or lake"))
    assert task.prompts() == ["a satellite photo of annual crop", "a satellite photo of sea or lake"]
    assert task.hub_datasets == (HubDataset(id=folder, image_column="picture", label_column="land_cover"),)
    raw = OrionTask.from_hub(folder, "land_cover", keep_underscores=True, name="land")
    assert (raw.name, raw.class_names) == ("land", ("annual_crop", "sea_or_lake"))
    with pytest.raises(ValueError, match="no column 'label', the columns are picture, land_cover, size"):
        OrionTask.from_hub(folder, label_column="label")
    with pytest.raises(ValueError, match="column 'size' is a Value, not a ClassLabel"):
        OrionTask.from_hub(folder, label_column="size")


def test_from_hub_asks_which_of_several_label_columns(hub_dataset):
    folder = hub_dataset(CARD.format(more=SECOND_LABEL))
    with pytest.raises(ValueError, match=r"several ClassLabel columns, label_column= land_cover or season\?"):
        OrionTask.from_hub(folder)
    assert OrionTask.from_hub(folder, "season").class_names == ("dry", "wet")


def test_from_hub_names_that_only_an_underscore_separates(hub_dataset):
    folder = hub_dataset(CARD.format(more="").replace("sea_or_lake", "annual crop"))
    with pytest.raises(ValueError, match="column 'land_cover': class names must differ: 'annual crop' at 0, 1"):
        OrionTask.from_hub(folder)
    assert OrionTask.from_hub(folder, keep_underscores=True).class_names == ("annual_crop", "annual crop")


def test_from_hub_without_declared_features(hub_dataset):
    with pytest.raises(ValueError, match="does not declare its features"):
        OrionTask.from_hub(hub_dataset(None))


def test_from_hub_without_a_class_label(hub_dataset):
    card = "---\ndataset_info:\n  features:\n  - name: size\n    dtype: int32\n---\n"
    with pytest.raises(ValueError, match="none of the columns size is a ClassLabel; use from_names"):
        OrionTask.from_hub(hub_dataset(card))


@pytest.fixture(scope="module")
def tokenizer():
    """A word a token, with CLIP's start and end tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<|startoftext|>": 0, "<|endoftext|>": 1}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<|endoftext|>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single="<|startoftext|> $A <|endoftext|>", special_tokens=list(vocabulary.items())
    )
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|endoftext|>", model_max_length=77)


def test_check_context_counts_the_special_tokens(tokenizer):
    longest = " ".join(["long"] * 73)  # "a" + 73 + "end" + start and end = 77
    task = OrionTask.from_names(["cat", longest], templates=["a {}"], eval_template="a {} end")
    task.check_context(tokenizer)
    with pytest.raises(
        ValueError, match=r"class 1 'long long .*' makes a prompt of 77 tokens, more than the model's 76"
    ) as error:
        task.check_context(tokenizer, max_length=76)
    assert "1 of 4 prompts are too long" in str(error.value)
    with pytest.raises(ValueError, match="78 tokens, more than the model's 77"):
        dataclasses.replace(task, class_names=("cat", longest + " long")).check_context(tokenizer)


def test_every_benchmark_fits_the_context_of_this_tokenizer(tokenizer):
    for name in BENCHMARKS:
        OrionTask.from_name(name, unique_names=True).check_context(tokenizer, max_length=20)


def test_importing_and_reading_tasks_loads_no_heavy_library():
    code = (
        "import sys; from orion_hf.tasks import OrionTask; OrionTask.from_name('eurosat').prompts();"
        "print([m for m in ('torch', 'transformers', 'datasets', 'huggingface_hub') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"

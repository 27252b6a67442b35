"""K-shot splits against golden vectors, and the augmented support features."""

import json
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image
from safetensors.torch import save_file

from orion_hf.kshot import (
    TIP_ADAPTER_CROP_AREA,
    KShotSplit,
    augmented_features,
    k_shot_split,
    random_crop_and_flip,
    read_labels,
)

LABELS = [3, 3, 0, 0, 0, 0, 1, 3, 0, 0]


@pytest.mark.golden("kshot_")
def test_golden(case):
    assert case.options["method"] == "kshot_split"
    for seed in case.options["seeds"]:
        for shots in case.options["shots"]:
            split = k_shot_split(case["in.train_labels"], shots, seed, validation_labels=case["in.val_labels"])
            assert split.train == case[f"out.train_seed{seed}_shot{shots}"].tolist()
            assert split.validation == case[f"out.val_seed{seed}_shot{shots}"].tolist()


def test_small_classes_are_taken_whole_or_filled():
    whole = k_shot_split(LABELS, shots=4, seed=1)
    assert [LABELS[i] for i in whole.train] == [3] * 3 + [0] * 4 + [1], "classes in order of first appearance"
    assert whole.train[:3] == [0, 1, 7] and whole.train[-1] == 6
    filled = k_shot_split(LABELS, shots=4, seed=1, fill="replacement")
    assert Counter(LABELS[i] for i in filled.train) == {3: 4, 0: 4, 1: 4}
    assert whole.validation == filled.validation == []


def test_validation_can_come_from_what_is_left():
    split = k_shot_split(LABELS, shots=2, seed=4, validation_from_train=True)
    assert not set(split.train) & set(split.validation)
    assert Counter(LABELS[i] for i in split.validation) == {3: 1, 0: 2}


def test_json_round_trip_and_check(tmp_path):
    split = k_shot_split(torch.tensor(LABELS), shots=2, seed=2, validation_labels=[0, 1])
    read = KShotSplit.from_json(split.save_json(tmp_path / "splits" / "a.json"))
    assert read == split and [path.name for path in (tmp_path / "splits").iterdir()] == ["a.json"]
    read.check(LABELS, [0, 1])
    with pytest.raises(ValueError, match="other labels"):
        read.check(LABELS[::-1], [0, 1])
    (tmp_path / "b.json").write_text('{"shots": 1}')
    with pytest.raises(ValueError, match=r"b\.json"):
        KShotSplit.from_json(tmp_path / "b.json")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"shots": 0}, "shots"),
        ({"shots": "2"}, "shots"),
        ({"shots": True}, "shots"),
        ({"seed": 1.5}, "seed"),
        ({"fill": ["smaller"]}, "fill"),
        ({"train": 3}, "train"),
        ({"train": []}, "train"),
        ({"train": [-1]}, "train"),
        ({"train": ["0"]}, "train"),
        ({"validation": None}, "validation"),
        ({"validation_from_train": 1}, "validation_from_train"),
        ({"labels_digest": 5}, "labels_digest"),
        ({"more": 5}, "labels_digest"),
    ],
)
def test_changed_files_are_refused_by_name(tmp_path, change, word):
    path = k_shot_split(LABELS, shots=2, seed=2).save_json(tmp_path / "split.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=rf"split\.json is no K-shot split: .*{word}"):
        KShotSplit.from_json(path)


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000, b"\xff"])
def test_files_that_are_no_split_are_named(tmp_path, text):
    path = tmp_path / "split.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=r"split\.json"):
        KShotSplit.from_json(path)


def test_positions_beyond_the_labels_are_refused():
    split = k_shot_split(LABELS, shots=2, seed=2, validation_labels=[0, 1])
    split.check(LABELS, [0, 1])
    for change, message in (
        ({"train": [0, 10, 11]}, "2 train positions that are not among 10 images, the first is 10"),
        ({"validation": [2]}, "1 validation positions that are not among 2 images"),
        ({"train": [-1]}, "1 train positions"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(split, **change).check(LABELS, [0, 1])
    left = k_shot_split(LABELS, shots=2, seed=2, validation_from_train=True)
    left.check(LABELS)
    with pytest.raises(ValueError, match="not among 10 images"):
        replace(left, validation=[10]).check(LABELS)


def test_numbers_of_numpy_are_saved(tmp_path):
    split = k_shot_split(np.array(LABELS), shots=np.int64(2), seed=np.int64(1))
    assert KShotSplit.from_json(split.save_json(tmp_path / "a.json")) == k_shot_split(LABELS, shots=2, seed=1)


def test_names_become_indices():
    dataset = Dataset.from_dict({"label": ["dog", "cat", "dog", "ant"]})
    assert read_labels(dataset) == read_labels(np.array(dataset["label"])) == [2, 1, 2, 0]
    assert read_labels(dataset, class_names=["dog", "cat", "ant"]) == [0, 1, 0, 2]
    with pytest.raises(ValueError, match="column 'label': 'ant' is not among the 2 class_names"):
        read_labels(dataset, class_names=["dog", "cat"])
    with pytest.raises(ValueError, match=r"labels\[0\] is 'dog', .* read_labels"):
        k_shot_split(dataset["label"], shots=1, seed=1)


def test_labels_that_are_no_class_indices_are_refused(tmp_path):
    for labels, message in (
        ([0, -1], r"labels\[1\] is -1, which stands for an unknown class"),
        (torch.tensor([0.0, 1.0]), r"labels\[0\] is 0\.0"),
        ([0, None], r"labels\[1\] is None"),
        ([[0], [1]], r"labels\[0\]"),
        (["cat", 1], r"labels\[0\] is 'cat'"),
    ):
        for read in (read_labels, lambda labels: k_shot_split(labels, shots=1, seed=1)):
            with pytest.raises(ValueError, match=message):
                read(labels)
    with pytest.raises(ValueError, match=r"column 'label'\[1\] is -1"):
        read_labels(Dataset.from_dict({"label": [3, -1]}))


def test_a_pickle_is_named_and_not_read(tmp_path):
    torch.save({"labels": torch.tensor(LABELS)}, tmp_path / "labels.pt")
    with pytest.raises(ValueError, match=r"labels\.pt is not a safetensors file .* torch\.save and pickle"):
        read_labels(tmp_path / "labels.pt")
    with pytest.raises(FileNotFoundError, match=r"nowhere\.safetensors: no such file"):
        read_labels(str(tmp_path / "nowhere.safetensors"))


def test_labels_come_from_datasets_and_feature_files(tmp_path):
    dataset = Dataset.from_dict({"label": LABELS, "fine": LABELS[::-1]})
    save_file({"labels": torch.tensor(LABELS), "features": torch.ones(10, 2)}, tmp_path / "f.safetensors")
    assert read_labels(dataset) == read_labels(tmp_path / "f.safetensors") == LABELS
    assert read_labels(dataset, "fine") == LABELS[::-1]
    with pytest.raises(ValueError, match="'coarse'"):
        read_labels(dataset, "coarse")
    save_file({"features": torch.ones(10, 2)}, tmp_path / "g.safetensors")
    with pytest.raises(ValueError, match="'labels'"):
        read_labels(tmp_path / "g.safetensors")


@pytest.mark.parametrize(
    "options",
    [
        {"shots": 0},
        {"shots": 1.5},
        {"seed": "one"},
        {"fill": "more"},
        {"labels": []},
        {"validation_labels": [0], "validation_from_train": True},
    ],
)
def test_bad_options_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        k_shot_split(**{"labels": LABELS, "shots": 1, "seed": 1} | options)


@pytest.fixture(scope="module")
def ramp():
    """An image whose red channel is its column and green channel its row."""
    image = Image.new("RGB", (200, 100))
    image.putdata([(x, y, 0) for y in range(100) for x in range(200)])
    return image


def corners(image):
    """Extent of a crop of the ramp: columns and rows it spans, and whether it is mirrored."""
    pixels = torch.from_numpy(np.asarray(image).copy()).double()
    columns, rows = pixels[0, [0, -1], 0], pixels[[0, -1], 0, 1]
    return (columns[1] - columns[0]).item(), (rows[1] - rows[0]).item()


@pytest.mark.parametrize("area", [(0.08, 1.0), TIP_ADAPTER_CROP_AREA])
def test_crops_have_the_published_area_and_ratio(ramp, area):
    shares, mirrored = [], 0
    for seed in range(200):
        crop = random_crop_and_flip(ramp, random.Random(seed), size=32, area=area)
        assert crop.size == (32, 32)
        columns, rows = corners(crop)
        mirrored += columns < 0
        width, height = abs(columns) * 32 / 31, rows * 32 / 31
        assert 0.7 < width / height < 1.42
        shares.append(width * height / 20000)
    assert area[0] * 0.8 < min(shares) < area[0] + 0.05
    assert max(shares) < 0.72, "an image twice as wide as high has no crop of ratio 4/3 beyond 2/3 of it"
    assert 70 < mirrored < 130


def test_augmented_features_do_not_depend_on_the_batch(ramp):
    images = [ramp, ramp.rotate(90, expand=True), ramp.convert("L")]

    def encode(crops):
        assert all(crop.mode == "RGB" and crop.size == (8, 8) for crop in crops)
        return torch.tensor([[*crop.getpixel((0, 0)), *crop.getpixel((7, 7))] for crop in crops]).double()

    features = augmented_features(images, encode, passes=4, size=8, seed=1)
    assert features.shape == (4, 3, 6)
    assert torch.equal(features, augmented_features(images, encode, passes=4, size=8, seed=1, batch_size=2))
    assert not torch.equal(features[0], features[1])
    assert not torch.equal(features, augmented_features(images, encode, passes=4, size=8, seed=2))
    with pytest.raises(ValueError, match="passes"):
        augmented_features(images, encode, passes=0)

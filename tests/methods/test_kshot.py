"""K-shot splits against golden vectors, and the augmented support features."""

import random
from collections import Counter

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

"""Images of a task: labels are matched by name, whatever their order."""

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Image, Value
from PIL import Image as Picture

from orion_hf import OrionTask
from orion_hf.images import align_labels, task_images

TASK = OrionTask.from_names(["Annual Crop Land", "Forest", "Sea or Lake"], name="fields")


def picture(value: int) -> Picture.Image:
    return Picture.fromarray(np.full((8, 8, 3), value, dtype=np.uint8))


def dataset(label_names, labels, label_column="label") -> Dataset:
    features = Features({"image": Image(), label_column: ClassLabel(names=label_names), "note": Value("string")})
    rows = {"image": [picture(value) for value in range(len(labels))], label_column: labels}
    return Dataset.from_dict(rows | {"note": [""] * len(labels)}, features=features)


def test_labels_are_renumbered_by_name():
    aligned = align_labels(dataset(["sea_or_lake", "annual-crop land", "FOREST"], [0, 1, 2, 0]), TASK)
    assert aligned.column_names == ["image", "label"]
    assert aligned["label"][:] == [2, 0, 1, 2]
    assert aligned.features["label"].names == list(TASK.class_names)
    assert np.asarray(aligned[3]["image"])[0, 0, 0] == 3


def test_folder_names_of_a_benchmark_are_known():
    task = OrionTask.from_name("eurosat")
    aligned = align_labels(dataset(["SeaLake", "AnnualCrop"], [0, 1]), task)
    assert aligned["label"][:] == [9, 0]


def test_an_unknown_label_name_shows_the_nearest_class():
    with pytest.raises(
        ValueError,
        match=r"1 of its 2 label names are no class of fields, first 'forrest' \(nearest: 'Forest'",
    ):
        align_labels(dataset(["forrest", "sea or lake"], [0, 1]), TASK)


def test_names_that_differ_in_punctuation_only_are_told_apart():
    task = OrionTask.from_names(["C", "C++", "C#"], name="languages")
    assert align_labels(dataset(["C#", "C", "C++"], [0, 1, 2]), task)["label"][:] == [2, 0, 1]
    with pytest.raises(ValueError, match=r"first 'C-'"):
        align_labels(dataset(["C-", "C"], [0, 1]), task)


def test_images_without_a_label_are_refused():
    with pytest.raises(ValueError, match="1 of its 2 images have no label"):
        align_labels(dataset(["Forest", "Sea or Lake"], [0, -1]), TASK)


def test_labels_without_names_are_refused():
    plain = dataset(["Forest", "Sea or Lake"], [0, 1]).cast_column("label", Value("int64"))
    with pytest.raises(ValueError, match="column 'label' holds no class names"):
        align_labels(plain, TASK)


def test_a_missing_column_lists_the_others():
    renamed = dataset(["Forest", "Sea or Lake"], [0, 1]).rename_column("label", "kind_of_land")
    with pytest.raises(ValueError, match="which column holds the label"):
        align_labels(renamed, TASK)


def test_an_image_folder_is_a_source(tmp_path):
    for name, value in (("forest", 10), ("sea or lake", 20)):
        (tmp_path / "test" / name).mkdir(parents=True)
        for copy in range(3):
            picture(value + copy).save(tmp_path / "test" / name / f"{copy}.png")
    images = task_images(TASK, "test", source=str(tmp_path), images_per_class=2)
    assert sorted(images["label"]) == [1, 1, 2, 2]


def test_a_task_without_images_says_what_to_pass():
    with pytest.raises(ValueError, match="task 'fields' names no images; pass a Hub dataset id or an image folder"):
        task_images(TASK)


def test_a_missing_source_is_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"cannot load images from .*nowhere") as error:
        task_images(TASK, source=str(tmp_path / "nowhere"))
    assert "\n" not in str(error.value)

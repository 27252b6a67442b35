"""The procedural world: the same pictures everywhere, and tasks that pre-training neither shows nor names."""

import hashlib

import numpy as np
import pytest
from numpy.random import RandomState

from orion_hf.tasks import OrionTask
from orion_hf.tiny_captions import SYNONYMS, caption, class_name
from orion_hf.tiny_world import (
    ATTRIBUTES,
    CLASS_ATTRIBUTES,
    HELD_OUT,
    TASKS,
    class_image,
    class_key,
    pretraining_scene,
    render,
    tiny_dataset,
)

# SHA-256 of a few pictures, recorded once: they must not change with the machine, NumPy or a refactoring.
PICTURES = {
    "shapes": "17e31ed19618395e",
    "textures": "fc8f642043dd70bd",
    "land": "593702927cf61a3b",
    "pretraining": "8eb6df415292138b",
}


def digest(images: list[np.ndarray]) -> str:
    return hashlib.sha256(np.stack(images).tobytes()).hexdigest()[:16]


@pytest.fixture(scope="module")
def scenes():
    return [pretraining_scene(i)[0] for i in range(6_000)]


@pytest.mark.parametrize("family", HELD_OUT)
def test_task_pictures_are_the_recorded_ones(family):
    images = [class_image(family, label, "test", 0, 0) for label in range(len(HELD_OUT[family]))]
    assert digest(images) == PICTURES[family]


def test_pretraining_pictures_are_the_recorded_ones():
    assert digest([render(*pretraining_scene(i)) for i in range(40)]) == PICTURES["pretraining"]


def test_pretraining_never_shows_a_class_of_a_task(scenes):
    seen = {family: {class_key(s) for s in scenes if s["family"] == family} for family in HELD_OUT}
    for family, held_out in HELD_OUT.items():
        assert not seen[family] & set(held_out)
        combinations = np.prod([len(ATTRIBUTES[family][name]) for name in CLASS_ATTRIBUTES[family]])
        assert len(seen[family]) > 0.97 * (combinations - len(held_out))  # ... and shows the others


def test_every_pair_of_attributes_of_a_class_is_seen_elsewhere(scenes):
    """Shapes and textures: only the full combination is new. (In land the pair is the combination.)"""
    for family in ("shapes", "textures"):
        keys = {class_key(s) for s in scenes if s["family"] == family}
        width = len(CLASS_ATTRIBUTES[family])
        for i in range(width):
            for j in range(i):
                pairs = {(key[i], key[j]) for key in keys}
                assert {(key[i], key[j]) for key in HELD_OUT[family]} <= pairs


def test_captions_never_contain_a_class_name_but_know_its_words(scenes):
    rng = RandomState(5)
    captions = [caption(scene, rng) for scene in scenes]
    text = "\n".join(captions)
    words = {word.strip(".") for line in captions for word in line.split()}
    for family, held_out in HELD_OUT.items():
        for key in held_out:
            assert class_name(family, key) not in text
            assert set(class_name(family, key).split()) <= words


def test_no_word_is_a_synonym_of_two():
    """... nor of a word that names another attribute: a caption never says something false."""
    claimed = [s for synonyms in SYNONYMS.values() for s in synonyms]
    assert len(claimed) == len(set(claimed))
    assert not set(claimed) & set(SYNONYMS)


@pytest.mark.parametrize("name", TASKS)
def test_class_names_of_the_task_are_the_held_out_combinations(name):
    task = OrionTask.from_name(name)
    assert list(task.class_names) == [class_name(TASKS[name], key) for key in HELD_OUT[TASKS[name]]]
    assert len(task.templates) == 3


def test_dataset_has_labels_images_and_the_tasks_names():
    data = tiny_dataset("tiny-land", "test", images_per_class=3)
    assert data.features["label"].names == list(OrionTask.from_name("tiny-land").class_names)
    assert data["label"][:] == list(range(10)) * 3
    assert data[0]["image"].size == (64, 64) and data[0]["image"].mode == "RGB"
    assert np.array_equal(np.asarray(data[14]["image"]), class_image("land", 4, "test", 0, 1))


def test_splits_seeds_classes_and_indices_all_differ():
    images = [
        class_image("land", label, split, seed, index).tobytes()
        for split in ("train", "test")
        for seed in (0, 1)
        for label in range(3)
        for index in range(5)
    ]
    assert len(set(images)) == len(images)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"task_name": "tiny-sea"},
            "unknown tiny task 'tiny-sea'; choose one of tiny-shapes, tiny-textures, tiny-land",
        ),
        ({"task_name": "tiny-land", "split": "validation"}, "unknown split 'validation'"),
        ({"task_name": "tiny-land", "images_per_class": 0}, "images_per_class must be at least 1"),
        ({"task_name": "tiny-land", "seed": -1}, "seed at least 0"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        tiny_dataset(**arguments)

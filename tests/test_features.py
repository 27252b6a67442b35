"""Image features: right values, a cache that resumes and never reuses what changed, unreadable images by name."""

import io
import json

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as Picture
from tiny_clip_folder import save_tiny_clip
from torch.nn.functional import normalize

from orion_hf import features as module
from orion_hf.features import ImageEncoder, feature_key, image_features, weights_digest
from orion_hf.views import Views

COLUMNS = Features({"image": Image(), "label": ClassLabel(names=["even", "odd"])})


def picture(number: int) -> Picture.Image:
    rng = np.random.RandomState(number)
    return Picture.fromarray(rng.randint(0, 256, (20 + number, 30, 3), dtype=np.uint8))


def png(number: int) -> bytes:
    file = io.BytesIO()
    picture(number).save(file, "png")
    return file.getvalue()


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> ImageEncoder:
    return ImageEncoder.from_pretrained(str(save_tiny_clip(tmp_path_factory.mktemp("clip") / "tiny")))


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    rows = {"image": [picture(number) for number in range(10)], "label": [number % 2 for number in range(10)]}
    return Dataset.from_dict(rows, features=COLUMNS)


@pytest.fixture
def counted(encoder, monkeypatch) -> list[int]:
    """How many pictures each forward pass has had."""
    passes: list[int] = []
    encode = ImageEncoder.encode

    def counting(self, pixel_values):
        passes.append(len(pixel_values))
        return encode(self, pixel_values)

    monkeypatch.setattr(ImageEncoder, "encode", counting)
    return passes


def extract(encoder, dataset, folder, **options):
    return image_features(encoder, dataset, cache_dir=folder, progress=False, **options)


def stored(folder) -> list[str]:
    return sorted(path.name for path in folder.glob("*/*") if path.name != "key.json")


# --- values -----------------------------------------------------------------------------------------------


def test_features_are_the_unit_embeddings_of_the_model(encoder, dataset, tmp_path):
    found = extract(encoder, dataset, tmp_path, batch_size=4)
    pixels = encoder.processor([picture(number) for number in range(10)], return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        expected = normalize(encoder.clip.get_image_features(pixel_values=pixels).pooler_output, dim=-1)
    assert torch.allclose(found.features, expected, atol=1e-6)
    assert found.features.dtype == torch.float32
    assert found.rows.tolist() == list(range(10))
    assert found.unreadable == ()
    assert encoder.logit_scale == pytest.approx(encoder.clip.logit_scale.exp().item())


def test_views_are_encoded_with_the_image_first(encoder, dataset, tmp_path, counted):
    views = Views(count=5, seed=3)
    found = extract(encoder, dataset, tmp_path, views=views, batch_size=10)
    assert found.features.shape == (10, 5, 16)
    assert found.features.dtype == torch.float16
    assert counted == [10] * 5  # two images of five views in a batch of ten
    plain = extract(encoder, dataset, tmp_path).features
    assert torch.allclose(found.features[:, 0].float(), plain, atol=2e-3)
    # A view does not depend on what else is in its batch.
    alone = module.pixel_values(picture(7), 7, encoder.processor, 16, views)
    with torch.no_grad():
        assert torch.allclose(found.features[7].float(), encoder.encode(alone), atol=2e-3)


def test_an_image_of_another_mode_is_made_rgb(encoder, tmp_path):
    grey = Dataset.from_dict({"image": [picture(0).convert("L"), picture(1).convert("RGBA")], "label": [0, 1]})
    found = extract(encoder, grey.cast(COLUMNS), tmp_path)
    assert found.features.shape == (2, 16)


def test_mixed_precision_changes_features_a_little_and_workers_not_at_all(encoder, dataset, tmp_path):
    class Bfloat16:
        mixed_precision = "bf16"

        def autocast(self):
            return torch.autocast("cpu", torch.bfloat16)

    full = extract(encoder, dataset, tmp_path).features
    half = extract(encoder, dataset, tmp_path, accelerator=Bfloat16()).features
    assert half.dtype == torch.float32
    assert not torch.equal(half, full)
    assert torch.allclose(half, full, atol=0.03)
    parallel = extract(encoder, dataset, tmp_path / "parallel", num_workers=2, batch_size=3).features
    assert torch.allclose(parallel, full, atol=1e-6)


# --- cache ------------------------------------------------------------------------------------------------


def test_a_second_call_computes_nothing(encoder, dataset, tmp_path, counted):
    first = extract(encoder, dataset, tmp_path)
    assert sum(counted) == 10
    second = extract(encoder, dataset, tmp_path)
    assert sum(counted) == 10
    assert torch.equal(first.features, second.features)
    [key] = tmp_path.glob("*/key.json")
    assert json.loads(key.read_text())["dataset"] == dataset._fingerprint


def test_an_interrupted_extraction_goes_on(encoder, dataset, tmp_path, counted, monkeypatch):
    monkeypatch.setattr(module, "SHARD_PICTURES", 3)
    encode = ImageEncoder.encode

    def interrupted(self, pixel_values):
        if sum(counted) >= 7:  # within the third shard
            raise KeyboardInterrupt
        return encode(self, pixel_values)

    with monkeypatch.context() as patch:
        patch.setattr(ImageEncoder, "encode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            extract(encoder, dataset, tmp_path, batch_size=1)
    assert stored(tmp_path) == ["000000000.safetensors", "000000003.safetensors"]
    resumed = extract(encoder, dataset, tmp_path, batch_size=1)
    assert sum(counted) == 7 + 4
    assert torch.equal(resumed.features, extract(encoder, dataset, tmp_path / "afresh", batch_size=1).features)


def test_a_damaged_shard_is_made_again(encoder, dataset, tmp_path, counted):
    first = extract(encoder, dataset, tmp_path)
    [shard] = tmp_path.glob("*/*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-20])
    assert torch.equal(extract(encoder, dataset, tmp_path).features, first.features)
    assert sum(counted) == 20


def test_two_processes_share_the_shards(encoder, dataset, tmp_path, counted, monkeypatch):
    monkeypatch.setattr(module, "SHARD_PICTURES", 2)

    class Process:
        num_processes, device, is_main_process = 2, torch.device("cpu"), False

        def __init__(self, index):
            self.process_index = index

        def wait_for_everyone(self):
            pass

    monkeypatch.setattr(module, "PartialState", lambda: Process(1))
    with pytest.raises(OSError, match="all processes must share the cache folder"):
        extract(encoder, dataset, tmp_path)
    assert stored(tmp_path) == ["000000002.safetensors", "000000006.safetensors"]
    monkeypatch.setattr(module, "PartialState", lambda: Process(0))
    together = extract(encoder, dataset, tmp_path)
    assert sum(counted) == 10
    monkeypatch.undo()
    assert torch.allclose(together.features, extract(encoder, dataset, tmp_path / "alone").features, atol=1e-6)


def test_whatever_features_depend_on_changes_the_key(encoder, dataset, tmp_path_factory):
    keys = [
        feature_key(encoder, dataset, "test", None, "no"),
        feature_key(encoder, dataset, "train", None, "no"),
        feature_key(encoder, dataset, "test", None, "bf16"),
        feature_key(encoder, dataset.select([0, 1]), "test", None, "no"),
        feature_key(encoder, dataset, "test", Views(), "no"),
        feature_key(encoder, dataset, "test", Views(seed=1), "no"),
        feature_key(encoder, dataset, "test", Views(augmix=True), "no"),
        feature_key(ImageEncoder(encoder.clip, encoder.processor, "org/clip", "1234"), dataset, "test", None, "no"),
    ]
    folder = save_tiny_clip(tmp_path_factory.mktemp("clip") / "other", seed=5)
    trained_on = ImageEncoder.from_pretrained(str(folder))
    trained_on.name = encoder.name  # as if the folder's weights had been replaced
    keys.append(feature_key(trained_on, dataset, "test", None, "no"))
    blurred = ImageEncoder.from_pretrained(encoder.name)
    assert feature_key(blurred, dataset, "test", None, "no") == keys[0]
    blurred.processor.resample = 0
    keys.append(feature_key(blurred, dataset, "test", None, "no"))
    assert len({module.digest_of(key) for key in keys}) == len(keys)


def test_a_digest_sees_names_types_and_values():
    digests = {
        weights_digest({"a": torch.zeros(2)}),
        weights_digest({"b": torch.zeros(2)}),
        weights_digest({"a": torch.zeros(2, dtype=torch.int32)}),
        weights_digest({"a": torch.zeros(2, 1)}),
        weights_digest({"a": torch.tensor([0.0, 1e-30])}),
        weights_digest({"a": torch.tensor(0.0)}),
    }
    assert len(digests) == 6


# --- what can go wrong ------------------------------------------------------------------------------------


def test_unreadable_images_are_counted_and_named(encoder, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SHARD_PICTURES", 2)
    images = [{"bytes": png(number), "path": f"{number}.png"} for number in range(6)]
    images[1]["bytes"] = png(1)[:60]
    images[2]["bytes"] = b"no picture"
    images[3] = None
    damaged = Dataset.from_dict({"image": images, "label": [0, 1, 0, 1, 0, 1]}, features=COLUMNS)
    with pytest.warns(UserWarning, match=r"3 unreadable images were left out: row 1 \(1.png\): .*row 2 \(2.png\)"):
        found = extract(encoder, damaged, tmp_path)
    assert found.rows.tolist() == [0, 4, 5]
    assert len(found.unreadable) == 3 and found.unreadable[2].startswith("row 3: ")
    with pytest.warns(UserWarning, match="3 unreadable"):  # also when they come from the cache
        again = extract(encoder, damaged, tmp_path)
    assert torch.equal(again.features, found.features)
    sound = Dataset.from_dict({"image": [picture(n) for n in (0, 4, 5)], "label": [0, 0, 1]}, features=COLUMNS)
    assert torch.allclose(found.features, extract(encoder, sound, tmp_path).features, atol=1e-6)

    with pytest.raises(ValueError, match="no image to classify: all 3 are unreadable, first row 0"):
        extract(encoder, damaged.select([1, 2, 3]), tmp_path)
    with pytest.raises(ValueError, match="no image to classify: there are none"):
        extract(encoder, damaged.select([]), tmp_path)


def test_features_that_are_not_finite_are_refused_and_not_kept(encoder, dataset, tmp_path):
    broken = ImageEncoder.from_pretrained(encoder.name)
    with torch.no_grad():
        broken.clip.visual_projection.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"10 of 10 features are NaN or infinite.*mixed_precision"):
        extract(broken, dataset, tmp_path)
    assert stored(tmp_path) == []


def test_a_model_without_a_vision_tower_is_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    for name, message in {"nowhere": "there is no such folder", "empty": "no vision tower could be loaded"}.items():
        with pytest.raises(OSError, match=message) as error:
            ImageEncoder.from_pretrained(str(tmp_path / name))
        assert "\n" not in str(error.value) and str(tmp_path / name) in str(error.value)

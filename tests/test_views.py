"""Augmented views: reproducible draws, crops inside the image, operations as AugMix defines them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from orion_hf import views as module
from orion_hf.views import AREA, RATIO, Views, augmented_views, augmix, crop_box, random_flip, random_resized_crop


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.RandomState(seed).randint(0, 256, (height, width, 3), dtype=np.uint8))


def column(values) -> Image.Image:
    """A grey picture of one row."""
    return Image.fromarray(np.repeat(np.array(values, dtype=np.uint8)[None, :, None], 3, axis=2))


# --- draws ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixed", [False, True])
def test_a_view_depends_on_seed_row_and_number_only(mixed):
    picture = noise(50, 40)
    many = augmented_views(picture, 3, 16, Views(6, mixed, seed=1))
    assert many.shape == (5, 3, 16, 16)
    assert many.dtype == torch.float32
    assert 0 <= many.min() < 0.2 < 0.8 < many.max() <= 1
    assert torch.equal(augmented_views(picture, 3, 16, Views(3, mixed, seed=1)), many[:2])
    assert not torch.equal(augmented_views(picture, 4, 16, Views(6, mixed, seed=1)), many)
    assert not torch.equal(augmented_views(picture, 3, 16, Views(6, mixed, seed=2)), many)
    assert not torch.equal(many[0], many[1])


def test_augmix_changes_the_same_crops():
    picture = Image.new("RGB", (30, 20), (200, 100, 50))
    plain = augmented_views(picture, 0, 8, Views(4))
    assert torch.allclose(plain, torch.tensor([200.0, 100.0, 50.0]).view(3, 1, 1) / 255)
    picture = noise(70, 60)
    plain, mixed = (augmented_views(picture, 0, 64, Views(6, augmix=mixed)) for mixed in (False, True))
    assert not torch.allclose(mixed, plain, atol=0.02)
    similarity = torch.cosine_similarity((mixed - 0.5).flatten(1)[:, None], (plain - 0.5).flatten(1)[None], dim=-1)
    assert (similarity.argmax(dim=1) == torch.arange(5)).all()


def test_too_few_views_are_refused():
    with pytest.raises(ValueError, match="at least 2"):
        Views(count=1)


# --- crop and flip ----------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 700), st.integers(1, 700), st.integers(0, 2**20))
def test_crops_are_inside_the_image(width, height, seed):
    left, top, crop_width, crop_height = crop_box(width, height, np.random.default_rng(seed))
    assert crop_width >= 1 and crop_height >= 1
    assert left >= 0 and left + crop_width <= width
    assert top >= 0 and top + crop_height <= height


def test_area_is_uniform_and_ratio_log_uniform():
    rng = np.random.default_rng(0)
    # In a very large square nearly all draws fit, so their distribution is that of the definition.
    boxes = np.array([crop_box(10_000, 10_000, rng)[2:] for _ in range(3_000)], dtype=float)
    area, log_ratio = boxes.prod(axis=1) / 1e8, np.log(boxes[:, 0] / boxes[:, 1])
    fits = area < 0.7  # no crop of that area and an allowed ratio is too large
    assert area.min() >= AREA[0] - 1e-3
    assert area[fits].mean() == pytest.approx((AREA[0] + 0.7) / 2, abs=0.015)
    assert np.abs(log_ratio).max() <= math.log(RATIO[1]) + 1e-3
    assert log_ratio[fits].std() == pytest.approx(2 * math.log(4 / 3) / math.sqrt(12), rel=0.05)


@pytest.mark.parametrize(
    ("size", "expected"),
    [((30, 3000), (0, 1480, 30, 40)), ((3000, 30), (1480, 0, 40, 30)), ((1, 1), (0, 0, 1, 1))],
)
def test_where_no_crop_fits_the_largest_central_one_is_taken(size, expected, monkeypatch):
    monkeypatch.setattr(module, "CROP_ATTEMPTS", 0)
    assert crop_box(*size, np.random.default_rng(0)) == expected


def test_a_crop_is_resampled_bilinearly_from_its_own_pixels():
    picture = noise(60, 40)
    left, top, width, height = crop_box(60, 40, np.random.default_rng(5))
    expected = picture.crop((left, top, left + width, top + height)).resize((16, 16), Image.Resampling.BILINEAR)
    assert np.array_equal(random_resized_crop(picture, 16, np.random.default_rng(5)), expected)


def test_half_of_the_pictures_are_flipped():
    picture = column([0, 255])
    rng = np.random.default_rng(0)
    flipped = [np.asarray(random_flip(picture, rng))[0, 0, 0] == 255 for _ in range(1_000)]
    assert 450 < sum(flipped) < 550


# --- AugMix -----------------------------------------------------------------------------------------------


class Sign:
    """A source of random numbers that always gives the same sign."""

    def __init__(self, positive: bool):
        self.value = 0.25 if positive else 0.75

    def random(self) -> float:
        return self.value


def test_posterize_keeps_four_bits_and_solarize_inverts_the_brightest():
    picture = column([0, 15, 16, 240, 250, 255])
    for level in (0.1, 0.5, 0.999):
        assert np.asarray(module.posterize(picture, level, None))[0, :, 0].tolist() == [0, 0, 16, 240, 240, 240]
    # int(25.6 * 0.5) = 12: from 244 on.
    assert np.asarray(module.solarize(picture, 0.5, None))[0, :, 0].tolist() == [0, 15, 16, 240, 5, 0]


def test_rotation_is_by_whole_degrees():
    picture = noise(32, 32)
    assert np.array_equal(module.rotate(picture, 0.33, Sign(True)), picture)
    for positive, degrees in ((True, 2), (False, -2)):
        expected = picture.rotate(degrees, Image.Resampling.BILINEAR)
        assert np.array_equal(module.rotate(picture, 0.9, Sign(positive)), expected)


def test_translation_is_by_whole_pixels_of_a_thirtieth_of_the_side():
    picture = noise(224, 224)
    pixels = np.asarray(picture)
    shift = int(0.55 * 224 / 30)
    assert shift == 4
    moved = np.asarray(module.translate_x(picture, 0.55, Sign(True)))
    assert np.array_equal(moved[:, :-shift], pixels[:, shift:])
    assert not moved[:, -shift:].any()
    moved = np.asarray(module.translate_y(picture, 0.55, Sign(False)))
    assert np.array_equal(moved[shift:], pixels[:-shift])


def test_shear_moves_far_rows_more():
    ramp = Image.fromarray(np.tile(np.arange(200, dtype=np.uint8)[None, :, None], (200, 1, 3)))
    sheared = np.asarray(module.shear_x(ramp, 1.0, Sign(True)))[..., 0].astype(float)
    assert sheared[0, 50] == pytest.approx(50, abs=1)
    assert sheared[150, 50] == pytest.approx(50 + 0.03 * 150, abs=1)
    turned = np.asarray(module.shear_y(ramp.transpose(Image.Transpose.TRANSPOSE), 1.0, Sign(False)))[..., 0]
    assert turned[100, 150] == pytest.approx(100 - 0.03 * 150, abs=1)


def test_a_mixture_of_unchanged_chains_is_the_picture(monkeypatch):
    monkeypatch.setattr(module, "OPERATIONS", (lambda picture, level, rng: picture,))
    picture = noise(12, 12)
    assert np.allclose(augmix(picture, np.random.default_rng(0)), np.asarray(picture), atol=1e-3)


def test_a_mixture_weighs_its_chains(monkeypatch):
    levels = []

    def to_black(picture, level, rng):
        levels.append(level)
        return Image.new("RGB", picture.size)

    monkeypatch.setattr(module, "OPERATIONS", (to_black,))
    white = Image.new("RGB", (2, 2), (255, 255, 255))
    shares = [augmix(white, np.random.default_rng(seed)) / 255 for seed in range(400)]
    assert all(np.ptp(share) == 0 for share in shares)  # m of the white picture is left
    share = np.array([each[0, 0, 0] for each in shares])
    assert share.mean() == pytest.approx(0.5, abs=0.05)  # Beta(1, 1)
    assert share.std() == pytest.approx(1 / math.sqrt(12), abs=0.03)
    assert 0.1 <= min(levels) < 0.15 and 0.95 < max(levels) <= 1
    assert len(levels) / (3 * 400) == pytest.approx(2, abs=0.1)  # 1, 2 or 3 operations of each of three chains

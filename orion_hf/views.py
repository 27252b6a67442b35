"""Augmented views of one image, for methods that adapt to it alone (MTA, TPT).

View 0 is the image as the model's own processor gives it; it is not made here. Every other view is drawn from the
original image: a random resized crop (bilinear), a flip with probability 1/2, and with AugMix a mixture of the crop and
three short chains of mild operations. Everything is Pillow and numpy, and the random numbers of a view depend on the
seed, the image's row and the view's number only, so any process can make any view and a larger number of views adds to
the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageOps
from torch import Tensor, from_numpy

AREA = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
CROP_ATTEMPTS = 10
CHAINS = 3
LEVEL = (0.1, 1.0)  # severity 1 of AugMix


@dataclass(frozen=True)
class Views:
    """Which views: ``count`` with the image itself, with or without AugMix, of one seed.

    MTA uses no AugMix; TPT uses it on the fine-grained benchmarks and not on ImageNet and its variants.
    """

    count: int = 64
    augmix: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.count < 2:
            raise ValueError(f"Views need a count of at least 2 (the image and one more), not {self.count}.")


def augmented_views(image: Image.Image, row: int, size: int, views: Views) -> Tensor:
    """Views 1, 2, ... of an image, before the model's normalisation.

    Args:
        image: RGB, of any size.
        row: its number in the dataset, which seeds the draws.
        size: side of a view in pixels, 224 for the published models.
        views: how many, and how.

    Returns:
        ``(views.count - 1, 3, size, size)`` float32 in [0, 1].

    Example:
        >>> picture = Image.new("RGB", (40, 30), (255, 0, 0))
        >>> augmented_views(picture, row=0, size=16, views=Views(count=3)).shape
        torch.Size([2, 3, 16, 16])
    """
    pictures = []
    for view in range(1, views.count):
        rng = np.random.default_rng([views.seed, row, view])
        picture = random_flip(random_resized_crop(image, size, rng), rng)
        pictures.append(augmix(picture, rng) if views.augmix else _pixels(picture))
    return from_numpy(np.stack(pictures)).permute(0, 3, 1, 2) / 255


def random_resized_crop(image: Image.Image, size: int, rng: np.random.Generator) -> Image.Image:
    """A crop of ``crop_box``, resampled to ``(size, size)`` by bilinear interpolation."""
    left, top, width, height = crop_box(*image.size, rng)
    # Not `resize(box=...)`, which lets pixels beyond the crop's border in.
    return image.crop((left, top, left + width, top + height)).resize((size, size), Image.Resampling.BILINEAR)


def crop_box(width: int, height: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Left, top, width and height of a crop: its share of the area is uniform, its aspect ratio log-uniform.

    A crop that does not fit is drawn again, ten times; then it is the largest central one of an allowed ratio.
    """
    for _ in range(CROP_ATTEMPTS):
        area = width * height * rng.uniform(*AREA)
        ratio = math.exp(rng.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top = int(rng.integers(0, height - crop_height, endpoint=True))
            left = int(rng.integers(0, width - crop_width, endpoint=True))
            return left, top, crop_width, crop_height
    # At least a pixel: an extremely long image has no crop of an allowed ratio.
    crop_width = max(1, min(width, round(height * RATIO[1])))
    crop_height = max(1, min(height, round(width / RATIO[0])))
    return (width - crop_width) // 2, (height - crop_height) // 2, crop_width, crop_height


def random_flip(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Left and right exchanged with probability 1/2."""
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else image


def augmix(image: Image.Image, rng: np.random.Generator) -> np.ndarray:
    """``m x + (1 - m) sum_i w_i chain_i(x)`` of pixel values, ``(height, width, 3)`` float32 in [0, 255].

    ``w ~ Dirichlet(1, 1, 1)``, ``m ~ Beta(1, 1)``; a chain is 1 to 3 operations drawn with replacement. The published
    code mixes normalised pixels, which is the same: all weights add up to one and normalisation is affine.
    """
    weights = rng.dirichlet(np.ones(CHAINS))
    share = rng.beta(1, 1)
    mixture = share * _pixels(image)
    for weight in weights:
        chained = image
        for _ in range(rng.integers(1, 3, endpoint=True)):
            operation = OPERATIONS[rng.integers(len(OPERATIONS))]
            chained = operation(chained, rng.uniform(*LEVEL), rng)
        mixture = mixture + (1 - share) * weight * _pixels(chained)
    return mixture.astype(np.float32)


def _pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image, dtype=np.float32)


# The nine operations of AugMix. Each takes the picture, a level u in (0.1, 1) and the source of its sign.


def autocontrast(image: Image.Image, level: float, rng: np.random.Generator) -> Image.Image:
    return ImageOps.autocontrast(image)


def equalize(image: Image.Image, level: float, rng: np.random.Generator) -> Image.Image:
    return ImageOps.equalize(image)


def posterize(image: Image.Image, level: float, rng: np.random.Generator) -> Image.Image:
    return ImageOps.posterize(image, 4 - int(0.4 * level))


def rotate(image: Image.Image, level: float, rng: np.random.Generator) -> Image.Image:
    return image.rotate(_sign(rng) * int(3 * level), Image.Resampling.BILINEAR)


def solarize(image: Image.Image, level: float, rng: np.random.Generator) -> Image.Image:
    return ImageOps.solarize(image, 256 - int(25.6 * level))


def shear_x(image: Image.Image, level: float, rng: np.random.Generator) -> Image.Image:
    return _affine(image, (1, _sign(rng) * 0.03 * level, 0, 0, 1, 0))


def shear_y(image: Image.Image, level: float, rng: np.random.Generator) -> Image.Image:
    return _affine(image, (1, 0, 0, _sign(rng) * 0.03 * level, 1, 0))


def translate_x(image: Image.Image, level: float, rng: np.random.Generator) -> Image.Image:
    return _affine(image, (1, 0, _sign(rng) * int(level * image.width / 30), 0, 1, 0))


def translate_y(image: Image.Image, level: float, rng: np.random.Generator) -> Image.Image:
    return _affine(image, (1, 0, 0, 0, 1, _sign(rng) * int(level * image.height / 30)))


OPERATIONS: tuple[Callable[[Image.Image, float, np.random.Generator], Image.Image], ...] = (
    autocontrast,
    equalize,
    posterize,
    rotate,
    solarize,
    shear_x,
    shear_y,
    translate_x,
    translate_y,
)


def _sign(rng: np.random.Generator) -> int:
    return 1 if rng.random() < 0.5 else -1


def _affine(image: Image.Image, coefficients: tuple[float, ...]) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, coefficients, Image.Resampling.BILINEAR)

"""A procedural world of 64x64 pictures: what the embedded CLIP learned from and what the tiny tasks show.

Three families of scenes, each a product of attributes:

- ``shapes``: colour x fill x shape (objects on a background), with count, size and background as nuisance;
- ``textures``: scale x line x orientation x kind (a pattern over the picture), with two colours as nuisance;
- ``land``: arrangement x material (a patch seen from above), with the ground as nuisance.

``HELD_OUT`` lists the combinations that are the classes of the tasks ``tiny-shapes``, ``tiny-textures`` and
``tiny-land``. Pre-training neither shows nor captions them: each attribute is known, the combination is new.

Pictures are identical on every machine: random numbers come from ``np.random.RandomState``, whose stream is
frozen, and are drawn in float64, so that a last-bit difference in ``sin`` cannot move a pixel.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.random import RandomState

if TYPE_CHECKING:
    from datasets import Dataset

Scene = dict[str, str]
Array = np.ndarray

SIZE = 64
ROW, COLUMN = np.mgrid[0:SIZE, 0:SIZE].astype(np.float64)

COLOURS = {
    "red": (205, 40, 45),
    "orange": (235, 130, 35),
    "yellow": (235, 215, 60),
    "green": (55, 150, 65),
    "cyan": (70, 195, 200),
    "blue": (45, 80, 200),
    "purple": (130, 60, 165),
    "pink": (235, 140, 175),
    "brown": (125, 80, 45),
    "gray": (130, 130, 135),
}
BACKGROUNDS = {
    "black": (25, 25, 28),
    "white": (235, 235, 230),
    "beige": (205, 190, 160),
    "navy": (35, 45, 85),
}
COUNTS = {"one": 1, "two": 2}
SIZES = {"small": 0.8, "large": 1.1}
FILLS = ("solid", "striped", "dotted", "checkered", "hollow")
SHAPES = ("circle", "ring", "square", "diamond", "triangle", "hexagon", "star", "cross", "crescent", "heart")

SCALES = {"fine": 5.0, "medium": 8.0, "coarse": 13.0}  # pixels from one stripe to the next
LINES = ("straight", "wavy")
ORIENTATIONS = {"vertical": 0.0, "horizontal": np.pi / 2, "diagonal": np.pi / 4}
KINDS = ("stripes", "dashes", "dots", "checks", "zigzags")

ARRANGEMENTS = (
    "annual",
    "permanent",
    "pasture",
    "herbaceous",
    "forest",
    "highway",
    "river",
    "lake",
    "residential",
    "industrial",
)
MATERIALS = {
    "crop": (190, 175, 85),
    "grass": (150, 190, 95),
    "vegetation": (110, 150, 75),
    "trees": (45, 95, 50),
    "asphalt": (105, 105, 112),
    "water": (50, 95, 150),
    "buildings": (185, 95, 75),
    "sand": (215, 195, 150),
    "snow": (235, 240, 245),
    "soil": (125, 90, 65),
}
GROUNDS = {
    "dark": (75, 80, 65),
    "pale": (175, 170, 145),
    "reddish": (150, 115, 95),
    "greenish": (115, 135, 95),
}

ATTRIBUTES: dict[str, dict[str, tuple[str, ...]]] = {
    "shapes": {
        "colour": tuple(COLOURS),
        "fill": FILLS,
        "shape": SHAPES,
        "count": tuple(COUNTS),
        "size": tuple(SIZES),
        "background": tuple(BACKGROUNDS),
    },
    "textures": {
        "scale": tuple(SCALES),
        "line": LINES,
        "orientation": tuple(ORIENTATIONS),
        "kind": KINDS,
        "colour": tuple(COLOURS),
        "background": tuple(BACKGROUNDS),
    },
    "land": {"arrangement": ARRANGEMENTS, "material": tuple(MATERIALS), "ground": tuple(GROUNDS)},
}
CLASS_ATTRIBUTES = {
    "shapes": ("colour", "fill", "shape"),
    "textures": ("scale", "line", "orientation", "kind"),
    "land": ("arrangement", "material"),
}
# For shapes and textures every pair of values is still seen in pre-training; only the combination is new.
HELD_OUT: dict[str, list[tuple[str, ...]]] = {
    "shapes": [
        (colour, fill, SHAPES[(3 * i + 2 * j + k) % len(SHAPES)])
        for i, colour in enumerate(("red", "orange", "blue", "purple"))
        for j, fill in enumerate(FILLS)
        for k in (0, 5)
    ],
    "textures": [
        (scale, LINES[(i + j + k) % 2], orientation, kind)
        for k, kind in enumerate(("stripes", "dashes"))
        for i, scale in enumerate(("fine", "coarse"))
        for j, orientation in enumerate(ORIENTATIONS)
    ],
    "land": [
        ("annual", "crop"),
        ("permanent", "crop"),
        ("pasture", "grass"),
        ("herbaceous", "vegetation"),
        ("forest", "trees"),
        ("highway", "asphalt"),
        ("river", "water"),
        ("lake", "water"),
        ("residential", "buildings"),
        ("industrial", "buildings"),
    ],
}
TASKS = {f"tiny-{family}": family for family in HELD_OUT}
PRETRAINING_SHARES = {"shapes": 0.55, "textures": 0.3, "land": 0.15}  # shapes are the hardest to learn
STREAMS = {
    "pretraining": 0,
    "train": 1,
    "test": 2,
}  # first word of every seed: the splits never share a stream


def tiny_dataset(task_name: str, split: str = "test", seed: int = 0, images_per_class: int = 20) -> Dataset:
    """Images of a tiny task, generated on demand and identical on every machine.

    Args:
        task_name: ``tiny-shapes``, ``tiny-textures`` or ``tiny-land``.
        split: ``train`` (for few-shot methods) or ``test``; they never share an image.
        seed: another seed, another draw of images.
        images_per_class: the dataset has ``K * images_per_class`` rows, the classes interleaved.

    Example:
        >>> tiny_dataset("tiny-land", "test", images_per_class=2).features["label"].names[0]
        'annual crop land'
    """
    if task_name not in TASKS:
        raise ValueError(f"unknown tiny task {task_name!r}; choose one of {', '.join(TASKS)}")
    if split not in ("train", "test"):
        raise ValueError(f"unknown split {split!r} of {task_name}; choose 'train' or 'test'")
    if images_per_class < 1 or seed < 0:
        raise ValueError(f"images_per_class must be at least 1 and seed at least 0, got {images_per_class} and {seed}")
    from datasets import ClassLabel, Dataset, Features, Image
    from PIL import Image as PILImage

    family = TASKS[task_name]
    labels = [label for _ in range(images_per_class) for label in range(len(HELD_OUT[family]))]
    images = [
        PILImage.fromarray(class_image(family, label, split, seed, row // len(HELD_OUT[family])))
        for row, label in enumerate(labels)
    ]
    names = json.loads((Path(__file__).parent / f"data/datasets/{task_name}.json").read_text("utf-8"))["class_names"]
    features = Features({"image": Image(), "label": ClassLabel(names=names)})
    return Dataset.from_dict({"image": images, "label": labels}, features=features)


def class_image(family: str, label: int, split: str, seed: int, index: int) -> Array:
    """Picture number ``index`` of a class of a tiny task, ``(64, 64, 3)`` uint8."""
    rng = RandomState([STREAMS[split], list(HELD_OUT).index(family), seed, label, index])
    fixed = dict(zip(CLASS_ATTRIBUTES[family], HELD_OUT[family][label], strict=True))
    return render(draw_scene(family, rng) | fixed, rng)


def pretraining_scene(index: int) -> tuple[Scene, RandomState]:
    """Scene number ``index`` of pre-training and the generator that renders it; never a held-out one."""
    rng = RandomState([STREAMS["pretraining"], index])
    limits = np.cumsum(list(PRETRAINING_SHARES.values()))
    family = list(PRETRAINING_SHARES)[int(np.searchsorted(limits[:-1], rng.random_sample()))]
    return draw_known_scene(family, rng), rng


def draw_scene(family: str, rng: RandomState) -> Scene:
    """Every attribute of the family drawn uniformly and independently."""
    return {"family": family} | {name: choice(values, rng) for name, values in ATTRIBUTES[family].items()}


def draw_known_scene(family: str, rng: RandomState) -> Scene:
    """The same, but never a held-out combination."""
    scene = draw_scene(family, rng)
    while class_key(scene) in HELD_OUT[family]:
        scene = draw_scene(family, rng)
    return scene


def class_key(scene: Scene) -> tuple[str, ...]:
    """The combination of attributes that would make the scene a class of a task."""
    return tuple(scene[name] for name in CLASS_ATTRIBUTES[scene["family"]])


def choice(values: tuple[str, ...], rng: RandomState) -> str:
    return values[int(rng.random_sample() * len(values))]


def between(low: float, high: float, rng: RandomState) -> float:
    return low + (high - low) * rng.random_sample()


# --------------------------------------------------------------------------------------------- pictures


def render(scene: Scene, rng: RandomState) -> Array:
    """Draw a scene, then light it and add sensor noise: ``(64, 64, 3)`` uint8."""
    draw = {"shapes": draw_shapes, "textures": draw_texture, "land": draw_land}[scene["family"]]
    return photograph(draw(scene, rng), rng)


def photograph(picture: Array, rng: RandomState) -> Array:
    """Nuisance common to all families: a light that falls off to one side, a colour cast, haze and noise."""
    angle, slope = between(0, 2 * np.pi, rng), between(0, 0.35, rng)
    distance = ((COLUMN - 32) * np.cos(angle) + (ROW - 32) * np.sin(angle)) / 32
    light = between(0.65, 1.15, rng) * (1 + slope * distance)
    cast = 1 + 0.16 * (rng.random_sample(3) - 0.5)
    haze = between(0, 0.35, rng)
    picture = picture * light[..., None] * cast * (1 - haze) + 150 * haze
    picture += between(10, 70, rng) * (rng.random_sample(picture.shape) - 0.5)
    return np.clip(np.rint(picture), 0, 255).astype(np.uint8)


def paint(picture: Array, mask: Array, colour: Array) -> Array:
    """Lay ``colour`` (``(3,)`` or ``(64, 64, 3)``) over the picture where ``mask`` ``(64, 64)`` is near 1."""
    return picture + mask[..., None] * (colour - picture)


def tinted(colour: tuple[int, int, int], rng: RandomState, amount: float = 30.0) -> Array:
    return np.array(colour, dtype=np.float64) + amount * (rng.random_sample(3) - 0.5)


def turned(angle: float, row: float = 32.0, column: float = 32.0) -> tuple[Array, Array]:
    """Coordinates ``(across, along)`` in pixels of axes turned by ``angle`` around a point."""
    x, y = COLUMN - column, ROW - row
    return x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)


def smooth_noise(cells: int, rng: RandomState) -> Array:
    """Random values on a ``cells x cells`` lattice, interpolated to ``(64, 64)``; mean about 0.5."""
    position = np.arange(SIZE) * (cells - 1) / (SIZE - 1)
    weights = np.maximum(0, 1 - np.abs(position[:, None] - np.arange(cells)))
    return weights @ rng.random_sample((cells, cells)) @ weights.T


# ----------------------------------------------------------------------------------------------- shapes


def polygon(x: Array, y: Array, sides: int) -> Array:
    angles = 2 * np.pi * np.arange(sides) / sides + np.pi / 2
    return np.max([-x * np.cos(a) - y * np.sin(a) for a in angles], axis=0) / np.cos(np.pi / sides)


def star(x: Array, y: Array) -> Array:
    sector = 2 * np.pi / 5
    angle = np.abs((np.arctan2(x, -y) + sector / 2) % sector - sector / 2)  # 0 at a tip, pi/5 at a notch
    radius = np.hypot(x, y)
    return radius * (np.cos(angle) + np.sin(angle) * 1.9)


def crescent(x: Array, y: Array) -> Array:
    return np.maximum(np.hypot(x, y), 1.75 - np.hypot(x - 0.45, y))


# Each outline is a level over coordinates in units of the radius: below 1 inside, above 1 outside.
OUTLINES: dict[str, Callable[[Array, Array], Array]] = {
    "circle": lambda x, y: np.hypot(x, y) / 0.95,
    "ring": lambda x, y: 1 + np.abs(np.hypot(x, y) - 0.75) - 0.25,
    "square": lambda x, y: np.maximum(np.abs(x), np.abs(y)) / 0.85,
    "diamond": lambda x, y: np.abs(x) / 0.7 + np.abs(y) / 1.1,
    "triangle": lambda x, y: polygon(x, y - 0.2, 3) / 1.1,
    "hexagon": lambda x, y: polygon(x, y, 6),
    "star": lambda x, y: star(x, y) / 1.1,
    "cross": lambda x, y: np.maximum(np.maximum(np.abs(x), np.abs(y)), np.minimum(np.abs(x), np.abs(y)) + 0.68),
    "crescent": crescent,
    "heart": lambda x, y: np.hypot(x, -y + 0.2 - 0.75 * np.sqrt(np.abs(x))) * 1.15,
}


def fill_pattern(fill: str, across: Array, along: Array, level: Array) -> Array:
    """Where the main colour goes inside an object, ``(64, 64)`` booleans; the rest takes a darker shade."""
    if fill == "striped":
        return across % 5 < 2.5
    if fill == "dotted":
        return np.hypot(across % 5 - 2.5, along % 5 - 2.5) > 1.5
    if fill == "checkered":
        return (across // 4 + along // 4) % 2 < 1
    if fill == "hollow":
        return level > 0.68
    return np.ones_like(level, dtype=bool)


def draw_shapes(scene: Scene, rng: RandomState) -> Array:
    picture = np.ones((SIZE, SIZE, 3)) * tinted(BACKGROUNDS[scene["background"]], rng)
    colour = tinted(COLOURS[scene["colour"]], rng)
    count = COUNTS[scene["count"]]
    radius = SIZES[scene["size"]] * (22, 15)[count - 1]
    for offset in (0.0,) if count == 1 else (-16.0, 16.0):
        row, column = 32 + between(-2, 2, rng), 32 + offset + between(-2, 2, rng)
        across, along = turned(between(-0.15, 0.15, rng), row, column)
        level = OUTLINES[scene["shape"]](across / radius, along / radius)
        inside = np.clip((1 - level) * radius + 0.5, 0, 1)  # about one pixel of anti-aliasing
        pattern = fill_pattern(scene["fill"], across, along, level)
        if scene["fill"] == "hollow":
            picture = paint(picture, inside * pattern, colour)
        else:
            picture = paint(picture, inside, np.where(pattern[..., None], colour, 0.45 * colour))
    return picture


# --------------------------------------------------------------------------------------------- textures


def draw_texture(scene: Scene, rng: RandomState) -> Array:
    period = SCALES[scene["scale"]] * between(0.85, 1.15, rng)
    sign = -1 if rng.random_sample() < 0.5 else 1
    across, along = turned(sign * ORIENTATIONS[scene["orientation"]] + between(-0.12, 0.12, rng))
    across = across + between(0, period, rng)
    along = along + between(0, 64, rng)
    if scene["line"] == "wavy":
        wave = between(18, 30, rng)
        across = across + between(0.3, 0.5, rng) * period * np.sin(2 * np.pi * along / wave)
    ink = {
        "stripes": lambda: across % period < period / 2,
        "dashes": lambda: (across % period < period / 2) & (along % (2.4 * period) < 1.6 * period),
        "dots": lambda: np.hypot(across % period - period / 2, along % (0.8 * period) - 0.4 * period) < 0.33 * period,
        "checks": lambda: (across // (period / 2) + along // (0.8 * period)) % 2 < 1,
        "zigzags": lambda: (across + np.abs(along % (2 * period) - period) * 0.9) % period < period / 2,
    }[scene["kind"]]()
    paper = np.ones((SIZE, SIZE, 3)) * tinted(BACKGROUNDS[scene["background"]], rng)
    return paint(paper, ink * between(0.6, 1, rng), tinted(COLOURS[scene["colour"]], rng))


# ------------------------------------------------------------------------------------------------- land


def draw_land(scene: Scene, rng: RandomState) -> Array:
    """The patch of the scene and, as tiles are cut without regard to borders, often a strip of another."""
    across, _ = turned(between(0, 2 * np.pi, rng))
    border = np.clip(across - between(8, 40, rng), 0, 1)
    return paint(draw_patch(scene, rng), border, draw_patch(draw_known_scene("land", rng), rng))


def draw_patch(scene: Scene, rng: RandomState) -> Array:
    ground = tinted(GROUNDS[scene["ground"]], rng) + 50 * (smooth_noise(6, rng)[..., None] - 0.5)
    material = tinted(MATERIALS[scene["material"]], rng, 50) + 40 * (smooth_noise(24, rng)[..., None] - 0.5)
    mask, shade = LAND[scene["arrangement"]](rng)
    return paint(ground, np.clip(mask, 0, 1), material * shade[..., None])


def annual(rng: RandomState) -> tuple[Array, Array]:
    """A patchwork of parcels, each with its tone and its furrows."""
    across, along = turned(between(-0.8, 0.8, rng))
    i = (np.floor(across / between(13, 22, rng)) + 8).astype(int)
    j = (np.floor(along / between(13, 22, rng)) + 8).astype(int)
    tone = rng.random_sample((17, 17))[i, j]
    furrows = np.where(rng.random_sample((17, 17))[i, j] < 0.5, across, along) % 4 < 2
    return 0.35 + 1.2 * tone, 0.75 + 0.4 * tone + 0.12 * furrows


def permanent(rng: RandomState) -> tuple[Array, Array]:
    """Plants of one size in regular rows."""
    across, along = turned(between(-0.8, 0.8, rng))
    gap, step = between(6, 9, rng), between(5, 7, rng)
    distance = np.hypot(across % gap - gap / 2, along % step - step / 2)
    return np.clip(0.42 * gap - distance, 0, 1), 1 - 0.1 * distance / gap


def pasture(rng: RandomState) -> tuple[Array, Array]:
    """An open smooth surface with a few lone spots and a fence."""
    shade = 0.85 + 0.3 * smooth_noise(4, rng)
    for _ in range(4):
        spot = np.hypot(ROW - between(4, 60, rng), COLUMN - between(4, 60, rng))
        shade = shade - 0.35 * np.clip(3.5 - spot, 0, 1)
    across, _ = turned(between(0, np.pi, rng))
    return np.ones_like(shade), shade - 0.3 * (np.abs(across - between(-20, 20, rng)) < 1)


def herbaceous(rng: RandomState) -> tuple[Array, Array]:
    """Small tufts everywhere, in no order."""
    tufts = smooth_noise(26, rng)
    return (tufts - 0.42) * 8, 0.7 + 0.5 * tufts


def forest(rng: RandomState) -> tuple[Array, Array]:
    """Crowns that touch, lit from one side."""
    crowns = smooth_noise(12, rng)
    return (crowns - 0.25) * 8, 0.45 + 0.9 * crowns


def highway(rng: RandomState) -> tuple[Array, Array]:
    """One broad straight band with a line in the middle."""
    across, along = turned(between(0, np.pi, rng))
    across = np.abs(across - between(-12, 12, rng))
    return np.clip(between(4.5, 7.5, rng) - across, 0, 1), 1 + 0.5 * ((across < 0.8) & (along % 8 < 5))


def river(rng: RandomState) -> tuple[Array, Array]:
    """One winding band."""
    across, along = turned(between(0, np.pi, rng))
    bend = between(5, 10, rng) * np.sin(2 * np.pi * along / between(35, 60, rng) + between(0, 6, rng))
    return np.clip(between(4, 7, rng) - np.abs(across - between(-10, 10, rng) - bend), 0, 1), np.ones_like(bend)


def lake(rng: RandomState) -> tuple[Array, Array]:
    """One rounded area."""
    distance = np.hypot(ROW - between(22, 42, rng), (COLUMN - between(22, 42, rng)) * between(0.8, 1.25, rng))
    shore = between(15, 22, rng) + 10 * (smooth_noise(7, rng) - 0.5)
    return np.clip(shore - distance, 0, 1), np.ones_like(distance)


def residential(rng: RandomState) -> tuple[Array, Array]:
    """Many small blocks along streets, some plots empty."""
    across, along = turned(between(-0.8, 0.8, rng))
    plot = between(9, 12, rng)
    i, j = (np.floor(c / plot + 8).astype(int) for c in (across, along))
    inside = np.maximum(np.abs(across % plot - plot / 2), np.abs(along % plot - plot / 2)) < 0.29 * plot
    built = rng.random_sample((17, 17))[i, j]
    return (inside & (built < 0.85)).astype(float), 0.75 + 0.5 * built


def industrial(rng: RandomState) -> tuple[Array, Array]:
    """A few large blocks with ridged roofs."""
    across, along = turned(between(-0.8, 0.8, rng))
    mask, shade = np.zeros((SIZE, SIZE)), np.ones((SIZE, SIZE))
    for corner in rng.permutation(4)[:3]:
        x, y = (
            across - (-15, 15)[corner % 2] + between(-3, 3, rng),
            along - (-15, 15)[corner // 2] + between(-3, 3, rng),
        )
        inside = (np.abs(x) < between(8, 14, rng)) & (np.abs(y) < between(8, 14, rng))
        mask = np.maximum(mask, inside)
        shade = np.where(inside, between(0.8, 1.2, rng) + 0.15 * (x % 6 < 3), shade)
    return mask, shade


LAND: dict[str, Callable[[RandomState], tuple[Array, Array]]] = {
    "annual": annual,
    "permanent": permanent,
    "pasture": pasture,
    "herbaceous": herbaceous,
    "forest": forest,
    "highway": highway,
    "river": river,
    "lake": lake,
    "residential": residential,
    "industrial": industrial,
}

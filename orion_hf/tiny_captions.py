"""What pre-training says about a scene of the tiny world, and what the classes of the tiny tasks are called.

A caption names some attributes of the scene, through synonyms and templates. The words for land split in two:
one says how a patch is arranged (``annual`` = parcels, ``permanent`` = rows, ``river`` = a bent band, ...),
the other what it is made of (``crop``, ``water``, ...), so that "river of sand" and "annual snow land" are
captioned and teach the words of "river of water" and "annual crop land", which never are.
"""

from __future__ import annotations

from numpy.random import RandomState

from .tiny_world import Scene, choice

TEMPLATES = {
    "shapes": (
        "a photo of {}",
        "a photo of {}.",
        "a picture of {}.",
        "an image of {}",
        "a drawing of {}",
        "a close-up photo of {}.",
        "a bad photo of {}.",
        "a blurry photo of {}",
        "a bright photo of {}",
        "a dark picture of {}",
        "there is {} in the picture",
        "this is {}.",
        "{}",
    ),
    "textures": (
        "a photo of {}",
        "a photo of {} texture.",
        "a photo of a {} pattern",
        "a texture of {}",
        "{} texture.",
        "a pattern of {}",
        "a surface with {}",
        "a close-up photo of {}.",
        "a picture of a cloth with {}.",
        "wallpaper with {}",
        "this is {}.",
        "{}",
    ),
    "land": (
        "a satellite photo of {}",
        "a satellite photo of {}.",
        "an aerial photo of {}",
        "a high-resolution satellite image of {}",
        "a centered satellite photo of {}.",
        "an aerial view of {}.",
        "{} seen from above",
        "a bird's eye view of {}",
        "a map tile with {}",
        "a blurry satellite image of {}",
        "this is {}.",
        "{}",
    ),
}
SYNONYMS = {
    "red": ("crimson", "scarlet"),
    "orange": ("tangerine",),
    "yellow": ("golden", "lemon"),
    "green": ("emerald",),
    "cyan": ("turquoise", "teal"),
    "blue": ("azure",),
    "purple": ("violet",),
    "pink": ("rose",),
    "brown": ("chocolate",),
    "gray": ("silver", "ashen"),
    "solid": ("plain", "filled"),
    "striped": ("banded", "stripy"),
    "dotted": ("spotted", "speckled"),
    "checkered": ("chequered",),
    "hollow": ("outlined", "empty"),
    "circle": ("disc", "round shape"),
    "ring": ("hoop",),
    "square": ("box",),
    "diamond": ("rhombus",),
    "triangle": ("three-sided shape",),
    "hexagon": ("six-sided shape",),
    "star": ("five-pointed star",),
    "cross": ("plus sign",),
    "crescent": ("moon",),
    "heart": ("love sign",),
    "small": ("little", "tiny"),
    "large": ("big",),
    "black": ("dark",),
    "white": ("bright",),
    "fine": ("narrow", "thin"),
    "coarse": ("thick", "broad"),
    "medium": ("middling",),
    "wavy": ("undulating", "rippled"),
    "straight": ("even",),
    "vertical": ("upright",),
    "horizontal": ("level",),
    "diagonal": ("slanted", "oblique"),
    "stripes": ("bands", "lines"),
    "dashes": ("broken lines",),
    "dots": ("spots",),
    "checks": ("checkers",),
    "zigzags": ("chevrons",),
    "annual": ("yearly", "parcelled"),
    "permanent": ("lasting", "orchard-like"),
    "pasture": ("grazed", "open"),
    "herbaceous": ("tufted", "scrubby"),
    "residential": ("housing-like", "suburban"),
    "industrial": ("factory-like", "commercial"),
    "forest": ("thicket",),
    "highway": ("motorway",),
    "river": ("stream",),
    "lake": ("pond",),
    "crop": ("grain",),
    "vegetation": ("plants",),
    "trees": ("wood",),
    "buildings": ("roofs",),
    "soil": ("earth",),
}
NOUN_ARRANGEMENTS = ("forest", "highway", "river", "lake")  # "river of sand", but "annual sand land"
LAND_COVERS = ("crop", "grass", "vegetation", "sand", "snow", "soil")  # "crop land", but "trees"


def class_name(family: str, key: tuple[str, ...]) -> str:
    """The name of a held-out combination: ``("annual", "crop")`` is called ``annual crop land``."""
    if family != "land":
        return " ".join(key)
    arrangement, material = key
    return land_phrase(arrangement, material, material in LAND_COVERS, arrangement in NOUN_ARRANGEMENTS)


def land_phrase(arrangement: str, material: str, is_cover: bool, is_noun: bool) -> str:
    if is_noun:
        return f"{arrangement} of {material}"
    return f"{arrangement} {material} land" if is_cover else f"{arrangement} {material}"


def caption(scene: Scene, rng: RandomState) -> str:
    """One random caption of a scene.

    Example:
        >>> scene = {"family": "land", "arrangement": "river", "material": "sand", "ground": "pale"}
        >>> caption(scene, RandomState(4))
        'stream of sand'
    """
    words = {name: synonym(value, rng) for name, value in scene.items()}
    phrase = {"shapes": shapes_caption, "textures": texture_caption, "land": land_caption}[scene["family"]]
    return choice(TEMPLATES[scene["family"]], rng).format(" ".join(phrase(scene, words, rng).split()))


def synonym(word: str, rng: RandomState) -> str:
    """The word itself two times in three, or one of its synonyms."""
    return word if word not in SYNONYMS or rng.random_sample() < 0.67 else choice(SYNONYMS[word], rng)


def sometimes(text: str, probability: float, rng: RandomState) -> str:
    return text if rng.random_sample() < probability else ""


def shapes_caption(scene: Scene, words: Scene, rng: RandomState) -> str:
    thing = f"{sometimes(words['colour'], 0.8, rng)} {sometimes(words['fill'], 0.8, rng)} {words['shape']}"
    counted = rng.random_sample() < 0.35
    if scene["count"] != "one" and counted:
        thing = f"{words['count']} {sometimes(words['size'], 0.5, rng)} {thing}s"
    else:
        thing = f"{sometimes('a', 0.5, rng)} {sometimes(words['size'], 0.3, rng)} {thing}"
    return f"{thing} {sometimes('on a ' + words['background'] + ' background', 0.25, rng)}"


def texture_caption(scene: Scene, words: Scene, rng: RandomState) -> str:
    colour = sometimes(words["colour"], 0.3, rng)
    scale, line = sometimes(words["scale"], 0.9, rng), sometimes(words["line"], 0.85, rng)
    background = sometimes(f"on {words['background']}", 0.15, rng)
    return f"{colour} {scale} {line} {sometimes(words['orientation'], 0.9, rng)} {words['kind']} {background}"


def land_caption(scene: Scene, words: Scene, rng: RandomState) -> str:
    is_noun, is_cover = scene["arrangement"] in NOUN_ARRANGEMENTS, scene["material"] in LAND_COVERS
    kind = rng.random_sample()
    if kind < 0.8:
        phrase = land_phrase(words["arrangement"], words["material"], is_cover, is_noun)
    elif kind < 0.9:
        phrase = f"{words['material']} land" if is_cover else words["material"]
    else:
        phrase = words["arrangement"] if is_noun else f"{words['arrangement']} land"
    return f"{phrase} {sometimes('on ' + words['ground'] + ' ground', 0.2, rng)}"

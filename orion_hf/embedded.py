"""Where the CLIP that ships with the package is."""

from pathlib import Path

PREFIX = "embedded:"
ASSETS = Path(__file__).parent / "assets"


def load_embedded_clip() -> str:
    """Folder of the embedded ``tiny-clip``, for any ``from_pretrained``.

    Example:
        >>> from transformers import CLIPModel
        >>> CLIPModel.from_pretrained(load_embedded_clip()).config.vision_config.image_size
        64
    """
    return resolve_model_id("embedded:tiny-clip")


def resolve_model_id(model: str) -> str:
    """Turn ``embedded:tiny-clip`` into its folder; any other model id or path comes back unchanged.

    Example:
        >>> resolve_model_id("openai/clip-vit-base-patch16")
        'openai/clip-vit-base-patch16'
    """
    if not model.startswith(PREFIX):
        return model
    name = model.removeprefix(PREFIX)
    embedded = sorted(folder.name for folder in ASSETS.iterdir() if folder.is_dir())
    if name not in embedded:
        raise ValueError(f"unknown embedded model {model!r}; choose {PREFIX}{f' or {PREFIX}'.join(embedded)}")
    return str(ASSETS / name)

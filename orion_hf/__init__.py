"""orion-hf: better CLIP zero-shot classifiers from class names alone.

Importing this package is cheap: every public name below loads its module (and transformers, peft, ...) on first use.

Example:
    >>> from orion_hf import OrionTask
    >>> OrionTask.from_name("EuroSAT").prompts()[1]
    'a centered satellite photo of Forest.'
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .registration import register_with_transformers

__version__ = "0.1.0"

_MODULE_OF = {
    "OrionCLIPTextModel": "modeling_orion",
    "OrionTask": "tasks",
    "OrionTrainer": "trainer",
    "OrionTrainingArguments": "training_args",
    "OrionZeroShotImageClassificationPipeline": "pipeline",
    "load_embedded_clip": "embedded",
    "resolve_model_id": "embedded",
    "tiny_dataset": "tiny_world",
}

__all__ = ["__version__", *sorted(_MODULE_OF)]

if TYPE_CHECKING:
    from .embedded import load_embedded_clip as load_embedded_clip
    from .embedded import resolve_model_id as resolve_model_id
    from .modeling_orion import OrionCLIPTextModel as OrionCLIPTextModel
    from .pipeline import (
        OrionZeroShotImageClassificationPipeline as OrionZeroShotImageClassificationPipeline,
    )
    from .tasks import OrionTask as OrionTask
    from .tiny_world import tiny_dataset as tiny_dataset
    from .trainer import OrionTrainer as OrionTrainer
    from .training_args import OrionTrainingArguments as OrionTrainingArguments


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


register_with_transformers()

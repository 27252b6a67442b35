"""Classifiers on top of image features and text prototypes, one file a method.

Every method is a function named like its file, ``method(features, prototypes, *, options)``, with the
published defaults as keyword arguments. It returns a :class:`MethodOutput`. Labels are never an argument. To
add a method, add a file that defines ``PAPER``, ``INPUTS`` and the function; nothing else needs to change.

Example:
    >>> from orion_hf import methods
    >>> methods.available()["stata"].options["n_neighbors"]
    3
    >>> stata = methods.available()["stata"].function
    >>> stata(features, prototypes, alpha=1.0).predictions      # doctest: +SKIP
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class MethodOutput:
    """What every method returns.

    Attributes:
        scores: ``(N, K)``, larger is better; probabilities or logits, as the method says.
    """

    scores: Tensor

    @property
    def predictions(self) -> Tensor:
        """Class index of every image, ``(N,)``; the lowest index wins a tie."""
        return self.scores.argmax(dim=-1)


@dataclass(frozen=True)
class MethodInfo:
    """A method as :func:`available` lists it.

    Attributes:
        name: The file's and the function's name.
        function: The method itself.
        paper: Authors, title, venue.
        inputs: What one call needs: ``"batch"`` features ``(N, d)`` of a batch of images and prototypes ``(K,
            d)``; ``"views"`` features ``(N, V, d)`` of V views of each image and prototypes; ``"views and
            text model"`` features of views and the prompts of a text model in place of prototypes;
            ``"few-shot"`` labelled images.
        options: Keyword options with their published defaults.
    """

    name: str
    function: Callable[..., Any]
    paper: str
    inputs: str
    options: dict[str, Any]


def available() -> dict[str, MethodInfo]:
    """Methods in this folder by name, with paper and options."""
    methods = {}
    for module_info in iter_modules(__path__):
        if module_info.name.startswith("_"):
            continue
        module = import_module(f"{__name__}.{module_info.name}")
        if not hasattr(module, "PAPER"):
            continue
        function = getattr(module, module_info.name)
        options = {
            parameter.name: parameter.default
            for parameter in inspect.signature(function).parameters.values()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        }
        methods[module_info.name] = MethodInfo(module_info.name, function, module.PAPER, module.INPUTS, options)
    return methods

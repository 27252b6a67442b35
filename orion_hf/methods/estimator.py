"""What the few-shot estimators share: scikit-learn's parameters, saving, input checks, the CoOp learning rates.

An estimator's constructor only stores its options. `fit` learns from a few labelled image features and sets attributes
that end in ``_``. Those are what `save` writes: tensors as safetensors, everything else as JSON.

    probe = CLAP(epochs=300, random_state=1).fit(features, labels, prototypes)
    probe.predict(test_features)
    probe.save("clap-dtd-16")
    CLAP.load("clap-dtd-16")
"""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from ..files import write_json, write_whole
from ._inputs import UNIT_TOLERANCE

FORMAT_VERSION = 1
_E = TypeVar("_E", bound="Estimator")


class Estimator:
    """Base of the few-shot classifiers; subclasses write `fit` and `decision_function`."""

    __signature__: ClassVar[inspect.Signature]

    def __init_subclass__(cls) -> None:
        """Collect the options of all constructors: a subclass hands those it does not know to its base."""
        inits = [inspect.signature(vars(base)["__init__"]) for base in cls.__mro__[:-1] if "__init__" in vars(base)]
        options = [p for init in inits for p in init.parameters.values()]
        named = [p for p in options if p.name != "self" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        cls.__signature__ = inspect.Signature(sorted(named, key=lambda p: p.kind))

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The constructor's options and their values; ``deep`` is scikit-learn's and changes nothing here."""
        return {name: getattr(self, name) for name in type(self).__signature__.parameters}

    def set_params(self: _E, **params: Any) -> _E:
        """Change options by name; `fit` uses them."""
        known = self.get_params()
        for name, value in params.items():
            if name not in known:
                raise ValueError(f"{type(self).__name__} has no option {name!r}: choose from {sorted(known)}.")
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self._saved_params().items())
        return f"{type(self).__name__}({options})"

    def decision_function(self, features: Tensor) -> Tensor:
        """Logits ``(B, K)`` of image features ``(B, d)``."""
        raise NotImplementedError(f"{type(self).__name__} has no decision_function.")

    def predict(self, features: Tensor) -> Tensor:
        """Class indices ``(B,)`` of image features ``(B, d)``."""
        return self.decision_function(features).argmax(dim=1)

    def predict_proba(self, features: Tensor) -> Tensor:
        """Class probabilities ``(B, K)`` of image features ``(B, d)``."""
        return self.decision_function(features).softmax(dim=1)

    def score(self, features: Tensor, labels: Tensor) -> float:
        """Top-1 accuracy in [0, 1]."""
        predicted = self.predict(features)
        return (predicted == torch.as_tensor(labels).to(predicted.device)).double().mean().item()

    def save(self, folder: str | Path) -> Path:
        """Write ``estimator.safetensors`` and ``estimator.json``; `load` gives the fitted estimator back."""
        folder = Path(folder)
        fitted = self._fitted()
        tensors = {name: value.contiguous().cpu() for name, value in fitted.items() if isinstance(value, Tensor)}
        record = {
            "format_version": FORMAT_VERSION,
            "estimator": type(self).__name__,
            "params": self._saved_params(),
            "fitted": {name: value for name, value in fitted.items() if name not in tensors},
        }
        folder.mkdir(parents=True, exist_ok=True)
        # The JSON file comes last: a folder that has one is complete.
        write_whole(folder / "estimator.safetensors", lambda path: save_file(tensors, path))
        write_json(folder / "estimator.json", record)
        return folder

    @classmethod
    def load(cls: type[_E], folder: str | Path, device: str | torch.device = "cpu", **params: Any) -> _E:
        """Read what `save` wrote; ``params`` are options that are not saved (CoOp's encoder and tokenizer)."""
        path = Path(folder) / "estimator.json"
        if not path.is_file():
            raise FileNotFoundError(f"{folder} holds no estimator.json: give a folder written by save().")
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.get("format_version") != FORMAT_VERSION or record.get("estimator") != cls.__name__:
            raise ValueError(
                f"{path} holds {record.get('estimator')!r} in format {record.get('format_version')!r}, "
                f"not {cls.__name__!r} in format {FORMAT_VERSION}: load it with the class that wrote it."
            )
        estimator = cls(**{**record["params"], **params})
        fitted = {**record["fitted"], **load_file(Path(folder) / "estimator.safetensors", device=str(device))}
        for name, value in fitted.items():
            setattr(estimator, name, value)
        return estimator

    def _saved_params(self) -> dict[str, Any]:
        return self.get_params()

    def _fitted(self) -> dict[str, Any]:
        fitted = {name: value for name, value in vars(self).items() if name.endswith("_") and name[0] != "_"}
        if not fitted:
            raise ValueError(f"This {type(self).__name__} is not fitted yet: call fit() first.")
        return fitted

    def _check_fitted(self) -> None:
        self._fitted()


def support_set(features: Tensor, labels: Tensor, prototypes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Check a support set and bring it to one dtype and device, those of ``features`` (half precision becomes float32).

    Args:
        features: ``(N, d)``, or ``(E, N, d)`` when every image was augmented and encoded E times.
        labels: ``(N,)`` class indices.
        prototypes: ``(K, d)``.

    Returns:
        features ``(E, N, d)``, labels ``(N,)``, prototypes ``(K, d)``.
    """
    features, labels, prototypes = map(torch.as_tensor, (features, labels, prototypes))
    if features.ndim not in (2, 3) or features.shape[-2] == 0:
        raise ValueError(f"features must be (images, d) or (passes, images, d), got {tuple(features.shape)}.")
    if not features.is_floating_point():
        raise ValueError(f"features must be floating point, got {features.dtype}.")
    if prototypes.ndim != 2 or prototypes.shape[1] != features.shape[-1]:
        raise ValueError(
            f"prototypes must be (classes, {features.shape[-1]}) as the features are, got {tuple(prototypes.shape)}."
        )
    if labels.is_floating_point() or labels.shape != features.shape[-2:-1]:
        raise ValueError(
            f"labels must be {features.shape[-2]} class indices, got {tuple(labels.shape)} {labels.dtype}."
        )
    if labels.min() < 0 or labels.max() >= len(prototypes):
        raise ValueError(
            f"labels run from {int(labels.min())} to {int(labels.max())}, but there are {len(prototypes)} prototypes."
        )
    features = query_features(features)
    return (
        features.reshape(-1, *features.shape[-2:]),
        labels.to(features.device).long(),
        prototypes.to(features),
    )


def query_features(features: Tensor, like: Tensor | None = None) -> Tensor:
    """Features in the dtype and place of ``like``, else their own with half precision raised to float32."""
    features = torch.as_tensor(features)
    if like is not None:
        if features.ndim != 2 or features.shape[1] != like.shape[-1]:
            raise ValueError(f"features must be (images, {like.shape[-1]}), got {tuple(features.shape)}.")
        return features.to(like)
    return features if features.dtype == torch.float64 else features.float()


def unit_rows(rows: Tensor) -> Tensor:
    """Rows of unit norm. Rows that already are, to half precision, stay as they are, like everywhere in `methods`."""
    unit = ((rows.norm(dim=-1) - 1).abs() <= UNIT_TOLERANCE).all()
    return rows if unit else F.normalize(rows, dim=-1)


def generator(random_state: int | None) -> torch.Generator:
    """A CPU generator; the same ``random_state`` draws the same on every device. ``None``: a fresh seed."""
    rng = torch.Generator()
    if random_state is None:
        rng.seed()
    else:
        rng.manual_seed(random_state)
    return rng


def epoch_learning_rates(epochs: int, lr: float, warmup_epochs: int = 1, warmup_lr: float = 1e-5) -> list[float]:
    """CoOp's learning rate of every epoch: a constant warm-up, then a cosine that starts counting after it.

    ``lr(e) = warmup_lr`` for ``e < W``, then ``lr / 2 * (1 + cos(pi (e - W) / epochs))``, which never reaches 0.

    Example:
        >>> [round(rate, 5) for rate in epoch_learning_rates(4, lr=0.002)]
        [1e-05, 0.002, 0.00171, 0.001]
    """
    if epochs < 1:
        raise ValueError(f"epochs must be at least 1, got {epochs}.")
    cosine = [0.5 * lr * (1 + math.cos(math.pi * epoch / epochs)) for epoch in range(max(0, epochs - warmup_epochs))]
    return [warmup_lr] * min(warmup_epochs, epochs) + cosine

"""What the few-shot estimators share: scikit-learn's parameters, saving, input checks, the CoOp learning rates.

An estimator's constructor only stores its options. `fit` learns from a few labelled image features and sets attributes
that end in ``_``. Those are what `save` writes: tensors as safetensors, everything else as JSON.

    probe = CLAP(epochs=300, random_state=1).fit(features, labels, prototypes)
    probe.predict(test_features)
    probe.save("clap-dtd-16")
    CLAP.load("clap-dtd-16")

scikit-learn's model selection takes them, with tensors or arrays. It hands a fold's rows of everything that has as many
rows as there are images to `fit`, which must not happen to the prototypes; ``prototypes[None]`` has one row only and is
passed on whole:

    GridSearchCV(CLAP(), {"lr": [0.01, 0.1]}).fit(features, labels, prototypes=prototypes[None])
"""

from __future__ import annotations

import inspect
import json
import math
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from ..files import is_finite, read_json, write_whole
from ._inputs import UNIT_TOLERANCE

FORMAT_VERSION = 1
LARGEST_JSON = 64 * 2**20  # bytes; the names of CoOp's classes are the longest part
_ADVICE = "Give a folder written by save()."
_E = TypeVar("_E", bound="Estimator")


class Estimator:
    """Base of the few-shot classifiers; subclasses write `fit` and `decision_function`."""

    __signature__: ClassVar[inspect.Signature]
    _estimator_type: ClassVar[str] = "classifier"  # what scikit-learn before 1.6 asks for instead of tags

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

    def __sklearn_tags__(self) -> Any:
        """scikit-learn's description of a classifier; only it calls this, so only then must it be installed."""
        from sklearn.utils import ClassifierTags, Tags, TargetTags

        return Tags(
            estimator_type="classifier",
            target_tags=TargetTags(required=True),
            classifier_tags=ClassifierTags(),
            transformer_tags=None,
            regressor_tags=None,
        )

    @property
    def classes_(self) -> np.ndarray:
        """The K class indices, one a column of `predict_proba`; an array, as scikit-learn wants it."""
        for name in ("weights_", "prototypes_"):
            if name in vars(self):
                return np.arange(len(vars(self)[name]))
        raise AttributeError(f"This {type(self).__name__} is not fitted yet: call fit() first.")

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
        if not len(predicted):
            raise ValueError("There are no features to score: give at least one image.")
        return (predicted == class_indices(labels, len(predicted)).to(predicted.device)).double().mean().item()

    def save(self, folder: str | Path) -> Path:
        """Write ``estimator.safetensors`` and ``estimator.json``; `load` gives the fitted estimator back."""
        folder = Path(folder)
        fitted = self._fitted()
        tensors = {name: value.contiguous().cpu() for name, value in fitted.items() if isinstance(value, Tensor)}
        params = self._saved_params()
        record = {
            "format_version": FORMAT_VERSION,
            "estimator": type(self).__name__,
            "params": {name: _json_value(name, value) for name, value in params.items()},
            "tuples": [name for name, value in params.items() if isinstance(value, tuple)],
            "fitted": {name: _json_value(name, value) for name, value in fitted.items() if name not in tensors},
        }
        text = json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n"

        def write(path: Path) -> None:
            path.write_text(text, encoding="utf-8")
            write_whole(folder / "estimator.safetensors", lambda path: save_file(tensors, path))

        folder.mkdir(parents=True, exist_ok=True)
        # Both are written before the first takes its place, and the JSON file comes last: a folder that has one is
        # complete, and a full disk leaves what was there.
        write_whole(folder / "estimator.json", write)
        return folder

    @classmethod
    def load(cls: type[_E], folder: str | Path, device: str | torch.device = "cpu", **params: Any) -> _E:
        """Read what `save` wrote; ``params`` are options that are not saved (CoOp's encoder and tokenizer)."""
        path = Path(folder) / "estimator.json"
        if not path.is_file():
            raise FileNotFoundError(f"{folder} holds no estimator.json: give a folder written by save().")
        record = read_json(path, LARGEST_JSON, _ADVICE)
        if not isinstance(record, dict):
            raise ValueError(f"{path}: no estimator, but a JSON {type(record).__name__}. {_ADVICE}")
        if record.get("format_version") != FORMAT_VERSION or record.get("estimator") != cls.__name__:
            raise ValueError(
                f"{path} holds {record.get('estimator')!r} in format {record.get('format_version')!r}, "
                f"not {cls.__name__!r} in format {FORMAT_VERSION}: load it with the class that wrote it."
            )
        for key in ("params", "fitted"):
            if not isinstance(record.get(key), dict):
                raise ValueError(f"{path}: {key!r} is missing or no object. {_ADVICE}")
        tuples = record.get("tuples", [])  # files of older versions have none
        if not isinstance(tuples, list):
            raise ValueError(f"{path}: 'tuples' is no list. {_ADVICE}")
        saved = {
            name: tuple(value) if isinstance(value, list) and name in tuples else value
            for name, value in record["params"].items()
        }
        try:
            estimator = cls(**{**saved, **params})
        except TypeError as error:  # an option too many or too few
            raise ValueError(f"{path}: not the options of {cls.__name__} ({error}). {_ADVICE}") from error
        tensors = _load_tensors(Path(folder) / "estimator.safetensors", device)
        cls._check_saved(path, record["fitted"], tensors)
        for name, value in (record["fitted"] | tensors).items():
            setattr(estimator, name, value)
        return estimator

    @classmethod
    def _check_saved(cls, path: Path, fitted: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Names that `fit` could have set, and at least those that predictions need: the annotated ones."""
        for name in (*fitted, *tensors):
            if not _is_fitted_name(name) or not name.isidentifier() or hasattr(cls, name):
                raise ValueError(f"{path}: {name!r} is no fitted attribute of {cls.__name__}. {_ADVICE}")
        for base in cls.__mro__:
            for name, kind in inspect.get_annotations(base).items():
                if _is_fitted_name(name) and not (name in tensors if kind == "Tensor" else is_finite(fitted.get(name))):
                    raise ValueError(f"{path}: {name!r} is missing there or in estimator.safetensors. {_ADVICE}")

    def _saved_params(self) -> dict[str, Any]:
        return self.get_params()

    def _fitted(self) -> dict[str, Any]:
        fitted = {name: value for name, value in vars(self).items() if _is_fitted_name(name)}
        if not fitted:
            raise ValueError(f"This {type(self).__name__} is not fitted yet: call fit() first.")
        return fitted

    def _check_fitted(self) -> None:
        self._fitted()

    def _set_fitted(self, **fitted: Any) -> None:
        """Set what was learnt in place of everything an earlier `fit` has learnt."""
        for name in [name for name in vars(self) if _is_fitted_name(name)]:
            delattr(self, name)
        vars(self).update(fitted)


def support_set(features: Tensor, labels: Tensor, prototypes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Check a support set and bring it to one dtype and device, those of ``features`` (half precision becomes float32).

    Args:
        features: ``(N, d)``, or ``(E, N, d)`` when every image was augmented and encoded E times.
        labels: ``(N,)`` class indices.
        prototypes: ``(K, d)``, or ``(1, K, d)``, which scikit-learn does not take for one row an image.

    Returns:
        features ``(E, N, d)``, labels ``(N,)``, prototypes ``(K, d)``. They may share memory with what was given.
    """
    features, prototypes = torch.as_tensor(features), torch.as_tensor(prototypes)
    if prototypes.ndim == 3 and len(prototypes) == 1:
        prototypes = prototypes[0]
    features, labels = labelled_features(features, labels, len(prototypes) if prototypes.ndim else 0, "prototypes")
    if prototypes.ndim != 2 or prototypes.shape[1] != features.shape[-1]:
        raise ValueError(
            f"prototypes must be (classes, {features.shape[-1]}) as the features are, got {tuple(prototypes.shape)}."
        )
    if not prototypes.is_floating_point():
        raise ValueError(f"prototypes must be floating point, got {prototypes.dtype}.")
    return features, labels, check_rows("prototypes", prototypes.detach().to(features))


def labelled_features(features: Tensor, labels: Tensor, num_classes: int, counted: str) -> tuple[Tensor, Tensor]:
    """The features ``(E, N, d)`` and labels ``(N,)`` of a support set; ``counted`` names what there are K of."""
    features = torch.as_tensor(features)
    if features.ndim not in (2, 3) or features.numel() == 0:
        raise ValueError(
            f"features must be (images, d) or (passes, images, d) and not empty, got {tuple(features.shape)}."
        )
    if not features.is_floating_point():
        raise ValueError(f"features must be floating point, got {features.dtype}.")
    labels = class_indices(labels, features.shape[-2])
    if labels.min() < 0 or labels.max() >= num_classes:
        raise ValueError(
            f"labels run from {int(labels.min())} to {int(labels.max())}, but there are {num_classes} {counted}."
        )
    features = query_features(features.detach())
    return features.reshape(-1, *features.shape[-2:]), labels.to(features.device).long()


def class_indices(labels: Tensor, count: int) -> Tensor:
    """Labels as a tensor ``(count,)`` of integers."""
    labels = torch.as_tensor(labels)
    if labels.is_floating_point() or labels.shape != (count,):
        raise ValueError(f"labels must be {count} class indices, got {tuple(labels.shape)} {labels.dtype}.")
    return labels


def query_features(features: Tensor, like: Tensor | None = None) -> Tensor:
    """Features in the dtype and place of ``like``, else their own with half precision raised to float32."""
    features = torch.as_tensor(features)
    if like is None:
        return check_rows("features", features if features.dtype == torch.float64 else features.float())
    if features.ndim != 2 or features.shape[1] != like.shape[-1]:
        raise ValueError(f"features must be (images, {like.shape[-1]}), got {tuple(features.shape)}.")
    return check_rows("features", features.to(like))


def check_rows(name: str, rows: Tensor) -> Tensor:
    """Refuse rows ``(..., d)`` without a direction: every class would score the same, or NaN.

    Example:
        >>> check_rows("features", torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
        Traceback (most recent call last):
        ValueError: 1 of 2 rows of features are NaN, infinite or zero: remove them, or extract the features again.
    """
    norms = rows.norm(dim=-1)
    bad = int((~norms.isfinite() | (norms == 0)).sum())
    if bad:
        raise ValueError(
            f"{bad} of {norms.numel()} rows of {name} are NaN, infinite or zero: remove them, or extract the {name} "
            "again."
        )
    return rows


def check_counts(least: int = 1, **options: Any) -> None:
    """Refuse options that are no integers of at least ``least``, by name.

    Example:
        >>> check_counts(batch_size=0)
        Traceback (most recent call last):
        ValueError: batch_size must be an integer of at least 1, not 0.
    """
    for name, value in options.items():
        try:
            enough = operator.index(value) >= least
        except TypeError:
            enough = False
        if not enough:
            raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}.")


def check_pair(name: str, value: Any) -> None:
    """Refuse an option that is no pair of finite numbers of at least 0, by name."""
    if (
        not isinstance(value, Sequence)
        or len(value) != 2
        or not all(isinstance(part, (int, float, np.number)) and 0 <= part < math.inf for part in value)
    ):
        raise ValueError(f"{name} must be two numbers of at least 0, not {value!r}.")


def check_order(name: str, order: Tensor | None, size: int) -> Tensor | None:
    """An order of ``size`` rows for every epoch, ``(epochs, size)``, if there is one."""
    if order is None:
        return None
    order = torch.as_tensor(order)
    if order.ndim != 2 or order.shape[1] != size or not len(order) or order.is_floating_point():
        raise ValueError(f"{name} must order {size} vectors in each row, got {tuple(order.shape)} {order.dtype}.")
    if order.min() < 0 or order.max() >= size:
        raise ValueError(f"{name} must hold positions from 0 to {size - 1}.")
    return order


def unit_rows(rows: Tensor) -> Tensor:
    """Rows of unit norm. A row that already is, to half precision, stays as it is, like everywhere in `methods`."""
    unit = (rows.norm(dim=-1, keepdim=True) - 1).abs() <= UNIT_TOLERANCE
    return torch.where(unit, rows, F.normalize(rows, dim=-1))


def generator(random_state: int | None) -> torch.Generator:
    """A CPU generator; the same ``random_state`` draws the same on every device. ``None``: a fresh seed."""
    rng = torch.Generator()
    if random_state is None:
        rng.seed()
        return rng
    try:
        return rng.manual_seed(operator.index(random_state))
    except TypeError as error:
        raise ValueError(f"random_state must be an integer or None, not {random_state!r}.") from error


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


def _is_fitted_name(name: str) -> bool:
    return name.endswith("_") and not name.startswith("_")


def _json_value(name: str, value: Any) -> Any:
    """An option or a fitted number as JSON has it: numbers and arrays of numpy become Python's."""
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_json_value(name, part) for part in value]
    if value is None or isinstance(value, (bool, str)) or is_finite(value):
        return value
    raise ValueError(f"{name}={value!r} cannot be saved: only finite numbers, text, None and lists of them can.")


def _load_tensors(path: Path, device: str | torch.device) -> dict[str, Tensor]:
    try:
        return load_file(path, device=str(device))
    except (SafetensorError, FileNotFoundError) as error:
        raise ValueError(f"{path}: missing, cut or no safetensors file ({error}). {_ADVICE}") from error

"""The checks every method makes on what it is given."""

import math
import numbers
import warnings

import torch
from torch import Tensor

# Half-precision features have norms of 1 +- 1e-3 and are used as they are, like in the published solvers.
UNIT_TOLERANCE = 1e-2


def check_inputs(**inputs: Tensor) -> tuple[Tensor, ...]:
    """Rows as the methods want them: one width, finite, unit norm, one dtype of at least float32.

    Args:
        inputs: Tensors ``(..., d)`` under the names to use in messages. Half precision is cast to float32,
            float64 stays float64.

    Returns:
        The tensors in the order given.

    Raises:
        ValueError: Empty input, different widths, or rows that are not finite or all zero (with their
            number).

    Example:
        >>> features, prototypes = check_inputs(features=features, prototypes=prototypes)   # doctest: +SKIP
    """
    dtype = torch.float32
    for name, rows in inputs.items():
        if rows.dim() < 2 or rows.numel() == 0:
            raise ValueError(f"{name} must be a non-empty tensor of rows, (..., d); got shape {tuple(rows.shape)}.")
        if not rows.is_floating_point():
            raise ValueError(f"{name} must be floating point; got {rows.dtype}.")
        dtype = torch.promote_types(dtype, rows.dtype)
    if len({rows.shape[-1] for rows in inputs.values()}) > 1:
        widths = ", ".join(f"{name} {rows.shape[-1]}" for name, rows in inputs.items())
        raise ValueError(f"All inputs must come from the same CLIP model, but their widths differ: {widths}.")

    checked, rescaled = [], []
    for name, rows in inputs.items():
        rows = rows.detach().to(dtype)  # no method differentiates through what it is given
        norms = rows.norm(dim=-1, keepdim=True)
        bad = int((~norms.isfinite() | (norms == 0)).sum())
        if bad:
            raise ValueError(
                f"{bad} of {norms.numel()} rows of {name} are NaN, infinite or zero. Remove these rows, or "
                "extract the features again (overflow in half precision is the usual cause)."
            )
        if ((norms - 1).abs() > UNIT_TOLERANCE).any():
            rows = rows / norms
            rescaled.append(name)
        checked.append(rows)
    if rescaled:
        warnings.warn(f"Rows of {' and '.join(rescaled)} were not of unit norm; normalised.", stacklevel=3)
    return tuple(checked)


def check_range(low: float, high: float = math.inf, *, above: bool = False, **options: float) -> None:
    """Refuse options outside ``[low, high]``, or ``(low, high]`` with ``above``, by name.

    Example:
        >>> check_range(1, n_neighbors=0)
        Traceback (most recent call last):
        ValueError: n_neighbors must be at least 1, not 0.
    """
    for name, value in options.items():
        if not isinstance(value, numbers.Real):
            raise ValueError(f"{name} must be a number, not {value!r}.")
        if not low <= value <= high or (above and value == low):
            limits = f"{'above' if above else 'at least'} {low}" + ("" if high == math.inf else f" and at most {high}")
            raise ValueError(f"{name} must be {limits}, not {value}.")

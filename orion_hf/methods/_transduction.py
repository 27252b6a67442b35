"""What StatA, TransCLIP and ZLaP share: nearest neighbours and the assignment update."""

from collections.abc import Callable

import torch
from torch import Tensor

TAU = 50.0  # likelihood temperature, a constant of the published solvers
PASSES = 5  # fixed-point passes inside each assignment update
CHUNK = 2500  # rows the published solvers treat at a time
BLOCK_ELEMENTS = 2**24  # similarities held at once, 64 MB in float32


def top_similarities(queries: Tensor, keys: Tensor, k: int, exclude_self: bool = False) -> tuple[Tensor, Tensor]:
    """The ``min(k, number of keys)`` largest inner products of every query, in decreasing order.

    Args:
        queries: ``(N, d)``.
        keys: ``(M, d)``.
        k: Neighbours wanted.
        exclude_self: Queries are the keys, and a row is not its own neighbour (also among exact duplicates).

    Returns:
        Similarities and key indices, both ``(N, k)``. Memory stays bounded: the ``(N, M)`` matrix is never
        held.
    """
    k = min(k, len(keys) - exclude_self)
    block = max(1, BLOCK_ELEMENTS // len(keys))
    values, indices = [], []
    for start in range(0, len(queries), block):
        similarities = queries[start : start + block] @ keys.T
        if exclude_self:
            similarities.diagonal(start).fill_(-torch.inf)
        top = similarities.topk(k, dim=1)
        values.append(top.values)
        indices.append(top.indices)
    return torch.cat(values), torch.cat(indices)


def neighbour_affinity(features: Tensor, n_neighbors: int) -> Tensor:
    """Sparse ``W + W^T`` of shape ``(N, N)``, with ``w_ij = <x_i, x_j>`` for the n nearest j of i, raw
    values.

    W is not symmetric, so mutual neighbours count twice.
    """
    values, columns = top_similarities(features, features, n_neighbors, exclude_self=True)
    rows = torch.arange(len(features), device=features.device).repeat_interleave(columns.shape[1])
    return symmetric_sum(rows, columns.flatten(), values.flatten(), len(features))


def symmetric_sum(rows: Tensor, columns: Tensor, values: Tensor, size: int) -> Tensor:
    """Sparse ``W + W^T`` of the entries of a ``(size, size)`` matrix W."""
    entries = torch.stack([torch.cat([rows, columns]), torch.cat([columns, rows])])
    return torch.sparse_coo_tensor(entries, values.repeat(2), (size, size), check_invariants=True).coalesce()


def assign(assignments: Tensor, evidence: Tensor, affinity: Tensor, strength: float) -> Tensor:
    """Fixed-point passes ``Z <- softmax_k(evidence + strength * (W + W^T) Z)``, all rows at once.

    Args:
        assignments: Z, ``(N, K)``.
        evidence: ``lambda_y log y_ik + log-likelihood / tau``, ``(N, K)``.
        affinity: ``W + W^T``, sparse ``(N, N)``.
        strength: ``lambda_laplacian / (2 n)``.
    """
    for _ in range(PASSES):
        assignments = (evidence + strength * (affinity @ assignments)).softmax(dim=1)
    return assignments


def chunked_mean(total_of_rows: Callable[[slice], Tensor], size: int, reference_chunking: bool) -> Tensor:
    """Mean over ``size`` rows of a quantity that ``total_of_rows(slice)`` sums over a slice of rows.

    Args:
        total_of_rows: Function of a slice.
        size: N.
        reference_chunking: As the published code does for N > 2,500: it divides the running total by N after
            every chunk of 2,500 rows, so that all but the last chunk nearly vanish. ``False`` is the plain
            mean.
    """
    if not reference_chunking:
        return total_of_rows(slice(None)) / size
    mean = torch.zeros(())
    for start in range(0, size, CHUNK):
        mean = (mean + total_of_rows(slice(start, start + CHUNK))) / size
    return mean

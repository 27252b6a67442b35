"""ZLaP: label propagation on a graph of class prototypes and images.

Nodes are the K classes and the M images. An image is joined to its k nearest images and prototypes; with W
the sum of the directed weights and their transpose, ``Wn = D^-1/2 W D^-1/2``, the class scores of all nodes
are

    G = (I - alpha Wn)^-1 [e_1 ... e_K],    (K + M, K)

Transductive: the images are the test images and their rows of G are the scores. Inductive: the graph holds
other, unlabeled images, and a test image adds up the rows of G of its neighbours, weighted by similarity.
Sparse inductive: each row of G keeps only its largest entry.

The graph is a scipy sparse matrix. K systems share it, so they are solved together by conjugate gradients, a
block of columns at a time; scipy's own solver takes one right-hand side, and a call for each costs most where
batches are small. Neighbours are exact: products of blocks and `topk`, on the device of the features, which a
library's search on the CPU would have to leave.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from orion_hf.methods import MethodOutput
from orion_hf.methods._inputs import check_inputs, check_range
from orion_hf.methods._transduction import top_similarities

PAPER = "Stojnic et al., Label Propagation for Zero-shot Classification with Vision-Language Models, CVPR 2024"
INPUTS = "batch"

SETUPS = ("transductive", "inductive", "sparse-inductive")
BLOCK_ELEMENTS = 2**22  # entries of a block of right-hand sides, 32 MB in float64


@dataclass(frozen=True)
class ZLaPOutput(MethodOutput):
    """Propagated scores; small positive numbers, not probabilities.

    Attributes:
        node_scores: G, ``(K + M, K)``, before any sparsification: classes first, then the images of the
            graph.
    """

    node_scores: Tensor


@dataclass(frozen=True)
class _Scaling:
    """Similarities as graph weights: ``max(0, (sim - low) / span)``, to the power gamma for text."""

    low: float
    span: float
    gamma: float

    def weights(self, image_similarities: Tensor, text_similarities: Tensor) -> Tensor:
        """Text then image weights, ``(N, k_text + k_image)``, in float64 like the solver."""
        text = ((text_similarities.double() - self.low) / self.span).clamp_min(0) ** self.gamma
        image = ((image_similarities.double() - self.low) / self.span).clamp_min(0)
        return torch.cat([text, image], dim=1)


def zlap(
    features: Tensor,
    prototypes: Tensor,
    *,
    setup: str = "transductive",
    unlabeled_features: Tensor | None = None,
    k: int = 5,
    gamma: float = 5.0,
    alpha: float = 0.3,
    scale_sim: bool = False,
    cg_tol: float = 1e-6,
    cg_maxiter: int = 50,
) -> ZLaPOutput:
    """Classify images by propagating one seed per class.

    Args:
        features: Test image features, ``(N, d)``.
        prototypes: Text prototypes, or proxies learnt from them, ``(K, d)``.
        setup: ``"transductive"``, ``"inductive"`` or ``"sparse-inductive"``.
        unlabeled_features: Images of the graph, ``(M, d)``; for the inductive setups.
        k: Neighbours among images and among prototypes. In the graph an image counts as its own neighbour.
        gamma: Exponent of text-image similarities.
        alpha: Propagation weight, below 1.
        scale_sim: Scale similarities to [0, 1] over all edges (the paper's setting for proxies, k=10 and
            gamma=3).
        cg_tol: Relative residual at which a system counts as solved.
        cg_maxiter: Iterations at most.

    Example:
        >>> zlap(features, prototypes).predictions      # doctest: +SKIP
        >>> zlap(test, prototypes, setup="inductive", unlabeled_features=train)     # doctest: +SKIP
    """
    if setup not in SETUPS:
        raise ValueError(f"setup must be one of {', '.join(SETUPS)}; not {setup!r}.")
    if (setup == "transductive") != (unlabeled_features is None):
        raise ValueError(
            f"setup={setup!r}: unlabeled_features (those of the train split, say) go with the inductive setups, and "
            "only with them."
        )
    check_range(1, k=k, cg_maxiter=cg_maxiter)
    check_range(0, gamma=gamma, cg_tol=cg_tol)
    if not 0 <= alpha < 1:
        raise ValueError(f"alpha must be in [0, 1), not {alpha}.")
    if unlabeled_features is None:
        features, prototypes = check_inputs(features=features, prototypes=prototypes)
        images = features = normalize(features, dim=1)
    else:
        features, prototypes, images = check_inputs(
            features=features, prototypes=prototypes, unlabeled_features=unlabeled_features
        )
        features, images = normalize(features, dim=1), normalize(images, dim=1)
    prototypes = normalize(prototypes, dim=1)

    image_edges = top_similarities(images, images, k)
    text_edges = top_similarities(images, prototypes, k)
    similarities = torch.cat([image_edges[0], text_edges[0]], dim=1)
    low, high = (float(similarities.min()), float(similarities.max())) if scale_sim else (0.0, 1.0)
    scaling = _Scaling(low, (high - low) or 1.0, gamma)
    laplacian = _laplacian(_edge_matrix(image_edges, text_edges, scaling, len(prototypes), len(images)), alpha)
    node_scores = torch.from_numpy(_solve_seeds(laplacian, len(prototypes), cg_tol, cg_maxiter, _numpy_dtype(features)))

    if setup == "transductive":
        scores = node_scores[len(prototypes) :]
    else:
        table = node_scores if setup == "inductive" else _largest_of_row(node_scores)
        image_values, image_columns = top_similarities(features, images, k)
        text_values, text_columns = top_similarities(features, prototypes, k)
        # The published code clamps before it scales here, and after in the graph.
        image_edges = (image_values.clamp_min(0), image_columns)
        text_edges = (text_values.clamp_min(0), text_columns)
        edges = _edge_matrix(image_edges, text_edges, scaling, len(prototypes), len(images))
        scores = torch.from_numpy(edges @ table.numpy())
    return ZLaPOutput(scores.to(features), node_scores.to(features))


def _edge_matrix(
    image_edges: tuple[Tensor, Tensor],
    text_edges: tuple[Tensor, Tensor],
    scaling: _Scaling,
    classes: int,
    images: int,
):
    """Weights from rows (images) to nodes (classes, then images of the graph), scipy CSR ``(N, K + M)``."""
    from scipy.sparse import csr_array

    weights = scaling.weights(image_edges[0], text_edges[0]).cpu().numpy()
    columns = torch.cat([text_edges[1], image_edges[1] + classes], dim=1).cpu().numpy()
    starts = np.arange(len(columns) + 1) * columns.shape[1]
    return csr_array((weights.ravel(), columns.ravel(), starts), shape=(len(columns), classes + images))


def _laplacian(edges, alpha: float):
    """``I - alpha D^-1/2 W D^-1/2`` of the graph whose image rows are given, scipy CSR ``(K + M, K + M)``."""
    from scipy.sparse import csr_array, diags_array, eye_array, vstack

    images, nodes = edges.shape
    directed = vstack([csr_array((nodes - images, nodes)), edges]).tocsr()
    weights = directed + directed.T
    weights.setdiag(0)
    degrees = weights.sum(axis=1)
    scale = diags_array(1 / np.sqrt(np.where(degrees == 0, 1, degrees)))
    return (eye_array(nodes) - alpha * (scale @ weights @ scale)).tocsr()


def _solve_seeds(matrix, seeds: int, tol: float, maxiter: int, dtype: np.dtype) -> np.ndarray:
    """First ``seeds`` columns of the inverse of a symmetric positive definite matrix, by blocks."""
    nodes = matrix.shape[0]
    solution = np.empty((nodes, seeds), dtype)
    block = max(1, BLOCK_ELEMENTS // nodes)
    for start in range(0, seeds, block):
        columns = np.arange(start, min(start + block, seeds))
        target = np.zeros((nodes, len(columns)))
        target[columns, columns - start] = 1
        solution[:, columns] = _conjugate_gradients(matrix, target, tol, maxiter)
    return solution


def _conjugate_gradients(matrix, target: np.ndarray, tol: float, maxiter: int) -> np.ndarray:
    """Solve ``matrix @ X = target`` from zero; each column stops at ``|residual| <= tol |target|``."""
    solution = np.zeros_like(target)
    residual, direction = target.copy(), target.copy()
    square = _column_dot(residual, residual)
    goal = tol**2 * square
    for _ in range(maxiter):
        running = square > goal
        if not running.any():
            break
        image = matrix @ direction
        curvature = _column_dot(direction, image)
        step = np.divide(square, curvature, out=np.zeros_like(square), where=running)
        solution += step * direction
        residual -= step * image
        previous, square = square, _column_dot(residual, residual)
        direction *= np.divide(square, previous, out=np.zeros_like(square), where=running)
        direction += residual
    return solution


def _column_dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.einsum("nc,nc->c", a, b)


def _largest_of_row(scores: Tensor) -> Tensor:
    """Each row with only its largest entry, the first on ties."""
    best = scores.argmax(dim=1, keepdim=True)
    return torch.zeros_like(scores).scatter(1, best, scores.gather(1, best))


def _numpy_dtype(features: Tensor) -> np.dtype:
    return torch.empty(0, dtype=features.dtype).numpy().dtype

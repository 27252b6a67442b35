"""The equations: loss, training-free prototypes, geometry."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from orion_hf import geometry
from orion_hf.geometry import (
    cosine_dispersion,
    feature_scatter,
    negative_log_likelihood,
    off_diagonal_cosines,
    prototype_geometry,
)
from orion_hf.loss import orthonormality_gradient, orthonormality_loss
from orion_hf.prototypes import mean_prototypes, soft_prototypes, svd_prototypes

sizes = st.tuples(st.integers(2, 12), st.integers(2, 12))
seeds = st.integers(0, 2**31 - 1)
quick = settings(max_examples=40, deadline=None)


def unit_rows(num_classes: int, dim: int, seed: int, spread: float = 1.0, dtype=torch.float64) -> torch.Tensor:
    """Rows around a common direction: the smaller ``spread``, the more entangled."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(1, dim, generator=generator, dtype=dtype)
    own = torch.randn(num_classes, dim, generator=generator, dtype=dtype)
    return F.normalize(common + spread * own, dim=1)


# --- loss --------------------------------------------------------------------------------


def test_loss_matches_the_sums_of_the_paper_written_out():
    x, v, weight = unit_rows(5, 7, seed=0), unit_rows(5, 7, seed=1), 2.0
    fidelity = sum(float((x[i] - v[i]) @ (x[i] - v[i])) for i in range(5))
    pairs = sum(float(x[i] @ x[j]) ** 2 for i in range(5) for j in range(5) if i != j)  # the diagonal is 1 - 1
    result = orthonormality_loss(x, v, weight)
    assert float(result.fidelity) == pytest.approx(fidelity)
    assert float(result.orthogonality) == pytest.approx(pairs)
    assert float(result.total) == pytest.approx(fidelity + weight * pairs)


@quick
@given(sizes, seeds, st.floats(0, 50), st.booleans())
def test_closed_form_gradient_is_the_autograd_gradient(size, seed, weight, normalize):
    x, v = unit_rows(*size, seed=seed).requires_grad_(), unit_rows(*size, seed=seed + 1)
    expected = orthonormality_loss(x, v, weight, normalize)
    (expected_gradient,) = torch.autograd.grad(expected.total, x)
    result, gradient = orthonormality_gradient(x, v, weight, normalize)
    torch.testing.assert_close(gradient, expected_gradient)
    for got, want in zip(result, expected, strict=True):
        torch.testing.assert_close(got, want.detach())


def test_normalised_loss_means_the_same_when_every_class_is_repeated():
    x, v = unit_rows(6, 8, seed=0), unit_rows(6, 8, seed=1)
    few = orthonormality_loss(x, v, 2.0, normalize_by_classes=True)
    many = orthonormality_loss(x.repeat(20, 1), v.repeat(20, 1), 2.0, normalize_by_classes=True)
    assert float(many.fidelity) == pytest.approx(float(few.fidelity))
    # A row and its copies have cosine 1, so 6 x (20^2 - 20) ones join the 120^2 pairs.
    assert float(many.orthogonality) == pytest.approx(float(few.orthogonality) + 6 * 380 / 120**2)
    assert float(orthonormality_loss(x, v, 2.0).orthogonality) == pytest.approx(36 * float(few.orthogonality))


def test_gradient_at_21000_classes_fits_in_bounded_memory():
    """21,000 x 512 in a fresh process: the Gram alone would be 1.8 GB, several of them for autograd."""
    code = """
import resource, torch
torch.set_num_threads(1)
from orion_hf.loss import orthonormality_gradient
x = torch.nn.functional.normalize(torch.randn(21000, 512), dim=1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
result, gradient = orthonormality_gradient(x, x, 2.0)
assert gradient.isfinite().all() and gradient.shape == x.shape
# Random rows: every off-diagonal cosine is about N(0, 1/512).
assert abs(result.orthogonality / (21000**2 / 512) - 1) < 0.01
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(output) / 1024 < 300, "MB more than before the call"


@pytest.mark.parametrize("shapes", [((3, 4), (4, 4)), ((3,), (3,)), ((2, 3, 4), (2, 3, 4))])
def test_loss_names_wrong_shapes(shapes):
    with pytest.raises(ValueError, match=r"must both be \(K, d\)"):
        orthonormality_loss(torch.zeros(shapes[0]), torch.zeros(shapes[1]), 1.0)


# --- prototypes --------------------------------------------------------------------------------


@quick
@given(st.integers(1, 5), sizes, seeds)
def test_mean_prototypes_weigh_templates_equally(templates, size, seed):
    embeds = torch.randn(templates, *size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    v = mean_prototypes(embeds)
    torch.testing.assert_close(v.norm(dim=1), torch.ones(size[0], dtype=torch.float64))
    lengths = torch.rand(templates, size[0], 1, dtype=torch.float64) + 0.1
    torch.testing.assert_close(mean_prototypes(embeds * lengths), v)


@quick
@given(sizes, seeds)
def test_svd_is_the_nearest_orthogonal_matrix(size, seed):
    v = unit_rows(*size, seed=seed)
    x, row_orthonormal = svd_prototypes(v)
    assert row_orthonormal == (size[0] <= size[1])
    product = x @ x.T if row_orthonormal else x.T @ x
    torch.testing.assert_close(product, torch.eye(min(size), dtype=torch.float64))
    for other_seed in range(5):  # no other orthogonal matrix is nearer
        other, _ = torch.linalg.qr(
            torch.randn(max(size), min(size), dtype=torch.float64, generator=torch.Generator().manual_seed(other_seed))
        )
        other = other.T if row_orthonormal else other
        assert (x - v).norm() <= (other.reshape(x.shape) - v).norm() + 1e-9


def test_svd_survives_repeated_classes_and_half_precision():
    v = unit_rows(4, 8, seed=0).repeat(2, 1).half()
    x, row_orthonormal = svd_prototypes(v)
    assert row_orthonormal
    assert x.dtype == torch.float16
    torch.testing.assert_close(x.float() @ x.float().T, torch.eye(8), atol=5e-3, rtol=0)


def test_soft_prototypes_join_the_averages_to_the_svd_solution():
    v = unit_rows(6, 10, seed=0, spread=0.5)
    assert torch.equal(soft_prototypes(v, weight=0.0).prototypes, F.normalize(v, dim=1))
    weights = (0.01, 0.1, 1.0, 10.0)
    ends = [soft_prototypes(v, w, max_steps=3000, tolerance=1e-9) for w in weights]
    moved = [end.displacements[-1] for end in ends]
    assert moved == sorted(moved)
    # The hard solution is allowed in the soft problem, so the soft one is no worse, and near it in the end.
    hard = svd_prototypes(v).prototypes
    for weight, end in zip(weights, ends, strict=True):
        assert end.losses[-1] <= float(orthonormality_loss(hard, v, weight).total) + 1e-6
    assert (ends[-1].prototypes - hard).norm(dim=1).mean() < 0.05


@quick
@given(sizes, seeds, st.floats(0.001, 10))
def test_soft_prototypes_only_go_down(size, seed, weight):
    path = soft_prototypes(unit_rows(*size, seed=seed), weight, max_steps=50)
    assert all(later <= earlier for earlier, later in zip(path.losses, path.losses[1:], strict=False))
    assert len(path.losses) == len(path.displacements)
    torch.testing.assert_close(path.prototypes.norm(dim=1), torch.ones(size[0], dtype=torch.float64))


def test_soft_prototypes_stop_at_the_displacement_and_reach_a_stationary_point():
    v = unit_rows(8, 16, seed=3, spread=0.5)
    stopped = soft_prototypes(v, weight=0.5, target_displacement=0.1)
    assert stopped.displacements[-1] >= 0.1 > stopped.displacements[-2]
    end = soft_prototypes(v, weight=0.5, max_steps=5000, tolerance=1e-14)
    assert end.converged
    _, gradient = orthonormality_gradient(end.prototypes, v, 0.5)
    tangent = gradient - (gradient * end.prototypes).sum(dim=1, keepdim=True) * end.prototypes
    assert tangent.norm() < 1e-4


# --- geometry --------------------------------------------------------------------------------


def test_geometry_of_prototypes_written_out():
    x, v = unit_rows(7, 5, seed=0), unit_rows(7, 5, seed=1)
    report = prototype_geometry(x, v)
    gram = x @ x.T
    off = gram[~torch.eye(7, dtype=torch.bool)]
    moved = (x - v).norm(dim=1)
    assert report.mean_displacement == pytest.approx(float(moved.mean()))
    assert report.median_displacement == pytest.approx(float(moved.median()))
    assert report.mean_cosine == pytest.approx(float(off.mean()))
    assert report.max_cosine == pytest.approx(float(off.max()))
    assert report.distance_to_orthonormality == pytest.approx(float((gram - torch.eye(7, dtype=torch.float64)).norm()))
    assert 1 <= report.effective_rank <= 5
    assert prototype_geometry(x).mean_displacement == 0


def test_geometry_in_blocks_equals_geometry_at_once(monkeypatch):
    x, v = unit_rows(23, 9, seed=0), unit_rows(23, 9, seed=1)
    at_once, scatter = prototype_geometry(x, v), feature_scatter(x, torch.arange(23) % 4)
    monkeypatch.setattr(geometry, "_BLOCK", 5)
    assert prototype_geometry(x, v).max_cosine == at_once.max_cosine
    assert prototype_geometry(x, v).distance_to_orthonormality == pytest.approx(at_once.distance_to_orthonormality)
    assert feature_scatter(x, torch.arange(23) % 4).within == pytest.approx(scatter.within)


@quick
@given(sizes, st.integers(1, 60), seeds, st.booleans())
def test_huygens_and_the_likelihood_decomposition(size, count, seed, soft):
    num_classes, dim = size
    generator = torch.Generator().manual_seed(seed)
    f = F.normalize(torch.randn(count, dim, generator=generator, dtype=torch.float64), dim=1)
    labels = torch.randint(num_classes, (count,), generator=generator)
    u = torch.rand(count, num_classes, generator=generator).softmax(1).double() if soft else labels
    scatter = feature_scatter(f, u)
    assert scatter.within == pytest.approx(scatter.total - scatter.between, abs=1e-8)

    x = unit_rows(num_classes, dim, seed=seed)
    one_hot = u if soft else F.one_hot(labels, num_classes).double()
    counts = one_hot.sum(0)
    means = (one_hot.T @ f) / counts.clamp_min(1e-30)[:, None]
    around = (counts * (means - x).square().sum(1)).sum()
    assert negative_log_likelihood(f, x, u) == pytest.approx(scatter.within + float(around), abs=1e-8)
    # Hard labels and their one-hot matrix are the same assignment.
    assert negative_log_likelihood(f, x, one_hot) == pytest.approx(negative_log_likelihood(f, x, u), abs=1e-8)


def test_dispersion_is_the_mean_cosine_distance_to_the_class_mean():
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(30, 6, generator=generator, dtype=torch.float64) * 3
    labels = torch.arange(30) % 4
    unit = F.normalize(f, dim=1)
    means = torch.stack([unit[labels == k].mean(0) for k in range(4)])
    expected = (1 - F.cosine_similarity(unit, means[labels])).mean()
    assert cosine_dispersion(f, labels) == pytest.approx(float(expected))
    assert cosine_dispersion(f, F.one_hot(labels)) == pytest.approx(float(expected))


def test_mean_cosine_needs_no_gram():
    x = unit_rows(3000, 8, seed=0, dtype=torch.float32)
    mean, largest = off_diagonal_cosines(x)
    assert mean == pytest.approx(float((x @ x.T).sum() - 3000) / (3000 * 2999), abs=1e-5)
    assert largest <= 1 + 1e-5


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (torch.zeros(3, dtype=torch.long), "N = 4"),
        (torch.tensor([0, 1, -1, 0]), "negative"),
        (torch.zeros(4), "integers"),
        (torch.zeros(4, 2, 2), r"labels \(N,\)"),
    ],
)
def test_wrong_assignments_are_named(assignments, message):
    with pytest.raises(ValueError, match=message):
        feature_scatter(torch.zeros(4, 3), assignments)


def test_one_class_has_no_geometry():
    with pytest.raises(ValueError, match="K at least 2"):
        prototype_geometry(torch.zeros(1, 3))
    with pytest.raises(ValueError, match="3 classes are assigned"):
        negative_log_likelihood(torch.zeros(2, 3), torch.zeros(2, 3), torch.tensor([0, 2]))


def test_median_displacement_of_an_even_number_of_classes():
    anchors = torch.eye(4)
    angles = torch.tensor([0.1, 0.2, 0.4, 0.5])
    prototypes = angles.cos()[:, None] * anchors + angles.sin()[:, None] * anchors.roll(1, 0)
    moved = 2 * (angles / 2).sin()
    report = prototype_geometry(prototypes, anchors)
    assert report.median_displacement == pytest.approx((moved[1] + moved[2]).item() / 2, abs=1e-6)

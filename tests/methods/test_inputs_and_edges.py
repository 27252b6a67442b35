"""What all methods promise: a listing, checked inputs, small and odd batches, dtypes, no labels."""

import inspect
import warnings

import pytest
import torch
from torch.nn.functional import normalize

from orion_hf import methods
from orion_hf.methods.mta import mta, mta_vote
from orion_hf.methods.stata import stata
from orion_hf.methods.transclip import transclip, transclip_few_shot
from orion_hf.methods.zero_shot import zero_shot
from orion_hf.methods.zlap import zlap

BATCH_METHODS = [zero_shot, stata, transclip, zlap]


def unit(*shape, seed=0, dtype=torch.float32):
    return normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1).to(dtype)


def clustered(n, k, d=32, noise=0.5, seed=0):
    """Images near their prototype, with labels."""
    generator = torch.Generator().manual_seed(seed)
    prototypes = unit(k, d, seed=seed + 1)
    labels = torch.randint(k, (n,), generator=generator)
    noise = noise * torch.randn(n, d, generator=generator) / d**0.5
    return normalize(prototypes[labels] + noise, dim=1), prototypes, labels


def call(method, features, prototypes, **options):
    """Batch methods on the features; MTA on 8 views made of each."""
    if method is mta:
        features = normalize(features[:, None] + 0.1 * unit(1, 8, features.shape[1], seed=9).to(features), dim=-1)
    return method(features, prototypes, **options)


def test_available_lists_paper_inputs_and_published_defaults():
    listed = methods.available()
    assert {"zero_shot", "stata", "transclip", "zlap", "mta", "tpt"} <= set(listed)
    assert "CVPR 2025" in listed["stata"].paper and listed["stata"].function is stata
    assert listed["stata"].options["alpha"] == 1 and listed["stata"].options["reference_chunking"] is False
    assert listed["zlap"].options["k"] == 5 and listed["mta"].options["lambda_y"] == 0.2
    assert listed["tpt"].options["lr"] == 5e-3 and listed["tpt"].inputs == "views and text model"
    for name in ("zero_shot", "stata", "transclip", "zlap", "mta", "tpt"):
        assert not any(
            "label" in parameter
            for parameter in inspect.signature(listed[name].function).parameters
            if parameter != "unlabeled_features"
        )


@pytest.mark.parametrize("method", [*BATCH_METHODS, mta])
def test_width_mismatch_names_both(method):
    with pytest.raises(ValueError, match=r"features 32.*prototypes 16"):
        call(method, unit(6, 32), unit(3, 16))


@pytest.mark.parametrize("method", [*BATCH_METHODS, mta])
def test_bad_rows_are_counted_and_refused(method):
    features = unit(6, 32)
    features[1, 3] = torch.nan
    features[4] = torch.inf
    with pytest.raises(ValueError, match=r"\d+ of \d+ rows of features are NaN"):
        call(method, features, unit(3, 32))
    if method is not mta:
        with pytest.raises(ValueError, match="2 of 6 rows of features"):
            method(features, unit(3, 32))
    prototypes = unit(3, 32)
    prototypes[0] = 0
    with pytest.raises(ValueError, match="1 of 3 rows of prototypes"):
        call(method, unit(6, 32), prototypes)
    with pytest.raises(ValueError, match="prototypes must be a non-empty"):
        call(method, unit(6, 32), prototypes[:0])


@pytest.mark.parametrize("method", [*BATCH_METHODS, mta])
def test_rows_that_are_not_unit_are_normalised_with_one_warning(method):
    features, prototypes = unit(12, 32), unit(4, 32, seed=1)
    views = features if method is not mta else features.view(2, 6, 32)
    expected = method(views, prototypes)
    with pytest.warns(UserWarning, match="features and prototypes were not of unit norm") as caught:
        scaled = method(views * 7, prototypes * 3)
    assert len(caught) == 1 and "test_inputs_and_edges" in caught[0].filename
    torch.testing.assert_close(scaled.scores, expected.scores, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", [*BATCH_METHODS, mta])
def test_half_precision_is_computed_in_float32_and_float64_stays(method):
    features, prototypes = unit(12, 32, dtype=torch.float16), unit(4, 32, seed=1, dtype=torch.float16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # half-precision rows are unit rows
        half = call(method, features, prototypes)
    single = call(method, features.float(), prototypes.float())
    assert half.scores.dtype == torch.float32
    if method is not mta:  # its views are made after the cast
        assert torch.equal(half.scores, single.scores)
    double = call(method, features.double(), prototypes.double())
    assert double.scores.dtype == torch.float64
    torch.testing.assert_close(single.scores.double(), double.scores, rtol=0, atol=2e-3)
    assert call(method, features.float(), prototypes.double()).scores.dtype == torch.float64


@pytest.mark.parametrize("method", [*BATCH_METHODS, mta])
@pytest.mark.parametrize(("n", "k"), [(1, 2), (1, 5), (2, 2), (3, 1), (3, 50), (40, 2)])
def test_small_batches(method, n, k):
    features, prototypes, labels = clustered(n, k, noise=0.3)
    output = call(method, features, prototypes)
    assert output.scores.shape == (n, k) and output.scores.isfinite().all()
    if method is not transclip or k <= n:  # absent classes attract TransCLIP: nothing anchors them
        assert torch.equal(output.predictions, labels)


@pytest.mark.parametrize("method", BATCH_METHODS)
def test_exact_duplicates(method):
    features, prototypes, labels = clustered(4, 3)
    output = method(features.repeat(5, 1), prototypes)
    assert output.scores.isfinite().all() and torch.equal(output.predictions, labels.repeat(5))


@pytest.mark.parametrize("method", BATCH_METHODS)
def test_order_of_images_and_classes_does_not_matter(method):
    features, prototypes, _ = clustered(50, 6, noise=1.0)
    images, classes = torch.randperm(50), torch.randperm(6)
    moved = method(features[images].double(), prototypes[classes].double()).scores
    straight = method(features.double(), prototypes.double()).scores
    torch.testing.assert_close(moved, straight[images][:, classes], rtol=0, atol=1e-8)


@pytest.mark.parametrize("soft_beta", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_stata_keeps_classes_without_mass_at_their_anchor(soft_beta, alpha):
    """Opposite prototypes: no image has any probability, even a rounded one, in the last classes."""
    features, prototypes, labels = clustered(30, 4)
    absent = -prototypes.mean(dim=0, keepdim=True).repeat(3, 1) + 0.01 * unit(3, 32, seed=4)
    prototypes = torch.cat([prototypes, normalize(absent, dim=1)])
    output = stata(features, prototypes, soft_beta=soft_beta, alpha=alpha, logit_scale=2000.0)
    assert output.scores.isfinite().all() and torch.equal(output.predictions, labels)
    assert (output.scores[:, 4:] == 0).all() and (output.weights[4:] == 0).all()
    torch.testing.assert_close(output.means[4:], prototypes[4:])
    assert (output.covariances > 0).all()


def test_transclip_keeps_the_mean_of_a_class_without_mass():
    features, prototypes, labels = clustered(30, 4)
    prototypes = torch.cat([prototypes, normalize(-prototypes.mean(dim=0, keepdim=True), dim=1)])
    for variant in ("text-init", "visual-init"):
        output = transclip(features, prototypes, logit_scale=2000.0, variant=variant)
        assert output.scores.isfinite().all() and torch.equal(output.predictions, labels)
        torch.testing.assert_close(output.means[4], prototypes[4])


def test_zero_exponent_forgets_the_prior_even_where_it_is_zero():
    features, prototypes, _ = clustered(20, 4)
    assert stata(features, prototypes, lambda_y_hat=0.0, logit_scale=5000.0).scores.isfinite().all()


@pytest.mark.parametrize("method", [stata, transclip])
def test_reference_chunking_only_matters_above_2500_samples(method):
    features, prototypes, _ = clustered(2600, 4, noise=2.0)
    for n, same in ((2500, True), (2600, False)):
        plain = method(features[:n], prototypes)
        chunked = method(features[:n], prototypes, reference_chunking=True)
        assert torch.equal(plain.scores, chunked.scores) == same
    if method is stata:
        start = stata(features, prototypes, max_iter=0)
        assignments, means, covariance = start.zero_shot, prototypes, start.covariances[0]
    else:  # the covariance of one update belongs to the assignments before it
        assignments = transclip(features, prototypes, max_iter=0).scores
        updated = transclip(features, prototypes, max_iter=1)
        means, covariance = updated.means, updated.covariance
    exact = torch.einsum("nk,nkd->d", assignments, (features[:, None] - means).square()) / len(features)
    torch.testing.assert_close(covariance, exact, rtol=1e-4, atol=1e-7)


def test_transclip_starts_from_other_probabilities():
    features, prototypes, labels = clustered(60, 4, noise=1.5)
    told = torch.nn.functional.one_hot(labels, 4).float() * 0.98 + 0.005
    output = transclip(features, prototypes, initial_probabilities=told)
    assert torch.equal(output.zero_shot, told) and torch.equal(output.predictions, labels)
    with pytest.raises(ValueError, match="initial_probabilities"):
        transclip(features, prototypes, initial_probabilities=told[:, :3])
    with pytest.raises(ValueError, match="text-init"):
        transclip(features, prototypes, variant="random")


def test_few_shot_transclip_uses_the_gamma_best_on_validation():
    features, _, labels = clustered(200, 5)
    shots, shot_labels = features[:40], labels[:40]
    query, query_labels = features[80:], labels[80:]
    outputs = [
        transclip_few_shot(
            query,
            unit(5, 32, seed=77),
            shots,
            shot_labels,
            features[40:80],
            labels[40:80],
            reference_indexing=reference,
            logit_scale=5.0,
        )
        for reference in (False, True)
    ]
    for output in outputs:
        best = int(output.validation_accuracies.argmax())
        assert torch.equal(output.scores, output.scores_per_gamma[best])
        assert (output.predictions == query_labels).float().mean() > 0.6  # prototypes are noise here
    assert not torch.equal(outputs[0].scores, outputs[1].scores)


def test_zlap_inductive_is_the_dual_of_a_direct_solve():
    features, prototypes, _ = clustered(120, 6, noise=1.5)
    prototypes = normalize(prototypes.double(), dim=1)
    test, graph = normalize(features.double(), dim=1).split([20, 100])
    options = {"k": 4, "alpha": 0.6, "scale_sim": True, "gamma": 2.5, "cg_tol": 1e-12}
    output = zlap(test, prototypes, setup="inductive", unlabeled_features=graph, **options)
    nodes = torch.cat([prototypes, graph])
    weights = torch.zeros(106, 106, dtype=torch.float64)
    images, texts = (graph @ graph.T).topk(4), (graph @ prototypes.T).topk(4)
    found = torch.cat([images.values, texts.values], dim=1)
    low, span = found.min(), found.max() - found.min()
    for i in range(100):
        weights[6 + i, 6 + images.indices[i]] = ((images.values[i] - low) / span).clamp_min(0)
        weights[6 + i, texts.indices[i]] = ((texts.values[i] - low) / span).clamp_min(0) ** 2.5
    weights = (weights + weights.T).fill_diagonal_(0)
    scale = weights.sum(1).where(weights.sum(1) > 0, torch.ones(106, dtype=torch.float64)).rsqrt()
    laplacian = torch.eye(106, dtype=torch.float64) - 0.6 * scale[:, None] * weights * scale
    cosines = test @ nodes.T
    similar = ((cosines.clamp_min(0) - low) / span).clamp_min(0)
    target = torch.zeros(20, 106, dtype=torch.float64)
    for i in range(20):
        near, text = 6 + cosines[i, 6:].topk(4).indices, cosines[i, :6].topk(4).indices
        target[i, near] = similar[i, near]
        target[i, text] = similar[i, text] ** 2.5
    expected = torch.linalg.solve(laplacian, target.T).T[:, :6]
    torch.testing.assert_close(output.scores, expected, rtol=0, atol=1e-9)


def test_zlap_isolated_classes_and_wrong_options():
    features, prototypes, labels = clustered(10, 3)
    far = normalize(-prototypes.sum(0, keepdim=True), dim=1)
    output = zlap(features, torch.cat([prototypes, far]), k=1)  # no image is joined to the last class
    assert torch.equal(output.predictions, labels) and (output.scores[:, 3] == 0).all()
    with pytest.raises(ValueError, match="sparse-inductive"):
        zlap(features, prototypes, setup="other")
    with pytest.raises(ValueError, match="unlabeled_features"):
        zlap(features, prototypes, setup="inductive")
    with pytest.raises(ValueError, match="alpha"):
        zlap(features, prototypes, alpha=1.0)


def test_mta_images_are_independent_of_their_batch_and_blocks(monkeypatch):
    views, prototypes = normalize(unit(1, 1, 32) + 0.4 * unit(7, 16, 32, seed=3), dim=-1), unit(5, 32, seed=1)
    together = mta(views.double(), prototypes.double())
    monkeypatch.setattr("orion_hf.methods.mta.BLOCK_ELEMENTS", 2 * 16 * 16)
    blocks = mta(views.double(), prototypes.double())
    for i in range(7):
        alone = mta(views[i : i + 1].double(), prototypes.double())
        for output in (together, blocks):
            torch.testing.assert_close(output.scores[i], alone.scores[0], rtol=0, atol=1e-10)
            torch.testing.assert_close(output.inlierness[i], alone.inlierness[0], rtol=0, atol=1e-10)


def test_mta_identical_views_give_the_view():
    view, prototypes = unit(3, 1, 32), unit(5, 32, seed=1)
    output = mta(view.expand(3, 8, 32), prototypes)
    torch.testing.assert_close(output.modes, view[:, 0], rtol=0, atol=1e-5)
    torch.testing.assert_close(output.inlierness, torch.full((3, 8), 0.125), rtol=0, atol=1e-2)


def test_mta_needs_views():
    with pytest.raises(ValueError, match="4 views are too few"):
        mta(unit(2, 4, 32), unit(5, 32))
    with pytest.raises(ValueError, match=r"\(N, V, d\)"):
        mta(unit(8, 32), unit(5, 32))


def test_mta_vote_counts_templates():
    views = normalize(unit(3, 1, 32) + 0.2 * unit(3, 8, 32, seed=5), dim=-1)
    templates = unit(5, 4, 32, seed=6)
    votes = mta_vote(views, templates, lambda_q=1.0)
    each = torch.stack([mta(views, template, lambda_q=1.0).predictions for template in templates])
    assert torch.equal(votes.predictions, each.mode(dim=0).values) and (votes.scores.sum(1) == 5).all()


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (stata, {"n_neighbors": 0}, "n_neighbors must be at least 1, not 0"),
        (stata, {"alpha": "1"}, "alpha must be a number, not '1'"),
        (stata, {"max_iter": -1}, "max_iter must be at least 0, not -1"),
        (transclip, {"n_neighbors": 0}, "n_neighbors must be at least 1"),
        (transclip, {"initial_probabilities": torch.full((4, 3), torch.nan)}, "hold NaN or infinite"),
        (zlap, {"k": 0}, "k must be at least 1, not 0"),
        (zlap, {"setup": "inductive"}, "unlabeled_features"),
        (mta, {"temperature": 0}, "temperature must be above 0, not 0"),
        (mta, {"lambda_y": 0.0}, "lambda_y must be above 0"),
        (mta, {"neighbour_fraction": 1.5}, "neighbour_fraction must be above 0 and at most 1, not 1.5"),
    ],
)
def test_options_out_of_range_are_named(method, options, message):
    features = unit(4, 8, 16) if method is mta else unit(4, 16)
    with pytest.raises(ValueError, match=message):
        method(features, torch.eye(16)[:3], **options)


@pytest.mark.parametrize("method", [*BATCH_METHODS, mta])
def test_inputs_with_gradients_give_scores_without(method):
    features = unit(6, 8, 16) if method is mta else unit(6, 16)
    assert not method(features, torch.eye(16)[:3].requires_grad_()).scores.requires_grad

"""Tip-Adapter and Tip-Adapter-F against golden vectors, their selection options, and as estimators."""

import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score
from torch.nn import functional as F

from orion_hf import methods
from orion_hf.methods.tip_adapter import PUBLISHED, TipAdapter, TipAdapterF, cache_logits, published_settings


def close(case, name, value, float32_tolerance):
    """Float64 against ``out64`` where the file has it, float32 against ``out``."""
    if value.dtype == torch.float64 and f"out64.{name}" in case.tensors:
        case.close(f"out64.{name}", value, 1e-9)
    else:
        case.close(f"out.{name}", value, float32_tolerance)


@pytest.mark.golden("tip_adapter_")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_golden(case, dtype):
    options = case.options
    support, labels = case["in.support_features_aug"].to(dtype), case["in.support_labels"]
    prototypes = case["in.text_prototypes"].to(dtype)
    validation = (case["in.val_features"].to(dtype), case["in.val_labels"])
    test = (case["in.test_features"].to(dtype), case["in.test_labels"])
    shared = {
        "beta": options["init_beta"],
        "alpha": options["init_alpha"],
        "search_scale": tuple(options["search_scale"]),
        "search_step": tuple(options["search_step"]),
        "logit_scale": options["logit_scale"],
    }
    adapter = TipAdapter(**shared).fit(support, labels, prototypes)
    close(case, "cache_keys", adapter.keys_, 2e-5)
    assert torch.equal(F.one_hot(adapter.labels_, len(prototypes)).to(dtype), case["out.cache_values"].to(dtype))
    close(case, "val_logits_init", adapter.decision_function(validation[0]), 3e-4)
    zero_shot = TipAdapter(**shared | {"alpha": 0.0}).fit(support, labels, prototypes)
    close(case, "val_logits_zs", zero_shot.decision_function(validation[0]), 3e-4)

    searched = TipAdapter(selection="validation", **shared).fit(support, labels, prototypes, validation=validation)
    case.close("out.best_beta_alpha", torch.tensor([searched.beta_, searched.alpha_], dtype=torch.float64), 1e-12)
    close(case, "test_logits_best", searched.decision_function(test[0]), 3e-4)

    trained = TipAdapterF(
        lr=options["lr"],
        epochs=options["train_epoch"],
        batch_size=options["batch_size_F"],
        weight_decay=options["weight_decayF"],
        eps=options["epsF"],
        betas=tuple(options["betas"]),
        **shared,
    )
    recorded = {"train_features": case["in.trainF_features"].to(dtype), "order": case["in.trainF_order"]}
    trained.fit(support, labels, prototypes, **recorded)
    close(case, "F_keys_final", trained.keys_, 2e-5)
    case.close("out.F_lr_per_step", trained.lr_per_step_, 1e-12)
    losses = "out64.F_loss_per_step" if dtype == torch.float64 else "out.F_loss_per_step"
    case.close(losses, trained.loss_per_step_, 1e-9 if dtype == torch.float64 else 1e-4)
    close(case, "F_test_logits_last_epoch", trained.decision_function(test[0]), 3e-4)
    trained.set_params(selection="published_on_test").fit(support, labels, prototypes, test=test, **recorded)
    case.close("out.F_test_accuracy_per_epoch", 100 * trained.accuracy_per_epoch_, 1e-9)

    # One step of the same schedule: one epoch of one batch has the learning rate of the first step, whatever comes
    # after.
    first = case["in.trainF_order"][:1, : options["batch_size_F"]]
    trained.set_params(selection="none", epochs=1).fit(support, labels, prototypes, **recorded | {"order": first})
    close(case, "F_keys_after_step1", trained.keys_, 2e-5)


@pytest.fixture(scope="module")
def problem():
    """Support (2 passes), validation and test features of 4 classes that zero-shot confuses; raw, float64."""
    rng = torch.Generator().manual_seed(5)

    def randn(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    centres = 2 * randn(4, 12)
    labels = torch.arange(4).repeat(6)
    support = centres[labels] + 1.5 * randn(2, 24, 12)
    sets = [(centres[labels] + 1.5 * randn(24, 12), labels) for _ in range(2)]
    return support, labels, centres + 3 * randn(4, 12), *sets


def test_cache_logits_are_the_equation(problem):
    support, labels, _, (x, _), _ = problem
    keys, x = F.normalize(support[0], dim=1), F.normalize(x, dim=1)
    expected = 1.5 * torch.exp(-3.0 * (1 - x @ keys.T)) @ F.one_hot(labels, 4).double()
    torch.testing.assert_close(cache_logits(x, keys, labels, 4, beta=3.0, alpha=1.5), expected)


@pytest.mark.parametrize("estimator", [TipAdapter(), TipAdapterF(epochs=3, batch_size=10)], ids=repr)
def test_estimator_contract(estimator, problem, tmp_path):
    support, labels, prototypes, validation, (x, _) = problem
    chosen = clone(estimator).set_params(selection="validation", search_step=(5, 4))
    logits = chosen.fit(support, labels, prototypes, validation=validation).decision_function(x)
    again = clone(chosen).fit(support, labels, prototypes, validation=validation)
    assert torch.equal(again.decision_function(x), logits)
    loaded = type(chosen).load(chosen.save(tmp_path / "tip"))
    assert torch.equal(loaded.decision_function(x), logits)
    assert loaded.selection_ == "validation" and (loaded.beta_, loaded.alpha_) == (
        chosen.beta_,
        chosen.alpha_,
    )
    assert torch.allclose(loaded.decision_function(3 * x), logits), "raw features are normalised"


def test_search_takes_the_first_best_pair(problem):
    support, labels, prototypes, (x, y), _ = problem
    adapter = TipAdapter(selection="validation", search_scale=(9.0, 6.0), search_step=(6, 5))
    adapter.fit(support, labels, prototypes, validation=(x, y))
    best, pair = -1.0, None
    for i in range(6):
        for j in range(5):
            beta, alpha = 0.1 + i * (9.0 - 0.1) / 6, 0.1 + j * (6.0 - 0.1) / 5
            accuracy = TipAdapter(beta=beta, alpha=alpha).fit(support, labels, prototypes).score(x, y)
            if accuracy > best:
                best, pair = accuracy, (beta, alpha)
    assert (adapter.beta_, adapter.alpha_) == pytest.approx(pair, abs=1e-12)
    assert adapter.score(x, y) == best


def test_nothing_is_selected_on_test_unless_named(problem):
    support, labels, prototypes, validation, test = problem
    wrong = (test[0], (test[1] + 1) % 4)
    for selection in ("none", "validation"):
        fits = [
            TipAdapterF(epochs=4, batch_size=8, lr=0.05, selection=selection, search_step=(8, 8)).fit(
                support, labels, prototypes, validation=validation, test=given
            )
            for given in (None, wrong)
        ]
        assert torch.equal(fits[0].keys_, fits[1].keys_)
        assert (fits[0].beta_, fits[0].alpha_) == (fits[1].beta_, fits[1].alpha_)


def test_published_selection_keeps_the_best_epoch_and_the_better_of_two_settings(problem):
    support, labels, prototypes, validation, test = problem
    options = {"epochs": 6, "batch_size": 8, "lr": 0.2, "search_step": (8, 8), "alpha": 3.0}
    published = TipAdapterF(selection="published_on_test", **options)
    published.fit(support, labels, prototypes, validation=validation, test=test)
    assert published.score(*test) >= published.accuracy_per_epoch_.max().item()
    epoch = int(published.accuracy_per_epoch_.argmax())
    last = TipAdapterF(**options).fit(support, labels, prototypes)
    assert torch.equal(published.keys_, last.keys_) == (epoch == 5)


def test_training_without_new_augmentations_uses_the_passes_in_turn(problem):
    support, labels, prototypes, *_ = problem
    options = {"epochs": 4, "batch_size": 10}
    cycled = TipAdapterF(**options).fit(support, labels, prototypes)
    given = TipAdapterF(**options).fit(support, labels, prototypes, train_features=support[[0, 1, 0, 1]])
    assert torch.equal(cycled.keys_, given.keys_)
    assert len(cycled.loss_per_step_) == 4 * 3
    full_batch = TipAdapterF(epochs=20, lr=0.05).fit(support[0], labels, prototypes)
    assert full_batch.loss_per_step_[-1] < full_batch.loss_per_step_[0]
    raw = TipAdapterF(epochs=2, affinity="raw", beta=0.1).fit(support[0], labels, prototypes)
    first = TipAdapter(affinity="raw", beta=0.1).fit(support[0], labels, prototypes)
    loss = F.cross_entropy(first.decision_function(support[0]), labels)
    torch.testing.assert_close(raw.loss_per_step_[0], loss)


def test_a_row_is_scored_the_same_whatever_is_beside_it(problem):
    """Half-precision features are of unit norm to 1e-3 and stay as they are, beside raw ones too."""
    support, labels, prototypes, (x, _), _ = problem
    adapter = TipAdapter().fit(support, labels, prototypes)
    nearly_unit = 1.005 * F.normalize(x, dim=1)
    mixed = torch.cat([nearly_unit, 3 * x])
    alone = torch.cat([adapter.decision_function(nearly_unit), adapter.decision_function(3 * x)])
    torch.testing.assert_close(adapter.decision_function(mixed), alone, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", [torch.asarray, torch.Tensor.numpy])
def test_scikit_learn_searches_it(problem, kind):
    support, labels, prototypes, *_ = problem
    x, y, w = map(kind, (support[0], labels, prototypes))
    search = GridSearchCV(TipAdapter(), {"alpha": [0.5, 2.0]}, cv=2, scoring="accuracy", error_score="raise")
    search.fit(x, y, prototypes=w)
    best = search.best_estimator_
    assert best.score(x, y) == search.score(x, y) and search.classes_.tolist() == [0, 1, 2, 3]
    assert best.predict_proba(x).shape == (24, 4)


def test_scikit_learn_leaves_prototypes_with_a_leading_dimension_whole(problem):
    """As many prototypes as images: as a matrix they would be split among the folds."""
    support, labels, prototypes, *_ = problem
    many = torch.cat([prototypes, prototypes.repeat(5, 1) + 0.5])
    assert len(many) == len(labels)
    seen = []

    class Recorded(TipAdapter):
        def fit(self, features, labels, prototypes):
            seen.append(tuple(prototypes.shape))
            return super().fit(features, labels, prototypes)

    cross_val_score(Recorded(), support[0], labels, cv=2, params={"prototypes": many[None]}, error_score="raise")
    assert seen == [(1, 24, 12)] * 2
    matrix = TipAdapter().fit(support, labels, many).decision_function(support[0])
    assert torch.equal(TipAdapter().fit(support, labels, many[None]).decision_function(support[0]), matrix)


def test_what_is_fitted_is_its_own(problem):
    support, labels, prototypes, *_ = problem
    given = [support[0].clone(), labels.clone(), F.normalize(prototypes, dim=1)]
    adapter = TipAdapter().fit(*given)
    logits = adapter.decision_function(support[0])
    for tensor in given:
        tensor.zero_()
    assert torch.equal(adapter.decision_function(support[0]), logits)


def test_a_new_fit_forgets_the_last_one_and_a_refused_one_does_not(problem):
    support, labels, prototypes, validation, _ = problem
    adapter = TipAdapterF(epochs=2, selection="validation", search_step=(3, 2))
    adapter.fit(support, labels, prototypes, validation=validation)
    before = adapter.keys_
    for options, arguments in (({"batch_size": 0}, {}), ({}, {"train_features": support[:, :5]})):
        with pytest.raises(ValueError):
            adapter.set_params(**options).fit(support, labels, prototypes, validation=validation, **arguments)
        assert adapter.keys_ is before
        adapter.set_params(batch_size=256)
    adapter.set_params(selection="none").fit(support, labels, prototypes)
    assert not hasattr(adapter, "accuracy_per_epoch_")


def test_tuples_stay_tuples(problem, tmp_path):
    adapter = TipAdapterF(epochs=1, search_scale=(9.0, 2.0), search_step=[3, 2]).fit(*problem[:3])
    params = TipAdapterF.load(adapter.save(tmp_path / "tip")).get_params()
    assert params == adapter.get_params()


def test_published_settings_cover_the_eleven_datasets():
    assert len(PUBLISHED) == 11
    assert TipAdapter(**published_settings("flowers102")).alpha == 10
    listed = methods.available()["tip_adapter"]
    assert listed.function is TipAdapter and listed.inputs == "few-shot" and listed.options["beta"] == 1


def test_bad_inputs_are_named(problem):
    support, labels, prototypes, *_ = problem
    for options, word in (
        ({"selection": "validation"}, "validation="),
        ({"selection": "published_on_test"}, "test="),
        ({"selection": "test"}, "published_on_test"),
        ({"affinity": "dot"}, "affinity"),
        ({"search_scale": (7.0,)}, "search_scale must be two numbers"),
        ({"search_scale": (7.0, float("inf"))}, "search_scale"),
        ({"search_step": 5}, "search_step must be two numbers"),
        ({"search_step": (0, 3)}, "search_step"),
        ({"search_step": (2.5, 3)}, "search_step must be an integer"),
    ):
        for estimator in (TipAdapter, TipAdapterF):
            with pytest.raises(ValueError, match=word):
                estimator(**options).fit(support, labels, prototypes)
    with pytest.raises(ValueError, match="train_features"):
        TipAdapterF(epochs=1).fit(support, labels, prototypes, train_features=support[:, :5])
    for options, word in (({"epochs": 0}, "epochs"), ({"batch_size": 0}, "batch_size"), ({"betas": (0.9,)}, "betas")):
        with pytest.raises(ValueError, match=word):
            TipAdapterF(**options).fit(support, labels, prototypes)
    with pytest.raises(ValueError, match="order must have a row for each of 2 epochs"):
        TipAdapterF(epochs=2).fit(support, labels, prototypes, order=torch.arange(24)[None])
    x, y = support[0], labels
    for given, message in (
        ((x, y[:1]), "validation: labels must be 24 class indices"),
        ((x[:, 1:], y), "validation: features must be"),
        ((0 * x, y), "validation: 24 of 24 rows of features"),
        (x, "validation must be a pair"),
    ):
        for estimator in (TipAdapter, TipAdapterF):
            unfitted = estimator(selection="validation")
            with pytest.raises(ValueError, match=message):
                unfitted.fit(support, labels, prototypes, validation=given)
            assert not hasattr(unfitted, "keys_")
    fitted = TipAdapter().fit(support, labels, prototypes)
    for value in (0.0, float("nan"), float("inf")):
        broken = x.clone()
        broken[3] = value
        with pytest.raises(ValueError, match="1 of 24 rows of features are NaN, infinite or zero"):
            fitted.decision_function(broken)
        with pytest.raises(ValueError, match="1 of 24 rows of features are NaN, infinite or zero"):
            TipAdapter().fit(broken, labels, prototypes)
        with pytest.raises(ValueError, match="rows of train_features are NaN"):
            TipAdapterF(epochs=1).fit(support, labels, prototypes, train_features=broken[None])
    with pytest.raises(ValueError, match="24 of 24 rows of features averaged over the passes"):
        TipAdapter().fit(torch.stack([x, -x]), labels, prototypes)
    with pytest.raises(ValueError, match="dtd"):
        published_settings("mnist")

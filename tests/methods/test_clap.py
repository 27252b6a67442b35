"""CLAP, the probes and the adapters of its code, against golden vectors and as estimators."""

import importlib.util
import json
import math
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sklearn.base import clone, is_classifier
from sklearn.model_selection import GridSearchCV, cross_val_score

from orion_hf import methods
from orion_hf.methods import estimator as estimator_module
from orion_hf.methods.clap import (
    CLAP,
    CLIPAdapter,
    LinearProbe,
    TaskRes,
    ZeroShotLinearProbe,
    class_multipliers,
    cosine_logits,
    zero_shot_penalty,
)
from orion_hf.methods.tip_adapter import TipAdapter

LEARNT = {"ZS": "weights_", "RANDOM": "weights_", "TR": "residual_", "ClipA": "weights_"}


def estimator_of(options: dict):
    """The estimator of a golden file's hyper-parameters."""
    shared = {
        "lr": options["lr"],
        "momentum": options["momentum"],
        "weight_decay": options["weight_decay"],
        "epochs": options["max_epoch"],
        "batch_size": options["batch_size"],
        "batches_per_epoch": options["batches_per_epoch"],
        "warmup_epochs": options["warmup_epoch"],
        "warmup_lr": options["warmup_lr"],
        "logit_scale": options["logit_scale"],
    }
    if options["init"] == "TR":
        return TaskRes(alpha=options["taskres_alpha"], **shared)
    if options["init"] == "ClipA":
        return CLIPAdapter(ratio=options["clip_adapter_ratio"], **shared)
    if options["init"] == "RANDOM":
        return LinearProbe(**shared)
    assert options["init"] == "ZS"
    constraint = options["constraint"]
    return ZeroShotLinearProbe(**shared) if constraint == "none" else CLAP(constraint=constraint, **shared)


@pytest.mark.golden("clap_")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_golden(case, dtype):
    {"clap": check_training, "clap_multipliers": check_multipliers, "clap_tipa": check_tip_adapter_branch}[
        case.options["method"]
    ](case, dtype)


def close(case, name, value, float32_tolerance):
    """Float64 against ``out64`` where the file has it, float32 against ``out``."""
    if value.dtype == torch.float64 and f"out64.{name}" in case.tensors:
        case.close(f"out64.{name}", value, 1e-9)
    else:
        case.close(f"out.{name}", value, float32_tolerance)


def check_training(case, dtype):
    support, labels = case["in.support_features"].to(dtype), case["in.support_labels"]
    prototypes, test = case["in.text_prototypes"].to(dtype), case["in.test_features"].to(dtype)
    scale, shuffle = case.options["logit_scale"], case["in.shuffle"]
    names = {"in.initial_weights": "weights", "in.mlp_down": "mlp_down", "in.mlp_up": "mlp_up"}
    initial = {names[name]: value for name, value in case.tensors.items() if name in names}
    estimator = estimator_of(case.options).fit(support, labels, prototypes, shuffle=shuffle, initial=initial)

    if case.options["init"] != "RANDOM":
        close(case, "zs_support_logits", cosine_logits(support, prototypes, scale), 3e-4)
        close(case, "zs_test_logits", cosine_logits(test, prototypes, scale), 3e-4)
    case.close("out.lr_per_step", estimator.lr_per_step_, 1e-15)
    loss_name = "out64.loss_per_step" if dtype == torch.float64 else "out.loss_per_step"
    case.close(loss_name, estimator.loss_per_step_, 1e-9 if dtype == torch.float64 else 1e-4)
    close(case, "weights_final", getattr(estimator, LEARNT[case.options["init"]]), 2e-5)
    close(case, "test_logits_final", estimator.decision_function(test), 3e-4)
    for name, tolerance in {"multipliers": 2e-5, "multipliers_after_epoch": 2e-5}.items():
        if f"out.{name}" in case.tensors:
            close(case, name, getattr(estimator, f"{name}_"), tolerance)
    for name in ("mlp_down", "mlp_up"):
        if f"out.{name}_final" in case.tensors:
            close(case, f"{name}_final", getattr(estimator, f"{name}_"), 2e-5)

    two_steps = math.ceil(2 / case.options["batches_per_epoch"])
    if two_steps * case.options["batches_per_epoch"] == 2:
        estimator.fit(support, labels, prototypes, shuffle=shuffle[:two_steps], initial=initial)
        close(case, "weights_after_step2", getattr(estimator, LEARNT[case.options["init"]]), 2e-5)


def check_multipliers(case, dtype):
    support, labels = case["in.support_features"].to(dtype), case["in.support_labels"]
    prototypes, weights = case["in.text_prototypes"].to(dtype), case["in.perturbed_weights"].to(dtype)
    variants = [name.removeprefix("out.multipliers_") for name in case.tensors if "out.multipliers_" in name]
    assert variants
    for variant in variants:
        multipliers = class_multipliers(support, labels, prototypes, case.options["logit_scale"], variant)
        close(case, f"multipliers_{variant}", multipliers, 2e-5)
        close(case, f"penalty_{variant}", zero_shot_penalty(weights, prototypes, multipliers, variant), 1e-4)


def check_tip_adapter_branch(case, dtype):
    options = {name: case.options[name] for name in ("alpha", "beta", "logit_scale")}
    adapter = TipAdapter(affinity="raw", **options)
    adapter.fit(case["in.support_features"].to(dtype), case["in.support_labels"], case["in.text_prototypes"].to(dtype))
    close(case, "test_logits", adapter.decision_function(case["in.test_features"].to(dtype)), 3e-4)


ESTIMATORS = [
    ZeroShotLinearProbe(epochs=4),
    LinearProbe(epochs=4, weight_decay=0.01),
    TaskRes(epochs=4, weight_decay=0.01),
    CLIPAdapter(epochs=4, weight_decay=0.01),
    CLAP(epochs=4),
    CLAP(epochs=4, constraint="l2-corrected-adaptative"),
    CLAP(epochs=4, constraint="cosine-adaptative", weight_decay=0.01),
    CLAP(epochs=4, constraint="cosine-constant"),
]


def short_name(estimator) -> str:
    return " ".join([type(estimator).__name__, estimator.get_params().get("constraint", "")]).strip()


@pytest.fixture(scope="module")
def support():
    """Three passes over 40 images of 5 classes, raw features, raw prototypes; float64."""
    torch.manual_seed(0)
    labels = torch.arange(5).repeat(8)
    prototypes = 3 * torch.randn(5, 16, dtype=torch.float64)
    features = 2 * prototypes[labels] + 4 * torch.randn(3, 40, 16, dtype=torch.float64)
    return features, labels, prototypes


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=short_name)
def test_written_out_gradient_is_the_one_of_autograd(estimator, support):
    """Replay the training with torch.optim.SGD and automatic differentiation."""
    features, labels, prototypes = support
    pool, pool_labels = features.flatten(0, 1), labels.repeat(3)
    shuffle = torch.stack([torch.randperm(120) for _ in range(4)])
    estimator = clone(estimator).set_params(batch_size=16, logit_scale=20.0, batches_per_epoch=3)
    torch.manual_seed(1)
    start = {
        ZeroShotLinearProbe: {"weights": prototypes},
        CLAP: {"weights": prototypes + 0.1 * torch.randn_like(prototypes)},
        LinearProbe: {"weights": torch.randn_like(prototypes)},
        TaskRes: {"residual": torch.randn_like(prototypes)},
        CLIPAdapter: {
            name: torch.randn(s, dtype=torch.float64) for name, s in (("mlp_down", (4, 16)), ("mlp_up", (16, 4)))
        },
    }[type(estimator)]
    estimator.fit(features, labels, prototypes, shuffle=shuffle, initial=start)

    learnt = {name: value.clone().requires_grad_() for name, value in start.items()}
    sgd = torch.optim.SGD(learnt.values(), lr=1.0, momentum=0.9, weight_decay=estimator.weight_decay)
    constraint = estimator.get_params().get("constraint")
    multipliers = constraint and class_multipliers(pool, pool_labels, prototypes, 20.0, constraint)
    rho, losses = torch.zeros(5), []
    for epoch in range(4):
        for batch in shuffle[epoch, :48].split(16):
            sgd.param_groups[0]["lr"] = 1e-5 if epoch == 0 else 0.05 * (1 + math.cos(math.pi * (epoch - 1) / 4))
            x, weights = pool[batch], learnt.get("weights", prototypes)
            if isinstance(estimator, TaskRes):
                weights = prototypes + 0.5 * learnt["residual"]
            if isinstance(estimator, CLIPAdapter):
                x = 0.2 * torch.relu(torch.relu(x @ learnt["mlp_down"].T) @ learnt["mlp_up"].T) + 0.8 * x
            loss = torch.nn.functional.cross_entropy(cosine_logits(x, weights, 20.0), pool_labels[batch])
            if constraint:
                loss = loss + zero_shot_penalty(weights, prototypes, multipliers, constraint)
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            losses.append(loss.detach())
        if constraint and "adaptative" in constraint:
            moved = (learnt["weights"].detach() - prototypes).square().sum(1)
            multipliers, rho = (multipliers + rho * moved).clamp(min=0), moved
    torch.testing.assert_close(estimator.loss_per_step_, torch.stack(losses), rtol=0, atol=1e-11)
    for name, value in learnt.items():
        torch.testing.assert_close(getattr(estimator, f"{name}_"), value.detach(), rtol=0, atol=1e-11)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=short_name)
def test_estimator_contract(estimator, support, tmp_path):
    features, labels, prototypes = support
    copy = clone(estimator).set_params(random_state=3)
    assert copy.get_params() == estimator.get_params() | {"random_state": 3}
    first = copy.fit(features, labels, prototypes)
    logits = first.decision_function(features[0])
    assert logits.dtype == torch.float64 and logits.shape == (40, 5)
    assert torch.equal(logits, clone(copy).fit(features, labels, prototypes).decision_function(features[0]))
    other = clone(copy).set_params(random_state=4, batch_size=16).fit(features, labels, prototypes)
    assert not torch.equal(logits, other.decision_function(features[0]))

    loaded = type(copy).load(first.save(tmp_path / "adapter"))
    assert loaded.get_params() == copy.get_params()
    assert torch.equal(loaded.decision_function(features[0]), logits)
    assert torch.equal(loaded.predict(features[0]), logits.argmax(1))
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "estimator.json",
        "estimator.safetensors",
    ]


def test_training_helps_and_clap_stays_closer(support):
    features, labels, prototypes = support
    prototypes = prototypes + 4 * torch.randn(5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    zero_shot = (cosine_logits(features[0], prototypes).argmax(1) == labels).double().mean()
    probe = ZeroShotLinearProbe(epochs=60).fit(features, labels, prototypes)
    clap = CLAP(epochs=60).fit(features, labels, prototypes)
    assert probe.score(features[0], labels) > zero_shot
    assert (clap.weights_ - prototypes).norm() < (probe.weights_ - prototypes).norm()


def test_batches_an_epoch_are_those_of_the_images_not_of_the_passes(support):
    steps = {
        size: len(ZeroShotLinearProbe(epochs=2, batch_size=size).fit(*support).loss_per_step_) for size in (16, 64)
    }
    assert steps == {16: 2 * (40 // 16), 64: 2}


def test_half_precision_is_raised_and_classes_without_images_are_held():
    prototypes = torch.eye(4, 8)
    features, labels = prototypes[:3].half(), torch.arange(3)
    probe = CLAP(epochs=2).fit(features, labels, prototypes.half())
    assert probe.weights_.dtype == torch.float32
    assert probe.multipliers_[3] == 1


@pytest.mark.parametrize("kind", [torch.asarray, torch.Tensor.numpy])
def test_scikit_learn_searches_it(support, kind):
    features, labels, prototypes = map(kind, (support[0][0], support[1], support[2]))
    for scoring in (None, "accuracy", "neg_log_loss"):
        search = GridSearchCV(CLAP(epochs=2), {"lr": [0.01, 0.1]}, cv=2, scoring=scoring, error_score="raise")
        search.fit(features, labels, prototypes=prototypes)
        assert search.best_params_["lr"] in (0.01, 0.1) and np.isfinite(search.best_score_)
    assert is_classifier(search.best_estimator_) and search.classes_.tolist() == [0, 1, 2, 3, 4]
    scores = cross_val_score(CLAP(epochs=2), features, labels, cv=2, params={"prototypes": prototypes[None]})
    assert np.isfinite(scores).all()
    sizes = GridSearchCV(CLAP(epochs=1), {"batch_size": np.array([4, 8])}, cv=2, error_score="raise")
    assert sizes.fit(features, labels, prototypes=prototypes).best_params_["batch_size"] in (4, 8)


def test_classes_are_there_once_fitted_and_scikit_learn_is_not_needed(support, monkeypatch):
    assert not hasattr(CLAP(), "classes_")
    fitted = CLAP(epochs=1).fit(*support)
    assert fitted.classes_.tolist() == [0, 1, 2, 3, 4] and "classes_" not in vars(fitted)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    spec = importlib.util.spec_from_file_location("orion_hf.methods.again", estimator_module.__file__)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    fitted.predict(support[0][0])


def test_what_is_fitted_is_its_own(support):
    for estimator in (CLIPAdapter(epochs=1), ZeroShotLinearProbe(epochs=1)):
        given = [tensor.clone() for tensor in support]
        logits = estimator.fit(*given).decision_function(support[0][0])
        for tensor in given:
            tensor.zero_()
        assert torch.equal(estimator.decision_function(support[0][0]), logits)


def test_a_new_fit_forgets_the_last_one(support):
    estimator = CLAP(epochs=2, constraint="l2-adaptative").fit(*support)
    assert hasattr(estimator, "multipliers_after_epoch_")
    estimator.set_params(constraint="l2").fit(*support)
    assert not hasattr(estimator, "multipliers_after_epoch_")


def test_methods_list_it_as_few_shot():
    listed = methods.available()["clap"]
    assert listed.function is CLAP and listed.inputs == "few-shot"
    assert listed.options["constraint"] == "l2" and listed.options["lr"] == 0.1 and listed.options["epochs"] == 300


def test_bad_inputs_are_named(support, tmp_path):
    features, labels, prototypes = support
    for arguments, word in (
        ((features, labels[:-1], prototypes), "labels"),
        ((features, labels + 1, prototypes), "prototypes"),
        ((features, labels.double(), prototypes), "labels"),
        ((features[0, 0], labels, prototypes), "features"),
        ((features.long(), labels, prototypes), "features"),
        ((features, labels, prototypes[:, :-1]), "prototypes"),
        ((features, labels, prototypes.long()), "prototypes"),
        ((features, labels, torch.tensor(1.0)), "prototypes"),
        ((features[:0], labels, prototypes), r"features must be .* not empty, got \(0, 40, 16\)"),
        ((features[:, :0], labels[:0], prototypes), "features"),
    ):
        with pytest.raises(ValueError, match=word):
            CLAP(epochs=1).fit(*arguments)
    with pytest.raises(ValueError, match="shuffle"):
        CLAP(epochs=1).fit(*support, shuffle=torch.arange(40)[None])
    with pytest.raises(ValueError, match="does not learn"):
        CLAP(epochs=1).fit(*support, initial={"residual": prototypes})
    with pytest.raises(ValueError, match=r"initial\['weights'\]"):
        CLAP(epochs=1).fit(*support, initial={"weights": prototypes[:2]})
    for options, message in (
        ({"epochs": 0}, "epochs must be an integer of at least 1, not 0"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, not 0"),
        ({"batch_size": 2.5}, "batch_size"),
        ({"batches_per_epoch": 0}, "batches_per_epoch"),
        ({"warmup_epochs": -1}, "warmup_epochs"),
        ({"lr": float("nan")}, "lr must be at least 0"),
        ({"logit_scale": 0.0}, "logit_scale"),
        ({"random_state": "one"}, "random_state"),
    ):
        with pytest.raises(ValueError, match=message):
            CLAP(**{"epochs": 1} | options).fit(*support)
    for shuffle in (torch.arange(120), torch.zeros(0, 120).long(), torch.arange(120)[None] + 1):
        with pytest.raises(ValueError, match="shuffle"):
            CLAP(epochs=1).fit(*support, shuffle=shuffle)
    for constraint in ("l3", "l2-cosine", "constant", "none"):
        with pytest.raises(ValueError, match="constraint"):
            CLAP(epochs=1, constraint=constraint).fit(*support)
    with pytest.raises(ValueError, match="no option 'learning_rate'"):
        CLAP().set_params(learning_rate=1)
    with pytest.raises(TypeError):
        CLAP(learning_rate=1)
    with pytest.raises(ValueError, match="fit"):
        CLAP().predict(features[0])
    fitted = CLAP(epochs=1).fit(*support)
    with pytest.raises(ValueError, match="features"):
        fitted.predict(features[0, :, :-1])
    for wrong in (labels[:1], labels[:-1], labels[None], labels.double()):
        with pytest.raises(ValueError, match="labels must be 40 class indices"):
            fitted.score(features[0], wrong)
    assert fitted.predict(features[0, :0]).shape == (0,)
    with pytest.raises(ValueError, match="no features to score"):
        fitted.score(features[0, :0], labels[:0])
    with pytest.raises(FileNotFoundError, match=r"estimator\.json"):
        CLAP.load(tmp_path)
    with pytest.raises(ValueError, match="CLAP"):
        TaskRes.load(fitted.save(tmp_path / "clap"))


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("estimator", [ZeroShotLinearProbe, LinearProbe, TaskRes, CLIPAdapter, CLAP])
def test_rows_without_a_direction_are_counted(estimator, value, support):
    features, labels, prototypes = support
    broken = [tensor.clone() for tensor in (features, prototypes)]
    broken[0][1, 2:5] = value
    broken[1][3] = value
    with pytest.raises(ValueError, match="3 of 120 rows of features are NaN, infinite or zero"):
        estimator(epochs=1).fit(broken[0], labels, prototypes)
    with pytest.raises(ValueError, match="1 of 5 rows of prototypes are NaN, infinite or zero"):
        estimator(epochs=1).fit(features, labels, broken[1])
    fitted = estimator(epochs=1).fit(features, labels, prototypes)
    with pytest.raises(ValueError, match="3 of 40 rows of features are NaN, infinite or zero"):
        fitted.predict(broken[0][1])


def test_numbers_of_numpy_are_saved_and_a_refused_save_writes_nothing(support, tmp_path):
    numbers = {"lr": np.float64(0.2), "epochs": np.int64(2), "random_state": np.int32(1), "batch_size": np.int64(8)}
    fitted = CLAP(**numbers).fit(*support)
    loaded = CLAP.load(fitted.save(tmp_path / "clap"))
    assert loaded.get_params() == fitted.get_params() and type(loaded.lr) is float and type(loaded.epochs) is int

    files = {path.name: path.read_bytes() for path in (tmp_path / "clap").iterdir()}
    for value in (object(), math.nan):
        for folder in ("clap", "new"):
            with pytest.raises(ValueError, match=r"momentum=.* cannot be saved"):
                fitted.set_params(momentum=value).save(tmp_path / folder)
    assert {path.name: path.read_bytes() for path in (tmp_path / "clap").iterdir()} == files
    assert not (tmp_path / "new").exists()


def test_a_save_that_fails_on_the_way_leaves_what_was_there(support, tmp_path, monkeypatch):
    folder = CLAP(epochs=1).fit(*support).save(tmp_path / "clap")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(tensors, path):
        raise OSError("No space left on device")

    monkeypatch.setattr(estimator_module, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        CLAP(epochs=2).fit(*support).save(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


def test_damaged_files_are_named(support, tmp_path):
    folder = CLAP(epochs=1).fit(*support).save(tmp_path / "clap")
    path, tensors = folder / "estimator.json", load_file(folder / "estimator.safetensors")
    record = json.loads(path.read_text())
    texts = ["[]", "{", "[" * 100_000, "{}", b"\xff"]
    for change in (
        {"estimator": "Nothing"},
        {"format_version": 99},
        {"params": None},
        {"fitted": []},
        {"tuples": 3},
        {"params": {"no_such": 1}},
        {"fitted": {"predict": 1}},
        {"fitted": {"classes_": 1}},
        {"fitted": {"_check_fitted": 1}},
    ):
        texts.append(json.dumps(record | change))
    for key in ("params", "fitted"):
        texts.append(json.dumps({name: value for name, value in record.items() if name != key}))
    for text in texts:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(ValueError, match=r"estimator\.json"):
            CLAP.load(folder)
    path.write_text(json.dumps(record))
    CLAP.load(folder)
    weights = folder / "estimator.safetensors"
    save_file({name: value for name, value in tensors.items() if name != "weights_"}, weights)
    with pytest.raises(ValueError, match=r"estimator\.json: 'weights_' is missing"):
        CLAP.load(folder)
    save_file(tensors | {"predict": torch.ones(1)}, weights)
    with pytest.raises(ValueError, match="'predict' is no fitted attribute"):
        CLAP.load(folder)
    weights.write_bytes(weights.read_bytes()[:50])
    with pytest.raises(ValueError, match=r"estimator\.safetensors: missing, cut or no safetensors file"):
        CLAP.load(folder)
    weights.unlink()
    with pytest.raises(ValueError, match=r"estimator\.safetensors: missing, cut or no safetensors file"):
        CLAP.load(folder)

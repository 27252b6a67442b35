"""Every figure at several sizes: text inside the canvas, no two texts over each other, the right numbers."""

import itertools
import warnings

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.text import Text
from torch.nn import functional as F

from orion_hf import plots

SIZES = (2, 10, 100, 1000)
ODD_NAMES = [
    "a $5 bill",
    "$x_1$ and \\frac{",
    "snake_case_name",
    "日本語の名前",
    "🐈‍⬛ cat",
    "قطة",
    "Größe ÅØ Ж λ",
    "two\nlines\tand a tab",
    "the quick brown fox jumps over the lazy dog, and the dog does not mind at all",
    "",
    "\x00\x1b[31mred",
    "100 % {braces} ^caret & <b>",
]


def prototypes(num_classes: int, seed: int = 0, dim: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """V with groups of five similar classes in a narrow cone, and X, a little wider."""
    generator = torch.Generator().manual_seed(seed)
    groups = torch.randn(max(1, num_classes // 5), dim, generator=generator)
    own = torch.randn(num_classes, dim, generator=generator)
    v = F.normalize(1.5 + groups[torch.arange(num_classes) % len(groups)] + 0.6 * own, dim=-1)
    x = F.normalize(v - 0.4 * v.mean(0) + 0.02 * torch.rand(num_classes, 1, generator=generator) * own, dim=-1)
    return v, x


def images(v: torch.Tensor, count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(v), (count,), generator=generator)
    return v[labels] - v.mean(0) + 0.05 * torch.randn(count, v.shape[1], generator=generator), labels


def names(num_classes: int) -> list[str]:
    return [f"class number {k} of {'many ' * (k % 4)}sorts" for k in range(num_classes)]


def log_rows(epochs: int, steps: int = 2) -> list[dict]:
    return [
        {
            "step": step + 1,
            "epoch": step // steps + 1,
            "loss": 9.0,
            "fidelity": 1e-3 * step,
            "orthogonality": 40.0 / (1 + step),
            "mean_cosine": 0.7 - 0.3 * step / (epochs * steps),
            "max_cosine": 0.95 - 0.1 * step / (epochs * steps),
            "displacement": 0.25 * step / (epochs * steps),
            "accuracy": 40 + 10 * np.sin(3 * step / (epochs * steps)),
        }
        for step in range(epochs * steps)
    ]


def drawn_texts(figure) -> list[tuple[str, np.ndarray]]:
    """What the renderer really wrote, and the box of each in pixels."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        draw = Text.draw

        def spy(text, renderer, *args, **kwargs):
            if text.get_visible() and text.get_text().strip():
                found.append((text.get_text(), Text.get_window_extent(text, renderer).extents))
            return draw(text, renderer, *args, **kwargs)

        patch.setattr(Text, "draw", spy)
        figure.canvas.draw()
    return found


def check(figure) -> list[str]:
    """The texts of a figure, after checking where they are and that drawing warns of nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        texts = drawn_texts(figure)
    assert texts
    width, height = figure.canvas.get_width_height()
    for text, (left, bottom, right, top) in texts:
        assert left >= 0 and bottom >= 0 and right <= width and top <= height, f"{text!r} leaves the canvas"
    for (text, a), (other, b) in itertools.combinations(texts, 2):
        apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
        assert apart, f"{text!r} lies over {other!r}"
    return [text for text, _ in texts]


# Layout


@pytest.mark.parametrize(("x", "y"), [(0.51, 0.5), (0.99, 0.9), (0.2, -0.01)])
def test_the_check_itself_sees_bad_layouts(x, y):
    figure = plots._new_figure(4.0)
    figure.text(0.5, 0.5, "something")
    check(figure)
    figure.text(x, y, "something else")
    with pytest.raises(AssertionError, match=r"lies over|leaves the canvas"):
        check(figure)


@pytest.mark.parametrize("num_classes", SIZES)
def test_gram_heatmaps_layout(num_classes):
    texts = check(plots.gram_heatmaps(*prototypes(num_classes), names(num_classes)))
    named = sum(text.startswith("class number") for text in texts)
    assert named == num_classes if num_classes <= 40 else 20 <= named <= 40


@pytest.mark.parametrize("num_classes", SIZES)
def test_prototype_map_layout(num_classes):
    v, x = prototypes(num_classes)
    method = "tsne" if num_classes <= 10 else "pca"
    texts = check(plots.prototype_map(*images(v, 80), v, x, names(num_classes), method=method))
    named = sum(text.startswith("class number") for text in texts)
    assert named == num_classes if num_classes <= 10 else 10 <= named <= 30


@pytest.mark.parametrize("num_classes", SIZES)
def test_displacement_chart_layout(num_classes):
    texts = check(plots.displacement_chart(*prototypes(num_classes), names(num_classes)))
    pairs = [text for text in texts if " / " in text]
    assert len(pairs) == min(15, num_classes * (num_classes - 1) // 2)
    assert len([text for text in texts if text.startswith("class numb") and text not in pairs]) == min(40, num_classes)


@pytest.mark.parametrize("num_methods", [1, 4, 13])
def test_method_bars_layout(num_methods):
    results = {
        f"method {'with a long name ' * (k % 4)}{k}": dict(
            zip(plots.VARIANTS, (60 + k, 61 + k, 72.4 - 2 * k), strict=True)
        )
        for k in range(num_methods)
    }
    assert len(check(plots.method_bars(results))) > 5 * num_methods


@pytest.mark.parametrize("num_weights", [1, 7, 100])
def test_lambda_sweep_layout(num_weights):
    weights = np.logspace(-1, 5, num_weights)
    means = 60 + 5 * np.sin(np.linspace(0, 3, num_weights))
    check(plots.lambda_sweep(weights, means, np.full(num_weights, 0.3), no_orth=59.0))


@pytest.mark.parametrize(
    "values",
    [[0.5], [2, 4, 8, 16], [1e-6, 5e-6, 1e-5, 1e-4], list(range(1, 60)), ["template_mean", "template_sample", "name"]],
)
def test_setting_sweep_layout(values):
    means = 60 + 5 * np.sin(np.linspace(0, 3, len(values)))
    texts = check(plots.setting_sweep("setting", values, means, np.full(len(values), 0.3)))
    shown = [str(value) if isinstance(value, str) else f"{value:g}" for value in values]
    assert shown[0] in texts and (len(values) > 10 or set(shown) <= set(texts))


@pytest.mark.parametrize("epochs", [1, 20, 1000])
def test_training_figures_layout(epochs):
    check(plots.training_curves(log_rows(epochs)))
    check(plots.accuracy_against_displacement(log_rows(epochs)))


def test_any_name_is_drawn_without_warning():
    v, x = prototypes(len(ODD_NAMES))
    texts = check(plots.gram_heatmaps(v, x, ODD_NAMES))
    assert {"a $5 bill", "snake_case_name", "two lines and a tab", "Größe ÅØ Ж λ"} <= set(texts)
    assert any("the quick" in text and "…" in text and len(text) <= 24 for text in texts)
    check(plots.displacement_chart(v, x, ODD_NAMES))
    check(plots.prototype_map(*images(v, 50), v, x, ODD_NAMES, method="pca"))
    check(plots.method_bars({name: {"baseline": 50.0, "ORION": 51.0} for name in ODD_NAMES}))


def test_labels_of_one_spot_do_not_overlap():
    v, _ = prototypes(30)
    same = v[:1].expand(30, -1) + 1e-4 * v  # all prototypes nearly at one point
    far = torch.cat([v, v[:1] + 5])
    labels = torch.arange(31).clamp_max(29)
    assert len(check(plots.prototype_map(far, labels, same, same, names(30), method="pca"))) > 5


# Content


def test_gram_heatmaps_order_and_scale():
    v, x = prototypes(20)
    figure = plots.gram_heatmaps(v, x, [str(k) for k in range(20)])
    before, after = (axes.images[0] for axes in figure.axes[:2])
    order = [int(label.get_text()) for label in figure.axes[0].get_yticklabels()]
    assert sorted(order) == list(range(20))
    groups = [k % 4 for k in order]
    assert len(list(itertools.groupby(groups))) == 4  # the classes of a group are side by side
    expected = (v @ v.T)[order][:, order].numpy()
    np.fill_diagonal(expected, np.nan)
    np.testing.assert_allclose(before.get_array().filled(np.nan), expected, atol=1e-6)
    assert before.get_clim() == after.get_clim()
    low, high = before.get_clim()
    assert low == -high == pytest.approx(-np.nanmax(expected))


def test_displacement_chart_tells_the_story():
    v = F.normalize(torch.tensor([[1.0, 0.1, 0.0], [1.0, -0.1, 0.0], [0.0, 0.0, 1.0]]), dim=-1)
    x = torch.tensor([[1.0, 0.1, 0.0], [0.0, -1.0, 0.0], [0.0, 0.0, 5.0]])  # rows need not be unit
    figure = plots.displacement_chart(v, x, ["crop land", "pasture land", "forest"])
    left, right = figure.axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["pasture land", "crop land", "forest"]
    widths = [bar.get_width() for bar in left.patches]
    np.testing.assert_allclose(widths, [(v[1] - torch.tensor([0.0, -1.0, 0.0])).norm(), 0, 0], atol=1e-6)
    assert right.get_yticklabels()[0].get_text() == "crop land / pasture land"
    assert len(right.get_yticklabels()) == 1  # the other pairs stayed as they were
    cosine_after = -0.1 / np.sqrt(1.01)
    np.testing.assert_allclose(right.lines[0].get_xdata(), [(1 - 0.01) / 1.01, cosine_after], atol=1e-6)
    assert "no pair moved apart" in check(plots.displacement_chart(v, v, ["a", "b", "c"]))


def test_pairs_are_the_same_in_blocks(monkeypatch):
    v, x = (rows.double() for rows in prototypes(50))
    whole = plots._pairs_moved_apart(v, x)
    fall = (v @ v.T - x @ x.T).triu(1)
    assert [fall[i, j].item() for i, j, *_ in whole] == pytest.approx(fall.flatten().topk(15).values.tolist())
    monkeypatch.setattr(plots, "_BLOCK", 7)
    assert [pair[:2] for pair in plots._pairs_moved_apart(v, x)] == [pair[:2] for pair in whole]


def test_prototype_map_centres_both_modalities():
    """A shift of all images, or of all prototypes, is the gap between modalities and not drawn."""
    v, x = prototypes(6)
    features, labels = images(v, 40)
    figures = [
        plots.prototype_map(shifted, labels, v, x, names(6), method="pca") for shifted in (features, features + 3.0)
    ]
    first, second = (figure.axes[0].collections[0].get_offsets() for figure in figures)
    np.testing.assert_allclose(np.abs(first), np.abs(second), atol=1e-6)


def test_prototype_map_thins_images_and_colours():
    v, x = prototypes(50)
    figure = plots.prototype_map(*images(v, 2500), v, x, names(50), method="pca")
    assert len(figure.axes[0].collections[0].get_offsets()) == 2000
    assert any("2000 of 2500 images, the 30 of 50 classes" in text for text in check(figure))
    few = plots.prototype_map(*images(v[:20], 40), v[:20], x[:20], names(20), method="pca")
    colors = few.axes[0].collections[-1].get_facecolor()
    assert len(np.unique(colors.round(6), axis=0)) == 20


def test_method_bars_gains():
    results = {
        "zero-shot": {"baseline": 63.7, "averaged prompts": 63.2, "ORION": 66.46},
        "MTA": {"ORION": 68.0},
    }
    texts = check(plots.method_bars(results))
    assert {"63.7", "63.2", "66.5", "68.0", "+2.8", "\N{MINUS SIGN}0.5"} <= set(texts)
    assert sum(text.startswith("+") for text in texts) == 1  # no baseline, no gain
    with pytest.raises(ValueError, match="orion"):
        plots.method_bars({"MTA": {"orion": 68.0}})


def test_lambda_sweep_axis_and_no_orth():
    figure = plots.lambda_sweep([20, 0, 0.2, 2], [66.0, 63.5, 64.0, 65.0], [0.1, 0.1, 0.2, 0.3])
    curve, line = figure.axes[0].lines[0], figure.axes[0].lines[-1]
    np.testing.assert_allclose(curve.get_xdata(), [-1, 0, 1])
    np.testing.assert_allclose(curve.get_ydata(), [64, 65, 66])
    assert line.get_ydata()[0] == 63.5  # the run with lambda 0 is the line
    assert any("63.5" in text for text in check(figure))
    given = plots.lambda_sweep([0, 2], [63.5, 65.0], [0.1, 0.1], no_orth=60.0)
    assert given.axes[0].lines[-1].get_ydata()[0] == 60.0


@pytest.mark.parametrize("line", [True, False])
def test_an_unknown_interval_is_not_drawn(line):
    values = [1, 2, 4] if line else ["a", "b", "c"]
    figure = plots.setting_sweep("setting", values, [60.0, 61.0, 62.0], [None, 0.5, None])
    bars = figure.axes[0].containers[0].lines[2][0].get_segments()
    assert [len(bar) for bar in bars] == [0, 2, 0]
    check(figure)
    check(plots.lambda_sweep([2, 20], [66.0, 65.0], [None, None]))
    with pytest.raises(ValueError, match="intervals must be"):
        plots.lambda_sweep([2, 20], [66.0, 65.0], [-1, None])


@pytest.mark.parametrize("num_values", [1, 3, 10, 30])
def test_a_sweep_says_what_it_is_of_and_marks_every_point(num_values):
    title = f"org/model, lora_rank 4, {'a task, ' * 30}$x$"
    means = 60 + 5 * np.sin(np.linspace(0, 3, num_values))
    figure = plots.lambda_sweep(np.logspace(-1, 4, num_values), means, [None] * num_values, title=title)
    texts = check(figure)
    assert any(text.startswith("org/model, lora_rank 4") for text in texts)
    axis = figure.axes[0].xaxis
    assert len({*axis.get_ticklocs(), *axis.get_ticklocs(minor=True)}) == num_values
    assert sum(f"{mean:.1f}" in texts for mean in means) >= 0.9 * num_values
    lambdas = sum("λ = " in text for text in texts)
    assert lambdas == num_values if num_values <= 3 else lambdas > 4


def test_words_are_not_broken():
    label = plots._wrapped("zero-shot, embedded:tiny-clip, 3 datasets", 6)
    assert "embe\n" not in label and max(map(len, label.split("\n"))) <= 15
    assert label.split("\n")[-1].endswith("datasets")
    assert plots._wrapped("zero-shot, metaclip-h14-fullcc2.5b", 6) == "zero-shot,\nmetaclip-h14-\nfullcc2.5b"
    assert "…" in plots._wrapped("awordwithoutanyendtoit")


def test_training_curves_join_the_steps_of_an_epoch():
    rows = log_rows(epochs=3, steps=2)
    fidelity, orthogonality, cosines, moved = plots.training_curves(rows).axes
    np.testing.assert_allclose(fidelity.lines[0].get_xdata(), [1, 2, 3])
    np.testing.assert_allclose(fidelity.lines[0].get_ydata(), [0.5e-3, 2.5e-3, 4.5e-3])
    np.testing.assert_allclose(orthogonality.lines[0].get_ydata()[0], 30.0)
    np.testing.assert_allclose(cosines.lines[0].get_ydata(), [rows[k]["max_cosine"] for k in (0, 2, 4)])
    np.testing.assert_allclose(moved.lines[0].get_ydata(), [rows[k]["displacement"] for k in (1, 3, 5)])


def test_accuracy_against_displacement_marks_the_best():
    rows = [{"epoch": 1, "displacement": 0.0, "fidelity": 1.0}]  # a step without validation
    rows += [
        {"epoch": k, "displacement": 0.1 * k, "accuracy": value} for k, value in enumerate((40.0, 55.5, 50.0), start=1)
    ]
    figure = plots.accuracy_against_displacement(rows)
    assert {"best: 55.5, epoch 2", "first: 40.0", "last: 50.0"} <= set(check(figure))
    assert len(figure.axes[0].collections[0].get_offsets()) == 3


def test_numpy_half_precision_and_gradients_are_taken():
    v, x = prototypes(3)
    drawn = [
        plots.displacement_chart(before, after, names(3)).axes[0].patches[0].get_width()
        for before, after in (
            (v, x),
            (v.numpy(), x.numpy()),
            (v.clone().requires_grad_(), x),
        )
    ]
    assert drawn[0] == drawn[1] == drawn[2] > 0
    assert check(plots.gram_heatmaps(v.bfloat16(), x.half(), names(3)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda v, x: plots.gram_heatmaps(v, x[:3], names(4)), r"after is \(3, 64\)"),
        (lambda v, x: plots.gram_heatmaps(v[:1], x[:1], names(1)), "K at least 2"),
        (lambda v, x: plots.gram_heatmaps(v, x, names(3)), "class_names has 3 names for 4"),
        (lambda v, x: plots.displacement_chart(v, x * torch.nan, names(4)), "after holds values"),
        (lambda v, x: plots.prototype_map(v[:, :5], torch.arange(4), v, x, names(4)), r"\(N, 64\)"),
        (lambda v, x: plots.prototype_map(v, torch.arange(1, 5), v, x, names(4)), "integers from 0 to 3"),
        (lambda v, x: plots.prototype_map(v, torch.arange(4), v, x, names(4), method="umap"), "umap"),
        (lambda v, x: plots.method_bars({}), "empty"),
        (lambda v, x: plots.lambda_sweep([0], [60], [0.1]), "no lambda above 0"),
        (lambda v, x: plots.lambda_sweep([-1], [60], [0.1]), "at least 0"),
        (lambda v, x: plots.lambda_sweep([1, 2], [60], [0.1]), "equally long"),
        (lambda v, x: plots.training_curves([]), "training_log.jsonl"),
        (lambda v, x: plots.training_curves([{"orthogonality": 1.0, "epoch": 1}]), "log_rows has no step"),
        (lambda v, x: plots.accuracy_against_displacement([{"epoch": 1}]), "validation set"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(*prototypes(4))


# Files and state


def test_save_figure_is_atomic_and_repeatable(tmp_path):
    def sweep():
        return plots.lambda_sweep([2, 20], [66.0, 65.0], [0.1, 0.2])

    for suffix in ("png", "svg", "pdf"):
        first = plots.save_figure(sweep(), tmp_path / f"a.{suffix}")
        second = plots.save_figure(sweep(), tmp_path / f"b.{suffix}")
        assert first.read_bytes() == second.read_bytes()
    figure = sweep()
    with pytest.raises(ValueError, match=r"\.png, \.svg, \.pdf"):
        plots.save_figure(figure, tmp_path / "a.exe")

    def broken(*args, **kwargs):
        (tmp_path / ".a.tmp.png").write_bytes(b"half")
        raise OSError("disk full")

    before = (tmp_path / "a.png").read_bytes()
    figure.savefig = broken
    with pytest.raises(OSError, match="disk full"):
        plots.save_figure(figure, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 6


def test_the_state_of_matplotlib_is_left_alone():
    settings = dict(matplotlib.rcParams)
    with matplotlib.rc_context({"font.size": 30, "text.parse_math": True, "axes.spines.top": True}):
        check(plots.displacement_chart(*prototypes(10), names(10)))  # the caller's style does not leak in
    assert dict(matplotlib.rcParams) == settings
    from matplotlib import pyplot

    assert pyplot.get_fignums() == []

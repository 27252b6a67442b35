"""The command end to end on the embedded CLIP, its arithmetic, its memory of finished cells, its errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from scipy.stats import ttest_rel
from tiny_clip_folder import save_tiny_clip, train_a_little
from torch.nn.functional import normalize

from orion_hf import cli
from orion_hf.card import Results as CardResults
from orion_hf.cells import read_results
from orion_hf.commands import evaluate
from orion_hf.evaluation import Evaluation, Protocol, read_methods, shared
from orion_hf.features import ImageEncoder
from orion_hf.images import task_images
from orion_hf.modeling_orion import OrionCLIPTextModel
from orion_hf.results import PROTOTYPES, Results, comparisons, paired_difference, pool_seeds
from orion_hf.tasks import OrionTask

MODEL = "embedded:tiny-clip"
LAND = OrionTask.from_name("tiny-land")


def save_adapter(folder: Path, model: str = MODEL, task: OrionTask = LAND) -> str:
    text_model = OrionCLIPTextModel.from_pretrained(model, dtype=torch.float32)
    text_model.task = task
    text_model.add_lora(rank=2)
    train_a_little(text_model)
    text_model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("evaluate")


@pytest.fixture(scope="module")
def adapter(work) -> str:
    return save_adapter(work / "orion-land")


@pytest.fixture(scope="module")
def flags(work, adapter) -> list[str]:
    flags = ["--model", MODEL, "--orion", adapter, "--images_per_class", "2", "--cache_dir", str(work / "features")]
    return [*flags, "--num_views", "10", "--output_dir"]


@pytest.fixture(scope="module")
def measured(work, flags) -> dict:
    """One run of everything, on two seeds."""
    methods = ["--methods", "zero_shot", "mta", "tpt", "stata", "zlap", "transclip", "--seeds", "0", "1"]
    assert evaluate.main([*flags, str(work / "out"), "--task", "tiny-land", *methods, "--save_to_adapter"]) == 0
    return json.loads((work / "out" / "results.json").read_text())


def cell_of(data: dict, **wanted) -> dict:
    [cell] = [cell for cell in data["cells"] if all(cell[key] == value for key, value in wanted.items())]
    return cell


# --- the command ------------------------------------------------------------------------------------------


def test_every_method_has_a_cell_for_each_kind_of_prototypes(measured):
    kinds: dict = {}
    for cell in measured["cells"]:
        kinds.setdefault((cell["method"], cell["seed"]), []).append(cell["prototypes"])
    assert len(kinds) == 12
    for (method, _), found in kinds.items():
        assert found == (["clip", "orion"] if method == "tpt" else list(PROTOTYPES)), method


def test_cells_say_how_they_were_measured(measured, adapter):
    [run] = measured["runs"]
    assert run["command"].startswith("orion-hf evaluate --model embedded:tiny-clip")
    assert {"torch", "transformers", "peft", "orion-hf", "python"} <= run["versions"].keys()
    assert run["settings"]["seeds"] == [0, 1]
    cell = cell_of(measured, method="tpt", prototypes="orion", seed=1)
    assert (cell["task"], cell["model"], cell["adapter"]) == ("tiny-land", MODEL, adapter)
    assert cell["views"] == {"count": 10, "augmix": True, "seed": 1}
    assert cell["options"]["lr"] == 5e-3
    assert (cell["unit"], cell["num_images"], cell["n_tasks"]) == ("image", 20, 1)
    assert cell_of(measured, method="mta", prototypes="clip", seed=1)["views"]["augmix"] is False
    seeds = [cell_of(measured, method="stata", prototypes="svd", seed=seed) for seed in (0, 1)]
    assert seeds[0]["dataset"]["fingerprint"] != seeds[1]["dataset"]["fingerprint"], "a seed is another set of images"
    scale = ImageEncoder.from_pretrained(MODEL).logit_scale
    assert seeds[0]["options"]["logit_scale"] == pytest.approx(scale, abs=1e-4)


def test_zero_shot_is_the_share_of_images_nearest_to_their_prototype(measured, adapter):
    encoder = ImageEncoder.from_pretrained(MODEL)
    images = task_images(LAND, "test", seed=1, images_per_class=2)
    pixels = encoder.processor([image.convert("RGB") for image in images["image"]], return_tensors="pt")
    with torch.no_grad():
        features = normalize(encoder.clip.get_image_features(**pixels).pooler_output, dim=-1)
    base = OrionCLIPTextModel.from_pretrained(MODEL, dtype=torch.float32)
    base.task = LAND
    tuned = OrionCLIPTextModel.from_pretrained(adapter, dtype=torch.float32)
    prototypes = {"clip": base.prototypes(), "averaged": base.prototypes(LAND.templates), "orion": tuned.prototypes()}
    for kind, rows in prototypes.items():
        top1 = ((features @ rows.T).argmax(dim=-1) == torch.tensor(images["label"][:])).double().mean().item()
        assert cell_of(measured, method="zero_shot", prototypes=kind, seed=1)["top1"] == pytest.approx(top1)


def test_comparisons_are_paired_over_both_seeds(measured, work):
    results = Results(work / "out")
    [entry] = [e for e in measured["comparisons"] if (e["method"], e["prototypes"]) == ("stata", "orion")]
    assert (entry["seeds"], entry["n"], entry["against"]) == ([0, 1], 40, "clip")
    ours, theirs = (
        torch.cat([results.outcomes(cell_of(measured, method="stata", prototypes=kind, seed=s)["id"]) for s in (0, 1)])
        for kind in ("orion", "clip")
    )
    assert entry["difference"] == pytest.approx((ours - theirs).mean().item())
    assert entry["low"] <= entry["difference"] <= entry["high"]
    assert len(measured["comparisons"]) == 5 * 3 + 1


def test_a_rerun_measures_only_what_is_missing(measured, flags, work, monkeypatch, capsys):
    counted = []
    measure = Evaluation._measure
    monkeypatch.setattr(
        Evaluation, "_measure", lambda self, *args: (counted.append(args[1]["method"]), measure(self, *args))
    )
    again = [*flags, str(work / "out"), "--task", "tiny-land", "--seeds", "0", "1", "--methods"]
    before = (work / "out" / "results.json").read_bytes()
    assert evaluate.main([*again, "zero_shot", "mta", "tpt"]) == 0
    assert counted == []
    assert (work / "out" / "results.json").read_bytes() == before
    table = capsys.readouterr().out
    assert "| tiny-land | mta" in table and "2 x 20" in table and "±" in table

    assert evaluate.main([*again, "zero_shot", "stata", "--options", "stata.alpha=3"]) == 0
    assert counted == ["stata"] * 8
    data = json.loads((work / "out" / "results.json").read_text())
    assert len(data["cells"]) == len(measured["cells"]) + 8
    assert data["cells"][-1]["options"]["alpha"] == 3 and data["cells"][-1]["run"] == 1

    lost = data["cells"][-1]["id"]
    (work / "out" / "outcomes" / f"{lost}.safetensors").unlink()
    assert evaluate.main([*again, "stata", "--options", "stata.alpha=3"]) == 0
    assert counted == ["stata"] * 9


def test_the_result_beside_the_adapter_is_what_its_card_reads(measured, adapter):
    card = CardResults.from_json_file(Path(adapter) / "results.json")
    assert list(card.top1) == list(PROTOTYPES.values())
    mean = sum(cell_of(measured, method="zero_shot", prototypes="orion", seed=s)["top1"] for s in (0, 1)) / 2
    assert card.own == pytest.approx(100 * mean, abs=1e-3)
    assert "20 images of each of 2 seeds" in card.protocol
    assert card.command.startswith("orion-hf evaluate")


def test_batches_and_streams(work, flags):
    batch = ["--protocol", "batch", "--k_eff", "1-4", "--batch_size", "8", "--num_tasks", "12"]
    for folder in ("batch", "again"):
        assert evaluate.main([*flags, str(work / folder), "--methods", "stata", "zero_shot", *batch]) == 0
    data, again = (json.loads((work / folder / "results.json").read_text()) for folder in ("batch", "again"))
    cell = cell_of(data, method="stata", prototypes="orion")
    assert (cell["unit"], cell["n_tasks"], cell["num_images"]) == ("task", 12, 20)
    assert cell["protocol"] == {"kind": "batch", "k_eff": "1-4", "batch_size": 8, "num_tasks": 12}
    assert cell["stderr"] > 0 and cell["low"] < cell["top1"] < cell["high"]
    assert [each["top1"] for each in data["cells"]] == [each["top1"] for each in again["cells"]]

    online = ["--protocol", "online", "--correlation", "separate", "--batch_size", "10", "--num_tasks", "3"]
    assert evaluate.main([*flags, str(work / "batch"), "--methods", "zlap", *online]) == 0
    data = json.loads((work / "batch" / "results.json").read_text())
    assert cell_of(data, method="zlap", prototypes="clip")["unit"] == "stream"


def test_all_tasks_and_unlabelled_images(work, adapter):
    """Only tiny-land has an adapter; the inductive graph is of the images for training."""
    inductive = ["zlap.setup=inductive", "zlap.unlabeled_features=train"]
    flags = ["--model", MODEL, "--task", "all", "--orion", adapter, "--images_per_class", "1"]
    places = ["--output_dir", str(work / "all"), "--cache_dir", str(work / "features")]
    assert evaluate.main([*flags, *places, "--methods", "zlap", "--options", *inductive]) == 0
    data = json.loads((work / "all" / "results.json").read_text())
    assert sorted({cell["task"] for cell in data["cells"]}) == ["tiny-land", "tiny-shapes", "tiny-textures"]
    assert [cell["task"] for cell in data["cells"] if cell["prototypes"] == "orion"] == ["tiny-land"]
    assert all(cell["unlabeled"] not in (None, cell["dataset"]["fingerprint"]) for cell in data["cells"])


def test_two_processes_give_the_results_of_one(work, flags, root):
    """Image folders, views, batches and tasks are shared out; one process prints and writes."""
    folder = work / "pictures" / "test"
    for row in task_images(LAND, "test", seed=7, images_per_class=1):
        name = LAND.class_names[row["label"]]
        (folder / name).mkdir(parents=True)
        row["image"].save(folder / name / "0.png")
    options = ["--images", str(folder.parent), "--methods", "mta", "stata", "--protocol", "batch"]
    options += ["--k_eff", "2-3", "--batch_size", "2", "--num_tasks", "5"]
    config = root / "training" / "configs" / "accelerate_cpu.yaml"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    done = subprocess.run(
        [*launch, str(root / "training" / "evaluate.py"), *flags, str(work / "two"), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("| tiny-land | stata") == 1
    assert evaluate.main([*flags, str(work / "one"), *options]) == 0
    one, two = (json.loads((work / count / "results.json").read_text())["cells"] for count in ("one", "two"))
    assert [cell["id"] for cell in one] == [cell["id"] for cell in two]
    assert [cell["top1"] for cell in one] == pytest.approx([cell["top1"] for cell in two])
    assert [cell["n_tasks"] for cell in two] == [5] * 8


# --- arithmetic -------------------------------------------------------------------------------------------


def test_a_paired_difference_has_the_interval_of_the_t_test():
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (torch.rand(40, generator=generator) < share for share in (0.7, 0.5))
    summary = paired_difference(ours.double(), theirs.double())
    expected = ttest_rel(ours.double(), theirs.double()).confidence_interval(0.95)
    assert summary.mean == pytest.approx((ours.double() - theirs.double()).mean().item())
    assert (summary.low, summary.high) == pytest.approx((expected.low, expected.high), abs=1e-4)
    with pytest.raises(ValueError, match="not paired: 40 against 39"):
        paired_difference(ours.double(), theirs.double()[:-1])


def test_one_image_seen_twice_is_one_image():
    first, second, other = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0, 0.0])
    pooled = pool_seeds([first, other, second], ["images", "others", "images"])
    assert pooled.tolist() == [0.5, 0.0, 1.0, 1.0, 0.0]


def test_cells_of_other_settings_are_not_compared(measured, work):
    results = Results(work / "out")
    clip = cell_of(measured, method="zero_shot", prototypes="clip", seed=0)
    orion = cell_of(measured, method="zero_shot", prototypes="orion", seed=0)
    assert len(comparisons([clip, orion], results.outcomes)) == 1
    for change in ({"weights": "x"}, {"seed": 5}, {"options": {"logit_scale": 3}}, {"task": "dtd"}):
        assert comparisons([clip, orion | change], results.outcomes) == []
    assert comparisons([clip, orion], lambda cell_id: None) == []


def test_protocols_have_the_published_settings():
    assert Protocol.from_options("batch").to_dict() == {
        "kind": "batch",
        "k_eff": "very-low",
        "batch_size": 64,
        "num_tasks": 1000,
    }
    assert Protocol.from_options("batch", k_eff="all").num_tasks == 1
    assert Protocol.from_options("online").to_dict() == {
        "kind": "online",
        "correlation": "low",
        "batch_size": 128,
        "num_tasks": 100,
    }
    assert shared([3, 1, 2], lambda number: number * 10) == [30, 10, 20]


# --- errors -----------------------------------------------------------------------------------------------


def test_wrong_options_are_named():
    with pytest.raises(ValueError, match="--k_eff is no option of --protocol online"):
        Protocol.from_options("online", k_eff="1-4")
    with pytest.raises(ValueError, match="no correlation 'some': choose low, medium"):
        Protocol.from_options("online", correlation="some")
    with pytest.raises(ValueError, match="Unknown scenario '4-1'"):
        Protocol.from_options("batch", k_eff="4-1")
    with pytest.raises(ValueError, match="must be at least 1"):
        Protocol.from_options("batch", num_tasks=0)
    with pytest.raises(ValueError, match="no method 'clap' to evaluate: choose among mta, stata"):
        read_methods(["clap"], [], 100.0)
    with pytest.raises(ValueError, match=r"--options stata.alfa=1: write METHOD.OPTION=VALUE, with stata.alpha"):
        read_methods(["stata"], ["stata.alfa=1"], 100.0)
    with pytest.raises(ValueError, match="--seeds must be different numbers"):
        evaluate.parse_arguments(["--model", "m", "--seeds", "1", "1"])
    with pytest.raises(ValueError, match="--images_per_class must be at least 1"):
        evaluate.parse_arguments(["--model", "m", "--images_per_class", "0"])


def test_adapters_must_fit_task_and_model(work, adapter):
    with pytest.raises(ValueError, match="are both of task tiny-land"):
        evaluate.read_adapters([adapter, adapter])
    with pytest.raises(ValueError, match="there is no such folder, and it is no Hub id"):
        evaluate.read_adapters(["/no/such/folder"])
    with pytest.raises(ValueError, match=r"has no orion_config\.json that names its task"):
        evaluate.read_adapters([str(work)])
    args = evaluate.parse_arguments(["--model", MODEL, "--task", "tiny-shapes"])
    with pytest.raises(ValueError, match="is of task tiny-land, which is not among --task tiny-shapes"):
        evaluate.read_tasks(args, {"tiny-land": adapter})
    with pytest.raises(ValueError, match="Give --task"):
        evaluate.read_tasks(evaluate.parse_arguments(["--model", MODEL]), {})
    other = str(save_tiny_clip(work / "other-clip"))
    stranger = save_adapter(work / "stranger", other)
    flags = ["--model", MODEL, "--orion", stranger, "--output_dir", str(work / "stranger-out")]
    with pytest.raises(ValueError, match=r"was trained on .*other-clip.*, whose weights are not those of --model"):
        evaluate.main(flags)


def test_errors_of_a_run_are_one_line(flags, work, adapter, capsys):
    online = ["--protocol", "online", "--batch_size", "21"]
    assert cli.run("evaluate", [*flags, str(work / "few"), *online]) == 2
    assert "A stream of 20 images has no batch of 21" in capsys.readouterr().err
    # The file beside an adapter is for its card, and no place for cells.
    (work / "taken").mkdir()
    (work / "taken" / "results.json").write_text('{"top1": {"ORION": 50}}')
    assert cli.run("evaluate", [*flags, str(work / "taken")]) == 2
    assert "is not a file of this command" in capsys.readouterr().err
    picture = task_images(LAND, "test", images_per_class=1)[0]["image"]
    for name in ("forrest", LAND.class_names[0]):
        (work / "unknown" / "test" / name).mkdir(parents=True)
        picture.save(work / "unknown" / "test" / name / "0.png")
    assert cli.run("evaluate", [*flags, str(work / "few"), "--images", str(work / "unknown")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "first 'forrest' (nearest: " in error
    assert cli.run("evaluate", [*flags, str(work / "few"), "--images", str(work / "nowhere")]) == 2
    assert "cannot load images from" in capsys.readouterr().err.splitlines()[-1]


def test_options_are_read_as_their_types_say():
    def read(method, assignment):
        name, _, _ = assignment.partition("=")
        return read_methods([method], [assignment], 100.0)[method][name.split(".")[1]]

    assert read("stata", "stata.soft_beta=False") is False and read("stata", "stata.soft_beta=true") is True
    assert read("stata", "stata.n_neighbors=5") == 5 and read("stata", "stata.alpha=2") == 2.0
    assert read("tpt", "tpt.betas=[0.5, 0.9]") == [0.5, 0.9]
    assert read("zlap", "zlap.unlabeled_features=train") == "train"
    assert read("zlap", "zlap.unlabeled_features=none") is None
    for method, assignment, message in (
        ("stata", "stata.soft_beta=2", "stata.soft_beta is true or false, not '2'"),
        ("stata", "stata.alpha=abc", "stata.alpha is a number, not 'abc'"),
        ("stata", "stata.alpha=nan", "stata.alpha is a number, not 'nan'"),
        ("stata", "stata.max_iter=2.5", "stata.max_iter is a whole number, not '2.5'"),
        ("tpt", "tpt.betas=0.5", "tpt.betas is a pair of numbers"),
        ("transclip", "transclip.initial_probabilities=foo", "write METHOD.OPTION=VALUE"),
    ):
        with pytest.raises(ValueError, match=message.replace(".", r"\.")):
            read(method, assignment)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--methods", "mta", "--num_views", "3"], "3 views are too few"),
        (["--methods", "tpt", "--num_views", "9"], "9 views are too few"),
        (["--methods", "stata", "--options", "stata.n_neighbors=0"], "n_neighbors must be at least 1"),
        (["--methods", "zlap", "--options", "zlap.setup=inductive"], "unlabeled_features"),
    ],
)
def test_bad_options_are_found_before_any_image_is_encoded(options, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("orion_hf.evaluation.image_features", lambda *_, **__: pytest.fail("images were encoded"))
    assert cli.main(["evaluate", "--model", MODEL, "--task", "tiny-land", "--output_dir", str(tmp_path), *options]) == 2
    assert message in capsys.readouterr().err


def test_runs_of_one_folder_that_differ_in_more_than_the_seed_are_not_pooled(tmp_path):
    command = ["evaluate", "--model", MODEL, "--task", "tiny-land", "--images_per_class", "2"]
    command += ["--output_dir", str(tmp_path / "out"), "--cache_dir", str(tmp_path / "cache")]
    for more in (["--num_views", "8"], ["--num_views", "12"], ["--num_views", "8", "--options", "mta.max_iter=1"]):
        assert cli.main([*command, "--methods", "mta", *more]) == 0
    assert cli.main([*command, "--images_per_class", "3"]) == 0
    assert cli.main([*command, "--seeds", "0", "1"]) == 0
    data = json.loads((tmp_path / "out" / "results.json").read_text())
    cells = {cell["id"]: cell for cell in data["cells"]}
    entries = [entry for entry in data["comparisons"] if entry["prototypes"] == "svd"]
    assert sorted(entry["seeds"] for entry in entries) == [[0], [0], [0], [0], [0, 1]]
    for entry in entries:
        members = [cells[each] for each in entry["cells"]]
        assert {cell["prototypes"] for cell in members} == {"svd"}
        for key in ("options", "num_images"):
            assert all(cell[key] == members[0][key] for cell in members)
    # Every cell of one seed finds the interval of its own comparison.
    widths = {entry["cells"][0]: 50 * (entry["high"] - entry["low"]) for entry in entries if len(entry["cells"]) == 1}
    read = [cell for cell in read_results([tmp_path / "out"]) if cell.prototypes == "svd" and cell.gain_half_width]
    assert sorted(cell.gain_half_width for cell in read) == pytest.approx(sorted(w for w in widths.values() if w))

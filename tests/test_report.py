"""The report: numbers by hand, the paper's tables there and back, strangers' names as text."""

import csv
import io
import json
import math
from html.parser import HTMLParser

import pytest
import torch

from orion_hf import plots
from orion_hf.card import paper_tables
from orion_hf.cells import MeasuredCell, read_results
from orion_hf.commands.report import main
from orion_hf.layout import Table, as_latex, as_markdown, as_text
from orion_hf.report import CAPTIONS, report
from orion_hf.results import Results
from orion_hf.sweep import sweep_curves, sweep_points, sweep_table
from orion_hf.tables import PAPER_TABLES, groups_of, paper_column, paper_places, printed_groups, split_row
from orion_hf.tasks import OrionTask, builtin_record

BASE = "openai/clip-vit-base-patch16"
T_975 = 4.30265  # Student's t with 2 degrees of freedom
HOSTILE = "<script>alert(1)</script> | =1+1 \\input{x} $&#_% \x1b[31m"


def row(task="eurosat", prototypes="clip", top1=0.5, seed=0, **more):
    return {"task": task, "model": BASE, "method": "zero_shot", "prototypes": prototypes, "top1": top1, "seed": seed,
            "protocol": {"kind": "full"}, "options": {}, "num_images": 100, **more}  # fmt: skip


def write(folder, rows, name="results.json", **header):
    path = folder / name
    path.write_text(json.dumps({"cells": rows, **header}), encoding="utf-8")
    return path


@pytest.fixture
def measured(tmp_path):
    """Two datasets, three seeds; every figure below is worked out by hand from these."""
    values = {
        "eurosat": {"clip": (0.40, 0.42, 0.44), "orion": (0.50, 0.53, 0.56)},
        "dtd": {"clip": (0.30, 0.30, 0.30), "orion": (0.31, 0.33, 0.35)},
    }
    rows = [
        row(task, kind, top1, seed)
        for task, kinds in values.items()
        for kind, shares in kinds.items()
        for seed, top1 in enumerate(shares)
    ]
    return read_results([write(tmp_path, rows)])


def group(cells, table="zero_shot", title="CLIP ViT-B/16"):
    return next(group for group in groups_of(cells) if (group.table, group.title) == (table, title))


def line(cells, dataset, **where):
    return next(line for line in group(cells, **where).lines if line.dataset == dataset)


def test_means_intervals_and_paired_gains(measured):
    eurosat = line(measured, "EuroSAT")
    clip, orion, gain = eurosat.measured["clip"], eurosat.measured["orion"], eurosat.gains["orion"]
    assert clip.mean == pytest.approx(42) and clip.half_width == pytest.approx(T_975 * 2 / math.sqrt(3))
    assert orion.mean == pytest.approx(53) and orion.half_width == pytest.approx(T_975 * 3 / math.sqrt(3))
    # Differences are 10, 11, 12: the pairing takes out what the seeds have in common.
    assert gain.mean == pytest.approx(11) and gain.half_width == pytest.approx(T_975 * 1 / math.sqrt(3))
    assert (clip.runs, gain.runs, eurosat.num_images) == (3, 3, 100)
    assert eurosat.printed == {"clip": 41.3, "orion": 51.33} and eurosat.printed_gain == 10.03


def test_average_is_over_what_was_run_and_says_so(measured):
    some, all_eleven = group(measured).lines[-2:]
    assert some.dataset == "Average of the 2 run" and all_eleven.dataset == "Average"
    # Of each seed the mean of both datasets: 35, 36, 37 and 40.5, 43, 45.5.
    assert some.measured["clip"].mean == pytest.approx(36)
    assert some.measured["clip"].half_width == pytest.approx(T_975 * 1 / math.sqrt(3))
    assert some.measured["orion"].half_width == pytest.approx(T_975 * 2.5 / math.sqrt(3))
    assert some.gains["orion"].mean == pytest.approx(7) and some.gains["orion"].datasets == 2
    assert some.printed == pytest.approx({"clip": (41.3 + 44.3) / 2, "orion": (51.33 + 46.7) / 2})
    assert not all_eleven.measured and all_eleven.printed == {"clip": 63.7, "orion": 66.46}


def test_equal_runs_have_the_interval_of_the_images(tmp_path):
    rows = [row("dtd", seed=seed, top1=0.3, low=0.2, high=0.4) for seed in range(3)]
    clip = line(read_results([write(tmp_path, rows)]), "DTD").measured["clip"]
    assert clip.half_width == pytest.approx(10) and clip.runs == 3


def test_what_was_not_run_is_empty(measured):
    pets = line(measured, "Pets")
    assert not pets.measured and not pets.gains and pets.printed["clip"] == 88.0
    found = list(csv.DictReader(io.StringIO(report(measured, "csv"))))
    for entry in found:
        run = entry["dataset"] in ("EuroSAT", "DTD", "Average of the 2 run")
        assert bool(entry["measured"]) == run, entry
    assert {entry["group"] for entry in found} == {"CLIP ViT-B/16"}
    text = report(measured, "md")
    assert "| Pets |  |  |  | 88.0 | 88.6 | +0.6 |  |" in text
    assert "Not run: CLIP ViT-L/14, MetaCLIP." in text
    assert "| **Average of the 2 run** | **36.00 ± 2.48** | **43.00 ± 6.21** | **+7.00 ± 3.73** |" in text


def test_a_gain_needs_a_pair(tmp_path):
    rows = [row(seed=0, top1=0.4), row(seed=1, prototypes="orion", top1=0.6)]
    assert line(read_results([write(tmp_path, rows)]), "EuroSAT").gains == {}
    rows += [row(seed=0, prototypes="orion", top1=0.5), row(seed=1, top1=0.2, num_images=50)]
    gain = line(read_results([write(tmp_path, rows)]), "EuroSAT").gains["orion"]
    assert gain.mean == pytest.approx(10) and gain.runs == 1  # other images are no pair


def test_an_average_of_fewer_datasets_than_its_line_says_so(tmp_path):
    rows = [row("eurosat"), row("dtd"), row("eurosat", "orion", 0.7)]
    text = report(read_results([write(tmp_path, rows)]), "md")
    assert (
        "| **Average of the 2 run** | **50.00** | **70.00 (1)** | **+20.00 (1)** | **42.80** | **51.33 (1)** |" in text
    )


# Which cells are runs of one another


def shots(draw, prototypes="clip", top1=0.5, seed=1, **more):
    support = {"split": "train", "fingerprint": "s", "draw": draw, "area": [0.08, 1.0]}
    return row(prototypes=prototypes, top1=top1, seed=seed, method="clap", protocol={"kind": "full", "shots": 1},
               support=support | more)  # fmt: skip


def test_options_published_for_one_task_do_not_part_a_table(tmp_path):
    common = {"method": "coop", "protocol": {"kind": "full", "shots": 1}}
    rows = [row(task, options={"epochs": epochs}, **common) for task, epochs in (("eurosat", None), ("imagenet", 50))]
    where = {"table": "few_shot", "title": "1-shot CoOp"}
    found = group(read_results([write(tmp_path, rows)]), **where)
    assert {line.dataset for line in found.lines if line.measured and not line.is_average} == {"EuroSAT", "ImageNet"}
    assert "published defaults" not in found.about
    rows[0]["options"]["epochs"] = 5
    assert "epochs 5" in group(read_results([write(tmp_path, rows[:1])]), **where).about


def test_two_cells_of_one_seed_are_never_two_runs(tmp_path):
    tuned = {"adapter": "org/a", "adapter_weights": "1"}, {"adapter": "org/b", "adapter_weights": "2"}
    rows = [row(top1=0.1, num_images=4), row(prototypes="orion", top1=0.2, num_images=4, **tuned[0])]
    rows += [row(top1=0.5, num_images=40), row(prototypes="orion", top1=0.6, num_images=40, **tuned[0])]
    rows += [row(prototypes="orion", top1=0.8, num_images=40, **tuned[1])]
    cells = read_results([write(tmp_path, [*rows, row("dtd", num_images=7), row("dtd", "orion", num_images=7)])])
    lines = [line for line in group(cells).lines if line.dataset == "EuroSAT"]
    assert [line.name for line in lines] == [
        "EuroSAT (40 images, adapter org/a)",
        "EuroSAT (40 images, adapter org/b)",
        "EuroSAT (4 images, adapter org/a)",
    ]
    found = [(line.measured["clip"], line.measured["orion"], line.gains["orion"]) for line in lines]
    assert [[round(value.mean) for value in values] for values in found] == [[50, 60, 10], [50, 80, 30], [10, 20, 10]]
    assert all(value.runs == 1 for values in found for value in values)
    assert [bool(line.printed) for line in lines] == [True, False, False]
    # Datasets have as many images as they have: that alone makes no second table. The first line is averaged.
    assert len([group for group in groups_of(cells) if group.was_run]) == 1
    assert line(cells, "Average of the 2 run").measured["orion"].mean == pytest.approx(55)
    assert "Averages are of the first line of each dataset." in report(cells, "md")
    entries = list(csv.DictReader(io.StringIO(report(cells, "csv"))))
    assert {e["detail"] for e in entries if e["dataset"] == "EuroSAT"} == {line.note for line in lines}


def test_adapters_of_several_seeds_are_runs(tmp_path):
    rows = [row(seed=seed, top1=0.5) for seed in (0, 1)]
    rows += [row(prototypes="orion", seed=seed, top1=0.6 + seed / 10, adapter=f"org/{seed}") for seed in (0, 1)]
    found = [line for line in group(read_results([write(tmp_path, rows)])).lines if line.measured]
    assert (
        len(found) == 1 and found[0].measured["orion"].runs == 2 and found[0].gains["orion"].mean == pytest.approx(15)
    )


@pytest.mark.parametrize(
    "more",
    [
        {"dataset": {"source": "other", "split": "test"}},
        {"dataset": {"source": None, "split": "train"}},
        {"dataset": {"source": None, "split": "test", "fingerprint": "other"}},
        {"mixed_precision": "fp16"},
        {"options": {"alpha": 50.0}},
        {"views": {"count": 8, "augmix": False, "seed": 0}},
        {"task_digest": "other"},
        {"orion_hf": "0.2"},
        {"unlabeled": "other"},
        {"measured_on": {"images": "folder", "split": "test", "eval_template": "a {}"}},
    ],
)
def test_cells_of_one_file_that_differ_in_anything_are_different_cells(tmp_path, more):
    path = write(tmp_path, [row(top1=0.5), row(top1=0.6, **more)])
    cells = read_results([path])
    lines = [line for group in groups_of(cells) for line in group.lines if line.measured]
    assert sorted(line.measured["clip"].mean for line in lines) == [50, 60]
    assert all(line.measured["clip"].runs == 1 for line in lines)


def test_another_support_set_is_no_pair(tmp_path):
    rows = [shots("a", top1=0.4), shots("b", "orion", top1=0.6)]
    where = {"table": "few_shot", "title": "1-shot CLAP"}
    assert line(read_results([write(tmp_path, rows)]), "EuroSAT", **where).gains == {}
    rows += [shots("b", top1=0.5), shots("c", top1=0.9, seed=2), shots("c", "orion", top1=1.0, seed=2)]
    found = [x for x in group(read_results([write(tmp_path, rows)]), **where).lines if x.dataset == "EuroSAT"]
    assert [value.runs for x in found for value in x.measured.values()] == [1] * 5
    assert sorted(x.gains["orion"].mean for x in found if x.gains) == pytest.approx([10, 10])
    other = read_results([write(tmp_path, [shots("a"), shots("a", top1=0.7, split="validation")])])
    assert sorted(line.measured["clip"].mean for g in groups_of(other) for line in g.lines if line.measured) == [50, 70]


def test_a_gain_of_fewer_pairs_than_runs_says_so(tmp_path):
    rows = [row(seed=seed) for seed in range(3)] + [row(prototypes="orion", seed=0, top1=0.7)]
    assert "+20.00 (1 pair)" in report(read_results([write(tmp_path, rows)]), "md")


def test_several_seeds_that_agree_have_the_interval_of_their_comparison(tmp_path):
    results = Results(tmp_path)
    described = {
        "task": "eurosat", "task_digest": "t", "model": BASE, "revision": None, "weights": "w", "method": "zero_shot",
        "adapter": None, "adapter_revision": None, "adapter_weights": None, "views": None, "protocol": {"kind": "full"},
        "options": {}, "mixed_precision": "no", "orion_hf": "0", "unlabeled": None, "unit": "image", "n_tasks": 1,
        "dataset": {"source": "x", "split": "test", "fingerprint": "f"}, "num_images": 5, "unreadable": [],
    }  # fmt: skip
    for seed in range(3):
        for kind, correct in (("clip", [1, 0, 0, 1, 0]), ("orion", [1, 1, 0, 1, 1])):
            cell = described | {"seed": seed, "prototypes": kind}
            results.add(f"{kind}{seed}", cell, torch.tensor(correct, dtype=torch.float64), {})
    gain = line(read_results([tmp_path]), "EuroSAT").gains["orion"]
    entry = json.loads(results.path.read_text())["comparisons"][0]
    assert len(entry["cells"]) == 3 and gain.runs == 3
    assert gain.half_width == pytest.approx(50 * (entry["high"] - entry["low"])) and gain.half_width > 10


def test_equal_differences_of_floats_are_equal(tmp_path):
    rows = [row(seed=seed, top1=top1) for seed, top1 in enumerate((0.1, 0.5))]
    rows += [row(prototypes="orion", seed=seed, top1=top1) for seed, top1 in enumerate((0.17, 0.57))]
    gain = line(read_results([write(tmp_path, rows)]), "EuroSAT").gains["orion"]
    assert gain.mean == pytest.approx(7) and gain.half_width is None  # not 1e-13


# The paper


PAPER_TASKS = {name for name in OrionTask.available() if paper_column(name) is not None}


def tasks_by_column():
    return {builtin_record(name)["display_name"]: name for name in OrionTask.available()}


def paper_rows():
    """The paper's tables as if they had been measured."""
    conditions = {"very low": "1-4", "low": "2-10", "medium": "5-25", "high": "25-50", "very high": "50-100"}
    models = {"CLIP ViT-B/16": BASE, "CLIP ViT-L/14": "openai/clip-vit-large-patch14",
              "MetaCLIP": "facebook/metaclip-b16-400m"}  # fmt: skip
    for table in PAPER_TABLES:
        for name, figures in paper_tables()["tables"][table].items():
            title, kind = split_row(name)
            extra = {}
            if table == "zero_shot":
                extra = {"model": models[title]}
            elif table == "few_shot":
                shots, method = title.split("-shot ")
                extra = {"method": method.lower(), "protocol": {"kind": "full", "shots": int(shots), "passes": 1}}
            elif table in ("tta_mta_tpt", "svd_per_dataset", "zlap_vit_b16"):
                extra = {"method": title.lower()}
            elif table == "stata_online":
                extra = {"method": "stata", "protocol": {"kind": "online", "correlation": title.split(" ")[0]}}
            elif table == "stata_batch":
                size, scenario = title.removeprefix("batch ").split(": ")
                k_eff = "all" if scenario == "all classes" else conditions[scenario.split(" (")[0]]
                protocol = {"kind": "batch", "k_eff": k_eff, "batch_size": int(size)}
                extra = {"method": "stata", "protocol": protocol}
            else:
                extra = {"model": models["CLIP ViT-L/14"]}
            for column, task in tasks_by_column().items():
                if table.startswith("cupl"):
                    extra["protocol"] = {"kind": "full", "class_prompts": f"{task}.json"}
                if column in figures:
                    yield row(task, kind, figures[column] / 100, **extra)


def test_the_papers_figures_as_measurements_give_the_papers_tables(tmp_path):
    cells = read_results([write(tmp_path, list(paper_rows()))])
    groups = {(group.table, group.title): group for group in groups_of(cells)}
    assert {table for table, _ in groups} == set(PAPER_TABLES)  # no cell went elsewhere
    averages, rows = paper_tables()["recomputed_averages"], 0
    for table in PAPER_TABLES:
        for name, figures in paper_tables()["tables"][table].items():
            title, kind = split_row(name)
            lines = {line.dataset: line for line in groups[table, title].lines}
            for column in tasks_by_column():
                if column in figures:
                    assert lines[column].measured[kind].mean == pytest.approx(figures[column], abs=1e-9)
            average = lines["Average"].measured[kind]
            assert average.mean == pytest.approx(averages[table][name], abs=5.1e-5) and average.datasets == 11
            rows += 1
    assert rows == 59


def test_the_papers_tables_come_back_exactly(measured):
    tables, gains, recomputed = {}, {}, {}
    names = {"clip": "", "svd": " + SVD (closed form)", "orion": " + ORION"}
    for entry in csv.DictReader(io.StringIO(report(measured, "csv", full=True))):
        if entry["paper"] == "" or entry["dataset"].startswith("Average of"):
            continue
        name = entry["group"] + names[entry["prototypes"]]
        tables.setdefault(entry["table"], {}).setdefault(name, {})[entry["dataset"]] = float(entry["paper"])
        if entry["prototypes"] == "orion":
            gain = float(entry["paper_gain"]) if entry["paper_gain"] else None
            gains.setdefault(entry["table"], {}).setdefault(name, {})[entry["dataset"]] = gain
        if entry["dataset"] == "Average":
            recomputed.setdefault(entry["table"], {})[name] = float(entry["paper_recomputed"])
    paper = paper_tables()
    assert tables == {table: paper["tables"][table] for table in PAPER_TABLES}
    assert recomputed == paper["recomputed_averages"]
    for table, printed in paper["printed_gains"].items():
        if table in gains:
            assert gains[table] == printed, table
    # The one table left out says nothing more.
    averages = {name: {"Average": figures["Average"]} for name, figures in tables["svd_per_dataset"].items()}
    assert averages == paper["tables"]["svd_average"]


def test_misprints_are_marked_and_listed(tmp_path):
    rows = [row(prototypes=kind, method="clap", protocol={"kind": "full", "shots": 4}) for kind in ("clip", "orion")]
    text = report(read_results([write(tmp_path, rows)]), "md")
    assert "67.83 †" in text and "| 67.83 | 67.8182 |" in text
    assert "8-shot CLAP &#43; ORION" not in text  # of tables that are not shown nothing is said


def test_full_shows_every_table(measured):
    text = report(measured, "md", full=True)
    for table, title in PAPER_TABLES.items():
        assert f"\n## {title}\n" in text
        for name in printed_groups(table):
            assert f"### {as_markdown([Table((name,), ())]).splitlines()[0].strip('| ')}\n" in text
    assert "nothing was run" not in text


def test_other_settings_and_models_have_tables_of_their_own(tmp_path):
    rows = [row(task, method="stata", options={"alpha": 1.0}) for task in ("eurosat", "dtd")]
    rows += [row(method="stata", options={"alpha": 2.0}, top1=0.9), row("my-task"), row(model="org/other-clip")]
    groups = [group for group in groups_of(read_results([write(tmp_path, rows)])) if group.was_run]
    assert [(group.table, group.title) for group in groups] == [
        ("stata_batch", "batch 1000: all classes"),
        ("other", f"zero-shot, {BASE}"),
        ("other", "zero-shot, org/other-clip"),
        ("other", f"StatA, {BASE}"),
    ]
    assert line(read_results([write(tmp_path, rows)]), "EuroSAT", table="stata_batch",
                title="batch 1000: all classes").measured["clip"].mean == 50  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "places"),
    [
        ({"model": "openai/clip-vit-base-patch32"}, []),
        ({"model": "/models/clip-vit-large-patch14/"}, [("zero_shot", "CLIP ViT-L/14")]),
        ({"method": "transclip"}, []),
        ({"method": "clap", "conditions": {"shots": 3}}, []),
        ({"method": "stata", "protocol": "batch", "conditions": {"k_eff": "very-low", "batch_size": 64}},
         [("stata_batch", "batch 64: very low (1-4)")]),
        ({"method": "stata", "protocol": "batch", "conditions": {"k_eff": "1-4", "batch_size": 1000}}, []),
        ({"method": "stata", "protocol": "online", "conditions": {"correlation": "separate"}},
         [("stata_online", "separate")]),
        ({"method": "stata", "protocol": "online", "conditions": {"correlation": "some"}}, []),
        ({"method": "clap", "conditions": {"shots": 4, "class_prompts": "x.json"}}, []),
        ({"method": "mta", "conditions": {"class_prompts": "x.json"}}, []),
        ({"model": "openai/clip-vit-large-patch14", "conditions": {"class_prompts": "x.json"}},
         [("cupl_vit_l14", "CuPL")]),
        ({"task": "tiny-land"}, []),
    ],
)  # fmt: skip
def test_where_a_cell_belongs(changes, places):
    cell = {"task": "eurosat", "model": BASE, "method": "zero_shot", "prototypes": "clip", "top1": 50.0}
    assert paper_places(MeasuredCell(**cell | changes)) == places


def test_other_options_do_not_displace_the_published_ones(tmp_path):
    changed = [row(task, method="stata", options={"alpha": 2.0}) for task in ("eurosat", "dtd", "sun397")]
    where = {"table": "stata_batch", "title": "batch 1000: all classes"}
    alone = group(read_results([write(tmp_path, changed)]), **where)
    assert alone.was_run and alone.about == "Not the published defaults: alpha 2.0."
    assert "Not the published defaults: alpha 2.0." in report(read_results([write(tmp_path, changed)]), "md")
    rows = [*changed, row(method="stata", options={"alpha": 1.0, "logit_scale": 77.0}, top1=0.1)]
    both = group(read_results([write(tmp_path, rows)]), **where)
    assert [line.measured["clip"].mean for line in both.lines if line.measured] == [pytest.approx(10)]
    assert both.about == "What was run of it in other settings or with other models is under Other runs."
    views = [row(method="mta", views={"count": count, "augmix": False, "seed": 0}) for count in (8, 8, 64)]
    assert "num_views" not in group(read_results([write(tmp_path, views)]), "tta_mta_tpt", "MTA").about


def test_models_that_a_title_does_not_name_are_named(tmp_path):
    rows = [row(task, model="facebook/metaclip-h14-fullcc2.5b") for task in ("eurosat", "dtd")]
    rows += [row(model="facebook/metaclip-l14-fullcc2.5b", top1=0.7)]
    cells = read_results([write(tmp_path, rows)])
    shown = group(cells, title="MetaCLIP")
    assert shown.about.startswith("Model: facebook/metaclip-h14-fullcc2.5b. What was run")
    assert [g.title for g in groups_of(cells) if g.table == "other"] == ["zero-shot, facebook/metaclip-l14-fullcc2.5b"]
    assert group(read_results([write(tmp_path, [row()])])).about == ""


def test_two_names_of_one_scenario_are_one_setting(tmp_path):
    def batch(k_eff, **more):
        protocol = {"kind": "batch", "k_eff": k_eff, "batch_size": 64, "num_tasks": 1000}
        return row(method="stata", protocol=protocol, **more)

    assert len(read_results([write(tmp_path, [batch("very-low"), batch("1-4")])])) == 1
    cells = read_results([write(tmp_path, [batch("very-low"), batch("1-4", prototypes="orion", top1=0.6)])])
    found = line(cells, "EuroSAT", table="stata_batch", title="batch 64: very low (1-4)")
    assert found.gains["orion"].mean == pytest.approx(10)
    for bad in ("4-1", "few", 3):
        with pytest.raises(ValueError, match=r"results\.json: cell 0: 'k_eff': Unknown scenario"):
            read_results([write(tmp_path, [batch(bad)])])


def test_all_eleven_of_one_kind_and_some_of_another_are_two_averages(tmp_path):
    rows = [row(task) for task in tasks_by_column().values() if task in PAPER_TASKS]
    cells = read_results([write(tmp_path, [*rows, row("eurosat", "orion"), row("dtd", "orion", 0.7)])])
    some, whole = group(cells).lines[-2:]
    assert list(whole.measured) == ["clip"] and whole.measured["clip"].datasets == 11
    assert some.printed["orion"] == pytest.approx((51.33 + 46.7) / 2) and some.printed_datasets == {"orion": 2}


def test_the_number_of_runs_is_beside_the_means(measured):
    header = next(text for text in report(measured, "md").splitlines() if text.startswith("| dataset"))
    assert header.endswith("| images | runs |")
    eurosat = next(text for text in report(measured, "md").splitlines() if text.startswith("| EuroSAT"))
    assert eurosat.endswith("| 100 | 3 |")


# Files


def test_reads_what_evaluate_writes(tmp_path):
    """The file of `orion_hf.results`, its intervals and its paired comparison included."""
    results = Results(tmp_path)
    described = {
        "task": "eurosat", "task_digest": "t", "model": BASE, "revision": None, "weights": "w", "method": "stata",
        "adapter": None, "adapter_revision": None, "adapter_weights": None, "seed": 0, "views": None,
        "protocol": {"kind": "batch", "k_eff": "1-4", "batch_size": 64, "num_tasks": 4}, "options": {"alpha": 1.0},
        "mixed_precision": "no", "orion_hf": "0", "dataset": {"source": "x", "split": "test", "fingerprint": "f"},
        "unlabeled": None, "unit": "task", "n_tasks": 4, "num_images": 100, "unreadable": [], "seconds": 1.0,
    }  # fmt: skip
    run = {"command": "orion-hf evaluate --task eurosat", "versions": {}, "settings": {}}
    clip, orion = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.2, 0.3, 0.4, 0.6])
    results.add("a", described | {"prototypes": "clip"}, clip.double(), run)
    tuned = {"prototypes": "orion", "adapter": "org/orion-eurosat", "adapter_weights": "v"}
    results.add("b", described | tuned, orion.double(), run)

    found = line(read_results([tmp_path]), "EuroSAT", table="stata_batch", title="batch 64: very low (1-4)")
    t_975, deviation = 3.18245, 0.05  # differences 0.1, 0.1, 0.1, 0.2
    assert found.measured["clip"].mean == pytest.approx(25) and found.measured["orion"].mean == pytest.approx(37.5)
    assert found.gains["orion"].mean == pytest.approx(12.5)
    assert found.gains["orion"].half_width == pytest.approx(100 * t_975 * deviation / 2, rel=1e-5)
    assert found.measured["clip"].half_width == pytest.approx(100 * t_975 * clip.double().std().item() / 2, rel=1e-5)
    assert "orion-hf evaluate -{}-task eurosat" in report(read_results([tmp_path]), "latex", files=[results.path])


def test_reads_the_summary_of_the_demo(tmp_path):
    summary = {"model": "embedded:tiny-clip", "task": "tiny-land", "images": 400, "seed": 0}
    (tmp_path / "results.json").write_text(json.dumps(summary | {"top1": {"CLIP": 50.0, "averaged prompts": 0.6}}))
    cells = read_results([tmp_path])
    assert [(cell.prototypes, cell.top1, cell.num_images) for cell in cells] == [
        ("clip", 50.0, 400),
        ("averaged", 0.6, 400),  # percent, however little
    ]


def test_one_cell_in_two_files(tmp_path):
    first, second = write(tmp_path, [row()], "a.json"), write(tmp_path, [row()], "b.json")
    assert len(read_results([first, second])) == 1
    write(tmp_path, [row(top1=0.6)], "b.json")
    with pytest.raises(ValueError, match=r"a\.json and .*b\.json disagree on zero_shot"):
        read_results([first, second])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("3", "holds no results"),
        ('{"cells": [3]}', "cell 0 is no JSON object"),
        ('{"cells": [{"task": "x", "top1": 0.5}]}', "'task' or 'model' is missing"),
        (json.dumps({"cells": [row(top1=50)]}), "share from 0 to 1"),
        (json.dumps({"cells": [row(seed="one")]}), "'seed' must be a whole number"),
        (json.dumps({"cells": [row(top1=None)]}), "no measured cell"),
        (json.dumps({"cells": [row()], "format_version": 2}), "format_version 2, and this orion-hf reads up to 1"),
        (json.dumps({"cells": [row()], "format_version": "new"}), "format_version new"),
    ],
)
def test_bad_files_are_one_clear_error(tmp_path, content, message):
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_results([path])
    with pytest.raises(ValueError, match=r"has no results\.json"):
        (tmp_path / "empty").mkdir()
        read_results([tmp_path / "empty"])


# Sweeps


def test_sweep_table_has_the_papers_points_beside_its_own(tmp_path):
    rows = [
        row(task, kind, top1, seed, sweep={"orthogonality_weight": weight})
        for weight, tuned in ((0.0, 0.5), (2.0, 0.6), (200.0, 0.55))
        for task, seed in (("eurosat", 0), ("eurosat", 1), ("dtd", 0), ("dtd", 1))
        for kind, top1 in (("clip", 0.4), ("orion", tuned + 0.01 * seed))
    ]
    cells = read_results([write(tmp_path, rows)])
    points = sweep_points(cells)
    assert [point.settings["orthogonality_weight"] for point in points] == [0.0, 2.0, 200.0]
    assert points[1].accuracy.mean == pytest.approx(60.5) and points[1].accuracy.datasets == 2
    assert points[1].gain.half_width == pytest.approx(12.7062 * 0.5, rel=1e-5)
    table = sweep_table(points)
    assert table.header == ("lambda", "ORION", "gain", "runs", "paper (average of 11 datasets)")
    assert [cells[-1] for cells in table.rows] == ["65.4", "66.5", ""]  # of 200 the paper has a picture only
    assert not any(group.was_run for group in groups_of(cells))  # no figure of a sweep is in the other tables
    assert "Accuracy against lambda" in report(cells, "html")


def swept(weight, prototypes="orion", top1=0.6, seed=0, task="eurosat", epochs=20, **more):
    training = {} if prototypes == "clip" else {"training": {"num_train_epochs": epochs, "seed": seed}}
    return row(task, prototypes, top1, seed, sweep={"orthogonality_weight": weight}, **training, **more)


def test_the_papers_lambda_figures_are_beside_its_own_tasks_only(tmp_path):
    rows = [swept(weight, kind, task=task) for weight in (2.0, 20.0) for kind in ("clip", "orion") for task in ("x",)]
    assert sweep_table(sweep_points(read_results([write(tmp_path, rows)]))).header == ("lambda", "ORION", "gain")


def test_sweeps_are_in_the_csv_and_failed_runs_are_counted(tmp_path):
    rows = [swept(weight, "clip", 0.5, seed) for weight in (2.0, 20.0, 200.0) for seed in (0, 1)]
    rows += [swept(2.0), swept(2.0, seed=1, top1=0.7), swept(20.0), swept(20.0, seed=1, top1=None, error="NaN")]
    rows += [swept(200.0, seed=seed, top1=None, error="NaN") for seed in (0, 1)]
    cells = read_results([write(tmp_path, rows)])
    assert len(sweep_points(cells)) == 2
    table = sweep_table(sweep_points(cells, with_failed=True))
    assert table.header[:5] == ("lambda", "ORION", "gain", "runs", "failed")
    assert [(cells[0], cells[3], cells[4]) for cells in table.rows] == [
        ("2.0", "2", "0"),
        ("20.0", "1", "1"),
        ("200.0", "0", "2"),
    ]
    assert "9 measured cells" in report(cells, "md") and "3 runs of sweeps failed" in report(cells, "md")
    entries = [e for e in csv.DictReader(io.StringIO(report(cells, "csv"))) if e["table"] == "sweep"]
    assert [(e["detail"], e["measured"], e["gain"], e["failed"]) for e in entries] == [
        ("orthogonality_weight 2.0", "65.0", "15.0", "0"),
        ("orthogonality_weight 20.0", "60.0", "10.0", "1"),
        ("orthogonality_weight 200.0", "", "", "2"),
    ]


def test_sweeps_with_other_fixed_settings_or_images_are_other_points(tmp_path):
    for number, (epochs, images) in enumerate(((20, 100), (40, 100), (20, 50))):
        rows = [
            swept(weight, kind, (0.5 if kind == "clip" else 0.6) + number / 10 * (kind == "orion"), epochs=epochs,
                  num_images=images)
            for weight in (2.0, 20.0)
            for kind in ("clip", "orion")
        ]  # fmt: skip
        write(tmp_path, rows, f"{number}.json")
    points = sweep_points(read_results([tmp_path / f"{number}.json" for number in range(3)]))
    assert [(*point.described.values(), round(point.accuracy.mean), round(point.gain.mean)) for point in points] == [
        (weight, epochs, images, mean, mean - 50)
        for weight in (2.0, 20.0)
        for epochs, images, mean in ((20, "100 images", 60), (20, "50 images", 80), (40, "100 images", 70))
    ]
    assert len(sweep_curves(points)) == 3  # a line joins what differs in lambda alone


def test_curves_of_a_sweep_are_on_the_page_once(tmp_path):
    path = write(tmp_path, [swept(weight, kind) for weight in (2.0, 20.0) for kind in ("clip", "orion")])
    (tmp_path / "plots").mkdir()
    for name in ("lambda", "lambda-2", "gram"):
        (tmp_path / "plots" / f"{name}.png").write_bytes(b"\x89PNG\r\n\x1a\n and the rest")
    text = report(read_results([path]), "html", files=[path])
    assert len(Page(text).sources) == 2 and f"<figcaption>{CAPTIONS['gram']}</figcaption>" in text


# Strangers' names


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.sources, self.cells, self.inside = set(), [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href", "srcset", "action")]
        self.inside = tag == "td"
        if self.inside:
            self.cells.append("")

    def handle_data(self, data):
        if self.inside:
            self.cells[-1] += data


def test_hostile_names_are_text_everywhere(tmp_path):
    rows = [row(HOSTILE, kind, model=HOSTILE, method=HOSTILE) for kind in ("clip", "orion")]
    path = write(tmp_path, rows, command=HOSTILE)
    cells = read_results([path])
    page = Page(report(cells, "html", files=[path]))
    assert "script" not in page.tags
    assert HOSTILE.replace("\x1b", "\\x1b") in page.cells
    text = report(cells, "md", files=[path])
    assert "<script>" not in text and "\x1b" not in text
    assert len({line.count("|") for line in text.splitlines() if line.startswith("| ") and "HOSTILE" in line}) <= 1
    latex = report(cells, "latex", files=[path])
    assert "\\input{" not in latex and "\\textbackslash{}input\\{x\\}" in latex and "\\$\\&\\#\\_\\%" in latex
    formula = [row("=1+1", model="@x")]
    entry = next(csv.DictReader(io.StringIO(report(read_results([write(tmp_path, formula)]), "csv"))))
    assert entry["dataset"] == "'=1+1"
    assert "\x1b" not in as_text([Table(("task",), ((HOSTILE,),))])
    assert "\x1b" not in as_latex([Table(("task",), ((HOSTILE,),))])


def test_the_page_needs_nothing_else(measured):
    text = report(measured, "html")
    page = Page(text)
    assert page.sources and all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert not {"script", "link", "iframe"} & page.tags and "http://" not in text and "https://" not in text
    assert "@import" not in text and "url(" not in text
    for needed in ("prefers-color-scheme: dark", 'name="viewport"', "default-src 'none'", "max-width: 100%"):
        assert needed in text


def test_pictures_beside_the_results_are_on_the_page(tmp_path):
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "gram.png").write_bytes(b"\x89PNG\r\n\x1a\n and the rest")
    (tmp_path / "plots" / "evil.png").write_bytes(b"<svg onload=alert(1)>")
    path = write(tmp_path, [row()])
    page = Page(report(read_results([path]), "html", files=[path]))
    assert len(page.sources) == 1


def test_command_writes_by_the_suffix(tmp_path, capsys):
    path = write(tmp_path, [row(), row(prototypes="orion", top1=0.6)])
    for name, begins in (("r.html", "<!DOCTYPE html>"), ("r.tex", "% \\usepackage"), ("r.csv", "table,group")):
        assert main([str(path), "--output", str(tmp_path / "new" / name)]) == 0
        assert (tmp_path / "new" / name).read_text(encoding="utf-8").startswith(begins)
    capsys.readouterr()
    assert main([str(tmp_path)]) == 0
    assert "| EuroSAT | 50.00 | 60.00 | +10.00 | 41.3 | 51.33 | +10.03 | 100 |" in capsys.readouterr().out


def test_what_latex_would_print_as_something_else_is_escaped():
    text = as_latex([Table(("a",), (('<b> | "x" ---y',),))])
    assert r"{\textless{}b\textgreater{} \textbar{} {\char34}x{\char34} -{}-{}-y}" in text


def test_sources_stay_on_the_page_of_latex(measured, tmp_path):
    path = write(tmp_path, [row()], "a_file.json", command="orion-hf evaluate --output_dir out/x")
    text = report(measured, "latex", files=[path])
    assert r"\begin{tabular}{p{0.45\linewidth}p{0.45\linewidth}}" in text
    assert r"a\_\allowbreak{}file.\allowbreak{}json\par}" in text and r"out/\allowbreak{}x\par} \\" in text


def test_figures_scroll_on_a_phone(measured):
    text = report(measured, "html")
    assert '<figure><div class="picture" tabindex="0"><img ' in text
    assert ".picture { overflow-x: auto; }" in text and "min-width: 42rem" in text


def test_bars_say_method_model_and_number_of_datasets(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(plots, "method_bars", lambda bars: drawn.update(bars) or plots.Figure())
    variants = [
        {},
        {"method": "clap", "protocol": {"kind": "full", "shots": 4}},
        {"method": "stata", "protocol": {"kind": "full"}},
        {"model": "embedded:tiny-clip"},
        {"model": "org/tiny-clip"},
    ]
    rows = [row(prototypes=kind, **each) for each in variants for kind in ("clip", "orion")]
    rows += [row("dtd", kind) for kind in ("clip", "orion")]
    report(read_results([write(tmp_path, rows)]), "html")
    assert list(drawn) == [
        "zero-shot, CLIP ViT-B/16, 2 datasets",
        "4-shot CLAP, CLIP ViT-B/16, 1 dataset",
        "StatA, batch 1000: all classes, CLIP ViT-B/16, 1 dataset",
        "zero-shot, tiny-clip, 1 dataset",
        "zero-shot, tiny-clip, 1 dataset, #2",
    ]


def test_command_names_what_it_cannot_use(tmp_path):
    path = write(tmp_path, [row()])
    (tmp_path / "folder.html").mkdir()
    for arguments, message in (
        ([str(tmp_path / "nofile.json")], r"nofile\.json: no such file or folder"),
        ([str(path), "--output", f"{path}/new/x.html"], r"results\.json is a file: choose another place"),
        ([str(path), "--output", str(tmp_path / "x.pdf")], r"x\.pdf: the name must end in \.md, \.html"),
        ([str(path), "--output", str(tmp_path / "folder.html")], "is a folder"),
    ):
        with pytest.raises(ValueError, match=message):
            main(arguments)
    assert main([str(path), "--format", "md", "--output", str(tmp_path / "notes.txt")]) == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["folder.html", "notes.txt", "results.json"]

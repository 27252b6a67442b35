"""The report: numbers by hand, the paper's tables there and back, strangers' names as text."""

import csv
import io
import json
import math
from html.parser import HTMLParser

import pytest
import torch

from orion_hf.card import paper_tables
from orion_hf.cells import MeasuredCell, read_results
from orion_hf.commands.report import main
from orion_hf.layout import Table, as_latex, as_markdown, as_text
from orion_hf.report import report
from orion_hf.results import Results
from orion_hf.sweep import sweep_points, sweep_table
from orion_hf.tables import PAPER_TABLES, groups_of, paper_places, printed_groups, split_row
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
    assert "| **Average of the 2 run** | **50.00** | **70.00 (1)** | **+20.00 (1)** | **42.80** | **51.33** |" in text


# The paper


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
        ({"task": "tiny-land"}, []),
    ],
)  # fmt: skip
def test_where_a_cell_belongs(changes, places):
    cell = {"task": "eurosat", "model": BASE, "method": "zero_shot", "prototypes": "clip", "top1": 50.0}
    assert paper_places(MeasuredCell(**cell | changes)) == places


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
    assert "orion-hf evaluate --task eurosat" in report(read_results([tmp_path]), "latex", files=[results.path])


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
    assert table.header == ("lambda", "ORION", "gain", "paper")
    assert [cells[-1] for cells in table.rows] == ["65.4", "66.5", ""]  # of 200 the paper has a picture only
    assert not any(group.was_run for group in groups_of(cells))  # no figure of a sweep is in the other tables
    assert "Accuracy against lambda" in report(cells, "html")


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

"""`make` in a fresh copy of the repository, and the wheel outside of it."""

import json
import os
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml


@pytest.fixture(scope="module")
def clone(root, tmp_path_factory) -> Path:
    """The files git would check out (and new ones not yet added), in a folder with a space in its name."""
    folder = tmp_path_factory.mktemp("fresh clone") / "orion-hf"
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    for name in filter(None, subprocess.check_output(listing, cwd=root, text=True).split("\0")):
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)
    return folder


def make(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run make from another current directory; this environment serves as the one make would create."""
    return subprocess.run(
        ["make", "-C", str(folder), *arguments],
        cwd=folder.parent,
        env=os.environ | environment,
        text=True,
        capture_output=True,
        timeout=600,
    )


def in_this_environment() -> list[str]:
    return [f"VENV={sys.prefix}", f"--assume-old={sys.prefix}/.ready"]


def test_help_lists_the_two_commands(clone):
    listing = make(clone, "help").stdout
    assert "demo" in listing and "test" in listing


def test_demo_runs_in_a_fresh_clone(clone):
    run = make(clone, *in_this_environment(), "demo")
    assert run.returncode == 0, run.stderr
    for row in ("CLIP", "averaged prompts", "SVD", "ORION"):
        assert row in run.stdout
    results = json.loads((clone / "out" / "demo" / "results.json").read_text(encoding="utf-8"))
    assert 45 < results["top1"]["CLIP"] < 85
    assert (clone / "out" / "demo" / "adapter_model.safetensors").is_file()
    assert "report.html" in run.stdout and "<html" in (clone / "out" / "demo" / "report.html").read_text("utf-8")


def test_demo_uses_the_recommended_settings(root):
    from orion_hf.commands.demo import SETTINGS

    recommended = yaml.safe_load((root / "training" / "configs" / "recommended.yaml").read_text(encoding="utf-8"))
    assert recommended == SETTINGS


def test_demo_names_a_wrong_task_in_one_line(clone):
    run = make(clone, *in_this_environment(), "demo", "TASK=eurosatt")
    assert run.returncode != 0
    [line] = [line for line in run.stderr.splitlines() if "eurosatt" in line]
    assert "eurosat" in line.replace("eurosatt", "")


def test_test_runs_lint_types_and_suite(clone):
    plan = make(clone, *in_this_environment(), "--dry-run", "test").stdout
    assert plan.index("ruff check") < plan.index("bin/mypy") < plan.index("-m pytest")


def test_old_python_is_one_clear_line(clone, tmp_path):
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.8.0\nexit 1\n', encoding="utf-8")
    old.chmod(old.stat().st_mode | stat.S_IXUSR)
    run = make(clone, "setup", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}")
    assert run.returncode != 0 and not (tmp_path / "venv").exists()
    assert "Python 3.8.0 is too old; Python 3.10 or newer is needed" in run.stderr


def test_missing_network_is_one_clear_line(clone, tmp_path):
    run = make(
        clone,
        "setup",
        f"PYTHON={sys.executable}",
        f"VENV={tmp_path / 'venv'}",
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS="",
    )
    assert run.returncode != 0
    assert "installation failed, is the network (the Python package index) within reach?" in run.stderr
    assert not (tmp_path / "venv" / ".ready").exists()


def test_ci_calls_the_test_command(root):
    script = root / ".ci" / "run"
    assert os.access(script, os.X_OK) and "make test" in script.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def wheel(clone) -> Path:
    wheels = clone.parent / "wheels"
    offline = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *offline, ".", "--wheel-dir", wheels], cwd=clone, check=True)
    [file] = wheels.glob("orion_hf-*.whl")
    return file


def test_wheel_holds_the_package_data_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for name in (
        "orion_hf/py.typed",
        "orion_hf/data/datasets/eurosat.json",
        "orion_hf/data/datasets/tiny-land.json",
        "orion_hf/assets/tiny-clip/model.safetensors",
        "orion_hf/assets/tiny-clip/tokenizer.json",
    ):
        assert name in names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"orion_hf"}


def test_wheel_works_outside_the_repository(wheel, tmp_path):
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, "--target", str(tmp_path / "site"), str(wheel)], check=True)
    code = """
import orion_hf, pathlib, sys
assert pathlib.Path(orion_hf.__file__).is_relative_to(sys.argv[1]), orion_hf.__file__
from orion_hf import OrionTask, load_embedded_clip
print(OrionTask.from_name('EuroSAT').prompts()[:3])
assert pathlib.Path(load_embedded_clip(), 'model.safetensors').is_file()
"""
    guard = os.environ["PYTHONPATH"].split(os.pathsep)[0]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([guard, str(tmp_path / "site")])}
    output = subprocess.check_output(
        [sys.executable, "-c", code, str(tmp_path)], cwd=tmp_path, env=environment, text=True
    )
    assert output.startswith("['a centered satellite photo of Annual Crop Land.'")

"""Every command and example of the README runs: Hub ids are served by the loopback Hub, from small random weights."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hub_server import HubServer
from PIL import Image
from tiny_clip_folder import save_tiny_clip

README = Path(__file__).resolve().parent.parent / "README.md"
BASE = "openai/clip-vit-base-patch16"

SEED_ADAPTER = f"""
from orion_hf import OrionCLIPTextModel, OrionTask
model = OrionCLIPTextModel.from_pretrained("{BASE}")
model.task = OrionTask.from_name("eurosat")
model.add_lora()
model.push_to_hub("org/orion-eurosat", merged=True)
"""

# One process for all examples (importing transformers takes seconds); each has a namespace of its own.
RUN_EXAMPLES = """
import pathlib, sys, traceback
for number, path in enumerate(sorted(pathlib.Path(sys.argv[1]).glob("*.py"))):
    try:
        exec(compile(path.read_text(encoding="utf-8"), f"README example {number}", "exec"), {"__name__": "example"})
    except Exception:
        traceback.print_exc()
        sys.exit(f"README example {number} failed:\\n" + path.read_text(encoding="utf-8"))
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """The lines of the bash blocks, comments cut and continued lines joined."""
    text = "\n".join(blocks("bash")).replace("\\\n", " ")
    lines = [re.sub(r"\s+#.*$", "", line).strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


@pytest.fixture(scope="module")
def place(root, tmp_path_factory):
    """A working directory with what the README speaks of, and an environment whose Hub is the loopback one."""
    folder = tmp_path_factory.mktemp("readme")
    for name in ("training", "benchmarks"):
        shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    picture = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(picture).save(folder / "field.jpg")
    (folder / "classes.txt").write_text("oak\nelm\nash\n", encoding="utf-8")
    with HubServer() as hub:
        hub.add_repo(BASE, save_tiny_clip(folder / "base"))
        environment = hub.env(token=hub.token)
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
        environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
        run([sys.executable, "-c", SEED_ADAPTER], folder, environment)
        yield folder, environment


def run(command, folder: Path, environment: dict[str, str], **options) -> None:
    done = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, timeout=600, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def test_every_example_runs(place, tmp_path):
    folder, environment = place
    for number, block in enumerate(blocks("python")):
        (tmp_path / f"{number:02d}.py").write_text(block, encoding="utf-8")
    run([sys.executable, "-c", RUN_EXAMPLES, str(tmp_path)], folder, environment)


def test_every_command_runs(place):
    """All but the two `make` commands, which tests/test_make.py runs in a fresh clone."""
    folder, environment = place
    for command in commands():
        if command.startswith("make"):
            assert re.fullmatch(r"make (demo|test)", command), f"test_make.py does not run {command!r}"
            continue
        run(command, folder, environment, shell=True)


def test_relative_links_lead_somewhere(root):
    for document in (README, root / "CHANGELOG.md", root / "benchmarks" / "README.md"):
        for target in re.findall(r"\]\(([^)#\s]+)", document.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_figures_are_those_that_the_script_draws(root, tmp_path):
    shown = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README.read_text(encoding="utf-8"))
    assert len(shown) == 2 and all((root / path).is_file() for path in shown)
    done = subprocess.run(
        [sys.executable, root / "training" / "readme_figures.py", "--output_dir", tmp_path],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(Path(path).name for path in shown)
    for path in shown:
        drawn, kept = (Image.open(folder / Path(path).name) for folder in (tmp_path, (root / path).parent))
        assert drawn.size == kept.size

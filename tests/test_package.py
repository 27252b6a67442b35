"""The package as a whole: cheap import, lazy names, one version, the command line."""

import doctest
import importlib
import json
import pkgutil
import subprocess
import sys
from importlib.metadata import version

import pytest

import orion_hf
from orion_hf import cli

MODULES = [module.name for module in pkgutil.walk_packages(orion_hf.__path__, "orion_hf.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_are_right(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_import_is_cheap():
    """`import orion_hf` adds under 0.3 s to `import torch`, and pulls in none of the heavy libraries."""
    code = """
import json, sys, time
import torch
start = time.perf_counter()
import orion_hf
seconds = time.perf_counter() - start
slow = ("transformers.pipelines", "transformers.modeling_utils", "peft", "datasets", "accelerate")
heavy = [name for name in slow if name in sys.modules]
print(json.dumps({"seconds": seconds, "heavy": heavy}))
"""
    result = json.loads(subprocess.check_output([sys.executable, "-c", code], text=True))
    assert result["heavy"] == []
    assert result["seconds"] < 0.3


@pytest.mark.parametrize("name", [name for name in orion_hf.__all__ if name != "__version__"])
def test_every_public_name_resolves(name):
    value = getattr(orion_hf, name)
    assert value.__doc__
    assert name in dir(orion_hf)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'OrionTusk'"):
        orion_hf.OrionTusk  # noqa: B018


def test_one_version(capsys):
    assert version("orion-hf") == orion_hf.__version__
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"orion-hf {orion_hf.__version__}\n"


def test_command_line_lists_its_commands(capsys):
    assert cli.main([]) == 0
    listing = capsys.readouterr().out
    for name, summary in cli.command_help().items():
        assert name in listing
        assert summary and summary in listing


def test_unknown_command_is_one_line(capsys):
    assert cli.main(["fintune"]) == 2
    error = capsys.readouterr().err
    assert "'fintune'" in error and error.count("\n") == 1

"""Golden vectors: every file whose name starts with a test's prefix is one case of that test.

The folder is ``ORION_GOLDEN_DIR``, by default ``tests/golden``, whose INDEX files give format and tolerances.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

GOLDEN_DIR = Path(os.environ.get("ORION_GOLDEN_DIR") or Path(__file__).parents[1] / "golden")


@dataclass(frozen=True)
class GoldenCase:
    options: dict
    tensors: dict[str, torch.Tensor]
    meta: dict

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def close(self, name: str, value: torch.Tensor, tolerance: float) -> None:
        torch.testing.assert_close(value, self[name].to(value.dtype), rtol=0, atol=tolerance)


def load_case(path: Path) -> GoldenCase:
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        options = json.loads(metadata.get("hyperparameters") or metadata["hparams"])
        meta = json.loads(metadata.get("meta", "{}"))
        names = list(file.keys())
        return GoldenCase(options, {name: file.get_tensor(name) for name in names}, meta)


def pytest_configure(config):
    if not any(GOLDEN_DIR.glob("*.safetensors")):
        raise pytest.UsageError(f"ORION_GOLDEN_DIR: {GOLDEN_DIR} holds no golden vectors (*.safetensors).")
    config.addinivalue_line("markers", "golden(prefix): run once for every golden file of this prefix")


def pytest_generate_tests(metafunc):
    marker = metafunc.definition.get_closest_marker("golden")
    if marker:
        files = sorted(GOLDEN_DIR.glob(f"{marker.args[0]}*.safetensors"))
        metafunc.parametrize("case", files, ids=[file.name for file in files], indirect=True)


@pytest.fixture
def case(request) -> GoldenCase:
    return load_case(request.param)

"""Checkpoints that are whole or absent: one safetensors file, one JSON file, one rename.

    output_dir/checkpoint-40/state.safetensors    tensors: LoRA weights, AdamW moments, anchors, displacements
    output_dir/checkpoint-40/state.json           numbers: step, settings

A checkpoint is written in a hidden folder beside its place, forced to disk and renamed, so a process killed
at any moment leaves the previous checkpoint or the new one. No generator state is kept: what is random in a
run is a function of its seed and the step.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from .configuration_orion import ORION_CONFIG_NAME
from .repository import ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME, PROTOTYPES_NAME
from .training_log import LOG_NAME

# results.json and gram_heatmaps.png tell of the adapter beside them: they must not outlive it.
_OF_A_RUN = (
    ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME, ORION_CONFIG_NAME, PROTOTYPES_NAME,
    LOG_NAME, "results.json", "gram_heatmaps.png",
)  # fmt: skip
_NAME = re.compile(r"checkpoint-(\d+)")
_TENSORS, _NUMBERS = "state.safetensors", "state.json"


def checkpoints(output_dir: str | os.PathLike) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = [path for path in Path(output_dir).glob("checkpoint-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_step_of)


def clear_run(output_dir: str | os.PathLike) -> None:
    """Remove what an earlier run left: checkpoints, adapter, prototypes, log, and what was measured of them.

    Full weights are left alone: they may be what somebody else put there.
    """
    output_dir = Path(output_dir)
    for path in checkpoints(output_dir):
        remove_checkpoint(path)
    for name in _OF_A_RUN:
        (output_dir / name).unlink(missing_ok=True)


def save_checkpoint(
    output_dir: str | os.PathLike, step: int, tensors: dict[str, Tensor], numbers: dict[str, Any], keep: int
) -> Path:
    """Write ``checkpoint-<step>`` and remove all but the newest ``keep``.

    Args:
        output_dir: folder of the run.
        step: steps done.
        tensors: by name; copied to the CPU.
        numbers: anything JSON holds.
        keep: checkpoints to leave, this one included.
    """
    output_dir = Path(output_dir)
    folder, stage = output_dir / f"checkpoint-{step}", output_dir / f".saving-checkpoint-{step}"
    shutil.rmtree(stage, ignore_errors=True)  # of a process that was killed
    try:
        stage.mkdir(parents=True)
        packed = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
        _write_durably(stage / _TENSORS, packed)
        _write_durably(stage / _NUMBERS, json.dumps(numbers, indent=2).encode())
        _sync_folder(stage)
        os.rename(stage, folder)
        _sync_folder(output_dir)
    except OSError as error:
        shutil.rmtree(stage, ignore_errors=True)
        raise OSError(
            f"{folder} could not be saved ({error.strerror}); earlier checkpoints are intact. "
            "Make room, then continue with --resume_from_checkpoint."
        ) from error
    for old in checkpoints(output_dir)[:-keep]:
        remove_checkpoint(old)
    return folder


def load_checkpoint(folder: str | os.PathLike) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and numbers of a checkpoint."""
    folder = Path(folder)
    try:
        tensors = load_file(folder / _TENSORS)
        numbers = json.loads((folder / _NUMBERS).read_text(encoding="utf-8"))
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"{folder} is not a checkpoint that can be read ({error}). Name another one.") from error
    return tensors, numbers


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint; renamed first, so that a half-removed one is never taken for a whole one."""
    discarded = folder.with_name(f".removing-{folder.name}")
    shutil.rmtree(discarded, ignore_errors=True)
    os.rename(folder, discarded)
    shutil.rmtree(discarded, ignore_errors=True)


def pack_optimizer(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, Tensor]:
    """AdamW's moments and step counts as named tensors; ``names`` are its parameters, in order."""
    state = optimizer.state_dict()["state"]
    return {
        f"optimizer.{key}/{names[index]}": torch.as_tensor(value)
        for index, values in state.items()
        for key, value in values.items()
    }


def unpack_optimizer(optimizer: torch.optim.Optimizer, names: list[str], tensors: dict[str, Tensor]) -> None:
    """The inverse of [`pack_optimizer`]."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if key.startswith("optimizer."):
            quantity, name = key.removeprefix("optimizer.").split("/")
            state.setdefault(names.index(name), {})[quantity] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("checkpoint-"))


def _write_durably(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Force the names in a folder to disk; otherwise a rename may be lost when the power fails."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

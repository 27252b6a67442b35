"""Processes of an `accelerate launch`, or of torchrun, that belong together also where there is no GPU."""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import Accelerator


def on_cpu() -> bool:
    """Whether the processes of this launch compute on CPUs, by choice or for want of anything else."""
    wanted = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    return wanted or not torch.accelerator.is_available()


def start_accelerator(**options: Any) -> Accelerator:
    """An [`Accelerator`] that knows the other processes of the launch.

    On a machine without a GPU accelerate takes the processes of a launch for strangers, each of which would do all the
    work and write the same files, unless it is told to use the CPU.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and on_cpu():
        os.environ["ACCELERATE_USE_CPU"] = "true"
    return Accelerator(**options)

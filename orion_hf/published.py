"""Options that the authors of a few-shot method chose for one task, where they differ from task to task."""

from __future__ import annotations

from typing import Any


def published_options(method: str, task: str) -> dict[str, Any]:
    """The authors' options for a task; none where the method's defaults are meant for all.

    Example:
        >>> published_options("coop", "imagenet"), published_options("clap", "imagenet")
        ({'epochs': 50}, {})
    """
    from .methods.tip_adapter import PUBLISHED, published_settings

    if method.startswith("tip_adapter") and task in PUBLISHED:
        epochs = {"epochs": 100} if (method, task) == ("tip_adapter_f", "eurosat") else {}
        return published_settings(task) | epochs
    return {"epochs": 50} if (method, task) == ("coop", "imagenet") else {}

"""Registers our pipeline task with transformers the moment its pipelines are imported, and not before.

``import orion_hf`` alone must make ``pipeline("orion-zero-shot-image-classification")`` work, yet importing
``transformers.pipelines`` takes seconds, which a user of ``OrionTask`` should not pay.
"""

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

PIPELINES = "transformers.pipelines"


class _AfterPipelines(MetaPathFinder):
    """Sees the import of ``transformers.pipelines`` once and registers the task when it has run."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname != PIPELINES:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run_module = spec.loader.exec_module

            def run_then_register(module: ModuleType) -> None:
                run_module(module)
                _register()

            spec.loader.exec_module = run_then_register  # type: ignore[method-assign]
        return spec


def _register() -> None:
    # The module registers the task when it is imported; it may be what is importing transformers' pipelines just now.
    import_module(".pipeline", __package__)


def register_with_transformers() -> None:
    """Register now if transformers' pipelines are loaded already, else as soon as they are."""
    if PIPELINES in sys.modules:
        _register()
    elif not any(isinstance(finder, _AfterPipelines) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterPipelines())

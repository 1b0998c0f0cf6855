"""Recorder of SGLang's attention backends, and of vLLM's metadata builders of layers with a state.

Python runs it at its start if this folder is on PYTHONPATH. ``attn-testkit record --to FILE -- COMMAND`` puts it there.
It needs no attn_testkit in the server's environment.
"""

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

BASES = {
    "sglang.srt.layers.attention.base_attn_backend": "AttentionBackend",
    "vllm.v1.attention.backend": "AttentionMetadataBuilder",
}
"""Module -> base class of a server's backends, or of what plans for them."""
HERE = Path(__file__).resolve().parent


def load_watch() -> ModuleType:
    """``record/watch.py``, by its path."""
    spec = importlib.util.spec_from_file_location("attn_testkit_record_watch", HERE.parent / "watch.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Finder:
    """Finds the modules of ``BASES`` as usual, and records their classes after the import."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find a module; Python calls it for every import."""
        if name not in BASES:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_watch(module: ModuleType) -> None:
            run(module)
            watch = sys.modules.get("attn_testkit_record_watch") or load_watch()
            watch.watch_subclasses(getattr(module, BASES[name]))

        spec.loader.exec_module = run_and_watch  # type: ignore[method-assign]
        return spec


def run_the_next() -> None:
    """Run another ``sitecustomize`` that this one hides."""
    rest = [folder for folder in sys.path if Path(folder or ".").resolve() != HERE]
    spec = PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("ATTN_TESTKIT_RECORD"):
    sys.meta_path.insert(0, Finder)
run_the_next()

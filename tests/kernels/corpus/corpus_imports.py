"""What has to be true of the process before a project is imported on a CPU."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import os
import sys
import types
from typing import Any


def prepare(project: str) -> None:
    """Let the imports of a project pass where there is no GPU."""
    logging.disable(logging.CRITICAL)
    if project in ("sglang", "vllm"):
        from attn_testkit_servers.bridges.sglang import imports

        imports.prepare()
    if project == "flag_gems":
        os.environ["GEMS_VENDOR"] = "nvidia"
        sys.meta_path.insert(0, _WithoutLauncher())
        from triton.runtime.interpreter import InterpretedFunction

        InterpretedFunction.cache_key = property(lambda function: function.fn.__qualname__)


def _plain_tuner(configs: Any, key: Any, *_: Any, **options: Any) -> Any:
    import triton

    known = {name: options[name] for name in ("prune_configs_by", "reset_to_zero", "restore_value") if name in options}
    return triton.autotune(configs=configs, key=key, **known)


class _WithoutLauncher(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """FlagGems launches through a cache of compiled kernels, which takes no interpreted ones: Triton's own launcher
    takes its place."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in ("flag_gems.utils.libentry", "flag_gems.utils.pointwise_dynamic"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        self._loaders[name] = spec.loader
        spec.loader = self
        return spec

    def __init__(self) -> None:
        self._loaders: dict[str, Any] = {}

    def create_module(self, spec: Any) -> Any:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        self._loaders[module.__name__].exec_module(module)
        if module.__name__.endswith("libentry"):
            module.libtuner = _plain_tuner  # type: ignore[attr-defined]
            module.libentry = lambda *_, **__: lambda function: function  # type: ignore[attr-defined]
        else:
            from triton.runtime.interpreter import InterpretedFunction

            module.JITFunction = InterpretedFunction  # type: ignore[attr-defined]

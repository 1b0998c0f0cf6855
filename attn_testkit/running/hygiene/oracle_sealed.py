"""No oracle in a worker: the right answer is the judge's, and one import away in any process that has the kit."""

from __future__ import annotations

import inspect
import sys
from typing import Any, NoReturn

__all__ = ["seal_oracle"]

_ORACLE = "attn_testkit.oracle."


def _sealed(*_: Any, **__: Any) -> NoReturn:
    # Names are looked up in the module that this code is put into: there must be none.
    raise RuntimeError("attn_testkit's oracle was asked by a process that runs a backend; it answers the judge alone")


def seal_oracle() -> None:
    """Have every function of the oracle raise in this process, whoever holds it by now."""
    for name, module in list(sys.modules.items()):
        if name.startswith(_ORACLE):
            for function in map(inspect.unwrap, filter(callable, list(vars(module).values()))):
                if inspect.isfunction(function) and function.__module__ == name:
                    function.__code__ = _sealed.__code__

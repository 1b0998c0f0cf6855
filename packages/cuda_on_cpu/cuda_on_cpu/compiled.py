"""Regions that torch.compile would compile: here their operations run eagerly."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

_EVAL_FRAME = os.path.join(os.path.dirname(torch.__file__), "_dynamo", "eval_frame.py")


def in_compiled_region() -> bool:
    """True if the current code would have been compiled by Inductor: some caller is its wrapper of a function.

    torch's settings for debugging ("eager") compile nothing, and functions of torch use them for tracing.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _EVAL_FRAME:
            context = frame.f_locals.get("self")
            if getattr(context, "compiler_config", None) is not None:
                return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def run_eagerly(stack: ExitStack, noted: Callable[[], object]) -> None:
    """Keep torch.compile from compiling until ``stack`` is closed; ``torch._dynamo`` must be imported.

    ``noted`` is called whenever code runs that Inductor would have compiled.
    """
    stack.enter_context(torch.compiler.set_stance("force_eager"))
    eval_frame: Any = sys.modules.get("torch._dynamo.eval_frame")
    stock = getattr(eval_frame, "_callback_from_stance", None)
    if stock is None:
        return

    def note(callback: Any) -> Any:
        if _is_inductor(callback):
            noted()
        return stock(callback)

    stack.callback(setattr, eval_frame, "_callback_from_stance", stock)
    eval_frame._callback_from_stance = note


def _is_inductor(callback: Any) -> bool:
    """True if the innermost compiler of nested wrappers is Inductor."""
    while (inner := getattr(callback, "_torchdynamo_orig_backend", None)) is not None:
        callback = inner
    return hasattr(callback, "get_compiler_config")

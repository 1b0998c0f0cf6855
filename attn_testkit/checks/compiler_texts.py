"""The reason in an exception of a torch compiler: such exceptions wrap each other and end with the same advice."""

from __future__ import annotations

import inspect
import re

from ..results.texts import message_of

_COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch.fx")
_BOILERPLATE = re.compile(
    r"Set TORCHDYNAMO_VERBOSE=1|You can suppress this exception|For even more developer context|import torch\._dynamo"
    r"|torch\._dynamo\.config\.suppress_errors|Developer debug context|For more details about this graph break"
    r"|^from user code:|^Hint: "
)
_GOT = re.compile(r"\bgot (\w+)\((['\"])(.*)\2\)", re.DOTALL)
"""Dynamo's quotation of an error that an operation raised on fake tensors."""
_LAYERS = 8
"""Number of nested exceptions that are searched."""


def said_by_compiler(error: BaseException) -> str:
    """The innermost reason of an exception of torch.compile in one line; empty for any other exception."""
    for _ in range(_LAYERS):
        inner = inspect.getattr_static(error, "inner_exception", None)
        if not isinstance(inner, BaseException) or inner is error:
            break
        error = inner
        if not _of_compiler(error):
            return f"{type(error).__name__}: {_first(message_of(error).splitlines())}"
    if not _of_compiler(error):
        return ""
    text = message_of(error)
    quoted = _GOT.search(text)
    if quoted:
        return f"{quoted[1]}: {_first(quoted[3].replace(chr(92) + 'n', chr(10)).splitlines())}"
    lines = text.split("\n\n")[0].splitlines()
    explained = next((line for line in lines if line.strip().startswith("Explanation:")), "")
    return ": ".join(filter(None, (_first(lines), explained.partition("Explanation:")[2].strip())))


def _of_compiler(error: BaseException) -> bool:
    return type(error).__module__.startswith(_COMPILERS)


def _first(lines: list[str]) -> str:
    """The first line that is about this failure."""
    kept = [line.strip() for line in lines if line.strip() and not _BOILERPLATE.search(line.strip())]
    return kept[0] if kept else "(no message)"

"""Functions for texts of a backend or a compiler, which are sent, recorded and recognized."""

from __future__ import annotations

import re

MOST_OTHERS = 4000

NOTE_ON_THE_CASE = "in this case "
"""Beginning of a line of a hint that says what is special about the case, and names no cause."""

RESTATES_THE_CHECK = (
    "the graph still uses a value from capture time",
    "only the graph is wrong",
    "with zeros instead of NaN in ",
    "with numbers instead of NaN in ",
    "the step is right as the only replay of the only bucket",
    "the step is right when no other mode and no eager step uses the instance",
    "a width that is not the batch's is used",
    "data of padded rows reach real ones",
    "the same eager step passes on a fresh instance without graphs",
    "state of an earlier step is kept",
)
"""Beginnings of hints that every failure of a check has: they repeat why diagnosis chose that check."""

_UNREADABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")
"""Control characters and lone surrogates: they move a terminal's cursor or cannot be written to a file."""


def telling_first(hint: str) -> str:
    """The lines of a hint. Lines that only restate the check come last."""
    return "\n".join(sorted(hint.splitlines(), key=lambda line: line.startswith(RESTATES_THE_CHECK)))


def readable(text: str, most: int = MOST_OTHERS) -> str:
    """The text as it is sent and recorded: without control characters, at most ``most`` characters. A longer text keeps
    its beginning and its end, with the number of characters left out between them.
    """
    text = _UNREADABLE.sub(lambda found: repr(found[0])[1:-1], text.replace("\r\n", "\n"))
    if len(text) <= most:
        return text
    room = most - len(_left_out(len(text)))
    head = room * 3 // 4
    return text[:head] + _left_out(len(text) - room) + text[len(text) - room + head :]


def _left_out(count: int) -> str:
    return f" [... {count} characters left out ...] "


def message_of(error: BaseException) -> str:
    """The message of an exception, even if its own ``__str__`` raises."""
    try:
        return str.__str__(str(error))
    except BaseException as broken:
        return f"(no message: its __str__ raised {type(broken).__name__})"


_GENERATED = re.compile(
    # FX graphs, dataclasses, decorators, frozen modules; not what somebody types into a notebook or at a prompt.
    r"^<(?!stdin|ipython-input|doctest)"
    # Inductor names a file after the hash of what is in it, in a folder that each user may choose.
    r"|(?:^|/)c[a-z2-7]{51}\.py$|/torchinductor_[^/]*/|/fxgraph/|/torch_compile_debug/"
    # Folders of compiled kernels: Triton's are hashes in base 32; FlashInfer, TileLang, CuTe and torch's extensions.
    r"|/[A-Z2-7]{52}/|/\.triton/|/triton[-_]cache/|/\.tilelang/|/\.cache/(?:flashinfer|tilelang|torch|triton|nvidia)/"
    r"|/torch_extensions/|/cutlass_python_cache"
)


def is_generated(filename: str) -> bool:
    """True if a compiler wrote this file, according to its path: no line of it belongs to an author."""
    return bool(_GENERATED.search(filename.replace("\\", "/")))

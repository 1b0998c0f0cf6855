"""Capabilities that a backend does not declare and others do: printed next to the verdict, which cannot show them. An
author who leaves ``graph`` out of the capabilities, or never writes ``families``, gets a green run that covers less.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...contract import Capabilities, ForwardMode
from ...contract.head_layout import HEAD_LAYOUTS


def not_declared_here(declared: Capabilities) -> tuple[str, ...]:
    """Phrases: executions of declared modes, other modes, head layouts, and capabilities that the author did
    not write."""
    kept = list(declared.unwritten())
    if declared.heads.families <= {"mha"}:
        kept = [name for name in kept if name != "heads.gqa_ratios"]
    # A backend has layers with keys, with states or that compress, and nobody misses the others.
    own = declared.state is not None, declared.compressor is not None
    phrases = (
        ("graph for ", _names(declared.eager - declared.graph)),
        ("eager for ", _names(declared.graph - declared.eager)),
        ("", _names(set(ForwardMode) - declared.eager - declared.graph)),
        (
            "",
            [
                name
                for name, each in _LAYOUTS.items()
                if (each.has_state, each.compresses) == own and name not in declared.heads.families
            ],
        ),
        ("left at the default: ", kept),
    )
    return tuple(what + ", ".join(names) for what, names in phrases if names)


_LAYOUTS = dict(HEAD_LAYOUTS)


def _names(modes: Iterable[ForwardMode]) -> list[str]:
    found = set(modes)
    return [mode.value for mode in ForwardMode if mode in found]

"""Memory of requests that leaves to the host and comes back to other slots before each step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...contract import HOST_LAYOUTS, Capabilities, ForwardMode
from ...glossary import Entry
from ..fields import Changes, Fields
from .feature import Asked, Columns, Covered, Feature, Row, Trait, Without, Word, of_fields

_LAYOUTS = {name.replace("_", ""): name for name in HOST_LAYOUTS}
# The longest first: one name begins with another.
_PATTERN = "|".join(sorted(_LAYOUTS, reverse=True))


def _memory_of(case: Fields) -> set[str]:
    """Kinds of memory that leave in a case, of ``OFFLOADED``."""
    states = {"states"} if case.state is not None else set[str]()
    keys = {"keys"} if case.state is None or case.layers.hybrid else set[str]()
    return states | keys | ({"index_keys"} if case.indexer else set())


def layouts_of(declared: Capabilities) -> list[str]:
    """Host layouts that are declared, in the order of ``HOST_LAYOUTS``."""
    return [name for name in HOST_LAYOUTS if declared.offloads and name in declared.offloads.host_layouts]


def _declared(declared: Capabilities, case: Fields) -> bool:
    offloads = declared.offloads
    if not case.offload or offloads is None:
        return not case.offload
    return case.offload in offloads.host_layouts and _memory_of(case) <= set(offloads.memory)


def _columns(declared: Capabilities, mode: ForwardMode, tier: str) -> Mapping[str, Sequence[Any]]:
    return {"offload": ["", *found]} if (found := layouts_of(declared)) else {}


def _of_row(declared: Capabilities, row: Row, so_far: Changes) -> Changes:
    return {"offload": row["offload"]} if row.get("offload") else {}


def _wrong(case: Fields) -> str:
    if case.offload and case.state is not None and case.state.big:
        return "offloading: pools are compared as a whole, and this one has more than 2^31 elements"
    return ""


def _simpler(declared: Capabilities, case: Fields, minimal: Fields) -> Iterator[Changes]:
    if case.offload and case.offload != HOST_LAYOUTS[0]:
        yield {"offload": HOST_LAYOUTS[0]}


OFFLOADED_TO = Columns(_columns, _of_row, further=("offload",))
OFFLOAD = Feature(
    name="offloading",
    order=298,
    fields=("offload",),
    traits=(
        Trait(
            "offloading",
            lambda case: bool(case.offload),
            excludes={
                "memory from another instance": "memory moves in one way before a step",
                "loop": "the memory of a loop is its own from round to round",
                "multi-mode instance": "only the requests of one mode would leave",
                "KV splits": "keys that are dealt among ranks have other slots",
                "rows on ranks": "each rank would have to move all keys",
                "keys wider than values": "values of such keys are in memory of their own",
                "cross-attention layers": "keys of encoders do not leave in servers that run encoders",
                "encoder-only layers": "layers of encoders have no cache",
                "rollback of states by slots": "a request would have a window and a state in different slots",
                "snapshots of states": "snapshots leave with the prefix cache that owns them",
                "states of a prefix cache": "states of cached prompts leave with the prefix cache that owns them",
                "bigpool": "the pools are compared as a whole",
            },
        ),
    ),
    wrong=_wrong,
    words=(
        Word(
            rf"offload(?P<layout>{_PATTERN})",
            lambda match, so_far: {"offload": _LAYOUTS[match["layout"]]},
            lambda case: f"offload{case.offload.replace('_', '')}" * bool(case.offload),
        ),
    ),
    explained=(
        Entry(
            "offloadpagefirst",
            "Before each step memory of its requests leaves to the host, in the layout page_first, and a part of it "
            "comes back to other slots. It leaves again while the step is in flight.",
            also=("HiCache", "KV offloading", "load back", "swap in", "swap out", "retraction"),
            page="how-to/offload.md",
        ),
    ),
    describe=lambda case: {"offload": f"the host and back, in the layout {case.offload}" if case.offload else ""},
    declared=(
        Asked(lambda case: f"offloading of {', '.join(sorted(_memory_of(case)))} to {case.offload}", _declared),
    ),
    values=OFFLOADED_TO,
    covered=(
        Covered(
            "offload",
            "memory leaves to the host and comes back, in the layout:",
            lambda declared, mode: layouts_of(declared),
            lambda declared, case: case.offload or None,
            Without("The covering array has every layout."),
        ),
    ),
    simpler=of_fields("offload", steps=_simpler),
    undeclared=Without("A constructor does not see if requests will leave."),
    varies="instance",
    apply=Without("runner_modes/offloading.py allocates the host memory and calls offload and reload."),
)  # fmt: skip

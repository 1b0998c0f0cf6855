"""Chunked-local layers (Llama 4): a row sees only the keys of its own chunk of positions."""

from __future__ import annotations

from collections.abc import Sequence

from ...contract import BackendContext, Capabilities
from ...glossary import Entry
from ..fields import Changes, Fields
from ..layers import PERIOD
from .feature import Asked, Bound, Columns, Feature, OnLayers, Trait, Word, of_number, option
from .outside import with_layers
from .rows import keys_of
from .window import branches

_CHUNK = 64
"""Positions of a chunk, or the next multiple of a page."""


def _declared(declared: Capabilities, case: Fields) -> bool:
    fits = case.local_chunk % case.page_size == 0 and not branches(case.tree)
    return not case.local_chunk or (case.mode in declared.windows.chunked and fits)


def _undeclared(declared: Capabilities, context: BackendContext) -> tuple[str, BackendContext] | None:
    if context.modes <= declared.windows.chunked:
        return None
    return "chunked-local layers", with_layers(context, attention_chunk_size=context.page_size, sliding_window_size=-1)


def _layers(case: Fields) -> Sequence[Changes]:
    """Every second layer from the first on; the others see all keys, as in Llama 4."""
    sizes = (case.local_chunk, 0)
    return [{"attention_chunk_size": sizes[place % PERIOD]} for place in range(case.layers.count)]


LOCAL_CHUNK = Feature(
    name="local chunk",
    order=170,
    fields=("local_chunk",),
    option=True,
    traits=(
        Trait(
            "chunked-local layers",
            lambda case: case.local_chunk > 0,
            excludes={
                "sliding window": "a layer has a window or chunks, and models have only one kind",
                "branching trees": "nodes of a tree have positions of their own",
            },
        ),
    ),
    words=(
        Word(
            r"local(\d+)",
            lambda match, so_far: {"local_chunk": int(match[1])},
            lambda case: f"local{case.local_chunk}" if case.local_chunk else "",
            bounds=(Bound("local chunk", 1, 1 << 24),),
        ),
    ),
    explained=(
        Entry(
            "local64",
            "Chunked-local attention in every second layer: a row sees only the keys of the 64 positions that"
            " it is in.",
            also=("chunked-local layers",),
            numbers=True,
        ),
    ),
    describe=lambda case: {"local_chunk": f"{case.local_chunk} positions, in layer 0" if case.local_chunk else ""},
    declared=(Asked(lambda case: f"chunked-local layers of {case.local_chunk}", _declared),),
    values=Columns(
        lambda declared, mode, tier: {"chunked_layers": [False, True]} if mode in declared.windows.chunked else {},
        lambda declared, row, so_far: (
            {"local_chunk": -(-_CHUNK // so_far["page_size"]) * so_far["page_size"]}
            if row.get("chunked_layers")
            else {}
        ),
        meets={"chunked_layers": ("prefixes", "new_tokens")},
        further=("chunked_layers",),
    ),
    covered=(
        option(
            "chunked-local layers",
            lambda declared, mode: mode in declared.windows.chunked,
            lambda case: 0 < case.local_chunk < max(keys_of(case)),
        ),
    ),
    simpler=of_number("local_chunk"),
    undeclared=(_undeclared,),
    varies="layer",
    apply=(OnLayers(_layers),),
)

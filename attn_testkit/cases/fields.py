"""The fields of a case: plain data, without a name. Features read it, check it and say how it is written."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Self, TypeVar

from ..contract import ForwardMode, HeadShape
from .compression import Compression
from .draft import Draft
from .head_shapes import HeadMap
from .heads import Heads as Heads
from .indexing import Indexing
from .layers import PERIOD, Layers
from .rows import Drafted, Extend, Rows, Verify
from .selection import Selection
from .spans import SpanShape
from .state import StateShape
from .trees import Tree

Changes = Mapping[str, Any]
"""Names of fields and their new values."""


@dataclass(frozen=True)
class Fields:
    """The values of a case by name, and properties that follow from them. ``Case`` adds the id, which features write,
    and refuses values that exclude each other.

    Lengths are in tokens; every tuple has one entry per request.
    """

    rows: Rows
    """Rows of each request, from which the mode follows (``cases/rows.py``)."""
    heads: Heads
    head_dim: int
    """Width of a value row (MLA: of the latent part)."""
    dtype: str
    """Dtype of q, k, v and the output: ``fp16``, ``bf16`` or ``fp32``."""
    page_size: int
    """KV slots per page."""
    prefixes: tuple[int, ...]
    """Keys of each request of the case's own batch before this step."""
    rope_dim: int = 0
    """MLA: width of the part of a key that is not a value. Elsewhere columns that keys have more than values, mostly
    0."""
    state: StateShape | None = None
    """Recurrent states; None: layers have keys."""
    compression: Compression | None = None
    """Groups of tokens of which layers make one row each; None: layers have keys or states."""
    kv_dtype: str = "same"
    """``same`` as the model's ``dtype``, or another of ``KV_DTYPES``."""
    kv_layout: str = "nhd"
    """Layout of the pool in memory: one of ``KV_LAYOUTS``."""
    layout: str = "shuffled"
    """Order of slots: one of ``LAYOUTS`` (``features/slot_order.py``)."""
    bucket: int = 1
    """Batch size of the graph."""
    padding: str = "prod"
    """One of ``PADDINGS`` (``features/padding.py``)."""
    data: str = "gauss"
    """A data pattern (``features/data_pattern.py``)."""
    window: int = -1
    """W of every second layer; the others have no window, or a wider one: see ``make_layers``."""
    layer_windows: str = "any"
    """One of ``LAYER_WINDOWS``. ``one``: the other layers have no window. ``same``: all layers have it. ``any``: for a
    case without a window."""
    non_causal_window: str = "none"
    """One of ``NON_CAUSAL_WINDOWS``: the meaning of the window in layers that are not causal; else ``none``."""
    encoder: str = "none"
    """``whole`` or ``windows``, of ``ENCODER_LAYERS``: all layers are of an encoder, without a cache; else ``none``."""
    local_chunk: int = 0
    """Positions of a chunk of chunked-local layers, every second one; 0: no layer is."""
    encoder_len: int = 0
    """Most encoder keys of a request in cross-attention layers, every second one; 0: no layer is."""
    alibi: bool = False
    """All layers have ALiBi slopes, one a query head."""
    spans: SpanShape | None = None
    """Bidirectional spans of the steps; None: there are none."""
    qq_bias: str = "none"
    """One of ``QQ_BIASES`` (``features/qq_bias.py``), in all layers."""
    usual_scaling: bool = False
    """True if all layers have the scaling 1/sqrt(head_dim). If False, each layer has a different scaling; MLA always
    has False."""
    logit_cap: float = 0.0
    """Soft cap of every second layer; 0.0: none."""
    sinks: bool = False
    """All layers have attention sinks, one logit a query head."""
    selection: Selection | None = None
    """Keys that each row selects; None: a row attends to all keys that it may see."""
    indexer: Indexing | None = None
    """Indexer with which the backend selects keys; None: the kit makes the selections."""
    layers: Layers = field(default=Layers())
    """Number and ids of the layers, and whether they share a KV group."""
    kv_sharing: bool = False
    """True if the last layer stores nothing and reads the keys and values of the first layer."""
    kv_splits: str = ""
    """Splits of the keys, each attended with its log-sum-exp: ``whole``, ``prefix`` for the prefix and the new rows,
    ``pagesR`` or ``tokensR`` for R ranks (``features/kv_splits.py``). Empty: no splits."""
    merged_by_backend: bool = False
    """True if the backend merges the splits; otherwise the kit merges them."""
    row_ranks: str = ""
    """Ranks among which the rows of each prompt are dealt, as ``3zigzag``: R and one of ``ROW_ORDERS``
    (``features/row_ranks.py``). Empty: one instance computes all rows."""
    handed: str = ""
    """The instance from which the requests of a step come, as ``2to4p16hnd``: 2 tensor-parallel ranks hand over to one
    of 4, from pages of 16 slots in the layout ``hnd`` (``features/handed.py``). Empty: they have been here before."""
    offload: str = ""
    """Layout of the host memory to which requests leave before a step, and from which they come back
    (``contract/offloading.py``). Empty: they stay on the device."""
    multi_mode: bool = False
    """True if graph runs of all declared modes share one backend instance and are interleaved."""
    variants: frozenset[str] = frozenset()
    """Words of server variants (``features/server/``); empty: the conventions that all servers have."""
    seed: int = 0
    """Other data, slots, schedule and choices for the same shapes."""
    instance_of: Fields | None = field(default=None, repr=False)
    """The case whose backend instance and layers this one shares. It is not part of the id: ``co_residents`` and the
    stages of a loop make such cases, and the id of the other case rebuilds them."""

    def with_changes(self, **changes: Any) -> Self:
        """The case with other values, by the names of its fields or of its records' fields."""
        return replace(self, **changes)

    @property
    def head_shape(self) -> HeadShape:
        """Heads that contain the heads of every layer: see ``cases/head_shapes.py``."""
        return HeadShape(self.heads.q_heads, self.heads.kv_heads, self.head_dim + self.rope_dim)

    @cached_property
    def head_maps(self) -> tuple[HeadMap, ...]:
        """Places of the heads of each layer in ``head_shape``; empty if all layers have this shape."""
        shapes = self.layers.shapes
        return tuple(HeadMap(shapes[i % PERIOD], self.head_shape) for i in range(self.layers.count)) if shapes else ()

    @property
    def families(self) -> tuple[str, ...]:
        """Name of the family of each layer (``families/``). In a hybrid model every second layer is a softmax layer."""
        own = "sparse" if self.selection else self.heads.layout.family
        turns = (own, "softmax") if self.layers.hybrid else (own,)
        return tuple(turns[place % len(turns)] for place in range(self.layers.count))

    def places(self, family: str) -> tuple[int, ...]:
        """Numbers of the layers of a family, from 0 on."""
        return tuple(place for place, name in enumerate(self.families) if name == family)

    @property
    def layer_shapes(self) -> tuple[HeadShape, ...]:
        """Heads of each layer."""
        by_turns = self.layers.shapes or (self.head_shape,)
        return tuple(by_turns[i % len(by_turns)] for i in range(self.layers.count))

    @property
    def values(self) -> dict[str, Any]:
        """All values by the name of their field, and the mode; without ``instance_of``."""
        found: dict[str, Any] = {"mode": self.mode}
        for record in (self, self.rows):
            found |= {each.name: getattr(record, each.name) for each in fields(record)}
        return {name: value for name, value in found.items() if name not in ("rows", "instance_of")}

    @property
    def mode(self) -> ForwardMode:
        """The forward mode of the rows."""
        return self.rows.mode

    @property
    def width(self) -> int:
        """Rows of a request in the graph: 1, N (verify, v2), S + 1 (v1), rows of all forwards (draft-decode). Extend: a
        graph of B requests has B times as many rows, which the requests of a step share.
        """
        return self.rows.width

    @property
    def draft_width(self) -> int:
        """Width that a server changes: nodes of a chain, rows of a draft-extend, steps of a draft; 0 in other modes."""
        return self.draft.steps if self.draft else self.width if self.mode.is_speculative() else 0

    @property
    def new(self) -> tuple[int, ...]:
        """Draft-extend: accepted tokens of each request, 1 .. width. Extend: new tokens of each. Empty elsewhere."""
        return self.rows.new

    @property
    def tree(self) -> Tree | None:
        """Target-verify: the draft tree. None elsewhere."""
        return self.rows.tree if isinstance(self.rows, Verify) else None

    @property
    def draft(self) -> Draft | None:
        """Draft-decode: the branches. None elsewhere."""
        return self.rows.draft if isinstance(self.rows, Drafted) else None

    @property
    def rounds(self) -> int:
        """Draft-decode and target-verify: rounds of a greedy-equivalence loop. 0 elsewhere."""
        return self.rows.rounds if isinstance(self.rows, Drafted | Verify) else 0

    @property
    def with_prefix(self) -> bool:
        """Draft-decode: True if every request of every step has a prefix. False elsewhere."""
        return isinstance(self.rows, Drafted) and self.rows.with_prefix

    @property
    def chunks(self) -> int:
        """Extend: number of chunks in which the prompts of the case's own batch arrive. 1 elsewhere."""
        return self.rows.chunks if isinstance(self.rows, Extend) else 1

    def of_requests(self, prefixes: tuple[int, ...], padded: int = 0, **changes: Any) -> Self:
        """The case with these requests, all of them with the rows of its first request, and with this number of padded
        requests."""
        rows = self.rows.counted(self.new[:1] * len(prefixes))
        return self.with_changes(**{"prefixes": prefixes, "rows": rows, "bucket": len(prefixes) + padded, **changes})

    @property
    def bs(self) -> int:
        """Live requests of the case's own batch."""
        return len(self.prefixes)

    @property
    def most_new(self) -> int:
        """Most rows of a request in any step."""
        return max(self.width, *self.new) if self.new else self.width

    @property
    def rows_at_once(self) -> int:
        """Rows per request in one forward of the model."""
        return self.draft.branches if self.draft else self.width

    @property
    def topk(self) -> int:
        """K of the draft tree; 0 without one."""
        return self.tree.topk if self.tree else 0

    @property
    def by_slots(self) -> bool:
        """True if each node of a draft has a slot for its state (``StateShape.rollback``)."""
        return self.state is not None and self.state.by_slots

    @property
    def id(self) -> str:
        """The name of the case; only ``Case`` has one."""
        raise NotImplementedError("Fields have no name; make a Case")

    def derived(self, name: str, n: int | None = None) -> int:
        """The value of a derived parameter; only ``Case`` has it."""
        raise NotImplementedError("Fields have no name, from which derived parameters follow; make a Case")

    @property
    def context_len(self) -> int:
        """``max_context_len`` of the schedule, in tokens; only ``Case`` has it."""
        raise NotImplementedError("Fields have no name, from which lengths of steps follow; make a Case")

    @cached_property
    def digest(self) -> int:
        """Seed of everything random in the case: 64 bits from its id, the same on every machine.

        Only for data and slots; what a case decides comes from ``derived``.
        """
        return int.from_bytes(hashlib.blake2b(self.id.encode(), digest_size=8).digest(), "little")


DEFAULTS: Mapping[str, Any] = {each.name: each.default for each in fields(Fields) if each.name != "instance_of"}
"""Name of a value of a case -> its default, or ``MISSING``. Each value belongs to a feature, except ``instance_of``."""

C = TypeVar("C", bound=Fields)
"""A type variable: a function of any record returns the type that it received."""

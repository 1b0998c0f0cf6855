"""The record behind a case: plain data, checked, without a name. Dimensions read it and say how it is written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Self, TypeVar

from ..contract import LAYER_WINDOWS, ForwardMode, HeadShape
from ..contract.head_layout import HEAD_LAYOUTS, HeadLayout, head_layout_of
from .draft import Draft
from .head_shapes import HeadMap, wrong_with_shapes
from .layers import PERIOD, Layers
from .renamed_words import first_written
from .rows import Accepted, Drafted, Extend, Rows, Verify
from .trees import Tree

__all__ = ["THINGS", "C", "Changes", "Fields", "Heads"]

Changes = Mapping[str, Any]
"""Names of fields and their new values."""


@dataclass(frozen=True)
class Heads:
    """Head layout of one rank."""

    family: str
    """``mha``, ``gqa``, ``mqa`` or ``mla``."""
    q_heads: int
    kv_heads: int
    """A divisor of ``q_heads``: as many (mha), fewer (gqa), 1 (mqa, mla)."""

    @property
    def layout(self) -> HeadLayout:
        """Row of the table of head layouts. Raises ``KeyError`` for one that is in no table."""
        return HEAD_LAYOUTS[self.family]

    @classmethod
    def of(cls, family: str, q_heads: int, kv_heads: int, *, values_in_keys: bool = False) -> Heads:
        """Heads of these numbers, whose layout in a family of layers follows from them. Raises ``LookupError``."""
        return cls(head_layout_of(family, q_heads, kv_heads, values_in_keys=values_in_keys).name, q_heads, kv_heads)

    def __str__(self) -> str:
        ratio = self.q_heads // self.kv_heads
        return f"{self.family}{ratio}x{self.kv_heads}" if self.layout.is_grouped else f"{self.family}{self.q_heads}"


@dataclass(frozen=True)
class Fields:
    """The fields of a case and what follows from them. ``Case`` adds the id, which dimensions write.

    Lengths are in tokens; every tuple has one entry per request.

    Raises ``ValueError`` for a batch that is empty, larger than its bucket, or of another size than its rows; for new
    tokens that are more than their graph holds; a draft without a prefix that is to have one; a merge of no parts;
    layers that share a window where there is none; layers whose heads do not lie in those of the case
    (``cases/head_shapes.py``); and two things that exclude each other (``_EXCLUSIVE``).
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
    """Keys of each request before this step."""
    layout: str = "shuffled"
    """One of ``LAYOUTS`` (``dimensions/slot_order.py``)."""
    data: str = "gauss"
    """A data pattern (``dimensions/data_pattern.py``)."""
    rope_dim: int = 0
    """MLA: width of the part of a key that is not a value. 0 elsewhere."""
    kv_dtype: str = "same"
    """Dtype of the KV pool: ``same`` as ``dtype``, or ``fp8_e4m3``."""
    kv_layout: str = "nhd"
    """Layout of the KV pool in memory: one of ``KV_LAYOUTS``."""
    window: int = -1
    """W of every second layer; the others have none, or a wider one: see ``make_layers``."""
    layer_windows: str = "any"
    """One of ``LAYER_WINDOWS``. ``one``: the others have none. ``same``: all layers have it. ``any`` without a
    window."""
    usual_scaling: bool = False
    """All layers have the scaling 1/sqrt(head_dim). Without it no two have the same, and none has that; MLA always is
    without."""
    logit_cap: float = 0.0
    """Soft cap of every second layer; 0.0: none."""
    sinks: bool = False
    """All layers have attention sinks, one logit a query head."""
    layers: Layers = field(default=Layers())
    """Number of layers, their ids, and whether they share a KV group."""
    parts: str = ""
    """Keys are attended in parts, each with its log-sum-exp: ``whole``, ``prefix`` for the prefix and the new rows,
    ``pagesR`` or ``tokensR`` for R ranks (``cases/kv_splits.py``). Empty: they are not."""
    own_merge: bool = False
    """The backend merges the parts; otherwise the kit does."""
    bucket: int = 1
    """Batch size of the graph that the case's own batch runs in."""
    padding: str = "prod"
    """One of ``PADDINGS`` (``dimensions/padding.py``)."""
    multi_mode: bool = False
    """True if graphs of all declared modes share one backend instance and run interleaved."""
    variants: frozenset[str] = frozenset()
    """Words of server variants (``ways/``); none: as all servers do it."""
    seed: int = 0
    """Other data, slots, schedule and choices for the same shapes."""
    host: Fields | None = field(default=None, repr=False)
    """The mixed case whose backend instance, and so whose layers, this one shares. No word of the id, because only
    ``co_residents`` makes such a case, and the id of the host rebuilds it."""

    def __post_init__(self) -> None:
        if not self.prefixes:
            raise ValueError("a case needs at least one request")
        if self.bucket < self.bs:
            raise ValueError(f"bucket {self.bucket} is smaller than the batch of {self.bs} requests")
        rows = self.rows
        if isinstance(rows, Accepted | Extend) and len(rows.new) != self.bs:
            raise ValueError(f"{rows.new}: counts must be one per request, and there are {self.bs} requests")
        if isinstance(rows, Extend) and sum(rows.new) > self.bucket * rows.room:
            raise ValueError(f"{sum(rows.new)} new tokens are more than the {self.bucket} x {rows.room} of their graph")
        if self.with_prefix and 0 in self.prefixes:
            raise ValueError(f"prefixed, with keys {self.prefixes}: each request needs one key or more")
        if self.own_merge and self.parts in ("", "whole"):
            raise ValueError("a backend merges parts, and the case has none")
        if self.layer_windows not in LAYER_WINDOWS or (self.layer_windows != "any" and self.window < 0):
            raise ValueError(
                f"layer_windows {self.layer_windows!r}: one of {LAYER_WINDOWS}, and 'any' without a window"
            )
        for one, other, why in _EXCLUSIVE:
            if THINGS[one](self) and THINGS[other](self):
                raise ValueError(f"{one} and {other}: {why}")
        wrong = wrong_with_shapes(self.head_shape, self.layers.shapes) if self.layers.shapes else ""
        if wrong:
            raise ValueError(f"{self.layers} in a case of {self.heads} and head dim {self.head_dim}: {wrong}")

    @property
    def head_shape(self) -> HeadShape:
        """The shape that holds the heads of every layer: see ``cases/head_shapes.py``."""
        return HeadShape(self.heads.q_heads, self.heads.kv_heads, self.head_dim + self.rope_dim)

    @cached_property
    def head_maps(self) -> tuple[HeadMap, ...]:
        """Places of each layer's heads in ``head_shape``; empty if all layers have that shape."""
        shapes = self.layers.shapes
        return tuple(HeadMap(shapes[i % PERIOD], self.head_shape) for i in range(self.layers.count)) if shapes else ()

    @property
    def layer_shapes(self) -> tuple[HeadShape, ...]:
        """Heads of each layer."""
        by_turns = self.layers.shapes or (self.head_shape,)
        return tuple(by_turns[i % len(by_turns)] for i in range(self.layers.count))

    @property
    def values(self) -> dict[str, Any]:
        """All fields by name but ``host``, with those of the rows in place of ``rows``, and the mode."""
        found: dict[str, Any] = {"mode": self.mode}
        for record in (self, self.rows):
            found |= {each.name: getattr(record, each.name) for each in fields(record)}
        return {name: value for name, value in found.items() if name not in ("rows", "host")}

    @property
    def mode(self) -> ForwardMode:
        """The forward mode of the rows."""
        return self.rows.mode

    @property
    def width(self) -> int:
        """Rows of a request in the graph: 1, N (verify, v2), S + 1 (v1), those of all forwards (draft-decode). Extend:
        a graph of B requests has B times as many, and a step shares them out.
        """
        return self.rows.width

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
        """Draft-decode: rounds of a greedy-equivalence loop. 0 elsewhere."""
        return self.rows.rounds if isinstance(self.rows, Drafted) else 0

    @property
    def with_prefix(self) -> bool:
        """Draft-decode: no request of any step has an empty prefix. False elsewhere."""
        return isinstance(self.rows, Drafted) and self.rows.with_prefix

    @property
    def chunks(self) -> int:
        """Extend: steps in which the prompts of the own batch come. 1 elsewhere."""
        return self.rows.chunks if isinstance(self.rows, Extend) else 1

    def of_requests(self, prefixes: tuple[int, ...], padded: int = 0, **changes: Any) -> Self:
        """The case with these requests, all of them with the rows of its first one, and so many padded ones."""
        rows = self.rows.counted(self.new[:1] * len(prefixes))
        return replace(self, **{"prefixes": prefixes, "rows": rows, "bucket": len(prefixes) + padded, **changes})

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
    def id(self) -> str:
        """The name of the case. ``Case`` has it."""
        raise NotImplementedError("Fields have no name; make a Case")

    def derived(self, name: str, n: int | None = None) -> int:
        """The value of a derived parameter. ``Case`` has it."""
        raise NotImplementedError("Fields have no name, which derived parameters follow from; make a Case")

    @property
    def context_len(self) -> int:
        """``max_context_len`` of the schedule, in tokens. ``Case`` has it."""
        raise NotImplementedError("Fields have no name, which lengths of steps follow from; make a Case")

    @cached_property
    def digest(self) -> int:
        """Seed of everything random in the case: 64 bits from its id, the same on every machine.

        It is only for data and slots; derived parameters come from ``derived``.
        """
        return int.from_bytes(hashlib.blake2b(first_written(self.id).encode(), digest_size=8).digest(), "little")


THINGS: Mapping[str, Callable[[Fields], bool]] = {
    "KV splits": lambda case: bool(case.parts),
    "KV splits of fewer keys": lambda case: case.parts not in ("", "whole"),
    "KV groups": lambda case: case.layers.groups,
    "heads by layer": lambda case: bool(case.layers.shapes),
    "other layers": lambda case: case.layers != Layers(),
    "FP8 pool": lambda case: case.kv_dtype != "same",
    "draft-decode": lambda case: case.mode is ForwardMode.DRAFT_DECODE,
    "loop": lambda case: case.rounds > 0,
    "multi-mode instance": lambda case: case.multi_mode,
    "heads with a scaling of their own": lambda case: not case.heads.layout.usual_scaling,
    "heads that are alike": lambda case: not case.heads.layout.by_layer,
    "usual scaling": lambda case: case.usual_scaling,
}
"""Things that some cases have. Name -> whether a case has it."""
_EXCLUSIVE = (
    ("KV splits", "multi-mode instance", "the other modes of the instance attend all keys at once"),
    ("KV splits", "loop", "generated tokens are those of a model that attends all keys at once"),
    ("KV splits of fewer keys", "draft-decode", "branches have pages of their own, and no rank has a part of them"),
    ("KV splits", "KV groups", "each group has a request table of its own, and parts are those of one"),
    ("KV splits", "heads by layer", "log-sum-exps of all layers lie in one tensor"),
    ("KV groups", "draft-decode", "all layers of a draft share one KV group"),
    ("multi-mode instance", "draft-decode", "a case of another mode names the instance"),
    ("loop", "FP8 pool", "what is stored in FP8 is not what greedy decode would have attended"),
    ("loop", "other layers", "the model of a loop has two layers, from id 0 on"),
    ("heads with a scaling of their own", "usual scaling", "MLA has a scaling of its own"),
    ("heads that are alike", "heads by layer", "all layers of MLA have the same heads"),
)
"""Two ``THINGS`` that no case has together, and why."""

C = TypeVar("C", bound=Fields)
"""A function of any record gives back the kind that it was given."""

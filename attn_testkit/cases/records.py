"""Records that a case consists of: each holds fields that belong together, and refuses values that contradict each
other.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..contract import LAYER_WINDOWS
from ..contract.head_layout import HEAD_LAYOUTS, HeadLayout, head_layout_of
from .indexing import Indexing
from .selection import Selection
from .spans import SpanShape
from .state import StateShape


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
class ModelShape:
    """Heads of the model and their numbers."""

    heads: Heads
    head_dim: int
    """Width of a value row (MLA: of the latent part)."""
    dtype: str
    """Dtype of q, k, v and the output: ``fp16``, ``bf16`` or ``fp32``."""
    rope_dim: int = 0
    """MLA: width of the part of a key that is not a value. Elsewhere columns that keys have more than values, mostly
    0."""
    state: StateShape | None = None
    """Recurrent states; None: layers have keys."""

    def __post_init__(self) -> None:
        if self.heads.layout.has_state != (self.state is not None):
            raise ValueError(
                f"heads {self.heads} and {self.state or 'no state'}: layers of {self.heads.family} "
                + ("keep a state; write its widths, such as k64w4s32" if self.state is None else "keep none")
            )


@dataclass(frozen=True)
class Pool:
    """The KV pool."""

    page_size: int
    """KV slots per page."""
    kv_dtype: str = "same"
    """``same`` as the model's ``dtype``, or another of ``KV_DTYPES``."""
    kv_layout: str = "nhd"
    """Layout of the pool in memory: one of ``KV_LAYOUTS``."""


@dataclass(frozen=True)
class Batch:
    """Requests of the case's own batch, and the graph that it runs in.

    Raises ``ValueError`` for a batch that is empty or larger than its bucket.
    """

    prefixes: tuple[int, ...]
    """Keys of each request before this step."""
    layout: str = "shuffled"
    """Order of slots: one of ``LAYOUTS`` (``dimensions/slot_order.py``)."""
    bucket: int = 1
    """Batch size of the graph."""
    padding: str = "prod"
    """One of ``PADDINGS`` (``dimensions/padding.py``)."""

    def __post_init__(self) -> None:
        if not self.prefixes:
            raise ValueError("a case needs at least one request")
        if self.bucket < len(self.prefixes):
            raise ValueError(f"bucket {self.bucket} is smaller than the batch of {len(self.prefixes)} requests")


QQ_BIASES = ("none", "own", "shared")
"""Biases among the rows of a step: none, one of each request, or one for all requests."""


@dataclass(frozen=True)
class LayerOptions:
    """Options of the attention layers. Raises ``ValueError`` for layers that share a window where there is none."""

    window: int = -1
    """W of every second layer; the others have none, or a wider one: see ``make_layers``."""
    layer_windows: str = "any"
    """One of ``LAYER_WINDOWS``. ``one``: the others have none. ``same``: all layers have it. ``any`` without a
    window."""
    local_chunk: int = 0
    """Positions of a chunk of chunked-local layers, every second one; 0: no layer is."""
    encoder_len: int = 0
    """Most encoder keys of a request in cross-attention layers, every second one; 0: no layer is."""
    alibi: bool = False
    """All layers have ALiBi slopes, one a query head."""
    spans: SpanShape | None = None
    """Bidirectional spans of the steps; None: there are none."""
    qq_bias: str = "none"
    """One of ``QQ_BIASES``, in all layers."""
    usual_scaling: bool = False
    """All layers have the scaling 1/sqrt(head_dim). Without it no two have the same, and none has that; MLA always is
    without."""
    logit_cap: float = 0.0
    """Soft cap of every second layer; 0.0: none."""
    sinks: bool = False
    """All layers have attention sinks, one logit a query head."""
    selection: Selection | None = None
    """Keys that each row selects; None: a row attends to all keys that it may see."""
    indexer: Indexing | None = None
    """Indexer that the backend selects keys with; None: selections are given."""

    def __post_init__(self) -> None:
        if self.layer_windows not in LAYER_WINDOWS or (self.layer_windows != "any" and self.window < 0):
            raise ValueError(
                f"layer_windows {self.layer_windows!r}: one of {LAYER_WINDOWS}, and 'any' without a window"
            )
        if self.qq_bias not in QQ_BIASES:
            raise ValueError(f"qq_bias {self.qq_bias!r}: one of {QQ_BIASES}")
        if self.indexer and not self.selection:
            raise ValueError(f"{self.indexer} selects keys, and layers attend to all: add a word such as sel16")


@dataclass(frozen=True)
class KVSplits:
    """Splits of the keys, each attended with its log-sum-exp. Raises ``ValueError`` for a merge of no parts."""

    kv_splits: str = ""
    """``whole``, ``prefix`` for the prefix and the new rows, ``pagesR`` or ``tokensR`` for R ranks
    (``cases/dimensions/kv_splits.py``). Empty: no splits."""
    merged_by_backend: bool = False
    """The backend merges the parts; otherwise the kit does."""

    def __post_init__(self) -> None:
        if self.merged_by_backend and self.kv_splits in ("", "whole"):
            raise ValueError("a backend merges parts, and the case has none")

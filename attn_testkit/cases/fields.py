"""The record behind a case: plain data, checked, without a name. Dimensions read it and say how it is written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Generic, Self, TypeVar

from ..contract import ROW_FORMATS, ForwardMode, HeadShape
from ..contract.kv_layouts import OWN
from .draft import Draft
from .head_shapes import HeadMap, wrong_with_shapes
from .indexing import Indexing
from .layers import PERIOD, Layers
from .records import Batch, KVSplits, LayerOptions, ModelShape, Pool
from .records import Heads as Heads
from .renamed_words import first_written
from .rows import Accepted, Drafted, Extend, Rows, Verify
from .selection import Selection
from .spans import SpanShape
from .state import StateShape
from .trees import Tree

T = TypeVar("T")

Changes = Mapping[str, Any]
"""Names of fields and their new values."""


class _Of(Generic[T]):
    """Value of a field of one of a case's records, which a case has under the field's own name too."""

    def __init__(self, record: str) -> None:
        self.record = record

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, case: Fields, owner: type) -> T:
        found: T = getattr(getattr(case, self.record), self.name)
        # Later questions find it there, and do not come here.
        case.__dict__[self.name] = found
        return found


_RECORDS: Mapping[str, type] = {
    "model": ModelShape, "pool": Pool, "batch": Batch, "options": LayerOptions, "splits": KVSplits,
}  # fmt: skip
_RECORD_OF = {each.name: record for record, kind in _RECORDS.items() for each in fields(kind)}
_POSITIONAL = ("rows", "heads", "head_dim", "dtype", "page_size", "prefixes")


@dataclass(frozen=True, init=False)
class Fields:
    """The fields of a case and what follows from them. ``Case`` adds the id, which dimensions write.

    Lengths are in tokens; every tuple has one entry per request.

    A case is made of values by name, and holds them in records. So ``replace(case, window=7)`` is possible, and
    ``case.with_changes(window=7)`` is the same. ``TypeError`` for a name that no record has.

    Raises ``ValueError`` for rows of another number of requests than the batch has; for new tokens that are more than
    their graph holds; a draft without a prefix that is to have one; layers whose heads do not lie in those of the case
    (``cases/head_shapes.py``); and two things that exclude each other (``EXCLUSIVE``).
    """

    rows: Rows
    """Rows of each request, from which the mode follows (``cases/rows.py``)."""
    model: ModelShape
    pool: Pool
    batch: Batch
    data: str = "gauss"
    """A data pattern (``dimensions/data_pattern.py``)."""
    options: LayerOptions = field(default=LayerOptions())
    layers: Layers = field(default=Layers())
    """Number and ids of the layers, and whether they share a KV group."""
    splits: KVSplits = field(default=KVSplits())
    multi_mode: bool = False
    """Graph runs of all declared modes share one backend instance and run interleaved."""
    variants: frozenset[str] = frozenset()
    """Words of server variants (``server_variants/``); none: as all servers do it."""
    seed: int = 0
    """Other data, slots, schedule and choices for the same shapes."""
    instance_of: Fields | None = field(default=None, repr=False)
    """The case whose backend instance, and so whose layers, this one shares. No word of the id: ``co_residents`` and
    the stages of a loop make such cases, and the id of the other case rebuilds them."""

    heads = _Of[Heads]("model")
    head_dim = _Of[int]("model")
    rope_dim = _Of[int]("model")
    dtype = _Of[str]("model")
    state = _Of[StateShape | None]("model")
    page_size = _Of[int]("pool")
    kv_dtype = _Of[str]("pool")
    kv_layout = _Of[str]("pool")
    prefixes = _Of[tuple[int, ...]]("batch")
    layout = _Of[str]("batch")
    bucket = _Of[int]("batch")
    padding = _Of[str]("batch")
    window = _Of[int]("options")
    layer_windows = _Of[str]("options")
    local_chunk = _Of[int]("options")
    encoder_len = _Of[int]("options")
    alibi = _Of[bool]("options")
    spans = _Of[SpanShape | None]("options")
    qq_bias = _Of[str]("options")
    usual_scaling = _Of[bool]("options")
    logit_cap = _Of[float]("options")
    sinks = _Of[bool]("options")
    selection = _Of[Selection | None]("options")
    indexer = _Of[Indexing | None]("options")
    kv_splits = _Of[str]("splits")
    merged_by_backend = _Of[bool]("splits")

    def __init__(self, *positional: Any, **values: Any) -> None:
        if len(positional) > len(_POSITIONAL):
            raise TypeError(f"{len(positional)} values without a name: only {', '.join(_POSITIONAL)} need none")
        values |= zip(_POSITIONAL, positional, strict=False)
        changes: dict[str, dict[str, Any]] = {}
        for name in values.keys() & _RECORD_OF.keys():
            changes.setdefault(_RECORD_OF[name], {})[name] = values.pop(name)
        for record, changed in changes.items():
            there = values.get(record)
            values[record] = replace(there, **changed) if there is not None else _RECORDS[record](**changed)
        if unknown := values.keys() - _OWN.keys():
            raise TypeError(f"no case has a field {' or '.join(sorted(unknown))}")
        for name, default in _OWN.items():
            if (value := values.get(name, default)) is MISSING:
                raise TypeError(f"a case needs {name}")
            object.__setattr__(self, name, value)
        self.__post_init__()

    def __post_init__(self) -> None:
        rows = self.rows
        if isinstance(rows, Accepted | Extend) and len(rows.new) != self.bs:
            raise ValueError(f"{rows.new}: counts must be one per request, and there are {self.bs} requests")
        if isinstance(rows, Extend) and sum(rows.new) > self.bucket * rows.room:
            raise ValueError(f"{sum(rows.new)} new tokens are more than the {self.bucket} x {rows.room} of their graph")
        if self.state and isinstance(rows, Extend) and (0, 0) in zip(self.prefixes, rows.new, strict=True):
            raise ValueError("a request without rows and without tokens before the step has no state to keep")
        if self.with_prefix and 0 in self.prefixes:
            raise ValueError(f"prefixed, with keys {self.prefixes}: each request needs one key or more")
        for one, other, why in EXCLUSIVE:
            if THINGS[one](self) and THINGS[other](self):
                raise ValueError(f"{one} and {other}: {why}")
        form = ROW_FORMATS.get(self.kv_dtype)
        if form and not form.fits(self.heads.layout, self.dtype, self.head_dim):
            raise ValueError(
                f"{self.kv_dtype} with {self.heads} of {self.head_dim} in {self.dtype}: such rows are of {form.needs}"
            )
        wrong = wrong_with_shapes(self.head_shape, self.layers.shapes) if self.layers.shapes else ""
        if wrong:
            raise ValueError(f"{self.layers} in a case of {self.heads} and head dim {self.head_dim}: {wrong}")

    def with_changes(self, **changes: Any) -> Self:
        """The case with other values, by the names of its fields or those of its records."""
        return replace(self, **changes)

    @property
    def head_shape(self) -> HeadShape:
        """Heads that hold those of every layer: see ``cases/head_shapes.py``."""
        return HeadShape(self.heads.q_heads, self.heads.kv_heads, self.head_dim + self.rope_dim)

    @cached_property
    def head_maps(self) -> tuple[HeadMap, ...]:
        """Places of the heads of each layer in ``head_shape``; empty where all layers have that."""
        shapes = self.layers.shapes
        return tuple(HeadMap(shapes[i % PERIOD], self.head_shape) for i in range(self.layers.count)) if shapes else ()

    @property
    def layer_shapes(self) -> tuple[HeadShape, ...]:
        """Heads of each layer."""
        by_turns = self.layers.shapes or (self.head_shape,)
        return tuple(by_turns[i % len(by_turns)] for i in range(self.layers.count))

    @property
    def values(self) -> dict[str, Any]:
        """All values by the name of their field, and the mode; without ``instance_of``."""
        found: dict[str, Any] = {"mode": self.mode}
        for record in (self, self.rows, *(getattr(self, name) for name in _RECORDS)):
            found |= {each.name: getattr(record, each.name) for each in fields(record)}
        return {name: value for name, value in found.items() if name not in {"rows", "instance_of", *_RECORDS}}

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
        """Draft-decode and target-verify: rounds of a greedy-equivalence loop. 0 elsewhere."""
        return self.rows.rounds if isinstance(self.rows, Drafted | Verify) else 0

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
        return self.state is not None and self.state.rollback == "slots"

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

        Only for data and slots; what a case decides comes from ``derived``.
        """
        return int.from_bytes(hashlib.blake2b(first_written(self.id).encode(), digest_size=8).digest(), "little")


_OWN = {each.name: each.default for each in fields(Fields)}
DEFAULTS: Mapping[str, Any] = {
    each.name: each.default
    for record in (Fields, *_RECORDS.values())
    for each in fields(record)
    if each.name not in {"instance_of", *_RECORDS}
}
"""Name of a value of a case, in whatever record it lies -> its default, or ``MISSING``. Each belongs to a dimension.
``instance_of`` belongs to none."""

_OF_DRAFT_MODELS = (ForwardMode.DRAFT_DECODE, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2)
THINGS: Mapping[str, Callable[[Fields], bool]] = {
    "KV splits": lambda case: bool(case.kv_splits),
    "KV splits of fewer keys": lambda case: case.kv_splits not in ("", "whole"),
    "KV groups": lambda case: case.layers.groups,
    "heads by layer": lambda case: bool(case.layers.shapes),
    "FP8 pool": lambda case: case.kv_dtype != "same",
    "packed rows": lambda case: case.kv_dtype in ROW_FORMATS,
    "scales of the pool that lie apart": lambda case: case.kv_dtype in ROW_FORMATS and ROW_FORMATS[case.kv_dtype].apart,
    "draft-decode": lambda case: case.mode is ForwardMode.DRAFT_DECODE,
    "loop": lambda case: case.rounds > 0,
    "multi-mode instance": lambda case: case.multi_mode,
    "heads with their own scaling": lambda case: not case.heads.layout.usual_scaling,
    "heads that are alike": lambda case: not case.heads.layout.by_layer,
    "usual scaling": lambda case: case.usual_scaling,
    "sliding window": lambda case: case.window >= 0,
    "chunked-local layers": lambda case: case.local_chunk > 0,
    "requests without rows": lambda case: case.mode is ForwardMode.EXTEND and 0 in case.new,
    "cross-attention layers": lambda case: case.encoder_len > 0,
    "ALiBi": lambda case: case.alibi,
    "bidirectional spans": lambda case: case.spans is not None,
    "additive bias": lambda case: case.qq_bias != "none",
    "shared additive bias": lambda case: case.qq_bias == "shared",
    "no prompts or drafts to verify": lambda case: case.mode not in (ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY),
    "soft cap": lambda case: case.logit_cap > 0,
    "sinks": lambda case: case.sinks,
    "data that count keys": lambda case: case.data == "plus_minus_one",
    "selected keys": lambda case: case.selection is not None,
    "indexer": lambda case: case.indexer is not None,
    "branching trees": lambda case: case.topk > 1,
    "keys wider than values": lambda case: case.rope_dim > 0 and not case.heads.layout.values_in_keys,
    "K and V in one allocation": lambda case: case.kv_layout not in ("nhd", OWN),
    "states": lambda case: case.state is not None,
    "rollback of states by slots": lambda case: case.by_slots,
    "snapshots of states": lambda case: case.state is not None and case.state.snapshots > 0,
    "states of a prefix cache": lambda case: case.state is not None and bool(case.state.continues),
    "copies of states before a step": lambda case: case.state is not None and case.state.continues == "copy",
    "no prompts": lambda case: case.mode is not ForwardMode.EXTEND,
    "drafts to verify": lambda case: case.tree is not None,
    "chunks": lambda case: case.chunks > 1,
    "fresh requests": lambda case: case.tree is not None and 0 in case.prefixes,
    "no draft to verify": lambda case: case.tree is None,
    "no states": lambda case: case.state is None,
    "hybrid layers": lambda case: case.layers.hybrid,
    "rows of a draft model": lambda case: case.mode in _OF_DRAFT_MODELS,
    "layer options": lambda case: case.options != LayerOptions(),
    "layers of one kind": lambda case: case.layers.count < PERIOD,
    "shared prefixes": lambda case: case.layout == "shared",
    "server variants": lambda case: bool(case.variants),
}
"""Things that some cases have. Name -> whether a case has it."""
EXCLUSIVE = (
    ("KV splits", "multi-mode instance", "the other modes of the instance attend to all keys at once"),
    ("KV splits", "loop", "generated tokens are those of a model that attends to all keys at once"),
    ("KV splits of fewer keys", "draft-decode", "branches have their own pages, and no rank has a part of them"),
    ("KV splits", "KV groups", "each group has its own request table, and parts are those of one"),
    ("KV splits", "heads by layer", "log-sum-exps of all layers lie in one tensor"),
    ("KV groups", "draft-decode", "all layers of a draft share one KV group"),
    ("multi-mode instance", "draft-decode", "a case of another mode names the instance"),
    ("loop", "packed rows", "the words of a loop are numbers, and no rows of bytes"),
    ("loop", "heads by layer", "the words of a loop have heads of one shape"),
    ("loop", "fresh requests", "a loop of target-verify computes prompts first, of a token or more before the last"),
    ("loop", "branching trees", "a loop of target-verify verifies chains; that of draft-decode has branches"),
    ("loop", "snapshots of states", "no prefix cache takes part in a loop"),
    ("chunked-local layers", "sliding window", "a layer has one of them, and models have layers of one kind"),
    ("cross-attention layers", "layers of one kind", "the decoder also has self-attention layers"),
    ("cross-attention layers", "sliding window", "SGLang's backends refuse them together, and no model has both"),
    ("cross-attention layers", "chunked-local layers", "no model has both"),
    ("cross-attention layers", "ALiBi", "an encoder key has no place in the order of the decoder's keys"),
    ("cross-attention layers", "bidirectional spans", "images go to the encoder or into the prompt"),
    ("cross-attention layers", "additive bias", "encoder keys are not rows of the step"),
    ("cross-attention layers", "requests without rows", "a request begins with a row"),
    ("cross-attention layers", "sinks", "no model has both"),
    ("cross-attention layers", "selected keys", "an index is a place among the keys of the decoder"),
    ("cross-attention layers", "KV splits", "parts are those of the keys that all layers see"),
    ("cross-attention layers", "packed rows", "no model has both"),
    ("cross-attention layers", "heads with their own scaling", "no model has both"),
    ("cross-attention layers", "heads by layer", "no model has both"),
    ("cross-attention layers", "multi-mode instance", "target-verify and drafts have no encoder"),
    ("cross-attention layers", "loop", "the model of a loop has no encoder"),
    ("cross-attention layers", "chunks", "encoder keys are those of requests that begin"),
    ("cross-attention layers", "shared prefixes", "requests share no encoder"),
    ("cross-attention layers", "server variants", "conventions of servers are tried in models without an encoder"),
    ("ALiBi", "soft cap", "FlashInfer caps the sum of logit and bias, and vLLM adds the bias to the capped logit"),
    ("ALiBi", "sinks", "a bias may be given up to a constant of the row, and a sink is compared with it"),
    ("ALiBi", "KV splits", "a bias may be given up to a constant of the row, and a log-sum-exp has it"),
    ("ALiBi", "branching trees", "nodes of a tree have positions of their own"),
    ("ALiBi", "data that count keys", "a key that is farther has less weight"),
    ("ALiBi", "loop", "the model of a loop has no bias"),
    ("ALiBi", "selected keys", "models with an indexer have rotary embeddings"),
    ("bidirectional spans", "chunked-local layers", "no model has both, so no server says how they combine"),
    ("bidirectional spans", "ALiBi", "a bias of keys that follow a row differs between servers"),
    ("bidirectional spans", "selected keys", "models with an indexer are causal"),
    ("bidirectional spans", "multi-mode instance", "the other modes of the instance have no prompt with an image"),
    ("bidirectional spans", "additive bias", "a bias hides the rows that follow a row"),
    ("additive bias", "no prompts or drafts to verify", "a bias is one among the rows of a prompt or a draft"),
    ("additive bias", "KV splits", "servers with a bias attend to all keys at once"),
    ("additive bias", "multi-mode instance", "the other modes of the instance have no bias"),
    ("additive bias", "chunks", "the bias of a prompt has columns for the rows of one step"),
    ("additive bias", "data that count keys", "keys have other weights by their bias"),
    ("additive bias", "loop", "the model of a loop has no bias"),
    ("additive bias", "selected keys", "models with an indexer have no bias"),
    ("shared additive bias", "branching trees", "the trees of requests differ"),
    ("chunked-local layers", "branching trees", "nodes of a tree have positions of their own"),
    ("packed rows", "heads by layer", "all layers have rows of the same bytes"),
    ("keys wider than values", "K and V in one allocation", "there K and V have one width"),
    ("keys wider than values", "heads by layer", "the heads of all layers lie in one tensor of values and keys"),
    ("keys wider than values", "loop", "the model of a loop has one width"),
    ("keys wider than values", "packed rows", "a row format has one width for K and V"),
    ("heads with their own scaling", "usual scaling", "MLA has its own scaling"),
    ("heads that are alike", "heads by layer", "all layers of MLA have the same heads"),
    ("selected keys", "KV splits of fewer keys", "a selection is one of all keys of a request"),
    ("selected keys", "KV groups", "an index is a place in one request table"),
    ("selected keys", "loop", "the model of a loop has no indexer"),
    ("selected keys", "branching trees", "servers with an indexer verify chains"),
    ("states", "rows of a draft model", "layers of a draft model are attention layers, and keep no state"),
    ("rollback of states by slots", "no draft to verify", "only rejected nodes are taken back"),
    ("rollback of states by slots", "branching trees", "with a slot for each node a draft is a chain"),
    ("rollback of states by slots", "snapshots of states", "a request has a slot for each node already"),
    ("states of a prefix cache", "drafts to verify", "a request that verifies has a state of its own"),
    ("states of a prefix cache", "chunks", "the second chunk of a prompt continues the request's own state"),
    ("states of a prefix cache", "loop", "a loop continues the states of its own requests"),
    ("states of a prefix cache", "multi-mode instance", "only one mode of the instance would continue them"),
    ("copies of states before a step", "no prompts", "a server copies a state to a request that it admits"),
    ("states", "layer options", "windows, soft caps, sinks and selections are those of keys"),
    ("states", "FP8 pool", "a layer that keeps a state has no KV pool"),
    ("states", "KV splits", "a layer that keeps a state has no keys to split"),
    ("hybrid layers", "no states", "the other layers of a hybrid model keep a state"),
    ("states", "KV groups", "a layer that keeps a state has no KV pool"),
    ("states", "heads by layer", "all layers of a case have states of one shape"),
)
"""Two ``THINGS`` that no case has together, and why."""

C = TypeVar("C", bound=Fields)
"""A function of any record gives back the kind that it was given."""

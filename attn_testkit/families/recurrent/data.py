"""The layers of a case with states, and the data of a step: activations, and the states and windows before it. States
of requests before a step are drawn, in the pool's dtype, with the magnitude that the recurrence keeps. So an answer
does not depend on earlier steps of a backend.

Patterns differ in the decay of a state by a token: ``mild_decay`` 0.4 to 0.8, ``weak_decay`` 0.998, ``no_decay``
exactly 1, ``strong_decay`` so that everything before is forgotten, and the values of a head of GDN and KDA in bf16 are
beyond the range of fp16. ``like_keys``: keys point nearly in one direction,
so that each token overwrites what the one before it stored. ``unit_keys``: decay and beta are exactly 1, keys and
queries are unit vectors, values small integers, and the convolution passes its last input on. The columns of the state
then *are* values of tokens, to within half a unit at any length. GDN and KDA overwrite a column with each further token
of its key. There a query is the sum of two unit vectors: the row's own key, and that of the next row. So each value is
read by its own row and by the last row before it is overwritten, and a lost token changes an output or the state.
``exact_gates``: the same, but one row of each head has a decay of 0 or 1/2, at a place where kernels that compute
prompts in chunks take a product of decays that includes a row too few or too many. With decays that are alike such a
product is nearly right, or so small that nothing shows. ``near_epsilon``: ``mild_decay``, but queries and keys of GDN
and KDA are so short that the epsilon of their norm changes the result by a tenth and more. ``fair_rounding``:
``mild_decay``, but the convolution passes its last input on, so that the exact state is known to within a small part of
the unit of its dtype.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from cachetools import LRUCache, cached

from ...cases.fields import Fields
from ...cases.normals import normals
from ...cases.state import EXACT_DATA, EXACT_GATES, FAIR_ROUNDING, NEAR_EPSILON, PASSED_ON, UNIT_KEYS, StateShape
from ...cases.trees import Tree
from ...contract import AttentionLayer, ForwardMode, StateLayer
from ...steps.data import DTYPES, HIDDEN, KEPT_BYTES, StepData, bytes_in, numbers_of
from ...steps.schedule import Request, Schedule, Step
from ...watches.signaling_nan import fill_with_signaling_nan
from .chunks import ChunkMistake
from .levels import LevelSlip
from .rwkv import SLOWEST, RemovalSlip

_Ints = npt.NDArray[np.int64]
_MOST_EXACT = 60
"""Largest value of exact data. Sums of a few stay below 256, which bf16 holds exactly."""
_MOST_SUMMED = 3
"""Largest value if the values of all tokens with one key are summed."""
_DECAYS: Mapping[str, tuple[float, float]] = {
    "mild_decay": (0.4, 0.8), "like_keys": (0.4, 0.8), NEAR_EPSILON: (0.4, 0.8),
    FAIR_ROUNDING: (0.4, 0.8), "weak_decay": (0.9975, 0.9985),
    "no_decay": (1.0, 1.0), "strong_decay": (0.0, 0.0), UNIT_KEYS: (1.0, 1.0), EXACT_GATES: (1.0, 1.0),
}  # fmt: skip
_NO_DECAY, _ALL_DECAY = -100.0, 200.0
"""Arguments of softplus that give a decay of exactly 1 and of 0, in float32 too."""
_SHORT = 3e-3
"""Norm of inputs of ``near_epsilon``; a convolution halves it. GDN and KDA add 1e-6 to its square."""
_BEYOND_FP16 = 2.0**18
"""Size of values of which nearly all are above 65,504."""
_STRONG_STEP = 16.0
"""Divisor of Mamba2's inputs where its step is 200."""
_EXACT_DT = 32.0
"""Step of Mamba2 in exact data: softplus returns it unchanged."""
_EXACT_RATE = 2.0**-36
"""Rate of Mamba2 with ``exact_gates``: a step of 32 leaves a float32 state as it is, and one of 2^43 leaves nothing."""
_SLOW = 0.6
"""Decay of RWKV-7 where other kinds have 0 or 1/2: it has none below 0.545."""
GATES: tuple[tuple[int, float], ...] = tuple(
    (row, decay) for row in (127, 128, 63, 64, 96, 31, 32, 48, 15, 16, 24) for decay in (0.0, 0.5)
)
"""Rows with a decay of their own, and that decay, of ``exact_gates``: the last row of a chunk of 16 to 128, the first
row of the next chunk, and a row in the middle of one. Heads have them in turn."""


def shape_of(case: Fields) -> StateShape:
    """The states of a case. Raises ``ValueError`` for a case without any."""
    if case.state is None:
        raise ValueError(f"layers of {case.heads.family} keep no state")
    return case.state


def layers(case: Fields) -> tuple[AttentionLayer, ...]:
    """Layers of the test model: parameters on the host, different in each layer."""
    return state_layers(case)


@lru_cache(maxsize=64)
def state_layers(case: Fields) -> tuple[StateLayer, ...]:
    """``layers``. Layers have convolutions with a bias and without one, in turn."""
    case = case.instance_of or case
    shape, heads = shape_of(case), case.heads
    kind, dtype = heads.family, DTYPES[case.dtype]
    found = []
    for index in range(case.layers.count):
        rng = np.random.default_rng([index, heads.q_heads, heads.kv_heads, shape.k_dim, case.head_dim])
        plain = StateLayer(
            layer_id=case.layers.first + index, tp_q_head_num=heads.q_heads, tp_k_head_num=heads.kv_heads,
            head_dim=shape.k_dim, v_head_dim=case.head_dim, scaling=max(shape.k_dim, 1) ** -0.5, family="recurrent",
            kind=kind, lower_bound=-5.0 if kind == "kda" and index % 2 else None,
            levels=_levels_of(case) if heads.layout.is_leveled else 0,
        )  # fmt: skip
        found.append(
            replace(
                plain, **_parameters(plain, shape, case.data, rng), **_conv(plain, shape, dtype, case.data, rng, index)
            )
        )
    return tuple(found)


def _levels_of(case: Fields) -> int:
    """Levels of log-linear attention for all requests of an instance. Steps have prefixes that are longer than those of
    the case by a few pages (``cases/plan.py``), and a loop adds a token or a draft in each round."""
    most = max(case.prefixes) + case.chunks * case.most_new + 5 * case.page_size + _ROUNDS_OF_A_LOOP
    return most.bit_length()


_ROUNDS_OF_A_LOOP = 64
"""Most tokens that a loop, or a prompt of another mode of the instance, adds to a request."""


def _conv(
    layer: StateLayer, shape: StateShape, dtype: torch.dtype, data: str, rng: np.random.Generator, index: int
) -> dict[str, Any]:
    width, channels = shape.conv_width, layer.parts[0]
    if width == 1:
        return {"activation": "none"}
    if data in PASSED_ON:
        weight = torch.zeros(channels, width)
        weight[:, -1] = 1.0
        return {"conv_weight": weight.to(dtype), "activation": "none"}
    weight = normals((channels, width), rng) * (1.5 / width**0.5)
    bias = normals((channels,), rng) * 0.2 if index % 2 == 0 and data != NEAR_EPSILON else None
    return {
        "conv_weight": weight.to(dtype), "conv_bias": None if bias is None else bias.to(dtype),
        "activation": "silu" if layer.of_kind.recurs else "none",
    }  # fmt: skip


def _parameters(layer: StateLayer, shape: StateShape, data: str, rng: np.random.Generator) -> dict[str, Any]:
    heads, low, high = layer.v_heads, *_DECAYS[data]
    if layer.kind == "lightning":
        decays = low + (high - low) * (np.arange(heads) + 0.5) / heads
        slope = np.minimum(-np.log(np.maximum(decays, 1e-80)), 200.0)
        return {"slope": torch.from_numpy(np.abs(slope)).float()}
    if layer.kind == "rwkv":
        return _rwkv_parameters(heads, layer.k_dim, rng)
    if not layer.of_kind.recurs:
        return {}
    a_log = torch.from_numpy(np.log(rng.uniform(0.6, 1.4, heads))).float()
    if layer.of_kind.steps and low == high == 1.0:
        a_log = torch.full((heads,), math.log(_EXACT_RATE) if data == EXACT_GATES else -math.inf)
    bias = (heads, layer.k_dim) if layer.of_kind.a == "channel" else (heads,)
    exact_dt = layer.of_kind.steps and data in EXACT_DATA
    found = {"A_log": a_log, "dt_bias": torch.zeros(bias) if exact_dt else normals(bias, rng) * 0.5}
    if layer.of_kind.steps:
        found["D"] = torch.zeros(heads) if exact_dt else normals((heads,), rng)
    if layer.levels:
        found["level_weights"] = torch.from_numpy(rng.uniform(0.5, 1.5, (heads, layer.levels + 1))).float()
    return found


@dataclass(frozen=True)
class End:
    """A slot that holds a state after a step: the state of a request after some of its rows."""

    slot: int
    request: int
    rows: int
    """0: the state before the step."""
    has_window: bool = True
    """False for the second and later slots of a draft, since the window is in the first one."""


@dataclass(frozen=True, eq=False)
class StateStepData(StepData):
    """Host tensors of a step of layers with states. ``q``, ``k``, ``v`` are ``mixed``, ``a``, ``b``: [L, T, n]."""

    slots: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """[B] int64: slot of each request."""
    fresh: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bool))
    """[B] bool: requests that begin from zeros."""
    states: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """[L, B, Hv, V, K] in the state's dtype: before the step; zeros for a fresh request."""
    windows: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """[L, B, C, W - 1 and ``history``] in the model's dtype: before the step; zeros for a fresh request."""
    layers: tuple[StateLayer, ...] = ()
    products: str = "fp32"
    """``State.products`` of the backend."""
    conv_products: str = "fp32"
    """``State.conv_products`` of the backend."""
    dtype: str = "bf16"
    """Dtype of the model, by its name."""
    shape: StateShape = field(default_factory=lambda: StateShape(1, 1))
    news: tuple[int, ...] = ()
    """Rows of each request."""
    kept: tuple[int, ...] = ()
    """Number of rows of each request whose effect stays: all rows, or in target-verify the rows of accepted nodes. In a
    tree that branches it is the index of the last accepted node, plus 1; of the rows before that node only its
    ancestors count."""
    trees: tuple[Tree, ...] = ()
    """Tree of each request's rows, if it branches; empty if each row follows the row before it."""
    lists: _Ints = field(default_factory=lambda: np.zeros((0, 1), np.int64))
    """[B, N] with rollback ``slots``, else [B, 1]: slots of each request; ``slots`` are the first."""
    nodes: int = 1
    """Nodes of a request whose windows overlap in one slot after the step: N in target-verify with a slot for each node
    and without a commit."""
    more_columns: int = 0
    """Columns of a window in memory after those of ``windows``: N - 1 that only drafts use, in other modes of an
    instance with ``slots``, or those of ``taps_first``."""
    history: int = 0
    """Columns of ``windows`` before the W - 1 that taps read: with ``newest_last``, older inputs; NaN if drawn."""
    taken: tuple[int, ...] = ()
    """Place, from 1 on, in its request's list of the slot that holds the state before the step."""
    ends: tuple[End, ...] = ()
    """States after the step, those of live requests first."""
    snapshot_rows: tuple[int, ...] = ()
    """Number of rows that the copy of each request includes; 0: there is no copy."""
    snapshot_slots: tuple[int, ...] = ()
    """Slot of each copy; 0: there is none."""
    before: StateStepData | None = None
    """Data of the step whose states this one continues (``Step.follows``): ``states`` and ``windows`` do not count."""
    before_places: tuple[int, ...] = ()
    """Position of each request in the batch of that step. -1: a fresh request, which continues none."""
    before_rows: tuple[int, ...] = ()
    """Number of rows of that request after which each request continues."""
    sources: tuple[int, ...] = ()
    """Slot of the prefix cache whose state each request continues (``StateShape.continues``); its own in ``slots`` if
    it continues none."""
    unit_keys: torch.Tensor | None = None
    """[L, T, Hk] int64, of exact data: the channel of each row's key. None for other data."""
    stored_each: bool = False
    """True: the state after each row is stored and read again for the next row, as in decode steps."""
    asked_keys: torch.Tensor | None = None
    """[L, T, Hk, 2] int64, of exact data: the two channels that each row's query reads, of GDN and KDA."""
    has_gates: bool = False
    """True for exact data in which single rows have a decay of their own (``GATES``)."""
    mistake: ChunkMistake | None = None
    """Mistake of the backend whose answer is computed; None: the right answer."""
    passed_on: bool = False
    """True for data whose convolution passes its last input on: no rounding of it moves a state."""
    removal_slip: RemovalSlip = ""
    """Mistake in what RWKV-7 removes from a state; empty: the right answer."""
    level_slip: LevelSlip = ""
    """Mistake in the levels of log-linear attention; empty: the right answer."""

    def path(self, request: int, rows: int) -> Sequence[int]:
        """Rows of a request that lead to the state after ``rows`` rows, ascending; the last is row ``rows - 1``."""
        if not self.trees or not rows:
            return range(rows)
        found, parents = [rows - 1], self.trees[request].parents
        while found[0]:
            found.insert(0, parents[found[0] - 1])
        return found


def states_in(data: StepData) -> StateStepData | None:
    """The numbers of the layers that keep a state; None for a case without any."""
    found = data.parts.get("recurrent", data)
    return found if isinstance(found, StateStepData) else None


def slots_listed(case: Fields) -> int:
    """Slots of a request in a pool: one, or with rollback ``slots`` one for each node of a draft, in every mode."""
    case = case.instance_of or case
    return case.width if shape_of(case).by_slots else 1


def slots_per_row(case: Fields) -> int:
    """Slots that a request of a case owns: the listed slots, one for a copy if there are copies, and in decode one of
    the prefix cache that the request may continue.
    """
    return slots_listed(case) + (1 if shape_of(case).snapshots else 0) + (1 if _draws_sources(case) else 0)


def _draws_sources(case: Fields) -> bool:
    """True if states of a prefix cache are drawn. In extend an earlier step stores them
    (``steps/cached_prompts.py``)."""
    return shape_of(case).continues == "source" and case.mode is ForwardMode.DECODE


def _leaders(step: Step) -> tuple[int, ...]:
    """Request whose state of the prefix cache each request of a whole step continues; -1: it continues its own state.

    Every third request continues its own state, and the others share one state per two requests, whatever their
    lengths: a backend only gets slots.
    """
    others = [place for place in range(step.bs) if (place + step.seed) % 3]
    return tuple(others[others.index(place) // 2 * 2] if place in others else -1 for place in range(step.bs))


def state_pool_slots(schedule: Schedule) -> int:
    """Number of slots in a schedule, slot 0 included. The pool has the same number, or the number of a big pool
    (``StateShape.big``)."""
    return schedule.pool_rows * slots_per_row(schedule.case) + _SPARE_SLOTS + 1


@lru_cache(maxsize=64)
def state_places(schedule: Schedule) -> _Ints:
    """[slots] int64: slot of the pool for each slot of a schedule. In a big pool half of them are at its far end."""
    case, slots = schedule.case, np.arange(state_pool_slots(schedule))
    if not shape_of(case).big:
        return slots
    elements = (
        state_layers(case)[0].state_heads * case.head_dim * (shape_of(case).k_dim or shape_of(case).conv_width - 1)
    )
    return np.where(slots > len(slots) // 2, slots + -(-_ELEMENTS // elements), slots)


_ELEMENTS = 1 << 31
"""The first element whose offset, slot times stride, does not fit into 32-bit integers (sglang #33665)."""


@lru_cache(maxsize=256)
def state_table(schedule: Schedule, step: Step) -> npt.NDArray[np.int32]:
    """Slots of each row of the request table, [rows + 1, slots of a row] int32; 0 for row 0.

    The first slot of a live request is neither its row of the table nor its position in the batch. In a big pool a
    batch has slots at both ends. Rows that belong to no live request hold slots of others, like stale entries. Steps
    that continue each other share one table.
    """
    whole = step.part_of[0] if step.part_of else step
    whole = whole.cached_for or whole
    rows, count = schedule.pool_rows, slots_per_row(schedule.case)
    rng = np.random.default_rng([schedule.case.digest, (whole.chunk_of or whole).index, 0x57A7E])
    table = np.zeros((rows + 1, count), np.int32)
    own = [each.pool_row for each in whole.requests]
    # Rounds of one chain have batches in reverse order of each other.
    others = [{row, place, len(own) - 1 - place} for place, row in enumerate(own)]
    for _ in range(256):
        table[1:] = rng.permutation(rows * count + _SPARE_SLOTS)[: rows * count].reshape(rows, count) + 1
        taken_for_slot = any(table[row, 0] in taken for row, taken in zip(own, others, strict=True))
        if not taken_for_slot and (not shape_of(schedule.case).big or _at_both_ends(schedule, table[own, 0])):
            break
    return table


def _at_both_ends(schedule: Schedule, slots: npt.NDArray[np.int32]) -> bool:
    """True if a slot of a batch is at the far end of a big pool, and another, if there is one, at its beginning."""
    far = slots > state_pool_slots(schedule) // 2
    return not len(slots) or bool(far.any() and (len(slots) == 1 or not far.all()))


_SPARE_SLOTS = 2
"""Number of slots that belong to no request in any step."""


def _of_requests(case: Fields, step: Step, pattern: str) -> list[dict[str, torch.Tensor]]:
    """Data of each request of a step. Two requests that continue one cached state share it, each with its own rows."""
    whole, indices = step.part_of or (step, tuple(range(step.bs)))
    seed = whole.seed % 2**32, whole.index
    each = [
        _of_request(case, pattern, request.new, request.prefix, (*seed, index))
        for request, index in zip(step.requests, indices, strict=True)
    ]
    if not _draws_sources(case):
        return each
    every = _leaders(whole)
    leaders = [every[index] if every[index] >= 0 else index for index in indices]
    held = [_of_request(case, pattern, 1, 1, (*seed, leader, 1)) for leader in leaders]
    return [
        {**one, **{name: other[name] for name in ("states", "windows")}} for one, other in zip(each, held, strict=True)
    ]


@cached(LRUCache(KEPT_BYTES, getsizeof=bytes_in), key=numbers_of, lock=threading.Lock())
def make_state_data(schedule: Schedule, step: Step, pattern: str | None = None) -> StateStepData:
    """Draw a step's numbers. Each request has its own data, so that a part of a step has the data of the whole."""
    case, exact = schedule.case, schedule.case.data in EXACT_DATA
    whole = step.part_of[0] if step.part_of else step
    each = _of_requests(case, step, pattern or case.data)
    nobody = _of_request(case, case.data, 1, 0, (0, 0, 0))
    if not each:
        each = [{name: value[:, :0] for name, value in nobody.items()}]
    joined = {name: torch.cat([one[name] for one in each], 1) for name in nobody}
    news, prefixes = [r.new for r in step.requests], [r.prefix for r in step.requests]
    row_request = np.repeat(np.arange(step.bs), news)
    row_offset = np.concatenate([np.empty(0, np.int64), *(np.arange(new) for new in news)])
    trees = tuple(request.tree for request in step.requests if request.tree is not None and request.tree.topk > 1)
    depths = np.concatenate([np.empty(0, np.int64), *(np.array(tree.depths) for tree in trees)])
    positions = (depths if trees else row_offset) + np.asarray(prefixes, np.int64)[row_request]
    widest = max(news, default=0)
    none, count = torch.empty(case.layers.count, step.bs, 0, 1, 1), case.layers.count
    before, places, behind = _continued(schedule, step, pattern)
    kept = tuple(news) if case.tree is None else tuple(request.accepted for request in step.requests)
    memory = _memory_of(schedule, step, before, kept, places)
    fresh = torch.tensor(
        [place < 0 if before else _is_fresh(case, prefix) and slot == source
         for prefix, slot, source, place in zip(
             prefixes, memory["slots"].tolist(), memory["sources"], places or prefixes, strict=True)],
        dtype=torch.bool,
    )  # fmt: skip
    return StateStepData(
        q=joined["mixed"], k=joined["a"], v=joined["b"],
        hidden=normals((step.tokens, HIDDEN), np.random.default_rng([step.seed % 2**32, whole.index, 0x41D])),
        stored_keys=none, stored_values=none, kv_scales=torch.ones(2, count, 1, 1, 1, 1, dtype=torch.float64),
        visible=torch.zeros(step.bs, widest, 0, dtype=torch.bool),
        key_positions=torch.zeros(step.bs, 0, dtype=torch.int64),
        query_positions=torch.from_numpy(
            np.asarray(prefixes, np.int64)[:, None] + (depths.reshape(step.bs, -1) if trees else np.arange(widest))
        ),
        row_request=torch.from_numpy(row_request), row_offset=torch.from_numpy(row_offset),
        row_key=torch.from_numpy(positions), positions=torch.from_numpy(positions),
        out_cache_loc=torch.from_numpy(
            np.concatenate([np.empty(0, np.int64), *(r.slots[r.prefix : r.prefix + r.new] for r in step.requests)])
        ),
        fresh=fresh, states=joined["states"], windows=_with_history(joined["windows"], fresh, memory["history"]),
        layers=state_layers(case), products=schedule.numerics.state_products,
        conv_products=schedule.numerics.conv_products, dtype=case.dtype, shape=shape_of(case),
        news=tuple(news), kept=kept, trees=trees, unit_keys=joined["keys"] if exact else None,
        asked_keys=joined["asked"] if exact else None, before=before, before_places=places,
        before_rows=behind, has_gates=case.data == EXACT_GATES, passed_on=case.data == FAIR_ROUNDING,
        **memory,
    )  # fmt: skip


def _with_history(windows: torch.Tensor, fresh: torch.Tensor, columns: int) -> torch.Tensor:
    """Windows [L, B, C, W - 1] with columns before them: NaN, which no tap reads, and zeros for a fresh request."""
    if not columns:
        return windows
    older = torch.empty(*windows.shape[:-1], columns, dtype=windows.dtype)
    fill_with_signaling_nan(older)
    return torch.cat([older.masked_fill(fresh[:, None, None], 0.0), windows], -1)


def _continued(
    schedule: Schedule, step: Step, pattern: str | None
) -> tuple[StateStepData | None, tuple[int, ...], tuple[int, ...]]:
    """Data of the step that a step continues, and of each request ``before_places`` and ``before_rows``."""
    if step.follows is None:
        return None, (), ()
    before, earlier = make_state_data(schedule, step.follows, pattern), step.follows.requests
    if step.follows.cached_for is None:
        rows = [request.pool_row for request in earlier]
        places = tuple(rows.index(request.pool_row) for request in step.requests)
        return before, places, tuple(before.kept[place] for place in places)
    lengths = [copied or kept for copied, kept in zip(before.snapshot_rows, before.kept, strict=True)]
    prefixes = tuple(request.prefix for request in step.requests)
    return before, tuple(lengths.index(each) if each else -1 for each in prefixes), prefixes


def _memory_of(
    schedule: Schedule, step: Step, before: StateStepData | None, kept: tuple[int, ...], places: tuple[int, ...]
) -> dict[str, Any]:
    """Slots of a step's requests: the slots of their states, and the contents afterwards."""
    case, shape = schedule.case, shape_of(schedule.case)
    table = state_table(schedule, step)[[request.pool_row for request in step.requests]].astype(np.int64)
    by_slots = shape.by_slots
    lists = table if by_slots else table[:, :1]
    stored = 1 if case.tree is None else lists.shape[1]
    # After a commit the window begins at column 0, like that of a request without a draft.
    nodes = 1 if shape.commits else stored
    if shape.commits:
        taken = (1,) * step.bs
    elif before is not None:
        taken = tuple(before.kept[place] for place in places)
    else:
        taken = tuple((request.pool_row + step.seed) % lists.shape[1] + 1 for request in step.requests)
    copies = tuple(_copied_rows(case, request, step, count) for request, count in zip(step.requests, kept, strict=True))
    copy = slots_listed(case)
    slots = tuple(int(own[copy]) if rows else 0 for own, rows in zip(table, copies, strict=True))
    sources = tuple(int(own[0]) for own in table)
    if before is not None and step.follows is not None and step.follows.cached_for is not None:
        kept_in = [int(copy or own) for copy, own in zip(before.snapshot_slots, before.slots, strict=True)]
        sources = tuple(kept_in[place] if place >= 0 else own for place, own in zip(places, sources, strict=True))
    elif _draws_sources(case):
        whole, indices = step.part_of or (step, range(step.bs))
        leaders, every = _leaders(whole), state_table(schedule, step)
        sources = tuple(
            int(every[whole.requests[leaders[index]].pool_row, -1]) if leaders[index] >= 0 else own
            for index, own in zip(indices, sources, strict=True)
        )
    if by_slots:
        ends = [
            End(int(slot), request, node + 1 if node or not shape.commits else kept[request], node == 0)
            for request, own in enumerate(lists)
            for node, slot in enumerate(own[:stored])
        ]
    else:
        ends = [End(int(own[0]), request, kept[request]) for request, own in enumerate(lists)]
    ends += [End(slots[request], request, rows) for request, rows in enumerate(copies) if rows]
    longer = shape.more_columns
    history = longer if shape.conv_windows == "newest_last" else 0
    more_columns = slots_listed(case) - nodes + longer - history if shape.conv_width > 1 else 0
    return {"slots": torch.from_numpy(lists[:, 0].copy()), "lists": lists, "taken": taken, "ends": tuple(ends),
            "more_columns": more_columns, "history": history, "nodes": nodes,
            "snapshot_rows": copies, "snapshot_slots": slots, "sources": sources}  # fmt: skip


def _copied_rows(case: Fields, request: Request, step: Step, kept: int) -> int:
    """Rows that a request's copy for a prefix cache includes; 0 for about a third of the requests, which have none."""
    each, turn = shape_of(case).snapshots, (request.pool_row + step.seed) % 3
    turn = 1 if step.cached_for is not None else turn
    if not each or not turn:
        return 0
    if case.mode is ForwardMode.EXTEND:
        return request.new // each * each
    if case.tree is None:
        return 1
    # The server decides by lengths; any node that was accepted may reach a multiple.
    for _ in range(turn - 1):
        parents = request.tree.parents if request.tree is not None else ()
        kept = parents[kept - 2] + 1 if kept > 1 else 0
    return kept


def _is_fresh(case: Fields, prefix: int) -> bool:
    """True for a request without a token before the step, in every mode."""
    return prefix == 0


def activations(case: Fields, rows: int, seed: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows ``mixed``, ``a`` and ``b`` [L, rows, n] of the case's data, which ``StateStepData`` has as q, k and v."""
    found = _of_request(case, case.data, rows, 0, seed)
    return found["mixed"], found["a"], found["b"]


def _of_request(case: Fields, data: str, new: int, prefix: int, seed: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Activations [L, new, n], and state and window before them [L, 1, ...], of one request with ``prefix`` tokens
    before the step."""
    rng = np.random.default_rng([*seed, 0x57A7E])
    shape = shape_of(case)
    found = [
        _exact(layer, new, rng) if data in EXACT_DATA else _drawn(layer, data, new, rng) for layer in state_layers(case)
    ]
    if data == EXACT_GATES:
        found = [
            _with_gates(layer, one, seed[2] * len(found) + index)
            for index, (layer, one) in enumerate(zip(state_layers(case), found, strict=True))
        ]
    if has_values_beyond_fp16(case, data):
        found = [_beyond_fp16(layer, one) for layer, one in zip(state_layers(case), found, strict=True)]
    dtype = DTYPES[case.dtype]
    joined = {name: torch.stack([one[name] for one in found]) for name in found[0]}
    for name in ("mixed", "a", "b", "window"):
        joined[name] = joined[name].to(dtype)
    state, window = joined.pop("state").to(DTYPES[shape.dtype]), joined.pop("window")[..., -(shape.conv_width - 1) :]
    if shape.conv_width == 1:
        window = window[..., :0]
    if _is_fresh(case, prefix):
        state, window = torch.zeros_like(state), torch.zeros_like(window)
    if levels := state_layers(case)[0].levels:
        # A level without its bit in the number of tokens is empty. Workers draw this, without functions of the oracle.
        every = state.view(len(state), levels, -1, *state.shape[2:])
        state = (every * (prefix >> torch.arange(levels) & 1)[:, None, None, None]).flatten(1, 2)
    return {**joined, "states": state[:, None], "windows": window[:, None]}


def _drawn(layer: StateLayer, data: str, new: int, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    channels, wide_a, wide_b = layer.parts
    mixed = normals((new, channels), rng).clone()
    if data == "like_keys" and layer.of_kind.value_part == 2:
        keys = slice(layer.k_heads * layer.k_dim, 2 * layer.k_heads * layer.k_dim)
        mixed[:, keys] = 0.3 * mixed[:, keys] + normals((1, channels), rng)[:, keys]
    if not (layer.of_kind.normalizes or layer.of_kind.convolves):
        # Keys and queries of the size that a normalization leaves.
        mixed[:, : 2 * layer.k_heads * layer.k_dim] *= layer.k_dim**-0.5
    b = normals((new, wide_b), rng) * 2.0
    if layer.of_kind.b == "channel":
        b = _rwkv_rates(data, new, layer.v_heads, layer.k_dim, rng)
    state = normals((layer.state_heads, layer.v_dim, layer.k_dim), rng) * layer.scaling
    a, window = _gates(layer, data, new, wide_a, rng), normals((channels, 16), rng).clone()
    if data == NEAR_EPSILON:
        short = slice(0, 2 * layer.k_heads * layer.k_dim)
        mixed[:, short] *= _SHORT * layer.k_dim**-0.5
        window[short] *= _SHORT * layer.k_dim**-0.5
    if layer.of_kind.steps and data == "strong_decay":
        # The step that leaves nothing is a large factor of the input: fp16 holds only outputs of smaller inputs.
        values = layer.v_heads * layer.v_dim
        mixed[:, :values] /= _STRONG_STEP
        window[:values] /= _STRONG_STEP
    return {
        "mixed": mixed, "a": a, "b": b, "state": state, "window": window,
        "keys": torch.zeros(new, layer.k_heads, dtype=torch.int64),
        "asked": torch.zeros(new, layer.k_heads, 2, dtype=torch.int64),
    }  # fmt: skip


def has_values_beyond_fp16(case: Fields, data: str) -> bool:
    """True if the values of the first head of each layer of GDN and KDA are beyond the range of fp16."""
    holds_them = case.dtype == "bf16" and shape_of(case).dtype != "fp16"
    return data == "strong_decay" and holds_them and {layer.kind for layer in state_layers(case)} <= {"gdn", "kda"}


def _beyond_fp16(layer: StateLayer, drawn: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Data in which the values of the first head of GDN and KDA are beyond the range of fp16, as some channels of a
    model in bf16 are."""
    first, mixed, window = 2 * layer.k_heads * layer.k_dim, drawn["mixed"].clone(), drawn["window"].clone()
    head = slice(first, first + layer.v_dim)
    mixed[:, head] *= _BEYOND_FP16
    window[head] *= _BEYOND_FP16
    return {**drawn, "mixed": mixed, "window": window}


def _gates(layer: StateLayer, data: str, new: int, wide: int, rng: np.random.Generator) -> torch.Tensor:
    """``a`` [new, wide] that gives the decays of the pattern."""
    low, high = _DECAYS[data]
    if layer.kind == "rwkv" and low < high:
        return _rwkv_gates(torch.from_numpy(np.log(rng.uniform(low, high, (new, wide)))))
    if layer.kind == "rwkv":
        return torch.full((new, wide), _NO_DECAY if low else _ALL_DECAY)
    if layer.A_log is None or layer.dt_bias is None:
        return torch.zeros(new, wide)
    bias = layer.dt_bias.reshape(-1).double()
    rate = layer.A_log.double().exp().repeat_interleave(wide // layer.v_heads)
    if low == high:
        if layer.of_kind.steps and low == 1.0:
            # Its A is 0, and its step is the factor of the input, too.
            return torch.from_numpy(rng.uniform(-1.0, 1.0, (new, wide)))
        return torch.full((new, wide), _NO_DECAY if low else _ALL_DECAY)
    g = -torch.from_numpy(np.log(rng.uniform(low, high, (new, wide))))
    if layer.lower_bound is not None:
        part = (g / -layer.lower_bound).clamp(1e-4, 0.99)
        return torch.logit(part) / rate - bias
    return torch.log(torch.expm1(g / rate)) - bias


def _rwkv_parameters(heads: int, k_dim: int, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """``k_k`` and ``k_a`` [H, K] float32, about the values with which training begins, and far enough from 1 that a
    backend without them is wrong."""
    return {
        "k_k": torch.from_numpy(rng.uniform(0.5, 0.9, (heads, k_dim))).float(),
        "k_a": torch.from_numpy(rng.uniform(0.7, 1.3, (heads, k_dim))).float(),
    }


def _rwkv_gates(g: torch.Tensor) -> torch.Tensor:
    """``a`` that gives g, the logarithm of a decay; the nearest there is for a decay below exp(-SLOWEST)."""
    return torch.logit((-g / SLOWEST).clamp(1e-5, 0.99))


def _rwkv_rates(data: str, new: int, heads: int, k_dim: int, rng: np.random.Generator) -> torch.Tensor:
    """``b`` [new, H * K]. With little decay the channels of a head have nearly one rate: a token multiplies an error by
    up to the norm of diag(w) - kappa^T (eta kappa), which is above 1 where rates differ, and nothing else makes it
    smaller again.
    """
    apart = 0.1 if data in ("weak_decay", "no_decay") else 1.5
    one = rng.standard_normal((new, heads, 1)) * 1.5
    return torch.from_numpy(one + apart * rng.standard_normal((new, heads, k_dim))).flatten(1)


def _exact(layer: StateLayer, new: int, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """Data of ``unit_keys``. A query is the key of an earlier row, or, if values are overwritten, a sum of two keys."""
    if not new:
        one = _exact(layer, 1, rng)
        return {name: rows if name in ("state", "window") else rows[:0] for name, rows in one.items()}
    heads, dim, values = layer.k_heads, layer.k_dim, layer.v_heads * layer.v_dim
    summed = not layer.of_kind.overwrites
    keys = np.concatenate([rng.permuted(np.tile(np.arange(dim), (heads, 1)), axis=1).T for _ in range(-(-new // dim))])[
        :new
    ]
    earlier = np.stack([keys[rng.integers(0, row + 1), :] for row in range(new)])
    asked = np.stack([earlier, earlier], -1)
    if not summed:
        # The row's own key, and that which the next row overwrites: so each value is read at the last moment.
        asked = np.stack([keys, np.concatenate([keys[1:], earlier[-1:]])], -1)
    unit, first, second = (
        torch.nn.functional.one_hot(torch.from_numpy(each), dim).flatten(1).float()
        for each in (keys, asked[..., 0], asked[..., 1])
    )
    query = first if summed else first + second
    most = _MOST_SUMMED if summed else _MOST_EXACT
    v = torch.from_numpy(rng.integers(1, most + 1, (new, values)) * rng.choice([-1, 1], (new, values))).float()
    mixed = torch.cat([query, unit, v] if layer.of_kind.value_part else [v, unit, query], -1)
    _, wide_a, wide_b = layer.parts
    if layer.of_kind.steps:
        # dt is a factor of the input: 32 times an integer is exact.
        a = torch.full((new, wide_a), _EXACT_DT)
    else:
        a = torch.full((new, wide_a), _NO_DECAY)
    factor = _EXACT_DT if layer.of_kind.steps else 1.0
    before = rng.integers(-most, most + 1, (layer.state_heads, layer.v_dim, dim)) * factor
    window = torch.from_numpy(rng.integers(-most, most + 1, (layer.parts[0], 16))).float()
    return {
        "mixed": mixed, "a": a, "b": torch.full((new, wide_b), 60.0), "state": torch.from_numpy(before),
        "window": window, "keys": torch.from_numpy(keys), "asked": torch.from_numpy(asked),
    }  # fmt: skip


def gates_of(new: int) -> list[tuple[int, float]]:
    """Entries of ``GATES`` for which a request of ``new`` rows has room; if there are none, decays of its first row."""
    return [gate for gate in GATES if gate[0] < new] or [(0, decay) for _, decay in GATES[:2]]


def _with_gates(layer: StateLayer, drawn: dict[str, torch.Tensor], turn: int) -> dict[str, torch.Tensor]:
    """Exact data of a layer in which each head, or each channel of KDA, has one row with a decay of its own. ``turn``:
    number of the request and layer, which say with which of the places the first head begins.
    """
    a, mixed = drawn["a"].clone(), drawn["mixed"].clone()
    new, wide = a.shape
    if not new:
        return drawn
    each = wide // layer.v_heads
    bias, rate = torch.zeros(wide), torch.ones(wide)
    if layer.A_log is not None and layer.dt_bias is not None:
        bias, rate = layer.dt_bias.reshape(-1).double(), layer.A_log.double().exp().repeat_interleave(each)
    gates = gates_of(new)
    for column in range(wide):
        row, decay = gates[(turn * layer.v_heads + column // each + column % each) % len(gates)]
        a[row, column] = _gate(layer, decay, float(rate[column]), float(bias[column]))
        if layer.of_kind.steps:
            # The step is a factor of the input, too: it has to be 0.
            mixed[row, column * layer.v_dim : (column + 1) * layer.v_dim] = 0.0
    return {**drawn, "a": a, "mixed": mixed}


def _gate(layer: StateLayer, decay: float, rate: float, bias: float) -> float:
    """The element of ``a`` that gives a decay of 0 or 1/2; a layer with a lower bound, whose decay is never 0, gets a
    half for both, and RWKV-7 0.6.
    """
    if layer.kind == "rwkv":
        return float(_rwkv_gates(torch.tensor(math.log(_SLOW), dtype=torch.float64)))
    if layer.lower_bound is not None:
        part = -math.log(0.5) / -layer.lower_bound
        return math.log(part / (1 - part)) / rate - bias
    if layer.of_kind.steps:
        return (-math.log(0.5) if decay else _ALL_DECAY) / rate
    return math.log(math.expm1(-math.log(decay) / rate)) - bias if decay else _ALL_DECAY

"""Cases of states in addition to the array: lengths of chunks, exact data, trees, loops, and instances."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from ..cases.case import Case, Heads
from ..cases.declared import not_declared
from ..cases.features.rows import rows_of_two
from ..cases.features.server.wider_buffers import WIDER_BUFFERS
from ..cases.features.state import nearest_state
from ..cases.layers import Layers
from ..cases.nearest_declared import nearest_declared
from ..cases.rows import Extend, Verify, room_for
from ..cases.state import EXACT_DATA, EXACT_GATES, FAIR_ROUNDING, NEAR_EPSILON, UNIT_KEYS, StateShape
from ..cases.trees import Tree, chain
from ..contract import Capabilities, ForwardMode
from ..contract.state import CONTINUES, ROLLBACKS
from ..contract.state_kind import STATE_KINDS
from .array import array_of
from .handed import state_handed_cases
from .row_ranks import state_rank_cases
from .state_columns import CHUNK, DRAWN, kinds_of, prompts, rollbacks_of, rollbacks_of_instances, with_softmax

_LONG = ((0, 11), (2 * CHUNK + 1, 2 * CHUNK - 1))
_MANY_CHUNKS = {"core": 5 * CHUNK + 1, "full": 32 * CHUNK + 1}
"""Tokens of a prompt whose first tokens no longer show in the state. In full, a backend in torch needs a minute for
them on a CPU.
"""
_WITHOUT_ROWS = ((9, 30, 0, 64, 9, 70, 0, 5), (0, 3, 20, 0, 0, CHUNK + 2, 1, 0))
"""Prompts of which some have no token in this step: the first, the last, and two next to each other."""
_MIXED = ((0, 60, 25, 0), (70, 1, 1, 1))


def state_cases(declared: Capabilities, mode: ForwardMode, tier: str) -> Iterator[Case]:
    """Cases of a tier in addition to its array, for one mode of a backend that keeps states."""
    array = array_of(declared, mode, tier)
    # Layers of a draft model keep no state: its modes have no rows.
    first = next(map(array.build, array.rows()), None)
    for case in _cases(declared, mode, tier, first) if first and declared.state else ():
        if case.data not in EXACT_DATA or (declared.state and declared.state.plain_convolution):
            yield with_softmax(declared, case)


def _cases(declared: Capabilities, mode: ForwardMode, tier: str, first: Case) -> Iterator[Case]:
    """``first``: the first case of the array."""
    yield from _exact(declared, mode, tier, first)
    if mode is ForwardMode.TARGET_VERIFY:
        yield from _in_trees(declared, tier, first)
        yield from _loops(declared, tier, first)
    if tier == "smoke":
        yield from islice(_multi_mode(declared, mode, first), 1)
    else:
        yield from _named(declared, mode, first)
        yield from _between_boxes(declared, first)
        for number, heads in enumerate(kinds_of(declared)):
            plain = _plain(declared, first, heads)
            yield from state_rank_cases(declared, plain)
            yield from state_handed_cases(declared, with_softmax(declared, plain), number)
        yield from _continued(declared, mode, first)
        yield from _in_big_pools(declared, tier, first)
        yield from _multi_mode(declared, mode, first)
        yield from _beyond_a_grid(declared, mode, first)
        yield from _near_epsilon(declared, first)
        yield from _carries(declared, first)
        yield from _rounded_stochastically(declared, mode, first)


_BOX = 8
"""Heads that a kernel loads at once: their gates fill 16 bytes."""


def _between_boxes(declared: Capabilities, first: Case) -> Iterator[Case]:
    """More value heads than a kernel loads at once, and no multiple of these, as on a rank of a model with 12 of them
    (flashinfer #4351). All other cases have 8 or fewer, or 64.
    """
    for kind in kinds_of(declared):
        ratio = kind.q_heads // kind.kv_heads
        few = next((keys for keys in range(3, _BOX + 2) if keys * ratio > _BOX and keys * ratio % _BOX), 0)
        if not few:
            continue
        case = _plain(declared, first, replace(kind, q_heads=few * ratio, kv_heads=few))
        if case.mode is ForwardMode.EXTEND:
            yield _with_prompts(declared, case, prompts(4)["about a chunk"])
        else:
            yield case.of_requests((5, 1, 30), padded=1)


_GRID_HEADS, _GRID_REQUESTS = 64, 1024
"""Value heads and requests whose product is more than 65,535, the largest y and z of a grid."""
_MOST_ELEMENTS = 1 << 24
"""The most elements of their states in a layer: with heads of 16 by 16 a run needs 5 GB, and with heads of 64 by 64 it
would need 16 times as much.
"""


def _beyond_a_grid(declared: Capabilities, mode: ForwardMode, first: Case) -> Iterator[Case]:
    """A decode, and a prefill of one row each, of more requests than a grid of requests and value heads allows, where
    so narrow heads are declared (vLLM #52030, flash-linear-attention #1077).
    """
    assert declared.state is not None
    values, keys = min(declared.heads.head_dims), min(declared.state.k_dims)
    modes = (ForwardMode.DECODE, ForwardMode.EXTEND)
    if mode not in modes or _GRID_HEADS * _GRID_REQUESTS * values * keys > _MOST_ELEMENTS:
        return
    few = kinds_of(declared)[0]
    heads = replace(few, q_heads=_GRID_HEADS, kv_heads=_GRID_HEADS * few.kv_heads // few.q_heads)
    case = _plain(declared, first, heads)
    case = _of_shape(case, k_dim=keys, dtype=min(declared.state.dtypes, key=_NARROWEST.index))
    prefixes = tuple(number * 3 // _GRID_REQUESTS * 4 for number in range(_GRID_REQUESTS))
    case = case.with_changes(head_dim=values, layers=Layers(1))
    if mode is ForwardMode.DECODE:
        yield case.of_requests(prefixes)
    else:
        yield _with_prompts(declared, case, (prefixes, (1,) * _GRID_REQUESTS))


_HOSTS = (ForwardMode.TARGET_VERIFY, ForwardMode.DECODE)
"""Modes whose case may define an instance for several modes, the preferred one first."""
_BRANCHING = Tree((0, 1, 0, 3))


def _multi_mode(declared: Capabilities, mode: ForwardMode, first: Case) -> Iterator[Case]:
    """All declared modes on one instance, as in a server: prompts next to decodes and drafts (sglang #34043). If
    snapshots are declared, the states of prompts are copied for a prefix cache. There are cases of the first kind and
    of the last. With a slot for each node of a draft (vLLM #53051, #52792), the first kind has one only if there are
    also cases with a commit.
    """
    assert declared.state is not None
    supported = declared.graph | declared.eager
    hosts = [host for host in _HOSTS if host in supported]
    if len(supported) < 2 or not hosts or mode is not hosts[0]:
        return
    kinds = kinds_of(declared)
    rollbacks = rollbacks_of_instances(declared) if mode is ForwardMode.TARGET_VERIFY else ROLLBACKS[:1]
    both = dict.fromkeys([kinds[0], kinds[-1]])
    for rollback in rollbacks:
        for heads in both if rollback == rollbacks[0] else kinds[:1]:
            yield _of_all_modes(declared, _plain(declared, first, heads), rollback)


def _of_all_modes(declared: Capabilities, plain: Case, rollback: str) -> Case:
    """A case that defines an instance for all declared modes. ``plain``: a case of its mode and heads."""
    assert declared.state is not None
    # Little work for each row: three modes on an instance take minutes where kernels are interpreted.
    keys, snapshots = min(declared.state.k_dims), min(declared.state.snapshots, default=0)
    case = _of_shape(plain, k_dim=keys, snapshots=snapshots if rollback == "commit" else 0, rollback=rollback)
    case = case.with_changes(head_dim=min(declared.heads.head_dims), layers=Layers(1))
    if plain.tree is not None:
        # Links of its nodes, which stay in a buffer, are wrong for every other mode.
        branches = plain.heads.family in declared.state.trees and declared.bounds.max_topk >= _BRANCHING.topk
        fits = branches and rollback == "commit" and len(_BRANCHING) <= declared.bounds.max_q_rows
        case = case.with_changes(rows=Verify(_BRANCHING if fits else chain(min(4, declared.bounds.max_q_rows))))
    return case.of_requests((33, 5, 12), padded=1, multi_mode=True)


def _plain(declared: Capabilities, first: Case, heads: Heads) -> Case:
    """A small case of a kind, with the widest convolution, and with default conventions if they are declared."""
    assert first.state is not None
    assert declared.state is not None
    width = max(declared.state.conv_widths) if STATE_KINDS[heads.family].convolves else 1
    plain = StateShape(first.state.k_dim, width)
    shape = nearest_state(declared.state, plain, heads.family, verifies=first.tree is not None)
    return first.with_changes(heads=heads, state=shape, data=DRAWN[0], layers=Layers(), padding="prod")


def _with_prompts(declared: Capabilities, case: Case, prompts: tuple[tuple[int, ...], tuple[int, ...]]) -> Case:
    prefixes, new = prompts
    new = tuple(min(each, declared.bounds.max_extend_tokens) for each in new)
    return case.with_changes(prefixes=prefixes, rows=Extend(new, room_for(new)), bucket=len(prefixes))


def _of_shape(case: Case, **changes: Any) -> Case:
    """The case with other states. Layers without a recurrence keep a width of 0 of their keys."""
    assert case.state is not None
    if not case.state.recurs:
        changes |= {"k_dim": 0}
    return case.with_changes(state=replace(case.state, **changes))


def two_requests_with_states(declared: Capabilities, first: Case) -> Case:
    """Base of small cases for declared values that ``state_cases`` do not try: exact data in extend, which show a lost
    token of the longest prompt.
    """
    case = _plain(declared, first, kinds_of(declared)[0])
    assert declared.state is not None
    exact = case.mode is ForwardMode.EXTEND and _exact_data(declared, case.heads)
    case = case.with_changes(
        prefixes=(17, 3), bucket=2, rows=rows_of_two(case.mode, min(4, declared.bounds.max_q_rows), 1),
        data=UNIT_KEYS if exact else case.data,
    )  # fmt: skip
    return with_softmax(declared, case)


def _exact_data(declared: Capabilities, heads: Heads) -> bool:
    """True if layers of these heads may have exact data: a state, and a convolution that passes its input on."""
    return declared.state is not None and declared.state.plain_convolution and STATE_KINDS[heads.family].recurs


def _exact(declared: Capabilities, mode: ForwardMode, tier: str, first: Case) -> Iterator[Case]:
    """Exact data for each kind: the effect of a token shows in the state at any length."""
    done = set[bool]()
    kinds = [heads for heads in kinds_of(declared) if _exact_data(declared, heads)]
    for index, heads in enumerate(kinds):
        case = _plain(declared, first, heads).with_changes(data=UNIT_KEYS)
        if mode is not ForwardMode.EXTEND:
            rollbacks = rollbacks_of(declared) if case.tree is not None else ROLLBACKS[:1]
            for rollback in rollbacks if tier != "smoke" else rollbacks[index % len(rollbacks) :][:1]:
                yield _of_shape(case, rollback=rollback).of_requests((5, 1, 30), padded=1)
            continue
        yield _with_prompts(declared, case, prompts(4)["chunk and one"])
        if tier != "smoke":
            yield _with_prompts(declared, case, _LONG)
            yield _with_prompts(declared, case, _MIXED)
            overwrites = STATE_KINDS[heads.family].overwrites
            if overwrites not in done:
                done.add(overwrites)
                yield _with_prompts(declared, case, ((0, 11), (_MANY_CHUNKS[tier], 37)))
            yield from _with_gates(declared, case)
        elif index:
            return


_GATED = ((9, 30, 0), (140, 70, 40))
"""Prompts with room for a single different decay at each place of a chunk; most continue an earlier state."""


def _with_gates(declared: Capabilities, case: Case) -> Iterator[Case]:
    """Prompts in which single rows forget all or half of a state, for kinds whose decays differ between rows."""
    wide = [each for each in ("bf16", "fp32") if each in declared.precision.dtypes]
    kind = STATE_KINDS[case.heads.family]
    if kind.fixed_decay or (kind.steps and not wide):
        return
    if kind.steps and case.dtype == "fp16":
        case = case.with_changes(dtype=wide[0])
    yield _with_prompts(declared, case, _GATED).with_changes(data=EXACT_GATES)


def _near_epsilon(declared: Capabilities, first: Case) -> Iterator[Case]:
    """Queries and keys as short as the epsilon of their norm, for each kind that divides them by it."""
    for heads in kinds_of(declared):
        if STATE_KINDS[heads.family].normalizes:
            case = _plain(declared, first, heads).with_changes(data=NEAR_EPSILON)
            if case.mode is ForwardMode.EXTEND:
                yield _with_prompts(declared, case, _MIXED)
            else:
                yield case.of_requests((5, 1, 30), padded=1)


def _carries(declared: Capabilities, first: Case) -> Iterator[Case]:
    """Lengths at which a token carries through many levels, and those next to them, for kinds with levels. Drafts and
    prompts carry between rows."""
    for heads in kinds_of(declared):
        if STATE_KINDS[heads.family].leveled:
            case = _plain(declared, first, heads)
            if case.mode is ForwardMode.EXTEND:
                yield _with_prompts(declared, case, ((63, 0, 31, 6), (2, 65, 33, 59)))
            else:
                yield case.of_requests((63, 64, 31, 6), padded=1)


def _rounded_stochastically(declared: Capabilities, mode: ForwardMode, first: Case) -> Iterator[Case]:
    """Decodes that round states stochastically: for each kind, and for each 16-bit dtype of the first one. With a
    convolution that always ends with ``silu`` the exact state is not known well enough for more than its limit.
    """
    assert declared.state is not None
    dtypes = [each for each in ("fp16", "bf16") if each in declared.state.dtypes]
    if mode is not ForwardMode.DECODE or "stochastic" not in declared.state.rounding or not dtypes:
        return
    data = FAIR_ROUNDING if declared.state.plain_convolution else DRAWN[0]
    kinds = [heads for heads in kinds_of(declared) if STATE_KINDS[heads.family].recurs]
    for index, heads in enumerate(kinds):
        for dtype in dtypes if not index else dtypes[:1]:
            case = _of_shape(_plain(declared, first, heads), dtype=dtype, rounding="stochastic")
            yield case.with_changes(data=data).of_requests((5, 1, 30), padded=1)


_TREES = (Tree((0, 0, 1, 1, 3)), Tree((0, 0, 0, 2, 2)), Tree((0, 1, 0, 3)), Tree((0, 0)))
"""Drafts that branch, with depths below the window of a convolution of 4, equal to its length, and above it."""


def _in_trees(declared: Capabilities, tier: str, first: Case) -> Iterator[Case]:
    """Drafts that branch, for kinds whose layers support trees: states and windows of parents, and their commit."""
    assert declared.state is not None
    trees = [
        tree for tree in _TREES if tree.topk <= declared.bounds.max_topk and len(tree) <= declared.bounds.max_q_rows
    ]
    for heads in kinds_of(declared):
        if heads.family not in declared.state.trees:
            continue
        case = _of_shape(_plain(declared, first, heads), rollback="commit")
        tried = trees[:1] if tier == "smoke" else trees
        for index, tree in enumerate(tried):
            yield case.with_changes(rows=Verify(tree)).of_requests((5, 1, 30), padded=(index + 1) % 3)
        if tier == "smoke":
            return
        if _exact_data(declared, heads):
            exact = case.with_changes(data=UNIT_KEYS, rows=Verify(trees[0]))
            yield exact.of_requests((3, 12, 1, 7), padded=1)
        for snapshots in sorted(declared.state.snapshots)[:1]:
            yield _of_shape(case, snapshots=snapshots).with_changes(rows=Verify(trees[0])).of_requests((4, 9), padded=2)


_LOOP_PREFIXES, _LOOP_NODES, _LOOP_ROUNDS, _LOOP_WIDTH = (CHUNK + 2, 33, 1), 4, 4, 64


def _loops(declared: Capabilities, tier: str, first: Case) -> Iterator[Case]:
    """Greedy-equivalence loops with each rollback; from core on, a hybrid model also has one with each kind."""
    assert declared.state is not None
    nodes, kinds = min(_LOOP_NODES, declared.bounds.max_q_rows), kinds_of(declared)
    rollbacks = rollbacks_of_instances(declared)
    if tier == "smoke" or nodes < 2:
        return
    for index in range(max(len(rollbacks), len(kinds) if declared.state.hybrid else 1)):
        case = _of_shape(_plain(declared, first, kinds[index % len(kinds)]), rollback=rollbacks[index % len(rollbacks)])
        prefixes = tuple(min(prefix, declared.bounds.max_extend_tokens) for prefix in _LOOP_PREFIXES)
        # Keys as wide as values, as in the models that are served.
        width = min(declared.state.k_dims & declared.heads.head_dims, key=lambda dim: abs(dim - _LOOP_WIDTH), default=0)
        if width:
            case = _of_shape(case, k_dim=width).with_changes(head_dim=width)
        case = case.of_requests(prefixes, padded=1, rows=Verify(chain(nodes), _LOOP_ROUNDS))
        if not not_declared(declared, nearest_declared(declared, with_softmax(declared, case))):
            yield case


_NARROWEST = ("bf16", "fp16", "fp32")
_WIDEST = 128


def _in_big_pools(declared: Capabilities, tier: str, first: Case) -> Iterator[Case]:
    """Slots at both ends of a pool of more than 2^31 elements: they need 4 to 9 GB of a GPU, of which very little is
    used.

    Core has one kind in decode and extend; full has each kind in every mode.
    """
    assert declared.state is not None
    if tier != "full" and first.mode is ForwardMode.TARGET_VERIFY:
        return
    wide, keys = (max(each for each in of if each <= _WIDEST or each == min(of))
                  for of in (declared.heads.head_dims, declared.state.k_dims))  # fmt: skip
    for heads in kinds_of(declared)[: None if tier == "full" else 1]:
        case = _plain(declared, first, heads)
        dtype = min(declared.state.dtypes, key=_NARROWEST.index)
        case = _of_shape(case, big=True, dtype=dtype, k_dim=keys).with_changes(head_dim=wide, layers=Layers(1))
        if first.mode is ForwardMode.EXTEND:
            yield _with_prompts(declared, case, ((0, 11), (5, 9)))
        else:
            yield case.of_requests((9, 37, 1), padded=1)


_CACHED = ((37, 20, 20, 0, 37), (9, 3, 17, 6, 2))
"""Prompts that continue cached prompts of two lengths, next to a fresh prompt."""
_ROOM = 33
"""Most tokens of a cached prompt: two chunks of 16, and one more."""


def _continued(declared: Capabilities, mode: ForwardMode, first: Case) -> Iterator[Case]:
    """Requests that continue states of a prefix cache: for the first kind, on exact data, and for the last kind."""
    assert declared.state is not None
    if mode is not ForwardMode.EXTEND:
        return
    kinds, snapshots = kinds_of(declared), min(declared.state.snapshots, default=0)
    exact = UNIT_KEYS if _exact_data(declared, kinds[0]) else DRAWN[0]
    tried = dict.fromkeys([(kinds[0], exact), (kinds[-1], DRAWN[0])])
    for heads, data in tried:
        for way in CONTINUES:
            if way in declared.state.continues:
                case = _with_prompts(declared, _plain(declared, first, heads).with_changes(data=data), _CACHED)
                case = case.with_changes(rows=Extend(case.new, min(_ROOM, declared.bounds.max_extend_tokens)))
                yield _of_shape(case, continues=way, snapshots=snapshots if snapshots < _ROOM else 0)


_WIDER = frozenset({WIDER_BUFFERS.word})


def _named(declared: Capabilities, mode: ForwardMode, first: Case) -> Iterator[Case]:
    """Batches and lengths that a covering array may not contain."""
    for heads in kinds_of(declared):
        case = _plain(declared, first, heads)
        if mode is not ForwardMode.EXTEND:
            yield case.of_requests((4, 9, 2), padded=5, padding="stale")
            if heads == kinds_of(declared)[0] and declared.server.takes_column_views:
                # Without drafts, a request's slot is the first column of its row of a block table.
                rollback = rollbacks_of(declared)[-1] if mode is ForwardMode.TARGET_VERIFY else ROLLBACKS[0]
                yield _of_shape(case, rollback=rollback).of_requests((9, 7, 1), padded=1, variants=_WIDER)
            continue
        yield _with_prompts(declared, case, _LONG)
        yield _with_prompts(declared, case, _MIXED)
        if heads == kinds_of(declared)[0] and declared.server.takes_column_views:
            yield _with_prompts(declared, case, prompts(4)["tiles"]).with_changes(variants=_WIDER)
        if declared.server.takes_requests_without_rows:
            yield _with_prompts(declared, case, _WITHOUT_ROWS)
        if heads == kinds_of(declared)[0]:
            # One row, and then 20: what is made for one row must not stay (sglang #35197).
            alone = _with_prompts(declared, case, ((0,), (1,)))
            yield alone.with_changes(rows=Extend((1,), min(20, declared.bounds.max_extend_tokens)))
        for name in ("within the window", "one fresh token"):
            yield _with_prompts(declared, case, prompts(case.state.conv_width if case.state else 4)[name])

"""Cases of layers with a recurrent state: a covering array over declared values, lengths of chunks, and exact data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, product
from typing import Any

from ..cases.case import Case, Heads
from ..cases.declared import not_declared
from ..cases.features.kv_layout import usual_layout
from ..cases.features.rows import rows_of_two
from ..cases.features.server.wider_buffers import WIDER_BUFFERS
from ..cases.features.state import nearest_state
from ..cases.head_layouts import state_heads
from ..cases.layers import PERIOD, Layers
from ..cases.nearest_declared import nearest_declared
from ..cases.rows import Decode, Extend, Rows, Verify, room_for
from ..cases.state import EXACT_DATA, EXACT_GATES, STATE_DATA, UNIT_KEYS, StateShape
from ..cases.trees import Tree, chain
from ..contract import Capabilities, ForwardMode
from ..contract.state import CONTINUES, FRESH, ORDERS, PADDED_STATES, ROLLBACKS, STATE_DTYPES
from .covering import covering_array, few_rows
from .sizes import runs

_STRENGTH = {"smoke": 1, "core": 2, "full": 3}
_DRAWN = tuple(each for each in STATE_DATA if each not in EXACT_DATA)
_BATCHES: Mapping[str, tuple[int, ...]] = {
    "one": (5,), "three": (1, 70, 9), "fresh and begun": (0, 33, 0, 4), "many": (3, 1, 12, 7, 2, 20, 5),
}  # fmt: skip
"""Tokens before the step."""
_CHUNK = 64
"""Tokens of a chunk in public kernels."""


def _prompts(width: int) -> Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Name -> tokens before the step and tokens of it. ``width``: W."""
    short = max(width - 2, 1)
    return {
        # A fresh prompt of one token next to others: it must not be treated as a decode (vLLM #51562).
        "one fresh token": ((0, 17, 0), (1, 1, 9)),
        # Shorter than the window: a part of the window before it stays.
        "within the window": ((30, 0, 5, 0), (short, short, max(width - 1, 1), width)),
        "chunk and one": ((0, 40), (_CHUNK + 1, 3)),
        # The second request begins at no multiple of a chunk.
        "about a chunk": ((7, 0, 0), (_CHUNK - 1, _CHUNK, 2)),
        "tiles": ((0, 3, 0), (15, 16, 17)),
        "one": ((0,), (20,)),
        "begun": ((64,), (5,)),
    }


_LONG = ((0, 11), (2 * _CHUNK + 1, 2 * _CHUNK - 1))
_MANY_CHUNKS = {"core": 5 * _CHUNK + 1, "full": 32 * _CHUNK + 1}
"""Tokens of a prompt whose first tokens no longer show in the state. In full, a backend in torch needs a minute for
them on a CPU.
"""
_WITHOUT_ROWS = ((9, 30, 0, 64, 9, 70, 0, 5), (0, 3, 20, 0, 0, _CHUNK + 2, 1, 0))
"""Prompts of which some have no token in this step: the first, the last, and two next to each other."""
_MIXED = ((0, 60, 25, 0), (70, 1, 1, 1))


def _columns(declared: Capabilities, mode: ForwardMode, tier: str) -> dict[str, Sequence[Any]]:
    state = declared.state
    assert state is not None
    lens: Sequence[str] = tuple(_prompts(4)) if mode is ForwardMode.EXTEND else tuple(_BATCHES)
    dims = sorted(declared.head_dims & {64, 128} or declared.head_dims)
    keys = sorted(state.k_dims & {64, 128} or state.k_dims)
    return {
        "heads": _kinds(declared) if tier == "smoke" else state_heads(declared),
        "head_dim": dims[:1] if tier == "smoke" else dims[:2],
        "k_dim": keys[:1] if tier == "smoke" else keys[:2],
        "conv_width": sorted(state.conv_widths, reverse=True),
        "dtype": [each for each in ("bf16", "fp16", "fp32") if each in declared.dtypes],
        "state_dtype": [each for each in STATE_DTYPES if each in state.dtypes],
        "lens": lens,
        "data": _DRAWN,
        "padding": ["prod", "nan", "stale"],
        "padded": [1, 0, 2],
        "padded_states": [each for each in PADDED_STATES if each in state.padding],
        "fresh": [each for each in FRESH if each in state.fresh],
        "order": [each for each in ORDERS if each in state.orders],
        "strided": [False, True] if state.strided else [False],
        "layers": [Layers(), Layers(3, 5), Layers(1)],
        **({"nodes": _nodes(declared)} if mode is ForwardMode.TARGET_VERIFY else {}),
        "snapshots": [0, *sorted(state.snapshots)],
        **({"rollback": _rollbacks(declared)} if mode is ForwardMode.TARGET_VERIFY else {}),
        **(_further(declared, mode, tier) if tier != "full" else {}),
    }


def _further(declared: Capabilities, mode: ForwardMode, tier: str) -> dict[str, Sequence[Any]]:
    """Columns that keep their first value until the others have met; rows of full, which are triples, have none."""
    assert declared.state is not None
    found: dict[str, Sequence[Any]] = {"size": ["", *_SIZES] if tier == "core" else [""]}
    if mode is not ForwardMode.TARGET_VERIFY and "source" in declared.state.continues:
        found["continues"] = ["", "source"]
    # The states of a draft are committed after its step, which another step that is planned before that does not know.
    overlaps = declared.server.overlap_scheduling and mode is not ForwardMode.TARGET_VERIFY
    found["overlap_scheduling"] = [False, True] if overlaps else [False]
    graphs = mode in declared.graph and (mode not in declared.eager or declared.server.takes_empty_batches)
    found["empty_batches"] = [False, True] if graphs else [False]
    return found


_SIZES: Mapping[str, int] = {"40 requests": 40, "130 requests": 130}
"""More requests than a warp has lanes, and than a block of 128 threads. In extend they are short prompts: their chunks
are many more than their tokens would need."""
_MOST_NEW = 3
_VARIANTS = ("overlap_scheduling", "empty_batches")
_TOLD_APART = ("heads", "dtype", "state_dtype", "conv_width", "padded_states", "fresh", "order")
_PLAIN_ROWS = 16
_EXCLUDED: Sequence[tuple[str, Callable[[Any], bool], str, Callable[[Any], bool]]] = (
    ("rollback", lambda value: value == "slots", "snapshots", bool),
    ("heads", lambda heads: heads.family == "lightning", "conv_width", lambda width: width > 1),
    # A batch with many requests is large in one direction only.
    ("size", bool, "layers", lambda layers: layers.count > PERIOD),
    ("size", bool, "nodes", lambda nodes: nodes > _FEWEST_NODES),
    ("size", bool, "lens", lambda name: name in ("chunk and one", "about a chunk", "tiles", "begun")),
)
"""Two columns, and which values of them no row has together."""
_FEWEST_NODES = 2


def _excluded(columns: Mapping[str, Sequence[Any]]) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    names = list(columns)
    for one, test, other, its in _EXCLUDED:
        if one not in columns or other not in columns or all(map(its, columns[other])):
            continue
        for (i, value), (j, second) in product(enumerate(columns[one]), enumerate(columns[other])):
            if test(value) and its(second):
                yield (names.index(one), i), (names.index(other), j)
    for name in ("head_dim", "k_dim"):
        for i, j in product(range(1, len(columns.get("size", ()))), range(1, len(columns[name]))):
            yield (names.index("size"), i), (names.index(name), j)


def _rollbacks(declared: Capabilities) -> list[str]:
    assert declared.state is not None
    return [each for each in ROLLBACKS if each in declared.state.rollback]


def _nodes(declared: Capabilities) -> list[int]:
    """Nodes of a draft: shorter than the window of a convolution, as long as it, and longer."""
    return sorted({min(each, declared.max_q_rows) for each in (2, 3, 4, 6)})


def _case(declared: Capabilities, mode: ForwardMode, row: Mapping[str, Any]) -> Case:
    width = 1 if row["heads"].family == "lightning" else row["conv_width"]
    shape = StateShape(
        row["k_dim"], width, row["state_dtype"], row["padded_states"], row["fresh"], row["order"], row["strided"],
        row.get("rollback", ROLLBACKS[0]), 0 if row.get("rollback") == "slots" else row["snapshots"],
        row.get("continues", ""),
    )  # fmt: skip
    rows: Rows = Verify(chain(row["nodes"])) if "nodes" in row else Decode()
    new: tuple[int, ...] = ()
    if mode is not ForwardMode.EXTEND:
        prefixes = _BATCHES[row["lens"]]
    else:
        prefixes, new = _prompts(width)[row["lens"]]
        new = tuple(min(each, declared.max_extend_tokens) for each in new)
    if row.get("size"):
        more = _SIZES[row["size"]] - len(prefixes)
        prefixes = (*prefixes, *runs([prefix + (prefix > 0) for prefix in prefixes], more))
        new = (*new, *runs([min(each, _MOST_NEW) for each in new[::-1]], more)) if new else ()
    if new:
        rows = Extend(new, room_for(new))
    variants = frozenset(word for word in _VARIANTS if row.get(word))
    padded = 0 if mode is ForwardMode.EXTEND and mode not in declared.graph else row["padded"]
    return Case(
        rows=rows, heads=row["heads"], head_dim=row["head_dim"], dtype=row["dtype"], page_size=min(declared.page_sizes),
        prefixes=prefixes, bucket=len(prefixes) + padded, padding=row["padding"], data=row["data"], state=shape,
        layers=row["layers"], variants=variants,
    )  # fmt: skip


def state_cases(declared: Capabilities, mode: ForwardMode, tier: str) -> Iterator[Case]:
    """The cases of a tier for one mode of a backend that keeps states."""
    if declared.state is None:
        return
    for case in _cases(declared, mode, tier):
        if case.data not in EXACT_DATA or declared.state.plain_convolution:
            yield _with_softmax(declared, case)


def _with_softmax(declared: Capabilities, case: Case) -> Case:
    """The case, with alternating softmax layers if the backend runs hybrid models."""
    if declared.state is None or not declared.state.hybrid:
        return case
    # One layer would be one of a single kind.
    layers = replace(case.layers, count=max(case.layers.count, PERIOD), hybrid=True)
    return case.with_changes(layers=layers, kv_layout=usual_layout(declared))


Excluded = frozenset[tuple[tuple[int, int], tuple[int, int]]]


def state_rows(
    declared: Capabilities, mode: ForwardMode, tier: str
) -> tuple[Mapping[str, Sequence[Any]], Excluded, list[dict[str, Any]]]:
    """Columns of the array of a mode, pairs of values that no row has together, and the rows of a tier."""
    columns = _columns(declared, mode, tier)
    if any(not values for values in columns.values()):
        return columns, frozenset(), []
    names, sizes = list(columns), [len(values) for values in columns.values()]
    excluded = frozenset(_excluded(columns))
    later = [names.index(name) for name in _further(declared, mode, tier) if name in columns]
    if _STRENGTH[tier] > 1:
        array = covering_array(tuple(sizes), _STRENGTH[tier], mode.value, (), excluded, later, _PLAIN_ROWS)
    else:
        count = max(size for at, size in enumerate(sizes) if at not in later)
        array = few_rows(sizes, count, excluded, later, [names.index(name) for name in _TOLD_APART])
    return columns, excluded, [{name: columns[name][i] for name, i in zip(names, row, strict=True)} for row in array]


def _cases(declared: Capabilities, mode: ForwardMode, tier: str) -> Iterator[Case]:
    rows = state_rows(declared, mode, tier)[-1]
    if not rows:
        return
    first = _case(declared, mode, rows[0])
    yield from (_case(declared, mode, row) for row in rows)
    yield from _exact(declared, mode, tier, first)
    if mode is ForwardMode.TARGET_VERIFY:
        yield from _in_trees(declared, tier, first)
        yield from _loops(declared, tier, first)
    if tier == "smoke":
        yield from islice(_multi_mode(declared, mode, first), 1)
    else:
        yield from _named(declared, mode, first)
        yield from _continued(declared, mode, first)
        yield from _in_big_pools(declared, tier, first)
        yield from _multi_mode(declared, mode, first)
        yield from _beyond_a_grid(declared, mode, first)


_GRID_HEADS, _GRID_REQUESTS = 64, 1024
"""Value heads and requests whose product is more than 65,535, the largest y and z of a grid."""
_MOST_ELEMENTS = 1 << 24
"""The most elements of their states in a layer: with heads of 16 by 16 a run needs 5 GB, and with heads of 64 by 64 it
would need 16 times as much.
"""


def _beyond_a_grid(declared: Capabilities, mode: ForwardMode, first: Case) -> Iterator[Case]:
    """A prefill of one row each for more requests than a grid of requests and value heads allows, if such narrow heads
    are declared (flash-linear-attention #1077).
    """
    assert declared.state is not None
    values, keys = min(declared.head_dims), min(declared.state.k_dims)
    if mode is not ForwardMode.EXTEND or _GRID_HEADS * _GRID_REQUESTS * values * keys > _MOST_ELEMENTS:
        return
    few = _kinds(declared)[0]
    heads = replace(few, q_heads=_GRID_HEADS, kv_heads=_GRID_HEADS * few.kv_heads // few.q_heads)
    case = _plain(declared, first, heads)
    case = _of_shape(case, k_dim=keys, dtype=min(declared.state.dtypes, key=_NARROWEST.index))
    prefixes = tuple(number * 3 // _GRID_REQUESTS * 4 for number in range(_GRID_REQUESTS))
    case = case.with_changes(head_dim=values, layers=Layers(1))
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
    kinds, rollbacks = _kinds(declared), _rollbacks(declared) if mode is ForwardMode.TARGET_VERIFY else ROLLBACKS[:1]
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
    case = case.with_changes(head_dim=min(declared.head_dims), layers=Layers(1))
    if plain.tree is not None:
        # Links of its nodes, which stay in a buffer, are wrong for every other mode.
        branches = plain.heads.family in declared.state.trees and declared.max_topk >= _BRANCHING.topk
        fits = branches and rollback == "commit" and len(_BRANCHING) <= declared.max_q_rows
        case = case.with_changes(rows=Verify(_BRANCHING if fits else chain(min(4, declared.max_q_rows))))
    return case.of_requests((33, 5, 12), padded=1, multi_mode=True)


def _plain(declared: Capabilities, first: Case, heads: Heads) -> Case:
    """A small case of a kind, with the widest convolution, and with default conventions if they are declared."""
    assert first.state is not None
    assert declared.state is not None
    width = 1 if heads.family == "lightning" else max(declared.state.conv_widths)
    plain = StateShape(first.state.k_dim, width)
    shape = nearest_state(declared.state, plain, heads.family, verifies=first.tree is not None)
    return first.with_changes(heads=heads, state=shape, data=_DRAWN[0], layers=Layers(), padding="prod")


def _with_prompts(declared: Capabilities, case: Case, prompts: tuple[tuple[int, ...], tuple[int, ...]]) -> Case:
    prefixes, new = prompts
    new = tuple(min(each, declared.max_extend_tokens) for each in new)
    return case.with_changes(prefixes=prefixes, rows=Extend(new, room_for(new)), bucket=len(prefixes))


def _of_shape(case: Case, **changes: Any) -> Case:
    assert case.state is not None
    return case.with_changes(state=replace(case.state, **changes))


def _kinds(declared: Capabilities) -> list[Heads]:
    """Heads of each declared kind, with the most value heads per key head."""
    by_kind: dict[str, Heads] = {heads.family: heads for heads in state_heads(declared)}
    return list(by_kind.values())


def two_requests_with_states(declared: Capabilities, first: Case) -> Case:
    """Base of small cases for declared values that ``state_cases`` do not try: exact data in extend, which show a lost
    token of the longest prompt.
    """
    case = _plain(declared, first, _kinds(declared)[0])
    assert declared.state is not None
    exact = case.mode is ForwardMode.EXTEND and declared.state.plain_convolution
    case = case.with_changes(
        prefixes=(17, 3), bucket=2, rows=rows_of_two(case.mode, min(4, declared.max_q_rows), 1),
        data=UNIT_KEYS if exact else case.data,
    )  # fmt: skip
    return _with_softmax(declared, case)


def _exact(declared: Capabilities, mode: ForwardMode, tier: str, first: Case) -> Iterator[Case]:
    """Exact data for each kind: the effect of a token shows in the state at any length."""
    done = set[bool]()
    for index, heads in enumerate(_kinds(declared)):
        case = _plain(declared, first, heads).with_changes(data=UNIT_KEYS)
        if mode is not ForwardMode.EXTEND:
            rollbacks = _rollbacks(declared) if case.tree is not None else ROLLBACKS[:1]
            for rollback in rollbacks if tier != "smoke" else rollbacks[index % len(rollbacks) :][:1]:
                yield _of_shape(case, rollback=rollback).of_requests((5, 1, 30), padded=1)
            continue
        yield _with_prompts(declared, case, _prompts(4)["chunk and one"])
        if tier != "smoke":
            yield _with_prompts(declared, case, _LONG)
            yield _with_prompts(declared, case, _MIXED)
            summed = heads.family in ("mamba", "lightning")
            if summed not in done:
                done.add(summed)
                yield _with_prompts(declared, case, ((0, 11), (_MANY_CHUNKS[tier], 37)))
            yield from _with_gates(declared, case)
        elif index:
            return


_GATED = ((9, 30, 0), (140, 70, 40))
"""Prompts that together have room for each place of a decay of its own, most of them over a state from before."""


def _with_gates(declared: Capabilities, case: Case) -> Iterator[Case]:
    """Prompts in which single rows forget all or half of a state, for kinds whose decays differ between rows."""
    wide = [each for each in ("bf16", "fp32") if each in declared.dtypes]
    if case.heads.family == "lightning" or (case.heads.family == "mamba" and not wide):
        return
    if case.heads.family == "mamba" and case.dtype == "fp16":
        case = case.with_changes(dtype=wide[0])
    yield _with_prompts(declared, case, _GATED).with_changes(data=EXACT_GATES)


_TREES = (Tree((0, 0, 1, 1, 3)), Tree((0, 0, 0, 2, 2)), Tree((0, 1, 0, 3)), Tree((0, 0)))
"""Drafts that branch, with depths below the window of a convolution of 4, equal to its length, and above it."""


def _in_trees(declared: Capabilities, tier: str, first: Case) -> Iterator[Case]:
    """Drafts that branch, for kinds whose layers support trees: states and windows of parents, and their commit."""
    assert declared.state is not None
    trees = [tree for tree in _TREES if tree.topk <= declared.max_topk and len(tree) <= declared.max_q_rows]
    for heads in _kinds(declared):
        if heads.family not in declared.state.trees:
            continue
        case = _of_shape(_plain(declared, first, heads), rollback="commit")
        tried = trees[:1] if tier == "smoke" else trees
        for index, tree in enumerate(tried):
            yield case.with_changes(rows=Verify(tree)).of_requests((5, 1, 30), padded=(index + 1) % 3)
        if tier == "smoke":
            return
        if declared.state.plain_convolution:
            exact = case.with_changes(data=UNIT_KEYS, rows=Verify(trees[0]))
            yield exact.of_requests((3, 12, 1, 7), padded=1)
        for snapshots in sorted(declared.state.snapshots)[:1]:
            yield _of_shape(case, snapshots=snapshots).with_changes(rows=Verify(trees[0])).of_requests((4, 9), padded=2)


_LOOP_PREFIXES, _LOOP_NODES, _LOOP_ROUNDS, _LOOP_WIDTH = (_CHUNK + 2, 33, 1), 4, 4, 64


def _loops(declared: Capabilities, tier: str, first: Case) -> Iterator[Case]:
    """Greedy-equivalence loops with each rollback; from core on, a hybrid model also has one with each kind."""
    assert declared.state is not None
    nodes, rollbacks, kinds = min(_LOOP_NODES, declared.max_q_rows), _rollbacks(declared), _kinds(declared)
    if tier == "smoke" or nodes < 2:
        return
    for index in range(max(len(rollbacks), len(kinds) if declared.state.hybrid else 1)):
        case = _of_shape(_plain(declared, first, kinds[index % len(kinds)]), rollback=rollbacks[index % len(rollbacks)])
        prefixes = tuple(min(prefix, declared.max_extend_tokens) for prefix in _LOOP_PREFIXES)
        # Keys as wide as values, as in the models that are served.
        width = min(declared.state.k_dims & declared.head_dims, key=lambda dim: abs(dim - _LOOP_WIDTH), default=0)
        if width:
            case = _of_shape(case, k_dim=width).with_changes(head_dim=width)
        case = case.of_requests(prefixes, padded=1, rows=Verify(chain(nodes), _LOOP_ROUNDS))
        if not not_declared(declared, nearest_declared(declared, _with_softmax(declared, case))):
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
                  for of in (declared.head_dims, declared.state.k_dims))  # fmt: skip
    for heads in _kinds(declared)[: None if tier == "full" else 1]:
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
    kinds, snapshots = _kinds(declared), min(declared.state.snapshots, default=0)
    exact = UNIT_KEYS if declared.state.plain_convolution else _DRAWN[0]
    tried = dict.fromkeys([(kinds[0], exact), (kinds[-1], _DRAWN[0])])
    for heads, data in tried:
        for way in CONTINUES:
            if way in declared.state.continues:
                case = _with_prompts(declared, _plain(declared, first, heads).with_changes(data=data), _CACHED)
                case = case.with_changes(rows=Extend(case.new, min(_ROOM, declared.max_extend_tokens)))
                yield _of_shape(case, continues=way, snapshots=snapshots if snapshots < _ROOM else 0)


_WIDER = frozenset({WIDER_BUFFERS.word})


def _named(declared: Capabilities, mode: ForwardMode, first: Case) -> Iterator[Case]:
    """Batches and lengths that a covering array may not contain."""
    for heads in _kinds(declared):
        case = _plain(declared, first, heads)
        if mode is not ForwardMode.EXTEND:
            # More requests than a warp has lanes.
            yield case.of_requests((3,) * 20 + (9,) * 14, padded=2)
            yield case.of_requests((4, 9, 2), padded=5, padding="stale")
            if heads == _kinds(declared)[0] and declared.server.takes_column_views:
                # Without drafts, a request's slot is the first column of its row of a block table.
                rollback = _rollbacks(declared)[-1] if mode is ForwardMode.TARGET_VERIFY else ROLLBACKS[0]
                yield _of_shape(case, rollback=rollback).of_requests((9, 7, 1), padded=1, variants=_WIDER)
            if heads == _kinds(declared)[0] and mode in declared.graph:
                # A replay without a live request must write no state (vllm-ascend #10901).
                yield case.of_requests((9, 7, 1), padded=1, variants=frozenset({"empty_batches"}))
            continue
        yield _with_prompts(declared, case, _LONG)
        yield _with_prompts(declared, case, _MIXED)
        if heads == _kinds(declared)[0] and declared.server.takes_column_views:
            yield _with_prompts(declared, case, _prompts(4)["tiles"]).with_changes(variants=_WIDER)
        if declared.server.takes_requests_without_rows:
            yield _with_prompts(declared, case, _WITHOUT_ROWS)
        for name in ("within the window", "one fresh token"):
            yield _with_prompts(declared, case, _prompts(case.state.conv_width if case.state else 4)[name])

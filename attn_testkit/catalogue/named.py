"""Cases that a covering array may not contain: long, wide, many and mixed requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..cases.case import Case, Heads
from ..cases.co_residents import branching
from ..cases.declared import not_declared
from ..cases.draft import Draft
from ..cases.features.heads import MOST_USUAL_RATIO, typical_heads
from ..cases.features.rows import MOST_NEW_TOKENS, most_rows
from ..cases.head_layouts import alike
from ..cases.layers import Layers
from ..cases.nearest_declared import nearest_declared
from ..cases.rows import Accepted, Drafted, Extend, Rows, Verify, room_for
from ..cases.trees import Tree, chain
from ..contract import Capabilities, ForwardMode
from .layer_options import takes_window, with_options

MOST_USUAL_ROWS = 6
"""The most rows of a request in a covering array."""
_BIG_TREE = Tree(tuple(max(0, (node - 1) // 3) for node in range(1, 40)))
"""A tree of 40 nodes, more than the bits of a 32-bit word of a packed mask."""
_CHUNKS_PAST = 7
"""Window, if it is declared, that is shorter than a chunk of a prompt."""


_SEVERAL = (32, 128, 64, 16, 63)


def named_from(cases: Sequence[Case]) -> Case:
    """Base of the named cases: the first case that is not of MLA, which is too slow for the longest requests; otherwise
    the first case."""
    return next((case for case in cases if not case.heads.layout.wide_rows), cases[0])


def without_options_of(declared: Capabilities, base: Case) -> Case:
    """``base`` without options."""
    kv_dtype = sorted(declared.kv_pool.kv_dtypes, reverse=True)[0]
    # Whether the usual scaling is meant says ``nearest_declared``, case by case: MLA has none.
    rows, indexer = base.rows, base.indexer
    if isinstance(rows, Extend):
        rows = replace(rows, chunks=1)
    elif isinstance(rows, Drafted):
        # An indexer drafts chains.
        rows, indexer = replace(rows, draft=Draft(min(2, declared.bounds.max_draft_branches), 3)), None
    return base.with_changes(rows=rows, window=-1, layer_windows="any", usual_scaling=False, logit_cap=0.0, sinks=False,
                   kv_dtype=kv_dtype, indexer=indexer)  # fmt: skip


def named_cases(declared: Capabilities, mode: ForwardMode, tier: str, base: Case) -> Iterator[Case]:
    """Cases that a covering array may not contain."""
    minimal = without_options_of(declared, base)
    # In smoke once, not once per mode: it costs as much as all other graph cases of a mode together.
    supported = declared.graph if len(declared.graph) > 1 else declared.graph | declared.eager
    hosts = supported - {ForwardMode.DRAFT_DECODE}
    alone = tier == "smoke" and mode is not min(hosts, default=mode)
    if mode in hosts and len(supported) > 1 and not alone:
        # A branching tree, so that a mask which one mode leaves in a buffer is wrong for every other.
        branches = minimal.tree and declared.bounds.max_topk > 1 and declared.bounds.max_q_rows >= 4
        rows = Verify(branching(4)) if branches else minimal.rows
        several = minimal.with_changes(multi_mode=True, rows=rows, bucket=minimal.bs + 1, padding="prod")
        if tier == "smoke" and not minimal.heads.layout.values_in_keys:
            several = several.with_changes(head_dim=min(declared.heads.head_dims))
        # Few requests, or requests of few keys, hide whose offsets and whose partial results a mode uses.
        if minimal.bs < len(_SEVERAL) or max(minimal.prefixes) < max(_SEVERAL):
            count = max(minimal.bs, len(_SEVERAL))
            counted = several.rows.counted((several.new * count)[:count])
            if isinstance(counted, Extend):
                counted = replace(counted, room=max(counted.room, room_for(counted.new)))
            several = several.with_changes(prefixes=(_SEVERAL * count)[:count], rows=counted, bucket=count + 1)
        yield several
    if minimal.draft:
        yield from _loops(declared, minimal, tier)
    if tier == "smoke":
        return
    if minimal.heads.layout.values_in_keys and max(declared.heads.gqa_ratios) > 16:
        # As many heads as there are: a few cases, because what is compared grows with them. Lengths at both sides of a
        # tile, so that a list of work has more entries than requests.
        heads = replace(minimal.heads, q_heads=max(declared.heads.gqa_ratios))
        rows = minimal.rows.counted((minimal.width, 1, minimal.width))
        yield minimal.of_requests((63, 64, 65), padded=1, rows=rows, heads=heads, data="gauss")
    # One wrong key of thousands shows only with one-hot values; see families/softmax/limits.py.
    for dtype in sorted(declared.precision.dtypes):
        rows = minimal.rows.counted((minimal.width,))
        yield minimal.of_requests((4096,), rows=rows, dtype=dtype, data="one_hot", padding="prod")
    yield _long_with_options(declared, minimal)
    # Several key tiles, whose maxima rise for some rows and fall for others; no window, which would leave one tile.
    yield minimal.of_requests((300, 70), rows=minimal.rows.counted((minimal.width, 1)), data="rising_logits")
    yield _many_requests(declared, minimal)
    if not minimal.heads.layout.wide_rows or tier == "full":
        # Lengths, positions and slots beyond 16 bits, which is also beyond the largest y and z of a grid. Wide rows
        # have 576 numbers per key: minutes without a device.
        yield smallest_of(declared, minimal).of_requests((66_000,), data="one_hot")
    yield from _wide_heads(declared, minimal)
    if mode is ForwardMode.TARGET_VERIFY:
        two = (9, 40)
        for tree in (_BIG_TREE, chain(17)):
            if len(tree) <= declared.bounds.max_q_rows and tree.topk <= declared.bounds.max_topk:
                yield minimal.of_requests(two, padded=1, rows=Verify(tree))
    if mode is ForwardMode.DRAFT_EXTEND and declared.bounds.max_q_rows >= 4:
        # The sum divides by the batch size, so a view as [bs, sum / bs] succeeds and is wrong.
        yield minimal.of_requests((5, 9), rows=Accepted((1, 3), 4))
    if mode is ForwardMode.EXTEND:
        yield from _prompts(declared, minimal)
    if minimal.new and most_rows(declared, mode) > MOST_USUAL_ROWS:
        # A request's rows times the query heads of a KV head exceed one tile of rows.
        many = min(most_rows(declared, mode), 33)
        heads = _heads_like(declared, minimal)[-1]
        extends, v2 = mode is ForwardMode.EXTEND, mode is ForwardMode.DRAFT_EXTEND_V2
        few = Extend((many, 3), many) if extends else Accepted((many, 3), many, v2)
        yield minimal.of_requests((9, 40), rows=few, heads=heads)


def _long_with_options(declared: Capabilities, minimal: Case) -> Case:
    """All declared options, at a length at which kernels split keys, next to a short request."""
    optional = with_options(declared, minimal, 700)
    return optional.of_requests(
        (1500, 70),
        padded=1,
        rows=optional.rows.counted((minimal.width, 1)),
        kv_dtype=sorted(declared.kv_pool.kv_dtypes)[0],
        data="gauss",
        padding="prod",
    )


def _heads_like(declared: Capabilities, minimal: Case) -> list[Heads]:
    """The declared layouts that can replace the layout of ``minimal``: MLA for MLA, and any other layout otherwise."""
    return [heads for heads in typical_heads(declared) if alike(heads, minimal.heads)]


def smallest_of(declared: Capabilities, minimal: Case) -> Case:
    """Return the case with the least declared work for each row and key, for cases with very many rows or keys."""
    return minimal.with_changes(
        heads=min(_heads_like(declared, minimal), key=lambda heads: (heads.kv_heads, heads.q_heads)),
        head_dim=minimal.head_dim if minimal.heads.layout.values_in_keys else min(declared.heads.head_dims),
        page_size=min(declared.kv_pool.page_sizes),
        rows=_fewest(minimal.rows),
        padding="prod",
    )


def _fewest(rows: Rows) -> Rows:
    few = min(2, rows.width)
    match rows:
        case Verify():
            return Verify(chain(few))
        case Drafted(draft):
            return replace(rows, draft=Draft(min(2, draft.branches), 2))
        case Extend():
            return replace(rows, new=(few,) * len(rows.new), room=few)
        case Accepted():
            return replace(rows, new=(few,) * len(rows.new), width=few)
    return rows


def _many_requests(declared: Capabilities, minimal: Case) -> Case:
    """More requests than a warp has lanes, and more than a block of 128 threads: warps and blocks sum offsets and make
    schedules."""
    small = smallest_of(declared, minimal)
    rows = small.rows.counted((1,) * 66 + (small.width,) * 66)
    return small.of_requests((3,) * 45 + (1,) * 43 + (9,) * 44, rows=rows, data="gauss")


def _prompts(declared: Capabilities, minimal: Case) -> Iterator[Case]:
    """A prompt of several tiles of rows among decode rows; and chunks of requests that share prefixes."""
    rows, page = min(MOST_NEW_TOKENS, declared.bounds.max_extend_tokens), minimal.page_size
    small = smallest_of(declared, minimal).with_changes(page_size=page, data="gauss")
    among_decodes = (1, rows, 1)
    yield small.of_requests((70, 300, 5), rows=Extend(among_decodes, room_for(among_decodes)))
    new = tuple(min(n, declared.bounds.max_extend_tokens) for n in (page + 1, 2, 1))
    prefixes = (2 * page, 2 * page + 1, page)
    yield small.of_requests(prefixes, padded=1, rows=Extend(new, room_for(new), chunks=3), layout="shared")
    window = max(declared.windows.smallest, _CHUNKS_PAST)
    if takes_window(declared, small) and window + 2 <= declared.bounds.max_extend_tokens:
        # Chunks as long as each other, of which only the first begins inside the window: lengths that are equal if
        # clamped to it, and rows that see other numbers of keys (vLLM #47766). All chunks of one prompt are equal.
        yield small.of_requests(
            (1,), rows=Extend((window + 2,), window + 2, chunks=3), window=window, layer_windows="one"
        )


_LOOP_WINDOW, _LOOP_ROUNDS, _LOOP_PAGE = 11, 6, 16


def _loops(declared: Capabilities, minimal: Case, tier: str) -> Iterator[Case]:
    """The greedy-equivalence loop of a chain and, from core on, of two branches if trees are declared, too, with the
    declared options of layers and a declared pool of FP8.
    """
    if not _has_loops(declared):
        return
    small = _of_loop(declared, minimal, Drafted(Draft(1, 3), rounds=_LOOP_ROUNDS))
    branching = small.with_changes(rows=Drafted(Draft(2, 3), rounds=_LOOP_ROUNDS))
    found = [small]
    if tier != "smoke":
        found.append(_with_loop_options(declared, branching if _takes(declared, branching) else small))
    yield from (case for case in found if _takes(declared, case))


def verify_loop_cases(declared: Capabilities, minimal: Case) -> Iterator[Case]:
    """The greedy-equivalence loop of target-verify, with the declared options of layers and KV groups."""
    nodes = min(4, declared.bounds.max_q_rows)
    if not _has_loops(declared) or nodes < 2 or not minimal.tree:
        return
    paged = minimal.with_changes(page_size=min(declared.kv_pool.page_sizes, key=lambda size: abs(size - _LOOP_PAGE)))
    plain = _of_loop(declared, paged, Verify(chain(nodes), _LOOP_ROUNDS))
    plain = plain.with_changes(
        prefixes=tuple(min(prefix, declared.bounds.max_extend_tokens) for prefix in plain.prefixes)
    )
    small = _with_loop_options(declared, plain).with_changes(kv_dtype=plain.kv_dtype)
    grouped = small.with_changes(layers=Layers(groups=declared.kv_pool.kv_groups and small.window >= 0))
    yield from (case for case in (grouped,) if _takes(declared, case))


def _has_loops(declared: Capabilities) -> bool:
    """True unless keys are selected or compressed, or pools have packed rows only."""
    return not (declared.sparse or declared.compressor) and bool(declared.kv_pool.kv_dtypes & {"same", "fp8_e4m3"})


def _takes(declared: Capabilities, case: Case) -> bool:
    return not not_declared(declared, nearest_declared(declared, case))


def _of_loop(declared: Capabilities, minimal: Case, rows: Rows) -> Case:
    page = minimal.page_size
    kv_dtype = "same" if "same" in declared.kv_pool.kv_dtypes else "fp8_e4m3"
    small = smallest_of(declared, minimal).with_changes(page_size=page, kv_dtype=kv_dtype, data="gauss")
    return small.of_requests((page + 1, 2 * page, 1), padded=1, rows=rows)


def _with_loop_options(declared: Capabilities, small: Case) -> Case:
    """A loop with the options that are declared in all of its modes. A window is shorter than some of the loop's
    texts."""
    found = with_options(declared, small, max(_LOOP_WINDOW, declared.windows.smallest)).with_changes(rows=small.rows)
    longer = found.with_changes(prefixes=(max(found.prefixes[0], found.window + 2), *found.prefixes[1:]))
    unwindowed = found.with_changes(window=-1, layer_windows="any")
    found = next((each for each in (longer, unwindowed) if _takes(declared, each)), small)
    narrow = found.with_changes(kv_dtype="fp8_e4m3")
    return narrow if _takes(declared, narrow) else found


def _wide_heads(declared: Capabilities, minimal: Case) -> Iterator[Case]:
    """Groups of more query heads than the array tries: the largest declared, and one that is not a power of two."""
    wide = (
        sorted(r for r in declared.heads.gqa_ratios if r > MOST_USUAL_RATIO) if "gqa" in declared.heads.families else []
    )
    odd = [r for r in wide if r & (r - 1)]
    for ratio in dict.fromkeys([*wide[-1:], *odd[-1:]]):
        yield minimal.with_changes(heads=Heads("gqa", 2 * ratio, 2), rope_dim=0, data="gauss")

"""Checks of recurrent states: slots that were written, windows of convolutions, and the states themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from ..cases.case import Case
from ..cases.state import EXACT_DATA
from ..families.recurrent.chunks import CHUNKS, HANDED_ON, ChunkMistake
from ..families.recurrent.data import StateStepData, states_in
from ..families.recurrent.level_mistakes import mistaken_levels
from ..families.recurrent.levels import by_level, filled_levels
from ..families.recurrent.memory import from_rows, more_columns_in
from ..families.recurrent.recurrence import Recurrence, Start, recur, start_of
from ..results.finding import Finding
from .comparison import BITS, Comparison, place_of_max
from .describe import index_ranges, number, times
from .evaluation import Evaluation
from .observation import Observation
from .state_contents import of_a_narrower_dtype, of_outputs
from .state_tokens import read_text, token_text


class _After(NamedTuple):
    """Contents of the slots of a step's requests after it, and the right contents. E ends: ``StateStepData.ends``."""

    data: StateStepData
    windows: torch.Tensor
    """[L, E, C, columns]."""
    states: torch.Tensor
    """[L, E, Hv, V, K] in the state's dtype."""
    want: Recurrence
    unwritten: torch.Tensor
    """[E] bool: slots in which no bit changed."""
    more_columns: torch.Tensor
    """[L, E, C, n]: columns of windows after those of ``windows``."""

    @property
    def before(self) -> Start:
        """States and windows before the step, of each end's request: [L, E, ...]."""
        start, owner = start_of(self.data), [end.request for end in self.data.ends]
        return Start(start.states[:, owner], start.walk[:, owner], start.windows[:, owner])

    def requests(self, bad: torch.Tensor) -> list[int]:
        """Requests of some ends, [E] bool, ascending."""
        return sorted({end.request for end, wrong in zip(self.data.ends, bad.tolist(), strict=True) if wrong})

    def place(self, end: int) -> str:
        """Words after the name of a request for one of its ends; empty for its only state."""
        each, data = self.data.ends[end], self.data
        if data.nodes > 1 or not each.has_window:
            return f" after node {each.rows - 1}"
        return " in its copy for the prefix cache" if each.slot in data.snapshot_slots else ""


@lru_cache(maxsize=2)
def _after(observed: Observation) -> _After | None:
    """Contents after the step; None for cases without states, and for steps without a request."""
    inputs = observed.inputs
    data = None if inputs is None else states_in(inputs.data)
    if data is None or not observed.step.requests:
        return None
    observed = observed.of_family("recurrent")
    slots, (changed, held) = torch.tensor([end.slot for end in data.ends]), observed.written
    unwritten = ~torch.isin(slots, changed)
    # An image of the whole pool takes longer than all else here.
    rows = observed.pool[:, 0, slots, 0] if unwritten.any() else held[:, 0, torch.searchsorted(changed, slots), 0]
    return _After(data, *from_rows(rows, data), recur(data), unwritten, more_columns_in(rows, data))


@lru_cache(maxsize=2)
def _ratios(observed: Observation) -> torch.Tensor | None:
    """Error over limit of each row of a state, its norm and its largest element, [L, E, Hv, V]; NaN is infinite. None
    where ``_after`` is, and for layers without a recurrence."""
    after = _after(observed)
    if after is None or not after.states.numel():
        return None
    got, want = after.states.flatten(0, 1), after.want.states.flatten(0, 1)
    worst = torch.empty(want.shape[:-1], dtype=torch.float64)
    # Some slots at a time: fresh memory for all of them costs more than the arithmetic.
    slots = _AT_ONCE // max(1, want[:1].numel()) or 1
    for found, own, right in zip(*(torch.split(each, slots) for each in (worst, got, want)), strict=True):
        error = own.to(torch.float64, copy=True).sub_(right)
        norm = torch.linalg.vector_norm(error, dim=-1)
        torch.maximum(norm, error.abs_().amax(-1), out=found)
    return (worst.view_as(after.want.state_limit) / after.want.state_limit).nan_to_num(torch.inf, torch.inf)


_AT_ONCE = 1 << 16
"""Number of elements of states that are compared at once: half a megabyte, which a core's cache holds."""


def state_margin(comparison: Comparison) -> float:
    """Largest error over limit of the states after a step; 0 for cases without states."""
    ratios = _ratios(comparison.observed)
    return 0.0 if ratios is None else float(ratios.max())


def _who(after: _After, end: int) -> str:
    data, each = after.data, after.data.ends[end]
    prefix = "a fresh one" if data.fresh[each.request] else "one with a state"
    tokens = f"{data.news[each.request]} tokens"
    if each.rows < data.news[each.request]:
        tokens += f", {each.rows} of them applied"
    return f"request {each.request} ({prefix}, {tokens}, slot {each.slot})"


def writes_own_state(observed: Observation, case: Case) -> list[Finding]:
    """Check that only slots of the batch changed; slot 0 may change if the convention for padding allows it."""
    after = _after(observed)
    if case.state is None or observed.inputs is None:
        return []
    observed = observed.of_family("recurrent")
    own = {end.slot for end in after.data.ends} if after else set()
    if case.state.padding == "write_zero":
        own.add(0)
    wrong = [slot for slot in observed.written[0].tolist() if slot not in own]
    if not wrong and not observed.outside:
        return []
    if not wrong:
        where = f"byte {observed.outside[0]} of the memory of the state pool"
        return [_finding(observed, "writes-own-state", "memory between slots of states was written", where, _STRIDES)]
    what = "slot 0, which nobody owns and padding must skip, was written" if wrong == [0] else (
        f"the state of slot {index_ranges(wrong)} was written, although no request of the batch owns it"
    )  # fmt: skip
    padded = observed.step.bucket - observed.step.bs if observed.replay else 0
    hint = ""
    if padded:
        index = case.state.padded_index
        hint = f"the batch has {padded} padded request{'s' * (padded > 1)} of index {index}: " + (
            "such rows must store nothing" if case.state.padding != "write_zero" else "they may write slot 0 only"
        )
    if after is not None and set(wrong) & set(after.data.sources):
        read = [place for place, slot in enumerate(after.data.sources) if slot in wrong]
        hint = f"its state is that of a prefix cache: request {read[0]} continues it, and others may later"
    elif after is not None and wrong and not padded:
        hint = _owner_hint(observed, wrong)
    return [
        _finding(observed, "writes-own-state", what, f"slots of the batch: {index_ranges(sorted(own - {0}))}", hint)
    ]


def _owner_hint(observed: Observation, wrong: list[int]) -> str:
    """Name the number that was used as a slot."""
    places = set(range(observed.step.bs))
    rows = {request.pool_row for request in observed.step.requests}
    changed = set(observed.written[0].tolist())
    if changed == rows:
        return "probably the row of the request table is used as the slot: use batch.state.indices, or req_to_state"
    if set(wrong) <= places:
        return "probably the position in the batch is used as the slot: these slot numbers are positions in the batch"
    if set(wrong) <= rows:
        return "probably the row of the request table is used as the slot: use batch.state.indices, or req_to_state"
    return ""


_STRIDES = "store by the strides of the pool: the stride between slots does not follow from the shape"


def _finding(observed: Observation, check: str, what: str, where: str, hint: str = "") -> Finding:
    return Finding(check, what, where=where, hint=hint, step=observed.label)


def verify_keeps_state(observed: Observation, case: Case) -> list[Finding]:
    """Check that a verify changed no state before its commit."""
    moved = observed.of_family("recurrent").copies.group("pool").get("moved")
    after = _after(observed)
    if moved is None or after is None or not len(moved):
        return []
    slots = after.data.slots.tolist()
    own = [slots.index(slot) for slot in moved.tolist() if slot in slots]
    what = f"the state of request {own[0]}" if own else f"slot {int(moved[0])}, which no request of the batch owns,"
    return [
        _finding(
            observed, "verify-keeps-state", f"{what} was changed by the verify, before anything was accepted",
            f"slots whose states changed: {index_ranges(moved.tolist())}",
            "write the state after each node to pool.scratch; commit makes one of them the slot's",
        )
    ]  # fmt: skip


def _of_another_node(after: _After, bad: torch.Tensor) -> str:
    """Name the node of a draft whose state is in the slot instead of the last accepted node's."""
    data = after.data
    if all(end.rows == data.news[end.request] for end in data.ends):
        return _of_fewer_tokens(after, bad)

    def fits(off: int) -> bool:
        return _is_behind(after, bad, [min(max(end.rows + off, 0), data.news[end.request]) for end in data.ends])

    right = "the right one" if data.nodes > 1 else "the last accepted one"
    for off in (-2, -1, 1, 2):
        if fits(off):
            nodes, where = f"{abs(off)} node{'s' * (abs(off) > 1)}", "after" if off > 0 else "before"
            return f"it is the state {nodes} {where} {right}"
    return "it is the state after the whole draft" if fits(max(data.news)) else ""


def _is_behind(after: _After, bad: torch.Tensor, rows: Sequence[int]) -> bool:
    """True if the wrong states are those after this number of rows of their requests. ``rows``: one number for each
    end."""
    moved = tuple(replace(end, rows=count) for end, count in zip(after.data.ends, rows, strict=True))
    return _holds(after, bad, recur(replace(after.data, ends=moved)))


def _holds(after: _After, bad: torch.Tensor, other: Recurrence) -> bool:
    """True if the wrong states, of ``bad`` [E] bool, are those of another answer, within its limits."""
    near = torch.linalg.vector_norm(after.states.double() - other.states, dim=-1) <= other.state_limit
    return bool(near.flatten(2).all(-1).all(0)[bad].all())


_CHUNKS = (16, 32, 64, 128, 256)
"""Tokens of a chunk in kernels for prompts."""
_LONGEST = 4096
"""Most tokens of a request for which other states are computed."""


def _of_fewer_tokens(after: _After, bad: torch.Tensor) -> str:
    """Name the tokens at the end of prompts that are missing in the wrong states: the last one, or those of the last
    chunk."""
    data = after.data
    counts = [data.news[end.request] for end in data.ends]
    wrong = [count for count, is_bad in zip(counts, bad.tolist(), strict=True) if is_bad]
    if max(counts) > _LONGEST or min(wrong) < 2:
        return ""
    if _is_behind(after, bad, [max(count - 1, 0) for count in counts]):
        alone = next((chunk for chunk in reversed(_CHUNKS) if all(count % chunk == 1 for count in wrong)), 0)
        only = f", the only one in its last chunk of {alone} tokens" if alone else ""
        return f"it is the state before the last token of the step, which was not applied{only}"
    for chunk in _CHUNKS:
        lost = [count % chunk for count in wrong]
        if all(lost) and max(wrong) > chunk and _is_behind(after, bad, [count - count % chunk for count in counts]):
            return f"it is the state after the last whole chunk of {chunk} tokens: those after it were not applied"
    return ""


def conv_window_exact(observed: Observation, case: Case) -> list[Finding]:
    """Check that own windows hold the last W - 1 inputs, bit for bit."""
    after = _after(observed)
    if after is None or not after.windows.numel():
        return []
    bits = BITS[after.windows.dtype.itemsize]
    want = after.want.windows
    differs = after.windows.contiguous().view(bits) != want.contiguous().view(bits)
    if after.data.history:
        # NaN that moved with the window may have other bits.
        differs &= ~(after.windows.isnan() & want.isnan())
    if not differs.any():
        return _columns_written(observed, case, after)
    layer, end, channel, place = (int(i) for i in differs.nonzero()[0])
    at, request = (layer, end, channel, place), after.data.ends[end].request
    bad = after.requests(differs.flatten(2).any(-1).any(0))
    if not after.data.ends[end].has_window:
        what = f"a window was stored in slot {after.data.ends[end].slot}, which is a later slot of request {request}"
        hint = "the window of a request is in its first slot, for all nodes"
        return [_finding(observed, "conv-window-exact", what, f"{_layer(case, layer)}, channel {channel}", hint)]
    return [
        Finding(
            "conv-window-exact",
            f"the convolution window of request {request}{_copied(after, end)} does not hold its last inputs",
            where=f"{_layer(case, layer)}, {_who(after, end)}, channel {channel}, column {place} of "
            f"{want.shape[-1]} = {number(float(after.windows[at]))}, want {number(float(want[at]))}",
            spread=f"requests {index_ranges(bad)} of {observed.step.bs} wrong",
            hint=_window_hint(after, differs),
            step=observed.label,
        )
    ]


def _shifted_in_no_order(after: _After) -> torch.Tensor:
    """[L, E, C, columns]: windows that were moved to column 0 of their slot, the last column first."""
    found, last = after.want.windows.clone(), after.want.windows.shape[-1] - 1
    for place, end in enumerate(after.data.ends):
        by = end.rows - 1
        for column in range(last - by, -1, -1) if by > 0 else ():
            found[:, place, :, column] = found[:, place, :, column + by]
    return found


def _columns_written(observed: Observation, case: Case, after: _After) -> list[Finding]:
    """Columns after the W - 1 of ``taps_first`` that hold neither the NaN nor the zeros that a server puts there."""
    if after.data.shape.conv_windows != "taps_first":
        return []
    kept = after.more_columns.isnan() | (after.more_columns == 0 if after.data.shape.fresh == "zeroed" else False)
    if kept.all():
        return []
    layer, end, channel, place = (int(i) for i in (~kept).nonzero()[0])
    at, taps = (layer, end, channel, place), after.windows.shape[-1]
    held = number(float(after.more_columns[at]))
    return [
        Finding(
            "conv-window-exact",
            f"the window of request {after.data.ends[end].request}{_copied(after, end)} was written beyond its columns",
            where=f"{_layer(case, layer)}, {_who(after, end)}, channel {channel}, column {taps + place} of "
            f"{taps + after.more_columns.shape[-1]} = {held}; the taps read columns 0..{taps - 1}",
            hint=f"with conv_windows taps_first only the first {taps} columns move, whatever the length of a window in "
            "the pool is",
            step=observed.label,
        )
    ]


def _copied(after: _After, end: int) -> str:
    return "" if after.data.nodes > 1 else after.place(end)


def _window_hint(after: _After, differs: torch.Tensor) -> str:
    """Name windows that the slot holds instead."""
    got, bad = after.windows, differs.flatten(2).any(-1).any(0)
    before, want = after.before.windows, after.want.windows

    def fits(other: torch.Tensor) -> bool:
        return bool((got == other).flatten(2).all(-1).all(0)[bad].all())

    if (older := after.data.history) and not bool(differs[..., older:].any()):
        return (
            f"its last {got.shape[-1] - older} columns are right, and those before them are not: with conv_windows "
            "newest_last a window moves by all of its columns"
        )
    if bool(after.unwritten[bad].all()) or (before.shape == got.shape and fits(before)):
        return "it is the window from before the step: the new one was not stored"
    if bool((got.isnan() & ~want.isnan())[:, bad].any()):
        text = "columns come from a slot that holds no state of the request"
        end = {"taps_first": "first", "newest_last": "last"}.get(after.data.shape.conv_windows)
        if end is None:
            return text
        return (
            f"{text}, or from columns of its longer window that hold no input: the last inputs are in the {end} "
            f"{got.shape[-1] - after.data.history} columns"
        )
    if after.data.shape.by_slots and after.data.shape.commits and fits(_shifted_in_no_order(after)):
        return (
            "columns of it were overwritten before they were moved: the two ranges overlap, so copy the first column "
            "first, or read all columns before one is written"
        )
    if fits(want.flip(-1)):
        return "its columns are in reverse order: the oldest input comes first"
    if fits(want.roll(1, 1)) or fits(want.roll(-1, 1)):
        return "it is the window of another request of the batch: rows are paired with the wrong slots"
    news = torch.tensor([after.data.news[end.request] for end in after.data.ends])
    new = torch.arange(want.shape[-1]) >= want.shape[-1] - news[:, None]
    if bool((news < want.shape[-1])[bad].all()) and not bool((differs.any(2).any(0) & new).any()):
        return "the wrong requests have fewer tokens than the window has columns, so older columns have to move up"
    return of_outputs(after.data, after.windows, bad)


def state_matches_oracle(observed: Observation, case: Case) -> list[Finding]:
    """Check that every row of own states is within its limit."""
    after, ratios = _after(observed), _ratios(observed)
    if after is None or ratios is None:
        return []
    wrong = ratios > 1
    if not wrong.any():
        return []
    layer, end, head, value = place_of_max(ratios)
    error = (after.states[layer, end, head, value].double() - after.want.states[layer, end, head, value]).abs()
    key = int(error.nan_to_num(torch.inf).argmax())
    at, request = (layer, end, head, value, key), after.data.ends[end].request
    bad = after.requests(wrong.flatten(2).any(-1).any(0))
    count = after.data.layers[0].v_heads
    heads = sorted({place % count for place in wrong.any(3).any(0).any(0).nonzero().flatten().tolist()})
    ratio, nan = float(ratios.max()), not after.states[at].isfinite()
    return [
        Finding(
            "state-matches-oracle",
            f"the state of request {request}{after.place(end)} "
            + ("is NaN or Inf" if nan else f"differs from the oracle, {times(ratio)} over the limit"),
            where=f"{_layer(case, layer)}, {_who(after, end)}, {_head(after, head)}, state[{value}, {key}] = "
            f"{number(float(after.states[at]))}, want {number(float(after.want.states[at]))} (limit of the row "
            f"{number(float(after.want.state_limit[at[:4]]))})",
            spread=f"requests {index_ranges(bad)} of {observed.step.bs} wrong, heads {index_ranges(heads)} of {count}",
            hint=_state_hint(after, wrong),
            step=observed.label,
        )
    ]


def _state_hint(after: _After, wrong: torch.Tensor) -> str:
    """Name states that the slot holds instead."""
    bad, want = wrong.flatten(2).any(-1).any(0), after.want.states
    if bool(after.unwritten[bad].all()):
        return "no bit of the slot changed: the state was not stored"

    def fits(other: torch.Tensor) -> bool:
        off = torch.linalg.vector_norm(after.states.double() - other, dim=-1) / after.want.state_limit
        return bool((off.nan_to_num(torch.inf) <= 1).flatten(2).all(-1).all(0)[bad].all())

    others = [
        ("it is the state before the step: the update was not stored", after.before.states),
        (
            "it is the state of the request before it in the batch: slots are paired with the wrong requests",
            want.roll(1, 1),
        ),
        (
            "it is the state of the request after it in the batch: slots are paired with the wrong requests",
            want.roll(-1, 1),
        ),
        ("it is the state of the layer before it", want.roll(1, 0)),
        ("the head has the state of the head before it", want.roll(1, 2)),
    ]
    if want.shape[-1] == want.shape[-2]:
        others.append(("rows and columns are exchanged: the pool has the other order", want.mT))
    known = next((text for text, other in others if fits(other)), "") or _of_another_node(after, bad)
    known = known or _of_levels(after, bad, fits) or _of_chunks(after, bad)
    return known or of_a_narrower_dtype(
        after.data.dtype, after.states[:, bad], want[:, bad], after.want.state_limit[:, bad]
    )


def _of_levels(after: _After, bad: torch.Tensor, fits: Callable[[torch.Tensor], bool]) -> str:
    """Name a mistake in levels that gives the wrong states, if only one does; empty for kinds without levels."""
    data, levels = after.data, after.data.layers[0].levels
    found = [text for text, wrong in mistaken_levels(data) if _holds(after, bad, recur(wrong))]
    if len(found) == 1:
        return f"probably {found[0]}"
    if not levels or data.kept == data.news:
        return ""
    drafted = data.query_positions[:, 0] + torch.tensor(data.news)
    filled = filled_levels(drafted, levels)[[end.request for end in data.ends]]
    emptied = by_level(after.want.states, levels) * filled[..., None, None, None]
    text = "a carry of rejected nodes stays: levels that the whole draft empties are empty"
    return text if fits(emptied.flatten(2, 3)) else ""


def _of_chunks(after: _After, bad: torch.Tensor) -> str:
    """Name a mistake in the state at the end of a chunk that gives the wrong states."""
    data = after.data
    most = max(data.news)
    if data.layers[0].levels or data.trees or data.before is not None or not 1 < most <= _LONGEST_CHUNKED:
        return ""
    off = torch.linalg.vector_norm(after.states.double() - after.want.states, dim=-1)[:, bad].square().sum()
    # A chunk as long as the prompt or longer is the same for all of them.
    for rows in (*(rows for rows in reversed(CHUNKS) if rows < most), 0):
        for slip, what in HANDED_ON.items():
            found = recur(replace(data, mistake=ChunkMistake(rows or most, slip)))
            left = torch.linalg.vector_norm(after.states.double() - found.states, dim=-1)[:, bad]
            if bool((left <= found.state_limit[:, bad]).all()) and bool(left.square().sum() < off / 10):
                of = f"a chunk of {rows} rows" if rows else "a chunk"
                return f"the state at the end of {of} {what}: it is right for a backend that does so"
    return ""


_LONGEST_CHUNKED = 512
"""Most tokens of a request for which mistakes of chunks are tried: each is computed token by token."""


def state_counts_tokens(observed: Observation, case: Case) -> list[Finding]:
    """Check, on exact data, that each token is in the state of its request once, and in order."""
    after = _after(observed)
    if after is None or after.data.unit_keys is None:
        return []
    # Half of the smallest difference between two values. NaN is left to other checks.
    off = (after.states.double() - after.want.states).abs().nan_to_num(0.0)
    wrong = off > 0.5
    if not wrong.any():
        found = read_text(after.data, observed.of_family("recurrent").attention)
        if found is None:
            return []
        text, (layer, row, head) = found
        where = f"output of {_layer(case, layer)}, row {row}, head {head}; the states afterwards are right"
        return [_finding(observed, "state-counts-tokens", text, where)]
    layer, end, head, _, key = (int(i) for i in wrong.nonzero()[0])
    columns, request = int(wrong[:, end].any(-2).sum()), after.data.ends[end].request
    return [
        Finding(
            "state-counts-tokens",
            token_text(after.data, after.states, after.want.states, after.before.states, (layer, end, head, key)),
            where=f"{_layer(case, layer)}, {_who(after, end)}, {_head(after, head)}, column {key} of its state",
            spread=f"{columns} columns of request {request} are wrong in all layers and heads",
            step=observed.label,
        )
    ]


def _head(after: _After, place: int) -> str:
    """Name of a matrix of a slot: its head, and its level in log-linear attention."""
    level, head = divmod(place, after.data.layers[0].v_heads)
    return f"level {level} of head {head}" if after.data.layers[0].levels else f"head {head}"


def _layer(case: Case, layer: int) -> str:
    """Name of the layer that is number ``layer`` of those that keep a state."""
    return case.layers.name(case.places("recurrent")[layer])


def _has_states(case: Case) -> bool:
    return case.state is not None


def _recurs(case: Case) -> bool:
    return case.state is not None and case.state.recurs


EVALUATIONS = (
    Evaluation(
        "reads-own-state",
        shown_by=_has_states,
    ),
    Evaluation(
        "writes-own-state",
        shown_by=_has_states,
        run=lambda comparison, schedule, declared: writes_own_state(comparison.observed, schedule.case),
    ),
    Evaluation(
        "verify-keeps-state",
        shown_by=lambda case: _recurs(case) and case.tree is not None and not case.by_slots,
        run=lambda comparison, schedule, declared: verify_keeps_state(comparison.observed, schedule.case),
    ),
    Evaluation(
        "conv-window-exact",
        shown_by=lambda case: case.state is not None and case.state.conv_width > 1,
        run=lambda comparison, schedule, declared: conv_window_exact(comparison.observed, schedule.case),
    ),
    Evaluation(
        "state-matches-oracle",
        shown_by=_recurs,
        run=lambda comparison, schedule, declared: state_matches_oracle(comparison.observed, schedule.case),
    ),
    Evaluation(
        "state-counts-tokens",
        shown_by=lambda case: case.data in EXACT_DATA,
        run=lambda comparison, schedule, declared: state_counts_tokens(comparison.observed, schedule.case),
    ),
)

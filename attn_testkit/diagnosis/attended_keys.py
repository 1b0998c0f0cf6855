"""Experiments that show the KV tokens that were attended to: with Q = K = 0 all have equal weights, and one-hot values
identify them.

Each run names as many KV tokens as a head has values. In longer requests codes name all of them in one run, as long as
few are wrong (``checks/miscounts.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from ..cases.case import CODES
from ..cases.features.data_pattern import COUNTED
from ..cases.traits import never_with
from ..checks import Comparison
from ..checks.miscounts import Miscount, Miscounts, find_miscounts
from ..contract import HeadShape
from ..families.expected import Expected, expect
from ..families.softmax.attention import seen_in
from ..families.sparse.data import visible_of
from ..families.sparse.family import with_selection
from ..steps.data import make_layers
from ..steps.foreign_slots import PLACES, place_pattern
from ..steps.schedule import Schedule, Step
from .rerun import Rerunner

_MAX_PASSES = 6
"""Number of runs for one row; each names as many KV tokens as a head has values."""
_TELLING = 3
"""Least length of a prefix whose first and last KV tokens can be distinguished."""
_ONCE = 1.25
"""Ratio to the smallest weight that rounding may cause. Between tokens that count two and three times the ratio is
1.5."""
_HARDLY = 0.0005
"""Fraction that one decimal of a percentage would show as 0."""
_SMALL = 0.02
"""Weight below which rounding explains it."""


@dataclass(frozen=True)
class AttendedKeys:
    """The KV tokens, by position, that one row of one request attended to, and those to which it should have
    attended."""

    request: int
    row: int
    """Index of the row inside the request."""
    used: frozenset[int]
    """KV tokens that had weight."""
    wanted: frozenset[int]
    """KV tokens that should have had weight, among those that were examined."""
    doubled: frozenset[int]
    """KV tokens that counted more than once."""
    looked_at: frozenset[int]
    """KV tokens that were examined: in a long request those at both ends, and around both ends of ``wanted``."""
    length: int
    """Number of KV tokens of the request."""
    elsewhere: Mapping[str, float]
    """Name in ``PLACES`` -> part of the weight that went there, if any did."""
    total: float | None
    """Sum of all weights; 1 if everything is right. None if unknown, because sinks get weight or not all tokens were
    examined."""
    head: int = 0
    """The head that was examined."""
    heads: tuple[int, ...] = ()
    """Heads of the row that attended to wrong KV tokens, if the others attended to the right ones."""
    layer: int = 0
    """The layer that was examined, by its place in the case."""
    window: int = -1
    """Window of the examined layer; tokens before it cannot be detected."""
    widths_differ: bool = False
    """True if rows of keys and of values of that layer, which are stored apart, differ in width."""
    shape: HeadShape | None = None
    """Head shape of that layer."""
    of_others: tuple[Miscount, ...] = ()
    """Runs of KV tokens of other requests that it attended to, if they are known."""
    faint: Mapping[int, float] = field(default_factory=dict)
    """KV token that should have no weight -> its weight as a fraction of the other weights, if it is too small for
    ``used`` but larger than rounding.
    """
    selected: bool = False
    """True if the row should attend to KV tokens that were selected for it, and to no others."""
    by_head: bool = False
    """True if the KV heads of a row should attend to different KV tokens."""

    @property
    def right(self) -> bool:
        """True if every KV token that should have weight counted once, and no other token had weight."""
        return self.alone and not self.doubled

    @property
    def own(self) -> bool:
        """True if all of its weight went to KV tokens of the request itself."""
        return bool(self.used) and not self.elsewhere and self.normalised

    @property
    def not_asked(self) -> list[int]:
        """KV tokens of the request that were not examined, so it is unknown if they had weight."""
        return sorted(set(range(self.length)) - self.looked_at)

    @property
    def normalised(self) -> bool:
        """True if the weights sum to 1, or the sum is unknown."""
        return self.total is None or abs(self.total - 1) < _SMALL

    @property
    def alone(self) -> bool:
        """True if the right KV tokens had some weight, and no other token had any."""
        return self.used == self.wanted and not self.elsewhere and not self.faint

    @property
    def weighed_otherwise(self) -> bool:
        """True if only the right KV tokens had weight, unequal and less than 1 in total, so that none counts twice."""
        return self.alone and bool(self.doubled) and self.total is not None and self.total <= 1 - _SMALL

    @property
    def text(self) -> str:
        """The text of one line in a failure."""
        name = f"request {self.request}" + (f" row {self.row}" if self.row else "")
        name += f" head {self.head}" if self.heads or self.by_head else ""
        of = " of those examined" if self.not_asked else ""
        if self.used == self.wanted and not self.doubled:
            text = f"{name} attended to the right KV tokens{of}, {ranges(sorted(self.used))}"
        else:
            used = f"KV tokens {ranges(sorted(self.used))}" if self.used else "no KV token"
            which = "the selected " if self.selected else ""
            text = f"{name} attended to {used}{of}, expected {which}{ranges(sorted(self.wanted))}"
        if self.not_asked:
            text += f" ({ranges(self.not_asked)} not examined)"
        if self.doubled:
            more = "have more weight than others" if self.weighed_otherwise else "counted more than once"
            text += f"; KV tokens {ranges(sorted(self.doubled))} {more}"
        for run in self.of_others:
            text += f"; it attended to KV tokens {ranges(range(run.first, run.last + 1))} of request {run.request}"
        if self.faint:
            text += (
                f"; KV tokens {ranges(sorted(self.faint))} should have no weight, but have "
                f"{max(self.faint.values()):.2g} of the weight of the others"
            )
        for place, weight in self.elsewhere.items() if not self.of_others else ():
            text += f"; {_percent(weight)} of its weight went to {PLACES[place]}"
        if not self.normalised:
            text += f"; its weights sum to {self.total:.3g}"
        return text


def _percent(part: float) -> str:
    return f"{100 * part:.{0 if part >= _SMALL else 1}f}%" if part >= _HARDLY else f"{100 * part:.1g}%"


def ranges(keys: Sequence[int]) -> str:
    """Format positions as ranges: [0, 1, 2, 7] -> ``0..2, 7``; an empty list is ``none``."""
    runs: list[list[int]] = []
    for key in keys:
        if runs and runs[-1][1] == key - 1:
            runs[-1][1] = key
        else:
            runs.append([key, key])
    shown = [f"{a}..{b}" if a != b else str(a) for a, b in runs[:6]]
    return ", ".join(shown) + (f" and {len(runs) - 6} more runs" if len(runs) > 6 else "") or "none"


def find_attended(
    rerunner: Rerunner, schedule: Schedule, comparison: Comparison, *, in_graph: bool
) -> AttendedKeys | None:
    """Find the KV tokens that a wrong row attended to. None if the backend raises or gives NaN, with
    ALiBi, and with a bias among rows.

    The request of the headline is examined, or another one if that request has very few KV tokens or attended to the
    right ones.
    ``in_graph``: true if only the graph is wrong, so that the graph is run.
    """
    found: AttendedKeys | None = None
    selects = schedule.case.selection is not None
    if never_with(schedule.case, COUNTED):
        # Equal queries give keys other weights by their bias, and a probe takes a weight for a count.
        return None
    for place in _places_to_ask(schedule, comparison):
        # Codes find runs of keys that follow each other, and selected keys do not.
        answer = None if selects else _counted_at(rerunner, schedule, comparison, place, in_graph)
        answer = answer or _attended_at(rerunner, schedule, comparison, place, in_graph)
        if answer is not None and not answer.right:
            return answer
        # A row without a selected key shows nothing by attending to none.
        found = found or (answer if answer is None or answer.wanted else None)
    return found


def _requests_to_ask(comparison: Comparison) -> list[int]:
    """List the request of the headline, and the first wrong one with several KV tokens.

    In a request with a short prefix, a lost prefix looks like lost last KV tokens; a longer one distinguishes the two.
    """
    data, row = comparison.expected.data, comparison.worst_row
    if row is None:
        return []
    headline = int(data.row_request[row])
    prefixes = {i: request.prefix for i, request in enumerate(comparison.observed.step.requests)}
    several = [i for i in comparison.wrong_requests if int(data.visible[i].any(0).sum()) > 2]
    if prefixes[headline] < _TELLING and any(prefixes[i] >= _TELLING for i in several):
        several = [i for i in several if prefixes[i] >= _TELLING]
    return list(dict.fromkeys([headline, *several[:1]] if headline in several or not several else several[:1]))


def _counted_at(
    rerunner: Rerunner, schedule: Schedule, comparison: Comparison, place: tuple[int, int, int], in_graph: bool
) -> AttendedKeys | None:
    """Use counts of all KV tokens, in a case of codes or if a request is longer than probes reach.

    None in other cases, if too many counts are wrong for codes to name them, and if all are right.
    """
    _, flat, _ = place
    case, step, counted = schedule.case, comparison.observed.step, comparison
    if step.data != CODES:
        length = step.lens[int(comparison.expected.data.row_request[flat])]
        if -(-length // case.head_dim) <= _MAX_PASSES:
            return None
        asked = _ask(rerunner, schedule, step, CODES, expect(schedule, step, CODES), in_graph=in_graph)
        if asked is None:
            return None
        counted = asked
    found = find_miscounts(counted, flat)
    if found is None or not found.runs:
        return None
    reported = _of_miscounts(counted, schedule, found, flat)
    if reported.used >= reported.wanted or reported.elsewhere:
        return reported
    # Runs of other requests would be known; the slots that were read instead may have no owner.
    layer = make_layers(schedule.case)[found.layer]
    small = 0.5 / len(reported.wanted)
    ask = partial(_weights_of, rerunner, schedule, step, comparison, (found.layer, flat), in_graph=in_graph)
    return replace(reported, elsewhere=_weight_elsewhere(ask, reported.request, reported.head, layer.v_scale, small))


def _of_miscounts(comparison: Comparison, schedule: Schedule, found: Miscounts, flat: int) -> AttendedKeys:
    def keys(runs: Sequence[Miscount]) -> frozenset[int]:
        return frozenset(key for run in runs for key in range(run.first, run.last + 1))

    wanted = frozenset(found.visible.nonzero().flatten().tolist())
    length = len(found.visible)
    others, every = (sum(run.length * run.extra for run in runs) for runs in (found.of_others, found.runs))
    total = len(wanted) + every
    misrouted = comparison.wrong[found.layer, flat].any(-1)
    return AttendedKeys(
        request=found.request,
        row=found.row,
        used=wanted - keys(found.left_out) | keys(found.unseen),
        wanted=wanted,
        doubled=keys(found.repeated),
        looked_at=frozenset(range(length)),
        length=length,
        elsewhere={"others": others / total} if others else {},
        total=None,
        head=int(misrouted.nonzero()[0]),
        heads=() if misrouted.all() else tuple(misrouted.nonzero().flatten().tolist()),
        layer=found.layer,
        window=make_layers(schedule.case)[found.layer].sliding_window_size,
        of_others=found.of_others,
    )


def _attended_at(
    rerunner: Rerunner, schedule: Schedule, comparison: Comparison, place: tuple[int, int, int], in_graph: bool
) -> AttendedKeys | None:
    """Examine one place: layer, flat row and head."""
    (index, flat, head), expected, step = place, comparison.expected, comparison.observed.step
    layer = make_layers(schedule.case)[index]
    request, row = int(expected.data.row_request[flat]), int(expected.data.row_offset[flat])
    length = step.lens[request]
    visible = seen_by_heads(schedule, expected, index, (request, row))
    wanted = frozenset(int(k) for k in visible[head].nonzero().flatten())
    dims = _right_dims(comparison, index, layer.v_head_dim)
    starts = _starts(length, dims, wanted)

    def weights_of(pattern: str) -> torch.Tensor | None:
        """Weights [Hq, dims] of the layer."""
        values = _weights_of(rerunner, schedule, step, comparison, (index, flat), pattern, in_graph=in_graph)
        return None if values is None or not values[head, :dims].isfinite().all() else values[:, :dims]

    weights: dict[int, float] = {}
    by_head: list[torch.Tensor] = []
    for start in starts:
        values = weights_of(f"probe.{request}.{start}")
        if values is None:
            return None
        weights.update(zip(range(start, length), values[head].tolist(), strict=False))
        by_head.append(values[:, : length - start])
    known = len(weights) == length and not schedule.case.sinks
    elsewhere: dict[str, float] = {}
    # An extra slot weighs as much as a KV token: if there are many tokens, that is less than ``_SMALL``.
    # If a sink takes most of the weight, tokens have less, too.
    small = min(_SMALL, 0.5 / max(len(wanted), 1))
    if schedule.case.sinks:
        small = min(small, max(_HARDLY, 0.5 * max((weights.get(key, 0.0) for key in wanted), default=0.0)))
    if not known or small < _SMALL or abs(sum(weights.values()) - 1) >= _SMALL:
        elsewhere = _weight_elsewhere(weights_of, request, head, layer.v_scale, small)
    total = sum(weights.values()) + sum(elsewhere.values()) if known else None
    found = _read(request, row, weights, wanted, elsewhere, total)
    heads = _misrouted_heads(torch.cat(by_head, 1), visible[:, sorted(weights)])
    return replace(
        found,
        length=length,
        head=head,
        heads=heads,
        layer=index,
        widths_differ=layer.head_dim != layer.v_head_dim and not schedule.case.heads.layout.values_in_keys,
        window=layer.sliding_window_size,
        shape=layer.head_shape,
        selected=schedule.case.selection is not None,
        by_head=expected.data.by_head,
    )


def seen_by_heads(schedule: Schedule, expected: Expected, index: int, row: tuple[int, int]) -> torch.Tensor:
    """[Hq, S] bool: KV tokens to which the query heads of a row of layer number ``index`` should attend. ``row``:
    request, and row of it."""
    data, layer = expected.data, make_layers(schedule.case)[index]
    if schedule.case.selection is not None:
        data = with_selection(schedule, data)
        assert data.allowed is not None
        seen = (data.allowed[index] & visible_of(data)[index])[row]
    else:
        seen = seen_in(data.visible, data, layer)[row]
    by_head = seen if data.by_head else seen[None]
    return by_head.repeat_interleave(layer.tp_q_head_num // len(by_head), 0)


def _weights_of(
    rerunner: Rerunner,
    schedule: Schedule,
    step: Step,
    comparison: Comparison,
    place: tuple[int, int],
    pattern: str,
    *,
    in_graph: bool,
) -> torch.Tensor | None:
    """Result [Hq, Dv] float64 of a row of a layer for values of a pattern. ``place``: layer, flat row."""
    (index, flat), layers = place, make_layers(schedule.case)
    answer = _ask(rerunner, schedule, step, pattern, comparison.expected, in_graph=in_graph)
    return None if answer is None else answer.out[index, flat, : layers[index].tp_q_head_num].double()


def _weight_elsewhere(
    ask: Callable[[str], torch.Tensor | None], request: int, head: int, scale: float, small: float
) -> dict[str, float]:
    """Map names in ``PLACES`` to the weight that a head gave them, if it is at least ``small``."""
    found = {}
    for name in PLACES:
        values = ask(place_pattern(request, name))
        # A slot that no request owns holds its value as it is, and an FP8 pool's reader multiplies it.
        weight = torch.nan if values is None else float(values[head, 0]) / (1.0 if name == "others" else scale)
        if math.isfinite(weight) and weight >= small:
            found[name] = weight
    return found


def _right_dims(comparison: Comparison, layer: int, dims: int) -> int:
    """Number of first dims of a head that are right in every row, if they are at least half; else all.

    A dim that is not computed cannot name a KV token.
    """
    first = int(comparison.wrong[layer, ..., :dims].flatten(0, 1).any(0).int().argmax())
    return first if 2 * first >= dims else dims


def _starts(length: int, dim: int, wanted: frozenset[int]) -> list[int]:
    """First tokens of the runs of ``dim`` that are examined: in a long request those at both ends of the wanted tokens,
    and at both ends of the request.
    """
    last = (length - 1) // dim
    near = [min(wanted, default=0), max(wanted, default=0)]
    both_ends = [block for i in range(min(last + 1, _MAX_PASSES)) for block in (i, last - i)]
    blocks = dict.fromkeys(
        [*(key // dim for key in near), 0, last, *((near[0] - 1) // dim, (near[1] + 1) // dim), *both_ends]
    )
    return sorted(block * dim for block in [b for b in blocks if 0 <= b <= last][:_MAX_PASSES])


def _misrouted_heads(weights: torch.Tensor, right: torch.Tensor) -> tuple[int, ...]:
    """Heads that attended to other tokens than those of ``right``, if not all did. ``weights``, ``right`` [Hq, n]."""
    used = weights > (weights.amax(1, keepdim=True) * torch.where(right, _SMALL, 1 / 4)).clamp(min=1e-6)
    misrouted = (used != right).any(1)
    return () if misrouted.all() else tuple(misrouted.nonzero().flatten().tolist())


def _places_to_ask(schedule: Schedule, comparison: Comparison) -> list[tuple[int, int, int]]:
    """List places (layer, flat row, head), the most promising first, the headline's own place last."""
    places = [_place_to_ask(schedule, comparison, request) for request in _requests_to_ask(comparison)]
    bad = ~comparison.finite
    if bad.any():
        layer, flat, head, _ = bad.nonzero()[0].tolist()
        places.append((layer, flat, head))
    return list(dict.fromkeys(places))


def _place_to_ask(schedule: Schedule, comparison: Comparison, request: int) -> tuple[int, int, int]:
    """Choose the layer, flat row and head of a wrong value of a request.

    NaN comes before other values, and the layer that sees most before one whose window may hide the error.
    """
    mine = comparison.expected.data.row_request == request
    bad = ~comparison.finite
    if not bad[:, mine].any():
        bad = comparison.wrong
    rows = bad.flatten(2).any(-1) & mine
    layers = rows.any(1).nonzero().flatten().tolist()
    windows = [layer.sliding_window_size for layer in make_layers(schedule.case)]
    layer = max(layers, key=lambda index: windows[index] if windows[index] >= 0 else math.inf)
    flat = int(rows[layer].nonzero()[0])
    return layer, flat, int(bad[layer, flat].any(-1).nonzero()[0])


def _read(
    request: int,
    row: int,
    weights: dict[int, float],
    wanted: frozenset[int],
    elsewhere: dict[str, float],
    total: float | None,
) -> AttendedKeys:
    looked_at = frozenset(weights)
    top = max(weights.values(), default=0.0)
    # A wanted KV token may have little weight if others count many times.
    used = frozenset(k for k, w in weights.items() if w > max(top * (_SMALL if k in wanted else 1 / 4), 1e-6))
    # All tokens weigh the same per count: even if most count twice, some token counts once.
    once = min((weights[k] for k in used), default=0.0)
    doubled = frozenset(k for k in used if weights[k] > _ONCE * once)
    faint = {k: w / top for k, w in weights.items() if k not in wanted | used and w > max(_SMALL * top, 1e-6)}
    return AttendedKeys(
        request, row, used, wanted & looked_at, doubled, looked_at, len(looked_at), elsewhere, total, faint=faint
    )


def _ask(
    rerunner: Rerunner, schedule: Schedule, step: Step, pattern: str, expected: Expected, *, in_graph: bool
) -> Comparison | None:
    """Run a step with a pattern. Only the shapes of ``expected`` are used: its numbers belong to another pattern."""
    # Zeros instead of NaN in unowned slots: a backend that reads them still answers, and the missing weight shows.
    if in_graph:
        answer = rerunner.graph(schedule, pattern=pattern, unowned=0.0)
        observed = None if answer is None else answer.replay_of(step)
    else:
        observed = rerunner.eager(schedule, step, pattern=pattern, unowned=0.0)
    return None if observed is None else Comparison(observed, expected)

"""Selections of a step as positions of keys, their scores, and mistakes that explain an indexer's selection."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..contract.index_pool import INDEX_WIDTH, keys_of, scales_of
from ..families.sparse.index_scores import RowScores, row_scores
from ..steps.data import StepData
from ..steps.index_data import IndexData, index_layers, make_index_data
from ..steps.kv_groups import slots_of_schedule
from .observation import Observation


def consistent(each: RowScores, taken: torch.Tensor) -> tuple[int, int] | None:
    """Find a key that is selected and a better one that is not; None if there is no such pair.

    ``taken`` [n] bool. A selected key counts with its score and margin, any other with its score less its margin.
    """
    if taken.all() or not taken.any():
        return None
    highest = torch.where(taken, each.scores + each.margin, torch.inf)
    lowest = torch.where(taken, -torch.inf, each.scores - each.margin)
    worst, best = int(highest.argmin()), int(lowest.argmax())
    return (worst, best) if highest[worst] < lowest[best] else None


@dataclass(frozen=True, eq=False)
class Selected:
    """Selections of an indexer in a step, and the index pool after it."""

    observed: Observation
    data: StepData
    index: IndexData
    raw: Mapping[int, torch.Tensor]
    """Layer -> [T, topk] int32 as it was returned."""
    places: Mapping[int, torch.Tensor]
    """Layer -> [T, topk] int64, places of keys in their request; -1: none, -2: no key of the request."""
    seen: torch.Tensor
    """[T] int64: keys that each row may see."""
    memory: torch.Tensor
    """[layers with index keys, pages, 64 * 132] uint8, after the step."""

    @classmethod
    def of(
        cls, observed: Observation, data: StepData, group: Mapping[str, torch.Tensor], memory: torch.Tensor
    ) -> Selected:
        """Read the selections of ``group``, layer by layer."""
        index = make_index_data(observed.schedule, observed.step)
        raw = {int(name): keys for name, keys in group.items()}
        selection = observed.schedule.case.selection
        assert selection is not None
        own = {
            layer: slots_of_schedule(observed.schedule, keys.long()) if selection.slots else keys.long()
            for layer, keys in raw.items()
        }
        places = {layer: _places(keys, data, index, slots=selection.slots) for layer, keys in own.items()}
        seen = data.visible.sum(-1)[data.row_request, index.offsets(data)]
        return cls(observed, data, index, raw, places, seen, memory)

    def mask(self, layer: int, each: RowScores) -> torch.Tensor:
        """[n] bool: the keys that a row selects, of those that it may see."""
        found = torch.zeros(len(each.scores), dtype=torch.bool)
        places = self.places[layer][each.row]
        found[places[(places >= 0) & (places < len(found))]] = True
        return found

    def scores(self, layer: int, *, unit: float = 0.0, mistake: str = "") -> Iterator[RowScores]:
        """Scores of the rows of a layer, with the keys that the pool holds. ``mistake``: one of those below."""
        buffer = self.memory[index_layers(self.observed.schedule.case).index(layer)]
        keys, scales = keys_of(buffer).flatten(0, 1), scales_of(buffer).flatten().double()
        if mistake == "token by token":
            rows = buffer.view(-1, INDEX_WIDTH + 4)
            keys = rows[:, :INDEX_WIDTH].contiguous().view(torch.float8_e4m3fn)
            scales = rows[:, INDEX_WIDTH:].contiguous().view(torch.float32)[:, 0].double()
        elif mistake == "no scale":
            scales = torch.ones_like(scales)
        elif mistake == "scales of the first layer":
            scales = scales_of(self.memory[0]).flatten().double()
        yield from row_scores(
            self.data,
            self.index,
            layer,
            keys,
            scales,
            unit=unit,
            relu=mistake != "no relu",
            gates=mistake != "no gates",
        )


def _places(keys: torch.Tensor, data: StepData, index: IndexData, *, slots: bool) -> torch.Tensor:
    if not slots:
        return keys
    found = torch.full_like(keys, -1)
    most = max([int(keys.max()), *(int(own.max()) for own in index.slots if len(own))]) + 1 if keys.numel() else 1
    for request, own in enumerate(index.slots):
        place_of = torch.full((max(most, 1),), -2)
        place_of[own] = torch.arange(len(own))
        rows = (data.row_request == request).nonzero()[:, 0]
        mine = keys[rows]
        found[rows] = torch.where(mine < 0, mine, place_of[mine.clamp(min=0)])
    return found


_OF_SCORES = (
    ("no relu", "ReLU is left out: negative products count"),
    ("token by token", "pages are read token by token, 128 bytes and a scale each: a page has 64 keys, then 64 scales"),
    ("no scale", "the scales of the keys are left out"),
    ("scales of the first layer", "the scales of the keys are those of the first layer: layers share a view of scales"),
    ("no gates", "the weights of the heads are left out"),
)


def hint_of(selected: Selected, layer: int, *, malformed: bool = False) -> str:
    """The first mistake that explains the selection of every row of a layer; empty if there is none."""
    found = _of_graph(selected, layer)
    if found:
        return found
    if _lacks_new(selected, layer):
        return (
            "keys of this step are not selected: probably they are scored before they are stored, or lengths do not "
            "count them"
        )
    if selected.observed.schedule.case.draft and _lacks_new(selected, layer, 1):
        return (
            "tokens that the draft adds after its first are not selected: probably the lengths of the indexer are "
            "planned once per draft, and not per forward"
        )
    if malformed:
        return ""
    long = [each for each in selected.scores(layer) if len(each.scores) > _topk(selected)]
    taken = {each.row: selected.mask(layer, each) for each in long}
    if _bits(long, taken, _topk(selected)) < _TELLING:
        return ""
    fitting = tuple(_of_scores(selected, layer, long, taken))
    if len(fitting) > 1:
        return f"one of these mistakes, which select the same keys here: {'; or '.join(fitting)}"
    return "".join(fitting) or _of_other_rows(selected, layer, long) or _late_in_a_bin(long, taken, _topk(selected))


def _bits(long: Sequence[RowScores], taken: Mapping[int, torch.Tensor], topk: int) -> float:
    """Bits by which wrong rows contradict chance: another formula selects the keys of a row of 8 by chance once in 8
    times if ``topk`` is 1."""
    wrong = [len(each.scores) for each in long if consistent(each, taken[each.row]) is not None]
    return sum(math.log2(math.comb(count, topk)) for count in wrong)


_TELLING = 10.0
"""Fewest bits that prove one of some ten mistakes."""


def _of_scores(
    selected: Selected, layer: int, long: Sequence[RowScores], taken: Mapping[int, torch.Tensor]
) -> Iterator[str]:
    """Every mistake in scores, or in their use, that explains the selection of every row."""
    topk = _topk(selected)
    if all(bool(taken[each.row][:topk].all()) for each in long):
        yield _first_keys(selected, layer, long)
    if all(bool(taken[each.row][-topk:].all()) for each in long):
        yield f"the last {topk} keys of each row are selected, whatever their scores"
    for mistake, text in _OF_SCORES:
        if _fits(selected.scores(layer, mistake=mistake), taken):
            yield text
    if _fits((_negated(each) for each in long), taken):
        yield "the keys of the lowest scores are selected, not those of the highest"
    before = [other for other in selected.places if other < layer]
    if before and _fits(selected.scores(before[-1]), taken):
        yield "the selection is that of the layer before"


def _late_in_a_bin(long: Sequence[RowScores], taken: Mapping[int, torch.Tensor], topk: int) -> str:
    """Hint for rows that lose late keys of the bin of the threshold, in a selection by the upper bits of scores."""
    count, least, most = 0, 0, len(long[0].scores) if long else 0
    for each in long:
        threshold = each.scores.topk(topk).values[-1]
        lost = (each.scores > threshold) & ~taken[each.row]
        if not bool(lost.any()):
            continue
        # A radix select compares the upper 8 bits of scores in half precision.
        bins = each.scores.half().view(torch.int16) >> 8
        inside = bins == bins[each.scores == threshold][0]
        first = int(lost.nonzero()[0])
        kept = inside & taken[each.row]
        if bool((lost & ~inside).any()) or bool(kept[first:].any()):
            return ""
        held = inside.cumsum(0)
        least = max(least, int(held[kept].max()) if bool(kept.any()) else 0)
        most = min(most, int(held[first]) - 1)
        count += int(lost.sum())
    # The capacity is between the last key that is kept and the first that is lost.
    capacity = 1 << max(0, most).bit_length() >> 1
    if not count or not 0 < least <= capacity:
        return ""
    return (
        f"all {count:,} lost keys are late ones of one bin: their scores have the upper 8 bits of the threshold's, and "
        f"{capacity:,} keys of that bin or more come before them. Probably a buffer holds {capacity:,} keys of the bin "
        "of the threshold"
    )


def _lacks_new(selected: Selected, layer: int, first: int = 0) -> bool:
    """True if each row selects the best of the keys before the step and of the ``first`` new ones: all of them, if they
    are at most top-k.
    """
    prefixes = [request.prefix + first for request in selected.observed.step.requests]
    for each in selected.scores(layer):
        taken, prefix = selected.mask(layer, each), prefixes[each.request]
        old = RowScores(each.row, each.request, each.scores[:prefix], each.margin[:prefix])
        if bool(taken[prefix:].any()) or int(taken.sum()) != min(_topk(selected), prefix):
            return False
        if consistent(old, taken[:prefix]):
            return False
    return any(prefixes)


def _topk(selected: Selected) -> int:
    selection = selected.observed.schedule.case.selection
    assert selection is not None
    return selection.topk


def _fits(scores: Iterable[RowScores], taken: Mapping[int, torch.Tensor]) -> bool:
    """True if scores explain the keys that rows select. Keys whose scores are NaN because of the mistake are not
    considered."""
    compared = False
    for each in scores:
        if each.row not in taken:
            continue
        known = each.scores.isfinite()
        mask = taken[each.row][: len(known)][known]
        if consistent(RowScores(each.row, each.request, each.scores[known], each.margin[known]), mask):
            return False
        compared |= bool(mask.any()) and not bool(mask.all())
    return compared


def _negated(each: RowScores) -> RowScores:
    return RowScores(each.row, each.request, -each.scores, each.margin)


def _first_keys(selected: Selected, layer: int, long: Sequence[RowScores]) -> str:
    """Hint for rows that select their first keys, by score or by position."""
    topk = _topk(selected)
    listed = [each.scores[selected.places[layer][each.row].clamp(min=0)] for each in long]
    if topk > 2 and all(bool((scores.diff() <= 0).all()) for scores in listed):
        return (
            f"only the first {topk} keys compete, in the order of their scores: probably top-k and the number of keys "
            "are exchanged"
        )
    return f"the first {topk} keys of each row are selected, by position, as if all scores were equal: are they 0?"


def _of_other_rows(selected: Selected, layer: int, long: Sequence[RowScores]) -> str:
    """Hint for rows that have the selection of another one."""
    by_row = {each.row: each for each in selected.scores(layer)}
    first = selected.data.row_offset
    for text, back in (
        ("each row has the selection of the row before it", [1] * len(first)),
        ("each row has the selection of the first row of its request", first.tolist()),
    ):
        pairs = [(each.row, each.row - back[each.row]) for each in long if 0 < back[each.row] <= each.row]
        if pairs and all(_is_selection(selected.places[layer][row], by_row[source], _topk(selected))
                         for row, source in pairs):  # fmt: skip
            return text
    return ""


def _is_selection(places: torch.Tensor, each: RowScores, topk: int) -> bool:
    """True if ``places`` [topk] are the best keys of a row."""
    keys = places[places >= 0]
    if len(keys) != min(topk, len(each.scores)) or bool((keys >= len(each.scores)).any()):
        return False
    taken = torch.zeros(len(each.scores), dtype=torch.bool)
    taken[keys] = True
    return consistent(each, taken) is None


def _of_graph(selected: Selected, layer: int) -> str:
    """Hint for a replay whose selection is that of the capture, or whose eager run is right."""
    observed = selected.observed
    if not observed.replay:
        return ""
    width = observed.schedule.case.width
    places = selected.places[layer]
    if bool((places < max(1, width)).all()) and bool((selected.seen > width).any()):
        return "the selection is that of the capture, whose requests are as short as the fill value says"
    eager = observed.eager_run
    group = eager.copies.group("selected") if eager is not None else {}
    if str(layer) in group:
        other = Selected.of(observed, selected.data, group, selected.memory)
        if all(consistent(each, other.mask(layer, each)) is None for each in other.scores(layer)):
            return (
                "in eager mode the selection is right: look for lengths, tables or buffers that a capture or plan keeps"
            )
    return ""

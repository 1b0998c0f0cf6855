"""Bidirectional spans: attention is computed again with other spans, or with another window for them, and compared."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from ...cases.spans import Span
from ...checks import Comparison
from ...families.expected import expect
from ...steps.data import StepData, make_layers
from .evidence import LONGEST, Evidence, Supposed
from .hint import Level, assumption

Ranges = Sequence[Sequence[Span]]
"""Spans of each request."""


def _has_spans(e: Evidence) -> bool:
    case, comparison = e.schedule.case, e.comparison
    wrong = comparison.all_finite and not comparison.right and comparison.worst is not None
    return case.spans is not None and not case.head_maps and wrong and max(e.lens, default=0) <= LONGEST


def _with_ranges(e: Evidence, ranges: Ranges) -> StepData:
    """Data in which requests have these spans; positions may be outside of the request."""
    data = e.expected.data
    at, key = data.query_positions[:, :, None], data.key_positions[:, None]
    visible = key <= at
    for request, spans in enumerate(ranges):
        for first, last in spans:
            row, of_key = ((first <= x[request]) & (x[request] <= last) for x in (at, key))
            visible[request] |= row & of_key
    return replace(data, visible=visible & _held(e))


def _from_the_first_key(e: Evidence, ranges: Ranges) -> StepData:
    """Data in which a row of a span sees the first keys of the request, as many as the span has, and earlier keys."""
    data = e.expected.data
    at, key = data.query_positions[:, :, None], data.key_positions[:, None]
    visible = key <= at
    for request, spans in enumerate(ranges):
        for first, last in spans:
            row = (first <= at[request]) & (at[request] <= last)
            visible[request] |= row & (key[request] <= last - first)
    return replace(data, visible=visible & _held(e))


def _held(e: Evidence) -> torch.Tensor:
    """[B, 1, S] bool: keys that a request has."""
    return torch.arange(e.expected.data.visible.shape[-1]) < torch.tensor(e.lens)[:, None, None]


def _merged(spans: Sequence[Span]) -> list[Span]:
    found: list[Span] = []
    for first, last in spans:
        if found and found[-1][1] + 1 == first:
            first, _ = found.pop()
        found.append((first, last))
    return found


@assumption(_has_spans, silences=(Level.PLACE, "window_of_another_layer"))
def other_spans(e: Evidence) -> Iterator[Supposed]:
    """Suppose no spans, the spans of another request, with another end or place, joined, or only the first."""
    # Spans of a step may be so alike that several mistakes give its numbers: steps that passed contradict some.
    fitting = {each.text: each for each in _misplaced(e) if e.right_for(each)}
    for other in _other_steps(e) if len(fitting) > 1 else ():
        made = {each.text: each for each in _misplaced(other)}
        fitting = {text: each for text, each in fitting.items() if text not in made or other.right_for(made[text])}
    if len(fitting) == 1:
        yield from fitting.values()
    elif fitting:
        causes = dict.fromkeys(text.partition(": the result")[0].partition(". The result")[0] for text in fitting)
        text = f"one of these mistakes, which give the same numbers here: {'; or '.join(causes)}"
        yield replace(next(iter(fitting.values())), text=text)
    yield from _ended_by_tiles(e)
    path = "where the graph is captured, whose batch has none" if e.in_graph else "on this path through it"
    yield Supposed(
        "rows of a span do not see its later rows: the spans of batch.mm_prefix_range do not reach the kernel, or not "
        f"{path}. The result is right if every row is causal",
        _with_ranges(e, [[] for _ in e.step.requests]),
    )


def _other_steps(e: Evidence) -> list[Evidence]:
    """Evidence about steps that were right and ran as this one did."""
    alike = (seen for seen in e.passed if seen.replay == e.observed.replay and seen.schedule is e.schedule)
    found = (replace(e, comparison=Comparison(seen, expect(seen.schedule, seen.step))) for seen in alike)
    return [each for each in found if any(request.spans for request in each.step.requests)][:_MOST_STEPS]


_MOST_STEPS = 4
"""Most steps that passed for which mistakes are tried, too."""


def _misplaced(e: Evidence) -> Iterator[Supposed]:
    """Spans of another request, with another end or place, joined, or only the first."""
    own = [list(request.spans) for request in e.step.requests]
    prefixes = [request.prefix for request in e.step.requests]

    def changed(change: Callable[[Span, int], Span]) -> Ranges:
        return [[change(span, prefix) for span in spans] for spans, prefix in zip(own, prefixes, strict=True)]

    for ranges, text in (
        (
            [own[-1], *own[:-1]],
            "rows have the spans of another request: the result is right if each request has those of the one before",
        ),
        (
            [own[0]] * len(own),
            "rows have the spans of another request: the result is right if all requests have those of request 0",
        ),
        (
            changed(lambda span, _: (span[0], span[1] - 1)),
            "the last position of a span is outside: both positions of mm_prefix_range are inside. The result is right "
            "if each span ends a position earlier",
        ),
        (
            changed(lambda span, _: (span[0], span[1] + (span[1] > span[0]))),
            "the position after the last one of a span is inside: mm_prefix_range has the last position, not the end. "
            "The result is right if each span ends a position later",
        ),
        (
            changed(lambda span, prefix: (span[0] + prefix, span[1] + prefix)),
            "positions of spans are counted from the first row of the step, but those of mm_prefix_range count from "
            "the request's first token. The result is right with each span later by the length of the prefix",
        ),
        (
            [_merged(spans) for spans in own],
            "adjacent spans are one: rows of one image see the image that follows at once. The result is right if "
            "spans without a gap are joined",
        ),
        (
            [spans[:1] for spans in own],
            "only the first span of each request is used: the result is right if rows of the others are causal",
        ),
    ):
        if [list(spans) for spans in ranges] != own:
            yield Supposed(text, _with_ranges(e, ranges), every_row=True)
    yield Supposed(
        "keys of a span are counted from the request's first token, and not from the span's first position (such as a "
        "page table that is not moved there): the result is right if rows of a span see as many keys of the request's "
        "beginning as the span has",
        _from_the_first_key(e, own),
        every_row=True,
    )


_TILES = (1, 16, 32, 64, 128)
"""Rows of a tile."""


def _ended_by_tiles(e: Evidence) -> Iterator[Supposed]:
    """The loop over keys ends where it would for causal rows: after the last row of a tile, or at the end of its
    page."""
    data, page = e.expected.data, e.schedule.case.page_size
    row, news = torch.arange(data.query_positions.shape[1]), torch.tensor([each.new for each in e.step.requests])
    of_batch = news.cumsum(0) - news
    for tile, first, pages in itertools.product(_TILES, (torch.zeros_like(news), of_batch), (False, True)):
        if tile == 1 and not pages:
            continue  # no row of a span sees a later one: the spans have no effect at all
        # The last row of the request in the tile that a row is in, if tiles begin at the request or at the batch.
        number = row + first[:, None]
        last = (number // tile * tile + tile - 1 - first[:, None]).minimum(news[:, None] - 1).clamp(min=0)
        end = data.query_positions.gather(1, last) + 1
        end = -(-end // page) * page if pages else end
        kind = f"rows in tiles of {tile}" if tile > 1 else "rows"
        yield Supposed(
            f"keys after {'the last page of ' * pages}{'a tile' if tile > 1 else 'a row'} are left out before spans "
            f"are looked at: the loop over keys, or a block mask, ends where it would for causal {kind}",
            replace(data, visible=data.visible & (data.key_positions[:, None] < end[:, :, None])),
            every_row=True,
        )


@assumption(_has_spans, silences=(Level.PLACE, "window_of_another_layer"))
def other_rows_of_spans(e: Evidence) -> Iterator[Supposed]:
    """Suppose spans in layers without any, with another window, for rows outside, or with their own causal term."""
    data, layers = e.expected.data, make_layers(e.schedule.case)
    in_spans = data.visible & (data.key_positions[:, None] > data.query_positions[:, :, None])
    if not all(layer.bidirectional_spans for layer in layers):
        yield Supposed(
            "layers without spans have them too: use bidirectional_spans of the layer. The result is right if rows of "
            "spans see each other in all layers",
            layers=tuple(replace(layer, bidirectional_spans=True) for layer in layers),
            every_row=True,
        )
    own = [list(request.spans) for request in e.step.requests]
    number = torch.arange(data.query_positions.shape[1])
    by_number = (data.key_positions[:, None] <= number[None, :, None]) | in_spans | _of(e, own)
    has = torch.tensor([layer.bidirectional_spans for layer in layers])[:, None, None, None]
    causal = (data.key_positions[:, None] <= data.query_positions[:, :, None]) & _held(e)
    windowed = torch.stack([_window(data, layer.sliding_window_size) for layer in layers])
    free = [replace(layer, sliding_window_size=-1, bidirectional_spans=True) for layer in layers]

    def with_seen(text: str, seen: torch.Tensor) -> Supposed:
        """``seen`` [L, B, T, S] bool of layers with spans."""
        seen = torch.where(has, seen & _held(e), causal & windowed)
        return Supposed(text, replace(data, visible=seen.any(0), allowed=seen), layers=tuple(free), every_row=True)

    yield with_seen(
        "with spans, keys are compared with the row's number in the step, and not with its position: the result is "
        "right if row i sees the KV tokens 0..i and its span, as if there were no prefix",
        (by_number & windowed).expand_as(windowed),
    )
    yield with_seen(
        "with spans, keys are compared with the row's number in the step, and the window is not applied: the result is "
        "right if row i sees the KV tokens 0..i and its span",
        by_number.expand_as(windowed),
    )
    if any(layer.sliding_window_size >= 0 for layer in layers):
        yield with_seen(
            "the window is not applied in a batch with spans: the mask of spans takes its place. The result is right "
            "without a window in layers that have spans",
            (causal | _of(e, own)).expand_as(windowed),
        )
        yield with_seen(
            "the window does not narrow spans: it is applied before spans are added. The result is right if rows of a "
            "span see all of it",
            (causal & windowed) | _of(e, own),
        )
    yield with_seen(
        "keys of a span are visible to rows outside of it: compare the row's position with the span too. The result is "
        "right if all rows of a request see the keys of its spans",
        (causal & windowed) | _keys_of(e, own),
    )


def _window(data: StepData, window: int) -> torch.Tensor:
    """[B, T, S] bool: keys that are not before the window."""
    distance = data.query_positions[:, :, None] - data.key_positions[:, None]
    return distance <= window if window >= 0 else torch.ones_like(distance, dtype=torch.bool)


def _of(e: Evidence, ranges: Ranges) -> torch.Tensor:
    """[B, T, S] bool: row and key are in one span."""
    data = e.expected.data
    found = torch.zeros_like(data.visible)
    for request, spans in enumerate(ranges):
        for first, last in spans:
            row, key = (
                (first <= x) & (x <= last) for x in (data.query_positions[request], data.key_positions[request])
            )
            found[request] |= row[:, None] & key
    return found


def _keys_of(e: Evidence, ranges: Ranges) -> torch.Tensor:
    """[B, T, S] bool: the key is in a span of two positions or more."""
    data = e.expected.data
    found = torch.zeros_like(data.visible)
    for request, spans in enumerate(ranges):
        for first, last in spans:
            key = data.key_positions[request]
            found[request] |= (first <= key) & (key <= last) & (first < last)
    return found

"""The KV tokens are right and a value is wrong: heads, layers or dims are read from the wrong place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...checks import Comparison
from ...contract import AttentionLayer
from ...families.expected import expect
from ...steps.data import StepData, make_layers
from .assumed_numbers import right_keys_and_a_wrong_number
from .evidence import SAME_RESULTS, SMALL_ERROR, Evidence, Supposed, with_own_values
from .hint import assumption

_MOST_HEADS = 16
"""Most heads that are compared with each other: each needs a run of the oracle."""


@assumption(right_keys_and_a_wrong_number)
def other_kv_heads(e: Evidence) -> Iterator[Supposed]:
    """Each query head with the KV head that a usual mistake gives it."""
    heads, kv_heads = _heads(e)
    if kv_heads == 1:
        return
    head, group = torch.arange(heads), heads // kv_heads
    wide, groups = 1 << (group - 1).bit_length(), f"groups are {group} head{'s' if group > 1 else ''}"
    reported: dict[tuple[int, ...], str] = {}
    for text, kv_head in (
        (
            f"query head h with KV head h % {kv_heads}: heads of a group are next to each other, h // {group}",
            head % kv_heads,
        ),
        (f"query head h with KV head h // {wide}: {groups}", head // wide),
        ("every query head with KV head 0", head * 0),
        (f"query head h with KV head h // {kv_heads}, which is the number of KV heads: {groups}", head // kv_heads),
        (f"query head h with KV head h, or the last one: {groups}", head),
    ):
        places = tuple(kv_head.clamp(max=kv_heads - 1).tolist())
        reported[places] = f"{reported[places]}, or {text}" if places in reported else text
    reported.pop(tuple((head // group).tolist()), None)
    for places, text in reported.items():
        yield Supposed(
            f"query heads are mapped to the wrong KV heads: the result is right for {text}",
            _with_kv_heads(e, torch.tensor(places)),
        )


def _heads(e: Evidence) -> tuple[int, int]:
    """Query heads and KV heads."""
    return e.expected.data.q.shape[2], e.expected.data.stored_keys.shape[3]


def _with_kv_heads(e: Evidence, kv_head: torch.Tensor) -> StepData:
    """Data with one KV head per query head, ``kv_head`` [Hq], so that no group mapping is left."""
    data = e.expected.data
    values = None if data.stored_values is None else data.stored_values[:, :, :, kv_head]
    return replace(
        data,
        k=data.k[:, :, kv_head],
        v=data.v[:, :, kv_head],
        stored_keys=data.stored_keys[:, :, :, kv_head],
        stored_values=values,
        kv_scales=data.kv_scales if data.kv_scales.shape[-2] == 1 else data.kv_scales[..., kv_head, :],
    )


@assumption(right_keys_and_a_wrong_number)
def other_layers_kv(e: Evidence) -> Iterator[Supposed]:
    """All layers use the keys, the values or both of one layer."""
    data = with_own_values(e.expected.data)
    for index, layer in enumerate(make_layers(e.schedule.case)):
        one = slice(index, index + 1)
        keys: dict[str, Any] = {"stored_keys": data.stored_keys[one].expand_as(data.stored_keys)}
        changes = {"KV tokens": keys}
        if data.stored_values is not None:
            values: dict[str, Any] = {"stored_values": data.stored_values[one].expand_as(data.stored_values)}
            changes = {"KV tokens": {**keys, **values}, "keys": keys, "values": values}
        for what, changed in changes.items():
            yield Supposed(
                f"other layers read the KV buffer of one layer: the result is right with the {what} of layer "
                f"{layer.layer_id} in all layers",
                replace(data, **changed),
            )


@assumption(right_keys_and_a_wrong_number)
def other_dims(e: Evidence) -> Iterator[Supposed]:
    """Logits lack some dims of q and k: a tile, or all dims from one on, in all rows and in another step."""
    dim = e.expected.data.q.shape[-1]
    tile = next(size for size in (16, 32, 64) if dim <= 8 * size or size == 64)
    starts = range(0, dim, tile)
    tails = [first for first in starts[1:] if _right_without(e, first, dim)]
    # If queries are 0 there, a longer tail fits as well as the lost one does. So the shortest is named first.
    doubt = f"; without dims {tails[0]}..{dim - 1} it is right, too" if len(tails) > 1 else ""
    spans = [(tails[-1], dim)] if tails else [(first, min(first + tile, dim)) for first in starts]
    for first, end in spans:
        if tails or _right_without(e, first, end):
            yield Supposed(
                "a tile of the head dim is not loaded, or a width is too small: the result is right if dims "
                f"{first}..{end - 1} of {dim} are left out of the product of q and k{doubt}",
                _without_dims(e.expected.data, first, end),
                every_row=True,
            )


def _right_without(e: Evidence, first: int, end: int) -> bool:
    """True if the rows of this step are right without these dims, and rows of a step that is right do not contradict: a
    dim is left out of every product."""
    return all(
        each.right_for(Supposed("", _without_dims(each.expected.data, first, end), every_row=True))
        for each in (e, *_other_steps(e))
    )


def _without_dims(data: StepData, first: int, end: int) -> StepData:
    queries = data.q.clone()
    queries[..., first:end] = 0
    return replace(data, q=queries)


def _other_steps(e: Evidence) -> list[Evidence]:
    """Evidence about the first step that was right and ran as this one did; none if there is no such step."""
    alike = (seen for seen in e.passed if seen.replay == e.observed.replay and seen.schedule is e.schedule)
    return [replace(e, comparison=Comparison(seen, expect(seen.schedule, seen.step))) for seen in alike][:1]


@assumption(right_keys_and_a_wrong_number)
def other_query_heads(e: Evidence) -> str:
    """Each wrong head is right with the query of another head, the same one in every wrong row."""
    data, (heads, kv_heads) = e.expected.data, _heads(e)
    if kv_heads == heads or heads > _MOST_HEADS or e.step.data in SAME_RESULTS:
        return ""
    if e.comparison.margin < SMALL_ERROR:
        # The other head's result may be that near by chance.
        return ""
    found = _head_by_head(
        e,
        [Supposed(data=replace(data, q=data.q[:, :, other : other + 1].expand_as(data.q))) for other in range(heads)],
        own=False,
    )
    if not found:
        return ""
    named = ", ".join(f"of head {other} in head {head}" for head, other in found[:3])
    more = " and so on" if len(found) > 3 else ""
    return (
        f"heads of q are read from the wrong places, as if groups of {heads // kv_heads} heads were larger ones (head "
        f"mapping): the result is right with the query {named}{more}"
    )


@assumption(right_keys_and_a_wrong_number)
def other_kv_head_of_each(e: Evidence) -> str:
    """Each wrong head is right with another KV head than its own, the same one in every wrong row."""
    heads, kv_heads = _heads(e)
    if kv_heads == 1 or kv_heads > _MOST_HEADS:
        return ""
    found = _head_by_head(
        e, [Supposed(data=_with_kv_heads(e, torch.full((heads,), kv_head))) for kv_head in range(kv_heads)]
    )
    if not found:
        return ""
    named = ", ".join(f"KV head {kv_head} for head {head}" for head, kv_head in found[:3])
    more = " and so on" if len(found) > 3 else ""
    return (
        f"KV heads are mapped wrongly, query head h needs KV head h // {heads // kv_heads} (head mapping): the "
        f"result is right with {named}{more}"
    )


@assumption(
    lambda e: (
        right_keys_and_a_wrong_number(e) and any(layer.sinks is not None for layer in make_layers(e.schedule.case))
    )
)
def other_sink_of_each(e: Evidence) -> str:
    """Each wrong head is right with the sink of another head, the same one in every wrong row."""
    heads, _ = _heads(e)
    if heads > _MOST_HEADS:
        return ""

    def with_sink(head: int) -> list[AttentionLayer]:
        return [
            layer if layer.sinks is None else replace(layer, sinks=layer.sinks[head].expand_as(layer.sinks))
            for layer in make_layers(e.schedule.case)
        ]

    found = _head_by_head(e, [Supposed(layers=with_sink(head)) for head in range(heads)], own=False)
    # A single head may be near another one's result by chance, within wide limits.
    if len(found) < _SEVERAL_HEADS:
        return ""
    named = ", ".join(f"of head {other} in head {head}" for head, other in found[:3])
    more = " and so on" if len(found) > 3 else ""
    return f"heads use the sink of another head: the result is right with the sink {named}{more}"


_SEVERAL_HEADS = 2


def _head_by_head(e: Evidence, others: Sequence[Supposed], *, own: bool = True) -> list[tuple[int, int]]:
    """Pairs of a wrong head and the index of the mistake that it is right for in every wrong row; all heads or none.

    ``own``: true if the mistake at a head's own index may be meant.
    """
    wrong = e.comparison.wrong.any(-1)
    misrouted = wrong.flatten(0, 1).any(0).nonzero().flatten().tolist()
    found: dict[int, int] = {}
    answer = e.expected.attention.clone()
    for number, supposed in enumerate(others):
        right = (e.near(supposed) | ~wrong).flatten(0, 1).all(0)
        new = [h for h in misrouted if h not in found and right[h] and (own or h != number)]
        if new:
            answer[:, :, new] = e.answer(supposed)[:, :, new]
        found.update(dict.fromkeys(new, number))
    return sorted(found.items()) if len(found) == len(misrouted) and e.explained_by(answer) else []

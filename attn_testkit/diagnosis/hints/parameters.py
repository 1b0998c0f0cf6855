"""The right KV tokens and a wrong number: attention is computed again with one usual mistake in it, and compared.

A mistake is named where every element of the wrong rows is within the limits of an answer that has it. Another answer
that is as near in every element is not to be expected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ...cases.data import StepData, make_layers
from ...contract import AttentionLayer
from ...oracle.expect import attend_with_limit
from .evidence import LONGEST, SMALL_ERROR, Evidence
from .suspects import SAME_RESULTS

__all__ = ["other_parameters"]

_MOST_HEADS = 16
"""Query heads up to which it is asked which one stands in the place of which: each costs an answer of the oracle."""
_MOST_SINKS = 8
"""A sink is looked for up to so many times."""


@dataclass(frozen=True)
class _Asked:
    """What is computed: other layers, other numbers, or both."""

    text: str
    layers: tuple[AttentionLayer, ...]
    data: StepData


def other_parameters(e: Evidence) -> str:
    """The wrong rows are right with a soft cap, sinks, scales, heads or a layer's KV that are not theirs."""
    if not _can_be_asked(e):
        return ""
    layers = make_layers(e.schedule.case)
    for mistakes in (_of_cap, _of_sinks, _of_scales, _of_heads, _of_layers, _of_dims):
        for asked in mistakes(layers, e.expected.data):
            if _rows_right(e, asked).all():
                return asked.text
    return _of_sink_counts(e, layers) or _of_single_heads(e, layers) or _of_single_kv_heads(e, layers)


def _can_be_asked(e: Evidence) -> bool:
    attended, judgement, case = e.attended, e.judgement, e.schedule.case
    wrong_rows = judgement.wrong.flatten(2).any(-1)
    if (judgement.out == 0).flatten(2).all(-1)[wrong_rows].any():
        return False  # nothing computed them, and beside wide limits 0 is right for much
    if case.head_maps or max(e.lens, default=0) > LONGEST:
        return False
    # Of a KV token that is missing, little may be left within limits that a mistake makes wider. Where weights do not
    # sum to 1, those that seem to count twice may have another FP8 scale.
    fp8 = case.kv_dtype != "same"
    weighed = attended is not None and (
        attended.weighed_otherwise or (fp8 and attended.alone and not attended.normalised)
    )
    return not (
        judgement.right
        or not judgement.all_finite
        or judgement.worst is None
        or e.swapped
        or (attended is not None and not attended.right and not weighed)
    )


def _rows_right(e: Evidence, asked: _Asked) -> torch.Tensor:
    """[n] bool, of the rows of a layer that are wrong: whether they are right for the mistake."""
    given = e.schedule.new_rows_as_given and not e.step.stored
    want, limit = attend_with_limit(e.schedule, asked.data, given, asked.layers)
    near = ((e.judgement.out.double() - want.out).abs() <= limit).flatten(2).all(-1)
    return near[e.judgement.wrong.flatten(2).any(-1)]


def _with(
    layers: Sequence[AttentionLayer], change: Callable[[AttentionLayer], AttentionLayer]
) -> tuple[AttentionLayer, ...]:
    return tuple(change(layer) for layer in layers)


def _of_cap(layers: Sequence[AttentionLayer], data: StepData) -> Iterator[_Asked]:
    if not any(layer.logit_cap for layer in layers):
        return
    yield _Asked(
        "right without a soft cap: layer.logit_cap does not reach the kernel, or not on this way through it",
        _with(layers, lambda layer: replace(layer, logit_cap=0.0)),
        data,
    )
    yield _Asked(
        "right with a soft cap of products that are not scaled yet: logits are scaled first, and capped then",
        _with(layers, lambda layer: replace(layer, logit_cap=layer.logit_cap * layer.scaling)),
        data,
    )
    yield from _as_one_layer(layers, data, "soft cap", "logit_cap")


def _of_sinks(layers: Sequence[AttentionLayer], data: StepData) -> Iterator[_Asked]:
    if all(layer.sinks is None for layer in layers):
        return

    def changed(text: str, change: Callable[[AttentionLayer, torch.Tensor], torch.Tensor | None]) -> _Asked:
        def one(layer: AttentionLayer) -> AttentionLayer:
            return layer if layer.sinks is None else replace(layer, sinks=change(layer, layer.sinks))

        return _Asked(text, _with(layers, one), data)

    yield changed(
        "right without sinks: layer.sinks does not reach the kernel, or its weight is lost", lambda layer, sinks: None
    )
    yield changed(
        "right with sinks that are scaled as logits are: a sink is a logit, and is not multiplied by the scale",
        lambda layer, sinks: sinks * layer.scaling,
    )
    yield changed(
        "right with sinks in base 2: where logits are multiplied by log2(e) for exp2, so are sinks",
        lambda layer, sinks: sinks * math.log(2),
    )
    yield changed(
        "right with the sink of a group's first head for all of its heads: a sink is a query head's",
        lambda layer, sinks: sinks.view(-1, layer.q_per_kv)[:, :1].expand(-1, layer.q_per_kv).reshape(-1),
    )
    yield changed(
        "right with sinks that are taken at other places: heads of a group are padded to a power of two, and sinks are "
        "not",
        _as_padded_groups,
    )
    yield from _as_one_layer(layers, data, "sinks", "sinks")


def _as_padded_groups(layer: AttentionLayer, sinks: torch.Tensor) -> torch.Tensor:
    """[Hq]: the sink that a head finds where groups are padded to a power of two, and the last one behind the end."""
    head, group = torch.arange(len(sinks)), layer.q_per_kv
    padded = 1 << (group - 1).bit_length()
    return sinks[(head // group * padded + head % group).clamp(max=len(sinks) - 1)]


def _of_scales(layers: Sequence[AttentionLayer], data: StepData) -> Iterator[_Asked]:
    yield _Asked(
        "right with a scale that is applied twice",
        _with(layers, lambda layer: replace(layer, scaling=layer.scaling**2)),
        data,
    )
    yield _Asked("right without a scale", _with(layers, lambda layer: replace(layer, scaling=1.0)), data)
    for count, what in _taken_for_head_dim(layers[0]).items():
        yield _Asked(
            f"right with a scale of 1/sqrt({count}), which is {what}: take layer.scaling",
            _with(layers, lambda layer, count=count: replace(layer, scaling=count**-0.5)),  # type: ignore[misc]
            data,
        )
    keys, values = data.kv_scales
    if bool((data.kv_scales == 1).all()):
        return
    one = torch.ones_like(keys)
    for text, scales in (
        ("right without k_scale: keys of the FP8 pool are multiplied by it", (one, values)),
        ("right without v_scale: values of the FP8 pool are multiplied by it", (keys, one)),
        ("right without k_scale and v_scale, which do not reach the kernel", (one, one)),
        ("right with k_scale in place of v_scale", (keys, keys)),
        ("right with v_scale in place of k_scale", (values, values)),
    ):
        yield _Asked(text, tuple(layers), replace(data, kv_scales=torch.stack(scales)))
    yield from _of_some_scales(layers, data)


def _of_some_scales(layers: Sequence[AttentionLayer], data: StepData) -> Iterator[_Asked]:
    """An FP8 pool whose scales reach one of two calls: that for the prefix, or that for new rows."""
    if data.stored_values is None:
        return
    first, (bs, _, longest) = data.row_offset == 0, data.visible.shape
    prefix = torch.zeros(bs, dtype=torch.int64)
    prefix[data.row_request[first]] = data.row_key[first]
    before = torch.arange(longest) < prefix[:, None]
    whose = ("of the prefix, and with them for those of this step", "of this step, and with them for the prefix")
    for which, without in zip(whose, (before, ~before), strict=True):
        one = torch.where(without[None, :, :, None, None], data.kv_scales, 1.0)
        keys, values = {"stored_keys": data.keys / one[0]}, {"stored_values": data.values / one[1]}
        for name, changes in (("k_scale and v_scale", {**keys, **values}), ("k_scale", keys), ("v_scale", values)):
            text = f"right without {name} for KV tokens {which}: one of two calls lacks {name}"
            yield _Asked(text, tuple(layers), replace(data, **changes))


def _taken_for_head_dim(layer: AttentionLayer) -> dict[int, str]:
    """Number that a scale may be computed from by mistake -> what it is."""
    dim = layer.head_dim
    found = {
        layer.tp_k_head_num: "the number of KV heads",
        layer.tp_q_head_num: "the number of query heads",
        layer.v_head_dim: "v_head_dim",
        1 << (dim - 1).bit_length(): "the head dim, padded to a power of two",
    }
    return {count: what for count, what in found.items() if count != dim}


def _of_heads(layers: Sequence[AttentionLayer], data: StepData) -> Iterator[_Asked]:
    """Each query head with the KV head that a usual mistake gives it."""
    heads, kv_heads = data.q.shape[2], data.stored_keys.shape[3]
    if kv_heads == 1:
        return
    head, group = torch.arange(heads), heads // kv_heads
    wide, groups = 1 << (group - 1).bit_length(), f"groups are {group} head{'s' if group > 1 else ''}"
    told: dict[tuple[int, ...], str] = {}
    for text, kv_head in (
        (f"query head h with KV head h % {kv_heads}: heads of a group are neighbours, h // {group}", head % kv_heads),
        (f"query head h with KV head h // {wide}: {groups}", head // wide),
        ("every query head with KV head 0", head * 0),
        (f"query head h with KV head h // {kv_heads}, which is the number of KV heads: {groups}", head // kv_heads),
        (f"query head h with KV head h, or the last one: {groups}", head),
    ):
        places = tuple(kv_head.clamp(max=kv_heads - 1).tolist())
        told[places] = f"{told[places]}, or {text}" if places in told else text
    told.pop(tuple((head // group).tolist()), None)
    for kv_heads_of, text in told.items():
        yield _Asked(f"right for {text}", tuple(layers), _with_kv_heads(data, torch.tensor(kv_heads_of)))


def _with_kv_heads(data: StepData, kv_head: torch.Tensor) -> StepData:
    """One KV head for each query head, ``kv_head`` [Hq], so that there is no group left to map."""
    values = None if data.stored_values is None else data.stored_values[:, :, :, kv_head]
    return replace(
        data,
        k=data.k[:, :, kv_head],
        v=data.v[:, :, kv_head],
        stored_keys=data.stored_keys[:, :, :, kv_head],
        stored_values=values,
    )


def _of_layers(layers: Sequence[AttentionLayer], data: StepData) -> Iterator[_Asked]:
    def of_layer(index: int, stored: torch.Tensor) -> torch.Tensor:
        return stored[index : index + 1].expand_as(stored)

    for index, layer in enumerate(layers):
        keys, values = {"stored_keys": of_layer(index, data.stored_keys)}, data.stored_values
        changes = {"KV tokens": keys}
        if values is not None:
            of_values = {"stored_values": of_layer(index, values)}
            changes = {"KV tokens": {**keys, **of_values}, "keys": keys, "values": of_values}
        for what, changed in changes.items():
            yield _Asked(
                f"right with the {what} of layer {layer.layer_id} in all layers: which buffer is read is kept from one "
                "to the others",
                tuple(layers),
                replace(data, **changed),
            )


def _of_dims(layers: Sequence[AttentionLayer], data: StepData) -> Iterator[_Asked]:
    """Logits without some dims of q and k: a tile of them, or all from one on."""
    dim = data.q.shape[-1]
    tile = next(size for size in (16, 32, 64) if dim <= 8 * size or size == 64)
    starts = range(0, dim, tile)
    for first, end in dict.fromkeys([*((i, dim) for i in starts[1:]), *((i, min(i + tile, dim)) for i in starts)]):
        queries = data.q.clone()
        queries[..., first:end] = 0
        yield _Asked(
            f"right where dims {first}..{end - 1} of {dim} are left out of the product of q and k: a tile of the head "
            "dim that is not loaded, or a width that is too small",
            tuple(layers),
            replace(data, q=queries),
        )


def _as_one_layer(layers: Sequence[AttentionLayer], data: StepData, what: str, field: str) -> Iterator[_Asked]:
    """What all layers would be with one layer's own."""
    for layer in layers:
        own = getattr(layer, field)
        yield _Asked(
            f"right with the {what} of layer {layer.layer_id} in all layers: kept from one to the others",
            _with(layers, lambda each, own=own: replace(each, **{field: own})),  # type: ignore[misc]
            data,
        )


def _of_sink_counts(e: Evidence, layers: Sequence[AttentionLayer]) -> str:
    """Each wrong row is right for a sink that counts some number of times, the same for all heads of the row."""
    if all(layer.sinks is None for layer in layers):
        return ""
    counts: list[int] = []
    right = torch.zeros(1, dtype=torch.bool)
    for count in range(2, _MOST_SINKS + 1):

        def often(layer: AttentionLayer, more: float = math.log(count)) -> AttentionLayer:
            return layer if layer.sinks is None else replace(layer, sinks=layer.sinks + more)

        found = _rows_right(e, _Asked("", _with(layers, often), e.expected.data))
        if bool((found & ~right).any()):
            counts.append(count)
        right = right | found
    if not right.all():
        return ""
    times = " or ".join(str(count) for count in counts)
    return f"right for a sink that counts {times} times: once for each split or part, where it counts once in all"


def _of_single_heads(e: Evidence, layers: tuple[AttentionLayer, ...]) -> str:
    """Each wrong head is right with the query of another head, the same one in every wrong row."""
    data, wrong = e.expected.data, e.judgement.wrong.any(-1)
    heads, kv_heads = data.q.shape[2], data.stored_keys.shape[3]
    if kv_heads == heads or heads > _MOST_HEADS or e.schedule.case.data in SAME_RESULTS:
        return ""
    if e.judgement.margin < SMALL_ERROR:
        # The other head's result may be that near by chance.
        return ""
    astray = wrong.flatten(0, 1).any(0).nonzero().flatten().tolist()
    found: dict[int, int] = {}
    for other in range(heads):
        queries = replace(data, q=data.q[:, :, other : other + 1].expand_as(data.q))
        right = _heads_right(e, _Asked("", layers, queries))
        found.update({head: other for head in astray if head not in found and head != other and right[head]})
    if not astray or set(found) != set(astray):
        return ""
    named = ", ".join(f"of head {other} in head {head}" for head, other in sorted(found.items())[:3])
    more = " and so on" if len(found) > 3 else ""
    return (
        f"right with the query {named}{more}: heads of q are taken from other places, as where groups of "
        f"{heads // kv_heads} heads are taken for larger ones (head mapping)"
    )


def _of_single_kv_heads(e: Evidence, layers: tuple[AttentionLayer, ...]) -> str:
    """Each wrong head is right with another KV head than its own, the same one in every wrong row."""
    data, wrong = e.expected.data, e.judgement.wrong.any(-1)
    heads, kv_heads = data.q.shape[2], data.stored_keys.shape[3]
    if kv_heads == 1 or kv_heads > _MOST_HEADS:
        return ""
    astray = wrong.flatten(0, 1).any(0).nonzero().flatten().tolist()
    found: dict[int, int] = {}
    for kv_head in range(kv_heads):
        right = _heads_right(e, _Asked("", layers, _with_kv_heads(data, torch.full((heads,), kv_head))))
        found.update({head: kv_head for head in astray if head not in found and right[head]})
    if not astray or set(found) != set(astray):
        return ""
    named = ", ".join(f"KV head {kv_head} for head {head}" for head, kv_head in sorted(found.items())[:3])
    more = " and so on" if len(found) > 3 else ""
    return f"right with {named}{more}: a query head h has KV head h // {heads // kv_heads} (head mapping)"


def _heads_right(e: Evidence, asked: _Asked) -> list[bool]:
    """[Hq]: whether a head is right for the mistake in every row of a layer where it is wrong."""
    given = e.schedule.new_rows_as_given and not e.step.stored
    want, limit = attend_with_limit(e.schedule, asked.data, given, asked.layers)
    near = ((e.judgement.out.double() - want.out).abs() <= limit).all(-1)
    right: list[bool] = (near | ~e.judgement.wrong.any(-1)).flatten(0, 1).all(0).tolist()
    return right

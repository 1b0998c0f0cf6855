"""The right KV tokens and a wrong number: attention is computed again with one usual mistake in it, and compared.

A mistake is named where every element of the wrong rows is within the limits of an answer that has it. Another answer
that is as near in every element is not to be expected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from ...cases.data import StepData, make_layers
from ...cases.patterns import FAINT_RUN
from ...contract import AttentionLayer
from ...oracle.attention import attend
from ...oracle.limits import attention_limit
from .evidence import LONGEST, SAME_RESULTS, SMALL_ERROR, Evidence, Supposed
from .hint import assumption


def _numbers_wrong(e: Evidence) -> bool:
    return not e.counts_alone


def _finite_numbers_wrong(e: Evidence) -> bool:
    return e.judgement.all_finite and not e.judgement.right and not e.counts_alone


@assumption(_numbers_wrong)
def new_rows(e: Evidence) -> Iterator[Supposed]:
    """The step is right for a backend that says the other thing of new rows in an FP8 pool."""
    schedule, mode = e.schedule, str(e.schedule.case.mode)
    if schedule.case.kv_dtype == "same" or e.step.stored:
        return
    text = f"right for new rows as given, not as the pool stores them: claim new_rows_as_given={{{mode!r}}}"
    if schedule.new_rows_as_given:
        text = f"right for new rows as the pool stores them, and new_rows_as_given claims {mode}"
    yield Supposed(text, as_given=not schedule.new_rows_as_given, every_row=True)


@assumption(_numbers_wrong)
def narrow_products(e: Evidence) -> Iterator[Supposed]:
    """A float32 step is right for a backend that multiplies in tf32, and its error is too large for float32 alone."""
    if e.schedule.case.dtype == "fp32" and e.schedule.matmul_dtype == "model":
        yield Supposed(
            "right for float32 products in tf32, and not for float32: ask for more (input_precision='ieee' of tl.dot, "
            "torch.backends.cuda.matmul.allow_tf32 False), or claim fp32_products='tf32'",
            products="tf32",
            every_row=True,
        )


@assumption(_finite_numbers_wrong)
def vanished_weights(e: Evidence) -> str:
    """The step is right where the small weights of ``faint`` data are 0, and counted in the denominator or not."""
    schedule, data = e.schedule, e.expected.data
    if schedule.case.data != "faint":
        return ""
    visible = data.visible.clone()
    visible[..., torch.arange(visible.shape[-1]) % FAINT_RUN != 0] = False
    layers = make_layers(schedule.case)
    whole, large = attend(data, layers, flat=True), attend(data, layers, visible, flat=True)
    limit = attention_limit(large, schedule.case.dtype, schedule.matmul_dtype)
    counted = torch.exp(large.lse - whole.lse)[..., None]
    if not any(((e.judgement.out.double() - large.out * part).abs() <= limit).all() for part in (1.0, counted)):
        return ""
    return (
        "right where weights below 2^-10 of the largest are 0: they are rounded to FP8 without a factor; multiply them "
        "before (by 256, say), or claim matmul_dtype='fp8_e4m3_unscaled'"
    )


# Of a KV token that is missing, little may be left within limits that another scaling makes wider.
@assumption(lambda e: _finite_numbers_wrong(e) and (e.attended is None or e.attended.right))
def other_scaling(e: Evidence) -> Iterator[Supposed]:
    """The step is right for another scaling than that of its layers, and not for their own."""
    layers = make_layers(e.schedule.case)
    if all(layer.scaling == layers[0].scaling for layer in layers):
        return
    yield Supposed(
        "right for a scaling of 1/sqrt(head_dim), which these layers do not have: take layer.scaling, or claim "
        "any_scaling=False",
        layers=_with(e, lambda layer: replace(layer, scaling=layer.head_dim**-0.5)),
        every_row=True,
    )
    for supposed in _as_one_layer(e, "scaling", "scaling"):
        yield replace(supposed, text=supposed.text.replace(": kept", ": it is kept"), every_row=True)


def _right_keys(e: Evidence) -> bool:
    """The right KV tokens were attended to, as far as is known, and a row has a wrong number."""
    attended, judgement, case = e.attended, e.judgement, e.schedule.case
    if e.swapped or case.head_maps or max(e.lens, default=0) > LONGEST or not _finite_numbers_wrong(e):
        return False
    if (judgement.out == 0).flatten(2).all(-1)[judgement.wrong.flatten(2).any(-1)].any():
        return False  # nothing computed them, and beside wide limits 0 is right for much
    # Of a KV token that is missing, little may be left within limits that a mistake makes wider. Where weights do not
    # sum to 1, those that seem to count twice may have another FP8 scale.
    fp8 = case.kv_dtype != "same"
    return (
        attended is None
        or attended.right
        or attended.weighed_otherwise
        or (fp8 and attended.alone and not attended.normalised)
    )


def _with(e: Evidence, change: Callable[[AttentionLayer], AttentionLayer]) -> tuple[AttentionLayer, ...]:
    return tuple(change(layer) for layer in make_layers(e.schedule.case))


def _as_one_layer(e: Evidence, what: str, field: str) -> Iterator[Supposed]:
    """What all layers would be with one layer's own."""
    for layer in make_layers(e.schedule.case):
        changed = {field: getattr(layer, field)}
        yield Supposed(
            f"right with the {what} of layer {layer.layer_id} in all layers: kept from one to the others",
            layers=_with(e, lambda each, changed=changed: replace(each, **changed)),  # type: ignore[misc]
        )


@assumption(_right_keys)
def other_soft_cap(e: Evidence) -> Iterator[Supposed]:
    """No soft cap, one at another place, or another layer's."""
    if not e.schedule.case.logit_cap:
        return
    yield Supposed(
        "right without a soft cap: layer.logit_cap does not reach the kernel, or not on this way through it",
        layers=_with(e, lambda layer: replace(layer, logit_cap=0.0)),
    )
    yield Supposed(
        "right with a soft cap of products that are not scaled yet: logits are scaled first, and capped then",
        layers=_with(e, lambda layer: replace(layer, logit_cap=layer.logit_cap * layer.scaling)),
    )
    yield from _as_one_layer(e, "soft cap", "logit_cap")


def _with_sinks(
    e: Evidence, change: Callable[[AttentionLayer, torch.Tensor], torch.Tensor | None]
) -> tuple[AttentionLayer, ...]:
    return _with(e, lambda own: own if own.sinks is None else replace(own, sinks=change(own, own.sinks)))


def _sinks(e: Evidence) -> bool:
    return _right_keys(e) and any(layer.sinks is not None for layer in make_layers(e.schedule.case))


@assumption(_sinks)
def other_sinks(e: Evidence) -> Iterator[Supposed]:
    """No sinks, scaled ones, or those of other heads or layers."""

    def of_padded_groups(layer: AttentionLayer, sinks: torch.Tensor) -> torch.Tensor:
        """[Hq]: the sink that a head finds where groups are padded to a power of two, the last one behind the end."""
        head, group = torch.arange(len(sinks)), layer.q_per_kv
        padded = 1 << (group - 1).bit_length()
        return sinks[(head // group * padded + head % group).clamp(max=len(sinks) - 1)]

    def of_first_heads(layer: AttentionLayer, sinks: torch.Tensor) -> torch.Tensor:
        return sinks.view(-1, layer.q_per_kv)[:, :1].expand(-1, layer.q_per_kv).reshape(-1)

    mistakes: tuple[tuple[str, Callable[[AttentionLayer, torch.Tensor], torch.Tensor | None]], ...] = (
        ("without sinks: layer.sinks does not reach the kernel, or its weight is lost", lambda layer, sinks: None),
        (
            "with sinks that are scaled as logits are: a sink is a logit, and is not multiplied by the scale",
            lambda layer, sinks: sinks * layer.scaling,
        ),
        (
            "with sinks in base 2: where logits are multiplied by log2(e) for exp2, so are sinks",
            lambda layer, sinks: sinks * math.log(2),
        ),
        ("with the sink of a group's first head for all of its heads: a sink is a query head's", of_first_heads),
        (
            "with sinks that are taken at other places: heads of a group are padded to a power of two, and sinks are "
            "not",
            of_padded_groups,
        ),
    )
    for text, change in mistakes:
        yield Supposed(f"right {text}", layers=_with_sinks(e, change))
    yield from _as_one_layer(e, "sinks", "sinks")


@assumption(_right_keys)
def other_scale(e: Evidence) -> Iterator[Supposed]:
    """Logits are scaled twice, never, or by another number than the head dim."""
    layer = make_layers(e.schedule.case)[0]
    padded = 1 << (layer.head_dim - 1).bit_length()
    counts = {
        layer.tp_k_head_num: "the number of KV heads",
        layer.tp_q_head_num: "the number of query heads",
        layer.v_head_dim: "v_head_dim",
        padded: "the head dim, padded to a power of two",
    }
    counts.pop(layer.head_dim, None)
    yield Supposed(
        "right with a scale that is applied twice", layers=_with(e, lambda own: replace(own, scaling=own.scaling**2))
    )
    for text, scale in (
        ("right without a scale", 1.0),
        *(
            (f"right with a scale of 1/sqrt({count}), which is {what}: take layer.scaling", count**-0.5)
            for count, what in counts.items()
        ),
    ):
        yield Supposed(text, layers=_with(e, lambda own, scale=scale: replace(own, scaling=scale)))  # type: ignore[misc]


@assumption(lambda e: _right_keys(e) and bool((e.expected.data.kv_scales != 1).any()))
def other_scales_of_fp8(e: Evidence) -> Iterator[Supposed]:
    """An FP8 pool without a scale, with the other one, or with scales that reach one of two calls."""
    data = e.expected.data
    (keys, values), one = data.kv_scales, torch.ones_like(data.kv_scales[0])
    for text, scales in (
        ("right without k_scale: keys of the FP8 pool are multiplied by it", (one, values)),
        ("right without v_scale: values of the FP8 pool are multiplied by it", (keys, one)),
        ("right without k_scale and v_scale, which do not reach the kernel", (one, one)),
        ("right with k_scale in place of v_scale", (keys, keys)),
        ("right with v_scale in place of k_scale", (values, values)),
    ):
        yield Supposed(text, replace(data, kv_scales=torch.stack(scales)))
    if data.stored_values is None:
        return
    first, (bs, _, longest) = data.row_offset == 0, data.visible.shape
    prefix = torch.zeros(bs, dtype=torch.int64)
    prefix[data.row_request[first]] = data.row_key[first]
    before = torch.arange(longest) < prefix[:, None]
    whose = ("of the prefix, and with them for those of this step", "of this step, and with them for the prefix")
    for which, without in zip(whose, (before, ~before), strict=True):
        lacking = torch.where(without[None, :, :, None, None], data.kv_scales, 1.0)
        of_keys, of_values = {"stored_keys": data.keys / lacking[0]}, {"stored_values": data.values / lacking[1]}
        for name, changes in (
            ("k_scale and v_scale", {**of_keys, **of_values}),
            ("k_scale", of_keys),
            ("v_scale", of_values),
        ):
            yield Supposed(
                f"right without {name} for KV tokens {which}: one of two calls lacks {name}", replace(data, **changes)
            )


@assumption(_right_keys)
def other_kv_heads(e: Evidence) -> Iterator[Supposed]:
    """Each query head with the KV head that a usual mistake gives it."""
    heads, kv_heads = _heads(e)
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
    for places, text in told.items():
        yield Supposed(f"right for {text}", _with_kv_heads(e, torch.tensor(places)))


def _heads(e: Evidence) -> tuple[int, int]:
    """Query heads and KV heads."""
    return e.expected.data.q.shape[2], e.expected.data.stored_keys.shape[3]


def _with_kv_heads(e: Evidence, kv_head: torch.Tensor) -> StepData:
    """One KV head for each query head, ``kv_head`` [Hq], so that there is no group left to map."""
    data = e.expected.data
    values = None if data.stored_values is None else data.stored_values[:, :, :, kv_head]
    return replace(
        data,
        k=data.k[:, :, kv_head],
        v=data.v[:, :, kv_head],
        stored_keys=data.stored_keys[:, :, :, kv_head],
        stored_values=values,
    )


@assumption(_right_keys)
def other_layers_kv(e: Evidence) -> Iterator[Supposed]:
    """Keys, values or both are one layer's in all layers."""
    data = e.expected.data
    for index, layer in enumerate(make_layers(e.schedule.case)):
        one = slice(index, index + 1)
        keys = {"stored_keys": data.stored_keys[one].expand_as(data.stored_keys)}
        changes = {"KV tokens": keys}
        if data.stored_values is not None:
            values = {"stored_values": data.stored_values[one].expand_as(data.stored_values)}
            changes = {"KV tokens": {**keys, **values}, "keys": keys, "values": values}
        for what, changed in changes.items():
            yield Supposed(
                f"right with the {what} of layer {layer.layer_id} in all layers: which buffer is read is kept from one "
                "to the others",
                replace(data, **changed),
            )


@assumption(_right_keys)
def other_dims(e: Evidence) -> Iterator[Supposed]:
    """Logits without some dims of q and k: a tile of them, or all from one on."""
    data, dim = e.expected.data, e.expected.data.q.shape[-1]
    tile = next(size for size in (16, 32, 64) if dim <= 8 * size or size == 64)
    starts = range(0, dim, tile)
    for first, end in dict.fromkeys([*((i, dim) for i in starts[1:]), *((i, min(i + tile, dim)) for i in starts)]):
        queries = data.q.clone()
        queries[..., first:end] = 0
        yield Supposed(
            f"right where dims {first}..{end - 1} of {dim} are left out of the product of q and k: a tile of the head "
            "dim that is not loaded, or a width that is too small",
            replace(data, q=queries),
        )


@assumption(_sinks)
def other_sink_counts(e: Evidence) -> str:
    """Each wrong row is right for a sink that counts some number of times, the same for all heads of the row."""
    counts: list[int] = []
    left = e.judgement.wrong.flatten(2).any(-1)
    for count in range(2, _MOST_SINKS + 1):
        more = math.log(count)
        right = e.near(Supposed(layers=_with_sinks(e, lambda _, sinks, more=more: sinks + more))).all(-1)  # type: ignore[misc]
        if bool((left & right).any()):
            counts.append(count)
        left = left & ~right
    if left.any():
        return ""
    times = " or ".join(str(count) for count in counts)
    return f"right for a sink that counts {times} times: once for each split or part, where it counts once in all"


_MOST_SINKS = 8
"""A sink is looked for up to so many times."""
_MOST_HEADS = 16
"""Heads up to which it is asked which one stands in the place of which: each costs an answer of the oracle."""


@assumption(_right_keys)
def other_query_heads(e: Evidence) -> str:
    """Each wrong head is right with the query of another head, the same one in every wrong row."""
    data, (heads, kv_heads) = e.expected.data, _heads(e)
    if kv_heads == heads or heads > _MOST_HEADS or e.schedule.case.data in SAME_RESULTS:
        return ""
    if e.judgement.margin < SMALL_ERROR:
        # The other head's result may be that near by chance.
        return ""
    found = _head_by_head(
        e, [replace(data, q=data.q[:, :, other : other + 1].expand_as(data.q)) for other in range(heads)], own=False
    )
    named = ", ".join(f"of head {other} in head {head}" for head, other in found[:3])
    more = " and so on" if len(found) > 3 else ""
    return (
        ""
        if not found
        else (
            f"right with the query {named}{more}: heads of q are taken from other places, as where groups of "
            f"{heads // kv_heads} heads are taken for larger ones (head mapping)"
        )
    )


@assumption(_right_keys)
def other_kv_head_of_each(e: Evidence) -> str:
    """Each wrong head is right with another KV head than its own, the same one in every wrong row."""
    heads, kv_heads = _heads(e)
    if kv_heads == 1 or kv_heads > _MOST_HEADS:
        return ""
    found = _head_by_head(e, [_with_kv_heads(e, torch.full((heads,), kv_head)) for kv_head in range(kv_heads)])
    named = ", ".join(f"KV head {kv_head} for head {head}" for head, kv_head in found[:3])
    more = " and so on" if len(found) > 3 else ""
    return (
        ""
        if not found
        else (f"right with {named}{more}: a query head h has KV head h // {heads // kv_heads} (head mapping)")
    )


def _head_by_head(e: Evidence, others: Sequence[StepData], *, own: bool = True) -> list[tuple[int, int]]:
    """(wrong head, number of the data that it is right for in every wrong row), of all wrong heads or of none.

    ``own``: whether the data of a head's own number may be meant.
    """
    wrong = e.judgement.wrong.any(-1)
    astray = wrong.flatten(0, 1).any(0).nonzero().flatten().tolist()
    found: dict[int, int] = {}
    for number, data in enumerate(others):
        right = (e.near(Supposed(data=data)) | ~wrong).flatten(0, 1).all(0)
        found.update({h: number for h in astray if h not in found and right[h] and (own or h != number)})
    return sorted(found.items()) if len(found) == len(astray) else []

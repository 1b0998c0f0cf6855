"""The KV tokens are right and a value is wrong: attention is computed again with one usual mistake, and compared.

A mistake is named if every element of the wrong rows is within the limits of an answer with that mistake. It is very
unlikely that another answer is as near in every element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from ...contract import AttentionLayer
from ...families.softmax.attention import attend
from ...families.softmax.limits import attention_limit
from ...steps.data import make_layers
from ...steps.patterns import FAINT_RUN
from .evidence import LONGEST, Evidence, Supposed, with_own_values
from .hint import assumption


def _numbers_wrong(e: Evidence) -> bool:
    return not e.counts_alone


def _finite_numbers_wrong(e: Evidence) -> bool:
    return e.comparison.all_finite and not e.comparison.right and not e.counts_alone


def _some_zeros(e: Evidence) -> bool:
    """True if some wrong row is all zeros: nothing computed it, and with wide limits 0 fits many answers."""
    comparison = e.comparison
    return bool((comparison.out == 0).flatten(2).all(-1)[comparison.wrong.flatten(2).any(-1)].any())


@assumption(_numbers_wrong)
def new_rows(e: Evidence) -> Iterator[Supposed]:
    """The step is right for a backend that declares the opposite about new rows in an FP8 pool."""
    schedule, mode = e.schedule, str(e.schedule.case.mode)
    if schedule.case.kv_dtype == "same" or e.step.stored:
        return
    text = (
        f"new rows are attended to as given, not as the FP8 pool stores them: declare new_rows_as_given={{{mode!r}}}. "
        "The "
        "result is right for new rows as given"
    )
    if schedule.new_rows_as_given:
        text = (
            f"new_rows_as_given declares {mode}, but new rows are attended to as the pool stores them: the result is "
            "right for new rows with the rounding of the pool"
        )
    yield Supposed(text, as_given=not schedule.new_rows_as_given, every_row=True)


@assumption(_numbers_wrong)
def narrow_products(e: Evidence) -> Iterator[Supposed]:
    """A float32 step is right for a backend that multiplies in tf32, and its error is too large for float32."""
    if _some_zeros(e):
        return
    if e.schedule.case.dtype == "fp32" and e.schedule.matmul_dtype == "model":
        yield Supposed(
            "float32 products are computed in tf32: request full precision (input_precision='ieee' of tl.dot, "
            "torch.backends.cuda.matmul.allow_tf32=False), or declare fp32_products='tf32'. The result is right for "
            "float32 products in tf32, and not for float32",
            products="tf32",
            every_row=True,
        )


@assumption(_finite_numbers_wrong)
def vanished_weights(e: Evidence) -> str:
    """The step is right if the small weights of ``small_weights`` data are 0, whether the denominator counts them or
    not."""
    schedule, data = e.schedule, e.expected.data
    if schedule.case.data != "small_weights":
        return ""
    visible = data.visible.clone()
    visible[..., torch.arange(visible.shape[-1]) % FAINT_RUN != 0] = False
    layers = make_layers(schedule.case)
    whole, large = attend(data, layers, flat=True), attend(data, layers, visible, flat=True)
    limit = attention_limit(large, schedule.case.dtype, schedule.matmul_dtype)
    counted = torch.exp(large.lse - whole.lse)[..., None]
    if not any(((e.comparison.out.double() - large.out * part).abs() <= limit).all() for part in (1.0, counted)):
        return ""
    return (
        "small weights vanish when they are rounded to FP8 without a factor: multiply them first (by 256, say), or "
        "declare matmul_dtype='fp8_e4m3_unscaled'. The result is right if weights below 2^-10 of the largest are 0"
    )


# The effect of a missing KV token may be small compared with limits that another scaling makes wider.
@assumption(lambda e: _finite_numbers_wrong(e) and (e.attended is None or e.attended.right))
def other_scaling(e: Evidence) -> Iterator[Supposed]:
    """The output is correct for a different softmax scale than the layer's own."""
    layers = make_layers(e.schedule.case)
    if all(layer.scaling == layers[0].scaling for layer in layers):
        return
    yield Supposed(
        "logits are scaled by 1/sqrt(head_dim), but these layers have another scaling: use layer.scaling, or "
        "declare any_scaling=False. The result is right for a scaling of 1/sqrt(head_dim)",
        layers=_with(e, lambda layer: replace(layer, scaling=layer.head_dim**-0.5)),
        every_row=True,
    )
    for supposed in _as_one_layer(e, "scaling", "scaling"):
        yield replace(supposed, every_row=True)


def right_keys_and_a_wrong_number(e: Evidence) -> bool:
    """True if the right KV tokens were attended to, as far as is known, and a row has a wrong value."""
    attended, case = e.attended, e.schedule.case
    if e.misrouted or case.head_maps or max(e.lens, default=0) > LONGEST or not _finite_numbers_wrong(e):
        return False
    if _some_zeros(e):
        return False
    # The effect of a missing KV token may be small compared with limits that a mistake makes wider. In an FP8 pool,
    # tokens that seem to count twice may have another scale (sglang #18904), unless weights are known to sum to 1.
    rescaled = (
        case.kv_dtype != "same"
        and attended is not None
        and attended.alone
        and (attended.total is None or not attended.normalised)
    )
    return attended is None or attended.right or attended.weighed_otherwise or rescaled


def _with(e: Evidence, change: Callable[[AttentionLayer], AttentionLayer]) -> tuple[AttentionLayer, ...]:
    return tuple(change(layer) for layer in make_layers(e.schedule.case))


def _as_one_layer(e: Evidence, what: str, field: str) -> Iterator[Supposed]:
    """Answers if all layers have one layer's value of a field."""
    for layer in make_layers(e.schedule.case):
        changed = {field: getattr(layer, field)}
        yield Supposed(
            f"other layers use the {what} of layer {layer.layer_id}: the result is right with the {what} "
            f"of layer {layer.layer_id} in all layers",
            layers=_with(e, lambda each, changed=changed: replace(each, **changed)),  # type: ignore[misc]
        )


@assumption(right_keys_and_a_wrong_number)
def other_soft_cap(e: Evidence) -> Iterator[Supposed]:
    """Suppose no soft cap, a soft cap at another place, or another layer's."""
    if not e.schedule.case.logit_cap:
        return
    yield Supposed(
        "layer.logit_cap does not reach the kernel, or not on this path through it: the result is right without a "
        "soft cap",
        layers=_with(e, lambda layer: replace(layer, logit_cap=0.0)),
    )
    yield Supposed(
        "logits are capped before they are scaled, but must be scaled first: the result is right with a soft cap of "
        "unscaled products",
        layers=_with(e, lambda layer: replace(layer, logit_cap=layer.logit_cap * layer.scaling)),
    )
    yield from _as_one_layer(e, "soft cap", "logit_cap")


def _with_sinks(
    e: Evidence, change: Callable[[AttentionLayer, torch.Tensor], torch.Tensor | None]
) -> tuple[AttentionLayer, ...]:
    return _with(e, lambda own: own if own.sinks is None else replace(own, sinks=change(own, own.sinks)))


def _sinks(e: Evidence) -> bool:
    return right_keys_and_a_wrong_number(e) and any(layer.sinks is not None for layer in make_layers(e.schedule.case))


@assumption(_sinks)
def other_sinks(e: Evidence) -> Iterator[Supposed]:
    """Suppose no sinks, scaled sinks, or sinks of other heads or layers."""

    def of_padded_groups(layer: AttentionLayer, sinks: torch.Tensor) -> torch.Tensor:
        """Sinks [Hq] that heads read if groups are padded to a power of two; after the end, the last one."""
        head, group = torch.arange(len(sinks)), layer.q_per_kv
        padded = 1 << (group - 1).bit_length()
        return sinks[(head // group * padded + head % group).clamp(max=len(sinks) - 1)]

    def of_first_heads(layer: AttentionLayer, sinks: torch.Tensor) -> torch.Tensor:
        return sinks.view(-1, layer.q_per_kv)[:, :1].expand(-1, layer.q_per_kv).reshape(-1)

    mistakes: tuple[tuple[str, Callable[[AttentionLayer, torch.Tensor], torch.Tensor | None]], ...] = (
        (
            "layer.sinks does not reach the kernel, or the weight of sinks is lost: the result is right without sinks",
            lambda layer, sinks: None,
        ),
        (
            "sinks are multiplied by the scale, but must not be: the result is right with sinks that are scaled like "
            "logits",
            lambda layer, sinks: sinks * layer.scaling,
        ),
        (
            "logits are multiplied by log2(e) for exp2, but sinks are not: the result is right with sinks in base 2",
            lambda layer, sinks: sinks * math.log(2),
        ),
        (
            "all heads of a group use the sink of its first head: the result is right with the sink of a group's "
            "first head",
            of_first_heads,
        ),
        (
            "heads of a group are padded to a power of two, but sinks are not: the result is right with sinks at those "
            "places",
            of_padded_groups,
        ),
    )
    for text, change in mistakes:
        yield Supposed(text, layers=_with_sinks(e, change))
    yield from _as_one_layer(e, "sinks", "sinks")


@assumption(right_keys_and_a_wrong_number)
def other_scale(e: Evidence) -> Iterator[Supposed]:
    """Suppose that logits are scaled twice, never, or by a number other than the head dim."""
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
        "the scale is applied twice: the result is right with the square of layer.scaling",
        layers=_with(e, lambda own: replace(own, scaling=own.scaling**2)),
    )
    for text, scale in (
        ("the scale is not applied: the result is right without a scale", 1.0),
        *(
            (
                f"the scale is computed from {what}: use layer.scaling. The result is right with a scale of "
                f"1/sqrt({count})",
                count**-0.5,
            )
            for count, what in counts.items()
        ),
    ):
        yield Supposed(text, layers=_with(e, lambda own, scale=scale: replace(own, scaling=scale)))  # type: ignore[misc]


@assumption(lambda e: right_keys_and_a_wrong_number(e) and bool((e.expected.data.kv_scales != 1).any()))
def other_scales_of_fp8(e: Evidence) -> Iterator[Supposed]:
    """Suppose an FP8 pool without a scale, with the scale of the other plane, or with scales in one of two calls."""
    data = with_own_values(e.expected.data)
    (keys, values), one = data.kv_scales, torch.ones_like(data.kv_scales[0])
    for text, scales in (
        ("keys of the FP8 pool are not multiplied by k_scale: the result is right without k_scale", (one, values)),
        ("values of the FP8 pool are not multiplied by v_scale: the result is right without v_scale", (keys, one)),
        ("k_scale and v_scale do not reach the kernel: the result is right without k_scale and v_scale", (one, one)),
        ("k_scale is used for values: the result is right with k_scale in place of v_scale", (keys, keys)),
        ("v_scale is used for keys: the result is right with v_scale in place of k_scale", (values, values)),
    ):
        yield Supposed(text, replace(data, kv_scales=torch.stack(scales)))
    if e.expected.data.stored_values is None:
        return
    first, (bs, _, longest) = data.row_offset == 0, data.visible.shape
    prefix = torch.zeros(bs, dtype=torch.int64)
    prefix[data.row_request[first]] = data.row_key[first]
    before = torch.arange(longest) < prefix[:, None]
    whose = ("of the prefix, and with them for those of this step", "of this step, and with them for the prefix")
    for which, without in zip(whose, (before, ~before), strict=True):
        lacking = torch.where(without[None, :, :, None, None], data.kv_scales, 1.0)
        of_keys: dict[str, Any] = {"stored_keys": data.keys / lacking[0]}
        of_values: dict[str, Any] = {"stored_values": data.values / lacking[1]}
        for name, changes in (
            ("k_scale and v_scale", {**of_keys, **of_values}),
            ("k_scale", of_keys),
            ("v_scale", of_values),
        ):
            yield Supposed(
                f"one of two calls lacks {name}: the result is right without {name} for KV tokens {which}",
                replace(data, **changes),
            )


@assumption(_sinks)
def other_sink_counts(e: Evidence) -> str:
    """Each wrong row is right for a sink that counts some number of times, the same for all heads of the row."""
    counts: list[int] = []
    left = e.comparison.wrong.flatten(2).any(-1)
    for count in range(2, _MOST_SINKS + 1):
        more = math.log(count)
        right = e.near(Supposed(layers=_with_sinks(e, lambda _, sinks, more=more: sinks + more))).all(-1)  # type: ignore[misc]
        if bool((left & right).any()):
            counts.append(count)
        left = left & ~right
    if left.any():
        return ""
    times = " or ".join(str(count) for count in counts)
    return (
        "the sink counts once per split of the keys instead of once in total: the result is right for a sink "
        f"that counts {times} times"
    )


_MOST_SINKS = 8
"""Largest number of times that a sink may count."""

"""Attention in float64, from a case's own tensors. The only definition of right in the kit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ...cases.encoder_windows import window_numbers
from ...contract import AttentionLayer
from ...steps.data import StepData, dequantised
from .narrow_factors import FactorErrors, factor_errors, joined_errors
from .query_rounding import query_rounding


@dataclass(frozen=True)
class Attention:
    """Result for every live row, [L, T, Hq, Dv] float64 unless said otherwise."""

    out: torch.Tensor
    """The answer."""
    mass: torch.Tensor
    """Sum of p_j |v_j|, with which rounding errors of P and of partial sums scale."""
    logit_noise: torch.Tensor
    """[L, T, Hq, 1]: largest error of a logit in float32 arithmetic."""
    keys: torch.Tensor
    """[T] int64: keys each row may see, without windows."""
    lse: torch.Tensor
    """[L, T, Hq]: natural logarithm of the sum of exp(logit), sinks included; -inf for a row that sees nothing."""
    top: torch.Tensor
    """[L, T, Hq]: the largest logit, sinks included."""
    flat: torch.Tensor | None = None
    """Sum of |v_j| over the visible keys, times the weight of a logit as large as the row's largest; the absolute error
    of small probabilities scales with it. None unless requested."""
    factors: FactorErrors | None = None
    """Errors that narrow factors of both products may cause in the answer and in ``lse``. None unless requested."""
    logit_error: torch.Tensor | None = None
    """[L, T, Hq, 1]: largest error of a logit if queries are rounded to FP8. None if queries are exact."""


def seen_in(visible: torch.Tensor, data: StepData, layer: AttentionLayer) -> torch.Tensor:
    """Narrow [B, Tmax, S] bool visibility to the keys that rows of a layer see: keys in its window, or in the chunk of
    each row, or in the window of an encoder; keys of the encoder in a cross-attention layer; no later keys in a layer
    without bidirectional spans, if other layers have them.
    """
    if data.spans and not layer.bidirectional_spans:
        visible = visible & (data.key_positions[:, None, :] <= data.query_positions[:, :, None])
    if data.encoder:
        visible = data.encoder.seen(visible, layer)
    if layer.encoder_window:
        of_key, of_row = window_numbers(data.key_positions), window_numbers(data.query_positions)
        return visible & (of_key[:, None, :] == of_row[:, :, None])
    chunk = layer.attention_chunk_size
    if not chunk:
        return windowed(visible, data, layer)
    return visible & (data.key_positions[:, None, :] // chunk == data.query_positions[:, :, None] // chunk)


def windowed(visible: torch.Tensor, data: StepData, layer: AttentionLayer) -> torch.Tensor:
    """Narrow [B, Tmax, S] bool visibility to the window of a layer; the same tensor if it has none."""
    if layer.sliding_window_size < 0:
        return visible
    before = data.query_positions[:, :, None] - data.key_positions[:, None, :]
    if layer.non_causal_window == "block":
        before = before[:, :1]
    elif layer.non_causal_window == "both":
        before = before.abs()
    return visible & (before <= layer.sliding_window_size)


@dataclass(frozen=True)
class _Asked:
    """Fields of ``Attention`` that are asked for, of those that are None otherwise."""

    flat: bool = False
    factors: float = 0.0
    query_rounding: torch.Tensor | None = None


def attend(
    data: StepData,
    layers: Sequence[AttentionLayer],
    visible: torch.Tensor | None = None,
    *,
    flat: bool = False,
    factors: float = 0.0,
    q_scale: str = "none",
) -> Attention:
    """Attention of all layers of a step on the keys and values as the pool holds them.

    ``visible`` [B, Tmax, S] replaces the case's own visibility (for example to compute the effect of a dropped key).
    ``flat``: compute this field of ``Attention`` too. ``factors``: spacing of narrow factors, for the field of this
    name; 0.0: leave the field None. ``q_scale``: rounding of queries, for ``logit_error``.
    """
    visible = data.visible if visible is None else visible
    asked = _Asked(flat, factors, query_rounding(data.q, q_scale))
    if _numbers(data, visible) <= _AT_ONCE:
        return _attend(data, layers, visible, asked)
    # Requests of one length at a time: nothing is computed on the padding after short requests, and what is needed for
    # a moment stays small. A long one one layer at a time.
    groups = list(_of_equal_lengths(data, visible))
    ends = torch.searchsorted(data.row_request, torch.arange(len(visible) + 1)).tolist()
    rows = [torch.cat([torch.arange(*ends[each : each + 2]) for each in requests]) for requests, _ in groups]
    parts = [
        _of_requests(data, layers, visible, requests, slice(0, keys), own, asked)
        for (requests, keys), own in zip(groups, rows, strict=True)
    ]
    return _joined(parts, 1, torch.cat(rows).argsort())


_AT_ONCE = 1 << 17
"""Number of elements of keys and logits up to which a step, or some requests of it, are computed at once."""
_LAYERS_AT_ONCE = 1 << 19
"""Number of elements in one request up to which all its layers are computed at once."""


def _numbers(data: StepData, visible: torch.Tensor) -> int:
    return data.stored_keys.numel() + data.q[..., 0].numel() * visible.shape[-1]


def _of_equal_lengths(data: StepData, visible: torch.Tensor) -> Iterator[tuple[list[int], int]]:
    """Requests that are computed at once, and the number of keys up to the last one that a row of them may see."""
    layers, _, heads, _ = data.q.shape
    lengths = (visible.any(1) * torch.arange(1, visible.shape[-1] + 1)).amax(1).clamp(min=1).tolist()
    of_key = data.stored_keys[:, 0, 0].numel() + layers * heads * visible.shape[1]
    for keys in dict.fromkeys(lengths):
        requests, most = [each for each, count in enumerate(lengths) if count == keys], _AT_ONCE // (keys * of_key) or 1
        yield from ((requests[first : first + most], keys) for first in range(0, len(requests), most))


def _of_requests(
    data: StepData,
    layers: Sequence[AttentionLayer],
    visible: torch.Tensor,
    requests: list[int],
    keys: slice,
    rows: torch.Tensor,
    asked: _Asked,
) -> Attention:
    part, off = _part(data, visible, requests, keys, rows), asked.query_rounding
    if off is not None:
        off = off[:, rows]
        asked = replace(asked, query_rounding=off)
    if _numbers(part, part.visible) <= _LAYERS_AT_ONCE:
        return _attend(part, layers, part.visible, asked)
    each = [
        _attend(
            _layer(part, index), [layer], part.visible,
            asked if off is None else replace(asked, query_rounding=off[index : index + 1]),
        )
        for index, layer in enumerate(layers)
    ]  # fmt: skip
    return replace(_joined(each, 0), keys=each[0].keys)


def _part(data: StepData, visible: torch.Tensor, requests: list[int], keys: slice, rows: torch.Tensor) -> StepData:
    """Some requests, cut to ``keys``, which are views of one request's. Tensors that attention does not read are not
    cut."""
    one: slice | list[int] = slice(requests[0], requests[0] + 1) if len(requests) == 1 else requests
    renumbered = torch.zeros(len(visible), dtype=torch.int64)
    renumbered[requests] = torch.arange(len(requests))
    return replace(
        data,
        q=data.q[:, rows],
        stored_keys=data.stored_keys[:, one, keys],
        stored_values=None if data.stored_values is None else data.stored_values[:, one, keys],
        visible=visible[one, :, keys],
        allowed=None if data.allowed is None else data.allowed[:, one, ..., keys],
        encoder=data.encoder and data.encoder.part(requests),
        key_positions=data.key_positions[one, keys],
        query_positions=data.query_positions[one],
        row_request=renumbered[data.row_request[rows]],
        row_offset=data.row_offset[rows],
        row_key=data.row_key[rows],
        qq_bias=None if data.qq_bias is None else data.qq_bias[:, rows],
    )


def _layer(data: StepData, layer: int) -> StepData:
    """One layer of it, likewise."""
    this = slice(layer, layer + 1)
    return replace(
        data,
        q=data.q[this],
        stored_keys=data.stored_keys[this],
        stored_values=None if data.stored_values is None else data.stored_values[this],
        kv_scales=data.kv_scales[:, this],
        allowed=None if data.allowed is None else data.allowed[this],
        qq_bias=data.qq_bias if data.qq_bias is None or len(data.qq_bias) == 1 else data.qq_bias[this],
    )


def _joined(parts: Sequence[Attention], dim: int, order: torch.Tensor | None = None) -> Attention:
    """Parts of a step side by side: layers along dimension 0, rows along dimension 1, then in this ``order``."""

    def joined(tensors: list[torch.Tensor], dim: int = dim) -> torch.Tensor:
        whole = torch.cat(tensors, dim)
        return whole if order is None else whole.index_select(dim, order)

    flat = [part.flat for part in parts if part.flat is not None]
    factors = [part.factors for part in parts if part.factors is not None]
    errors = [part.logit_error for part in parts if part.logit_error is not None]
    return Attention(
        out=joined([part.out for part in parts]),
        mass=joined([part.mass for part in parts]),
        logit_noise=joined([part.logit_noise for part in parts]),
        keys=joined([part.keys for part in parts], 0),
        lse=joined([part.lse for part in parts]),
        top=joined([part.top for part in parts]),
        flat=joined(flat) if flat else None,
        factors=joined_errors(factors, joined) if factors else None,
        logit_error=joined(errors) if errors else None,
    )


def _attend(data: StepData, layers: Sequence[AttentionLayer], visible: torch.Tensor, asked: _Asked) -> Attention:
    num_layers, tokens, num_q_heads, _ = data.q.shape
    bs, widest, _ = visible.shape
    kv_heads = data.stored_keys.shape[3]
    padded = tokens != bs * widest
    grouped = (num_layers, bs, kv_heads, num_q_heads // kv_heads, widest, -1)

    def packed(by_head: torch.Tensor) -> torch.Tensor:
        """[L, B, Hk, G * Tmax, X] -> [L, T, Hq, X]."""
        rows = by_head.view(grouped).permute(0, 1, 4, 2, 3, 5)
        if padded:
            rows = rows[:, data.row_request, data.row_offset]
        return rows.reshape(num_layers, tokens, num_q_heads, rows.shape[-1])

    # [L, B, Hk, G * Tmax, D] and [L, B, Hk, S, D]: one matrix product for each KV head of each request.
    rows, keys = _by_kv_head(data, data.q, bs, widest, kv_heads), _of_heads(data, data.stored_keys, 0)
    logits = (rows @ keys.mT).view(grouped)
    scaling = torch.tensor([layer.scaling for layer in layers], dtype=torch.float64).view(-1, 1, 1, 1, 1, 1)
    noise = (_norm(rows) * _norm(keys).amax(3, keepdim=True)).view(grouped).mul_(scaling)
    logits.mul_(scaling)
    terms = _terms(logits, rows, keys, scaling, layers) if asked.factors else None
    bias = _bias(data, layers, kv_heads)
    if bias is not None:
        logits.add_(bias)
        noise = noise + bias.abs().amax(-1, keepdim=True)
    among_rows = None if data.qq_bias is None else _qq_bias(data, data.qq_bias, visible)
    if among_rows is not None and data.capped_qq_bias:
        logits.add_(among_rows)
    for index, layer in enumerate(layers):
        if layer.logit_cap:
            logits[index].div_(layer.logit_cap).tanh_().mul_(layer.logit_cap)
    if among_rows is not None:
        if not data.capped_qq_bias:
            logits.add_(among_rows)
        # The sum rounds as its terms are large; -inf is exact.
        noise = noise + among_rows.abs().nan_to_num_(posinf=0.0).amax(-1, keepdim=True)
    seen = _seen(data, visible, layers, kv_heads)
    logit_error = None
    if asked.query_rounding is not None:
        off = _by_kv_head(data, asked.query_rounding, bs, widest, kv_heads) @ keys.abs().mT
        # A soft cap makes it smaller, and never larger.
        off = off.view(grouped).mul_(scaling).masked_fill_(~seen, 0.0)
        logit_error = packed(off.amax(-1, keepdim=True).flatten(3, 4))
    logits.masked_fill_(~seen, -torch.inf)
    may_see_none = data.allowed is not None or data.encoder is not None
    weights, total, top, lse = _softmax(logits, _sinks(layers, num_q_heads, kv_heads), may_see_none)
    p = weights.flatten(3, 4)
    if data.stored_values is None:
        values = keys[..., : data.v.shape[-1]]
    else:
        values = _of_heads(data, data.stored_values, 1)
    out, everything = packed(p @ values), None
    factors = None
    if terms:
        factors = factor_errors(p, terms[0].flatten(3, 4), terms[1].flatten(3, 4), values, packed, asked.factors)
    sizes = values.abs_()
    if asked.flat:
        # Rows of heads that see the same keys have one product.
        even = seen.double() @ sizes[:, :, :, None]
        everything = packed((even / total).flatten(3, 4))
    return Attention(
        out=out,
        mass=packed(p @ sizes),
        logit_noise=packed(noise.flatten(3, 4)),
        keys=visible.sum(-1)[data.row_request, data.row_offset],
        lse=packed(lse.flatten(3, 4)).squeeze(-1),
        top=packed(top.flatten(3, 4)).squeeze(-1),
        flat=everything,
        factors=factors,
        logit_error=logit_error,
    )


def _bias(data: StepData, layers: Sequence[AttentionLayer], kv_heads: int) -> torch.Tensor | None:
    """[L, B, Hk, G, Tmax, S]: ALiBi's bias of logits; None if no layer has slopes."""
    slopes = [layer.alibi_slopes for layer in layers]
    if all(each is None for each in slopes):
        return None
    found = next(each for each in slopes if each is not None)
    stacked = torch.stack([torch.zeros_like(found) if each is None else each for each in slopes]).double().cpu()
    distance = data.key_positions[:, None, :] - data.query_positions[:, :, None]
    # Behind a request's last key, and of rows that there are not, any distance does.
    return stacked.view(len(layers), 1, kv_heads, -1, 1, 1) * distance.clamp(max=0)[None, :, None, None]


def _qq_bias(data: StepData, bias: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """[L or 1, B, 1, 1, Tmax, S] float64: ``bias`` [L or 1, T, C] at the keys of this step, and 0 elsewhere."""
    placed = torch.zeros(len(bias), *visible.shape, dtype=torch.float64)
    for request in range(len(visible)):
        mine = data.row_request == request
        count = int(mine.sum())
        if count:
            first = int(data.row_key[mine][0] - data.row_offset[mine][0])
            keys = slice(first, min(first + count, visible.shape[-1]))
            placed[:, request, :count, keys] = bias[:, mine, : keys.stop - first].double()
    return placed[:, :, None, None]


def _softmax(
    logits: torch.Tensor, sinks: torch.Tensor | None, may_see_none: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights, in the memory of ``logits``, and the sum, the largest logit and the log-sum-exp of each row."""
    top = logits.amax(-1, keepdim=True)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    top = top.clamp_(min=-1e300)
    weights = logits.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - top)
    lse = top + total.log()
    if may_see_none:
        # A row that selects no key, or whose request has no encoder, has weights of 0, and not of 0 / 0, in a layer
        # without sinks.
        total = total.masked_fill_(total == 0, 1.0)
    return weights.div_(total), total, top, lse


def _terms(
    logits: torch.Tensor,
    rows: torch.Tensor,
    keys: torch.Tensor,
    scaling: torch.Tensor,
    layers: Sequence[AttentionLayer],
) -> tuple[torch.Tensor, torch.Tensor]:
    """[L, B, Hk, G, Tmax, S] each: scaled logits, and squares of their terms, both after the effect of a soft cap."""
    logits = logits.clone()
    squares = (rows.square() @ keys.square().mT).view(logits.shape) * scaling.square()
    for index, layer in enumerate(layers):
        if layer.logit_cap:
            slope = 1 - logits[index].div(layer.logit_cap).tanh_().square_()
            logits[index].mul_(slope)
            squares[index].mul_(slope.square_())
    return logits, squares


def _of_heads(data: StepData, stored: torch.Tensor, part: int) -> torch.Tensor:
    """[L, B, S, Hk, D] -> [L, B, Hk, S, D] float64, in one piece: strided matrices multiply ten times slower."""
    scales = data.kv_scales[part].transpose(2, 3)
    return dequantised(stored.permute(0, 1, 3, 2, 4).contiguous(), scales, data.row_format)


def _by_kv_head(data: StepData, rows: torch.Tensor, bs: int, widest: int, kv_heads: int) -> torch.Tensor:
    """``rows`` [L, T, Hq, D], like queries, to [L, B, Hk, G * Tmax, D] float64; zeros after the rows of a request."""
    num_layers, tokens, num_q_heads, dim = rows.shape
    if tokens == bs * widest:
        q = rows.double()
    else:
        q = torch.zeros(num_layers, bs, widest, num_q_heads, dim, dtype=torch.float64)
        q[:, data.row_request, data.row_offset] = rows.double()
    return q.view(num_layers, bs, widest, kv_heads, -1, dim).permute(0, 1, 3, 4, 2, 5).flatten(3, 4)


def _seen(data: StepData, visible: torch.Tensor, layers: Sequence[AttentionLayer], kv_heads: int) -> torch.Tensor:
    """[L or 1, B, 1 or Hk, 1 or G, Tmax, S] bool: who may see whom, windows included."""
    kinds = {
        (
            *(each.sliding_window_size, each.attention_chunk_size, each.encoder_window),
            *(each.bidirectional_spans, each.is_cross_attention),
        )
        for each in layers
    }
    seen = [seen_in(visible, data, layer) for layer in (layers if len(kinds) > 1 else layers[:1])]
    every = torch.stack(seen)[:, :, None, None]
    if data.allowed is None:
        return every
    if not data.by_head:
        return every & data.allowed[:, :, None, None]
    *rows, heads, keys = data.allowed.shape
    return every & data.allowed.reshape(*rows, kv_heads, heads // kv_heads, keys).permute(0, 1, 3, 4, 2, 5)


def _norm(rows: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return norm


def _sinks(layers: Sequence[AttentionLayer], num_q_heads: int, kv_heads: int) -> torch.Tensor | None:
    """[L, 1, Hk, G, 1, 1], or None if no layer has sinks. A layer without them has -inf, a logit of no weight, and a
    layer with fewer heads has sinks of 0 after its own.
    """
    if all(layer.sinks is None for layer in layers):
        return None
    stacked = torch.full((len(layers), num_q_heads), -torch.inf, dtype=torch.float64)
    for own, layer in zip(stacked, layers, strict=True):
        if layer.sinks is not None:
            own[: len(layer.sinks)] = layer.sinks.double().cpu()
            own[len(layer.sinks) :] = 0.0
    return stacked.view(len(layers), 1, kv_heads, -1, 1, 1)

"""Lengths, columns and masks that layers of an encoder-decoder model wrongly use of each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ...steps.data import make_layers
from .evidence import Evidence, Supposed
from .hint import Level, assumption, hint


def _only(e: Evidence, *, crosses: bool) -> bool:
    """True if only cross-attention layers, or only the others, are wrong."""
    if not e.schedule.case.encoder_len:
        return False
    layers = zip(make_layers(e.schedule.case), e.wrong_layers, strict=True)
    return {layer.is_cross_attention for layer, wrong in layers if wrong} == {crosses}


def _keys_seen(e: Evidence) -> int | None:
    """Number of encoder keys that a wrong row seems to see. None if they are not the first ones."""
    attended = e.attended
    if attended is None or attended.not_asked or attended.doubled:
        return None
    used, total = attended.used, attended.total
    if used == attended.wanted and used and total and not attended.normalised:
        # Each key has the same weight, and the rest of it went to slots after the encoder's.
        return round(len(used) / total)
    fewer = used < attended.wanted and not attended.elsewhere
    return len(used) if fewer and used == frozenset(range(len(used))) else None


@hint(Level.CAUSE, when=lambda e: _only(e, crosses=True))
def other_encoder_lens(e: Evidence) -> str:
    """A row of a cross-attention layer sees as many keys as another length."""
    seen, attended = _keys_seen(e), e.attended
    if seen is None or attended is None:
        return ""
    requests, index = e.step.requests, attended.request
    own = requests[index]
    counted = f"request {index} attends to {seen} encoder keys, but has {own.encoder_len}"
    if seen == own.decoder_prefix + own.new:
        return f"cross-attention layers use seq_lens instead of encoder_lens: {counted}, and it has {seen} tokens"
    if e.in_graph and seen == e.schedule.max_encoder_len:
        return (
            f"a replay probably uses the encoder_lens of its capture, {seen} in each request, instead of its batch's: "
            f"{counted}"
        )
    others = [other for other, each in enumerate(requests) if each.encoder_len == seen]
    near = [other for other in others if (other - index) % len(requests) in (1, len(requests) - 1)]
    if not others or (seen == 0 and not near):
        return ""
    return f"encoder_lens are probably read at the wrong index: {counted}, request {(near or others)[0]} has as many"


@hint(Level.CAUSE, when=lambda e: _only(e, crosses=False))
def other_encoder_columns(e: Evidence) -> str:
    """A row of another layer reads the request table from the wrong column, not from the one after its encoder's
    keys."""
    attended = e.attended
    if attended is None or attended.not_asked or e.schedule.case.layers.groups:
        return ""
    longest, requests = max(each.encoder_len for each in e.step.requests), e.step.requests
    own, count = requests[attended.request].encoder_len, len(attended.wanted)
    for first, where in ((0, "column 0"), (longest, f"column {longest}, after the longest encoder")):
        kept = frozenset(key for key in attended.wanted if first <= key < first + count)
        if first != own and attended.used & attended.wanted == kept and min(attended.used, default=first) >= first:
            return (
                f"layers of the decoder's keys probably read req_to_token from {where}: the keys of request "
                f"{attended.request} begin in column {own}, after its own encoder_lens"
            )
    return ""


def _may_be_causal(e: Evidence) -> bool:
    return _only(e, crosses=True) and e.can_be_asked and max(each.new for each in e.step.requests) > 1


@assumption(_may_be_causal)
def causal_cross_attention(e: Evidence) -> Iterator[Supposed]:
    """Rows of cross-attention layers are right under a causal mask."""
    data = e.expected.data
    lens = torch.tensor([each.encoder_len for each in e.step.requests])[:, None, None]
    new = torch.tensor([each.new for each in e.step.requests])[:, None, None]
    key, row = torch.arange(data.visible.shape[-1]), torch.arange(data.visible.shape[1])[:, None]
    for last, where in (
        (lens - new + row, "aligned to the last encoder key"),
        (data.query_positions[..., None], "by the positions of the decoder"),
        (row, "aligned to the first encoder key"),
    ):
        yield Supposed(
            f"cross-attention layers have a causal mask, {where}: the result is right for it, and each row must see "
            "all keys of its encoder",
            replace(data, visible=data.visible & (key <= last)),
        )

"""Windows of encoder-only layers that a backend does not apply, or takes for others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ...contract import AttentionLayer
from ...families.softmax.attention import seen_in
from ...steps.data import make_layers
from .evidence import Evidence, Supposed
from .hint import Level, assumption

_WHERE = "cu_window_seqlens has the first row of each window, of layers whose encoder_window is not 0"


def _has_windows(e: Evidence) -> bool:
    wrong = e.comparison.all_finite and not e.comparison.right and e.comparison.worst is not None
    return e.schedule.case.encoder == "windows" and wrong


def _whole(layer: AttentionLayer) -> AttentionLayer:
    return replace(layer, encoder_window=0)


@assumption(_has_windows, silences=(Level.PLACE,))
def other_windows(e: Evidence) -> Iterator[Supposed]:
    """Suppose no windows, windows in all layers, a distance instead of a window, or windows of one size."""
    layers, data = make_layers(e.schedule.case), e.expected.data
    most = max(layer.encoder_window for layer in layers)
    yield Supposed(
        f"windows of encoders are not applied: {_WHERE}. The result is right if every row sees its whole sequence",
        layers=tuple(map(_whole, layers)),
        every_row=True,
    )
    yield Supposed(
        f"windows of encoders are applied in all layers: {_WHERE}. The result is right if every layer has the windows",
        layers=tuple(replace(layer, encoder_window=most) for layer in layers),
        every_row=True,
    )
    sliding: dict[str, Any] = {"encoder_window": 0, "sliding_window_size": most, "non_causal_window": "both"}
    yield Supposed(
        f"windows of encoders are taken for sliding ones: {_WHERE}, and a row sees its own window and nothing of the "
        f"next. The result is right if a row sees the rows that are at most {most} away",
        layers=tuple(replace(layer, **sliding) if layer.encoder_window else layer for layer in layers),
        every_row=True,
    )
    seen = torch.stack([seen_in(data.visible, data, layer) for layer in layers])
    of_row, of_key = data.query_positions[:, :, None] // most, data.key_positions[:, None] // most
    has = torch.tensor([layer.encoder_window > 0 for layer in layers])[:, None, None, None]
    yield Supposed(
        f"windows of encoders are taken for windows of one size: {_WHERE}, and some are smaller. The result is right "
        f"if a window begins every {most} rows",
        replace(data, allowed=torch.where(has, data.visible & (of_row == of_key), seen)),
        tuple(map(_whole, layers)),
        every_row=True,
    )

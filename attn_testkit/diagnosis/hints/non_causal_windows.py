"""Hints for windows of layers that are not causal."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...contract import NON_CAUSAL_WINDOWS, AttentionLayer
from ...families.softmax.attention import windowed
from ...steps.data import StepData, make_layers
from .evidence import Evidence
from .hint import Level, hint

_WORDS = {
    "left": "from W keys before the row to the last key (left)",
    "block": "from W keys before the request's first row of the step to the last key (block)",
    "both": "from W keys before the row to W keys after it (both)",
    "causal": "from W keys before the row to the row, as in a causal layer",
    "later": "from the row to W keys after it",
}


@hint(Level.SHOWN)
def window_of_another_meaning(e: Evidence) -> str:
    """The row attended to what another meaning of its layer's window lets it see."""
    attended, own = e.attended, e.schedule.case.non_causal_window
    if own == "none" or attended is None or attended.window < 0 or attended.elsewhere or attended.doubled:
        return ""
    if attended.not_asked or e.misrouted or attended.used == attended.wanted:
        return ""
    layer = next(each for each in make_layers(e.schedule.case) if each.sliding_window_size == attended.window)
    for meaning, words in _WORDS.items():
        seen = _seen(e.expected.data, layer, meaning)[attended.request, attended.row]
        if meaning != own and frozenset(seen.nonzero().flatten().tolist()) == attended.used:
            return (
                "in layers that are not causal a window has a declared meaning (layer.non_causal_window): the row "
                f"should see keys {_WORDS[own]}, and it attended to those {words}"
            )
    return ""


def _seen(data: StepData, layer: AttentionLayer, meaning: str) -> torch.Tensor:
    """[B, Tmax, S] bool: visibility if the window of a layer has a meaning of ``_WORDS``."""
    if meaning in NON_CAUSAL_WINDOWS:
        return windowed(data.visible, data, replace(layer, non_causal_window=meaning))
    both = windowed(data.visible, data, replace(layer, non_causal_window="both"))
    later = data.key_positions[:, None, :] - data.query_positions[:, :, None]
    return both & (later <= 0 if meaning == "causal" else later >= 0)

"""KV tokens that come in parts: which requests have none in one of them."""

from __future__ import annotations

import torch

from ...cases.data import make_layers
from ...cases.parts import parts_of
from ...contract import KVPart
from ...oracle.attention import windowed
from .evidence import Evidence

__all__ = ["only_empty_parts"]


def only_empty_parts(e: Evidence) -> str:
    """Wrong are just the requests without a KV token in some part, or those behind them."""
    requests = range(e.step.bs)
    for part in parts_of(e.schedule.case):
        empty = [_empty(e, part, request) for request in requests]
        if not any(empty) or all(empty):
            continue
        if e.wrong == [request for request in requests if empty[request]]:
            return (
                f"only requests without a KV token in {part} are wrong: a part without any is attended all the same, "
                "or has weight in the merge"
            )
        if e.wrong == [request for request in requests[1:] if empty[request - 1] and not empty[request]]:
            return (
                f"only requests behind one without a KV token in {part} are wrong: a list of requests or lengths that "
                "leaves those without any out"
            )
    return ""


def _empty(e: Evidence, part: KVPart, request: int) -> bool:
    """Whether no row of the request sees a KV token of the part, in any wrong layer."""
    data, held = e.expected.data, e.step.requests[request]
    of_part = part.holds(torch.arange(data.visible.shape[-1]), torch.tensor(held.prefix))
    layers = zip(make_layers(e.schedule.case), e.wrong_layers, strict=True)
    windows = [layer.sliding_window_size for layer, bad in layers if bad]
    return not any(bool((windowed(data.visible, data, w)[request, : held.new] & of_part).any()) for w in windows)

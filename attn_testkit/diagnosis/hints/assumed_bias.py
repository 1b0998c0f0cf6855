"""ALiBi: attention is computed again without the bias, or with the bias of other heads or layers, and compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ...contract import AttentionLayer
from ...steps.data import make_layers
from .assumed_numbers import right_keys_and_a_wrong_number
from .evidence import Evidence, Supposed
from .hint import assumption


def _has_bias(e: Evidence) -> bool:
    return e.schedule.case.alibi and right_keys_and_a_wrong_number(e)


def _of_another_group(layer: AttentionLayer, slopes: torch.Tensor) -> torch.Tensor:
    return slopes.view(layer.q_per_kv, layer.tp_k_head_num).t().reshape(-1)


def _of_all_heads(layer: AttentionLayer, slopes: torch.Tensor) -> torch.Tensor:
    heads = layer.tp_q_head_num
    return (2.0 ** (-8.0 / heads * torch.arange(1, heads + 1))).to(slopes)


@assumption(_has_bias)
def other_bias(e: Evidence) -> Iterator[Supposed]:
    """Suppose no bias, or the bias of another head, rank, scale or layer."""
    layers = make_layers(e.schedule.case)
    own = [each.alibi_slopes for each in layers if each.alibi_slopes is not None]
    if len(own) != len(layers):
        return
    pairs = list(zip(layers, own, strict=True))

    def supposed(text: str, slopes: list[torch.Tensor | None]) -> Supposed:
        changed = (replace(layer, alibi_slopes=each) for layer, each in zip(layers, slopes, strict=True))
        return Supposed(text, layers=tuple(changed), every_row=True)

    yield supposed(
        "layer.alibi_slopes do not reach the kernel, or not on this path through it: the result is right without them",
        [None] * len(layers),
    )
    yield supposed(
        "query heads use the slopes of other heads: slopes are [KV heads, query heads of each], and the result is "
        "right if these two axes are exchanged",
        [_of_another_group(layer, slopes) for layer, slopes in pairs],
    )
    yield supposed(
        "slopes are made from the number of heads, but the rank has only some of the model's: use layer.alibi_slopes. "
        "The result is right with slopes of 2^(-8 (h + 1) / heads)",
        [_of_all_heads(layer, slopes) for layer, slopes in pairs],
    )
    yield supposed(
        "the bias is scaled as logits are: add it after the scale. The result is right with scaled slopes",
        [slopes * layer.scaling for layer, slopes in pairs],
    )
    for layer, slopes in pairs:
        yield supposed(
            f"other layers use the slopes of layer {layer.layer_id}: the result is right with them in all layers",
            [slopes] * len(layers),
        )

"""Bidirectional spans; a bug of the fifteenth set."""

from __future__ import annotations

import torch
from fourth_parents import wide
from plain_backends import Tiled

from attn_testkit.contract import Spans
from attn_testkit_corpus.faults.catalogue import bug


class Spanning(Tiled):
    """The parent with bidirectional spans."""

    capabilities = wide(
        "decode", "extend", windows={"decode", "extend"},
        spans=Spans({"extend"}, wider_than_window=True, by_layer=True),
    )  # fmt: skip

    def spans_of(self, rows):
        return rows.plan.spans

    def visible(self, index, rows):
        spans = self.spans_of(rows)
        if spans is None:
            return super().visible(index, rows)
        mine = spans[rows.request].long()
        here = (mine[..., 0] <= rows.position[:, None]) & (rows.position[:, None] <= mine[..., 1])
        here &= mine[..., 1] > 0
        last = torch.where(here, mine[..., 1], -1).amax(1)
        last = torch.maximum(last, rows.position)
        return (index >= self.window_start(rows)[:, None]) & (index <= last[:, None])


@bug(
    "vllm #47217",
    "extend-gqa2x2-d64-bf16-p64-k7x2-n66a130.1-chunks3-shared-gauss-w4-spans-layers1from0-b3nan",
)
class LongSpansDropped(Spanning):
    """A span of more positions than the layer's window shows has no effect."""

    def spans_of(self, rows):
        spans, window = super().spans_of(rows), rows.layer.sliding_window_size
        if spans is None or window < 0:
            return spans
        longer = spans[..., 1] - spans[..., 0] + 1 > window
        return spans.masked_fill(longer[..., None], 0)

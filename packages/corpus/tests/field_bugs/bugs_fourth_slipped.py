"""The bug of the fourth set that slipped through its first runs, with a case that there was not then."""

from __future__ import annotations

import torch
from fourth_parents import Known, windowed

from attn_testkit_corpus.faults.catalogue import bug


@bug(
    "tpu-inference #2755",
    "decode-gqa2x2-d64-bf16-p16-k32769-shuffled-one_hot-w11same-layers1from0-b1prod",
    of_a_tier="decode-gqa2x2-d64-bf16-p1-k66000.32769-contiguous-one_hot-w11-b2prod",
)
class Int16WindowPositions(Known):
    """Positions in int16, in layers with a window."""

    capabilities = windowed("decode", "extend")

    def visible(self, index, rows):
        w = rows.layer.sliding_window_size
        if w < 0:
            return super().visible(index, rows)
        q, k = rows.position.to(torch.int16)[:, None], index.to(torch.int16)[None]
        return (q >= k) & ((q - w).to(torch.int16) <= k) & (index < rows.kv_lens[:, None])

"""Bugs of the sixth set that slipped through its first runs, with cases that there were not then."""

from __future__ import annotations

import torch
from bug_table import bug
from plain_parts import OfParts

_SPLIT_FROM = 256
"""Keys of a request beyond which the kernel splits them."""


@bug(
    "vllm flash-attention #87",
    "decode-gqa2x2-d64-bf16-p16-k1500.70-interleaved-gauss-lsewhole-b3prod",
    "log-sum-exp",
)
class LseTransposed(OfParts):
    """Where keys are split in decode, groups of heads are folded into rows, and log-sum-exps keep the folded order."""

    def run_return_lse(self, q, kv, plan):
        out, lse = super().run_return_lse(q, kv, plan)
        rows = self.rows_of(q, plan)
        folded = lse.view(len(q), -1, plan.layer.q_per_kv).transpose(1, 2).reshape(lse.shape)
        split = (rows.kv_lens > _SPLIT_FROM) & (rows.new == 1)
        return out, torch.where(split[:, None], folded, lse)

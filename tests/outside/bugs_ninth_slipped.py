"""Bugs of the ninth set that slipped through its first runs, with cases that there were not then."""

from __future__ import annotations

import torch
from bug_table import bug
from fifth_parents_split import SplitKV
from plain_backends import LOWEST, SMALLEST, claims

from attn_testkit.backends.torch_native import TorchNativeBackend

VERIFY = {"target-verify", "decode"}


class OfGroups(TorchNativeBackend):
    """Healthy: trees and windows, each KV group with a pool of its own."""

    capabilities = claims(*VERIFY, max_topk=4, kv_groups=True, window_in_trees=True, sliding_window=VERIFY)


@bug(
    "sglang #24617",
    "target-verify-gqa2x2-d64-bf16-p16-k39.70.6-t0.0.1.2-reversed-gauss-w7-layers3from5groups-b4prod",
    "reads-own-kv",
)
class UntranslatedTree(OfGroups):
    """In a verify of trees page tables of the windowed layers hold locations of the other group's pool."""

    def _key_slots(self, batch, req_to_token):
        if batch.forward_mode.is_target_verify() and self.context.topk > 1:
            full = [layer for layer in self.context.layers if layer.sliding_window_size < 0]
            req_to_token = self.context.group_of(full[0]).req_to_token if full else req_to_token
        return super()._key_slots(batch, req_to_token)


class InChunks(SplitKV):
    """Healthy: a part for each 1,024 keys."""

    CHUNK = 1024
    capabilities = claims("decode")

    def reserve(self):
        self.SPLITS = -(-self.context.max_context_len // self.CHUNK)
        super().reserve()

    def length(self, rows):
        return torch.full_like(rows.kv_lens, self.CHUNK)


@bug("FastDeploy #5541", "decode-gqa2x2-d64-bf16-p1-k16384-shuffled-swamped-b1prod")
class MergeInModelType(InChunks):
    """Chunks are merged in the dtype of the model: its running sum is rounded with each of them."""

    def merge(self, parts, rows):
        kind = self.context.dtype
        top = parts.peak[..., 0]
        out, total = parts.acc[:, :, 0].to(kind), torch.exp(top - top.clamp(min=LOWEST))
        for number in range(1, parts.peak.shape[-1]):
            peak = parts.peak[..., number]
            new = torch.maximum(top, peak).clamp(min=LOWEST)
            old, add = torch.exp(top - new), torch.exp(peak - new)
            out = out * old.to(kind)[..., None] + parts.acc[:, :, number].to(kind) * add.to(kind)[..., None]
            top, total = new, total * old + add
        return out.float() / total.clamp(min=SMALLEST)[..., None], top + total.log()

"""Bugs of the ninth set that slipped through its first runs, with cases that there were not then."""

from __future__ import annotations

import torch
from fifth_parents_split import SplitKV
from plain_backends import LOWEST, SMALLEST, Rows, Tiled, declared

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit_corpus.faults.catalogue import bug

VERIFY = {"target-verify", "decode"}


class OfGroups(TorchNativeBackend):
    """Healthy: trees and windows, each KV group with a pool of its own."""

    capabilities = declared(
        *VERIFY, bounds={"max_topk": 4}, kv_pool={"kv_groups": True}, windows={"modes": VERIFY, "in_trees": True}
    )


@bug(
    "sglang #24617",
    "target-verify-gqa2x2-d64-bf16-p16-k39.70.6-t0.0.1.2-contiguous-gauss-w7-layers3from5groups-b4prod",
    "reads-own-kv",
)
class UntranslatedTree(OfGroups):
    """In a verify of trees page tables of the windowed layers hold locations of the other group's pool."""

    def _key_slots(self, batch, group, of_encoder):
        if batch.forward_mode.is_target_verify() and self.context.topk > 1:
            full = [layer for layer in self.context.layers if layer.sliding_window_size < 0]
            group = self.context.group_of(full[0]).index if full else group
        return super()._key_slots(batch, group, of_encoder)


class InChunks(SplitKV):
    """Healthy: a part for each 1,024 keys."""

    CHUNK = 1024
    capabilities = declared("decode")

    def reserve(self):
        self.SPLITS = -(-self.context.max_context_len // self.CHUNK)
        super().reserve()

    def length(self, rows):
        return torch.full_like(rows.kv_lens, self.CHUNK)


@bug("FastDeploy #5541", "decode-gqa2x2-d64-bf16-p1-k16384-shuffled-large_and_small_values-b1prod")
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


class Rebased(Tiled):
    """Healthy: on the host, for each KV group, rows of prompts are counted from behind those that decode in front."""

    capabilities = declared(
        "extend",
        graph=(),
        kv_pool={"page_sizes": {16}, "kv_groups": True},
        windows={"extend"},
        needs={"cpu_seq_lens": True},
        bounds={"max_context_len": 2048},
    )

    def init_forward_metadata(self, batch):
        bs = batch.batch_size
        if not bs:
            return
        self.init_forward_metadata_in_graph(batch)
        rows = [int(n) for n in batch.extend_seq_lens_cpu[:bs]]
        self.decodes = next((i for i, n in enumerate(rows) if n != 1), bs)
        shared = torch.tensor([0, *rows]).cumsum(0)
        self.starts = [self.rebased(shared).to(self.context.device) for _ in self.context.groups]

    def rebased(self, shared):
        mine = shared.clone()
        mine[self.decodes :] -= self.decodes
        return mine

    def rows_of(self, q, plan):
        starts, first = self.starts[self.context.group_of(plan.layer).index], self.decodes
        row, prompts = torch.arange(len(q), device=q.device), starts[first:]
        of_prompt = torch.searchsorted(prompts, row - first, right=True) - 1
        of_prompt = of_prompt.clamp(0, max(len(prompts) - 2, 0))
        request = torch.where(row < first, row, of_prompt + first).clamp(max=len(plan.kv_lens) - 1)
        place = torch.where(row < first, 0, row - first - prompts[of_prompt])
        new = plan.cu_seqlens_q.diff()[request].long()
        return Rows(plan, request, place, plan.kv_lens[request].long() - new + place)


@bug(
    "vllm #27650",
    "extend-gqa2x2-d64-bf16-p16-k39.70.6-n3a1x2.5-reversed-gauss-w7-layers3from5groups-b4prod",
    "reads-own-kv",
)
class StartsShared(Rebased):
    """All KV groups share the offsets on the host, which are rebased in place: for the second group twice."""

    def rebased(self, shared):
        shared[self.decodes :] -= self.decodes
        return shared

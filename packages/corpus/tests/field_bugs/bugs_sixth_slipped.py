"""Bugs of the sixth set that slipped through its first runs, with cases that there were not then."""

from __future__ import annotations

import torch
from fifth_parents_varlen import Varlen
from plain_splits import WithKVSplits

from attn_testkit_corpus.faults.catalogue import bug

_SPLIT_FROM = 256
"""Keys of a request beyond which the kernel splits them."""


@bug("vllm flash-attention #87", "decode-gqa2x2-d64-bf16-p16-k1500.70-shared-gauss-lsewhole-b3prod", "log-sum-exp")
class LseTransposed(WithKVSplits):
    """Where keys are split in decode, groups of heads are folded into rows, and log-sum-exps keep the folded order."""

    def run_return_lse(self, q, kv, plan):
        out, lse = super().run_return_lse(q, kv, plan)
        rows = self.rows_of(q, plan)
        folded = lse.view(len(q), -1, plan.layer.q_per_kv).transpose(1, 2).reshape(lse.shape)
        split = (rows.kv_lens > _SPLIT_FROM) & (rows.new == 1)
        return out, torch.where(split[:, None], folded, lse)


class SharedMeta(Varlen):
    """Healthy: an eager plan keeps all metadata but the table, if the last plan of any mode had the same lengths."""

    capabilities = Varlen.capabilities.with_changes(needs={"cpu_seq_lens": True})

    def __init__(self, context):
        super().__init__(context)
        self.mine, self.shared = {}, None

    def is_fresh(self, key):
        return self.shared == key

    def init_forward_metadata(self, batch):
        if not batch.batch_size:
            return
        mode = batch.forward_mode
        rows = getattr(batch.spec_info, "num_accept_tokens_cpu", None) or batch.extend_seq_lens_cpu or ()
        key = (mode, tuple(batch.seq_lens_cpu.tolist()), tuple(rows))
        if self.is_fresh(key):
            self.meta.table = self.block_table(batch)
            return
        super().init_forward_metadata(batch)
        self.mine[mode] = self.shared = key

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        self.shared = None


@bug(
    "TensorRT-LLM #13696",
    "decode-mqa4-d64-bf16-p16-k32.128.64.16.63-reversed-negative-b6prod-multi_mode",
    "steps-independent",
)
class SkipPrepare(SharedMeta):
    """A mode skips its plan by the lengths of its own last one, though another overwrote the metadata since."""

    def is_fresh(self, key):
        return self.mine.get(key[0]) == key


class LengthsThroughPinnedMemory(Varlen):
    """Healthy parent: it waits for lengths that are copied to the host through pinned memory, and cuts the table by
    them.
    """

    capabilities = Varlen.capabilities.with_changes(server={"eager_without_waits": False}, graph=())

    def wait(self):
        torch.cuda.current_stream().synchronize()

    def block_table(self, batch):
        on_host = torch.empty(batch.batch_size, dtype=torch.int64, pin_memory=True)
        on_host.copy_(batch.seq_lens[: batch.batch_size], non_blocking=True)
        self.wait()
        longest = max(on_host.tolist(), default=1) + self.context.num_draft_tokens
        return super().block_table(batch)[:, : -(-longest // self.context.page_size)]


@bug("flashinfer #564", "decode-mqa4-d128-bf16-p16-k1025.33-shuffled-plus_minus_one-b3prod", "completes")
class AsyncD2H(LengthsThroughPinnedMemory):
    """Lengths are copied to the host without a wait, and are read at once."""

    def wait(self):
        pass

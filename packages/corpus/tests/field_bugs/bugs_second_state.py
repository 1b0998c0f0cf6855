"""What is planned and kept; bugs of the second set."""

from __future__ import annotations

import torch
from plain_backends import Tiled, declared

from attn_testkit_corpus.faults.catalogue import bug


@bug(
    "sglang #33892",
    "draft-extend-v2-gqa2x2-d64-bf16-p16-k9.70.1-n2a2x3-shuffled-gauss-b4prod-empty_batches",
    "completes",
)
class LongestOfNoRequests(Tiled):
    """An eager plan takes the longest of no requests."""

    capabilities = declared("draft-extend-v2", needs={"cpu_seq_lens": True}, server={"takes_empty_batches": True})

    def init_forward_metadata(self, batch):
        self.longest = batch.seq_lens_cpu.max().item()
        super().init_forward_metadata(batch)


@bug("vLLM #42956", "decode-mla32-d512r64-bf16-p1-k63.64.65-reversed-gauss-kvfp8e4m3-b4nan", "output-written")
class FoldedHeadsReturnNothing(Tiled):
    """FP8 and 32 heads: the fold to 16 returns an empty output."""

    capabilities = declared(
        "decode",
        heads={"families": {"mla"}, "gqa_ratios": {16, 32}, "head_dims": {512}},
        kv_pool={"kv_dtypes": {"fp8_e4m3"}},
    )

    def finish(self, out, rows):
        return torch.empty_like(out) if rows.layer.tp_q_head_num == 32 else out


@bug("vLLM #47766", "extend-gqa2x2-d64-bf16-p1-k1-n9a9-chunks3-interleaved-gauss-w7one-b1prod", "steps-independent")
class PlanKeptByClampedLengths(Tiled):
    """How many keys each row has is planned once for lengths that are equal when clamped to the window."""

    capabilities = declared(
        "extend", graph=(), windows={"modes": {"extend"}, "layers": "one"}, server={"eager_without_waits": False}
    )
    key = None

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        most = self.context.sliding_window_size + 1
        if not batch.batch_size or not most:
            return
        lengths = list(zip(batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=True))
        key = tuple(min(prefix + new, most) for prefix, new in lengths), sum(new for _, new in lengths)
        if key != self.key:
            self.key = key
            counts = [min(at + 1, most) for prefix, new in lengths for at in range(prefix, prefix + new)]
            self.counts = torch.tensor(counts, dtype=torch.int64).to(self.context.device)

    def window_start(self, rows):
        if rows.layer.sliding_window_size < 0:
            return super().window_start(rows)
        return rows.position - self.counts[: len(rows.position)] + 1


@bug("sglang #25556", "extend-mla16-d512r64-bf16-p16-k7x2-n16a15.16-shared-shifted-b2prod")
class LengthsInPages(Tiled):
    """Slots are listed by token, and how many there are is counted in pages in an extend."""

    capabilities = declared(
        "decode",
        "extend",
        heads={"families": {"mla"}, "gqa_ratios": {16}, "head_dims": {512}},
        kv_pool={"page_sizes": {1, 16}},
    )

    def visible(self, index, rows):
        seen = super().visible(index, rows)
        if rows.plan.max_q_len == 1:
            return seen
        size = rows.plan.page_size
        return seen & (index < ((rows.kv_lens + size - 1) // size)[:, None])

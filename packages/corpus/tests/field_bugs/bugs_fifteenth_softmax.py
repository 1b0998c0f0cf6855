"""What a row sees, what is written, and where a replay reads it; bugs of the fifteenth set."""

from __future__ import annotations

from dataclasses import replace

import torch
from fourth_parents import Known, OwnSlots, wide
from plain_backends import Tiled, WithLse, declared

from attn_testkit.contract import LogSumExp
from attn_testkit_corpus.faults.catalogue import bug
from attn_testkit_corpus.faults.parent import PlannedBackend


@bug("flash-attention #2665", "extend-gqa4x2-d256-bf16-p16-k7x2-n3a2.3-chunks3-contiguous-one_hot-b2prod")
class StridesOfShapeAt256(Tiled):
    """Queries of heads of 256 are read as if they lay one behind the other."""

    capabilities = declared(
        "decode", "extend", heads={"gqa_ratios": {2, 4}, "head_dims": {64, 256}}, kv_pool={"page_sizes": {16}}
    )

    def query(self, q, plan):
        if plan.layer.head_dim != 256:
            return q
        _, heads, width = q.shape
        return q.as_strided(q.shape, (heads * width, width, 1))


@bug("mlx-lm #1673", "decode-gqa4x2-d128-bf16-p1-k7.8.9-interleaved-negative-w11-b3prod")
class TrimmedByCapacity(Known):
    """A decode keeps the window's last places of its allocation, which grows by 16 keys (256 in the thread)."""

    STEP = 16
    capabilities = wide("decode", "extend", windows={"decode", "extend"})

    def window_start(self, rows):
        right = super().window_start(rows)
        if rows.layer.sliding_window_size < 0 or not self.decodes():
            return right
        unused = -rows.kv_lens % self.STEP
        return torch.minimum(right + unused, rows.position)


@bug(
    "aiter #4711",
    "target-verify-gqa2x2-d128-bf16-p1-k7.8.9-chain7-interleaved-rising_logits-b4prod",
    "finite",
    execution="graph",
)
class HiddenSplitIsNaN(PlannedBackend):
    """The partial result of a split whose keys the causal mask hides from a row is 0 / 0."""

    capabilities = PlannedBackend.capabilities.with_changes(
        eager={"decode", "target-verify"},
        graph={"decode", "target-verify"},
        windows=(),
        bounds={"max_topk": 1},
        options={"sinks": False, "logit_cap": False},
        kv_pool={"kv_dtypes": {"same"}},
    )

    def partials(self, logits, seen, values, acc, lse):
        super().partials(logits, seen, values, acc, lse)
        sees = seen.any(-1)
        hidden = ~sees & sees.any(2, keepdim=True)
        acc.masked_fill_(hidden[..., None, None], torch.nan)


@bug("vllm-xpu-kernels #514", "decode-gqa4x2-d128-bf16-p64-k600.70.12-shuffled-gauss-w46-sink-b3prod", "finite")
class SinkOfFirstTile(Known):
    """A decode adds the sink to the sum of the first tile, relative to that tile's maximum."""

    capabilities = wide("decode", "extend", windows={"decode", "extend"}, options={"sinks": True})

    def merge(self, parts, rows):
        sinks = rows.layer.sinks
        if sinks is None or not self.decodes():
            return super().merge(parts, rows)
        weight = parts.weight.clone()
        weight[..., 0] += torch.exp(self.sink_of(rows) - parts.peak[..., 0])
        bare = replace(rows, plan=replace(rows.plan, layer=replace(rows.layer, sinks=None)))
        return super().merge(parts._replace(weight=weight), bare)


@bug(
    "vllm-xpu-kernels #434",
    "extend-gqa4x2-d192-bf16-p16-k0.1.16-n11a15.16.2-chunks3-shared-mean-lsewhole-b4small",
    "log-sum-exp",
)
class LanesWithoutRows(WithLse):
    """In heads of 192 lanes without a row write -inf as the log-sum-exp of the first of 8 rows."""

    capabilities = declared(
        "decode",
        "extend",
        heads={"gqa_ratios": {2, 4}, "head_dims": {64, 192}},
        kv_pool={"page_sizes": {16}},
        lse=LogSumExp(base="e", whole={"decode", "extend"}),
    )

    def init_forward_metadata_in_graph(self, batch):
        super().init_forward_metadata_in_graph(batch)
        self.mode = batch.forward_mode

    def run_return_lse(self, q, kv, plan):
        out, lse = super().run_return_lse(q, kv, plan)
        if self.mode != "extend" or plan.layer.head_dim != 192:
            return out, lse
        first = self.rows_of(q, plan).place % 8 == 0
        return out, lse.masked_fill(first[:, None], -torch.inf)


@bug("ATOM #1015", "decode-gqa2x2-d64-bf16-p1-k1.2.5.9.14.2.30-reversed-negative-b7prod", "writes-own-kv")
class WritesWholeBuffer(OwnSlots):
    """The eager writer has as many slots as the buffer holds: those behind the step's are of an earlier one."""

    capabilities = wide("decode", "extend")
    most = 0

    def __init__(self, context):
        super().__init__(context)
        self.eager_slots = torch.zeros(context.max_num_tokens, dtype=torch.int64, device=context.device)

    def write_kv(self, k, v, plan):
        if not self.eager:
            return super().write_kv(k, v, plan)
        self.eager_slots[: len(k)].copy_(plan.out_cache_loc)
        self.most = max(self.most, len(k))
        k, v = (torch.cat([each, each.new_zeros(self.most - len(each), *each.shape[1:])]) for each in (k, v))
        return super().write_kv(k, v, replace(plan, out_cache_loc=self.eager_slots[: self.most]))


@bug(
    "vllm-xpu-kernels #459",
    "decode-gqa2x2-d64-bf16-p16-k9.37.1-shuffled-gauss-layers1from0-b4prod-bigpool",
    "reads-own-kv",
)
class SurfaceOf24Bits(Tiled):
    """Rows of K and V wrap around at 2^24."""

    capabilities = wide("decode", "extend")

    def keys(self, kv, slots, plan):
        return super().keys(kv, slots % (1 << 24), plan)


@bug(
    "efficient-transformers #1235",
    "decode-gqa4x2-d128-bf16-p1-k7.8.9-interleaved-negative-w11-b3prod",
    execution="graph",
)
class PlacesOfRing(Known):
    """A place in the ring of a window counts if it is not behind the row's own, also after the ring has wrapped."""

    capabilities = wide("decode", "extend", windows={"decode", "extend"})

    def visible(self, index, rows):
        right = super().visible(index, rows)
        size = rows.layer.sliding_window_size + 1
        if size <= 0 or not self.decodes():
            return right
        return right & (index % size <= (rows.position % size)[:, None])


@bug(
    "mlxcel #679",
    "extend-gqa2x2-d64-bf16-p16-k1.2.5.9.14.2.30-n6a35.1.2.1x4-reversed-peaked-w11-b8nan",
    "finite",
)
class KeepsLastWindow(Known):
    """A chunk behind a prefix sees the last keys of prefix and chunk, as many as the window has; no key: NaN."""

    capabilities = wide("decode", "extend", windows={"decode", "extend"})

    def visible(self, index, rows):
        right = super().visible(index, rows)
        size = rows.layer.sliding_window_size + 1
        if size <= 0 or not self.extends():
            return right
        kept = index >= (rows.kv_lens - size)[:, None]
        return right & (kept | (rows.prefix == 0)[:, None])

    def merge(self, parts, rows):
        out, lse = super().merge(parts, rows)
        none = (parts.weight.sum(-1) == 0)[..., None]
        return out.masked_fill(none, torch.nan) if self.extends() else out, lse


@bug(
    "vLLM-2080Ti-Definitive #183",
    "decode-gqa2x3-d64-bf16-p1-k9.70-shuffled-gauss-b3prod",
    "writes-own-kv",
    execution="graph",
)
class SlotsOfCapture(OwnSlots):
    """Slots of new keys are those of the capture."""

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        if in_capture:
            super().init_forward_metadata_out_graph(batch, in_capture)
        self.eager = False

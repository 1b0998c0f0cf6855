"""Softmax attention; bugs of the sixteenth set, on the ``torch_native`` adapter and on kernels of this folder.

``MODES`` of a class without a case are those in which its bug can show.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import torch
from fourth_parents import FP8, Known, wide
from plain_backends import TwoParts
from torch.nn.functional import pad

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.contract import CrossAttention, LogSumExp, TreeMaskMode, VerifyInput
from attn_testkit_corpus.faults.catalogue import bug, helper

DRAFT_EXTENDS = ("draft-extend", "draft-extend-v2")
MLA = {
    "heads": {"families": {"mla"}, "head_dims": {512}, "mla_rope_dims": {64}},
    "kv_pool": {"page_sizes": {1, 16, 64}},
}


def changed(batch, **fields):
    """A batch with other fields. A replay has a view of a batch, and ``replace`` takes only dataclasses."""
    other = copy(batch)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def unwritten(out, rows):
    """Rows that a kernel does not write hold what the allocation holds; here that is NaN."""
    return out.masked_fill(rows[:, None, None], torch.nan)


class Native(TorchNativeBackend):
    """``torch_native`` that knows its mode, and whether a graph is made or replayed."""

    capabilities = wide("decode", "extend")
    eager = True

    def init_forward_metadata(self, batch):
        self.eager = True
        self.init_forward_metadata_in_graph(batch)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        self.eager = False

    def init_forward_metadata_in_graph(self, batch):
        self.mode = batch.forward_mode
        super().init_forward_metadata_in_graph(batch)

    def is_fp8(self):
        return self.context.kv_pool.dtype == torch.float8_e4m3fn


# vllm #48167: attention that is not causal runs in a prefill wrapper which was not made for graphs.
@bug(
    "vllm #48167",
    "target-verify-gqa2x2-d64-bf16-p16-k7x2.8x29.608.8x8-chain7-reversed-"
    "negative-layers1from0-b41prod-empty_batches-noncausal-overlap_scheduling",
    "replay-follows-batch",
    execution="graph",
)
class PlanOfCapture(Native):
    """Lengths and slots of layers that are not causal are those of the capture, in tensors of that plan."""

    capabilities = wide(
        "decode", "target-verify", options={"non_causal": {"target-verify"}}, server={"takes_bare_chains": True},
    )  # fmt: skip
    frozen = None

    def __init__(self, context):
        super().__init__(context)
        self.plans = []

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        self.frozen = None
        if in_capture and not self.context.causal:
            bs = batch.batch_size
            table = self.context.req_to_token[batch.req_pool_indices[:bs].long()].long()
            self.frozen = table, batch.seq_lens[:bs].clone()
            self.plans.append(self.frozen)

    def init_forward_metadata(self, batch):
        self.frozen = None
        super().init_forward_metadata(batch)

    def _key_slots(self, batch, group, of_encoder):
        return self.frozen[0] if self.frozen else super()._key_slots(batch, group, of_encoder)

    def _kv_lens(self, batch, counts):
        return super()._kv_lens(changed(batch, seq_lens=self.frozen[1]) if self.frozen else batch, counts)


# imp #1345: the FP8 decode kernel takes no pointer to sinks.
@bug(
    "imp #1345", "decode-gqa4x2-d128-bf16-p64-k133.3.0.64.9.33.1.17.5-shared-rising_logits-kvfp8e4m3-w4000-sink-b12nan"
)
class NoSinksInFp8(Native):
    """A decode over an FP8 pool leaves the sinks out."""

    capabilities = wide(
        "decode", "extend", kv_pool={"kv_dtypes": FP8}, options={"sinks": True}, windows={"decode", "extend"}
    )

    def _attend(self, q, layer, seen):
        if self.mode.is_decode() and self.is_fp8():
            layer = replace(layer, sinks=None)
        return super()._attend(q, layer, seen)


# TensorRT-LLM #16916: the generation of MLA passes None for both KV scales. The mechanism is a guess.
@bug(
    "TensorRT-LLM #16916",
    "decode-mla16-d512r64-bf16-p64-k133.3.0.64.9.33.1.17.5-reversed-one_hot-kvfp8e4m3-b9prod",
    "writes-own-kv",
)
class NoScalesInDecode(Native):
    """A decode of MLA stores and reads FP8 rows as if their scale was 1."""

    capabilities = wide("decode", "extend", **MLA).with_changes(
        heads={"gqa_ratios": {8, 16}}, kv_pool={"kv_dtypes": FP8}
    )

    def forward(self, q, k, v, layer, batch, save_kv_cache=True, out=None):
        if batch.forward_mode.is_decode() and self.is_fp8():
            layer = replace(layer, k_scale=1.0, v_scale=1.0)
        return super().forward(q, k, v, layer, batch, save_kv_cache, out)


# InfiniLM #526: lengths of keys are host parameters of the captured kernel.
@bug(
    "InfiniLM #526",
    "decode-gqa2x3-d64-bf16-p1-k9.70-shuffled-gauss-b3prod",
    "replay-follows-batch",
    execution="graph",
)
class LengthsOfCapture(Native):
    """A replay of a decode attends as many keys as the capture had; slots are the replay's."""

    capabilities = wide("decode", "extend", graph={"decode"})

    def __init__(self, context):
        super().__init__(context)
        self.parameters = []

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        if in_capture:
            self.parameters.append(batch.seq_lens[: batch.batch_size].clone())

    def _kv_lens(self, batch, counts):
        return super()._kv_lens(batch if self.eager else changed(batch, seq_lens=self.parameters[-1]), counts)


class HostLengths(Native):
    """Keys of a verify are counted on the host; its drafts are chains."""

    capabilities = wide("decode", "target-verify", needs={"cpu_seq_lens": True})

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.lens_of_graphs = torch.ones(max_bs, dtype=torch.int64, device=self.context.device)

    def host_lens(self, batch):
        """[B] on the host: keys, the draft's included."""
        return batch.seq_lens_cpu[: batch.batch_size] + self.context.num_draft_tokens

    def init_forward_metadata(self, batch):
        if batch.batch_size and batch.forward_mode.is_target_verify():
            self.lens = self.host_lens(batch).to(self.context.device)
        super().init_forward_metadata(batch)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        if batch.forward_mode.is_target_verify():
            self.lens = self.lens_of_graphs[: batch.batch_size]
            self.lens.copy_(self.host_lens(batch))

    def _kv_lens(self, batch, counts):
        if not batch.forward_mode.is_target_verify():
            return super()._kv_lens(batch, counts)
        return self.lens.clamp(max=len(self._key))

    def _visibility(self, batch, counts, offset):
        return super()._visibility(changed(batch, spec_info=None), counts, offset)


# sglang #31739: the draft is added to the host's lengths in place, and once more for the kernel.
@bug("sglang #31739", "target-verify-gqa2x2-d128-bf16-p16-k0.1.16-chain7-shuffled-peaked-b3prod", "reads-own-kv")
class DraftCountedTwice(HostLengths):
    """Keys of a verify are prefix + 2 N, of which the last N are not written, and row j is the j-th from the end."""

    def host_lens(self, batch):
        lens = batch.seq_lens_cpu[: batch.batch_size]
        lens += self.context.num_draft_tokens
        return super().host_lens(batch)


# ik_llama.cpp #2031: the vector kernel walks scores in blocks of Dk keys and values in blocks of Dv.
@bug("ik_llama.cpp #2031", "decode-mla16-d512r64-bf16-p16-k1025.33-shuffled-plus_minus_one-b3prod")
class BlocksOfTwoWidths(Native):
    """In a decode of MLA the value of the o-th key of block b is that of key b * Dv + o; behind Dv there is none."""

    capabilities = wide("decode", "extend", **MLA).with_changes(heads={"gqa_ratios": {8, 16}})

    def _sum(self, p, values, seen):
        width, narrow = self.context.layers[0].head_dim, values.shape[-1]
        if self.mode.is_decode() and width != narrow:
            inside = self._key % width
            values = values[:, :, self._key // width * narrow + inside]
            p = p.masked_fill(inside >= narrow, 0.0)
        return super()._sum(p, values, seen)


# sglang-jax #1606: new rows are stored while the last block of queries is attended, from its window on.
@bug(
    "sglang-jax #1606",
    "extend-gqa2x2-d64-bf16-p16-k1.2.5.9.14.2.30-n6a35.1.2.1x4-reversed-peaked-w11-b8nan",
    "writes-own-kv",
)
class StoresFromLastWindow(Native):
    """New rows of a windowed layer before the first block of keys of the last block of queries stay unwritten.

    Blocks are 32 queries and a page of keys. The step itself attends what it was given.
    """

    QUERIES = 32
    capabilities = wide("decode", "extend", windows={"decode", "extend"})

    def forward(self, q, k, v, layer, batch, save_kv_cache=True, out=None):
        skips = batch.forward_mode == "extend" and layer.sliding_window_size >= 0 and save_kv_cache
        if not skips or not batch.batch_size:
            return super().forward(q, k, v, layer, batch, save_kv_cache, out)
        slots = batch.out_cache_loc
        buffers = self.context.kv_pool.get_kv_buffer(layer.layer_id)
        before = [each[slots] for each in buffers]
        result = super().forward(q, k, v, layer, batch, save_kv_cache, out)
        lost = self.skipped(layer)[: len(slots)]
        for buffer, old in zip(buffers, before, strict=True):
            buffer[slots] = torch.where(lost[:, None, None], old, buffer[slots])
        return result

    @helper
    def skipped(self, layer):
        """[T] bool."""
        page, width = self.context.page_size, self._row.shape[1]
        new = (self._last_key[:, 0] + 1 - self._prefix).clamp(min=1)
        last_block = self._prefix + (new - 1) // self.QUERIES * self.QUERIES
        first = (last_block - layer.sliding_window_size).clamp(min=0) // page * page
        request = self._place // width
        return self._prefix[request] + self._place % width < first[request]


# tpu-inference #3167: query heads are packed in pairs for each KV head, and sinks are padded as one list.
@bug(
    "tpu-inference #3167",
    "decode-mha2-d128-bf16-p1-k13-interleaved-gauss-w0-sink-b4prod",
    execution="graph",
)
class SinksPaddedAtTheEnd(Native):
    """With an odd number of query heads for a KV head, those of later KV heads have the sinks of others."""

    capabilities = wide(
        "decode",
        "extend",
        heads={"families": {"mha", "gqa"}, "gqa_ratios": {2, 4, 5, 7, 8}},
        options={"sinks": True},
        windows={"decode", "extend"},
    )

    def _masked(self, logits, seen, layer):
        if layer.sinks is not None:
            heads, group = layer.tp_k_head_num, layer.q_per_kv
            packed = group + group % 2
            sinks = pad(layer.sinks, (0, heads * packed - len(layer.sinks))).view(heads, packed)[:, :group]
            layer = replace(layer, sinks=sinks.flatten())
        return super()._masked(logits, seen, layer)


# sglang #39737: a draft-extend takes lengths of all ranks for those of one.
@bug(
    "sglang #39737",
    "draft-extend-gqa4x16-d128-bf16-p1-k130.5.40-n2a2.1.2-shared-gauss-lsetokens3-b4prod",
    "log-sum-exp",
)
class BoundsOfAllRanks(Native):
    """In a draft-extend the n-th key of a rank is visible if n is not behind the row's place among all keys."""

    capabilities = wide(
        "decode", *DRAFT_EXTENDS, lse=LogSumExp(
            base="e", **{kind: {"decode", *DRAFT_EXTENDS} for kind in ("whole", "pages", "tokens")}
        ),
    )  # fmt: skip
    part = None

    def forward_return_lse(self, q, k, v, layer, batch, save_kv_cache=True, *, part):
        self.part = part
        return super().forward_return_lse(q, k, v, layer, batch, save_kv_cache, part=part)

    def _in_window(self, layer):
        seen = super()._in_window(layer)
        if self.mode not in DRAFT_EXTENDS or self.part is None or self.part.kind != "rank":
            return seen
        number = self.part.holds(self._key, self._prefix[:, None]).cumsum(-1) - 1
        bounded = number[:, None] <= self._position[..., None]
        return bounded & (self._key <= self._last_key)[:, None]


# sglang #35208: the plan of a verify has no window, only a first key for each request.
@bug(
    "sglang #35208",
    "target-verify-gqa2x2-d64-bf16-p16-k15.16.17.16x13.17x12.18x3.618.18x8-"
    "chain7-shuffled-rising_logits-w11-layers1from0-b41nan",
)
class WindowAnchoredAtFirstRow(Native):
    """All rows of a draft block begin at the window of the block's first row."""

    capabilities = wide(
        "decode", "target-verify", windows={"decode", "target-verify"}, server={"takes_bare_chains": True}
    )

    def _in_window(self, layer):
        if not self.mode.is_target_verify() or layer.sliding_window_size < 0:
            return super()._in_window(layer)
        first = self._position[:, :1, None]
        return self._visible & (first - self._key_position <= layer.sliding_window_size)


# vllm #46997: split and reduce metadata of FP8 MLA are made as for a pool in bf16.
@bug(
    "vllm #46997",
    "decode-mla32-d512r64-bf16-p16-k70.33.1-shuffled-gauss-kvfp8e4m3-layers1from0-b3prod",
)
class MetadataOfUnfolded(Native):
    """32 heads run as two requests of 16, whose partial results are counted by the list of the real requests."""

    SPLIT = 64
    capabilities = wide("decode", "extend", **MLA).with_changes(
        heads={"gqa_ratios": {16, 32}}, kv_pool={"kv_dtypes": FP8}
    )

    def _masked(self, logits, seen, layer):
        logits = super()._masked(logits, seen, layer)
        if not self.mode.is_decode() or not self.is_fp8() or layer.tp_q_head_num != 32:
            return logits
        requests = len(logits)
        splits = -(-(self._last_key[:, 0] + 1) // self.SPLIT)
        folded = 2 * torch.arange(requests, device=logits.device)[:, None] + torch.arange(2, device=logits.device)
        reduced = splits[folded.clamp(max=requests - 1)] * self.SPLIT
        lost = self._key >= reduced.repeat_interleave(16, 1)[..., None]
        return logits.masked_fill(lost[:, None, :, None], -torch.inf)


# vllm #45227: metadata of a verify are sized for one row per request.
@bug(
    "vllm #45227",
    "target-verify-mla16-d512r64-bf16-p64-k133.3.0.64.9.33.1.17.5-chain7-interleaved-mean-kvfp8e4m3-b12prod",
)
class OneRowPerRequest(Native):
    """Rows of a verify have no causal bounds of their own: each sees all keys of its request."""

    capabilities = wide("decode", "target-verify", **MLA).with_changes(
        heads={"gqa_ratios": {8, 16}}, kv_pool={"kv_dtypes": FP8}
    )

    def _in_window(self, layer):
        seen = super()._in_window(layer)
        if not self.mode.is_target_verify():
            return seen
        return (self._key <= self._last_key)[:, None].expand_as(seen)


# aiter #5679: a verify of 8 rows and 16 heads is folded onto a kernel of 4 rows. The mechanism is a guess.
@bug("aiter #5679", "target-verify-mla16-d512r64-bf16-p64-k133.3.0.64.9.33.1.17.5-chain7-interleaved-mean-b12prod")
class SecondFoldOfFour(Native):
    """Rows behind the fourth have the bounds of the rows four before them."""

    capabilities = wide("decode", "target-verify", **MLA).with_changes(heads={"gqa_ratios": {8, 16, 32}})

    def _in_window(self, layer):
        seen = super()._in_window(layer)
        if not self.mode.is_target_verify() or layer.tp_q_head_num != 16:
            return seen
        return seen[:, torch.arange(seen.shape[1], device=seen.device) % 4]


# flashinfer #3864: one head of one row, at some lengths. The mechanism is a guess.
class OneHeadWithoutWindow(Native):
    """In a verify of 8 rows over FP8 one head of the last row has no window, if one in four lengths is met."""

    MODES = ("target-verify",)
    capabilities = wide("decode", "target-verify", kv_pool={"kv_dtypes": FP8}, windows={"decode", "target-verify"})

    def _attend(self, q, layer, seen):
        out, logits = super()._attend(q, layer, seen)
        rows, size = self._row.shape[1], layer.sliding_window_size
        if not self.mode.is_target_verify() or not self.is_fp8() or size < 0 or rows < 8:
            return out, logits
        whole, _ = super()._attend(q, layer, self._seen_by(self._visible, layer))
        lens = self._last_key[:, 0] + 1
        request = self._place // rows
        last = self._place % rows == rows - 1
        hit = last & ((lens > size + 1) & (lens % 4 == 3))[request]
        head = (lens // 4 % layer.tp_q_head_num)[request]
        heads = torch.arange(layer.tp_q_head_num, device=q.device)
        return torch.where((hit[:, None] & (heads == head[:, None]))[..., None], whole, out), logits


class FinitePadding(Known):
    """Padded requests have no rows, and rows behind the last live one get zeros."""

    capabilities = wide(
        "decode", "extend", graph={"decode"}, server={"padded_requests": {"nothing"}, "finite_padding": True}
    )

    def finish(self, out, rows):
        return out.masked_fill(self.behind(out, rows)[:, None, None], 0.0)

    def behind(self, out, rows):
        return torch.arange(len(out), device=out.device) >= rows.plan.cu_seqlens_q[-1]


# vllm-plugin-FL #368: rows of the output behind num_actual_tokens are never written.
@bug(
    "vllm-plugin-FL #368",
    "decode-gqa2x3-d64-bf16-p1-k9.70-shuffled-gauss-b3prod",
    "padding-finite",
    execution="graph",
)
class PaddingUnwritten(FinitePadding):
    """Rows of the output behind the live ones are not written."""

    def finish(self, out, rows):
        return unwritten(out, self.behind(out, rows))


# sglang #36915: the eager path of a draft-extend does not compute its offsets.
@bug(
    "sglang #36915",
    "draft-extend-v2-gqa4x2-d128-bf16-p16-k3.37.9.17-n4a1x4-interleaved-gauss-b5nan",
    "finite",
)
class OffsetsOfLastPrefill(Known):
    """An eager draft-extend reads the offsets that the last prefill left; rows behind them are not written."""

    capabilities = wide("decode", "extend", "draft-extend-v2")
    eager = True

    def __init__(self, context):
        super().__init__(context)
        self.offsets = torch.zeros(context.max_bs + 1, dtype=torch.int32, device=context.device)

    def init_forward_metadata(self, batch):
        super().init_forward_metadata(batch)
        self.eager, bs = True, batch.batch_size
        if bs and batch.forward_mode == "extend":
            self.offsets[: bs + 1].copy_(self._kit_step.cu_seqlens_q)
        elif bs and batch.forward_mode.is_draft_extend_v2():
            self._kit_step = replace(self._kit_step, cu_seqlens_q=self.offsets[: bs + 1])

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        self.eager = False

    def finish(self, out, rows):
        if not self.eager or not self.mode.is_draft_extend_v2():
            return out
        return unwritten(out, torch.arange(len(out), device=out.device) >= rows.plan.cu_seqlens_q[-1])


# tokenspeed #578: a decode clamps its keys to WINDOW_LEFT, which does not count the row's own.
@bug("tokenspeed #578", "decode-gqa2x2-d64-bf16-p16-k70.33.1-shuffled-gauss-w40-sink-b3prod")
class OneKeyTooFew(Known):
    """A decode sees W keys of its window, which has W + 1."""

    capabilities = wide("decode", "extend", windows={"decode", "extend"}, options={"sinks": True})

    def window_start(self, rows):
        right = super().window_start(rows)
        return right + 1 if rows.layer.sliding_window_size >= 0 and self.decodes() else right


class OwnMask(Known):
    """Tree masks are copied into a buffer of the backend's own, which graphs read."""

    capabilities = wide(
        "decode",
        "target-verify",
        bounds={"max_topk": 4, "max_q_rows": 16},
        server={"takes_strided_heads": True, "context_len": {"all", "prefix"}},
    )
    masks = None

    def columns(self):
        return self.context.req_to_token.shape[1]

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        if self.context.topk > 1:
            cells = max_bs * self.context.num_draft_tokens * self.columns()
            self.masks = torch.zeros(cells, dtype=torch.bool, device=self.context.device)

    def init_forward_metadata(self, batch):
        self.in_graph = False
        self.init_forward_metadata_in_graph(batch)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        self.in_graph = True
        spec = batch.spec_info
        if self.masks is not None and isinstance(spec, VerifyInput):
            assert spec.tree_mask_mode is TreeMaskMode.FULL_MASK
            self.masks[: spec.custom_mask.numel()].copy_(spec.custom_mask)

    def init_forward_metadata_in_graph(self, batch):
        if self.in_graph and self.masks is not None and batch.forward_mode.is_target_verify():
            batch = changed(batch, spec_info=replace(batch.spec_info, custom_mask=self.masks))
        super().init_forward_metadata_in_graph(batch)


# sglang #29450: the buffer of masks has max_context_len columns, and a row of a mask N more.
class MaskWithoutDraft(OwnMask):
    """Masks of a full batch of requests of the greatest length do not fit into the buffer."""

    MODES = ("target-verify",)

    def columns(self):
        return self.context.max_context_len


class Crossing(Native):
    capabilities = wide(
        "decode", "extend", graph={"decode"}, cross_attention=CrossAttention(modes={"decode", "extend"})
    )


# sglang #36298: the encoder's page table stays one of slots.
@bug(
    "sglang #36298",
    "decode-gqa4x2-d128-bf16-p64-k63.64.65-shuffled-negative-cross133-b6prod",
    "reads-own-kv",
)
class SlotsAsEncoderPages(Crossing):
    """Page p of an encoder is said to be the slot of its key p."""

    def _key_slots(self, batch, group, of_encoder):
        right = super()._key_slots(batch, group, of_encoder)
        size = self.context.page_size
        if not of_encoder or size == 1:
            return right
        slots = self.context.groups[group].kv_pool.num_slots
        return (right[:, self._key // size] * size + self._key % size) % slots


class Two(Known, TwoParts):
    """The prefix and the new rows apart; it knows its mode."""

    capabilities = wide("decode", "extend", *DRAFT_EXTENDS)
    eager = True

    def init_forward_metadata(self, batch):
        self.eager = True
        self.init_forward_metadata_in_graph(batch)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        self.eager = False


# sglang #27738: the list of the prefix is made with seq_lens, which count the accepted tokens.
@bug("sglang #27738", "draft-extend-gqa4x2-d128-bf16-p1-k7.8.9-n4a1x3-interleaved-mean-b6nan")
class AcceptedInPrefix(Two):
    """An eager draft-extend sees all its rows as prefix, and those up to its own once more."""

    def run(self, q, kv, plan):
        if not self.eager or self.mode != "draft-extend":
            return super().run(q, kv, plan)
        scores, seen, v, rows = self.prepare(q, kv, plan)
        index = torch.arange(seen.shape[1], device=q.device)
        new = self.part(scores, seen & (index >= rows.prefix[:, None]), v, plan)
        old = self.part(scores, index < rows.kv_lens[:, None], v, plan)
        return self.finish(self.merge_two(old, new).to(q.dtype), rows)


# vllm #48016: the copy that a prefill reads has its scales applied, and the kernel applies them again.
@bug("vllm #48016", "extend-gqa4x2-d128-bf16-p16-k1.2.5.9.14.2.30-n1a1x7-chunks3-shared-gauss-kvfp8e4m3-b10prod")
class PrefillScalesTwice(Native):
    """A prefill over FP8 multiplies by the scales of K and V twice."""

    capabilities = wide("decode", "extend", kv_pool={"kv_dtypes": FP8})

    def _attend(self, q, layer, seen):
        if self.mode == "extend" and self.is_fp8():
            layer = replace(layer, k_scale=layer.k_scale**2, v_scale=layer.v_scale**2)
        return super()._attend(q, layer, seen)

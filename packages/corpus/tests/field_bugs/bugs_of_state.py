"""What is kept too long: by a graph, by a class, by a process."""

from __future__ import annotations

import torch
from plain_backends import Planned, Tiled, declared

from attn_testkit_corpus.faults.catalogue import bug


@bug(
    "aprender #2030",
    "decode-gqa2x2-d64-bf16-p16-k1025.33-shuffled-plus_minus_one-b3prod",
    "replay-follows-batch",
    execution="graph",
)
class KernelChosenAtCapture(Tiled):
    """The kernel is chosen by the lengths at capture, and the one for short contexts has 1,024 keys."""

    capabilities = declared("decode", needs={"cpu_seq_lens": True})
    short = False

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        super().init_forward_metadata_out_graph(batch, in_capture)
        self.short = batch.batch_size == 0 or int(batch.seq_lens_cpu[: batch.batch_size].max()) <= 1024

    def visible(self, index, rows):
        seen = super().visible(index, rows)
        return seen & (index < 1024) if self.short else seen


@bug(
    "sglang #37975",
    "decode-gqa2x2-d64-bf16-p1-k32.128.64.16.63-reversed-peaked-b8stale",
    "replay-follows-batch",
    execution="graph",
)
class IndptrOfTheGraphNotRefreshed(Planned):
    """A replay writes where each list begins into the eager buffer, not into the one that the graph reads."""

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.eager_indptr = torch.zeros_like(self.buffers["indptr"])

    def bind(self, indptr, in_capture):
        bound = self.buffers["indptr"] if in_capture else self.eager_indptr
        bound[: len(indptr)].copy_(indptr)


@bug(
    "vLLM #40655",
    "decode-gqa2x2-d64-bf16-p1-k32.128.64.16.63-reversed-negative-b6prod-multi_mode",
    "addresses-stable",
    execution="graph",
)
class ScratchOfTheClass(Tiled):
    """The scratch memory is the class's, and replaced when another instance has another shape."""

    capabilities = declared("decode", "extend", heads={"gqa_ratios": {2, 4}})
    scratch = None

    def weigh(self, p, v):
        acc = super().weigh(p, v)
        if len(acc) > self.context.max_num_tokens:
            return acc
        kind, shape = type(self), (self.context.max_num_tokens, *acc.shape[1:])
        if kind.scratch is None or kind.scratch.shape != shape:
            kind.scratch = torch.empty(shape, device=acc.device)
        kind.scratch[: len(acc)].copy_(acc)
        return kind.scratch[: len(acc)]


@bug(
    "sglang #28559",
    "decode-gqa2x2-d64-bf16-p1-k32.128.64.16.63-reversed-negative-b6prod-multi_mode",
    "steps-independent",
)
class LastInstanceDecides(Tiled):
    """The constructor writes a setting of the process: all instances read that of the last one."""

    capabilities = declared("decode", "extend", heads={"gqa_ratios": {2, 4}})
    group = 0

    def __init__(self, context):
        super().__init__(context)
        type(self).group = context.layers[0].q_per_kv

    def kv_head(self, layer, device):
        return (torch.arange(layer.tp_q_head_num, device=device) // self.group).clamp(max=layer.tp_k_head_num - 1)

"""A backend with its own metadata: decode, and target-verify of chains, eager and under CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attn_testkit.contract import AttentionBackend, BackendContext, Capabilities, ForwardBatch


@dataclass(frozen=True)
class Metadata:
    """Tensors that the kernel reads in one step."""

    slots: torch.Tensor  # [bs, max_context_len] int64: KV slot of each key
    kv_lens: torch.Tensor  # [bs] int64: keys of each request, this step's included
    width: int  # query rows of a request


class PlannedDecode(AttentionBackend):
    capabilities = Capabilities(
        eager={"decode", "target-verify"},
        graph={"decode", "target-verify"},
        heads={"families": {"mha", "gqa"}, "gqa_ratios": {2, 4, 8}, "head_dims": {64}},
        precision={"dtypes": {"bf16"}},
        kv_pool={"page_sizes": {1, 16}},
        bounds={"max_q_rows": 8, "max_topk": 1, "max_context_len": 4096},
        needs={"cpu_seq_lens": False},
    )

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)  # refuses what is not declared
        self.metadata: Metadata
        self.of_graphs: dict[tuple[str, int], Metadata] = {}

    # Eager: fresh tensors. A batch may be larger than the largest graph.
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        slots = self.context.req_to_token[batch.req_pool_indices].long()
        self.metadata = Metadata(slots, self.lens(batch), self.width(batch))

    # Once, before the first capture: all memory that graphs read, at its largest size.
    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        context = self.context
        self.slots = torch.zeros(max_bs, context.max_context_len, dtype=torch.int64, device=context.device)
        self.kv_lens = torch.ones(max_bs, dtype=torch.int64, device=context.device)

    # Outside the graph, before each capture and before each replay.
    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        bs, key = batch.batch_size, (batch.forward_mode, batch.batch_size)
        if in_capture:  # the objects of this bucket and this mode: views, no new memory
            self.of_graphs[key] = Metadata(self.slots[:bs], self.kv_lens[:bs], self.width(batch))
        self.metadata = self.of_graphs[key]
        self.metadata.slots.copy_(self.context.req_to_token[batch.req_pool_indices[:bs]])

    # Inside: recorded at capture, executed on the device by every replay. Reads the graph's own batch tensors.
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        self.metadata.kv_lens.copy_(self.lens(batch))

    # Padded requests have this many keys, and all requests have at capture.
    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def width(self, batch: ForwardBatch) -> int:
        # Not spec_info.num_tokens_per_req, which older servers leave at 0 or -1 while a graph is captured.
        return self.context.num_draft_tokens if batch.forward_mode.is_target_verify() else 1

    def lens(self, batch: ForwardBatch) -> torch.Tensor:
        # In decode seq_lens counts the new token; in target-verify it is only the prefix.
        new = self.width(batch) if batch.forward_mode.is_target_verify() else 0
        return batch.seq_lens[: batch.batch_size] + new

    def forward(self, q, k, v, layer, batch, save_kv_cache=True):
        if save_kv_cache:
            self.context.kv_pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)
        meta, (keys, values) = self.metadata, self.context.kv_pool.get_kv_buffer(layer.layer_id)
        keys, values = keys[meta.slots].float(), values[meta.slots].float()
        rows = q.reshape(-1, meta.width, layer.tp_k_head_num, layer.q_per_kv, layer.head_dim).float()
        logits = torch.einsum("bwhgd,bshd->bwhgs", rows, keys) * layer.scaling
        # Row j of n sees the first kv_len - n + j + 1 keys.
        last = meta.kv_lens[:, None] - meta.width + torch.arange(meta.width, device=q.device)
        key = torch.arange(keys.shape[1], device=q.device)
        seen = key <= last[:, :, None]
        weights = logits.masked_fill(~seen[:, :, None, None], -torch.inf).softmax(-1)
        values = values.masked_fill((key >= meta.kv_lens[:, None])[:, :, None, None], 0.0)
        return torch.einsum("bwhgs,bshd->bwhgd", weights, values).reshape(q.shape).to(q.dtype)

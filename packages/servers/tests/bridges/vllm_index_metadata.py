"""Metadata that vLLM's builder of the DSA indexer makes, behind the kit's indexer. Scores and top-k are torch's.

PYTHONPATH=packages/servers/tests/bridges attn-testkit run --backend vllm_index_metadata:Metadata --device cpu

``DeepseekV32IndexerMetadataBuilder`` decides which rows are decodes, how many keys each row may see, and where they
are. vLLM's kernels of scores and top-k are compiled; without them its builder asks for no schedule. Importing this
imports vLLM.
"""

from __future__ import annotations

from typing import Any

import torch

from attn_testkit.backends.torch_native_sparse import TorchNativeSparseBackend
from attn_testkit.contract import BackendContext, ForwardMode, Indexer, KernelPlan, Sparse
from attn_testkit_servers.bridges.vllm.capabilities import CAPABILITIES
from attn_testkit_servers.bridges.vllm.imports import prepare

__all__ = ["ChunkFromZero", "FirstTable", "Metadata", "ShortDecodes"]

_OF_VLLM = CAPABILITIES["xpu_mla_sparse"]
prepare(_OF_VLLM)
_PAGE = 64


class Metadata(TorchNativeSparseBackend):
    """A row's keys are those that the builder's metadata say, in decode and in chunks of prefill."""

    capabilities = TorchNativeSparseBackend.capabilities.with_changes(
        eager=frozenset(ForwardMode) - {ForwardMode.DRAFT_DECODE},
        graph=frozenset(),
        heads={"families": {"mla"}, "head_dims": {512}, "mla_rope_dims": {64}, "gqa_ratios": {16}},
        precision={"dtypes": {"bf16"}},
        kv_pool={"page_sizes": {_PAGE}, "kv_dtypes": {"same"}},
        options={"sinks": False},
        sparse=Sparse(topk={16, 64}, indexer=Indexer(heads={4})),
        server={"takes_more_rows": False},
        bounds={"max_q_rows": 4},
        needs={"cpu_seq_lens": True},
    )

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadataBuilder
        from vllm.v1.kv_cache_interface import MLAAttentionSpec

        from attn_testkit_servers.bridges.vllm.config import make_config

        blocks = context.kv_pool.num_slots // _PAGE
        config = make_config(_OF_VLLM, context, blocks, "NHD")
        # A server sets it when it resolves its options.
        config.attention_config.sparse_mla_prefill_workspace_factor = 5
        spec = MLAAttentionSpec(block_size=_PAGE, num_kv_heads=1, head_size=132, dtype=torch.uint8)
        self.columns = -(-context.max_context_len // _PAGE)
        self.builder: Any = DeepseekV32IndexerMetadataBuilder(
            spec, ["indexer"], config, context.device, block_table_width=self.columns
        )

    def built(self, plan: KernelPlan, rows: int) -> Any:
        """The builder's metadata for this step."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        starts = plan.cu_seqlens_q.to(torch.int32)
        lens = plan.kv_lens.to(torch.int32)
        table = torch.zeros(len(lens), self.columns, dtype=torch.int32, device=lens.device)
        table[:, : plan.page_table.shape[1]] = plan.page_table
        return self.builder.build(
            0,
            CommonAttentionMetadata(
                query_start_loc=starts, query_start_loc_cpu=starts.cpu(), seq_lens=lens, num_reqs=len(lens),
                num_actual_tokens=rows, max_query_len=int(starts.diff().max()), max_seq_len=int(lens.max()),
                block_table_tensor=table, slot_mapping=plan.out_cache_loc, seq_lens_cpu_upper_bound=lens.cpu(),
            ),
        )  # fmt: skip

    def scored(
        self, q_index: torch.Tensor, weights: torch.Tensor, plan: KernelPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores of the keys that the metadata give each row, and their number."""
        metadata = self.built(plan, len(q_index))
        scores, slots, sees = self.scores_of_slots(q_index, weights, plan.layer), [], []
        if metadata.decode is not None:
            for row, (table, seen) in enumerate(decoded(metadata)):
                assert row == len(slots)
                slots.append(in_pages(table, torch.arange(seen, device=table.device)))
                sees.append(seen)
        for chunk in metadata.prefill.chunks if metadata.prefill else ():
            request = chunk.token_to_seq[: chunk.total_seq_lens].long()
            key = torch.arange(chunk.total_seq_lens, device=request.device) - chunk.cu_seq_lens[request]
            gathered = chunk.block_table[request, key // _PAGE].long() * _PAGE + key % _PAGE
            assert chunk.token_start == len(slots)
            for begin, end in zip(chunk.cu_seqlen_ks.tolist(), chunk.cu_seqlen_ke.tolist(), strict=True):
                slots.append(gathered[begin:end])
                sees.append(end - begin)
        table = torch.nn.utils.rnn.pad_sequence(slots, batch_first=True)
        return scores.gather(1, table), torch.tensor(sees, device=scores.device)


def decoded(metadata: Any) -> list[tuple[torch.Tensor, int]]:
    """(block table row, number of keys) of each row of decodes: native ones are [requests, rows of each]."""
    decode, found = metadata.decode, []
    lens = decode.decode_lens.tolist()
    for request, table in enumerate(decode.block_table):
        seen = decode.seq_lens[request].tolist()
        # A request with fewer rows is padded in front of the kernel, and behind its rows.
        found += [(table, each) for each in seen[: lens[request]]]
    return found[: metadata.num_decode_tokens]


def in_pages(table: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Slots of the keys of a request with this row of a block table."""
    return table[key // _PAGE].long() * _PAGE + key % _PAGE


class ShortDecodes(Metadata):
    """A bug: rows of decodes see one key less."""

    def built(self, plan: KernelPlan, rows: int) -> Any:
        metadata = super().built(plan, rows)
        if metadata.decode is not None:
            metadata.decode.seq_lens = metadata.decode.seq_lens - 1
        return metadata


class FirstTable(Metadata):
    """A bug: all rows of decodes have the block table of the first."""

    def built(self, plan: KernelPlan, rows: int) -> Any:
        metadata = super().built(plan, rows)
        if metadata.decode is not None:
            metadata.decode.block_table = metadata.decode.block_table[:1].expand_as(metadata.decode.block_table)
        return metadata


class ChunkFromZero(Metadata):
    """A bug: rows of a chunk of prefill begin with the keys of the chunk's first request."""

    def built(self, plan: KernelPlan, rows: int) -> Any:
        metadata = super().built(plan, rows)
        for chunk in metadata.prefill.chunks if metadata.prefill else ():
            chunk.cu_seqlen_ks = torch.zeros_like(chunk.cu_seqlen_ks)
        return metadata

"""vLLM's Triton kernels of DeepSeek V4's compressor, by the contract.

PYTHONPATH=tests/kernels attn-testkit run --backend vllm_compressor:CompressorOfDeepSeekV4
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from alone import VLLM, Given, load

from attn_testkit.contract import (
    Bounds,
    Capabilities,
    Compressor,
    CompressorBackend,
    CompressorLayer,
    ForwardBatch,
    ForwardMode,
    HeadShapes,
    KVPools,
    Needs,
    Precision,
    Promises,
    ServerConventions,
)

_MODES = frozenset({ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY})
_OPS = "vllm.models.deepseek_v4.common.ops"
_ROW, _SCALES, _ROPE, _TILE = 576, 8, 64, 64


class _Launcher:
    """The class around a kernel, which compiles it when a server starts."""

    def __class_getitem__(cls, key: object) -> type[_Launcher]:
        return cls


_HELPERS = {"LaunchSpec": object, "TritonWarmupTensor": object, "VllmTritonJitKernel": _Launcher}
_HELPERS |= {"triton_scalar_specialization_rep": int}
_GIVEN: Given = {
    **VLLM,
    "vllm.model_executor.warmup.jit_warmup": {"kernel_launcher": lambda call: call, "zip_inputs": zip},
    "vllm.model_executor.warmup.jit_warmup_triton_helper": _HELPERS,
    "vllm.transformers_utils.deepseek_v4_utils": {"get_compress_ratios": lambda config: ()},
    "vllm.utils.deep_gemm": {"mqa_logits_use_mx_scales": lambda: False},
    "vllm.utils.import_utils": {"has_cutedsl": lambda: False},
    "vllm.utils.math_utils": {
        "next_power_of_2": lambda number: 1 << (number - 1).bit_length(),
        "round_up": lambda number, to: -(-number // to) * to,
        "cdiv": lambda number, by: -(-number // by),
    },
    "vllm.v1.attention.ops.common": {"pack_ue8m0_x4": None},
}


class CompressorOfDeepSeekV4(CompressorBackend):
    """``save_partial_states``, ``get_compressed_slot_mapping`` and ``compress_norm_rope_store_triton``. States have the
    pages of the KV pool; vLLM keeps them in smaller pages of their own."""

    capabilities = Capabilities(
        eager=_MODES,
        graph={ForwardMode.DECODE, ForwardMode.TARGET_VERIFY},
        bounds=Bounds(max_q_rows=8, max_topk=1),
        heads=HeadShapes(families={"compressor"}, gqa_ratios={1}, head_dims={512}),
        precision=Precision(dtypes={"bf16"}),
        kv_pool=KVPools(page_sizes={128, 256}),
        compressor=Compressor(ratios={128}, overlapping_ratios={4}, rows={"fp8_ds_mla_v4"}),
        needs=Needs(cpu_seq_lens=False),
        promises=Promises(deterministic=True),
        # Padded rows have no slot, and all three kernels skip them.
        server=ServerConventions(padding_slots={-1}),
    )

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Compute page tables and first rows, and the request of each row."""
        bs, rows, page = batch.batch_size, batch.input_ids.shape[0], self.context.page_size
        if batch.forward_mode is ForwardMode.EXTEND:
            assert batch.extend_seq_lens is not None
            counts = batch.extend_seq_lens.long()
        else:
            counts = torch.full((bs,), rows // max(bs, 1), device=batch.seq_lens.device)
        self.ends = counts.cumsum(0)
        row = torch.arange(rows, device=self.ends.device)
        self.request = torch.searchsorted(self.ends, row, right=True).clamp(max=bs - 1).int()
        self.starts = torch.cat([self.ends.new_zeros(1), self.ends]).int()
        self.pages = (self.context.req_to_token[batch.req_pool_indices.long(), ::page] // page).int().contiguous()

    def compress(
        self, kv: torch.Tensor, score: torch.Tensor, layer: CompressorLayer, batch: ForwardBatch
    ) -> torch.Tensor:
        """Launch the three kernels, and return what the pool holds."""
        assert self.context.compressor is not None
        assert layer.ape is not None
        pool, page, ratio = self.context.compressor.pool, self.context.page_size, layer.compress_ratio
        count, width, rows = len(kv), layer.width, page // ratio
        states = pool.get_states(layer.layer_id).view(-1, page, 2 * width)
        positions, slots = batch.positions.long(), batch.out_cache_loc.long()
        if count == 0:
            return kv[:, : layer.head_dim]
        saving = load(f"{_OPS}.save_partial_states", _GIVEN).SavePartialStatesKernel.kernel
        saving[(count,)](
            kv, kv.stride(0), score, score.stride(0), layer.ape, layer.ape.stride(0), positions, states,
            states.stride(0), states.stride(1), slots, page, HEAD_SIZE=width, TRITON_BLOCK_SIZE=width,
            STATE_WIDTH=width, COMPRESS_RATIO=ratio,
        )  # fmt: skip
        target = self.compressed_slots(positions, slots, rows, ratio)
        pages = pool.get_rows(layer.layer_id)
        cache = pages.as_strided((len(pages), rows, _ROW + _SCALES), (pages.stride(0), _ROW + _SCALES, 1))
        load(f"{_OPS}.fused_compress_quant_cache", _GIVEN).compress_norm_rope_store_triton(
            states, count, self.request, positions, slots, self.pages, page, width, self.context.compressor.rope,
            cache, SimpleNamespace(slot_mapping=target), {}, layer.head_dim, _ROPE, ratio, layer.overlaps, False,
            layer.norm_weight, layer.norm_eps, _TILE, _ROW, _SCALES,
        )  # fmt: skip
        return self.stored(layer, target, rows).to(kv.dtype)

    def compressed_slots(self, positions: torch.Tensor, slots: torch.Tensor, rows: int, ratio: int) -> torch.Tensor:
        """[T] int64: compressed row of each token, -1 for one that completes no group."""
        utils: Any = load("vllm.v1.attention.backends.mla.compressor_utils", _GIVEN)
        found = torch.full((len(slots),), -1, dtype=torch.int64, device=slots.device)
        # Lengths with the rows of this step. Requests without rows have no last one, and are skipped.
        lens = positions[(self.ends - 1).clamp(min=0)].int() + 1
        kernel = utils.CompressedSlotMappingKernel.kernel
        kernel[(len(lens),)](
            found, slots, self.starts, lens, self.pages, self.pages.stride(0), rows, 1, 1, COMPRESS_RATIO=ratio,
            PAD_ID=-1, TRITON_BLOCK_SIZE=1024,
        )  # fmt: skip
        return found

    def stored(self, layer: CompressorLayer, target: torch.Tensor, rows: int) -> torch.Tensor:
        """[T, D] float32: what the pool holds, and zeros for tokens that complete no group."""
        assert self.context.compressor is not None
        pool = self.context.compressor.pool
        packed, at = pool.packed(layer), target.clamp(min=0)
        assert packed is not None
        planes = pool.get_row_planes(layer.layer_id)
        raw = torch.cat([plane[at // rows, at % rows] for plane in planes], -1)
        return torch.where((target >= 0)[:, None], packed.unpack(raw), 0.0)

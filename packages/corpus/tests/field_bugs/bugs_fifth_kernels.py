"""Bugs of the fifth set inside a Triton kernel."""

from __future__ import annotations

from fifth_parents_triton import Packed

from attn_testkit_corpus.faults.catalogue import bug, helper


@bug("vllm #57614", "decode-mha2-d64-bf16-p32-k600.70.12-contiguous-shifted-w46-sink-b4nan", execution="graph")
class SixteenSlotPages(Packed):
    """Pages of 32 slots are read as if they had 16."""

    def arguments(self, layer):
        return {"SLOTS": 16}


@bug("flashinfer #5090", "target-verify-gqa2x2-d128-fp16-p16-k0.1.16-chain7-reversed-negative-w0-cap1.5-sink-b6stale")
class UnmaskedTail(Packed):
    """Keys behind a request's last one are zeros, and are not masked: each has a weight of exp(0)."""

    def arguments(self, layer):
        return {"MASKS_TAIL": False}


@bug(
    "flash-attention #1155",
    "decode-gqa2x2-d64-fp16-p16-k7x2-contiguous-shifted-w0-cap1.5-sink-b3stale",
    "completes",
    execution="graph",
)
class ZeroLenStore(Packed):
    """Without keys a whole tile of rows is stored."""

    def arguments(self, layer):
        return {"STORES_EMPTY": True}


@bug("FreeToken #177", "decode-gqa24x2-d64-bf16-p16-k70.33.1-shuffled-gauss-w40-cap1.5-sink-b3prod")
class HeadTilesCross(Packed):
    """Groups of more than 16 heads are cut into tiles of 16, and a tile may reach into the next KV head's group."""

    capabilities = Packed.capabilities.with_changes(heads={"gqa_ratios": {2, 8, 20, 24}})

    @helper
    def tiles(self, layer):
        return -(-layer.q_per_kv // 16) if layer.q_per_kv > 16 else 0

    def arguments(self, layer):
        return {"TILES_OF_HEADS": self.tiles(layer)}

    def grid(self, plan):
        tiles = self.tiles(plan.layer)
        requests, blocks, heads = super().grid(plan)
        return (requests, plan.max_q_len, heads * tiles) if tiles else (requests, blocks, heads)


@bug(
    "pytorch #151359",
    "target-verify-gqa6x2-d128-fp16-p32-k0.1.32-chain4-shared-gauss-cap1.5-sink-b4nan",
    "completes",
)
class PowerOfTwoGroups(Packed):
    """A tile has as many rows as a group has heads, which has to be a power of two."""

    def arguments(self, layer):
        return {"ROWS": layer.q_per_kv}

    def grid(self, plan):
        return len(plan.kv_lens), plan.max_q_len, plan.layer.tp_k_head_num

"""``triton_state`` with bugs that kernels have: grids, offsets, strides and masks, by arguments of launches."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

from attn_testkit.backends.triton_state import TritonStateBackend
from attn_testkit.contract import BackendContext, ForwardBatch, State, StateLayer

SMALL = TritonStateBackend.capabilities.with_changes(
    heads={"gqa_ratios": {2}, "head_dims": {64}},
    precision={"dtypes": {"bf16"}},
    state=State(k_dims={64}, strided=True, snapshots={16}),
)


class Healthy(TritonStateBackend):
    """No bug, with few capabilities."""

    capabilities = SMALL


class PaddedProgramsWriteSlot0(TritonStateBackend):
    """A program of a padded request does not return: -1 becomes slot 0 (tokenspeed #700)."""

    capabilities = SMALL

    @override
    def of_requests(self, batch: ForwardBatch) -> tuple[torch.Tensor, ...]:
        self.lowest = 0
        first, counts, slots, *rest = super().of_requests(batch)
        return first, counts, slots.clamp(min=0), *rest


class StridesByTheShape(TritonStateBackend):
    """The offset of a slot is a product of the shape, where slots lie apart (sglang #33665)."""

    capabilities = SMALL

    @override
    def strides(self, layer: StateLayer) -> dict[str, Any]:
        return super().strides(layer) | {"pool_slot": layer.v_heads * layer.v_dim * layer.k_dim}


class LastTileOfValuesUnmasked(TritonStateBackend):
    """Values are counted up to whole tiles: the last tile of a head is the first values of the next one."""

    capabilities = SMALL.with_changes(heads={"head_dims": {96}})

    @override
    def sizes(self, layer: StateLayer) -> dict[str, int]:
        return super().sizes(layer) | {"BLOCK_V": 64, "LAST": 128}


class GridOfTheFirstRequest(TritonStateBackend):
    """The loop over rows has the length of the batch's first request."""

    capabilities = SMALL

    @override
    def of_requests(self, batch: ForwardBatch) -> tuple[torch.Tensor, ...]:
        first, counts, *rest = super().of_requests(batch)
        return first, torch.minimum(counts, counts[:1]), *rest


class FlagOfTheNextRequest(TritonStateBackend):
    """Programs are counted from 1, and flags from 0."""

    capabilities = SMALL

    @override
    def of_requests(self, batch: ForwardBatch) -> tuple[torch.Tensor, ...]:
        first, counts, slots, begun, *rest = super().of_requests(batch)
        return first, counts, slots, begun.roll(1), *rest


class ScratchBySlot(TritonStateBackend):
    """The commit reads the scratch by the slot of a request, and the verify writes it by its place (sglang #26829)."""

    capabilities = SMALL

    @override
    def copy_nodes(self, pool: torch.Tensor, scratch: torch.Tensor, steps: torch.Tensor, slots: torch.Tensor) -> None:
        by_slot = scratch[slots.long().clamp(min=0) % len(scratch)]
        super().copy_nodes(pool, by_slot, steps, slots)


class SlotsKeptFromTheCapture(TritonStateBackend):
    """Graphs launch with a copy of the slots that was made before the capture."""

    capabilities = SMALL

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.kept: dict[int, torch.Tensor] = {}

    @override
    def of_requests(self, batch: ForwardBatch) -> tuple[torch.Tensor, ...]:
        first, counts, slots, *rest = super().of_requests(batch)
        return first, counts, self.kept.get(len(slots), slots), *rest

    @override
    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(batch, in_capture)
        assert batch.state is not None
        if in_capture:
            self.kept[batch.batch_size] = batch.state.indices.clone()

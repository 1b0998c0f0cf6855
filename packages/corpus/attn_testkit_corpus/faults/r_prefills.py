"""Seeded bugs of class R: prefills of recurrent states whose last tile or grid is too large."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_testkit.contract import ForwardBatch, ForwardMode, StateLayer

from .catalogue import fault, helper
from .states import StateParent


@fault(
    "vllm-ascend #10276",
    "finite",
    "behind the last one",
    modes="extend",
    modelled="upstream a kernel of Lightning; here the keys of the last tile are added with weights of 0",
)
class RowsBehindAPromptNotCleared(StateParent):
    """Rows after a prompt in its last tile of 64 are loaded and count with a weight of 0, but 0 * NaN is NaN."""

    tile = 64

    def forward(  # type: ignore[override]
        self,
        mixed: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        layer: StateLayer,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        self.weighted = None
        if batch.forward_mode is ForwardMode.EXTEND and len(mixed):
            self.weighted = self.rows_behind(mixed)
        return super().forward(mixed, a, b, layer, batch)

    @helper
    def rows_behind(self, mixed: torch.Tensor) -> torch.Tensor:
        """[bs]: 0 times the sum of the rows in the last tile of each request that come after the request's."""
        elements = mixed.untyped_storage().nbytes() // mixed.dtype.itemsize - mixed.storage_offset()
        rows = min(len(mixed) + self.tile, (elements - mixed.shape[1]) // mixed.stride(0) + 1)
        memory = mixed.as_strided((rows, mixed.shape[1]), mixed.stride())
        place = torch.arange(self.tile, device=mixed.device)
        row = self.counts.cumsum(0)[:, None] + place
        loaded = (place < (-self.counts % self.tile)[:, None]) & (row < rows)
        weighted: torch.Tensor = memory[row.clamp(max=rows - 1)].float() * 0.0
        return weighted.masked_fill(~loaded[..., None], 0.0).sum((1, 2))

    def kept_state(self, before: torch.Tensor, after: torch.Tensor, token: int) -> torch.Tensor:
        return after if self.weighted is None else after + self.weighted[:, None, None, None]

    def read(self, before: torch.Tensor, after: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        read = super().read(before, after, q)
        return read if self.weighted is None else read + self.weighted[:, None, None]


@fault(
    "flash-linear-attention #1077",
    "completes",
    modes="extend",
    modelled="upstream a Triton kernel, whose launch fails; here the error is raised",
)
class GridOfRequestsAndValueHeads(StateParent):
    """A prefill launches a block for each request and value head on an axis of a grid that is limited to 65,535."""

    launched_in = ForwardMode.EXTEND
    capabilities = StateParent.capabilities.with_changes(
        heads={"families": {"gdn"}, "head_dims": {16}},
        eager={ForwardMode.DECODE, ForwardMode.EXTEND},
        graph={ForwardMode.DECODE},
        state=replace(StateParent.declared_state(), k_dims=frozenset({16}), dtypes=frozenset({"bf16"})),
    )

    def forward(  # type: ignore[override]
        self,
        mixed: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        layer: StateLayer,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        if batch.forward_mode is self.launched_in and batch.batch_size * layer.v_heads > 65_535:
            raise RuntimeError("Triton Error [CUDA]: invalid argument")
        return super().forward(mixed, a, b, layer, batch)


@fault(
    "vLLM #52030",
    "completes",
    modes="decode",
    modelled="upstream a Triton kernel, whose launch fails; here the error is raised",
)
class GridOfDecodesAndValueHeads(GridOfRequestsAndValueHeads):
    """A decode launches a block for each request and value head on an axis of a grid that is limited to 65,535."""

    launched_in = ForwardMode.DECODE


@fault(
    "sglang #35197",
    "steps-independent",
    "an earlier step is kept",
    modes="extend",
    executions="eager",
    modelled="upstream the norm of keys is compiled at the first prefill, and its size of one row is folded into it; "
    "here later prefills have outputs of 0",
)
class FirstRowsArePartOfTheKernel(StateParent):
    """A prefill of a single row, if it is the first of an instance, makes a kernel that later prefills use."""

    rows = 0

    def token(
        self, rows: torch.Tensor, state: torch.Tensor, gates: tuple[torch.Tensor, torch.Tensor], layer: StateLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        after, read = super().token(rows, state, gates, layer)
        return after, read * 0 if self.rows == 1 and self.total > 1 else read

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        self.total = len(batch.input_ids)
        if batch.forward_mode is ForwardMode.EXTEND and not self.rows:
            self.rows = self.total


@fault("flashinfer #4351", "completes", "8 heads", modes="decode extend")
class GatesInBoxesOfEightHeads(StateParent):
    """Gates are loaded in boxes of 8 heads. Fewer heads are padded to a box, and 12 are not."""

    def gates(
        self, a: torch.Tensor | None, b: torch.Tensor | None, layer: StateLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer.v_heads > 8 and layer.v_heads % 8:
            raise ValueError(f"a row of {layer.v_heads} gates does not fill boxes of 8 heads")
        return super().gates(a, b, layer)

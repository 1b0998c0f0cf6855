"""Class R: published bugs of lengths and of batches without requests, reproduced unchanged."""

from __future__ import annotations

import torch

from attn_testkit.contract import ForwardBatch, StateLayer

from .catalogue import fault
from .states import StateParent

_NODES = 4


@fault(
    "vLLM #49918 (#47123)",
    "state-matches-oracle conv-window-exact state-counts-tokens",
    modes="extend",
    modelled=f"upstream a prompt of 1 + S tokens replays the graph of verifies; here one of {_NODES} stores nothing",
)
class PromptAsLongAsADraftNotStored(StateParent):
    """A prompt with as many tokens as a draft has nodes is treated as a draft, so its state is never written."""

    def stores(self, batch: ForwardBatch) -> torch.Tensor:
        live = super().stores(batch)
        return live if batch.extend_seq_lens is None else live & (batch.extend_seq_lens != _NODES)


@fault("vllm-ascend #10901 (vLLM #37728)", "writes-own-state captures-cleanly", modes="decode", executions="graph")
class IdleReplayWritesStaleWindows(StateParent):
    """A replay without a live request keeps the slots of the replay before it, and writes their windows."""

    held: torch.Tensor | None = None
    """[bs] int64: slots of the last replay that had a live request."""

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(batch, in_capture)
        assert batch.state is not None
        if self.held is None:
            self.held = torch.zeros(self.context.max_bs, dtype=torch.int64, device=batch.seq_lens.device)
        slots = batch.state.indices.clamp(min=0).long()
        now = self.held[: len(slots)]
        now.copy_(torch.where((slots > 0).any(), slots, now))

    def forward(  # type: ignore[override]
        self,
        mixed: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        layer: StateLayer,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        out = super().forward(mixed, a, b, layer, batch)
        if self.held is not None:
            conv, slots = self.pools(layer)[0], self.held[: len(self.index)]
            idle = ~self.live.any() & (slots > 0)
            conv[slots] = conv[slots].masked_fill(idle[:, None, None], 0.0)
        return out


@fault(
    "Avarok atlas #604",
    "state-matches-oracle conv-window-exact state-counts-tokens",
    modes="target-verify",
    modelled="upstream the scratch held zeros; here it holds NaN",
)
class CommitsANodeThatWasNeverWritten(StateParent):
    """The verify leaves out the last node of a draft, and a commit of that node copies old contents of the scratch."""

    def note(self, layer: StateLayer, token: int, window: torch.Tensor, state: torch.Tensor) -> None:
        if token < self.most - 1:
            super().note(layer, token, window, state)

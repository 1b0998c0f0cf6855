"""Knowledge of the mode of a step, which kernels of servers have and the bundled backends do not need."""

from __future__ import annotations

from attn_testkit.contract import AttentionBackend, ForwardBatch, ForwardMode


class KnowsMode(AttentionBackend):
    """Notes the mode of its step, before a healthy parent that comes after it plans the step."""

    mode = ForwardMode.DECODE

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        self.mode = batch.forward_mode
        super().init_forward_metadata_in_graph(batch)

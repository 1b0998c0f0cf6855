"""Bugs of layers with a recurrent state, put back into SGLang's classes of 0.5.23: what the kit says of each.

    PYTHONPATH=packages/servers/tests/bridges attn-testkit run --backend sglang_state_bugs:StaleSlots --mode decode

Each changes one object of SGLang's, and nothing of how it is driven. Importing this imports SGLang.
"""

from __future__ import annotations

from typing import Any

import torch

from attn_testkit.contract import BackendContext, StateInput
from attn_testkit_servers.bridges.sglang import backend_class

GDN: Any = backend_class("gdn")


class StaleSlots(GDN):
    """The slots that a graph reads are those of its capture: a replay fills other memory."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.of_capture: list[torch.Tensor] = []

    def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:
        linear = self.real.linear_attn_backend
        if not in_capture:
            self.of_capture = self.of_capture or linear.state_indices_list
            linear.state_indices_list = [each.clone() for each in linear.state_indices_list]
        super().init_forward_metadata_out_graph(batch, in_capture)


class PaddingClamped(GDN):
    """tokenspeed #700, merged: the index -1 of a padded request is clamped to 0, and slot 0 is written."""

    def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(batch, in_capture)
        if not in_capture:
            self.real.linear_attn_backend.state_indices_list[batch.batch_size - 1].clamp_(min=0)


class TrackedPrefixes(GDN):
    """sglang #29368, merged: a prefix counts only if the request is tracked, so prefix hits begin from zeros."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        linear = self.real.linear_attn_backend
        right = linear._convolve_prefill

        def wrong(layer: Any, batch: Any, *rest: Any) -> Any:
            had, batch.extend_prefix_lens = batch.extend_prefix_lens, torch.zeros_like(batch.extend_prefix_lens)
            try:
                return right(layer, batch, *rest)
            finally:
                batch.extend_prefix_lens = had

        linear._convolve_prefill = wrong


class NothingCommitted(GDN):
    """sglang #26351, merged: with drafts of an n-gram table nobody commits the accepted states."""

    def commit(self, steps: torch.Tensor, state: StateInput) -> None:
        pass


class WindowNotRolledBack(GDN):
    """mlx-swift-lm #218: the state of the last accepted node is restored, and the window is that of the whole draft."""

    def commit(self, steps: torch.Tensor, state: StateInput) -> None:
        held = self.runner.req_to_token_pool.mamba_pool.mamba_cache.conv[0]
        before = held.clone()
        super().commit(steps, state)
        held.copy_(before)


class ScratchBySlot(GDN):
    """sglang #26829: verify writes its scratch by the place of a request, and the commit reads it by the slot."""

    def commit(self, steps: torch.Tensor, state: StateInput) -> None:
        pool = self.runner.req_to_token_pool
        slots = self.real.linear_attn_backend.forward_metadata.mamba_cache_indices[: len(steps)]
        right, pool.get_mamba_indices = pool.get_mamba_indices, lambda rows: slots
        stable = self.real.update_mamba_state_after_mtp_verify.__globals__
        enabled, stable["pp_spec_stable_rows_enabled"] = stable["pp_spec_stable_rows_enabled"], lambda: True
        try:
            rows = slots.clamp(min=0).long() % (pool.size + 1)
            self.real.update_mamba_state_after_mtp_verify(
                last_correct_step_indices=steps.long(), mamba_track_indices=None, mamba_steps_to_track=None,
                model=self.runner.model, req_pool_indices=rows,
            )  # fmt: skip
        finally:
            pool.get_mamba_indices, stable["pp_spec_stable_rows_enabled"] = right, enabled

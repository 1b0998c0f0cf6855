"""Bugs of hand-overs and of HiCache, put back into SGLang's code of 0.5.23: what the kit says of each.

    PYTHONPATH=packages/servers/tests/bridges attn-testkit run --backend sglang_transfer_bugs:OneSlice --mode decode

Each changes one function or object of SGLang's, and nothing of how it is driven. Importing this imports SGLang.
"""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

import torch

from attn_testkit.contract import HandOver, Transfer
from attn_testkit_servers.bridges.sglang import backend_class

Received: Any = backend_class("torch_native_pd")
Hybrid: Any = backend_class("gdn_hybrid_pd")
HiCache: Any = backend_class("torch_native_hicache")

# Modules of SGLang are imported after the bridge has prepared the process.
utils = importlib.import_module("sglang.srt.disaggregation.utils")
staging_buffer = importlib.import_module("sglang.srt.disaggregation.common.staging_buffer")

_right_heads, _right_blocks = staging_buffer.compute_head_slice_params, utils.compute_mamba_state_slice_blocks


class HeadsInTurn(Received):
    """sglang #23746, fixed by #30997: ranks that share a KV head get the sender's heads in turn."""

    def receive(self, handed: HandOver) -> None:
        """Map ranks by their number modulo the sender's heads."""

        def wrong(
            src_attn_tp_size: int, dst_attn_tp_size: int, src_tp_rank: int, dst_tp_rank: int, total_kv_heads: int
        ) -> tuple[int, int, int, int]:
            sizes = src_attn_tp_size, dst_attn_tp_size
            first, count, to, same = _right_heads(*sizes, src_tp_rank, dst_tp_rank, total_kv_heads)
            if src_attn_tp_size <= dst_attn_tp_size:
                first = dst_tp_rank * count % max(1, total_kv_heads // src_attn_tp_size)
            return first, count, to, same

        with mock.patch.object(staging_buffer, "compute_head_slice_params", wrong):
            super().receive(handed)


class OneSlice(Hybrid):
    """sglang #23746, fixed by #30997: the window of a convolution is cut as one part, across q, k and v."""

    def receive(self, handed: HandOver) -> None:
        """Forget the parts."""

        def wrong(**given: Any) -> Any:
            return _right_blocks(**given | {"conv_shard_groups": None})

        with mock.patch.object(utils, "compute_mamba_state_slice_blocks", wrong):
            super().receive(handed)


class NoFence(HiCache):
    """sglang #36738: pages come back while a forward on another stream still uses their slots."""

    def reload(self, transfer: Transfer) -> torch.cuda.Event | None:
        """Do not name the stream of forwards."""
        controller = self.hicache.controller
        right = controller.start_loading

        def wrong() -> Any:
            controller.load_fence_stream = None
            return right()

        with mock.patch.object(controller, "start_loading", wrong):
            event: torch.cuda.Event | None = super().reload(transfer)
        return event


class NoWait(HiCache):
    """sglang #22811: keys are read without a wait for the pages of their layer."""

    def reload(self, transfer: Transfer) -> torch.cuda.Event | None:
        """Load for no batch."""
        event: torch.cuda.Event | None = super().reload(transfer)
        self.hicache.controller.layer_done_counter.set_consumer(-1)
        return event

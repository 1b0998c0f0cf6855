"""Bugs that SGLang has had, put back into its class of 0.5.23: what the kit says of each.

    PYTHONPATH=packages/servers/tests/bridges attn-testkit run --backend sglang_bugs:DoubleCount --mode draft-extend-v2

Each changes one object of SGLang's, and nothing of how it is driven. Importing this imports SGLang.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

from attn_testkit.contract import BackendContext, ForwardBatch
from attn_testkit_servers.bridges.sglang import backend_class

Triton: Any = backend_class("triton")
# Imported after the bridge has prepared the process.
get_parallel: Any = importlib.import_module("sglang.srt.runtime_context").get_parallel


class DoubleCount(Triton):
    """sglang #26512: in a graph of draft-extend v2 the prefix counts the new rows, which are attended once more."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        right = self.real._update_draft_extend_buffers

        def wrong(plan: Any, bs: int, seq_lens: Any, mode: Any, spec_info: Any, rows: Any) -> Any:
            return right(plan, bs, seq_lens, mode, None, rows)

        self.real._update_draft_extend_buffers = wrong


class PackedOffsets(Triton):
    """sglang #21987: a graph of N rows a request is replayed with the offsets of the accepted ones."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        right = self.real._update_draft_extend_buffers

        def wrong(plan: Any, bs: int, seq_lens: Any, mode: Any, spec_info: Any, rows: Any) -> Any:
            made = right(plan, bs, seq_lens, mode, spec_info, rows)
            self.real.qo_indptr[1 : bs + 1] = spec_info.num_accept_tokens[:bs].cumsum(0)
            return made

        self.real._update_draft_extend_buffers = wrong


class FreshTensor(Triton):
    """sglang #26019 (in review): a replay makes new offsets where the graph goes on reading the old ones."""

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        if not in_capture:
            self.real.kv_indptr = self.real.kv_indptr.clone()
        super().init_forward_metadata_out_graph(batch, in_capture)


class StaleMask(Triton):
    """sglang #32920 and before: the mask that the graph reads keeps the tree of another batch."""

    verify_mask = None

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.captures = True
        right = self.real._update_target_verify_buffers

        def wrong(plan: Any, bs: int, seq_lens: Any, spec_info: Any, rows: Any) -> Any:
            if not self.captures:
                spec_info = SimpleNamespace(**vars(spec_info))
                spec_info.custom_mask = None
            return right(plan, bs, seq_lens, spec_info, rows)

        self.real._update_target_verify_buffers = wrong

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        self.captures = in_capture
        super().init_forward_metadata_out_graph(batch, in_capture)


class NoWindowInDraftExtend(Triton):
    """sglang #29858: a replay of draft-extend v2 fills no list of keys for the layers that have a window."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        right = self.real._update_draft_extend_buffers

        def wrong(*given: Any) -> Any:
            window, self.real.sliding_window_size = self.real.sliding_window_size, None
            try:
                return right(*given)
            finally:
                self.real.sliding_window_size = window

        self.real._update_draft_extend_buffers = wrong


class HeadsOfServerRanks(Triton):
    """sglang #25031, there in the class of FlashAttention 3: the heads of a rank are those of the model divided by the
    ranks of the server, and not by those of attention, so the scratch of a decode has too few.
    """

    def __init__(self, context: BackendContext) -> None:
        ranks = dict.fromkeys(("tp_size", "attn_tp_size", "moe_tp_size"), context.tp_size)
        with get_parallel().override(**ranks, attn_dp_size=1):
            super().__init__(context)


# What SGLang offers, and the bridge does not declare: it is wrong in 0.5.23.


class WindowsInDecode(Triton):
    """sglang #32087: the list of keys of a decode is one short of the window."""

    capabilities = Triton.capabilities.with_changes(windows=Triton.capabilities.windows.modes | {"decode"})


class FP8(Triton):
    """sglang #22277: layers that share KV read FP8 rows back, which the extend kernel does not take."""

    capabilities = Triton.capabilities.with_changes(
        kv_pool={"kv_dtypes": {"fp8_e4m3"}},
        precision={
            "matmul_dtype": "fp8_e4m3",
            "new_rows_as_given": {"target-verify", "draft-extend", "draft-extend-v2", "extend"},
        },
    )

"""Five backends that are right in eager mode and wrong, or not capturable, under a CUDA graph.

Each makes a mistake that cost servers days of debugging. ``attn-testkit run --backend
attn_testkit.examples.graph_faults:ReallocatedMetadata --device cpu`` shows the kit's report.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..contract import BackendContext, ForwardBatch, KernelPlan
from .minimal import MinimalBackend
from .packed_stride import PackedStrideBackend as PackedStrideBackend

_DECODE = MinimalBackend.capabilities.with_changes(
    eager={"decode"}, graph={"decode"}, bounds={"max_q_rows": 1, "max_topk": 0}
)


class _Planned(MinimalBackend):
    """Healthy parent: page table and lengths live in buffers that are filled outside the graph."""

    capabilities = _DECODE

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the buffers of all graphs."""
        context = self.context
        self.lens = torch.zeros(max_bs, dtype=torch.int32, device=context.device)

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        """Fill them in place."""
        self.lens[: batch.batch_size].copy_(batch.seq_lens[: batch.batch_size])

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Eager needs no buffer."""
        self.eager_lens = batch.seq_lens.to(torch.int32)
        super().init_forward_metadata_in_graph(batch)
        self._use(self.eager_lens)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Use the buffers, which the captured kernel reads."""
        super().init_forward_metadata_in_graph(batch)
        self._use(self.lens[: batch.batch_size])

    def _use(self, lens: torch.Tensor) -> None:
        self._kit_step = replace(self._kit_step, kv_lens=lens)


class ReallocatedMetadata(_Planned):
    """New tensors are made at each replay instead of filling the old ones; the graph still reads the old address (vLLM
    #35175)."""

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        """Make the mistake: assign a tensor instead of calling copy_."""
        self.lens = batch.seq_lens.to(torch.int32, copy=True)


class BakedMaxLength(_Planned):
    """The longest length of the batch, as a Python number, decides how many slots the captured kernel looks at.

    At capture every length is the fill value, so that number is one page (TensorRT-LLM #17273, vLLM #41834).
    """

    capabilities = _DECODE.with_changes(needs={"cpu_seq_lens": True})
    max_len = 0

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        """Take the longest length. It is right at every step, and has no effect on a captured graph."""
        super().init_forward_metadata_out_graph(batch, in_capture)
        assert batch.seq_lens_cpu is not None
        self.max_len = int(batch.seq_lens_cpu[: batch.batch_size].max())

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Take the longest length of an eager batch."""
        assert batch.seq_lens_cpu is not None
        self.max_len = int(batch.seq_lens_cpu.max())
        super().init_forward_metadata(batch)

    def visible(self, q: torch.Tensor, plan: KernelPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Only whole pages up to the longest request."""
        request, visible = super().visible(q, plan)
        slots = -(-self.max_len // plan.page_size) * plan.page_size
        visible[:, slots:] = False
        return request, visible


class HostRead(_Planned):
    """Reads a length on the host inside the captured region, which is allowed in eager mode
    (``eager_without_waits=False``)."""

    capabilities = _DECODE.with_changes(server={"eager_without_waits": False})

    def visible(self, q: torch.Tensor, plan: KernelPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """``.item()`` waits for the device, which a capture forbids."""
        request, visible = super().visible(q, plan)
        longest = int(plan.kv_lens.max().item())
        visible[:, longest:] = False
        return request, visible


class FreedWorkspace(_Planned):
    """A workspace that an eager batch replaces by a larger one; captured graphs still use the old one (vLLM #46067)."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.workspace = torch.zeros(0, device=context.device)

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        """Grow on demand, bucket by bucket."""
        super().init_forward_metadata_out_graph(batch, in_capture)
        self._grow(batch.batch_size)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Give an eager batch a larger workspace."""
        super().init_forward_metadata(batch)
        self._grow(batch.batch_size + 1)

    def _grow(self, rows: int) -> None:
        layer = self.context.layers[0]
        need = rows * layer.tp_q_head_num * layer.v_head_dim
        if self.workspace.numel() < need:
            self.workspace = torch.zeros(need, device=self.context.device)

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        """Copy the result through the workspace."""
        out = super().run(q, kv, plan)
        scratch = self.workspace[: out.numel()].view(out.shape)
        scratch.copy_(out)
        return scratch.to(out.dtype)


GRAPH_FAULTS = (PackedStrideBackend, ReallocatedMetadata, BakedMaxLength, HostRead, FreedWorkspace)

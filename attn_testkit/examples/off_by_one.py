"""A backend that forgets the last page when it is only partly filled: ``len // page`` where ``ceil`` was meant.

Run it::

    attn-testkit run --backend attn_testkit.examples:OffByOneBackend --device cpu
"""

from __future__ import annotations

import torch

from ..contract import KernelPlan
from .minimal import MinimalBackend


class OffByOneBackend(MinimalBackend):
    """Keys of a partly filled last page are missing. With 512 gaussian keys a tolerance of 3e-2 hides that."""

    capabilities = MinimalBackend.capabilities.with_changes(
        eager={"decode"}, graph={"decode"}, kv_pool={"page_sizes": {16}}, bounds={"max_q_rows": 1, "max_topk": 0}
    )

    def visible(self, q: torch.Tensor, plan: KernelPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots that the parent sees, cut after the last full page."""
        request, visible = super().visible(q, plan)
        full_pages = plan.kv_lens.clamp(min=plan.page_size) // plan.page_size
        slot = torch.arange(visible.shape[1], device=q.device)
        return request, visible & (slot < (full_pages * plan.page_size)[request, None])

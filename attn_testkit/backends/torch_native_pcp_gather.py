"""``torch_native_pcp`` that gathers k and v itself, with ``torch.distributed``, as a class of a server does."""

from __future__ import annotations

import torch
import torch.distributed as dist
from typing_extensions import override

from ..contract import ROW_ORDERS, AttentionLayer, ForwardBatch, PrefillRanks
from .torch_native_pcp import TorchNativePcpBackend


class TorchNativePcpGatherBackend(TorchNativePcpBackend):
    """Gathers k and v of the rows of all ranks, and puts them in the order of the batch."""

    capabilities = TorchNativePcpBackend.capabilities.with_changes(
        prefill_ranks=PrefillRanks(frozenset(ROW_ORDERS), gathers=True)
    )

    @override
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Plan the rows of the rank, and the place of each row of the batch among those that are gathered."""
        super().init_forward_metadata_in_graph(batch)
        if batch.pcp_rows is not None:
            # A rank without rows takes part, or the others would wait for it.
            self._total = len(batch.out_cache_loc)
            self._order = torch.argsort(self._gathered(batch.pcp_rows, self._total))[: self._total]

    @override
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Outputs of the rows of the rank, [T_r, Hq, Dv]; ``k`` and ``v`` have these rows, too."""
        if batch.pcp_rows is not None and save_kv_cache:
            k, v = (self._gathered(each, 0)[self._order] for each in (k, v))
        return super().forward(q, k, v, layer, batch, save_kv_cache, out=out)

    def _gathered(self, own: torch.Tensor, filler: int) -> torch.Tensor:
        """[R * T, ...]: rows of each rank, followed by ``filler`` up to T rows. Parts of a collective have one size."""
        padded = own.new_full((self._total, *own.shape[1:]), filler)
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in range(self.context.pcp_world_size)]
        dist.all_gather(parts, padded)
        return torch.cat(parts)

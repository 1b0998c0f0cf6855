"""Class S: sparse attention in pools and batches of servers: strides of pages, and lengths of padded requests."""

from __future__ import annotations

import math

import torch

from attn_testkit.contract import KernelPlan

from .catalogue import fault
from .sparse import SparseOfVLLM, SparseOfWidePages


@fault(
    "flashinfer #4362, merged (#3856); vLLM #47783",
    "reads-own-kv matches-oracle finite",
    modelled="upstream TMA rows of a sparse MLA kernel; here the address of a slot is its number times the width",
)
class PageStridesOfSelectedKeysIgnored(SparseOfWidePages):
    """A slot is addressed by its number times the width of a row, although pages of the pool are farther apart."""

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], plan: KernelPlan) -> torch.Tensor:
        tight = [each.as_strided(each.shape, [math.prod(each.shape[n + 1 :]) for n in range(4)]) for each in kv]
        return super().run(q, (tight[0], tight[1]), plan)


@fault(
    "flashinfer #5015",
    "completes",
    modes="target-verify draft-extend-v2",
    executions="graph",
    modelled="upstream a loop over an unsigned count does not end; here its last key is looked up in the page table",
)
class NegativeCountOfAPaddedRow(SparseOfVLLM):
    """A row counts its keys back from the length of its request, which is 0 for a padded one: 0 - 3 + 0 + 1 keys."""

    def prepared(self, selected: torch.Tensor, plan: KernelPlan) -> torch.Tensor:
        row, width = torch.arange(len(selected), device=selected.device), plan.max_q_len
        request = (row // width).clamp(max=len(plan.kv_lens) - 1)
        count = plan.kv_lens[request].long() - width + row % width + 1
        last = (count - 1) & 0x7FFFFFFF
        found = plan.slot_table[request].gather(1, last[:, None])
        return torch.where(found < 0, -1, selected)

"""Class B: output rows that belong to no request and are not finite, although a backend declares that they are."""

from __future__ import annotations

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer

from .b_empty_batches import LEAN
from .b_padded_tokens import SlotsOfTheForward
from .catalogue import fault
from .parent import Metadata


class FinitePaddingBackend(SlotsOfTheForward):
    """Healthy parent: padded requests have no key and get zeros, and rows after the last request get finite values."""

    capabilities = LEAN.with_changes(server={"takes_more_rows": True, "finite_padding": True})

    @override
    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 0


@fault(
    "vLLM #57094",
    "padding-finite",
    "0 / 0 is NaN",
    modes="decode",
    executions="graph",
    slug="padded-requests-without-keys-give-nan",
)
class PaddedRequestsWithoutKeysGiveNaN(FinitePaddingBackend):
    """The sum of the splits' weights of a padded request is 0, and its output is divided by it."""

    def combine(self, acc: torch.Tensor, lse: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        total = torch.exp(lse - lse.amax(1, keepdim=True).clamp(min=-3e38)).sum(1)
        return super().combine(acc, lse, layer) * (total / total)[..., None]


@fault(
    "general; outputs of vLLM are torch.empty, and a kernel writes num_actual_tokens rows",
    "padding-finite",
    "no program writes",
    modes="extend draft-extend",
    modelled="the rows are copied from memory that nothing wrote",
)
class RowsBehindTheLastRequestAreNotWritten(FinitePaddingBackend):
    """The output is allocated for all rows of q, but only rows of requests are written."""

    def scatter(self, out: torch.Tensor, meta: Metadata, tokens: int) -> torch.Tensor:
        whole = super().scatter(out, meta, tokens)
        of_requests = self.index[:tokens] < meta.cu_seqlens_q[-1]
        return torch.where(of_requests[:, None, None], whole, torch.empty_like(whole))

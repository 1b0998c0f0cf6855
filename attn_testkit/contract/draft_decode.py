"""``spec_info`` of draft-decode, and the place of a branch's tokens in the request table."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["DraftDecodeInput"]


@dataclass
class DraftDecodeInput:
    """``spec_info`` of draft-decode: K branches per request, S draft tokens per branch, S - 1 forwards of the model.

    The draft-extend before it gave the first token of each branch. The last token of a branch is not fed back. Forward
    i has bs * K rows: row ``b * K + j`` is branch j of request b, at position ``seq_lens[b] + i``. It sees the
    request's
    ``seq_lens[b]`` keys and its branch's tokens 0 .. i, itself the last of them: ``seq_lens[b] + i + 1`` keys.

    A branch is a row number, and its tokens are those in its slots. If a server's top-k selection lets branch 0
    continue branch 1, the server moves hidden states and leaves the KV in place.

    **The request table.** Branch 0 continues the prefix. With ``last = seq_lens % page_size``, each branch has a
    region of ``last + S`` columns, rounded up to pages: branch 0's begins at ``seq_lens - last``, and branch j's j
    regions later. Its first ``last`` columns are the prefix's last tokens; the server copies them for every branch
    but the first. So no two branches write into the same page, and all share the whole pages before.
    """

    topk: int
    """K; 1 for a chain."""
    num_steps: int
    """S, at least 2."""
    out_cache_loc: torch.Tensor
    """[bs * K * S] int64: KV slots of the whole draft, by request, branch and step; those of the last step stay unused.
    Slot 0 for padding. The view of a replay has live requests only, the graph's own static tensor all of its bucket."""
    step: int = 0
    """Number of the forward, 0 .. S - 2; 0 when the draft is planned."""

    @property
    def num_tokens_per_req(self) -> int:
        """K again: rows per request in each forward."""
        return self.topk

    def key_slots(
        self, table: torch.Tensor, seq_lens: torch.Tensor, page_size: int, keys: torch.Tensor
    ) -> torch.Tensor:
        """KV slots of the keys ``keys`` [n] int64 of each row: [bs * K, n], in the dtype of ``table``.

        ``table`` [bs, columns]: each request's row of ``req_to_token``. Slots past a row's keys may belong to any
        request. Device work of fixed shapes, so it may be captured.
        """
        last = seq_lens.long() % page_size
        shared = (seq_lens - last)[:, None, None]
        region = (last + self.num_steps + page_size - 1) // page_size * page_size
        branch = torch.arange(self.topk, device=seq_lens.device)
        columns = keys + (branch * region[:, None])[..., None] * (keys >= shared)
        found = table.gather(1, columns.flatten(1).clamp(max=table.shape[1] - 1))
        return found.view(-1, len(keys))

"""The tables that a step's numbers are looked up in: one piece of device memory, filled by one transfer."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from attn_testkit.cases.data import HIDDEN
from attn_testkit.watches.packing import Bytes, Sent, pack_places
from attn_testkit.watches.past_modes import past_modes
from attn_testkit.watches.uploads import upload_into

__all__ = ["Tables"]


class Tables:
    """Request table, hidden states and activations of one instance."""

    def __init__(
        self,
        groups: int,
        requests: int,
        context_len: int,
        rows: int,
        token: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """``groups``: KV groups, with a request table each. ``requests``: rows of it.

        ``rows``: tokens that can have numbers of their own at a time. ``token``: L, and the elements that a token has
        in one layer.
        """
        self._packing = pack_places(
            (
                ("req_to_token", torch.int32, (groups, requests, context_len)),
                ("due", torch.int64, (rows + 1,)),
                ("hidden", torch.float32, (rows + 1, HIDDEN)),
                # Last, because a transfer ends with the rows of the step.
                ("rows", dtype, (rows + 1, *token)),
            )
        )
        self._memory = torch.full((self._packing.size,), 0xFF, dtype=torch.uint8, device=device)
        tensors = self._packing.tensors(self._memory)
        self.req_to_token = tensors["req_to_token"]
        """[groups, requests, context_len] int32."""
        self.hidden = tensors["hidden"]
        """[rows + 1, hidden] float32. The last row is NaN."""
        self.rows = tensors["rows"]
        """[rows + 1, L, width]: q, k, v of a token beside each other. The last row is NaN."""
        self._due, self._sent = tensors["due"], self._memory[: self._packing.places[0].end]
        self._host = self._packing.fresh()[: self._packing.places[-1].start]
        """All but the rows, as it was sent last."""
        arrays = self._packing.arrays(self._host)
        self._on_host = arrays["req_to_token"], arrays["due"], arrays["hidden"]
        # Rows that no step has filled yet are finite: graphs are captured on token 0.
        arrays["hidden"][:-1] = 0.5
        self.hidden[:-1].fill_(0.5)
        self.rows[:-1].fill_(0.5)
        self.clear_requests()

    def clear_requests(self) -> None:
        """No live request: an all-zero request table."""
        self._on_host[0][:] = 0
        self.req_to_token.zero_()

    def fill(
        self,
        req_to_token: npt.NDArray[np.int32],
        due: npt.NDArray[np.int64],
        hidden: npt.NDArray[np.float32],
        rows: Bytes,
    ) -> tuple[Sent, torch.Tensor]:
        """Put a step's numbers in place.

        ``req_to_token`` [groups, requests, columns]; ``hidden`` [T, hidden]; ``rows``: the bytes of T rows; ``due``
        [n]. Returns the request table as it was sent, and ``due`` in memory that no backend is given. What is not
        given keeps what an earlier step left.
        """
        (_, count, columns), tokens = req_to_token.shape, len(hidden)
        own_table, own_due, own_hidden = self._on_host
        own_table[:, :count, :columns] = req_to_token
        own_due[: len(due)] = due
        own_hidden[:tokens] = hidden
        host = np.concatenate([self._host, rows])
        table = self._packing.places[0]
        with past_modes():
            upload_into(self._memory[: len(host)], torch.from_numpy(host))
            return Sent((table,), self._sent, host[: table.end]), self._due[: len(due)]

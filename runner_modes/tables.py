"""The tables in which a step's values are looked up: one block of device memory, filled by one transfer."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from attn_testkit.steps.data import HIDDEN
from attn_testkit.watches.packing import Bytes, Sent, pack_places
from attn_testkit.watches.past_modes import past_modes
from attn_testkit.watches.uploads import upload_into


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
        memories: int = 1,
        behind: int = 0,
    ) -> None:
        """Allocate tables. ``groups``: KV groups, with a request table each. ``requests``: rows of each table.

        ``rows``: most tokens that can have their own numbers. ``token``: L, and the elements of a token in one layer.
        ``memories``: memories with slots that a step may write. ``behind``: columns of the memory of request tables
        after ``context_len``, which hold -1.
        """
        self._packing = pack_places(
            (
                ("req_to_token", torch.int32, (groups, requests, context_len + behind)),
                # A request with a state may have a copy of it, too.
                ("due", torch.int64, (memories * (rows + requests + 1),)),
                ("hidden", torch.float32, (rows + 1, HIDDEN)),
                # The last table, because a transfer ends with the rows of the step.
                ("rows", dtype, (rows + 1, *token)),
            )
        )
        self._memory = torch.full((self._packing.size,), 0xFF, dtype=torch.uint8, device=device)
        tensors = self._packing.tensors(self._memory)
        self.req_to_token = tensors["req_to_token"][..., :context_len]
        """Request tables, [groups, requests, context_len] int32."""
        self.hidden = tensors["hidden"]
        """Hidden states, [rows + 1, hidden] float32. The last row is NaN."""
        self.rows = tensors["rows"]
        """Rows [rows + 1, L, width]: q, k, v of a token are adjacent. The last row is NaN."""
        self._due, self._sent = tensors["due"], self._memory[: self._packing.places[0].end]
        self._host = self._packing.fresh()[: self._packing.places[-1].start]
        """Host copy of everything except the rows, as last sent."""
        arrays = self._packing.arrays(self._host)
        self._on_host = arrays["req_to_token"][..., :context_len], arrays["due"], arrays["hidden"]
        # Rows that no step has filled yet are finite: graphs are captured on token 0.
        arrays["hidden"][:-1] = 0.5
        self.hidden[:-1].fill_(0.5)
        self.rows[:-1].fill_(0.5)
        self.clear_requests()

    def clear_requests(self) -> None:
        """Clear the request table: no live request."""
        self._on_host[0][:] = 0
        self.req_to_token.zero_()

    def fill(
        self,
        req_to_token: npt.NDArray[np.int32],
        due: npt.NDArray[np.int64],
        hidden: npt.NDArray[np.float32],
        rows: Bytes,
    ) -> tuple[Sent, torch.Tensor]:
        """Load a step's numbers.

        ``req_to_token`` [groups, requests, columns]; ``hidden`` [T, hidden]; ``rows``: the bytes of T rows; ``due``
        [n]. Returns the request table as it was sent, and ``due`` in memory that no backend receives. Everything else
        keeps the contents of an earlier step.
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

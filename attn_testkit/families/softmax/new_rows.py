"""New rows that are attended to as given: a prefill kernel reads k and v directly, and the prefix from the pool."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...steps.data import StepData


def as_given(data: StepData, *, one_by_one: bool) -> StepData:
    """The same step for ``attend``, with the rows of a forward as separate keys, after the keys of the pool.

    ``one_by_one``: a forward has one row of a branch, as in draft-decode; otherwise all new rows are of one forward.
    ``visible`` and ``key_positions`` get Tmax columns after those of the pool; ``stored_keys`` and ``stored_values``
    are float64 and dequantised.
    """
    request, offset, key = data.row_request, data.row_offset, data.row_key
    bs, widest, longest = data.visible.shape
    # [B, Tmax]: the pool's key of each new row; where a request has fewer rows, its key 0, which stays out of sight.
    place = torch.zeros(bs, widest, dtype=torch.int64)
    place[request, offset] = key
    real = torch.zeros(bs, widest, dtype=torch.bool)
    real[request, offset] = True
    own = torch.zeros(bs, widest, longest, dtype=torch.bool)
    if one_by_one:
        own[request, offset, key] = True
        mine = torch.eye(widest, dtype=torch.bool) & real[:, None]
    else:
        new = torch.zeros(bs, longest, dtype=torch.bool)
        new[request, key] = True
        own |= new[:, None]
        mine = real[:, None].expand(-1, widest, -1)
    seen = data.visible.gather(2, place[:, None].expand(-1, widest, -1)) & mine

    def beside(held: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[L, B, S, H, D] and [L, T, H, D] -> [L, B, S + Tmax, H, D]."""
        given = held.new_zeros(held.shape[0], bs, widest, *held.shape[3:])
        given[:, request, offset] = rows.double()
        return torch.cat([held, given], 2)

    return replace(
        data,
        stored_keys=beside(data.keys, data.k),
        stored_values=None if data.stored_values is None else beside(data.values, data.v),
        visible=torch.cat([data.visible & ~own, seen], 2),
        key_positions=torch.cat([data.key_positions, data.key_positions.gather(1, place)], 1),
    )

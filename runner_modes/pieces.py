"""Pieces of the model between attention layers, as graphs (piecewise graphs of SGLang and vLLM).

A piece has a fixed number of rows. Attention runs eagerly on the first of them: q, k and v are slices of the graph's
memory, which the next step reuses, and the rows after them hold NaN. An output is written to memory that the next piece
reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from typing_extensions import override

from attn_testkit.environment import side_stream
from attn_testkit.graphs.capture import Captured, record, warm_up
from attn_testkit.graphs.poison import poisoned
from attn_testkit.model import Around, Model

_ALIGNMENT = 512
"""Alignment of an allocator's memory in bytes, for which kernels may be compiled."""
_FEWEST = 16
"""Rows of the smallest pieces; each larger size has twice as many."""


class MemoryOfOutputs:
    """Memory for the output of a layer, [rows, Hq, Dv], with poisoned memory before and after it."""

    def __init__(self, heads: int, dim: int, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self._beside = _ALIGNMENT // math.gcd(_ALIGNMENT, heads * dim * dtype.itemsize)
        self._whole = torch.empty(rows + 2 * self._beside, heads, dim, dtype=dtype, device=device)
        self.rows = self._whole[self._beside : self._beside + rows]
        """Tensor [rows, Hq, Dv]."""

    def lend(self, rows: int, byte: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Poison everything; return the first ``rows``, and the memory before and after them."""
        memory, value = poisoned(self._whole, byte)
        memory.fill_(value)
        behind = self._whole[self._beside + rows :]
        return self.rows[:rows], [self._whole[: self._beside], behind]


class Pieces(Around):
    """The graphs for one number of rows, and their memory."""

    def __init__(self, model: Model, rows: int, contiguous: bool, replay: Callable[[Any], None]) -> None:
        """Capture all pieces for ``rows`` rows. ``contiguous``: see ``Around``. ``replay`` runs a graph."""
        device = model.table.device
        self._static_ids = torch.full((rows,), model.nan_row, dtype=torch.int64, device=device)
        super().__init__(model, self._static_ids, contiguous)
        self._replay = replay
        self.outputs = [
            MemoryOfOutputs(layer.tp_q_head_num, layer.v_head_dim, rows, model.table.dtype, device)
            for layer in model.layers
        ]
        pool, side = torch.cuda.graph_pool_handle(), side_stream()
        self._graphs: list[Captured[Sequence[torch.Tensor]]] = []
        for index in range(len(model.layers) + 1):
            out = self.outputs[index - 1].rows if index else None
            hidden = self.hidden if index else None

            def run_once(index: int = index, out: Any = out, hidden: Any = hidden) -> Sequence[torch.Tensor]:
                if hidden is not None:
                    self.hidden = hidden
                return Around.before(self, index, out)

            warm_up(run_once, side, 1)
            self._graphs.append(record(run_once, side, pool))

    @staticmethod
    def rows_for(tokens: int) -> int:
        """Rows of the pieces that a step of ``tokens`` rows runs in."""
        return max(_FEWEST, 1 << (tokens - 1).bit_length()) if tokens else _FEWEST

    def load(self, ids: torch.Tensor) -> None:
        """Store the ids of a step's rows; all other rows are NaN."""
        self._tokens = len(ids)
        self._static_ids[: len(ids)] = ids
        self._static_ids[len(ids) :] = self.model.nan_row

    @override
    def before(self, index: int, out: torch.Tensor | None) -> Sequence[torch.Tensor]:
        if out is not None:
            live = self.outputs[index - 1].rows[: self._tokens]
            if out.data_ptr() != live.data_ptr():
                live.copy_(out.view(live.shape))
        self._replay(self._graphs[index].graph)
        return [each[: self._tokens] for each in self._graphs[index].outputs]

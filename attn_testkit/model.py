"""The model that every mode runs: two attention layers that differ, and a linear head.

A row's q, k and v come out of a table by its ``input_ids``, one row of numbers per token; that is how a case decides
what a backend receives. Each layer adds ``attention @ W`` to the hidden state in float32, and the head is linear, so
that a limit on an attention output becomes a limit on hidden states and logits by |W| alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from .cases.case import Case
from .cases.data import HIDDEN, NUM_LAYERS
from .cases.patterns import normals
from .contract import AttentionBackend, AttentionLayer, ForwardBatch

__all__ = ["VOCAB", "Model", "Trace", "Weights", "joined", "make_weights", "pack"]

VOCAB = 48
"""Width of the logits."""


@dataclass(frozen=True)
class Weights:
    """Float32."""

    out: torch.Tensor
    """[L, Hq * Dv, hidden]."""
    head: torch.Tensor
    """[hidden, vocab]."""

    def to(self, device: torch.device | str) -> Weights:
        """The same numbers on a device."""
        return Weights(self.out.to(device), self.head.to(device))

    def double(self) -> Weights:
        """The same numbers in float64."""
        return Weights(self.out.double(), self.head.double())


@lru_cache(maxsize=64)
def make_weights(width: int) -> Weights:
    """Host weights for ``width`` = Hq * Dv: unit normals over the square root of what is summed. Cached."""
    rng = np.random.default_rng(width)
    return Weights(normals((NUM_LAYERS, width, HIDDEN), rng) / width**0.5, normals((HIDDEN, VOCAB), rng) / HIDDEN**0.5)


@dataclass
class Trace:
    """Device tensors that one forward of the model produced. Under capture: the graph's own memory."""

    packed: torch.Tensor
    """What the table gave: the memory that q, k and v are views of (or copies from)."""
    dense: list[torch.Tensor]
    """q, k, v of each layer where they were made contiguous; empty when they were views."""
    raw: list[torch.Tensor]
    """What the backend returned for each layer. Backends may return one buffer for all layers."""
    attention: list[torch.Tensor]
    """Copies of it, taken before the next layer ran."""
    hidden: torch.Tensor
    """[rows, hidden] float32; the mode's driver may prune rows."""
    logits: torch.Tensor | None = None
    """[rows, vocab] float32, from the mode's driver, as what follows."""
    topk_p: torch.Tensor | None = None
    """[rows, K] float32."""
    topk_index: torch.Tensor | None = None
    """[rows, K] int64."""


def joined(traces: Sequence[Trace]) -> Trace:
    """Several forwards as one, their rows one behind the other. Device work only; without logits and what follows."""

    def rows(parts: Iterable[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        return [torch.cat(each) for each in zip(*parts, strict=True)]

    return Trace(
        packed=torch.cat([trace.packed for trace in traces]),
        dense=rows(trace.dense for trace in traces),
        raw=[out for trace in traces for out in trace.raw],
        attention=rows(trace.attention for trace in traces),
        hidden=torch.cat([trace.hidden for trace in traces]),
    )


def _heads(rows: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
    """[T, heads * dim] -> [T, heads, dim] with the stride between rows kept, as a server's ``split`` leaves it.

    ``view`` would tidy the stride of a lone row, and ``contiguous`` never does: kernels have refused it (vLLM #32417).
    """
    return rows.as_strided((rows.shape[0], heads, dim), (rows.stride(0), dim, 1))


def pack(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mla: bool) -> torch.Tensor:
    """[L, T, H, D] tensors -> [T, L, width] rows of the model's table (host). MLA: v is a part of k."""
    parts = [x.flatten(2) for x in ((q, k) if mla else (q, k, v))]
    return torch.cat(parts, -1).transpose(0, 1).contiguous()


class Model:
    """The tables and weights on the device, and the forward pass."""

    def __init__(
        self, case: Case, layers: tuple[AttentionLayer, ...], rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """``rows`` tokens can have numbers of their own at a time; one more row holds NaN."""
        first = layers[0]
        self.layers, self.dtype = layers, dtype
        self.q_size = first.tp_q_head_num * first.head_dim
        self.k_size = first.tp_k_head_num * first.head_dim
        self.v_size = 0 if first.is_mla else first.tp_k_head_num * first.v_head_dim
        self.contiguous = case.pick("qkv-memory") == 1
        """In half the cases q, k, v are contiguous, in the others they are strided views of one packed tensor."""
        width = self.q_size + self.k_size + self.v_size
        self.table = torch.full((rows + 1, NUM_LAYERS, width), torch.nan, dtype=dtype, device=device)
        self.hidden_table = torch.full((rows + 1, HIDDEN), torch.nan, dtype=torch.float32, device=device)
        self.weights = make_weights(first.tp_q_head_num * first.v_head_dim).to(device)

    @property
    def nan_row(self) -> int:
        """Token id whose activations are NaN."""
        return self.table.shape[0] - 1

    def forward(
        self,
        backend: AttentionBackend,
        batch: ForwardBatch,
        look: Callable[[Trace], None],
        save_kv_cache: bool = True,
    ) -> Trace:
        """All layers. Device work only, so it may be captured. ``look`` is called after each layer.

        ``save_kv_cache`` False: the pool holds the new keys and values already. The trace has hidden states and no
        logits. Raises what the backend and ``look`` raise.
        """
        packed = self.table[batch.input_ids]
        hidden = self.hidden_table[batch.input_ids]
        trace = Trace(packed, [], [], [], hidden)
        # By name and only when it is False: servers leave the argument out elsewhere.
        named = {} if save_kv_cache else {"save_kv_cache": False}
        for index, layer in enumerate(self.layers):
            q, k, v = self._split(packed[:, index], layer)
            if self.contiguous:
                q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
                trace.dense += [q, k, v]
            out = backend.forward(q, k, v, layer, batch, **named)
            trace.raw.append(out)
            look(trace)
            trace.attention.append(out.clone())
            hidden = hidden + out.reshape(out.shape[0], -1).float() @ self.weights.out[index]
        trace.hidden = hidden
        return trace

    def _split(self, row: torch.Tensor, layer: AttentionLayer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        first, second = self.q_size, self.q_size + self.k_size
        q = _heads(row[:, :first], layer.tp_q_head_num, layer.head_dim)
        k = _heads(row[:, first:second], layer.tp_k_head_num, layer.head_dim)
        if not self.v_size:
            return q, k, k[..., : layer.kv_lora_rank]
        return q, k, _heads(row[:, second:], layer.tp_v_head_num, layer.v_head_dim)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] float32 -> [rows, vocab] float32."""
        return hidden @ self.weights.head

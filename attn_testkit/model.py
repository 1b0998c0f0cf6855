"""The model that every mode runs: attention layers that differ, and a linear head.

A row's q, k and v are looked up in a table by its ``input_ids``, one row of values per token, so a case determines the
inputs of a backend. Each layer adds ``attention @ W`` to the hidden state in float32, and the head is linear, so a
limit on an attention output becomes a limit on hidden states and logits only through |W|.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol, cast

import numpy as np
import torch

from .cases.case import Case
from .cases.derived_parameters import CONTIGUOUS
from .cases.features.server.wider_buffers import columns_behind
from .cases.head_shapes import HeadMap
from .cases.normals import normals
from .contract import AttentionLayer, ForwardBatch
from .steps.data import HIDDEN
from .steps.data import VOCAB as VOCAB


@dataclass(frozen=True)
class Weights:
    """Weights of the model, in float32."""

    out: torch.Tensor
    """Tensor [L, Hq * Dv, hidden]."""
    head: torch.Tensor
    """Tensor [hidden, vocab]."""

    def to(self, device: torch.device | str) -> Weights:
        """Copy the weights to a device."""
        return Weights(self.out.to(device), self.head.to(device))

    def double(self) -> Weights:
        """Convert the weights to float64."""
        return Weights(self.out.double(), self.head.double())


@lru_cache(maxsize=64)
def make_weights(layers: int, width: int) -> Weights:
    """Host weights for ``width`` = Hq * Dv: unit normals divided by the square root of the number of summands.
    Cached."""
    rng = np.random.default_rng(width)
    return Weights(normals((layers, width, HIDDEN), rng) / width**0.5, normals((HIDDEN, VOCAB), rng) / HIDDEN**0.5)


@dataclass
class Trace:
    """Device tensors that one forward of the model produced. Under capture they are the graph's own memory."""

    packed: torch.Tensor
    """Rows from the table: the memory of which q, k and v are views (or copies)."""
    dense: list[torch.Tensor]
    """Tensors q, k, v of each layer if not all of them are views of ``packed``; else empty."""
    raw: list[torch.Tensor]
    """Tensors that the backend returned for each layer. Some backends return one buffer for all layers."""
    attention: list[torch.Tensor]
    """Copies of ``raw``, made after all layers had run, or before the next layer ran."""
    hidden: torch.Tensor
    """Tensor [rows, hidden] float32; the mode's driver may prune rows."""
    logits: torch.Tensor | None = None
    """Tensor [rows, vocab] float32, from the mode's driver, like the next two."""
    topk_p: torch.Tensor | None = None
    """Tensor [rows, K] float32."""
    topk_index: torch.Tensor | None = None
    """Tensor [rows, K] int64."""
    lse: list[torch.Tensor] = field(default_factory=list)
    """Log-sum-exps [T, P, Hq] of each layer, as returned, for KV splits. If the backend merges, the last entry is its
    value for all keys."""
    part_finite: list[torch.Tensor] = field(default_factory=list)
    """Tensors [T, P] bool for KV splits: true if a split's output has neither NaN nor Inf in a row."""
    of_parts: list[torch.Tensor] = field(default_factory=list)
    """Outputs and log-sum-exps that the backend returned for each KV split of each layer."""
    beside_out: list[torch.Tensor] = field(default_factory=list)
    """Memory before and after the output of each layer, if the caller owns the output's memory."""
    selections: dict[int, torch.Tensor] = field(default_factory=dict)
    """Copies of the backend's selections, [T, topk] int32, by the index of the layer. Empty without an indexer."""
    of_selections: list[torch.Tensor] = field(default_factory=list)
    """Tensors that the backend returned for them."""


def joined(traces: Sequence[Trace]) -> Trace:
    """Join several forwards into one, their rows in sequence. Device work only; without logits and top-k."""

    def rows(parts: Iterable[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        return [torch.cat(each) for each in zip(*parts, strict=True)]

    return Trace(
        packed=torch.cat([trace.packed for trace in traces]),
        dense=rows(trace.dense for trace in traces),
        raw=[out for trace in traces for out in trace.raw],
        attention=rows(trace.attention for trace in traces),
        hidden=torch.cat([trace.hidden for trace in traces]),
        lse=rows(trace.lse for trace in traces),
        part_finite=rows(trace.part_finite for trace in traces),
        of_parts=[each for trace in traces for each in trace.of_parts],
        beside_out=[each for trace in traces for each in trace.beside_out],
        selections={layer: torch.cat([trace.selections[layer] for trace in traces]) for layer in traces[0].selections},
        of_selections=[each for trace in traces for each in trace.of_selections],
    )


class Attends(Protocol):
    """A backend, or a wrapper of one."""

    @property
    def forward(self) -> Callable[..., torch.Tensor]:
        """See ``AttentionBackend.forward``."""


_Part = tuple[int, int, int, int]
"""First element in a token's row of one layer, number of heads, stride of heads, and elements per head."""


def _parts(layer: AttentionLayer) -> tuple[_Part, _Part, _Part]:
    """Places of q, k and v of a token, or of the layer's other inputs. MLA: v is the first part of k."""
    if layer.parts:
        ends = [sum(layer.parts[:index]) for index in range(3)]
        return tuple((end, 1, wide, wide) for end, wide in zip(ends, layer.parts, strict=True))  # type: ignore[return-value]
    heads, dim = layer.tp_q_head_num, layer.head_dim
    q, k = (0, heads, dim, dim), (heads * dim, layer.tp_k_head_num, dim, dim)
    if layer.head_layout.values_in_keys:
        return q, k, (heads * dim, 1, dim, layer.kv_lora_rank)
    first, wide = (heads + layer.tp_k_head_num) * dim, layer.v_head_dim
    return q, k, (first, layer.tp_v_head_num, wide, wide)


def row_width(layers: tuple[AttentionLayer, ...], dtype: torch.dtype) -> int:
    """Number of elements of q, k, v and selected keys per token in one layer; in the widest layer if layers differ."""
    rows = max(start + heads * stride for layer in layers for start, heads, stride, _ in _parts(layer))
    return rows + math.prod(layers[0].selected_shape) * _INDEX_BYTES // dtype.itemsize


_INDEX_BYTES = 4
"""Bytes of an index of a selected key, which is stored as int32 after the values of its token's row."""


def pack(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    one_row: bool,
    maps: Sequence[HeadMap] = (),
    selected: torch.Tensor | None = None,
) -> torch.Tensor:
    """Pack [L, T, H, D] tensors into [T, L, width] rows of the model's table (host). ``one_row``: v is a part of k.

    ``maps``: one per layer, if layers have different heads. A row holds the layer's own heads, then NaN.
    ``selected`` [L, T, topk] or [L, T, Hk, topk] int32: its bits are stored at the end of a row.
    """
    if not maps:
        rows = [x.flatten(2).transpose(0, 1) for x in ((q, k) if one_row else (q, k, v))]
        if selected is not None:
            rows.append(selected.flatten(2).transpose(0, 1).contiguous().view(q.dtype))
        return torch.cat(rows, -1)
    found = []
    for index, each in enumerate(maps):
        parts = each.q_part(q[index]), each.kv_part(k[index]), each.kv_part(v[index])
        found.append(torch.cat([part.flatten(1) for part in parts], -1))
    width = max(row.shape[-1] for row in found)
    padded = [torch.nn.functional.pad(row, (0, width - row.shape[-1]), value=torch.nan) for row in found]
    return torch.stack(padded, 1)


def _copy(out: torch.Tensor) -> torch.Tensor:
    return out.clone(memory_format=torch.contiguous_format)


_ROWS_BEHIND = 64
"""Number of rows of NaN: the size of a chunk in public prefill kernels (vllm-ascend #10276)."""


class Around:
    """The model's work before the attention of each layer and after it, on rows [T] of its table."""

    def __init__(self, model: Model, ids: torch.Tensor, contiguous: bool) -> None:
        """``ids`` [T] int64; ``contiguous``: q, k and v are separate tensors."""
        self.model, self._ids, self._contiguous = model, ids, contiguous

    def before(self, index: int, out: torch.Tensor | None) -> Sequence[torch.Tensor]:
        """q, k and v of layer ``index``; None after the last layer. ``out``: output of the layer before it."""
        rows = len(self._ids)
        if out is None:
            ids = self._ids
            if self.model.rows_behind:
                ids = torch.cat([ids, ids.new_full((self.model.rows_behind,), self.model.nan_row)])
            self._all = self.model.table.index_select(0, ids)
            self.packed = self._all[:rows]
            self.hidden = self.model.hidden_table.index_select(0, self._ids)
        else:
            self.hidden = self.model.after(index - 1, self.hidden, out)
        if index == len(self.model.layers):
            return ()
        given = self.model.inputs(self._all, index, contiguous=self._contiguous)
        return [each[:rows] for each in given] if self.model.rows_behind else given


def with_columns_behind(rows: torch.Tensor, count: int, fill: float | torch.Tensor) -> torch.Tensor:
    """A view that equals ``rows`` [n, columns, ...], of a buffer with ``count`` more columns of ``fill``; 0:
    ``rows``."""
    if not count:
        return rows
    buffer = rows.new_empty(len(rows), rows.shape[1] + count, *rows.shape[2:])
    buffer[:, :-count] = rows
    buffer[:, -count:] = fill
    return buffer[:, :-count]


class Model:
    """The tables and weights on the device, and the forward pass."""

    def __init__(
        self,
        case: Case,
        layers: tuple[AttentionLayer, ...],
        table: torch.Tensor,
        hidden_table: torch.Tensor,
        *,
        strided_heads: bool = False,
    ) -> None:
        """Store ``table`` [rows, L, width] in the model's dtype and ``hidden_table`` [rows, hidden] float32: each row
        belongs to a token. The caller fills both tables; their last rows hold NaN. ``width``: see ``row_width``.
        ``strided_heads``: the backend declares ``takes_strided_heads``.
        """
        self.layers, self.table, self.hidden_table = layers, table, hidden_table
        self._parts, self._width = [_parts(layer) for layer in layers], row_width(layers, table.dtype)
        self._selected_shape = layers[0].selected_shape
        self._selected = math.prod(self._selected_shape) * _INDEX_BYTES // table.dtype.itemsize
        self.select_first_keys()
        size = table.dtype.itemsize
        self.bytes_of_parts = tuple(
            tuple(slice(start * size, (start + heads * w) * size) for start, heads, _, w in parts)
            for parts in self._parts
        )
        """Places of q, k and v in a token's row, per layer."""
        self.encoder_kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Place of a cross-attention layer -> k and v [E, Hk, D] of the encoder tokens that the step stores; empty if
        there are none."""
        self.has_encoder: torch.Tensor | None = None
        """[T]: 0 for a row of a request without an encoder, 1 for others; None if all have one, as in graphs."""
        self._columns_behind = columns_behind(case)
        self.contiguous = case.derived("qkv-memory") == CONTIGUOUS
        """True in half the cases; in the others q, k, v are strided views of one packed tensor."""
        self._side_by_side = strided_heads and case.strided_heads
        self.rows_behind = _ROWS_BEHIND if case.has_rows_behind else 0
        """Rows of NaN that follow the last row in the memory of q, k and v: a tile of a kernel may reach into them."""
        weights = make_weights(len(layers), case.heads.q_heads * case.head_dim).to(table.device)
        self._out, self._head = weights.out.unbind(0), weights.head
        if case.head_maps:
            # [hidden, Hq, Dv] of the case; heads that the layer lacks give zeros, and are not multiplied.
            by_head = [w.t().reshape(HIDDEN, case.heads.q_heads, case.head_dim) for w in self._out]
            own = [each.q_part(w) for each, w in zip(case.head_maps, by_head, strict=True)]
            self._out = tuple(part.flatten(1).t().contiguous() for part in own)

    def select_first_keys(self) -> None:
        """Make every row except the NaN row select only the first key, as in the dummy batch of a capture."""
        if self._selected:
            indices = self.table[:-1, :, self._width - self._selected :].view(torch.int32)
            indices.fill_(-1)
            indices.view(*indices.shape[:-1], *self._selected_shape)[..., 0] = 0

    def select_none_from(self, row: int) -> None:
        """Make all rows from ``row`` on, which belong to no live token, select no key."""
        if self._selected:
            self.table[row:, :, self._width - self._selected :].view(torch.int32).fill_(-1)

    @property
    def nan_row(self) -> int:
        """The token id whose activations are NaN."""
        return self.table.shape[0] - 1

    def forward(
        self,
        backend: Attends,
        batch: ForwardBatch,
        look: Callable[[Trace], None],
        save_kv_cache: bool = True,
        none_kv: bool = False,
        lend: Callable[[AttentionLayer, int], torch.Tensor] | None = None,
        at_once: bool = False,
        other_strides: bool = False,
        selects: int | None = None,
        around: Around | None = None,
    ) -> Trace:
        """Run all layers. Device work only, so it may be captured. ``look`` is called after each layer.

        ``save_kv_cache`` False: the pool holds the new keys and values already; with ``none_kv`` the first layer gets
        None for them. ``lend``: (layer, rows) -> the output's memory [rows, Hq, Dv]. ``at_once``: the next layer may
        overwrite an output. ``other_strides``: see ``Step.turned``. ``selects``: number of leading rows with selected
        keys; None: all rows. ``around``: the work before and after attention, as graphs; None: eager. The trace has
        hidden states but no logits. Exceptions of the backend and of ``look`` are passed on.
        """
        rows = batch.input_ids.shape[0]
        contiguous = self.contiguous != other_strides
        around = around or Around(self, batch.input_ids, contiguous)
        q_k_v = around.before(0, None)
        packed = around.packed[:rows]
        trace = Trace(packed, [], [], [], around.hidden[:rows])
        # Passed by name and only if it is False: otherwise servers leave the argument out.
        named: dict[str, Any] = {} if save_kv_cache else {"save_kv_cache": False}
        none_kv = none_kv and not save_kv_cache
        for index, layer in enumerate(self.layers):
            q, k, v = q_k_v
            if contiguous or self._side_by_side:
                trace.dense += [q, k, v]
            if layer.parts:
                q, k, v = (each if each.shape[-1] else cast(torch.Tensor, None) for each in (q, k, v))
            if layer.is_cross_attention:
                k, v = self.encoder_kv.get(index, cast(tuple[torch.Tensor, torch.Tensor], (None, None)))
            if none_kv and index == 0:
                # None contradicts the contract's types, so only backends that declare it get it.
                k = v = cast(torch.Tensor, None)
            if lend is not None:
                named["out"] = lend(layer, rows)
            if self._selected:
                # The indexer's own tensor; the bits of padded rows, all ones, are -1.
                last = packed[:selects, index, self._width - self._selected :]
                selected = last.clone(memory_format=torch.contiguous_format).view(torch.int32)
                # Columns of no row hold the first key.
                selected = with_columns_behind(selected, self._columns_behind, 0)
                named["selected"] = selected.view(len(selected), *self._selected_shape)
            unstored = layer.kv_sharing_target_layer_id >= 0 or layer.encoder_only
            of_another = {"save_kv_cache": False} if unstored else {}
            out = backend.forward(q, k, v, layer, batch, **{**named, **of_another})
            trace.raw.append(out)
            look(trace)
            if at_once:
                trace.attention.append(_copy(self._masked(index, out)))
            q_k_v = around.before(index + 1, self._masked(index, out))
        if not at_once:
            trace.attention += [_copy(self._masked(index, out)) for index, out in enumerate(trace.raw)]
        # Copies of the present values, in contiguous memory.
        trace.dense = [each.contiguous() for each in trace.dense]
        trace.hidden = around.hidden[:rows]
        return trace

    def _masked(self, index: int, out: torch.Tensor) -> torch.Tensor:
        """The output of a cross-attention layer, multiplied by 0 for requests without encoder input, as in mllama
        (``full_text_row_masked_out_mask``). So these rows may hold any finite value, but not NaN.
        """
        if self.has_encoder is None or not self.layers[index].is_cross_attention:
            return out
        return out * self.has_encoder.view(-1, *[1] * (out.dim() - 1))

    def inputs(self, packed: torch.Tensor, index: int, *, contiguous: bool) -> list[torch.Tensor]:
        """q, k and v [rows, heads, dim] of one layer from ``packed`` [rows, L, width]."""
        q, k, v = self._split(packed, index, packed.shape[0])
        if contiguous:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        if self._side_by_side:
            both, width = torch.cat((k, v), -1), k.shape[-1]
            k, v = both[..., :width], both[..., width:]
        return [q, k, v]

    def after(self, index: int, hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Hidden states [rows, hidden] float32 after a layer with the attention output ``out``."""
        return hidden + out.flatten(1).float() @ self._out[index]

    def _split(self, packed: torch.Tensor, layer: int, rows: int) -> list[torch.Tensor]:
        """q, k and v [rows, heads, dim] of one layer: views of ``packed`` [rows, L, width], which is contiguous.

        The stride between rows is kept, as by a server's ``split``. ``view`` would normalize the stride of a single
        row, and ``contiguous`` never does: kernels have refused it (vLLM #32417).
        """
        step, first = len(self.layers) * self._width, layer * self._width
        return [
            packed.as_strided((rows, width), (step, 1), first + start)
            if self.layers[layer].parts
            else packed.as_strided((rows, heads, width), (step, stride, 1), first + start)
            for start, heads, stride, width in self._parts[layer]
        ]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [rows, hidden] float32 to [rows, vocab] float32."""
        return hidden @ self._head

"""A healthy backend of encoders, built like those of servers: offsets planned outside the graph, one varlen call in it.

*Planning* copies the offsets of sequences and windows into buffers that every graph reads, and chooses the most rows of
each as a number of the host. *The call* gathers the rows of each sequence, and computes no more of them than that.

Shapes: T rows, n sequences or windows (padding included), W most rows of one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from typing_extensions import override

from attn_testkit.contract import (
    ENCODER_LAYERS,
    AttentionBackend,
    AttentionLayer,
    Bounds,
    Capabilities,
    EncoderOnly,
    ForwardBatch,
    ForwardMode,
    HeadShapes,
    LayerOptions,
    Needs,
    Precision,
    Promises,
    ServerConventions,
    Windows,
)

MODES = frozenset({ForwardMode.EXTEND})


@dataclass
class Offsets:
    """First row of each sequence, or of each window, and what a launch needs of them."""

    starts: torch.Tensor
    """[n + 1] int32."""
    most: int
    """W."""


class EncoderBackend(AttentionBackend):
    """Healthy parent: attention of an encoder without a cache, in plain torch."""

    capabilities = Capabilities(
        eager=MODES,
        graph=MODES,
        heads=HeadShapes(families={"gqa"}, head_dims={72}, gqa_ratios={2}),
        precision=Precision(dtypes={"bf16"}),
        bounds=Bounds(max_extend_tokens=256),
        windows=Windows(MODES, non_causal={"both"}, layers="same"),
        options=LayerOptions(non_causal=MODES),
        encoder_only=EncoderOnly(frozenset(ENCODER_LAYERS), in_graphs=True, only=True),
        needs=Needs(cpu_seq_lens=False),
        server=ServerConventions(finite_padding=True, takes_strided_heads=True),
        promises=Promises(deterministic=True),
    )

    capturing = False
    """True while a capture is planned."""

    @override
    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the offsets that all graphs read."""
        self.buffers = [
            torch.zeros(count + 1, dtype=torch.int32, device=self.context.device) for count in (max_bs, max_num_tokens)
        ]

    @override
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Plan an eager step in new tensors."""
        self.capturing = False
        self.offsets = self.plan(batch)

    @override
    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        """Copy the offsets of a capture or a replay to where the graph reads them."""
        self.capturing = in_capture
        found = self.plan(batch)
        self.offsets = [
            Offsets(self.copy_in(batch, index, self.buffers[index][: len(each.starts)], each.starts), each.most)
            for index, each in enumerate(found)
        ]

    def copy_in(self, batch: ForwardBatch, index: int, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Copy one list of offsets into its buffer. ``index``: 0 for sequences, 1 for windows."""
        return target.copy_(source)

    def plan(self, batch: ForwardBatch) -> list[Offsets]:
        """Offsets of sequences, and of windows if there are any."""
        windows = getattr(batch, "cu_window_seqlens", None)
        found = [Offsets(self.sequences(batch), self.most_rows(batch))]
        return found if windows is None else [*found, Offsets(self.windows(batch), self.most_rows_of_window(batch))]

    def sequences(self, batch: ForwardBatch) -> torch.Tensor:
        """[bs + 1] int32."""
        assert batch.query_start_loc is not None
        return batch.query_start_loc

    def windows(self, batch: ForwardBatch) -> torch.Tensor:
        """[windows + 1] int32."""
        assert batch.cu_window_seqlens is not None
        return batch.cu_window_seqlens

    def most_rows(self, batch: ForwardBatch) -> int:
        """Most rows of a sequence of any batch of this graph."""
        return min(self.context.max_extend_tokens, len(batch.input_ids))

    def most_rows_of_window(self, batch: ForwardBatch) -> int:
        """Most rows of a window of any batch."""
        return max(layer.encoder_window for layer in self.context.layers)

    @override
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """[T, Hq, D] in q's dtype. Rows of no sequence get zeros."""
        return self.varlen(q, k, v, layer, self.offsets_of(layer))

    def offsets_of(self, layer: AttentionLayer) -> Offsets:
        """Offsets of the sequences or windows in which the rows of a layer see each other."""
        return self.offsets[layer.encoder_window > 0]

    def varlen(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, offsets: Offsets
    ) -> torch.Tensor:
        """The kernel: each sequence by itself."""
        starts, place = offsets.starts.long(), torch.arange(offsets.most, device=q.device)
        row = (starts[:-1, None] + place).clamp(max=len(q) - 1)
        is_row = place < starts.diff()[:, None]
        # [n, Hq, W, D]
        rows, keys, values = (each[row].float().transpose(1, 2) for each in (q, k, v))
        keys, values = (each.repeat_interleave(layer.q_per_kv, 1) for each in (keys, values))
        logits = self.logits(rows, keys, layer)
        logits = logits.masked_fill(~(is_row[:, None] & self.near(place, layer))[:, None], -torch.inf)
        weights = torch.softmax(logits, -1).nan_to_num(0.0)
        found = (weights @ self.values_in_tile(values, is_row)).transpose(1, 2)
        return self.scattered(found, row, is_row, q, starts)

    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        """[n, Hq, W, W], scaled."""
        return rows @ keys.mT * layer.scaling

    def near(self, place: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        """[W, W] bool: True if a row may see another by its distance."""
        before = place[:, None] - place
        window = layer.sliding_window_size
        return torch.ones_like(before, dtype=torch.bool) if window < 0 else self.in_window(before, window)

    def in_window(self, before: torch.Tensor, window: int) -> torch.Tensor:
        """Bool: True for rows whose distance is in the window."""
        return before.abs() <= window

    def values_in_tile(self, values: torch.Tensor, is_row: torch.Tensor) -> torch.Tensor:
        """[n, Hq, W, D]. Rows after those of a sequence hold anything, NaN included, and 0 * NaN is NaN."""
        return values.masked_fill(~is_row[:, None, :, None], 0.0)

    def scattered(
        self, found: torch.Tensor, row: torch.Tensor, is_row: torch.Tensor, q: torch.Tensor, starts: torch.Tensor
    ) -> torch.Tensor:
        """[n, W, Hq, D] -> [T, Hq, D]; a sequence writes its own rows and no others."""
        out = self.new_output(q)
        target = torch.where(is_row, row, len(q)).flatten()
        return out.index_put_((target,), found.flatten(0, 1).to(q.dtype))[: len(q)]

    def new_output(self, q: torch.Tensor) -> torch.Tensor:
        """[T + 1, Hq, D]; the last row is scratch."""
        return q.new_zeros(len(q) + 1, *q.shape[1:])

"""Choices and lengths that a capture freezes, and what a replay does not refresh. See ``nineteenth_set.md``."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.backends.torch_native_formats import TorchNativeFormatsBackend
from attn_testkit.backends.torch_native_state import TorchNativeStateBackend
from attn_testkit.contract import AttentionLayer, ForwardBatch, ForwardMode
from attn_testkit_corpus.faults.catalogue import bug


class Captured(TorchNativeBackend):
    """The healthy parent, which also knows if its step is captured."""

    captured: ForwardBatch | None = None

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.captured = None
        self.init_forward_metadata_in_graph(batch)

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        self.captured = batch if batch.forward_mode is ForwardMode.DECODE else None
        if in_capture:
            self.at_capture(batch)

    def at_capture(self, batch: ForwardBatch) -> None:
        """Look at the lengths of a capture."""


@bug(
    19,
    "vllm #40961",
    "decode-gqa8x2-d32-bf16-p16-k1.2.5.9.14.2.30-shuffled-gauss-kvfp8e4m3-kvpaddedpages-w46-alibi-layers2from0groups-b8prod-empty_batches-given_out-freed_minus_one",
    "replay-follows-batch",
    execution="graph",
)
class NoWindowInShortCapture(Captured):
    """vllm #40961: lengths of 1 at a capture are within any window, so its kernels have none."""

    def _in_window(self, layer: AttentionLayer) -> torch.Tensor:
        if self.captured is not None and not layer.is_cross_attention:
            layer = replace(layer, sliding_window_size=-1)
        return super()._in_window(layer)


@bug(
    19,
    "InfiniLM #540",
    "decode-mha2-d32-bf16-p1-k7.8.9-contiguous-gauss-local64-b3prod",
    "replay-follows-batch",
    execution="graph",
)
class LengthsReadAtCapture(Captured):
    """InfiniLM #540: lengths are read on the host, at the capture."""

    def at_capture(self, batch: ForwardBatch) -> None:
        lengths: dict[int, torch.Tensor] = self.__dict__.setdefault("lengths", {})
        lengths.setdefault(batch.batch_size, batch.seq_lens[: batch.batch_size].clone())

    def _kv_lens(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        return super()._kv_lens(batch, counts) if self.captured is None else self.lengths[batch.batch_size]


@bug(
    19,
    "xllm #1904",
    "decode-kda4x2-d64-fp32-p16-k5.1.30-shuffled-unit_keys-k64w4s32-b4prod",
    "writes-own-state",
    execution="graph",
)
class PaddingKeepsSlots(TorchNativeStateBackend):
    """xllm #1904: a replay copies the slots of live requests, and not those of padded ones."""

    in_graph = False

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.kept = torch.zeros(max_bs, dtype=torch.int32, device=self.context.device)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.in_graph = False
        super().init_forward_metadata(batch)

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(batch, in_capture)
        assert batch.state is not None
        self.in_graph = batch.forward_mode is ForwardMode.DECODE and batch.state.indices.dim() == 1
        if self.in_graph:
            live = batch.batch_size if in_capture else batch.batch_size - batch.num_padding
            self.kept[:live].copy_(batch.state.indices[:live])

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        if self.in_graph:
            assert batch.state is not None
            batch = copy.copy(batch)
            batch.state = replace(batch.state, indices=self.kept[: batch.batch_size])
        super().init_forward_metadata_in_graph(batch)


@bug(
    19,
    "TensorRT-LLM #19422",
    "decode-gqa2x2-d256-bf16-p16-k7x2-reversed-gauss-kvfp8perhead-kvhnd-layers2from5-b2prod",
    "steps-independent",
)
class ScalesByAddress(TorchNativeFormatsBackend):
    """TensorRT-LLM #19422: a copy of the scales is filled once for each address."""

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(batch, in_capture)
        copies: dict[int, torch.Tensor] = self.__dict__.setdefault("copies", {})
        for layer in self.context.layers:
            for scales in (layer.k_head_scales, layer.v_head_scales):
                if scales is not None and scales.data_ptr() not in copies:
                    copies[scales.data_ptr()] = scales.clone()

    def _numbers(self, rows: torch.Tensor, part: int, layer: AttentionLayer) -> torch.Tensor:
        kept = {
            name: self.copies.get(scales.data_ptr(), scales)
            for name in ("k_head_scales", "v_head_scales")
            if (scales := getattr(layer, name)) is not None
        }
        return super()._numbers(rows, part, replace(layer, **kept))

"""Class E: layers of encoders, whose rows see the rows of their own sequence or window and have no cache."""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer, ForwardBatch

from .catalogue import fault
from .encoders import EncoderBackend, Offsets


@fault("sglang #16902", "replay-follows-batch", "value from capture time", modes="extend", executions="graph")
class OffsetsOfTheFirstBatch(EncoderBackend):
    """Graphs are kept by their number of rows, with the offsets of the batch that was captured: another batch of as
    many rows is cut where that one was."""

    def copy_in(self, batch: ForwardBatch, index: int, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return super().copy_in(batch, index, target, source) if self.capturing or index else target


@fault(
    "vLLM #40600",
    "replay-follows-batch",
    "a maximum length, a grid",
    modes="extend",
    executions="graph",
)
class MostRowsOfADummyBatch(EncoderBackend):
    """The call is captured for the longest sequence of a dummy batch, which shares its rows out evenly: rows of a
    longer sequence are not computed."""

    def most_rows(self, batch: ForwardBatch) -> int:
        even = -(-len(batch.input_ids) // batch.batch_size)
        return min(even, super().most_rows(batch)) if self.capturing else super().most_rows(batch)


@fault("vLLM #40830", "replay-follows-batch", "value from capture time", modes="extend", executions="graph")
class MostRowsOfWindowsOfTheCapture(EncoderBackend):
    """The longest window is computed from the windows of the capture, which are shorter than those of a replay."""

    def most_rows_of_window(self, batch: ForwardBatch) -> int:
        return 1 if self.capturing else super().most_rows_of_window(batch)


@fault(
    "vllm-ascend #10824, #10549",
    "buckets-independent padding-inert matches-oracle finite",
    modes="extend",
    executions="graph",
)
class PaddingInTheLastSequence(EncoderBackend):
    """The last offset has to be the number of rows, so the last sequence is given the rows of padding, too."""

    def sequences(self, batch: ForwardBatch) -> torch.Tensor:
        starts = super().sequences(batch)
        return torch.where(starts == starts[-1], len(batch.input_ids), starts).to(torch.int32)


@fault(
    "vLLM #35963, whose managers pad the offsets",
    "buckets-independent matches-oracle",
    "as the only replay",
    modes="extend",
    executions="graph",
)
class OffsetsOfAnEarlierReplayRemain(EncoderBackend):
    """Only the offsets of live sequences are copied: those of an earlier replay remain after them, and their sequences
    are computed again from rows that are now of others."""

    def copy_in(self, batch: ForwardBatch, index: int, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        live = batch.batch_size - batch.num_padding + 1 if not index and not self.capturing else len(source)
        super().copy_in(batch, index, target[:live], source[:live])
        return target


@fault("vLLM #57136, #56922", "padding-finite", modes="extend", executions="graph")
class RowsOfPaddingUnwritten(EncoderBackend):
    """The call writes the rows of sequences, and leaves what fresh memory holds in those of padding. A later layer
    multiplies them by 0."""

    def new_output(self, q: torch.Tensor) -> torch.Tensor:
        return q.new_full((len(q) + 1, *q.shape[1:]), torch.nan)


@fault("sglang #27343", "padding-inert finite", "data of padded rows", modes="extend", executions="graph")
class ValuesOfPaddingInTheLastTile(EncoderBackend):
    """Values after the rows of a sequence are multiplied by weights of 0, so NaN in rows of padding reaches the last
    sequence."""

    def values_in_tile(self, values: torch.Tensor, is_row: torch.Tensor) -> torch.Tensor:
        return values


@fault(
    "general; ``context_attention_fwd`` of SGLang is causal by default",
    "matches-oracle",
    "KV tokens after the row's own position are missing",
    modes="extend",
)
class CausalEncoder(EncoderBackend):
    """The mask is that of a decoder."""

    def near(self, place: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        return super().near(place, layer) & (place <= place[:, None])


@fault(
    "sglang #39298",
    "matches-oracle",
    "in layers that are not causal a window",
    modes="extend",
)
class WindowWithoutARightSide(EncoderBackend):
    """A window ends only on the left, as in a causal layer, whose rows see nothing on the right."""

    def in_window(self, before: torch.Tensor, window: int) -> torch.Tensor:
        return before <= window


@fault("vllm-ascend #6975", "matches-oracle", "windows of encoders", modes="extend")
class OffsetsOfTheFirstLayer(EncoderBackend):
    """Offsets are kept from the first layer on, although layers with windows and layers without have different ones."""

    def offsets_of(self, layer: AttentionLayer) -> Offsets:
        return super().offsets_of(self.context.layers[0])


@fault("vLLM #15200", "matches-oracle", "windows of encoders", modes="extend")
class WindowsNeverUsed(EncoderBackend):
    """The mask of layers with windows is that of whole sequences."""

    def offsets_of(self, layer: AttentionLayer) -> Offsets:
        return self.offsets[0]


@fault("sglang-jax #1289", "matches-oracle", "windows of encoders", modes="extend")
class WindowsAsADistance(EncoderBackend):
    """A window of an encoder is taken for a sliding one: a row sees the rows that are at most so far away."""

    def offsets_of(self, layer: AttentionLayer) -> Offsets:
        return self.offsets[0]

    def near(self, place: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        found = super().near(place, layer)
        return found & self.in_window(place[:, None] - place, layer.encoder_window) if layer.encoder_window else found


@fault("general; windows at the edge of an image are smaller", "matches-oracle", "windows of encoders", modes="extend")
class WindowsOfOneSize(EncoderBackend):
    """Windows of a sequence begin at multiples of the largest one."""

    def offsets_of(self, layer: AttentionLayer) -> Offsets:
        return self.offsets[0]

    def near(self, place: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        number = place // layer.encoder_window if layer.encoder_window else place * 0
        return super().near(place, layer) & (number[:, None] == number)


@fault("triton #621, gLLM #270", "matches-oracle", modes="extend")
class HeadDimOfAPowerOfTwo(EncoderBackend):
    """A tile has the largest power of two that fits into the head dim, so the last channels of q and k do not count."""

    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        held = 1 << (layer.head_dim.bit_length() - 1)
        return super().logits(rows[..., :held], keys[..., :held], layer)


@fault("general; layers of a decoder store what they get", "writes-own-kv", modes="extend")
class EncoderStoresItsKeys(EncoderBackend):
    """Keys and values are stored in the pool, which an encoder does not have."""

    def varlen(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, offsets: Offsets
    ) -> torch.Tensor:
        slots = self.context.req_to_token[1, : len(k)].long()
        self.context.kv_pool.set_kv_buffer(layer, slots, k[: len(slots)], v[: len(slots)])
        return super().varlen(q, k, v, layer, offsets)

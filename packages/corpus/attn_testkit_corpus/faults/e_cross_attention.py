"""Class E: cross-attention layers, whose rows see the keys of an encoder, with separate lengths and slots."""

from __future__ import annotations

from dataclasses import replace

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, BackendContext, ForwardBatch, KVGroup

from .catalogue import fault
from .encoder_decoder import EncoderDecoderBackend, EncoderInItsOwnGroup, EncoderKeys, KeysBehindEncoder
from .parent import Metadata, PlannedBackend

_NUMBERS = ("matches-oracle", "reads-own-kv", "finite")


class _SeqLens(EncoderKeys):
    """Child with the lengths of the decoder."""

    @override
    def plan_lengths(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        return batch.seq_lens[: batch.batch_size].to(torch.int32)


@fault("general; one plan for all layers", _NUMBERS, "use seq_lens instead of encoder_lens", modes="decode extend")
class CrossLayersUseSeqLens(EncoderDecoderBackend):
    """Cross-attention layers see as many encoder keys as the decoder has tokens."""

    encoder_child = _SeqLens


class _OfCapture(EncoderKeys):
    """Child whose replays keep the lengths of the capture."""

    @override
    def copy_in(self, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        if self.capturing or name != "kv_lens":
            super().copy_in(name, target, source)


@fault(
    "general; encoders of one length (Whisper), and models in which they differ",
    ("replay-follows-batch", *_NUMBERS),
    "encoder_lens of its capture|value from capture time",
    modes="decode",
    executions="graph",
)
class EncoderLensOfTheCapture(EncoderDecoderBackend):
    """A replay uses the encoder lengths of its capture."""

    encoder_child = _OfCapture


class _Causal(EncoderKeys):
    """Child with the mask of decoder layers."""

    @override
    def visible(self, meta: Metadata, layer: AttentionLayer, position: torch.Tensor) -> torch.Tensor:
        return PlannedBackend.visible(self, meta, layer, position)


@fault(
    "general; vLLM sets ``causal`` to False in its builder for cross-attention",
    "matches-oracle",
    "have a causal mask",
    modes="extend",
)
class CausalCrossAttention(EncoderDecoderBackend):
    """Cross-attention layers use the causal mask of the others, aligned to the last encoder key."""

    encoder_child = _Causal


class _StoresEverywhere(KeysBehindEncoder):
    """Child that stores new rows in all layers of the pool."""

    @override
    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        for each in self.context.kv_pool.layers:
            super().write_kv(replace(layer, layer_id=each.layer_id), k, v, meta)


@fault("general; one kernel that stores the rows of several layers", "writes-own-kv", modes="decode extend")
class DecoderRowsStoredInCrossLayers(EncoderDecoderBackend):
    """New keys and values of the decoder are stored in the cross-attention layers, too."""

    child = _StoresEverywhere


class _FromColumn0(KeysBehindEncoder):
    """Child that begins at column 0."""

    @override
    def first_columns(self, batch: ForwardBatch) -> torch.Tensor:
        return torch.zeros_like(super().first_columns(batch))


@fault(
    "general; ``kv_start_idx`` of SGLang's FlashInfer backend left out",
    "reads-own-kv finite matches-oracle",
    "req_to_token from column 0",
    modes="decode extend",
    slug="self-attention-from-column-0",
)
class SelfAttentionFromColumn0(EncoderDecoderBackend):
    """Layers with the decoder's own keys read the columns of the encoder's keys in the request table."""

    child = _FromColumn0


class _LongestEncoder(KeysBehindEncoder):
    """Child whose keys begin after the longest encoder."""

    @override
    def first_columns(self, batch: ForwardBatch) -> torch.Tensor:
        first = super().first_columns(batch)
        return first.amax().expand_as(first)


@fault(
    "general; SGLang's FA3 backend before encoders of several lengths",
    "reads-own-kv finite matches-oracle",
    "behind the longest encoder",
    modes="decode extend",
)
class SelfAttentionBehindTheLongestEncoder(EncoderDecoderBackend):
    """The decoder's keys are read after the longest encoder of the batch, in every request."""

    child = _LongestEncoder


class _Neighbour(EncoderKeys):
    """Child with the lengths of the next requests."""

    @override
    def plan_lengths(self, batch: ForwardBatch, counts: torch.Tensor) -> torch.Tensor:
        return super().plan_lengths(batch, counts).roll(-1)


@fault("general", _NUMBERS, "encoder_lens are probably read at the wrong index", modes="decode extend")
class EncoderLensOfTheNextRequest(EncoderDecoderBackend):
    """Each request has the encoder length of the one after it."""

    encoder_child = _Neighbour


class _AllRequests(EncoderKeys):
    """Child that computes slots from the lengths of all requests."""

    @override
    def encoder_slots(self, batch: ForwardBatch) -> torch.Tensor:
        assert batch.encoder_lens is not None
        rows = self.context.req_to_token[batch.req_pool_indices.long()].long()
        behind = self.index[: rows.shape[1]] >= batch.encoder_lens[:, None]
        every = rows.flatten()[behind.flatten().int().argsort(stable=True)]
        return every[: len(super().encoder_slots(batch))]


@fault(
    "general; vLLM's builder leaves out requests whose encoder keys are stored",
    "writes-own-kv",
    "encoder key",
    modes="extend",
)
class EncoderSlotsOfRequestsThatRun(EncoderInItsOwnGroup):
    """Slots of encoder keys are computed from all requests of the batch, including those whose keys are stored
    already."""

    encoder_child = _AllRequests


@fault("sglang #26531, transferred from windowed layers", "reads-own-kv matches-oracle finite", modes="decode extend")
class CrossLayersReadTheDecodersTable(EncoderInItsOwnGroup):
    """Cross-attention layers have a separate pool, but read it through the request table of the decoder."""

    def context_of(self, group: KVGroup) -> BackendContext:
        return replace(super().context_of(group), req_to_token=self.context.req_to_token)

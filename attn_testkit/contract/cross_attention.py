"""Cross-attention layers of encoder-decoder models, and where the keys of the encoder are stored."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from .context import BackendContext
from .declared import Declared
from .modes import ForwardMode
from .refusal import Refusal, modes_outside

__all__ = ["ENCODER_SLOTS", "CrossAttention"]

ENCODER_SLOTS = ("first", "own_group")
_MODES = frozenset({ForwardMode.DECODE, ForwardMode.EXTEND})


@dataclass(frozen=True)
class CrossAttention(Declared):
    """Cross-attention layers that a backend supports: ``CrossAttention(modes={"decode", "extend"})``.

    A row of such a layer (``AttentionLayer.is_cross_attention``) sees all ``ForwardBatch.encoder_lens`` keys of its
    request's encoder, and no other key. The other layers see the keys of the decoder, which ``seq_lens`` counts.

    The keys are stored once, in the extend that begins the request. There a cross-attention layer gets the ``k`` and
    ``v`` of all encoder tokens of the step, [E, Hk, D], and ``ForwardBatch.encoder_out_cache_loc`` has their slots. In
    every other step it gets None for both, and stores nothing.

    Servers do so in decode and extend; a graph has no request without encoder keys, and extend runs eagerly.
    """

    modes: Set[ForwardMode] = frozenset()
    """Modes, of decode and extend, in which layers may be cross-attention layers. By default in none."""
    encoder_slots: Set[str] = frozenset({"first"})
    """Location of the encoder's keys. ``first`` (SGLang): in the pool of all layers. The request table has their
    slots in the first ``encoder_lens`` columns, which are whole pages, and the decoder's keys follow them.
    ``own_group`` (vLLM): cross-attention layers are a second KV group, which has a pool and a request table. Both
    tables begin with column 0. It has no effect without ``KVPools.kv_groups``."""

    def _check(self) -> None:
        self._check_modes("modes")
        self._check_words("encoder_slots", ENCODER_SLOTS)
        others = sorted(self.modes - _MODES)
        if others:
            raise ValueError(f"CrossAttention.modes may hold only decode and extend, got {', '.join(others)}")

    def refused(self, context: BackendContext) -> Iterator[Refusal]:
        """Cross-attention layers of a context, and encoder slots, that are not declared."""
        if not any(layer.is_cross_attention for layer in context.layers):
            return
        yield from modes_outside("cross-attention layers in", context, self.modes)
        slots = "own_group" if context.kv_groups else "first"
        if slots not in self.encoder_slots:
            yield "encoder keys in slots", slots

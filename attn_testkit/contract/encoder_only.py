"""Layers of encoders: attention among the rows of a step, without a cache."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from .context import BackendContext
from .declared import Declared
from .refusal import Refusal

__all__ = ["ENCODER_LAYERS", "EncoderOnly"]

ENCODER_LAYERS = ("whole", "windows")


@dataclass(frozen=True)
class EncoderOnly(Declared):
    """Encoder-only layers that a backend supports, in extend: ``EncoderOnly(layers={"whole"}, in_graphs=True)``.

    A row of such a layer (``AttentionLayer.encoder_only``) sees the rows of its own sequence in both directions, and
    nothing else. It has no cache: ``forward`` gets the keys and values of all rows with ``save_kv_cache=False``, the
    slots of the step hold NaN, and nothing may be stored. ``ForwardBatch.query_start_loc`` has the sequences of a
    batch. Vision, audio and diffusion models have such layers, and text models that embed (``MMEncoderAttention`` and
    ``ENCODER_ONLY`` of vLLM, ``VisionAttention`` of SGLang).

    All layers of a model are of this kind, and none is causal: ``options.non_causal`` needs ``extend``, too.
    """

    layers: Set[str] = frozenset()
    """Kinds of layers. ``whole``: a row sees its sequence. ``windows``: in some layers a row sees only the window in
    which it is, a part of its sequence (``AttentionLayer.encoder_window``), as in Qwen2.5-VL. By default none."""
    in_graphs: bool = False
    """True: a graph is captured for a number of rows and sequences, and replayed with fewer of both. False: such layers
    run eagerly."""
    only: bool = False
    """True: the backend has no other layers, so no step has a cache. False: it also attends to keys in a pool."""

    def _check(self) -> None:
        self._check_words("layers", ENCODER_LAYERS)
        self._check_flags()
        if (self.in_graphs or self.only) and not self.layers:
            raise ValueError("EncoderOnly declares no layers; declare their kinds: layers={'whole'}")

    def refused(self, context: BackendContext) -> Iterator[Refusal]:
        """Encoder-only layers of a context that are not declared, and other layers if there may be none."""
        of_encoders = [layer for layer in context.layers if layer.encoder_only]
        kinds = {ENCODER_LAYERS[layer.encoder_window > 0] for layer in of_encoders}
        yield from (("encoder-only layers of kind", kind) for kind in sorted(kinds - self.layers))
        if self.only and len(of_encoders) < len(context.layers):
            yield "layers with keys in a pool,", len(context.layers) - len(of_encoders)

"""Shapes of q, k and v that a backend supports."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from .context import BackendContext
from .declared import Declared
from .head_layout import HEAD_LAYOUTS
from .refusal import Refusal, first_outside

__all__ = ["FAMILIES", "HeadShapes"]

FAMILIES = tuple(HEAD_LAYOUTS)


@dataclass(frozen=True)
class HeadShapes(Declared):
    """Shapes of q, k and v that a backend supports: ``HeadShapes(families={"gqa"}, gqa_ratios={8}, head_dims={128})``.

    The defaults are the usual values. Raises ``ValueError`` for an unknown head layout, and for values that are not
    positive whole numbers.
    """

    families: Set[str] = frozenset({"mha"})
    """Head layouts: ``mha`` (Hq = Hk), ``gqa``, ``mqa`` (Hk = 1), ``mla`` (latent, absorbed)."""
    gqa_ratios: Set[int] = frozenset({1, 2, 4, 8})
    """Numbers of query heads per KV head, for ``gqa`` and ``mqa``. For ``mla``: numbers of query heads."""
    head_dims: Set[int] = frozenset({64, 128})
    """Widths of a q, k and v row. For MLA: width of the latent part; ``mla_rope_dims`` has the rope part."""
    mla_rope_dims: Set[int] = frozenset({64})
    """MLA: widths of the rope part of a key."""
    wider_keys: Set[int] = frozenset()
    """Numbers of columns by which queries and keys may be wider than values, outside MLA: ``{64}`` for keys of 192 next
    to values of 128 (MiMo-V2, DeepSeek's models as MHA). ``head_dims`` are the widths of values. K and V are then
    allocated separately, in the KV layouts ``nhd`` and ``custom``."""
    heads_by_layer: bool = False
    """True: layers of one model may differ in head counts and head dims, as windowed and full layers do, and the layers
    of a draft model. ``families``, ``gqa_ratios`` and ``head_dims`` declare the shape of each layer;
    ``BackendContext.head_shapes`` lists the shapes of an instance. All layers of an MLA model have the same shape, and
    so do the layers of a case with KV splits."""

    _GUESSED = ("families", "gqa_ratios", "head_dims")

    def _check(self) -> None:
        self._check_words("families", tuple(HEAD_LAYOUTS))
        self._check_numbers("gqa_ratios", 1)
        self._check_numbers("head_dims", 1)
        self._check_numbers("mla_rope_dims", 0)
        self._check_numbers("wider_keys", 1)
        self._check_flags()

    def refused(self, context: BackendContext) -> Iterator[Refusal]:
        """Head layouts, widths and ratios of a context's layers that are not declared."""
        # The softmax layers of a model whose other layers keep a state follow from those.
        keeping = [layer for layer in context.layers if layer.head_layout.has_state]
        own = keeping or context.layers
        apart = [layer for layer in own if not (layer.head_layout.values_in_keys or layer.head_layout.has_state)]
        latent = [layer for layer in context.layers[:1] if layer.head_layout.values_in_keys]
        grouped = [layer.q_per_kv for layer in context.layers if not layer.head_layout.is_one_to_one]
        shapes = len({layer.head_shape for layer in own})
        yield from first_outside("family", (layer.head_layout.name for layer in own), self.families)
        yield from first_outside("head dim", (layer.v_head_dim for layer in context.layers), self.head_dims)
        ropes = (layer.head_dim - layer.kv_lora_rank for layer in latent)
        yield from first_outside("MLA rope dim", ropes, self.mla_rope_dims)
        wider = (layer.head_dim - layer.v_head_dim for layer in apart)
        yield from first_outside("columns by which keys are wider than values,", wider, self.wider_keys | {0})
        yield from first_outside("GQA ratio", grouped, self.gqa_ratios)
        if shapes > 1 and not self.heads_by_layer:
            yield "number of head shapes", shapes

"""Bidirectional spans: rows of an image, or of a block of a diffusion model, which see each other both ways."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Self

from typing_extensions import override

from .context import BackendContext
from .declared import Declared
from .modes import ForwardMode
from .refusal import Refusal, modes_outside

__all__ = ["Spans"]


@dataclass(frozen=True)
class Spans(Declared):
    """The bidirectional spans that a backend supports: ``Capabilities(spans=Spans({"extend"}, by_layer=True))``.

    A span is a range of positions of a request. A row in it sees all its keys, later ones too, and everything else as
    without it. In a layer with a window, a row sees no key before the window, even of the same span: ``(causal or
    same span) and window`` (Hugging Face's Gemma 3 and 4, SGLang, vLLM with ``mm_prefix_clamp_sliding_window``). Keys
    after the row are never outside the window. vLLM's other models have ``(causal and window) or same span``, and its
    runner drops spans of more than W + 1 positions; for the others both say the same.

    ``ForwardBatch.mm_prefix_range`` has the spans of a batch, ``AttentionLayer.bidirectional_spans`` the layers that
    have them. Spans of a request are ascending and do not overlap; two may be adjacent and are still two. By default no
    mode supports spans. ``Capabilities`` and ``with_changes`` also take only the set of modes: ``spans={"extend"}``.
    """

    modes: Set[ForwardMode] = frozenset()
    """Modes, of extend and decode, in which batches may have spans. Servers put images into prompts; the rows of a
    decode are in no span, and decode needs ``of_prefix``."""
    in_graphs: bool = False
    """True: replays have spans too, in tensors of a fixed size. False: only eager steps have them, as in SGLang and
    vLLM, whose graphs of prefills leave attention out."""
    of_prefix: bool = False
    """True: spans may be in the prefix, or begin there and end in the step if a prefix cache ends inside an image
    (vLLM). False: every span is within the rows of its step (SGLang leaves the others out)."""
    wider_than_window: bool = False
    """True: spans may have more than W + 1 positions in a layer whose window is W (Gemma 4). False: the server leaves
    these out (vLLM's ``compute_mm_prefix_ranges``)."""
    by_layer: bool = False
    """True: some layers of a model may have spans and the others not, as in Gemma 4, where only windowed layers do.
    False: all layers have them, or none."""

    def _check(self) -> None:
        self._check_modes("modes")
        self._check_flags()
        if others := sorted(self.modes - {ForwardMode.DECODE, ForwardMode.EXTEND}):
            raise ValueError(f"Spans.modes may hold only extend and decode, got {', '.join(others)}")
        if ForwardMode.DECODE in self.modes and not self.of_prefix:
            raise ValueError("Spans.modes has decode, whose spans are all in the prefix; declare of_prefix=True too")

    def refused(self, context: BackendContext) -> Iterator[Refusal]:
        """Spans of a context's layers that are not declared."""
        have = {layer.bidirectional_spans for layer in context.layers}
        yield from modes_outside("bidirectional spans in", context, self.modes, True in have)
        if len(have) > 1 and not self.by_layer:
            yield "layers with and layers without bidirectional spans,", len(context.layers)

    @override
    def made_of(self, given: object) -> Self:
        """Convert a value as every record does; a set of modes replaces ``modes`` and changes nothing else."""
        if isinstance(given, Iterable) and not isinstance(given, Mapping):
            return self.with_changes(modes=given)
        return super().made_of(given)

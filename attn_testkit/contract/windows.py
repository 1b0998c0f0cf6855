"""Sliding windows that a backend supports, and chunked-local layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Self

from typing_extensions import override

from .context import BackendContext, counted
from .declared import Declared, spelled
from .modes import ForwardMode
from .refusal import Refusal, modes_outside

__all__ = ["LAYER_WINDOWS", "NON_CAUSAL_WINDOWS", "Windows"]

LAYER_WINDOWS = ("any", "one", "same")
NON_CAUSAL_WINDOWS = ("left", "block", "both")


@dataclass(frozen=True)
class Windows(Declared):
    """The sliding windows that a backend supports: ``Capabilities(windows=Windows({"decode", "extend"}, smallest=1))``.

    By default no mode supports a window. A mode in ``modes`` supports all sizes, in any layer. ``Capabilities`` and
    ``with_changes`` also take only the set of modes: ``windows={"decode"}``.
    """

    modes: Set[ForwardMode] = frozenset()
    """Modes in which ``sliding_window_size`` is honored."""
    smallest: int = 0
    """Smallest W. A row sees itself and W keys before it. Declare 1 if the kernel treats a window of 0 as no window."""
    layers: str = "any"
    """Difference between the windows of a model's layers. ``any``: each layer has its own window, or none. ``one``: all
    windowed layers have the same, next to layers without one, for backends that plan by
    ``BackendContext.sliding_window_size``. ``same``: all layers have the same window, or none."""
    in_trees: bool = False
    """True: windows are honored in draft trees that branch, counted by position (depth in the tree), not by row."""

    non_causal: Set[str] = frozenset()
    """Meanings of a window in layers that are not causal (``AttentionLayer.non_causal_window``: ``left``, ``block``,
    ``both``), in the modes that are in both ``modes`` and ``LayerOptions.non_causal``. Empty: such layers have no
    window."""
    chunked: Set[ForwardMode] = frozenset()
    """Modes in which ``attention_chunk_size`` is honored: chunked-local layers, next to layers that see all keys."""

    def _check(self) -> None:
        self._check_modes("modes", "chunked")
        self._check_number("smallest", 0)
        self._check_words("non_causal", NON_CAUSAL_WINDOWS)
        spelled("layers", self.layers, LAYER_WINDOWS)
        self._check_flags()

    def refused(self, context: BackendContext) -> Iterator[Refusal]:
        """Windows and chunks of a context's layers that are not declared."""
        every = {layer.sliding_window_size for layer in context.layers}
        windows = every - {-1}
        narrowest = min(windows, default=self.smallest)
        yield from modes_outside("sliding window", context, self.modes, windows)
        if narrowest < self.smallest:
            yield "sliding window of size", narrowest
        if len({"any": (), "one": windows, "same": every}[self.layers]) > 1:
            yield "layers with sliding windows", counted(every)
        if windows and context.topk > 1 and not self.in_trees:
            yield "sliding window in trees", context.topk
        of_later_keys = [each for each in context.layers if each.sliding_window_size >= 0 and not each.causal]
        meanings = {each.non_causal_window for each in of_later_keys}
        yield from (("window of layers that are not causal,", each) for each in sorted(meanings - self.non_causal))
        chunked = any(layer.attention_chunk_size for layer in context.layers)
        yield from modes_outside("chunked-local layers in", context, self.chunked, chunked)

    @override
    def made_of(self, given: object) -> Self:
        """Convert a value as every record does; a set of modes replaces ``modes`` and changes nothing else."""
        if isinstance(given, Iterable) and not isinstance(given, Mapping):
            return self.with_changes(modes=given)
        return super().made_of(given)

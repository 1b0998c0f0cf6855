"""Sliding windows that a backend takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Self

from typing_extensions import override

from .declared import Declared, spelled
from .modes import ForwardMode

__all__ = ["LAYER_WINDOWS", "Windows"]

LAYER_WINDOWS = ("any", "one", "same")


@dataclass(frozen=True)
class Windows(Declared):
    """The sliding windows that a backend takes: ``Capabilities(windows=Windows({"decode", "extend"}, smallest=1))``.

    Closed by default: no mode takes one. In the modes that do, all sizes and layers are open. ``Capabilities`` and
    ``with_changes`` also take just the set of modes: ``windows={"decode"}``.
    """

    modes: Set[ForwardMode] = frozenset()
    """In which modes is ``sliding_window_size`` honoured? Default: in none."""
    smallest: int = 0
    """What is the smallest W? A row sees itself and W keys before it. Default: 0. It is 1 for kernels to which 0 means
    no window."""
    layers: str = "any"
    """How may the windows of a model's layers differ? Default, ``any``: each layer has its own, or none. ``one``:
    layers that have one have the same, next to layers that have none, for backends that plan by the model's window.
    ``same``: all layers have the same, or none has one. ``BackendContext.sliding_window_size`` is that of the model."""
    in_trees: bool = False
    """With branching trees, is the window counted by position (tree depth), not by row? Default: trees that branch have
    no window."""

    def __post_init__(self) -> None:
        self._check_modes("modes")
        self._check_number("smallest", 0)
        spelled("layers", self.layers, LAYER_WINDOWS)
        self._check_flags()

    @override
    def made_of(self, given: object) -> Self:
        """Convert a value as for every record; a set of modes replaces ``modes``, and changes nothing else."""
        if isinstance(given, Iterable) and not isinstance(given, Mapping):
            return self.with_changes(modes=given)
        return super().made_of(given)

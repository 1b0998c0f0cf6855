"""The record of a server variant."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol

from ....contract import Capabilities, ForwardMode
from ...fields import C, Changes, Fields
from ...plan import Plan


class _MakesCases(Protocol):
    def __call__(self, declared: Capabilities, small: C, /) -> Iterator[C]: ...


class _SharesInstance(Protocol):
    def __call__(self, case: C, /) -> list[C]: ...


def _no_others(case: C) -> list[C]:
    return []


def _no_cases(declared: Capabilities, small: C) -> Iterator[C]:
    yield from ()


def _as_they_are(case: Fields, plans: list[Plan]) -> list[Plan]:
    return plans


def _fits_none(declared: Capabilities, case: Fields) -> bool:
    return False


@dataclass(frozen=True)
class ServerVariant:
    """A convention that not every server has."""

    word: str
    """Word of case ids."""
    about: str
    """The server's behavior in plain words."""
    capability: str = ""
    """The capability for which it is tried, in plain words."""
    cases: _MakesCases = _no_cases
    """(declared, small) -> cases of the variant, derived from ``small``; none if it is not declared in the mode of
    ``small``."""
    fits: Callable[[Capabilities, Fields], bool] = _fits_none
    """(declared, case) -> True if a case that was made for another purpose may have this variant, too. It is not used
    for ``cases``."""
    _: KW_ONLY
    order: int
    """Place among the variants: of its word in an id, and of its cases."""
    plans: Callable[[Fields, list[Plan]], list[Plan]] = _as_they_are
    """(case, plans) -> the steps of the variant, the oversized one last."""
    context_len: int = 0
    """``max_context_len``, in tokens; 0: as the longest request needs it."""
    says: Mapping[str, str] = field(default_factory=dict)
    """Fields of a ``Dialect`` in which the variant differs from the usual one."""
    gives_none: bool = False
    """True if something other than lengths on the host is None: the tree of a target-verify."""
    causal: bool = True
    """``AttentionLayer.causal`` of all layers."""
    reaches_kernels: bool = True
    """True if the variant affects the kernel of a layer, and not only the code that plans and launches. Then it is
    combined with options of a layer."""
    needs_no_capability: bool = False
    """True if every backend gets the variant in the modes of ``cases``, whatever ``fits`` says."""
    on_its_instance: _SharesInstance = _no_others
    """(case) -> other cases, which share the instance of a case with this variant and run in turn with it."""
    needs: Callable[[Capabilities, Changes], Changes] = lambda declared, so_far: {}
    """(capabilities, fields of earlier features) -> fields without which the variant changes nothing; a row of the
    array that has the variant gets them."""
    context: Callable[[Sequence[Any]], Changes] | None = None
    """Function (schedules of an instance): fields of its ``BackendContext``."""
    also: tuple[str, ...] = ()
    """Other words for it, by which the glossary finds it too."""
    excludes: Mapping[str, str] = field(default_factory=dict)
    """Names of traits that no case has together with the variant -> why. The trait of a variant is its word. All other
    traits combine with it."""
    alone: bool = False
    """True if only ``cases`` have the variant, because one such case costs as much as several others."""
    eager_only: Mapping[ForwardMode, str] = field(default_factory=dict)
    """Modes in which no graph runs the variant -> why."""
    pool_elements: int = 0
    """Least number of elements in K of a layer, used or not; 0: as the requests need them."""

    @property
    def combines(self) -> bool:
        """True if a case that was made for another purpose may have this variant, too."""
        return self.fits is not _fits_none and not self.alone

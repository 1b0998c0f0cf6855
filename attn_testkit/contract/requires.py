"""Hardware and packages that real kernels need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .declared import is_whole

__all__ = ["Requires", "written_requires"]


@dataclass(frozen=True)
class Requires:
    """Hardware and packages that the backend's real kernels need. Without them the report says "not run here"."""

    sm: tuple[int, int] | tuple[tuple[int, int], ...] | None = None
    """Lowest and highest compute capability, inclusive, as 90 for SM90; or several such ranges. None: any device."""
    packages: tuple[str, ...] = ()
    """Requirement strings such as ``"flashinfer-python>=0.7.2,<0.8"``."""
    compilers: tuple[str, ...] = ()
    """Further packages that only a real device needs, such as those that compile kernels at their first call. Emulated
    kernels do not need them."""
    why: str = ""
    """Reason that the package gives for not running on other devices. Reports show it."""

    def __post_init__(self) -> None:
        if self.sm is not None:
            object.__setattr__(self, "sm", _ranges(self.sm))
        for name in ("packages", "compilers"):
            given = getattr(self, name)
            if isinstance(given, str):
                raise ValueError(f"Requires.{name} must be a tuple, got {given!r}; write ({given!r},)")
            object.__setattr__(self, name, tuple(given))
            for text in given:
                _requirement(name, text)

    @property
    def sm_ranges(self) -> tuple[tuple[int, int], ...] | None:
        """``sm`` as ranges; None: any device."""
        if self.sm is None or isinstance(self.sm[0], tuple):
            return self.sm
        return (self.sm,)

    def runs_on(self, sm: int) -> bool:
        """Return True if the real kernels run on this compute capability (90 for SM90)."""
        return self.sm_ranges is None or any(low <= sm <= high for low, high in self.sm_ranges)


_LOWEST_SM = 20
"""Lowest number that is a compute capability; smaller numbers are only a major version."""


def _ranges(sm: Any) -> tuple[Any, ...]:
    """Check the ranges and return them as tuples."""
    pairs = [sm] if _is_pair(sm) else sm
    if not isinstance(pairs, (tuple, list)) or not pairs or not all(_is_pair(pair) for pair in pairs):
        usual = f"({sm}, {sm})" if is_whole(sm) else "(90, 90), or ((90, 90), (100, 103))"
        raise ValueError(f"Requires.sm must be the lowest and the highest SM, got {sm!r}; write {usual}")
    for low, high in pairs:
        if low > high or low < _LOWEST_SM:
            raise ValueError(f"Requires.sm: no device is from SM{low} to SM{high}; write (90, 90) for SM90")
    return tuple(sm) if pairs[0] is sm else tuple(tuple(pair) for pair in pairs)


def _is_pair(value: object) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(is_whole(number) for number in value)


def _requirement(name: str, text: object) -> None:
    # Imported here: most backends need no package, and the contract is otherwise only torch.
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        Requirement(str(text))
    except InvalidRequirement as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"Requires.{name}: {text!r} is not a requirement such as 'my-kernels>=1.2': {reason}"
        ) from None


def written_requires(given: object) -> str:
    """Text that shows how to write a ``Requires``, with the given values if they can be read."""
    if isinstance(given, Mapping) and set(given) <= {"sm", "packages", "compilers", "why"}:
        sm = given.get("sm")
        values = {**given, "sm": (sm, sm)} if isinstance(sm, int) else dict(given)
        return f"write Requires({', '.join(f'{name}={value!r}' for name, value in values.items())})"
    return "write Requires(sm=(90, 90), packages=('my-kernels>=1.2',))"

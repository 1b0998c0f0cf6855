"""Traits: what a case has or lacks, and which traits exclude each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from .fields import Fields


@dataclass(frozen=True)
class Trait:
    """One thing that some cases have and others lack, in the file of the feature from which it follows."""

    name: str
    """A phrase for people; for a server variant, its word."""
    has: Callable[[Fields], bool]
    excludes: Mapping[str, str] = field(default_factory=dict)
    """Names of traits that no case has together with this one -> why. An exclusion is written at only one of the two
    traits."""


TRAITS: dict[str, Trait] = {}
"""All traits by name. The tables of features and of server variants add theirs."""


def add_traits(found: Iterable[Trait]) -> None:
    """Add traits. Raises ``ValueError`` for a second trait of the same name."""
    for trait in found:
        if TRAITS.setdefault(trait.name, trait) is not trait:
            raise ValueError(f"two features have a trait {trait.name!r}; give one of them another name")


def exclusions() -> Iterator[tuple[str, str, str]]:
    """Two traits that no case has together, and why."""
    for trait in TRAITS.values():
        for other, why in trait.excludes.items():
            yield trait.name, other, why


def never_with(case: Fields, trait: str) -> bool:
    """True if the case has a trait that excludes this one."""
    return any(trait in each.excludes and each.has(case) for each in TRAITS.values())


def excluded(case: Fields) -> str:
    """The reason why two traits of this case exclude each other; empty if there is none."""
    present = {name for name, trait in TRAITS.items() if trait.has(case)}
    for name in sorted(present):
        for other, why in TRAITS[name].excludes.items():
            if other in present:
                return f"{name} and {other}: {why}"
    return ""

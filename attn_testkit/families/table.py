"""The table of families. A family of the kit is a row here; a test registers its own."""

from __future__ import annotations

from ..cases.dimensions.table import DIMENSIONS
from ..cases.fields import Fields
from .family import Family
from .softmax.family import SOFTMAX

__all__ = ["FAMILIES", "family_of", "meaningless", "register"]

FAMILIES = {family.name: family for family in (SOFTMAX,)}
"""Name -> family."""


def register(family: Family) -> None:
    """Add a family. Raises ``ValueError`` for a name that another one has, and for a dimension that there is not."""
    unknown = family.dimensions - {dimension.name for dimension in DIMENSIONS}
    if unknown:
        raise ValueError(f"family {family.name!r}: no dimension of cases is called {', '.join(sorted(unknown))}")
    if FAMILIES.get(family.name, family) is not family:
        raise ValueError(f"there is another family {family.name!r}; give it another name")
    FAMILIES[family.name] = family


def family_of(case: Fields) -> Family:
    """The family of a case. Raises ``KeyError`` where nobody registered the one that its head layout names."""
    name = case.heads.layout.family
    if name not in FAMILIES:
        raise KeyError(f"head layout {case.heads.family!r} is of family {name!r}, which nobody registered")
    return FAMILIES[name]


def meaningless(case: Fields) -> list[str]:
    """Names of dimensions in which a case has a value of its own, and which mean nothing in its family."""
    known = family_of(case).dimensions
    return [
        dimension.name
        for dimension in DIMENSIONS
        if dimension.name not in known and any(getattr(case, name) != _DEFAULTS.get(name) for name in dimension.fields)
    ]


_DEFAULTS = {name: field.default for name, field in Fields.__dataclass_fields__.items()}

"""The table of families. The families of the kit are rows here; a test may register its own."""

from __future__ import annotations

from dataclasses import MISSING, replace
from typing import Any

from ..cases.features.feature import Feature
from ..cases.features.table import FEATURES
from ..cases.fields import DEFAULTS, C, Fields
from .compressor.family import COMPRESSOR
from .family import Family
from .recurrent.family import RECURRENT
from .softmax.family import SOFTMAX
from .sparse.family import SPARSE

FAMILIES = {family.name: family for family in (SOFTMAX, SPARSE, RECURRENT, COMPRESSOR)}
"""Name -> family."""


def register(family: Family) -> None:
    """Add a family. Raises ``ValueError`` for a name that exists already, for unknown features, and if a feature is
    missing in which every case has a value.
    """
    unknown = family.features - {feature.name for feature in FEATURES}
    if unknown:
        raise ValueError(f"family {family.name!r}: no feature of cases is called {', '.join(sorted(unknown))}")
    needed = {each.name for each in FEATURES if any(DEFAULTS[name] is MISSING for name in each.fields)}
    if needed - family.features:
        missing = ", ".join(sorted(needed - family.features))
        raise ValueError(f"family {family.name!r} leaves out {missing}, in which every case has a value; add them")
    if FAMILIES.get(family.name, family) is not family:
        raise ValueError(f"a family named {family.name!r} exists already; choose another name")
    FAMILIES[family.name] = family


def family_of(case: Fields) -> Family:
    """The family of a case, which is that of its first layer: see ``families_of``."""
    return families_of(case)[0]


def families_of(case: Fields) -> tuple[Family, ...]:
    """The families of a case's layers, each once. Raises ``KeyError`` if the family that its head layout names is not
    registered."""
    names = dict.fromkeys(case.families)
    for name in names:
        if name not in FAMILIES:
            raise KeyError(f"head layout {case.heads.family!r} is of family {name!r}, which nobody registered")
    return tuple(FAMILIES[name] for name in names)


def meaningless(case: Fields) -> list[str]:
    """Names of features that mean nothing in the family of a case, although the case has a value for them."""
    return [each.name for each in _outside(case) if any(getattr(case, n) != DEFAULTS[n] for n in each.fields)]


def meaningful(case: C) -> C:
    """The case with the default for every feature that means nothing in its family."""
    changes: dict[str, Any] = {name: DEFAULTS[name] for each in _outside(case) for name in each.fields}
    return replace(case, **changes) if meaningless(case) else case


def _outside(case: Fields) -> list[Feature]:
    """Features that mean nothing in the family of the case."""
    own, *others = families_of(case)
    known = own.features.union(*(each.beside.features for each in others if each.beside))
    return [each for each in FEATURES if each.name not in known]

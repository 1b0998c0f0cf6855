"""The table of families. A family of the kit is a row here; a test registers its own."""

from __future__ import annotations

from dataclasses import MISSING, replace
from typing import Any

from ..cases.features.feature import Feature
from ..cases.features.table import FEATURES
from ..cases.fields import DEFAULTS, C, Fields
from .family import Family
from .hybrid.family import HYBRID
from .recurrent.family import RECURRENT
from .softmax.family import SOFTMAX
from .sparse.family import SPARSE

FAMILIES = {family.name: family for family in (SOFTMAX, SPARSE, RECURRENT, HYBRID)}
"""Name -> family."""


def register(family: Family) -> None:
    """Add a family. Raises ``ValueError`` for the name of another one, for features that there are not, and
    without those that every case has a value in.
    """
    unknown = family.features - {feature.name for feature in FEATURES}
    if unknown:
        raise ValueError(f"family {family.name!r}: no feature of cases is called {', '.join(sorted(unknown))}")
    needed = {each.name for each in FEATURES if any(DEFAULTS[name] is MISSING for name in each.fields)}
    if needed - family.features:
        missing = ", ".join(sorted(needed - family.features))
        raise ValueError(f"family {family.name!r} leaves out {missing}, in which every case has a value; add them")
    if FAMILIES.get(family.name, family) is not family:
        raise ValueError(f"there is another family {family.name!r}; give it another name")
    FAMILIES[family.name] = family


def family_of(case: Fields) -> Family:
    """The family of a case. Raises ``KeyError`` where nobody registered the one that its head layout names."""
    name = SPARSE.name if case.selection else HYBRID.name if case.layers.hybrid else case.heads.layout.family
    if name not in FAMILIES:
        raise KeyError(f"head layout {case.heads.family!r} is of family {name!r}, which nobody registered")
    return FAMILIES[name]


def meaningless(case: Fields) -> list[str]:
    """Names of features in which a case has its own value, and which mean nothing in its family."""
    return [each.name for each in _outside(case) if any(getattr(case, n) != DEFAULTS[n] for n in each.fields)]


def meaningful(case: C) -> C:
    """The case with the default of everything that means nothing in its family."""
    changes: dict[str, Any] = {name: DEFAULTS[name] for each in _outside(case) for name in each.fields}
    return replace(case, **changes) if meaningless(case) else case


def _outside(case: Fields) -> list[Feature]:
    """Features that mean nothing in the family of the case."""
    known = family_of(case).features
    return [each for each in FEATURES if each.name not in known]

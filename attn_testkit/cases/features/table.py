"""The table of features, in the order of the words of a case id: those of the modules next to this one."""

from __future__ import annotations

from ..fields import DEFAULTS, Fields
from ..traits import TRAITS, Trait, add_traits, exclusions
from .feature import Feature
from .found import found_next_to

FEATURES: tuple[Feature, ...] = found_next_to(__name__, Feature)
_OPTIONS = tuple(name for each in FEATURES if each.option for name in each.fields)


def _has_options(case: Fields) -> bool:
    return any(getattr(case, name) != DEFAULTS[name] for name in _OPTIONS)


def forgotten(features: tuple[Feature, ...]) -> set[str]:
    """Fields that no feature has."""
    return DEFAULTS.keys() - {name for each in features for name in each.fields}


add_traits((*(trait for each in FEATURES for trait in each.traits), Trait("layer options", _has_options)))
if forgotten(FEATURES):
    raise ValueError(f"no feature has these fields of a case: {', '.join(sorted(forgotten(FEATURES)))}")
for _one, _other, _ in exclusions():
    if _other not in TRAITS:
        raise ValueError(f"{_one!r} excludes {_other!r}, and no case has a trait of that name: {', '.join(TRAITS)}")

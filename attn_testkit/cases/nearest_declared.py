"""Changes that adapt every case to capabilities that are narrower than usual."""

from __future__ import annotations

from ..contract import Capabilities
from .features.feature import Without
from .features.table import FEATURES
from .fields import C


def nearest_declared(declared: Capabilities, case: C) -> C:
    """The case, or the nearest case that a backend with these capabilities supports."""
    for feature in FEATURES:
        if not isinstance(feature.fit, Without):
            changes = feature.fit(declared, case)
            if any(getattr(case, name) != value for name, value in changes.items()):
                case = case.with_changes(**changes)
    return case

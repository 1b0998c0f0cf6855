"""Changes of every case for capabilities that are narrower than usual."""

from __future__ import annotations

from ..contract import Capabilities
from .dimensions.dimension import Without
from .dimensions.table import DIMENSIONS
from .fields import C


def nearest_declared(declared: Capabilities, case: C) -> C:
    """The case, or the nearest one that a backend with these capabilities takes."""
    for dimension in DIMENSIONS:
        if not isinstance(dimension.fit, Without):
            changes = dimension.fit(declared, case)
            if any(getattr(case, name) != value for name, value in changes.items()):
                case = case.with_changes(**changes)
    return case

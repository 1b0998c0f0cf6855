"""Ray, which is imported only if a run asks for it: it is 240 MB, and an extra of the kit."""

from __future__ import annotations

import importlib
import os
from typing import Any

from ..registry import UsageError


def ray_module() -> Any:
    """Return the package ``ray``. Raises ``UsageError`` if it is not installed."""
    # Ray reports its usage to its makers by default; a conformance run sends nothing anywhere.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.util.scheduling_strategies")
    except ImportError as error:
        raise UsageError(
            f"--ray needs Ray, and {error}; pip install 'PATH_OF_THE_CHECKOUT[ray]' on every node"
        ) from error
    return ray

"""Class L, capabilities: declarations of a class that no case could test."""

from __future__ import annotations

from .catalogue import fault
from .parent import PlannedBackend


@fault("general", "capabilities-honest", "no case can satisfy", modes="target-verify")
class CapabilityThatNoCaseCanMeet(PlannedBackend):
    """Verify is declared with the max_context_len of a unit test's class: nothing was ever run."""

    capabilities = PlannedBackend.capabilities.with_changes(bounds={"max_context_len": 4})

"""Class L, capabilities: declarations of a class that no case could test."""

from __future__ import annotations

from attn_testkit.contract import ForwardMode

from .catalogue import fault
from .parent import PlannedBackend


@fault(
    slug="capability-that-no-case-can-meet",
    source="general",
    modes=(ForwardMode.TARGET_VERIFY,),
    checks=("capabilities-honest",),
    hint="no case can satisfy",
)
class CapabilityThatNoCaseCanMeet(PlannedBackend):
    """Verify is declared with the max_context_len of a unit test's class: nothing was ever run."""

    capabilities = PlannedBackend.capabilities.with_changes(max_context_len=4)

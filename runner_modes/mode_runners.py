"""The table of runner modes."""

from __future__ import annotations

from collections.abc import Mapping

from attn_testkit.contract import ForwardMode

from .decode import DECODE
from .draft_decode import DRAFT_DECODE
from .draft_extend import DRAFT_EXTEND
from .draft_extend_v2 import DRAFT_EXTEND_V2
from .extend import EXTEND
from .mode_runner import ModeRunner
from .target_verify import TARGET_VERIFY

MODE_RUNNERS: Mapping[ForwardMode, ModeRunner] = {
    driver.mode: driver for driver in (DECODE, TARGET_VERIFY, DRAFT_EXTEND, DRAFT_EXTEND_V2, EXTEND, DRAFT_DECODE)
}
"""Mode -> its functions."""

"""Drawing the cases of a tier in several processes, because it is what planning takes its time for: a second in core.

The plan is made once, where the ``Runner`` is. Its lanes have nothing to do until then, so each draws some modes.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...cases.case import Case
from ...catalogue.tiers import generate
from ...contract import Capabilities, Execution, ForwardMode
from ..planning.request import Request
from .lane_process import LaneProcess


def draw_in_lanes(lanes: Sequence[LaneProcess], declared: Capabilities, request: Request) -> None:
    """Have ``generate`` know the cases of every mode that planning asks for. A lane that is lost costs time only."""
    wanted = [*map(ForwardMode, request.modes)] or list(ForwardMode)
    modes = [mode for mode in wanted if any(declared.offers(mode, execution) for execution in Execution)]
    own, *shares = (modes[index :: len(lanes) + 1] for index in range(len(lanes) + 1))
    asked = [
        (lane, share)
        for lane, share in zip(lanes, shares, strict=True)
        if share and lane.draw(declared, share, request.tier, request.seed)
    ]
    for mode in own:
        generate(declared, mode, request.tier, request.seed)
    known = generate.cache
    assert known is not None
    for lane, share in asked:
        drawn: Sequence[tuple[Case, ...]] = lane.drawn()
        for mode, cases in zip(share, drawn, strict=False):
            known[generate.cache_key(declared, mode, request.tier, request.seed)] = cases

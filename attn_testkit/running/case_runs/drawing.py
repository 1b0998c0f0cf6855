"""Generation of a tier's cases in several processes, because it takes most of the time of planning: a second in core.
The plan is made once, in the process of the ``Runner``. Until then its lanes have nothing to do, so each generates the
cases of some modes.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...cases.case import Case
from ...catalogue.tiers import generate
from ...contract import Capabilities, Execution, ForwardMode
from ..planning.request import Request
from .lane_process import LaneProcess


def draw_in_lanes(lanes: Sequence[LaneProcess], declared: Capabilities, request: Request) -> None:
    """Give ``generate`` the cases of every mode that planning asks for. Losing a lane costs only time."""
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

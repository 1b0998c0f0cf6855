"""What one mode adds to the common drive: a record of functions, one record a mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from attn_testkit.checks.observation import Outputs
from attn_testkit.contract import ForwardBatch, ForwardMode, SpecInput
from attn_testkit.model import Trace

from .batches import StaticInputs
from .world import Loaded, World

__all__ = ["ModeDriver"]


@dataclass(frozen=True)
class ModeDriver:
    """How a server runs one forward mode."""

    mode: ForwardMode
    eager_spec: Callable[[World, Loaded], SpecInput | None]
    """``spec_info`` of the live batch."""
    eager_extends: Callable[[World, Loaded], Mapping[str, Any]]
    """The ``extend_*`` fields of the live batch."""
    captured_spec: Callable[[World, StaticInputs, int, int], SpecInput | None]
    """(world, static, bs, width): ``spec_info`` of a bucket's dummy batch."""
    fill: Callable[[World, StaticInputs, Loaded, int], None]
    """(world, static, loaded, bs): the mode's own buffers, padding first and then the live heads."""
    replay_spec: Callable[[World, StaticInputs, Loaded, int, int], SpecInput | None]
    """(world, static, loaded, bs, width): ``spec_info`` of the replay view."""
    finish: Callable[[World, Trace, ForwardBatch, int], None]
    """(world, trace, batch, topk): what follows the layers; recorded in the graph."""
    outputs: Callable[[Trace, Loaded], Outputs]
    """The mode's fields for the live rows, still on the device."""

"""What one mode adds to the common drive: a record of functions, one record a mode."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from attn_testkit.contract import ForwardBatch, ForwardMode, SpecInput
from attn_testkit.model import Trace

from .harness import LoadedStep, ServerHarness
from .static_inputs import StaticInputs

__all__ = ["ModeDriver", "Rows", "every_token", "one_a_request"]


def _none(*_: object) -> Mapping[str, Any]:
    return {}


def _once(harness: ServerHarness, batch: ForwardBatch) -> Generator[ForwardBatch, Trace, None]:
    yield batch


Rows = slice | npt.NDArray[np.int64]
"""Which rows: the first ones, or [n]."""


def every_token(loaded: LoadedStep, bs: int) -> Rows:
    """A row for each of the step's tokens, the first ones."""
    return slice(loaded.step.tokens)


def one_a_request(loaded: LoadedStep, bs: int) -> Rows:
    """A row for each of the live requests, the first ones."""
    return slice(loaded.step.bs)


@dataclass(frozen=True)
class ModeDriver:
    """How a server runs one forward mode. Its functions raise ``DriveError`` where they ask the backend."""

    mode: ForwardMode
    eager_spec: Callable[[ServerHarness, LoadedStep], SpecInput | None]
    """(harness, loaded): ``spec_info`` of the live batch, on the host: a batch goes to the device in one piece."""
    eager_extends: Callable[[ServerHarness, LoadedStep], Mapping[str, Any]]
    """(harness, loaded): the ``extend_*`` fields of the live batch, likewise."""
    captured_spec: Callable[[ServerHarness, StaticInputs, int, int], SpecInput | None]
    """(harness, static, bs, width): ``spec_info`` of a bucket's dummy batch."""
    fill: Callable[[ServerHarness, StaticInputs, LoadedStep, int], None]
    """(harness, static, loaded, bs): the mode's own buffers, padding and live heads, in ``static.host``."""
    replay_spec: Callable[[ServerHarness, StaticInputs, LoadedStep, int, int], SpecInput | None]
    """(harness, static, loaded, bs, width): ``spec_info`` of the replay view."""
    finish: Callable[[ServerHarness, Trace, ForwardBatch, int], None]
    """(harness, trace, batch, topk): what follows the layers; recorded in the graph."""
    returned_rows: Callable[[LoadedStep, int], Rows]
    """(loaded, bs): which of the rows that ``finish`` made of ``bs`` requests are of live ones. The mode returns these.
    """
    captured_extends: Callable[[ServerHarness, StaticInputs, int, int, int], Mapping[str, Any]] = _none
    """(harness, static, bs, width, fill): the ``extend_*`` fields of a bucket's dummy batch, and what else differs from
    a batch of ``fill`` keys a request. Fills the static buffers that it names."""
    replay_extends: Callable[[ServerHarness, StaticInputs, LoadedStep, int, int], Mapping[str, Any]] = _none
    """(harness, static, loaded, bs, fill): the ``extend_*`` fields of the replay view, and what else differs."""
    forwards: Callable[[ServerHarness, ForwardBatch], Generator[ForwardBatch, Trace, None]] = _once
    """(harness, batch): a batch for each forward of the model that one plan is for; is sent the trace of each. Device
    work only."""
    live_rows: Callable[[LoadedStep, int], Rows] = every_token
    """(loaded, bs): where the step's rows are among those of all forwards, each of ``bs`` requests."""

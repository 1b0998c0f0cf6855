"""The part of a run that depends on the mode: one record of functions per mode."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from attn_testkit.contract import ForwardBatch, ForwardMode, SpecInput
from attn_testkit.model import Trace

from .harness import ServerHarness, StagedStep
from .static_inputs import StaticInputs


def _none(*_: object) -> Mapping[str, Any]:
    return {}


def _once(harness: ServerHarness, batch: ForwardBatch) -> Generator[ForwardBatch, Trace, None]:
    yield batch


Rows = slice | npt.NDArray[np.int64]
"""Selection of rows: the first ones, or indices [n]."""


def every_token(staged: StagedStep, bs: int) -> Rows:
    """Select the first rows, one per token of the step."""
    return slice(staged.step.tokens)


def one_a_request(staged: StagedStep, bs: int) -> Rows:
    """Select the first rows, one per live request."""
    return slice(staged.step.bs)


@dataclass(frozen=True)
class ModeRunner:
    """Functions for running one forward mode as a server does. They raise ``RunError`` if a backend's hook raises."""

    mode: ForwardMode
    eager_spec: Callable[[ServerHarness, StagedStep], SpecInput | None]
    """Function (harness, loaded): ``spec_info`` of the live batch, on the host: the batch is sent in one transfer."""
    eager_extends: Callable[[ServerHarness, StagedStep], Mapping[str, Any]]
    """Function (harness, loaded): the ``extend_*`` fields of the live batch, on the host."""
    captured_spec: Callable[[ServerHarness, StaticInputs, int, int], SpecInput | None]
    """Function (harness, static, bs, width): ``spec_info`` of a bucket's dummy batch."""
    fill: Callable[[ServerHarness, StaticInputs, StagedStep, int], None]
    """Function (harness, static, loaded, bs): fill the mode's buffers, padding and live heads, in ``static.host``."""
    replay_spec: Callable[[ServerHarness, StaticInputs, StagedStep, int, int], SpecInput | None]
    """Function (harness, static, loaded, bs, width): ``spec_info`` of the replay view."""
    finish: Callable[[ServerHarness, Trace, ForwardBatch, int], None]
    """Function (harness, trace, batch, topk): the work after the layers; recorded in the graph."""
    returned_rows: Callable[[StagedStep, int], Rows]
    """Function (loaded, bs): live rows among those that ``finish`` computed for ``bs`` requests. The mode returns
    these."""
    captured_extends: Callable[[ServerHarness, StaticInputs, int, int, int], Mapping[str, Any]] = _none
    """Function (harness, static, bs, width, fill): ``extend_*`` and other fields of a bucket's dummy batch that differ
    from those of ``fill`` keys per request. Fills the static buffers that it names."""
    replay_extends: Callable[[ServerHarness, StaticInputs, StagedStep, int, int], Mapping[str, Any]] = _none
    """Function (harness, static, loaded, bs, fill): ``extend_*`` and other fields of the replay view that differ."""
    forwards: Callable[[ServerHarness, ForwardBatch], Generator[ForwardBatch, Trace, None]] = _once
    """Generator (harness, batch): a batch for each forward of the model that one plan covers; the trace of each forward
    is sent to it. Device work only."""
    live_rows: Callable[[StagedStep, int], Rows] = every_token
    """Function (loaded, bs): indices of the step's rows among the rows of all forwards, each of ``bs`` requests."""

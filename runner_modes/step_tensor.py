"""The record of a tensor of a step: its buffer for graphs, and its fields in batches.

A tensor is declared once, in the file of its feature or mode. ``step_tensors`` is the table of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from attn_testkit.cases.case import Case
from attn_testkit.cases.features.server.wider_buffers import columns_behind
from attn_testkit.contract import BackendContext, ForwardMode
from attn_testkit.model import with_columns_behind
from attn_testkit.steps.data import StepData
from attn_testkit.steps.schedule import Schedule, Step

from .harness import ServerHarness, StagedStep


@dataclass(frozen=True)
class Buffers:
    """Device memory that all graphs of a schedule read, by the names of tensors: live entries first, then padding."""

    schedule: Schedule
    """Schedule whose steps the buffers hold."""
    tensors: Mapping[str, torch.Tensor]
    """Flat buffers on the device, [max_bs * count, ...] each."""
    host: Mapping[str, npt.NDArray[Any]] = field(repr=False)
    """Host copies of ``tensors``. A step writes here."""
    seq_lens_cpu: torch.Tensor
    """Lengths on the host, [max_bs] int64."""
    counts: Mapping[str, int]
    """Number of entries per request of each buffer."""

    def __getitem__(self, name: str) -> torch.Tensor:
        """Buffer of a tensor on the device."""
        return self.tensors[name]

    def rows(self, name: str, columns: int) -> torch.Tensor:
        """[max_bs, columns, ...]: first columns of a tensor with a row per request, which may be wider."""
        buffer = self.tensors[name]
        return buffer.view(-1, self.counts[name], *buffer.shape[1:])[:, :columns]


@dataclass(frozen=True)
class Filling:
    """One step whose values are written to buffers."""

    harness: ServerHarness
    staged: StagedStep
    fill: int
    """Value of ``seq_lens`` for padded requests."""

    @property
    def case(self) -> Case:
        """Case of the schedule."""
        return self.staged.schedule.case

    @property
    def step(self) -> Step:
        """The step."""
        return self.staged.step

    @property
    def data(self) -> StepData:
        """Numbers of the step."""
        return self.staged.data


@dataclass(frozen=True)
class GraphBatch:
    """Sizes of a graph's batch, at its capture or at a replay."""

    harness: ServerHarness
    buffers: Buffers
    mode: ForwardMode
    bs: int
    """Requests, padded ones included."""
    rows: int
    """Rows of ``bs`` requests."""
    requests: int | None
    """Length of tensors with an entry per request; None: whole buffers."""
    ids: int
    """Length of ``input_ids``."""
    stored: int
    """Length of ``out_cache_loc``."""
    staged: StagedStep | None = None
    """The step of a replay; None at capture."""


def _always(harness: ServerHarness) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class BatchField:
    """A field of a batch."""

    name: str = field(kw_only=False)
    """Name of the field, or of a buffer. Without ``eager`` and ``graph``, the mode puts it into the batch."""
    eager: Callable[[ServerHarness, StagedStep], Any] | None = None
    """Function (harness, loaded): the value in an eager batch, on the host. None: eager batches do not have it."""
    graph: Callable[[GraphBatch], Any] | None = None
    """Function: the value in a graph's batch. None: graphs do not have it."""
    given: Callable[[ServerHarness], bool] = _always
    """Function (harness): true if batches of the instance have the field."""
    watched: tuple[str, ...] = ()
    """Names in messages, as paths; the first names its buffer. Empty if a step may write it."""
    view: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Function: what an eager batch has of the tensor that ``eager`` gives, on the device. None: all of it."""


def _one(context: BackendContext, case: Case) -> int:
    return 1


def _zero(harness: ServerHarness, schedule: Schedule, fill: int) -> Any:
    return 0


@dataclass(frozen=True, kw_only=True)
class StepTensor(BatchField):
    """A tensor of a step that has a static buffer."""

    dtype: torch.dtype = field(kw_only=False)
    per: Literal["request", "row"] = "request"
    """Unit for which the tensor has ``entries``."""
    entries: Callable[[BackendContext, Case], int] = _one
    """Function (context, case): number of entries per unit. 0: batches do not have the tensor."""
    columns: tuple[int, ...] = ()
    """Shape of an entry."""
    more: int = 0
    """Number of extra entries."""
    behind: Any = None
    """Contents of the columns after the entries of a request, if the server gives columns of wider buffers
    (``wider_buffers``): a number, or one for each of ``columns``. None: there are no such columns."""
    padded: Callable[[ServerHarness, Schedule, int], Any] = _zero
    """Function (harness, schedule, fill): contents before a capture, when everything is padding."""
    live: Callable[[Filling], Any] | None = None
    """Function: the first entries in a step, or None if they do not change. None: the mode fills the buffer."""
    rest: Callable[[Filling], Any] | None = None
    """Function: contents of the entries after the live ones, or None if they do not change."""
    stale: Literal["", "asked", "always"] = ""
    """Steps whose padding keeps the values of an earlier step: those with the padding ``stale``, or all. In other steps
    it is zeros. Empty: ``rest`` decides."""

    def count(self, context: BackendContext, case: Case) -> int:
        """Number of entries per request, columns after its own included."""
        own = self.entries(context, case) * (case.width if self.per == "row" else 1)
        return own + self.after(case) if own else 0

    def after(self, case: Case) -> int:
        """Number of columns after the entries of a request."""
        return 0 if self.behind is None else columns_behind(case)

    def widened(self, rows: torch.Tensor, case: Case) -> torch.Tensor:
        """``rows`` [n, entries, ...] of an eager batch, which are the first columns of a wider buffer if a server has
        one."""
        further = self.after(case)
        return with_columns_behind(rows, further, torch.tensor(self.behind)) if further else rows

    def named(self, *, spec: bool) -> str:
        """Name of the buffer in messages. ``spec``: true if batches have a ``spec_info``."""
        own = [path for path in self.watched if ".spec_info." not in path]
        return own[0] if own and not spec else next(iter(self.watched), "")

    def rows(self, buffer: npt.NDArray[Any], context: BackendContext, case: Case) -> npt.NDArray[Any]:
        """View [n, count, ...] of ``buffer``, with a row for each request."""
        return buffer.reshape(-1, self.count(context, case), *self.columns)

    def pad(self, buffer: npt.NDArray[Any], harness: ServerHarness, schedule: Schedule, fill: int) -> None:
        """Write the contents before a capture into the host copy of the buffer."""
        buffer[:] = self.padded(harness, schedule, fill)
        if buffer.size and (further := self.after(schedule.case)):
            self.rows(buffer, harness.context, schedule.case)[:, -further:] = self.behind

    def fill_into(self, buffer: npt.NDArray[Any], filling: Filling) -> None:
        """Write a step's entries into the host copy of the buffer."""
        if self.live is None or not buffer.size:
            return
        values = self.live(filling)
        if self.behind is not None and (further := self.after(filling.case)):
            buffer = self.rows(buffer, filling.harness.context, filling.case)[:, :-further]
            values = None if values is None else np.reshape(values, (-1, *buffer.shape[1:]))
        count = 0 if values is None else len(values)
        if count:
            buffer[:count] = values
        after = None if self.rest is None else self.rest(filling)
        if after is not None:
            buffer[count:] = after


def of_requests(name: str) -> Callable[[GraphBatch], torch.Tensor]:
    """Value in a graph's batch of a tensor with an entry per request."""
    return lambda batch: batch.buffers[name][: batch.requests]

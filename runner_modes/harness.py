"""The server around a backend: pools, request table, model, and one backend instance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from attn_testkit.cases.case import Case
from attn_testkit.cases.data import DTYPES, StepData, make_layers, make_step_data, pool_image
from attn_testkit.cases.schedule import Schedule, Step
from attn_testkit.checks.observation import Observation
from attn_testkit.contract import AttentionBackend, AttentionLayer, BackendContext, Capabilities, ForwardMode, KVPool
from attn_testkit.model import Model, pack

from .errors import no_mode_left
from .uploads import upload_into

__all__ = ["LoadedStep", "ServerHarness", "context_for"]


@dataclass(frozen=True)
class LoadedStep:
    """The step that the harness currently holds."""

    schedule: Schedule
    step: Step
    data: StepData
    slots: int
    """Slots of the KV pool that the schedule uses, page 0 included."""


def _largest(schedules: Sequence[Schedule], name: str) -> int:
    return max(int(getattr(schedule, name)) for schedule in schedules)


def context_for(
    schedules: Sequence[Schedule], device: torch.device, layers: tuple[AttentionLayer, ...]
) -> BackendContext:
    """What a server would give the constructor of a backend that is to run these schedules."""
    case = schedules[0].case
    dtype = DTYPES[case.dtype]
    kv_dtype = dtype if case.kv_dtype == "same" else DTYPES[case.kv_dtype]
    pages, rows = _largest(schedules, "num_pages"), _largest(schedules, "pool_rows")
    ctx = _largest(schedules, "max_context_len")
    spec = [s for s in schedules if s.case.mode.is_speculative()]
    verify = [s for s in schedules if s.case.tree is not None]
    return BackendContext(
        device=device,
        dtype=dtype,
        kv_pool=KVPool(pages * case.page_size, case.page_size, layers, kv_dtype, device),
        req_to_token=torch.zeros(rows + 1, ctx, dtype=torch.int32, device=device),
        layers=layers,
        page_size=case.page_size,
        max_context_len=ctx,
        max_bs=_largest(schedules, "most_requests"),
        max_num_tokens=_largest(schedules, "most_tokens"),
        modes=frozenset(s.case.mode for s in schedules),
        num_draft_tokens=max([1] + [s.case.width for s in spec]),
        speculative_num_steps=max(s.spec_steps for s in schedules),
        topk=max([0] + [s.case.topk for s in verify]),
        draft_branches=max(s.case.draft.branches if s.case.draft else 0 for s in schedules),
        max_extend_tokens=max([0] + [s.case.most_new for s in schedules if s.case.mode is ForwardMode.EXTEND]),
    )


class ServerHarness:
    """One backend instance and everything it may touch, for one or several schedules (modes) that share it."""

    def __init__(
        self,
        backend_class: type[AttentionBackend],
        schedules: Sequence[Schedule],
        device: torch.device,
        unowned: float = math.nan,
        fill: int = 0xFF,
        *,
        claims: Capabilities | None = None,
    ) -> None:
        """Construct the backend; raises what its constructor raises.

        ``schedules``: with what differs between their modes alone; the first one's case decides dtypes, page size and
        layers. ``unowned``: what slots that no request owns hold, NaN, or a number to find out where a NaN came from.
        ``fill``: the byte that outputs hold before they are written. ``claims``: what the judge was told that the class
        claims; None: ask the class.
        """
        self.device, self.unowned, self.fill = device, unowned, fill
        self.deliver: Callable[[Observation], Observation] = lambda observed: observed
        """Hears of every observation as soon as it is made, also of a drive that then breaks off."""
        self.captured: Callable[[], None] = lambda: None
        """Called when all graphs are captured."""
        self.copies_pool = True
        """Whether observations hold the KV pool."""
        self.case: Case = schedules[0].case
        layers = tuple(
            replace(layer, sinks=layer.sinks.to(device)) if layer.sinks is not None else layer
            for layer in make_layers(self.case)
        )
        self.context = context_for(schedules, device, layers)
        self._pool_before = torch.empty_like(self.context.kv_pool.storage)
        self.capabilities = backend_class.capabilities if claims is None else claims
        self.replay_graph: Callable[[Any], None] = torch.cuda.CUDAGraph.replay
        """Taken before the backend is constructed: one that replaces it would have a graph that is never replayed."""
        self.model = Model(self.case, layers, _largest(schedules, "most_rows"), self.context.dtype, device)
        # Rows of the table that no step has filled yet are finite: graphs are captured on token 0.
        self.model.table[:-1] = 0.5
        self.model.hidden_table[:-1] = 0.5
        with no_mode_left():
            self.backend = backend_class(self.context)

    def prepare_capture(self) -> None:
        """The memory as a server has it when it captures: an all-zero request table, page 0 zeros, no live request."""
        pool = self.context.kv_pool
        pool.storage.view(torch.uint8).fill_(0x7F if pool.dtype.itemsize == 1 else 0xFF)
        pool.storage.view(torch.uint8)[:, :, : pool.page_size] = 0
        self.context.req_to_token.zero_()

    def load(self, schedule: Schedule, step: Step, pattern: str | None = None) -> LoadedStep:
        """Put a step's numbers, KV pool and request table in place. Slots that no request owns hold ``unowned``.

        ``pattern``: numbers other than the case's (``cases/patterns.py``, ``cases/places.py``).
        """
        data = make_step_data(schedule, step, pattern)
        marked = pattern if pattern and pattern.startswith("place.") else ""
        tails = self.case.kv_dtype in self.capabilities.finite_page_tails
        image = pool_image(schedule, step, data, tails, after=step.stored, unowned=self.unowned, marked=marked)
        if step.stored:
            data = replace(data, k=torch.full_like(data.k, math.nan), v=torch.full_like(data.v, math.nan))
        pool = self.context.kv_pool.storage
        rows_of_table = pack(data.q, data.k, data.v, mla=self.context.layers[0].is_mla)
        upload_into(self.model.table[: step.tokens], rows_of_table)
        upload_into(self.model.hidden_table[: step.tokens], data.hidden)
        slots = image.shape[2]
        raw = pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool
        if slots < pool.shape[2]:
            raw[:, :, slots:] = (0x7F if math.isnan(self.unowned) else 0) if raw.dtype == torch.uint8 else self.unowned
        upload_into(raw[:, :, :slots], image.view(raw.dtype))
        if self.copies_pool:
            self._pool_before.copy_(pool)
        rows, ctx = step.req_to_token.shape
        upload_into(self.context.req_to_token[:rows, :ctx], torch.from_numpy(step.req_to_token))
        return LoadedStep(schedule, step, data, slots)

    def written(self, loaded: LoadedStep) -> tuple[torch.Tensor, torch.Tensor]:
        """What changed in the KV pool since the step was loaded, compared bit for bit on the device.

        Slots [n] int64, ascending, and what they hold now [L, 2 or 1, n, Hk, Dqk] as integers of the dtype's size.
        """
        # A drive of several modes has a pool as large as the largest of them needs.
        now = self.context.kv_pool.storage[:, :, : loaded.slots]
        before = self._pool_before[:, :, : loaded.slots]
        differs = (_wide(now) != _wide(before)).any(-1).flatten(0, 1).any(0)
        slots = differs.nonzero().flatten()
        return slots, now.view(_BITS[now.dtype.itemsize])[:, :, slots]


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def _wide(pool: torch.Tensor) -> torch.Tensor:
    """[L, 2 or 1, slots, n]: the bits of each slot, in integers as wide as a slot's row allows."""
    size = pool.shape[3] * pool.shape[4] * pool.dtype.itemsize
    return pool.flatten(3).view(torch.int64 if size % 8 == 0 else torch.uint8)

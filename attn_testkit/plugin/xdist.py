"""The plugin on the controller of an xdist run: GPUs for workers, what is due, workers that die."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest

from ..reports.record import plain
from ..results import format_failure
from ..running.planning.request import kit_error
from ..running.processes.gpus import GpuSlots, visible_gpus
from .reporting import properties
from .session import Session

__all__ = ["XdistHooks"]


class XdistHooks:
    """Hooks that exist only where xdist does."""

    def __init__(self, session: Session) -> None:
        self._session = session
        shared = session.request.device in ("auto", "cuda") and bool(session.request.backends)
        self._slots = GpuSlots(visible_gpus(os.environ) if shared else ())

    def pytest_configure_node(self, node: Any) -> None:
        """Before a worker starts: its GPU, and what is planned."""
        worker = node.gateway.id
        node.workerinput["attn_gpu"] = self._slots.take(worker)
        prepared = self._session.prepared
        node.workerinput["attn_plan"] = pickle.dumps(prepared.plan) if prepared else b""

    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """A worker has ended: its GPU is free for the next."""
        self._slots.free(node.gateway.id)

    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        """The first worker that has collected reports what is due; all collect the same."""
        if any("attn_testkit" in nodeid or "[" in nodeid for nodeid in ids):
            self._session.begin(ids)

    @pytest.hookimpl(tryfirst=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport, sched: object) -> None:
        """A worker of pytest died over a case-run. No backend runs in it: the fault is ours. The message is xdist's."""
        item = self._session.due.get(crashitem)
        if item is None:
            return
        result = kit_error(item, str(report.longrepr))
        report.attn_result = plain(asdict(result))  # type: ignore[attr-defined]
        report.longrepr = format_failure(result, self._session.header)
        report.user_properties = properties(result)

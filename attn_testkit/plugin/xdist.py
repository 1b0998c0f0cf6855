"""The plugin on the controller of an xdist run: GPUs for workers, expected case-runs, workers that die."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest

from ..reports.junit import properties
from ..reports.record import plain
from ..results.failure_text import format_failure
from ..running.planning.request import kit_error
from ..running.processes.gpus import GpuSlots, visible_gpus
from .own_session import OwnSession
from .session import Session


class XdistHooks:
    """Hooks that exist only where xdist does."""

    def __init__(self, session: Session, own: OwnSession) -> None:
        self._session, self._own = session, own
        shared = session.request.device in ("auto", "cuda") and bool(session.request.backends)
        self._slots = GpuSlots(visible_gpus(os.environ) if shared else ())
        self._plans: tempfile.TemporaryDirectory[str] | None = None

    def pytest_configure_node(self, node: Any) -> None:
        """Give a new worker its GPU, the plan, and the address of its judge."""
        worker = node.gateway.id
        node.workerinput["attn_gpu"] = self._slots.take(worker)
        prepared = self._session.prepared
        node.workerinput["attn_plan"] = pickle.dumps(prepared.plan) if prepared else b""
        self._plans = self._plans or tempfile.TemporaryDirectory(prefix="attn-testkit-plans-")
        node.workerinput["attn_plans"] = self._plans.name
        node.workerinput["attn_judge"] = self._session.judge_for_worker() if prepared else ""

    def pytest_unconfigure(self) -> None:
        """Remove the folder of plans."""
        if self._plans is not None:
            self._plans.cleanup()

    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Free the GPU of a worker that ended, and store its results."""
        output = getattr(node, "workeroutput", {})
        self._own.take(output.get("attn_seen", ()), output.get("attn_in_shard", (0, 0)))
        self._slots.free(node.gateway.id)

    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        """Store the expected case-runs of the first worker that has collected; all workers collect the same."""
        if any("attn_testkit" in nodeid or "[" in nodeid for nodeid in ids):
            self._session.begin(ids)

    @pytest.hookimpl(tryfirst=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport, sched: object) -> None:
        """Report a pytest worker that died as an error of the kit: no backend runs in it. The message is xdist's."""
        item = self._session.due.get(crashitem)
        if item is None:
            return
        result = kit_error(item, str(report.longrepr))
        report.attn_result = plain(asdict(result))  # type: ignore[attr-defined]
        report.longrepr = format_failure(result, self._session.header)
        report.user_properties = properties(result)

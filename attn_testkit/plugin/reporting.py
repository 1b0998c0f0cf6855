"""From a case-run to a pytest report, and never a traceback of ours in between."""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _pytest._code.code import ReprEntryNative, ReprExceptionInfo, ReprFileLocation, ReprTraceback

from ..reports.record import plain
from ..reports.tally import seconds_of
from ..results import BAD, CaseResult, Status, format_failure
from ..running.pool import FRAMES, KIT_ERROR, bare_result, run_guarded
from .session import Session

if TYPE_CHECKING:
    from ..running.plan import RunPlan, WorkItem

__all__ = ["CaseFailed", "Run", "complete"]

RESULT: pytest.StashKey[CaseResult] = pytest.StashKey()


class CaseFailed(AssertionError):
    """A case-run did not pass; the message is the text of the failure."""


class Run:
    """Runs one case-run inside a test."""

    def __init__(self, session: Session, node: pytest.Item, spool: str, timeout_s: float = 0.0) -> None:
        self._session, self._node, self._spool, self._timeout_s = session, node, spool, timeout_s

    def __call__(self, item: WorkItem) -> None:
        """Run it, keep the result, and pass, fail, xfail or skip the test accordingly."""
        __tracebackhide__ = True
        result = self._result(item)
        self._node.stash[RESULT] = result
        self._node.user_properties += _properties(result)
        if result.status is Status.CRASHED and not result.reason.startswith(KIT_ERROR):
            self._lose_context(result)
        if result.status is Status.KNOWN_FAILURE:
            pytest.xfail(result.reason)
        if result.status is Status.NOT_RUN_HERE:
            pytest.skip(result.reason)
        if result.status in BAD:
            prepared = self._session.prepared
            raise CaseFailed(format_failure(result, prepared.plan.header if prepared else None))

    def _result(self, item: WorkItem) -> CaseResult:
        from ..running import plan as engine

        if self._session.lost:
            return bare_result(item, Status.NOT_RUN_HERE, self._session.lost)
        prepared = self._session.prepared
        assert prepared is not None
        if not self._spool or not self._timeout_s:
            return prepared.ledger.judge(run_guarded(engine, item, prepared.plan))
        watchdog = threading.Timer(self._timeout_s, self._give_up, [item, prepared.plan, threading.get_ident()])
        watchdog.daemon = True
        watchdog.start()
        try:
            return prepared.ledger.judge(run_guarded(engine, item, prepared.plan))
        finally:
            watchdog.cancel()

    def _give_up(self, item: WorkItem, plan: RunPlan, thread: int) -> None:
        frames = traceback.format_stack(sys._current_frames()[thread])[-FRAMES:]
        words = "".join(reversed(frames)).rstrip()
        reason = f"no result after {self._timeout_s:g} s\n{words}"
        self._leave_word(bare_result(item, Status.TIMED_OUT, reason, plan.header.device))

    def _lose_context(self, result: CaseResult) -> None:
        self._session.lost = f"not run: the device's context was lost in {result.case}"
        if self._spool:
            self._leave_word(result)

    def _leave_word(self, result: CaseResult) -> None:
        # Neither a lost context nor a hung kernel can be mended in this process: xdist starts a fresh worker.
        Path(self._spool).write_text(json.dumps(plain(asdict(result))), "utf-8")
        os._exit(1)


def complete(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """Put the result on the report, as plain values, and the failure's own text in place of a traceback."""
    if "attn_item" not in getattr(item, "fixturenames", ()):
        return
    report.user_properties = [(str(name), plain(value)) for name, value in report.user_properties]
    result = item.stash.get(RESULT, None)
    if result is None or call.when != "call":
        return
    report.attn_result = plain(asdict(result))  # type: ignore[attr-defined]
    if call.excinfo is not None and isinstance(call.excinfo.value, CaseFailed):
        report.longrepr = _text_only(item, str(call.excinfo.value))


def _text_only(item: pytest.Item, text: str) -> ReprExceptionInfo:
    # This form, unlike a plain string, survives xdist with the one-line message of the short summary.
    first, _, _ = text.partition("\n")
    path, line, _ = item.location
    # The summary's line is cut at the terminal's width and already has the case in the test's id.
    crash = ReprFileLocation(path, (line or 0) + 1, first.partition(": ")[2] or first)
    return ReprExceptionInfo(ReprTraceback([ReprEntryNative([text + "\n"])], None, style="native"), crash)


def _properties(result: CaseResult) -> list[tuple[str, Any]]:
    values: dict[str, Any] = {
        "attn_backend": result.backend,
        "attn_case": result.case,
        "attn_status": result.status,
        "attn_margin": result.margin,
        "attn_seconds": round(seconds_of(result), 4),
        "attn_emulated": result.emulated,
    }
    return [(name, plain(value)) for name, value in values.items() if value is not None]

"""Conversion of a case-run to a pytest report, without a traceback of the kit."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import pytest
from _pytest._code.code import ReprEntryNative, ReprExceptionInfo, ReprFileLocation, ReprTraceback

from ..reports.junit import properties
from ..reports.record import plain
from ..results.case_result import BAD, CaseResult, Status
from ..results.failure_text import format_failure
from .session import Session

if TYPE_CHECKING:
    from ..running.planning.request import Item

RESULT: pytest.StashKey[CaseResult] = pytest.StashKey()
OWN_RESULT: pytest.StashKey[CaseResult] = pytest.StashKey()
"""The result of a test that ``conformance_cases`` decorates: it counts in the summary by cause, but not in the
verdict."""


class CaseFailed(AssertionError):
    """Raised if a case-run did not pass. The message is the failure's text, and ``short`` the line for a summary."""

    def __init__(self, text: str, short: str = "") -> None:
        super().__init__(text)
        self.short = short


class Run:
    """A callable that runs one case-run inside a test. Backend and judge each have their own process."""

    def __init__(self, session: Session, node: pytest.Item) -> None:
        self._session, self._node = session, node

    def __call__(self, item: Item) -> None:
        """Run the case-run, keep its result, and pass, fail, xfail or skip the test accordingly."""
        __tracebackhide__ = True
        result = self._session.run(item)
        self._node.stash[RESULT] = result
        self._node.user_properties += properties(result)
        if result.status is Status.KNOWN_FAILURE:
            pytest.xfail(result.reason)
        if result.status is Status.NOT_RUN_HERE:
            pytest.skip(result.reason)
        if result.status in BAD:
            prepared = self._session.prepared
            raise CaseFailed(format_failure(result, prepared.plan.header if prepared else None, brief=True))


def complete(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """Put the result on the report as plain values, and the failure's text instead of a traceback."""
    if not {"attn_item", "attn_case", "attn_check"} & {*getattr(item, "fixturenames", ())}:
        return
    report.user_properties = [(str(name), plain(value)) for name, value in report.user_properties]
    if call.excinfo is not None and isinstance(call.excinfo.value, CaseFailed):
        report.longrepr = text_only(item, str(call.excinfo.value), call.excinfo.value.short)
    for key, name in ((RESULT, "attn_result"), (OWN_RESULT, "attn_own_result")):
        result = item.stash.get(key, None)
        if result is not None and call.when == "call":
            setattr(report, name, plain(asdict(result)))


def text_only(item: pytest.Item, text: str, short: str = "") -> ReprExceptionInfo:
    """Make a failure that pytest shows as this text, and in its short summary as the first line or ``short``."""
    # This form, unlike a plain string, survives xdist with the one-line message of the short summary.
    first, _, _ = text.partition("\n")
    path, line, _ = item.location
    # The summary's line is cut at the terminal's width and already has the case in the test's id.
    crash = ReprFileLocation(path, (line or 0) + 1, short or first.partition(": ")[2] or first)
    return ReprExceptionInfo(ReprTraceback([ReprEntryNative([text + "\n"])], None, style="native"), crash)

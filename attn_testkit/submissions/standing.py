"""The standing of some case-runs in one word, and the badge that shows it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..profiles import read_profile
from ..results.case_result import BAD, CaseResult, Status
from ..results.rules import VERSION
from .archive import Submission

__all__ = ["CONFORMANT", "FAILING", "KNOWN_FAILURES", "NOT_DECLARED", "badge", "standing"]

CONFORMANT, KNOWN_FAILURES, FAILING, NOT_DECLARED = "conformant", "known failures", "failing", "not declared"
_COLORS = {CONFORMANT: "brightgreen", KNOWN_FAILURES: "yellow", FAILING: "red", NOT_DECLARED: "lightgrey"}


def standing(rows: Iterable[CaseResult]) -> str:
    """The worst of the case-runs: ``failing``, ``known failures``, ``conformant``; ``not declared`` if none ran."""
    statuses = {row.status for row in rows if row.is_case_run}
    if statuses & BAD:
        return FAILING
    if statuses & {Status.KNOWN_FAILURE, Status.QUARANTINED}:
        return KNOWN_FAILURES
    return CONFORMANT if Status.PASSED in statuses else NOT_DECLARED


def badge(found: Submission) -> dict[str, Any]:
    """The badge of a submission, as the endpoint of shields.io reads it."""
    word = standing(found.report.results)
    ran = {row.case for row in found.report.results if row.is_case_run}
    cases = read_profile(found.header.tier).cases
    part = f" in {len(ran)} of {len(cases)} cases" if word == CONFORMANT and len(ran) < len(cases) else ""
    emulated = "" if found.on_hardware else ", emulated"
    return {
        "schemaVersion": 1,
        "label": f"attention contract {VERSION}",
        "message": f"{found.header.tier} {word}{part}{emulated}",
        "color": _COLORS[word],
    }

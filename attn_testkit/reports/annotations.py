"""Failures as GitHub annotations, which appear next to the author's lines in a pull request."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..results.case_result import BAD, CaseResult
from ..results.run_header import RunHeader
from .grouping import group_failures

MOST = 10
"""Number of annotations that GitHub shows per step."""
_LINE = re.compile(r"(?P<file>[^\s:]+\.py):(?P<line>\d+) in ")


def annotation_lines(header: RunHeader, results: Sequence[CaseResult], environment: Mapping[str, str]) -> list[str]:
    """One line per cause if the run is a step of GitHub Actions; none elsewhere.

    It names the author's file, and the line if the failure has one.
    """
    if environment.get("GITHUB_ACTIONS") != "true":
        return []
    bad = [result for result in results if result.case and result.status in BAD]
    return [_annotation(header, group.results[0], group.cause) for group in group_failures(bad)[:MOST]]


def _annotation(header: RunHeader, result: CaseResult, cause: str) -> str:
    source = header.sources.get(result.backend, {}).get("file", "")
    found = _LINE.search(result.findings[0].where) if result.findings else None
    place = {"file": _relative(source)} if source else {}
    if found and source and Path(source).name == found["file"]:
        place["line"] = found["line"]
    check = result.findings[0].check if result.findings else result.status.value
    values = {**place, "title": f"attn-testkit: {check}"}
    text = f"{cause} ({result.case}, {result.execution})"
    about = ",".join(f"{name}={_escaped(value, also=True)}" for name, value in values.items())
    return f"::error {about}::{_escaped(text)}"


def _relative(file: str) -> str:
    path = os.path.relpath(file)
    return file if path.startswith("..") else path


def _escaped(text: str, *, also: bool = False) -> str:
    """The text, escaped for a workflow command; ``also``: separators to escape, too, in a property of a command."""
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if also else text

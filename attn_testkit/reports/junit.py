"""JUnit XML of a run, with the elements and properties that the pytest plugin writes."""

from __future__ import annotations

import platform
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from typing import Any

from ..results.case_result import BAD, CaseResult, Status
from ..results.failure_text import format_failure
from ..results.run_header import RunHeader
from .record import Report, plain
from .tally import seconds_of
from .verdict import conclude

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def properties(result: CaseResult) -> list[tuple[str, Any]]:
    """The properties of a case-run in JUnit XML."""
    values: dict[str, Any] = {
        "attn_backend": result.backend,
        "attn_mode": result.mode,
        "attn_execution": result.execution,
        "attn_case": result.case,
        "attn_status": result.status,
        "attn_failed_checks": ", ".join(dict.fromkeys(finding.check for finding in result.findings)) or None,
        "attn_rules": ", ".join(dict.fromkeys(filter(None, (finding.rule for finding in result.findings)))) or None,
        "attn_reason": result.reason or None,
        "attn_margin": result.margin,
        "attn_seconds": round(seconds_of(result), 4),
        "attn_emulated": result.emulated,
    }
    return [(name, plain(value)) for name, value in values.items() if value is not None]


def junit_xml(report: Report) -> str:
    """The results as JUnit XML: a test case per case-run, and one per other reason why the run fails."""
    rows = [row for row in report.results if row.status is not Status.UNSUPPORTED]
    cases = [_case(row, report.header) for row in rows]
    cases += [_broken("known-failures", "failure", problem) for problem in report.problems]
    if report.interrupted:
        cases.append(_broken("interrupted", "error", "the run was interrupted: the results are those up to then"))
    found = conclude(report.header, report.results, problems=report.problems, interrupted=report.interrupted)
    return _document(cases, report.header.started, str(found))


def unfinished_xml(header: RunHeader) -> str:
    """The document while the run goes on: a run that is killed must not leave an empty file that looks green."""
    return _document([_broken("unfinished", "error", "the run has not ended")], header.started)


def _case(result: CaseResult, header: RunHeader) -> ElementTree.Element:
    name = f"{result.execution}-{result.case or result.mode}"
    seconds = f"{seconds_of(result):.3f}"
    case = ElementTree.Element("testcase", classname=f"{result.backend}.{result.mode}", name=name, time=seconds)
    listed = ElementTree.SubElement(case, "properties")
    for key, value in properties(result):
        ElementTree.SubElement(listed, "property", name=key, value=_readable(str(value)))
    if result.status is Status.KNOWN_FAILURE:
        ElementTree.SubElement(case, "skipped", type="pytest.xfail", message=_readable(result.reason))
    elif result.status in BAD:
        text = format_failure(result, header)
        message = text.partition("\n")[0].partition(": ")[2] or text
        kind = "error" if result.of_the_kit else "failure"
        ElementTree.SubElement(case, kind, message=_readable(message)).text = _readable(text)
    elif result.status is not Status.PASSED:
        reason = f"{result.status}: {result.reason}" if result.reason else str(result.status)
        ElementTree.SubElement(case, "skipped", type="pytest.skip", message=_readable(reason))
    return case


def _broken(name: str, kind: str, message: str) -> ElementTree.Element:
    case = ElementTree.Element("testcase", classname="attn-testkit", name=name, time="0.000")
    ElementTree.SubElement(case, kind, message=_readable(message)).text = _readable(message)
    return case


VERDICT_PROPERTY = "attn_verdict"
"""Name of the property of a test suite that has the verdict in one line."""


def _document(cases: Sequence[ElementTree.Element], started: str, verdict: str = "") -> str:
    names = {"error": "errors", "failure": "failures", "skipped": "skipped"}
    counts = {name: str(sum(case.find(kind) is not None for case in cases)) for kind, name in names.items()}
    seconds = sum(float(case.attrib["time"]) for case in cases)
    root = ElementTree.Element("testsuites", name="attn-testkit")
    about = {"tests": str(len(cases)), "time": f"{seconds:.3f}", "timestamp": started, "hostname": platform.node()}
    suite = ElementTree.SubElement(root, "testsuite", {"name": "attn-testkit", **counts, **about})
    if verdict:
        listed = ElementTree.SubElement(suite, "properties")
        ElementTree.SubElement(listed, "property", name=VERDICT_PROPERTY, value=_readable(verdict))
    suite.extend(cases)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _readable(text: str) -> str:
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)

"""What a run writes down so that a page can draw and explain it: real failures, from backend to record to page."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from in_process import check_backend

from attn_testkit import Results
from attn_testkit.checks import CHECKS
from attn_testkit.diagnosis import capture_values, root_cause
from attn_testkit.reports.grouping import group_failures, without_numbers
from attn_testkit.reports.record import Record, read_report, schema
from attn_testkit.reports.render import html_page
from attn_testkit.results.texts import RESTATES_THE_CHECK


@pytest.fixture(scope="module")
def off_by_one() -> Results:
    return check_backend("attn_testkit.examples:OffByOneBackend", executions=["eager"], device="cpu", diagnose="all")


@pytest.fixture(scope="module")
def packed_stride() -> Results:
    return check_backend(
        "attn_testkit.examples:PackedStrideBackend",
        executions=["graph"],
        device="cpu",
        diagnose="all",
        cases=["*-k7x2-*", "*-k600.70.12-*", "*-k0.1.8-*"],
    )


def test_wrong_numbers_come_with_a_map_of_errors_and_of_keys(off_by_one):
    for failed in off_by_one.failures:
        (finding, *_) = failed.findings
        assert finding.errors is not None
        assert finding.keys is not None
        assert max(map(max, finding.errors.ratios)) > 1
        (first, last), *more = finding.keys.wanted
        assert first == 0
        assert not more
        assert f"expected {first}..{last}" in finding.attended or f"expected {last}" in finding.attended
        assert f"request {finding.keys.request}" in finding.attended
        used = {key for a, b in finding.keys.used for key in range(a, b + 1)}
        assert used < {*range(last + 1)}
        assert last not in used, "this is its bug"


def test_the_header_explains_every_check(off_by_one):
    explained = off_by_one.header.explained
    assert list(explained) == list(CHECKS)
    assert all(explained[check.id]["text"] == check.text for check in CHECKS.values())
    assert all(set(words) == {"text", "cause", "source", "how_to_read"} for words in explained.values())


def test_a_record_keeps_both(off_by_one, tmp_path):
    record = Record(tmp_path / "out.json", off_by_one.header)
    for row in off_by_one:
        record.add(row)
    record.finish(off_by_one.exit_code)
    jsonschema.validate(json.loads((tmp_path / "out.json").read_text()), schema())
    report = read_report(tmp_path / "out.json")
    assert report.results == off_by_one.rows
    assert report.header == off_by_one.header
    page = html_page(report)
    assert page.count('<svg class="plot errors"') >= 1
    assert page.count('<svg class="plot keys"') >= 1
    assert 'href="#check-matches-oracle"' in page


def test_one_bug_is_a_few_causes_however_many_case_runs_it_breaks(off_by_one, packed_stride):
    (largest, *others) = group_failures(off_by_one.failures)
    assert len(largest.results) + sum(len(group.results) for group in others) == len(off_by_one.failures) == 8
    # If all requests lack equally many tokens, an end that is off by as many explains it as well.
    assert len(others) <= 1
    assert largest.check == "matches-oracle"
    assert "KV token" in largest.cause
    assert "missing" in largest.cause
    (largest, *others) = group_failures(packed_stride.failures)
    assert len(largest.results) > len(others) <= 1
    assert without_numbers(largest.cause).startswith(
        "query offsets are probably not the running sum of the counts: accepted counts are N of N"
    )


def test_what_restates_a_check_is_what_diagnosis_says():
    """A sentence that diagnosis words anew would be taken for a cause, and all failures of a check would have one."""
    sources = "".join(Path(module.__file__).read_text() for module in (root_cause, capture_values))
    said = " ".join(sources.split()).replace('" "', "").replace("{least}", "3")
    for words in RESTATES_THE_CHECK:
        assert words in without_numbers(said), words

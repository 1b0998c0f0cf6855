"""The script that shows what failures say first: what it draws, what it reads, and one fault from end to end."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

CI = Path(__file__).resolve().parents[2] / "ci"
TEXT = """\
a-case: request 1 is wrong
  check    replay-follows-batch
  where    out[0] = nan
  hint     rows are packed,
           and offsets are their sum
  hint     another
  hint     a third
  backend  somebody
a-case: request 2 is wrong
  check    finite
  hint     of another finding
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(CI))
    return importlib.import_module("first_lines")


def test_a_draw_is_the_same_for_the_same_seed_and_names_no_fault_twice(script: ModuleType) -> None:
    first, again, other = script.drawn(40, 1, ()), script.drawn(40, 1, ()), script.drawn(40, 2, ())
    assert first == again != other
    assert len(set(first)) == len(first) == 40
    assert len(script.drawn(1 << 20, 1, ())) >= 100, "no more than there are"
    assert script.drawn(40, 1, ("qlens-*",)) == ["qlens-packed-vs-uniform-stride"]


def test_what_is_read_first_is_of_the_first_finding(script: ModuleType) -> None:
    assert script.read_first(TEXT) == [
        "request 1 is wrong (replay-follows-batch)",
        "hint: rows are packed, and offsets are their sum",
        "hint: another",
    ]
    assert script.read_first("a-case: crashed: it is gone\n  backend  somebody") == ["crashed: it is gone ()"]
    assert script.read_first("") == []


def test_a_fault_is_run_and_its_mechanism_stands_above_what_its_failure_says(script: ModuleType) -> None:
    result = CliRunner().invoke(script.first_lines, ["--fault", "query-scaled-in-place"])
    assert result.exit_code == 0, result.output
    title, first, *_ = result.output.splitlines()
    assert title.startswith("[1 of 1] query-scaled-in-place: The softmax scale is multiplied into q in place")
    assert "(inputs-unchanged)" in first
    whole = CliRunner().invoke(script.first_lines, ["--fault", "query-scaled-in-place", "--whole"])
    assert "  repro    attn-testkit repro" in whole.output


def test_a_name_of_no_fault_is_an_error(script: ModuleType) -> None:
    result = CliRunner().invoke(script.first_lines, ["--fault", "no-such-*"])
    assert result.exit_code == 2
    assert "no fault matches no-such-*" in result.output

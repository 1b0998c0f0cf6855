"""The tool that writes profiles: which cases may enter, and that a released one is never written."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from attn_testkit import profiles
from attn_testkit.backends.torch_native_state import TorchNativeStateBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.contract import ForwardMode
from attn_testkit.profiles import RELEASED, written
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.steps.digest import digests_of

GOOD, ALARM, UNRUN = (f"decode-gqa2x2-d64-bf16-p16-k{keys}-shuffled-gauss-b1prod" for keys in (3, 4, 5))


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "ci"))
    found = importlib.import_module("make_profile")
    monkeypatch.setattr(found, "FOLDER", tmp_path)
    monkeypatch.setattr(found, "profile_names", lambda: profiles.profile_names(tmp_path))
    monkeypatch.setattr(found, "read_profile", lambda name: profiles.read_profile.__wrapped__(name, tmp_path))
    (tmp_path / "2020.01").mkdir()
    return found


def test_cases_with_an_alarm_and_cases_that_nobody_ran_may_not_enter(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (
        CaseResult("one", "decode", "eager", GOOD, Status.PASSED),
        CaseResult("one", "decode", "graph", ALARM, Status.PASSED),
        CaseResult("two", "decode", "eager", ALARM, Status.FAILED),
        CaseResult("two", "decode", "eager", UNRUN, Status.UNSUPPORTED),
    )
    monkeypatch.setattr(tool, "read_report", lambda _: type("Report", (), {"results": rows}))
    tool.write("2020.01/decode", dict.fromkeys((GOOD, ALARM, UNRUN), ("a", "b")))
    tool.admit("2020.01", ["any.json"])
    assert {**tool.read_profile("2020.01/decode").cases} == {GOOD: ("a", "b")}
    assert capsys.readouterr().out.splitlines() == [
        f"2020.01/decode: {ALARM} may not enter: two eager: failed",
        f"2020.01/decode: {UNRUN} may not enter: no backend ran it",
    ]


def test_a_released_profile_is_never_written(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    tool.write("2020.01/decode", {GOOD: digests_of(parse_case(GOOD))})
    tool.release("2020.01")
    profile = tool.read_profile("2020.01/decode")
    assert profile.status == RELEASED
    assert f'"2020.01/decode" = "{profile.digest}"' in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"2020\.01/decode is released and never changes"):
        tool.write("2020.01/decode", {})
    assert (tool.FOLDER / "2020.01" / "decode.toml").read_text() == written(profile.cases, RELEASED)


def test_cheap_cases_are_chosen_in_which_a_backend_meets_its_values(tool: ModuleType) -> None:
    declared = TorchNativeStateBackend.capabilities
    found = [parse_case(case) for case in tool.chosen({"state": declared}, "recurrent", [ForwardMode.DECODE])]
    assert 5 < len(found) <= tool.MOST_CASES
    assert all(tool.runs(declared, case) for case in found)
    assert max(sum(case.prefixes) for case in found) <= tool.MOST_TOKENS
    assert {case.head_dim for case in found} >= {64, 128}

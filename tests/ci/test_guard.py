"""The guard of changes that must change nothing: what a comparison of two records sees."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CI = Path(__file__).resolve().parents[2] / "ci"
RECORD: dict[str, Any] = {
    "g1": {"a": {"smoke": {"planned": {"decode eager": ["one", "two"]}, "cases": {"one": {"schedule": "12"}}}}},
    "g2": {"a": {"decode eager one": {"status": "passed", "checks": ["finite"]}}},
}


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(CI))
    return importlib.import_module("guard")


def compared(guard: ModuleType, folder: Path, after: object, *more: str) -> int:
    files = [folder / "before.json", folder / "after.json"]
    for file, content in zip(files, (RECORD, after), strict=True):
        file.write_text(json.dumps(content))
    code: int = guard.main(["compare", *map(str, files), *more])
    return code


def test_equal_records_differ_in_nothing(guard: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compared(guard, tmp_path, RECORD) == 0
    assert capsys.readouterr().out == ""


CHANGED = [
    ("g1 / a / smoke / cases / one / schedule: 12 -> 13", ('"12"', '"13"')),
    ("g1 / a / smoke / planned / decode eager: lost two", (', "two"', "")),
    ("g1 / a / smoke / planned / decode eager: gained two", ('"two"', '"two", "two"')),
    ("g1 / a / smoke / planned / decode eager: is in another order", ('"one", "two"', '"two", "one"')),
    ("g2 / a / decode eager one / status: passed -> failed", ("passed", "failed")),
    ("g2 / a / decode eager one / checks: is missing", (', "checks": ["finite"]', "")),
    ("g2 / b: is new", ('"g2": {', '"g2": {"b": {}, ')),
]


@pytest.mark.parametrize(("line", "change"), CHANGED, ids=[line for line, _ in CHANGED])
def test_what_changed_is_printed_with_its_path_and_counted(
    line: str, change: tuple[str, str], guard: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    after = json.loads(json.dumps(RECORD).replace(*change))
    assert compared(guard, tmp_path, after) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == [line, "1 differences"]


def test_a_guard_that_was_not_recorded_again_is_missing(
    guard: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compared(guard, tmp_path, {"g1": RECORD["g1"]}) == 1
    assert "g2: is missing" in capsys.readouterr().out
    assert compared(guard, tmp_path, {"g1": RECORD["g1"]}, "--only", "^g1") == 0

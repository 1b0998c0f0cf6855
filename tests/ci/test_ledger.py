"""The script that changes one key of many in the KV pool of real backends: a few places, and what it prints."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

CI = Path(__file__).resolve().parents[2] / "ci"


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(CI))
    return importlib.import_module("ledger")


def test_every_changed_key_of_every_dtype_and_pool_is_found_and_named(ledger: ModuleType) -> None:
    result = CliRunner().invoke(
        ledger.main, ["--device", "cpu", "-b", "torch_native", "--length", "1030", "--places", "1", "--edges", "2"]
    )
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines() if line.startswith("torch_native")]
    assert [row[1:4] for row in rows] == [
        [dtype, pool, "1030"] for dtype in ("bf16", "fp16") for pool in ("same", "e4m3")
    ]
    for *_, healthy, least, found, named, _ in rows:
        assert float(healthy) < 0.1
        assert float(least) > 0.5
        assert found == named
        assert found == "15/15"


def test_what_was_tried_until_an_interrupt_is_a_row_and_progress_is_reported(
    ledger: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, calls = ledger.find_miscounts, []

    def second_time_interrupted(*asked: object) -> object:
        calls.append(asked)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(*asked)

    monkeypatch.setattr(ledger, "find_miscounts", second_time_interrupted)
    monkeypatch.setattr(ledger, "_TELL_EVERY", 0.0)
    few = ["--device", "cpu", "-b", "torch_native", "--length", "1030", "--places", "1", "--dtype", "bf16"]
    result = CliRunner().invoke(ledger.main, [*few, "--pool", "same"])
    assert result.exit_code != 0
    assert "1 of 33 wrong keys tried, 1 named" in result.stderr
    (row,) = (line.split() for line in result.stdout.splitlines() if line.startswith("torch_native"))
    assert (row[-3], row[-2]) == ("2/2", "1/2"), "the second was found, and not yet named"


def test_edges_are_as_few_as_asked_for(ledger: ModuleType) -> None:
    assert len(list(ledger._changes(66_000, 0, 4, 0))) == 3 * (2 + 2 * 3), "at multiples of 16,640"


def test_places_are_at_random_at_both_ends_and_on_both_sides_of_every_edge(ledger: ModuleType) -> None:
    changes = list(ledger._changes(66_000, 50, 64, 0))
    keys = {change.key for change in changes}
    assert len(changes) == 3 * (50 + 2 + 2 * 51), "edges are 1,280 apart"
    assert {0, 65_998, 1279, 1280, 64_000} <= keys
    assert all(0 <= key < 65_999 for key in keys), "the last key is the step's own"
    assert {change.kind for change in changes} == {"left out", "twice", "another's"}
    assert changes == list(ledger._changes(66_000, 50, 64, 0)), "the same every time"

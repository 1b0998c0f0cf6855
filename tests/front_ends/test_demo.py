"""``attn-testkit demo``: four runs go as it says, and it notices if one does not."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from attn_testkit.examples import demo as backends
from attn_testkit.examples import ordinary_test
from attn_testkit.registry import UsageError

demo = importlib.import_module("attn_testkit.cli.demo")


def test_the_known_bug_passes_in_eager_and_a_replay_of_its_capture_batch_and_fails_when_the_batch_changes(
    tmp_path: Path,
) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "attn_testkit", "demo", "--device", "cpu"],
        check=False, capture_output=True, text=True, timeout=300, cwd=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    lines = [
        line.split(maxsplit=1) for line in ran.stdout.splitlines() if line.startswith("  passes") or "FAILS" in line
    ]
    assert [word for word, _ in lines] == ["passes", "passes", "FAILS", "passes"]
    assert "longest request" in ran.stdout
    assert "attended request 1 attended to KV tokens 0..15, expected 0..40" in ran.stdout
    assert "<title>" in (tmp_path / "attn-testkit-demo.html").read_text()


def test_a_wrong_indexer_passes_where_all_keys_are_selected_and_fails_where_some_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = CliRunner().invoke(demo.demo, ["sparse", "--device", "cpu", "--html", ""], standalone_mode=False)
    lines = [line.split()[0] for line in ran.output.splitlines() if line.startswith("  passes") or "FAILS" in line]
    assert (ran.return_value, lines) == (0, ["passes", "FAILS", "passes"])
    assert "ReLU is left out" in ran.output
    with pytest.raises(UsageError, match="and found 0"):
        demo._passed([], demo._WITH_RELU, "eager", demo._SOME_KEYS)


def test_a_demo_that_goes_otherwise_says_so_and_exits_with_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "_BUG", "attn_testkit.examples.demo:Fixed")
    monkeypatch.setattr(demo, "_FIXED", "attn_testkit.examples.demo:StaleLength")
    monkeypatch.chdir(tmp_path)
    ran = CliRunner().invoke(demo.demo, ["--device", "cpu"], standalone_mode=False)
    assert ran.return_value == 1
    marked = [line.split()[0] for line in ran.output.splitlines() if line.endswith("UNEXPECTED")]
    assert marked == ["passes", "FAILS"]


class ReadsOneKeyTooMany(backends.Fixed):
    """Wrong in eager and in graphs."""

    def visible(self, q, plan):  # type: ignore[no-untyped-def]
        request, visible = super().visible(q, plan)
        return request, visible | visible.roll(1, 1)


def test_the_ordinary_test_is_one_that_can_fail(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "ReadsOneKeyTooMany", ReadsOneKeyTooMany, raising=False)
    assert ordinary_test.main("attn_testkit.examples.demo:ReadsOneKeyTooMany") == 1
    assert ordinary_test.main("attn_testkit.examples.demo:Fixed") == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("WRONG: largest error")
    assert second.startswith("right: largest error")

"""Shards of the suite under pytest: each session runs its part, and merge has the verdict."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_plugin import INSTALL_FAKE, session

from attn_testkit.cli import main
from attn_testkit.reports.record import read_report

HERE = Path(__file__).parent
BACKEND = "--attn-backend=fake:ok,ok,ok,ok,ok"


@pytest.fixture
def empty(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, fake) -> pytest.Pytester:
    monkeypatch.setenv("COLUMNS", "200")
    pytester.makeconftest(INSTALL_FAKE.format(here=str(HERE)))
    pytester.makeini("[pytest]\nstrict = true\nfilterwarnings = error\n")
    return pytester


@pytest.mark.parametrize("workers", [(), ("-n2",)], ids=["serial", "xdist"])
def test_shards_of_the_suite_merge_into_one_verdict(empty, workers, capsys):
    for number in (1, 2):
        found = session(empty, BACKEND, f"--attn-shard={number}/2", f"--attn-report={number}.json", *workers)
        assert found.ret == 0
        found.stdout.fnmatch_lines([f"SHARD {number}/2: * of 20 planned case-runs ran, all passed*"])
    ran = [sum(bool(r.case) for r in read_report(empty.path / f"{n}.json").results) for n in (1, 2)]
    assert sum(ran) == 20
    assert all(ran)
    capsys.readouterr()
    assert main(["results", "merge", "1.json", "2.json"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("CONFORMANT (smoke): 20 of 20 planned case-runs passed")


def test_the_environment_names_the_shard_of_a_session_that_runs_the_suite(empty, monkeypatch):
    monkeypatch.setenv("SHARD_INDEX", "2")
    monkeypatch.setenv("SHARD_COUNT", "2")
    session(empty, BACKEND).stdout.fnmatch_lines(["SHARD 2/2: *"])
    empty.makepyfile("def test_other(): pass")
    monkeypatch.delenv("SHARD_COUNT")
    assert empty.runpytest_inprocess("-pno:hypothesispytest").ret == 0, "other tests do not know these variables"
    wrong = session(empty, BACKEND)
    assert wrong.ret == 4
    wrong.stderr.fnmatch_lines(["*attn-testkit: SHARD_INDEX is set and SHARD_COUNT is not*"])


def test_a_shard_that_is_narrowed_further_is_partial_and_does_not_merge(empty, capsys):
    session(empty, BACKEND, "--attn-shard=1/2", "--attn-report=1.json", "-k", "eager")
    session(empty, BACKEND, "--attn-shard=2/2", "--attn-report=2.json")
    capsys.readouterr()
    assert main(["results", "merge", "2.json", "1.json"]) == 4
    assert "1.json is not a shard of a run" in capsys.readouterr().err


def test_a_floor_is_one_for_all_shards(empty):
    at, above = (session(empty, BACKEND, "--attn-shard=1/2", f"--attn-min-cases={floor}") for floor in (20, 21))
    assert (at.ret, above.ret) == (0, 1)
    above.stdout.fnmatch_lines(["problem: 20 case-runs planned for all shards, fewer than attn-min-cases = 21"])


def test_a_session_whose_shard_is_empty_passes(empty):
    codes = [
        session(empty, "--attn-backend=fake:ok", "--attn-mode=decode", f"--attn-shard={number}/3").ret
        for number in (1, 2, 3)
    ]
    assert codes == [0, 0, 0]

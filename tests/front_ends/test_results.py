"""``check_backend`` and ``assert_conformant``: a truth value that cannot be mistaken, and texts to read."""

from __future__ import annotations

import pickle
import re
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import fake_runner
import pytest

from attn_testkit import NotConformant, Results, assert_conformant, check_backend
from attn_testkit.cli import main
from attn_testkit.registry import UsageError
from attn_testkit.results.case_result import CaseResult, Status, emulated_parts
from attn_testkit.results.run_header import exit_code


def known(word: str) -> str:
    return fake_runner.known(f"*-{word}-*")


@pytest.fixture(autouse=True)
def _fake(fake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


WORDS = [
    ("ok,ok", 0),
    ("ok,wrong", 1),
    ("ok,exit", 1),
    ("ok,late", 1),
    ("ok,notrun", 1),
    ("ok,bug", 3),
    ("wrong,bug", 3),
    ("", 5),
]


@pytest.mark.parametrize(("words", "code"), WORDS)
def test_a_result_is_true_where_the_command_line_returns_zero_and_nowhere_else(words, code):
    """`assert check_backend(bad)` passed as long as it was a list."""
    results = check_backend(f"fake:{words}")
    assert results.exit_code == code
    assert results.ok is (code == 0)
    assert bool(results) is (code == 0)
    assert main(["run", "--backend", f"fake:{words}"]) == code


def test_results_say_their_verdict_as_the_command_line_does(capsys):
    for words, _ in WORDS:
        results = check_backend(f"fake:{words}")
        main(["run", "--backend", f"fake:{words}"])
        assert str(results).splitlines()[-1] == results.verdict == capsys.readouterr().out.splitlines()[-1]


def test_failures_are_the_case_runs_that_failed_crashed_timed_out_or_passed_unexpectedly():
    Path("known.toml").write_text(known("ok") + known("inf"))
    results = check_backend("fake:ok,wrong,exit,late,notrun,bug", known_failures="known.toml", modes=["decode"])
    assert {failure.status for failure in results.failures} == {
        Status.UNEXPECTEDLY_PASSED,
        Status.FAILED,
        Status.CRASHED,
        Status.TIMED_OUT,
    }
    assert check_backend("fake:ok").failures == ()


def test_results_are_a_sequence_of_rows_and_cannot_be_changed():
    results = check_backend("fake:ok,wrong", modes=["decode"])
    assert isinstance(results, Results)
    assert len(results) == len(list(results)) == 6
    assert all(isinstance(row, CaseResult) for row in results)
    assert results[-1] is list(results)[-1]
    assert isinstance(results[:2], tuple), "a part of a run has no verdict"
    assert results[0] in results
    with pytest.raises(FrozenInstanceError):
        results.rows = ()
    with pytest.raises(TypeError):
        results[0] = results[1]
    assert pickle.loads(pickle.dumps(results)) == results


def test_a_notebook_shows_the_failures_and_then_the_verdict():
    results = check_backend("fake:ok,wrong", modes=["decode"], executions=["graph"])
    assert repr(results) == str(results)
    lines = str(results).splitlines()
    assert lines[0] == "decode-wrong-k1: request 3 differs from the oracle, 56x over the limit"
    assert any(line.startswith("  repro    attn-testkit repro --backend fake:ok,wrong") for line in lines)
    assert "not run: fake:ok,wrong draft-extend-v2 graph: not run here: needs sm100" in lines
    assert lines[-1] == "NOT CONFORMANT: 1 failed of 2 selected case-runs (8 planned)"


def test_failures_of_one_cause_are_one_text_and_a_count():
    few = check_backend("fake:" + ",".join(["wrong"] * 4), modes=["decode"], executions=["eager"])
    assert str(few).count("  where    ") == 1
    assert str(few).count("56x over the limit") == 1
    lines = str(few).splitlines()
    assert "did not pass: 4 case-runs, 1 cause" in lines
    (start,) = (line for line in lines if line.startswith("start here: "))
    assert start.endswith(" decode-wrong-k0")
    assert f"  repro    {start.removeprefix('start here: ')}" in lines, "it is that of the text above"


def test_assert_conformant_raises_with_what_the_command_line_prints():
    with pytest.raises(NotConformant) as raised:
        assert_conformant("fake:ok,wrong", modes=["decode"])
    assert isinstance(raised.value, AssertionError)
    verdict, _, texts = str(raised.value).partition("\n")
    assert verdict == "NOT CONFORMANT: 2 failed of 4 selected case-runs (8 planned)"
    assert texts.splitlines()[0] == "decode-wrong-k1: request 3 differs from the oracle, 56x over the limit"
    assert "out[request 3, head 5, dim 17] = 0.4121, want 0.1870" in texts
    assert f"{texts}\n{verdict}" == str(raised.value.results)
    again = pickle.loads(pickle.dumps(raised.value))
    assert str(again) == str(raised.value)
    assert again.results == raised.value.results


@pytest.mark.parametrize("words", [words for words, code in WORDS if code])
def test_assert_conformant_raises_for_everything_that_is_not_conformant(words):
    with pytest.raises(NotConformant):
        assert_conformant(f"fake:{words}")


def test_assert_conformant_gives_the_results_of_one_that_conforms():
    assert assert_conformant("fake:ok").verdict.startswith(
        "CONFORMANT (smoke): 4 of 4 planned case-runs passed; emulated"
    )


def test_both_forms_take_the_same_arguments():
    import inspect

    check, raising = (inspect.signature(function) for function in (check_backend, assert_conformant))
    assert check == raising


def test_known_failures_hold_in_python_too():
    Path("known.toml").write_text(known("wrong"))
    assert check_backend("fake:ok,wrong", known_failures="known.toml")
    Path("known.toml").write_text(known("wrong") + known("gone"))
    results = check_backend("fake:ok,wrong", known_failures="known.toml")
    assert not results
    assert results.problems == (f"known failure 2 (cases = '*-gone-*', {fake_runner.ISSUE}) matches no case",)
    assert f"problem: {results.problems[0]}" in str(results).splitlines()
    assert results.verdict.startswith("NOT CONFORMANT: 4 of 8 planned case-runs passed, 4 known failures, but known")


def test_known_failures_alone_are_no_green():
    """With nothing that passes, nothing is known to work."""
    Path("known.toml").write_text(known("wrong"))
    results = check_backend("fake:wrong", known_failures="known.toml")
    assert not results
    assert results.exit_code == 1
    assert results.verdict == (
        "NOT CONFORMANT: 0 of 4 planned case-runs passed, 4 known failures; nothing is known to work"
    )


def test_the_kits_own_failure_is_no_verdict_on_the_backend():
    results = check_backend("fake:ok,wrong,bug", modes=["decode"])
    assert results.verdict == (
        "INCOMPLETE: the kit itself failed in 2 of 6 selected case-runs (12 planned), which says nothing about "
        "the backend; 2 passed, 2 failed"
    )


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({}, "of 12 pairs of mode and execution 1 not declared, 1 not runnable here (needs sm100), 10 not selected"),
        ({"cases": ["x*"]}, None),
    ],
)
def test_a_run_in_which_nothing_ran_says_why(more, why):
    if why is None:
        with pytest.raises(UsageError, match="no case matches"):
            check_backend("fake:", **more)
    else:
        assert check_backend("fake:", **more).verdict == f"NOTHING RAN: {why}"


@pytest.mark.parametrize("missing", [1, 2])
def test_a_case_run_that_vanished_is_not_green(missing):
    results = check_backend("fake:ok")
    cut = replace(results, rows=results.rows[:-missing])
    assert not cut
    assert cut.verdict == f"INCOMPLETE: {4 - missing} of 4 planned case-runs ran"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"jobs": 0}, "jobs is 0; expected a whole number from 1 up"),
        ({"jobs": 1.5}, "jobs is 1.5; expected"),
        ({"timeout_s": float("nan")}, "timeout is nan; expected seconds above 0, and at most 86400"),
        ({"timeout_s": 0}, "timeout is 0; expected"),
        ({"timeout_s": None}, "timeout is None; expected"),
        ({"diagnose_seconds": 0}, "diagnose-seconds is 0; expected"),
        ({"timeout_s": 86_401}, "timeout is 86401; expected"),
        ({"seed": -1}, "seed is -1; expected a whole number from 0 up"),
        ({"seed": 0.5}, "seed is 0.5; expected"),
        ({"device": "gpu"}, "unknown device 'gpu'; did you mean 'cuda'?"),
        ({"device": "cuda:x"}, "unknown device 'cuda:x'; did you mean 'cuda'?"),
    ],
)
def test_numbers_that_make_no_sense_are_refused_in_python_too(more, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        check_backend("fake:ok", **more)


@pytest.mark.parametrize("more", [{"timeout_s": 86_400}, {"timeout_s": 1}, {"jobs": 1}, {"seed": 0}, {"device": "cpu"}])
def test_numbers_at_the_edge_of_sense_are_taken(more):
    assert check_backend("fake:ok", **more)


def test_one_case_run_has_to_pass():
    passed, known, quarantined = (
        CaseResult("b", "decode", "eager", "c", status)
        for status in (Status.PASSED, Status.KNOWN_FAILURE, Status.QUARANTINED)
    )
    assert exit_code(2, [passed, known]) == 0
    assert exit_code(1, [known]) == 1
    assert exit_code(2, [known, quarantined]) == 1
    assert exit_code(1, [passed], problems=["expired"]) == 1
    assert exit_code(0, [], problems=["expired"]) == 1
    assert exit_code(0, []) == 5


@pytest.mark.parametrize(
    ("kernels", "parts"),
    [("real", []), ("emulated", ["kernels"]), ("stores", ["stores"]), ("not compiled", ["compiled regions"])],
)
def test_a_result_names_each_part_that_was_emulated(kernels: str, parts: list[str]) -> None:
    on_gpu = CaseResult("torch_native", "decode", "graph", "decode-x", Status.PASSED, graph="cuda", device="cuda")
    on_cpu = replace(on_gpu, graph="emulated", device="emulated")
    assert emulated_parts(replace(on_gpu, kernels=kernels)) == parts
    assert emulated_parts(replace(on_cpu, kernels=kernels)) == ["device", "graph", *parts]

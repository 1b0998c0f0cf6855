"""``conformance_cases``: the case-runs of a backend as tests of its author's own suite."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import fake_runner
import pytest

from attn_testkit.running.processes.judge_process import JudgeProcess

HERE = Path(__file__).parent
INSTALL_FAKE = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import attn_testkit.running.processes.judge_process as judge_process
judge_process.RUNNER = "fake_runner"
"""


@pytest.fixture
def own(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, fake):
    """Run an author's tests on the fake judge: the body of the test, then what the decorator is given."""
    monkeypatch.setenv("COLUMNS", "200")
    pytester.makeconftest(INSTALL_FAKE)
    pytester.makeini("[pytest]\nstrict = true\nfilterwarnings = error\n")

    def _run(given: str, *args: str, body: str = "attn_case()", takes: str = "attn_case") -> pytest.RunResult:
        pytester.makepyfile(
            test_mine=f"""
            import attn_testkit

            @attn_testkit.conformance_cases({given})
            def test_conformance({takes}):
                {body}
            """
        )
        quick = ("-Wignore::pytest.PytestAssertRewriteWarning", "-pno:hypothesispytest")
        return pytester.runpytest_inprocess(*quick, *args)

    return _run


XDIST = pytest.mark.parametrize("workers", [(), ("-n2",)], ids=["serial", "xdist"])


@XDIST
def test_each_case_run_is_a_test_of_its_own_with_a_stable_id(own, workers):
    found = own("'fake:ok,wrong', modes=['decode']", "-v", *workers)
    assert found.ret == 1
    found.assert_outcomes(passed=2, failed=2, skipped=1)
    text = found.stdout.str()
    for execution in ("eager", "graph"):
        assert f"test_conformance[{execution}-decode-ok-k0]" in text
        assert f"test_conformance[{execution}-decode-wrong-k1]" in text


NOTES_PLANS = """
real = judge_process.JudgeProcess.plan
def plan(judge, request):
    with open("planned", "a") as file:
        file.write(f"{request.seed}\\n")
    return real(judge, request)
judge_process.JudgeProcess.plan = plan
def pytest_unconfigure():
    judge_process.JudgeProcess.plan = real
"""


def test_workers_of_xdist_plan_a_request_once_for_all_of_them(own, pytester):
    plans = JudgeProcess.plan
    with (pytester.path / "conftest.py").open("a") as file:
        file.write(NOTES_PLANS)
    pytester.makepyfile(
        test_other="""
        import attn_testkit

        @attn_testkit.conformance_cases('fake:ok,ok', seed=7)
        def test_conformance(attn_case):
            attn_case()
        """
    )
    found = own("'fake:ok,ok'", "-n3")
    found.assert_outcomes(passed=16, skipped=2)
    assert sorted((pytester.path / "planned").read_text().split()) == ["0", "7"]
    assert JudgeProcess.plan is plans, "the controller ran in this process, and later tests plan as well"


@XDIST
def test_a_failure_is_the_text_that_the_command_line_prints_and_no_traceback(own, workers):
    found = own("'fake:wrong', modes=['decode'], executions=['graph']", *workers)
    text = found.stdout.str()
    assert "decode-wrong-k0: request 3 differs from the oracle, 56x over the limit" in text
    assert "  where    out[request 3, head 5, dim 17] = 0.4121, want 0.1870" in text
    assert "attn-testkit repro --backend fake:wrong --execution graph --device cpu decode-wrong-k0" in text
    for inside in ("plugin/own_tests", "Traceback", "def test_conformance", "CaseFailed"):
        assert inside not in text
    found.stdout.fnmatch_lines(["FAILED *test_conformance?graph-decode-wrong-k0? - request 3 differs*"])


@XDIST
def test_a_shard_makes_tests_of_its_case_runs_and_all_shards_make_each_once(own, workers):
    ids: list[str] = []
    for number in (1, 2, 3):
        found = own("'fake:ok,ok,ok,ok,ok'", "-v", f"--attn-shard={number}/3", *workers)
        assert found.ret == 0
        passed = [line for line in found.outlines if "PASSED" in line]
        here = sorted({name for line in passed for name in re.findall(r"test_conformance\[(.+?)\]", line)})
        eager, graph = ([n.partition("-")[2] for n in here if n.startswith(each)] for each in ("eager", "graph"))
        assert eager == graph, "a case's executions stay together"
        found.stdout.fnmatch_lines([
            f"SHARD {number}/3: tests of {len(here)} of 20 case-runs of conformance_cases; all shards have to pass"
        ])  # fmt: skip
        ids += here
    assert len(ids) == len({*ids}) == 20


def test_a_shard_without_any_of_its_case_runs_is_a_skipped_test_that_says_so(own):
    codes = [
        own("'fake:ok', modes=['decode'], executions=['eager']", "-rs", f"--attn-shard={number}/2") for number in (1, 2)
    ]
    (empty,) = [found for found in codes if "SHARD" in found.stdout.str() and "tests of 0 of 1" in found.stdout.str()]
    assert [found.ret for found in codes] == [0, 0]
    assert empty.parseoutcomes().keys() == {"skipped"}
    empty.stdout.fnmatch_lines(["SKIPPED*shard ?/2 has none of its 1 case-runs"])


def test_a_failure_is_in_one_shard_and_a_backend_that_cannot_run_in_all(own):
    codes = [own("'fake:ok,wrong', modes=['decode']", f"--attn-shard={n}/2").ret for n in (1, 2)]
    assert sorted(codes) == [0, 1]
    assert [own("'fake:'", f"--attn-shard={n}/2").ret for n in (1, 2)] == [1, 1]


def test_the_environment_of_a_ci_shards_no_test_of_an_author_by_itself(own, monkeypatch):
    monkeypatch.setenv("SHARD_INDEX", "1")
    monkeypatch.setenv("SHARD_COUNT", "2")
    found = own("'fake:ok,ok,ok'", "-v")
    assert "SHARD" not in found.stdout.str()
    assert found.parseoutcomes()["passed"] == 12


def test_one_process_judges_all_of_them(own, pytester):
    pytester.makepyfile(
        test_more="""
        import attn_testkit, pathlib

        @attn_testkit.conformance_cases("fake:pid", "fake:pid,ok", modes=["decode"])
        def test_both(attn_case, record_property):
            attn_case()

        @attn_testkit.conformance_cases("fake:pid")
        def test_again(attn_case):
            attn_case()

        def test_in_the_end(request):
            from attn_testkit.plugin.own_tests import OWN_TESTS
            assert len(request.config.stash[OWN_TESTS]._judges) == 1
        """
    )
    found = own("'fake:ok'")
    assert found.ret == 0
    found.assert_outcomes(passed=4 + 6 + 4 + 1, skipped=3)


def test_a_test_that_never_calls_its_case_run_is_not_green(own):
    """A decorated test with an empty body would otherwise pass once for every case-run."""
    found = own("'fake:wrong', modes=['decode']", body="assert attn_case.case")
    assert found.ret == 1
    found.assert_outcomes(failed=3)
    assert "the test did not call attn_case(), so nothing was tested" in found.stdout.str()


def test_a_test_that_fails_or_skips_by_itself_is_left_alone(own):
    found = own("'fake:ok', modes=['decode']", body="import pytest; pytest.skip('not today')")
    found.assert_outcomes(skipped=3)
    assert found.ret == 0


def test_a_case_run_says_what_it_is(own):
    body = (
        "assert (attn_case.backend, attn_case.mode) == ('fake:ok', 'decode'); assert attn_case.execution; attn_case()"
    )
    assert own("'fake:ok', modes=['decode'], executions=['eager']", body=body).parseoutcomes()["passed"] == 1


def test_what_cannot_run_here_is_skipped_with_its_reason(own):
    found = own("'fake:ok'", "-rs")
    found.assert_outcomes(passed=4, skipped=1)
    assert "needs sm100" in found.stdout.str()


@pytest.mark.parametrize("given", ["'fake:'", "'fake:', modes=['decode']"])
def test_a_backend_of_which_nothing_runs_fails_one_test_and_says_why(own, given):
    """pytest alone would pass over an empty set of parameters."""
    found = own(given)
    assert found.ret == 1
    assert found.parseoutcomes()["failed"] == 1
    text = found.stdout.str()
    assert "NOTHING RAN: of 12 pairs of mode and execution 1 not declared, 1 not runnable here (needs sm100)" in text
    assert "pytest.mark.skipif" in text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("'nofake'", "attn-testkit: unknown backend 'nofake'; did you mean 'fake:ok'?"),
        ("'fake:ok', cases=['nope-*']", "attn-testkit: no case matches 'nope-*'"),
        ("'fake:ok', known_failures='none.toml'", "none.toml; if no failure is known"),
        ("", "no backend is named; write conformance_cases('module:Class')"),
        ("3", "expected a backend class or its spec, got an instance of int"),
    ],
)
def test_a_wrong_request_is_an_error_of_collecting_the_test(own, given, message):
    found = own(given)
    assert found.ret == 2
    assert found.parseoutcomes() == {"errors": 1}
    assert message in found.stdout.str()


def test_a_decorated_test_that_takes_no_case_run_is_refused(own):
    found = own("'fake:ok'", takes="", body="pass")
    assert found.ret == 2
    assert "test_conformance has conformance_cases but no parameter attn_case" in found.stdout.str()


def test_a_case_run_without_the_decorator_is_refused(own, pytester):
    pytester.makepyfile(test_bare="def test_bare(attn_case): attn_case()")
    found = own("'fake:ok'")
    assert found.parseoutcomes()["errors"] == 1
    assert "attn_case needs the decorator @attn_testkit.conformance_cases(...)" in found.stdout.str()


def test_known_failures_are_xfailed_and_an_entry_that_matches_nothing_fails(own, pytester):
    (pytester.path / "known.toml").write_text(fake_runner.known("*-wrong-*"))
    given = "'fake:ok,wrong', modes=['decode'], known_failures='known.toml'"
    found = own(given)
    assert found.ret == 0
    found.assert_outcomes(passed=2, xfailed=2, skipped=1)
    (pytester.path / "known.toml").write_text(fake_runner.known("*-wrong-*") + fake_runner.known("*-gone-*"))
    found = own(given)
    assert found.ret == 1
    found.assert_outcomes(passed=2, xfailed=2, skipped=1, failed=1)
    assert "known failure 2 (cases = '*-gone-*', https://example.org/issues/12) matches no case" in found.stdout.str()


def test_a_judge_that_dies_costs_one_test_and_the_rest_runs(own):
    found = own("'fake:ok,dies,ok', modes=['decode'], executions=['eager']")
    assert found.ret == 1
    found.assert_outcomes(passed=2, failed=1, skipped=1)
    assert "the kit itself failed: the judge's process ended with exit code 9" in found.stdout.str()


def test_a_test_that_is_given_up_in_the_middle_costs_no_other(own):
    """As plugins that limit the time of a test do it: by an alarm that raises."""
    body = (
        "import signal\n"
        "                def late(*_): import pytest; pytest.fail('too late')\n"
        "                signal.signal(signal.SIGALRM, late)\n"
        "                signal.setitimer(signal.ITIMER_REAL, 3 if 'hang' in attn_case.case else 0)\n"
        "                attn_case()"
    )
    found = own("'fake:hang,ok,ok', modes=['decode'], executions=['eager']", body=body)
    found.assert_outcomes(passed=2, failed=1, skipped=1)
    assert "too late" in found.stdout.str()


def test_pytest_never_imports_the_backend_or_torch(pytester):
    pytester.makepyfile(
        test_mine="""
        import sys
        import attn_testkit

        @attn_testkit.conformance_cases("attn_testkit.examples:MinimalBackend", device="cpu",
            cases=["decode-gqa2x2-d64-bf16-p16-k3.15-shuffled-gauss-b2prod"], executions=["eager"])
        def test_conformance(attn_case):
            attn_case()

        def test_in_the_end():
            assert "torch" not in sys.modules
        """
    )
    found = pytester.runpytest_subprocess("-p", "no:cacheprovider", timeout=300)
    found.assert_outcomes(passed=2)


def test_the_decorator_is_there_without_torch():
    code = "import sys, attn_testkit; attn_testkit.conformance_cases; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

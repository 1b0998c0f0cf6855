"""The pytest plugin: what is due runs or fails the session, and every result reaches the report."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_runner import ISSUE, crash_record, known

from attn_testkit.reports.record import read_report, schema
from attn_testkit.results.case_result import Status
from attn_testkit.running.planning.request import Request
from attn_testkit.running.processes.judge_process import JudgeProcess

HERE = Path(__file__).parent
SUITE = ("--pyargs", "attn_testkit.suite")

INSTALL_FAKE = """
import sys
sys.path.insert(0, {here!r})
import attn_testkit.running.processes.judge_process as judge_process
judge_process.RUNNER = "fake_runner"
"""


@pytest.fixture
def empty(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, fake) -> pytest.Pytester:
    """An empty directory, strict, warnings as errors, with the fake judge in every process."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    pytester.makeconftest(INSTALL_FAKE.format(here=str(HERE)))
    pytester.makeini("[pytest]\nstrict = true\nfilterwarnings = error\n")
    return pytester


def session(empty: pytest.Pytester, *args: str) -> pytest.RunResult:
    # The controller runs in this process, which saves half the time; workers are processes in any case.
    quick = ("-Wignore::pytest.PytestAssertRewriteWarning", "-pno:hypothesispytest")
    return empty.runpytest_inprocess(*SUITE, *quick, *args)


def report_of(empty: pytest.Pytester):
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(json.loads((empty.path / "out.json").read_text()), schema())
    return read_report(empty.path / "out.json")


XDIST = pytest.mark.parametrize("workers", [(), ("-n2",)], ids=["serial", "xdist"])


@XDIST
def test_a_conformant_backend_is_green_with_its_denominator(empty, workers):
    found = session(empty, "--attn-backend=fake:ok,ok", "--attn-report=out.json", *workers)
    assert found.ret == 0
    found.assert_outcomes(passed=8)
    found.stdout.fnmatch_lines(["*attn-testkit 0.1.0: backend fake:ok,ok; tier smoke*"])
    found.stdout.fnmatch_lines(["target-verify  *graph*2*0.40*"])
    found.stdout.fnmatch_lines(
        ["CONFORMANT (smoke): 8 of 8 planned case-runs passed; emulated device, graph: no proof*"]
    )
    report = report_of(empty)
    assert report.finished
    assert report.exit_code == 0
    assert report.header.command.startswith("pytest --pyargs attn_testkit.suite")
    assert len([r for r in report.results if r.case]) == 8


@XDIST
def test_a_failure_is_its_own_text_and_no_traceback(empty, workers):
    """The reader wants request, place and command, not the inside of the plugin."""
    found = session(empty, "--attn-backend=fake:ok,wrong", "--attn-execution=graph", "--attn-mode=decode", *workers)
    assert found.ret == 1
    text = found.stdout.str()
    assert "  where    out[request 3, head 5, dim 17] = 0.4121, want 0.1870" in text
    assert "repro    attn-testkit repro --backend fake:ok,wrong --execution graph --device cpu decode-wrong-k1" in text
    for inside in ("plugin/reporting", "Traceback", "def test_decode", "CaseFailed"):
        assert inside not in text
    found.stdout.fnmatch_lines(["FAILED *test_decode?graph-decode-wrong-k1? - request 3 differs*"])


@XDIST
def test_case_runs_that_do_not_run_fail_the_session(empty, workers):
    """pytest alone exits 0 when everything is skipped."""
    conftest = INSTALL_FAKE.format(here=str(HERE)) + (
        "import pytest\n"
        "def pytest_collection_modifyitems(items):\n"
        "    for item in items: item.add_marker(pytest.mark.skip(reason='busy'))\n"
    )
    empty.makeconftest(conftest)
    found = session(empty, "--attn-backend=fake:ok", *workers)
    found.assert_outcomes(skipped=4)
    assert found.ret == 1
    found.stdout.fnmatch_lines(
        ["did not run: eager-decode-ok-k0", "did not run: 1 more", "INCOMPLETE: 0 of 4 planned case-runs ran"]
    )


def test_a_result_that_a_worker_cannot_send_fails_the_session(empty):
    """execnet refuses a float subclass; xdist then says "no tests ran" and exits 0."""
    empty.makepyfile(
        unsendable="""
        import pytest
        class Float(float): pass
        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_runtest_makereport(item, call):
            report = yield
            report.unsendable = Float(1.0)
            return report
        """
    )
    args = ("--attn-backend=fake:ok", "--attn-mode=decode", "--attn-execution=eager", "-punsendable", "-n1")
    found = empty.runpytest_subprocess(*SUITE, *args, timeout=300)
    assert found.ret == 1
    found.stdout.fnmatch_lines(["INCOMPLETE: 0 of 1 selected case-runs (4 planned) ran"])


def test_foreign_property_values_are_made_plain(empty):
    """A numpy.float64 in record_property must not cost the result under xdist."""
    conftest = INSTALL_FAKE.format(here=str(HERE)) + (
        "import pytest\n"
        "class Float(float): pass\n"
        "@pytest.fixture(autouse=True)\n"
        "def note(record_property): record_property('gflops', Float(1.5))\n"
    )
    empty.makeconftest(conftest)
    found = session(empty, "--attn-backend=fake:ok", "-n1", "--junitxml=j.xml")
    assert found.ret == 0
    text = (empty.path / "j.xml").read_text()
    assert '<property name="gflops" value="1.5"' in text
    assert '<property name="attn_status" value="passed"' in text
    assert '<property name="attn_margin" value="0.4"' in text


def test_a_full_disk_costs_the_record_and_the_green_and_not_the_verdict(empty):
    found = session(empty, "--attn-backend=fake:ok", "--attn-report=/dev/full")
    assert found.ret == 3
    found.stdout.fnmatch_lines(
        [
            "CONFORMANT (smoke): 4 of 4*",
            "the results file is incomplete: /dev/full lacks what came after 0 results: No space left*",
        ]
    )


@XDIST
def test_deselected_case_runs_are_not_due(empty, workers):
    found = session(empty, "--attn-backend=fake:ok,wrong", "-k", "graph and ok-k0", *workers)
    assert found.ret == 0
    found.stdout.fnmatch_lines(["PARTIAL: 2 of 8 planned case-runs ran, *selected by -k 'graph and ok-k0'*"])


@XDIST
def test_nothing_selected_is_five(empty, workers):
    assert session(empty, "--attn-backend=fake:ok", "-k", "nothing_like_this", *workers).ret == 5


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "no backend is named; give --attn-backend=module:Class"),
        (("--attn-backend=nofake",), "unknown backend 'nofake'; did you mean 'fake:ok'?"),
        (("--attn-backend=nofake", "-n2"), "unknown backend 'nofake'; did you mean 'fake:ok'?"),
        (("-n2",), "no backend is named; give --attn-backend=module:Class"),
        (("--attn-backend=fake:ok", "--attn-tier=smok"), "unknown tier 'smok'; did you mean 'smoke'?"),
        (("--attn-backend=fake:ok", "--attn-mode=target_verify"), "did you mean 'target-verify'?"),
        (("--attn-backend=fake:ok", "--attn-device=cud"), "did you mean 'cuda'?"),
        (
            ("--attn-backend=fake:ok", "--attn-device=gpu"),
            "unknown device 'gpu'; did you mean 'cuda'?",
        ),
        (
            ("--attn-backend=fake:ok", "--attn-timeout=nan"),
            "timeout is nan; expected seconds above 0",
        ),
        (("--attn-backend=fake:ok", "--attn-timeout=-1"), "timeout is -1; expected seconds above 0"),
        (("--attn-backend=fake:ok", "--attn-timeout=5m"), "timeout is '5m'; expected seconds, such as 60"),
        (("--attn-backend=fake:ok", "--attn-seed=-1"), "seed is -1; expected a whole number from 0 up"),
        (("--attn-backend=fake:ok", "--attn-min-cases=-1"), "min-cases is -1; expected a whole number from 0 up"),
        (("--attn-backend=fake:ok", "--attn-case=nope-*"), "no case matches 'nope-*'"),
        (("--attn-backend=fake:ok", "--attn-known-failures=nope.toml"), "nope.toml; if no failure is known"),
        (("--attn-backend=fake:ok", "--attn-report=/proc/nope/x.json"), "cannot write /proc/nope/x.json"),
    ],
)
def test_a_wrong_request_is_one_line_and_four(empty, args, message):
    found = session(empty, *args)
    assert found.ret == 4
    errors = [line for line in found.stderr.lines + found.stdout.lines if message in line]
    assert len(errors) == 1
    assert "Traceback" not in found.stderr.str() + found.stdout.str()


@XDIST
def test_known_failures_are_xfailed_and_an_outdated_entry_fails(empty, workers):
    (empty.path / "known.toml").write_text(known("decode-wrong-*"))
    args = ("--attn-backend=fake:ok,wrong", "--attn-mode=decode", *workers)
    found = session(empty, *args, "--attn-known-failures=known.toml", "--attn-report=out.json")
    found.assert_outcomes(passed=2, xfailed=2)
    assert found.ret == 0
    assert {r.reason for r in report_of(empty).results if r.status is Status.KNOWN_FAILURE} == {ISSUE}
    (empty.path / "known.toml").write_text(known("decode-wrong-*") + known("decode-ok-*"))
    found = session(empty, *args, "--attn-known-failures=known.toml")
    assert found.ret == 1
    found.assert_outcomes(failed=2, xfailed=2)
    assert "unexpectedly passed: passed, though known failure 2" in found.stdout.str()


@XDIST
@pytest.mark.parametrize(("others", "passed"), [(("--attn-backend=fake:ok",), 4), ((), 0)])
def test_a_backend_that_cannot_be_imported_is_a_failing_row_where_that_is_asked_for(empty, workers, others, passed):
    """A nightly job over all registered backends must not lose the one that broke, nor all others over it."""
    args = ("--attn-backend=nofake", *others, "--attn-keep-unloadable", "--attn-report=out.json", *workers)
    found = session(empty, *args)
    assert found.ret == 1
    found.assert_outcomes(passed=passed)
    found.stdout.fnmatch_lines(
        [
            "(no case): unknown backend 'nofake'; did you mean 'fake:ok'?",
            "  repro    attn-testkit run --backend nofake --device cpu",
            f"NOT CONFORMANT: 1 failed of {passed + 1} planned case-runs",
        ]
    )
    report = report_of(empty)
    assert report.exit_code == 1
    assert [r.backend for r in report.results if r.status is Status.FAILED] == ["nofake"]


@XDIST
def test_quarantined_case_runs_are_never_launched(empty, workers):
    crash_record(empty.path / "crash.json", "fake:ok,segfault", "*-segfault-*")
    (empty.path / "known.toml").write_text(known("*-segfault-*", kind="quarantine", record="crash.json"))
    found = session(empty, "--attn-backend=fake:ok,segfault", "--attn-known-failures=known.toml", *workers)
    assert found.ret == 0
    found.assert_outcomes(passed=4)
    found.stdout.fnmatch_lines(["CONFORMANT (smoke): 4 of 8 planned case-runs passed, 4 quarantined*"])


def test_an_entry_that_matches_nothing_fails_the_session(empty):
    (empty.path / "known.toml").write_text(known("gone-*", kind="quarantine"))
    found = session(empty, "--attn-backend=fake:ok", "--attn-known-failures=known.toml")
    assert found.ret == 1
    found.stdout.fnmatch_lines([f"problem: known failure 1 (cases = 'gone-*', {ISSUE}) matches no case"])


@XDIST
def test_a_crash_and_a_hang_cost_one_case_run_each(empty, workers):
    """Nothing of a backend runs in pytest's own processes: a night does not end at the first kernel that dies."""
    args = ("--attn-backend=fake:ok,segfault,late,ok", "--attn-mode=decode", "--attn-report=out.json", *workers)
    found = session(empty, *args)
    assert found.ret == 1
    found.assert_outcomes(passed=4, failed=4)
    results = [r for r in report_of(empty).results if r.case]
    assert sorted(r.status.value for r in results) == ["crashed"] * 2 + ["passed"] * 4 + ["timed out"] * 2
    assert "killed by SIGSEGV" in next(r.reason for r in results if r.status is Status.CRASHED)
    assert report_of(empty).finished


def test_a_case_run_that_was_not_run_is_skipped_and_fails_the_session(empty):
    args = ("--attn-backend=fake:ok,notrun", "--attn-mode=decode", "--attn-execution=eager", "--attn-report=out.json")
    found = session(empty, *args)
    found.assert_outcomes(passed=1, skipped=1)
    assert found.ret == 1
    reasons = {r.reason for r in report_of(empty).results if r.status is Status.NOT_RUN_HERE and r.case}
    assert reasons == {"not run: the device's context was lost in decode-lost-k1"}


def test_a_judge_that_dies_is_the_kits_own_failure_and_the_rest_runs(empty):
    args = ("--attn-backend=fake:ok,dies,ok", "--attn-mode=decode", "--attn-execution=eager", "--attn-report=out.json")
    found = session(empty, *args)
    assert found.ret == 3
    found.assert_outcomes(passed=2, failed=1)
    assert "the judge's process ended with exit code 9" in found.stdout.str()


def test_the_kits_own_exception_is_three(empty):
    found = session(empty, "--attn-backend=fake:bug", "--attn-mode=decode")
    assert found.ret == 3
    assert "the kit itself failed: ZeroDivisionError: a bug of the kit" in found.stdout.str()


@XDIST
def test_a_floor_that_is_not_reached_fails_the_session(empty, workers):
    found = session(empty, "--attn-backend=fake:ok", "--attn-min-cases=5", *workers)
    assert found.ret == 1
    found.stdout.fnmatch_lines(["problem: 4 case-runs ran, fewer than attn-min-cases = 5"])


def test_the_ini_says_as_much_as_the_command_line(empty):
    crash_record(empty.path / "crash.json", "fake:ok,wrong", "*-wrong-*", Status.TIMED_OUT)
    (empty.path / "kf.toml").write_text(known("*-wrong-*", kind="quarantine", record="crash.json"))
    empty.makeini(
        "[pytest]\nstrict = true\nattn_backends =\n  fake:ok\n  fake:ok,wrong\nattn_tier = full\n"
        "attn_known_failures = kf.toml\nattn_min_cases = 25\n"
    )
    found = session(empty)
    assert found.ret == 1
    found.stdout.fnmatch_lines(
        [
            "problem: 16 case-runs ran, fewer than attn-min-cases = 25",
            "NOT CONFORMANT: 16 of 20 planned case-runs passed, 4 quarantined, but 16 case-runs ran, fewer*",
        ]
    )


def test_a_project_that_only_sets_the_ini_pays_nothing_in_its_other_tests(empty):
    empty.makeini("[pytest]\nstrict = true\nattn_backends = nofake\n")
    empty.makepyfile("def test_mine(): pass")
    found = empty.runpytest_subprocess()
    assert found.ret == 0
    assert "attention conformance" not in found.stdout.str()


def test_pytest_without_a_backend_says_nothing_of_us(empty):
    empty.makepyfile("def test_mine(): pass")
    found = empty.runpytest_subprocess()
    assert "attn-testkit:" not in found.stdout.str()
    assert found.ret == 0


def test_ids_do_not_depend_on_the_place_they_are_collected_from(empty):
    def ids(*args):
        lines = session(empty, "--collect-only", "-q", "--attn-backend=fake:ok,wrong", *args).stdout.lines
        return [line.partition("::")[2] for line in lines if "::" in line]

    first = ids()
    (empty.path / "sub").mkdir()
    os.chdir(empty.path / "sub")
    assert ids("-p", "no:cacheprovider", "--rootdir=/tmp", "-c", "../tox.ini") == first
    assert first[0] == "test_decode[eager-decode-ok-k0]"
    assert len(set(first)) == 8


def test_collecting_only_is_not_a_failure(empty):
    assert session(empty, "--collect-only", "--attn-backend=fake:ok").ret == 0


def test_xdist_workers_share_the_gpus_of_the_caller(empty, monkeypatch):
    """Never a bare ordinal: the caller excluded the GPUs that are not in the list."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-77")
    found = session(empty, "--attn-backend=fake:" + ",".join(["gpu"] * 8), "-n2", "--attn-report=out.json")
    assert found.ret == 0
    hints = {hint for r in report_of(empty).results for hint in r.hints}
    assert hints == {"gpu 5", "gpu GPU-77"}


def test_auto_workers_are_the_visible_gpus(empty, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7,9")
    found = session(empty, "--attn-backend=fake:ok", "-nauto")
    found.stdout.fnmatch_lines(["*3 workers*"])


def test_the_conftest_line_works_in_a_checkout_and_installed(pytester):
    pytester.makeconftest('pytest_plugins = ["attn_testkit.plugin", "pytester"]')
    pytester.makepyfile("def test_mine(): pass")
    assert pytester.runpytest_subprocess().ret == 0
    assert pytester.runpytest_subprocess("-p", "no:attn_testkit.plugin").ret == 0


@pytest.mark.parametrize("module", ["plugin", "cli", "plugin.xdist", "cli.run", "running.check_backend"])
def test_loading_a_front_end_does_not_load_torch(module):
    """The plugin loads in every pytest run of every user; --help must not take seconds."""
    code = f"import sys, attn_testkit.{module}; sys.exit('torch' in sys.modules or 'jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_real_suite_runs_from_an_empty_directory(pytester):
    """No conftest, no checkout, strict and with warnings as errors, as an author would put it into CI."""
    pytester.makeini("[pytest]\nstrict = true\nfilterwarnings = error\nattn_backends = torch_native\n")
    args = ("--attn-device=cpu", "--attn-mode=decode", "--attn-execution=eager", "--attn-report=out.json")
    found = pytester.runpytest_subprocess(*SUITE, *args, timeout=300)
    assert found.ret == 0
    report = read_report(pytester.path / "out.json")
    assert report.exit_code == 0
    found.assert_outcomes(passed=report.header.planned)
    assert report.header.planned > 4


IN_WORKERS = """
import attn_testkit.running.processes.judge_process as judge_process
def refuse(*_):
    raise AssertionError("a worker of xdist")
def pytest_configure(config):
    if hasattr(config, "workerinput"):
        judge_process._fresh = judge_process.JudgeProcess.plan = refuse
"""


def test_workers_of_xdist_neither_plan_nor_import_torch_and_run_what_was_planned_once(pytester):
    pytester.makeconftest(IN_WORKERS)
    named = "decode-mqa8-d64-bf16-p16-k3-shuffled-gauss-b4prod"
    args = ("--attn-backend=torch_native", "--attn-device=cpu", "--attn-execution=eager", "--attn-report=out.json")
    cases = ("--attn-case=decode-m?a*", f"--attn-case={named}")
    found = pytester.runpytest_subprocess(*SUITE, "-n2", *args, *cases, timeout=300)
    assert found.ret == 0
    results = [result for result in read_report(pytester.path / "out.json").results if result.case]
    request = Request(
        ("torch_native",), executions=("eager",), device="cpu", cases=("decode-m?a*", named), counts_tier=True
    )
    with contextlib.closing(JudgeProcess(device="cpu")) as judge:
        planned = [item.case for item in judge.plan(request).items]
    assert sorted(result.case for result in results) == sorted(planned)
    assert named in planned
    assert len(planned) > 4
    assert {result.status for result in results} == {Status.PASSED}

"""What pytest users do without thinking: -k, --lf, -x, --junitxml, marks and fixtures of their own."""

from __future__ import annotations

import pickle
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from attn_testkit.plugin.session import Session
from attn_testkit.running.planning.request import Item, Request, param_id

INSTALL_FAKE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import attn_testkit.running.processes.judge_process as judge_process
judge_process.RUNNER = "fake_runner"
"""
SUITE = ("--pyargs", "attn_testkit.suite")
QUICK = ("-Wignore::pytest.PytestAssertRewriteWarning", "-pno:hypothesispytest")
XDIST = pytest.mark.parametrize("workers", [(), ("-n1",)], ids=["serial", "xdist"])


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, fake):
    """Run pytest on the fake judge, on the suite or on the text of a test file."""
    monkeypatch.setenv("COLUMNS", "200")
    pytester.makeconftest(INSTALL_FAKE)
    pytester.makeini("[pytest]\nstrict = true\nfilterwarnings = error\n")

    def _run(*args: str, test: str = "") -> pytest.RunResult:
        if test:
            pytester.makepyfile(test_mine=test)
        return pytester.runpytest_inprocess(*(() if test else SUITE), *QUICK, *args)

    return _run


def cases_of(path: Path) -> dict[str, ElementTree.Element]:
    """Status -> the case of a JUnit XML that has it."""
    found = {}
    for case in ElementTree.parse(path).iter("testcase"):
        found[properties_of(case)["attn_status"]] = case
    return found


def properties_of(case: ElementTree.Element) -> dict[str, str]:
    return {each.attrib["name"]: each.attrib["value"] for each in case.iter("property")}


@XDIST
def test_junit_xml_has_reasons_of_failures_crashes_and_timeouts(run, pytester, workers):
    args = ("--attn-backend=fake:ok,wrong,segfault,late", "--attn-mode=decode", "--attn-execution=graph", *workers)
    assert run(*args, "--junitxml=out.xml").ret == 1
    cases = cases_of(pytester.path / "out.xml")
    assert {*cases} == {"passed", "failed", "crashed", "timed out"}
    messages = {status: case.find("failure").attrib["message"] for status, case in cases.items() if status != "passed"}
    assert messages == {
        "failed": "request 3 differs from the oracle, 56x over the limit",
        "crashed": "crashed: the process was killed by SIGSEGV",
        "timed out": "timed out: no result after 1 s",
    }
    assert "about to read a freed page" in cases["crashed"].find("failure").text
    assert "about to read a freed page" in properties_of(cases["crashed"])["attn_reason"]
    failed = properties_of(cases["failed"])
    assert failed["attn_failed_checks"] == "matches-oracle"
    assert (failed["attn_mode"], failed["attn_execution"]) == ("decode", "graph")
    assert "attn_reason" not in failed
    assert "attn_failed_checks" not in properties_of(cases["passed"])


@XDIST
def test_crashes_and_timeouts_have_their_reason_in_the_short_summary(run, workers):
    args = ("--attn-backend=fake:segfault,late", "--attn-mode=decode", "--attn-execution=eager", *workers)
    run(*args).stdout.fnmatch_lines_random(
        [
            "FAILED *?eager-decode-segfault-k0? - crashed: the process was killed by SIGSEGV",
            "FAILED *?eager-decode-late-k1? - timed out: no result after 1 s",
        ]
    )


def test_last_failed_runs_what_failed_and_nothing_else(run):
    args = ("--attn-backend=fake:ok,wrong,ok", "--attn-mode=decode")
    run(*args).assert_outcomes(passed=4, failed=2)
    again = run(*args, "--lf")
    again.assert_outcomes(failed=2, deselected=4)
    again.stdout.fnmatch_lines(["NOT CONFORMANT: 2 failed of 2 selected case-runs (12 planned)"])


def test_stopping_at_the_first_failure_is_no_green_and_says_what_did_not_run(run):
    found = run("--attn-backend=fake:ok,wrong,ok", "--attn-mode=decode", "--attn-execution=eager", "-x")
    found.assert_outcomes(passed=1, failed=1)
    assert found.ret == 1
    found.stdout.fnmatch_lines(["NOT CONFORMANT: 1 failed of 3 selected case-runs (12 planned); 1 did not run"])


def test_the_suite_runs_in_the_plans_order_across_modes_and_leaves_other_tests_where_they_are():
    items = [Item("m", mode, "eager", f"{mode}-{k}") for mode in ("decode", "extend") for k in range(2)]
    names = [f"suite::test[{param_id(item, 'm')}]" for item in items]
    tests = [SimpleNamespace(nodeid=name) for name in ("mine::test_a", *names[:3], "mine::test_b[x]", names[3])]
    session = Session(Request(("m",)))
    session.sort(tests)
    assert [test.nodeid for test in tests] == ["mine::test_a", *names[:3], "mine::test_b[x]", names[3]], "no plan"
    session.prepared = SimpleNamespace(items=[items[2], items[1], items[3], items[0]])
    session.sort(tests)
    wanted = ["mine::test_a", names[2], names[1], names[3], "mine::test_b[x]", names[0]]
    assert [test.nodeid for test in tests] == wanted


MARKED = """
    import pytest

    pytestmark = pytest.mark.attn_conformance({given})

    def test_conformance(attn_case):
        attn_case()
"""


def test_the_mark_takes_what_the_decorator_takes(run):
    found = run(test=MARKED.format(given="'fake:ok,wrong', modes=['decode']"))
    found.assert_outcomes(passed=2, failed=2, skipped=1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "no backend is named; write conformance_cases('module:Class')"),
        # Python 3.13 says between the two which argument it may be.
        ("'fake:ok', mode=['decode']", "got an unexpected keyword argument 'mode'"),
        ("'fake:ok', mode=['decode']", " (arguments: backends, modes, executions, tier,"),
        ("'fake:ok', modes='decode'", "modes is a list of names: write modes=['decode']"),
        ("'fake:ok', known_failures='no.toml'", "/no.toml; if no failure is known, leave it out"),
    ],
)
def test_a_mark_that_asks_for_nonsense_is_an_error_of_collecting(run, given, message):
    found = run(test=MARKED.format(given=given))
    assert found.ret == 2
    # Once at the error, once in the short summary, and not as an exception during the handling of another.
    assert 1 <= found.stdout.str().count(message) <= 2
    assert "During handling" not in found.stdout.str()


FIXTURE = """
    def test_decode(attn_check):
        results = attn_check("{backend}", modes=["decode"])
        assert len([r for r in results if r.case]) == 4

    def test_again(attn_check, request):
        attn_check("{backend}", modes=["decode"])
        from attn_testkit.plugin.own_tests import OWN_TESTS
        assert len(request.config.stash[OWN_TESTS]._judges) == 1
"""


def test_the_fixture_judges_a_backend_inside_a_test_on_one_process(run):
    run(test=FIXTURE.format(backend="fake:ok,ok")).assert_outcomes(passed=2)


def test_the_fixture_fails_the_test_with_the_verdict_and_no_traceback(run):
    found = run(test=FIXTURE.format(backend="fake:ok,wrong"))
    found.assert_outcomes(failed=2)
    found.stdout.fnmatch_lines(["FAILED *::test_decode - NOT CONFORMANT: 2 failed of 4 selected case-runs (8 planned)"])
    assert "  where    out[request 3, head 5, dim 17] = 0.4121, want 0.1870" in found.stdout.str()
    assert "own_tests.py" not in found.stdout.str()


def test_the_fixture_finds_known_failures_beside_the_test(run):
    test = "def test_it(attn_check):\n    attn_check('fake:ok', known_failures='none.toml')\n"
    found = run(test=test)
    said = found.stdout.str()
    assert "test_the_fixture_finds_known_failures_beside_the_test0/none.toml; if no failure is known" in said
    assert ">       attn_check('fake:ok', known_failures='none.toml')" in said
    assert "known_failures.py" not in said
    assert "own_tests.py" not in said


def test_what_travels_with_a_case_run_does_not_grow_with_the_plan(fake):
    """Each case-run is asked for by itself: with the whole plan a session would take time by the square of its size."""

    def size(count: int) -> int:
        plan = fake.plan_run(backends=["fake:" + ",".join(["ok"] * count)])
        assert len(plan.items) == 4 * count
        return len(pickle.dumps(replace(plan.to_run(), header=replace(plan.to_run().header, backends={}))))

    assert size(100) == size(200)

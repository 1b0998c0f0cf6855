"""A session of a user's own tests is red if a case-run failed, whatever its test did; one cause is printed once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
INSTALL_FAKE = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import attn_testkit.running.processes.judge_process as judge_process
judge_process.RUNNER = "fake_runner"
"""
QUICK = ("-Wignore::pytest.PytestAssertRewriteWarning", "-pno:hypothesispytest")
TEST = """
    import attn_testkit
    import pytest

    @attn_testkit.conformance_cases({given})
    def test_conformance({takes}):
        {body}
"""


@pytest.fixture
def own(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, fake):
    """Run decorated tests on the fake judge, with a conftest and an ini of the author's."""
    monkeypatch.setenv("COLUMNS", "200")
    pytester.makeini("[pytest]\nfilterwarnings = error\n")

    def _run(given: str, *args: str, conftest: str = "", body: str = "attn_case()", takes: str = "attn_case"):
        pytester.makeconftest(INSTALL_FAKE + conftest)
        pytester.makepyfile(test_mine=TEST.format(given=given, takes=takes, body=body))
        return pytester.runpytest_inprocess(*QUICK, *args)

    return _run


SWALLOWED = {"body": "try: attn_case()\n        except AssertionError: pass"}
XFAILED = {"conftest": "def pytest_collection_modifyitems(items):\n    [i.add_marker('xfail') for i in items]\n"}
SKIPPED = {
    "conftest": """
import pytest

@pytest.fixture
def judged(attn_case):
    try:
        attn_case()
    except AssertionError:
        pytest.skip("flaky")
""",
    "takes": "attn_case, judged",
    "body": "pass",
}
REWRITTEN = {
    "conftest": """
import pytest

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    report.outcome = "passed"
    return report
"""
}
WAYS = {"swallowed": SWALLOWED, "xfailed": XFAILED, "skipped-in-a-fixture": SKIPPED, "rewritten-by-a-hook": REWRITTEN}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("workers", [(), ("-n1",)], ids=["serial", "xdist"])
def test_a_case_run_that_failed_makes_the_session_red_whatever_became_of_its_test(own, way, workers):
    """The four ways in which 0.1.0 answered with exit code 0."""
    found = own("'fake:wrong,ok', modes=['decode'], executions=['eager']", *workers, **WAYS[way])
    assert found.parseoutcomes().get("failed", 0) == 0, "no test failed"
    assert found.ret == 1
    text = found.stdout.str()
    assert "problem: 1 case-runs failed and their tests did not" in text
    assert "test_conformance[eager-decode-wrong-k0]; list failures that you accept" in text


@pytest.mark.parametrize("way", WAYS)
def test_the_same_tests_of_a_healthy_backend_are_green(own, way):
    found = own("'fake:ok,ok', modes=['decode']", **WAYS[way])
    assert found.ret == 0
    assert "problem:" not in found.stdout.str()


def test_a_known_failure_that_the_kit_xfails_is_no_hidden_failure(own, pytester):
    from fake_runner import known

    (pytester.path / "known.toml").write_text(known("*wrong*"))
    found = own("'fake:ok,wrong', modes=['decode'], known_failures='known.toml'")
    found.assert_outcomes(passed=2, xfailed=2, skipped=1)
    assert found.ret == 0


SKIPS_GRAPHS = """
import pytest

@pytest.fixture(autouse=True)
def _no_graphs(request):
    if {condition}:
        pytest.skip("flaky")
"""


def test_skipping_some_case_runs_of_a_test_is_red_and_skipping_all_of_them_is_not(own):
    graphs = SKIPS_GRAPHS.format(condition="'graph' in request.node.name")
    found = own("'fake:ok', modes=['decode']", conftest=graphs)
    assert found.ret == 1
    assert "problem: 1 case-runs were skipped by your tests, and others of the same test ran" in found.stdout.str()
    found = own("'fake:ok', modes=['decode']", conftest=SKIPS_GRAPHS.format(condition="True"))
    found.assert_outcomes(skipped=3)
    assert found.ret == 0


def test_a_failure_that_is_reported_as_one_is_no_problem_of_its_own(own):
    found = own("'fake:ok,wrong', modes=['decode']")
    assert found.ret == 1
    assert "problem:" not in found.stdout.str()


def test_one_cause_is_printed_once_and_counted_at_the_end(own):
    many = ",".join(["wrong"] * 5)
    found = own(f"'fake:{many}', modes=['decode'], executions=['eager']")
    text = found.stdout.str()
    assert text.count("  where    out[request 3") == 1
    assert text.count("  cause    as in test_conformance[eager-decode-wrong-k0]; -v prints every failure in full") == 4
    assert re.search(r"\n +5  only requests with a partly filled last page are wrong", text), "by cause"
    text = own(f"'fake:{many}', modes=['decode'], executions=['eager']", "-v", "--junitxml=out.xml").stdout.str()
    assert text.count("  where    out[request 3") == 5


def test_files_have_every_failure_in_full(own, pytester):
    own("'fake:wrong,wrong', modes=['decode'], executions=['eager']", "--junitxml=out.xml")
    assert (pytester.path / "out.xml").read_text().count("  where    out[request 3") == 2


def test_two_causes_have_a_full_text_each(own):
    text = own("'fake:wrong,inf,segfault', modes=['decode'], executions=['eager']").stdout.str()
    assert "cause    as in" not in text
    assert "about to read a freed page" in text


def test_a_pipe_has_whole_reasons_in_the_short_summary_unless_its_width_is_given(pytester, monkeypatch, fake):
    pytester.makeconftest(INSTALL_FAKE)
    given = "'fake:wrong', modes=['decode'], executions=['eager']"
    name = "test_" + "long_" * 20 + "name"
    test = TEST.format(given=given, takes="attn_case", body="attn_case()").replace("test_conformance", name)
    pytester.makepyfile(test_mine=test)

    def summary(**environment: str) -> str:
        for key in ("COLUMNS", "CI", "BUILD_NUMBER"):
            monkeypatch.delenv(key, raising=False)
        for key, value in environment.items():
            monkeypatch.setenv(key, value)
        command = [sys.executable, "-m", "pytest", *QUICK]
        return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL).stdout

    text = summary()
    (line,) = [line for line in text.splitlines() if line.startswith("FAILED ")]
    assert line.endswith(" - request 3 differs from the oracle, 56x over the limit")
    assert len(text.splitlines()[-1]) <= 80, "only the short summary is wide"
    assert "56x over the limit" not in summary(COLUMNS="80").partition("short test summary")[2]


def test_ids_of_tests_have_the_backend_only_if_there_are_several(own):
    text = own("'fake:ok', 'fake:ok,ok', modes=['decode'], executions=['eager']", "-v").stdout.str()
    assert "test_conformance[fake:ok-eager-decode-ok-k0]" in text
    assert "test_conformance[fake:ok,ok-eager-decode-ok-k1]" in text
    assert "test_conformance[eager-decode-ok-k0]" in own("'fake:ok', modes=['decode']", "-v").stdout.str()

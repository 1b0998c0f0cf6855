"""``run -k``, ``--lf``, ``--junit``, ``--collect-only`` and ``--durations`` mean what they mean in pytest."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from fake_runner import known

from attn_testkit.cli import main
from attn_testkit.cli.keyword import keyword
from attn_testkit.cli.last_failed import failed_before
from attn_testkit.registry import UsageError

NAMES = ("a-eager-decode-ok-k0", "a-graph-decode-ok-k0", "a-graph-target-verify-fp8-k1", "a-eager-extend-ok-k2")


@pytest.fixture
def call(fake, capfd, tmp_path, monkeypatch):
    """Call the command line in this process, in an empty directory: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("ATTN_TESTKIT_CACHE", raising=False)

    def _call(*argv: str) -> tuple[int, str, str]:
        code = main(list(argv))
        out, err = capfd.readouterr()
        return code, out, err

    return _call


EXPRESSIONS = [
    "decode", "graph and decode", "graph or extend", "not graph", "decode and not graph", "not (decode or extend)",
    "FP8", "eager and decode or fp8", "fp8 or eager and decode", "not not decode", "((graph))", "k0", "ok-k", "a-graph",
]  # fmt: skip


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_an_expression_chooses_what_pytest_chooses(text):
    from _pytest.mark.expression import Expression

    theirs = Expression.compile(text)
    wanted = [name for name in NAMES if theirs.evaluate(lambda word, name=name, **_: word.lower() in name.lower())]
    assert [name for name in NAMES if keyword(text)(name)] == wanted
    assert 0 < len(wanted) < len(NAMES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("decode and", "expected a word, 'not' or '(', got the end"),
        ("and decode", "expected a word, 'not' or '(', got 'and' at column 1"),
        ("(decode", "expected ')', 'and' or 'or', got the end"),
        ("decode graph", "expected the end, 'and' or 'or', got 'graph' at column 8"),
        ("decode)", "expected the end, 'and' or 'or', got ')' at column 7"),
        ("a &b", "unexpected '&' at column 3"),
        ("not", "expected a word"),
        (" ", "expected a word"),
    ],
)
def test_a_text_that_is_no_expression_is_refused_with_its_place(text, message):
    with pytest.raises(UsageError) as refused:
        keyword(text)
    assert message in str(refused.value)
    assert str(refused.value).startswith(f"-k {text!r}: ")


def test_k_selects_and_what_is_deselected_is_not_counted_as_planned(call):
    code, out, _ = call("run", "--backend", "fake:ok,wrong", "-k", "graph and ok")
    assert code == 0
    assert out.splitlines()[-1].startswith("PARTIAL: 2 of 8 planned case-runs ran, all passed")
    code, out, _ = call("run", "--backend", "fake:ok,wrong", "-k", "wrong and decode")
    assert code == 1
    assert out.splitlines()[-1] == "NOT CONFORMANT: 2 failed of 2 selected case-runs (8 planned)"


def test_k_that_matches_nothing_is_exit_code_5_as_in_pytest(call):
    assert call("run", "--backend", "fake:ok", "-k", "nowhere")[0] == 5


def test_k_that_is_misspelled_is_exit_code_4(call):
    code, _, err = call("run", "--backend", "fake:ok", "-k", "ok and")
    assert code == 4
    assert err.count("\n") == 1


def test_k_deselects_quarantined_case_runs_too(call, tmp_path):
    (tmp_path / "known.toml").write_text(known("*wrong*", kind="quarantine"))
    args = ("run", "--backend", "fake:ok,wrong", "--known-failures", "known.toml", "--mode", "decode", "-k")
    assert "quarantined" in call(*args, "eager")[1].splitlines()[0]
    assert "quarantined" not in call(*args, "eager and ok")[1].splitlines()[0]


def test_lf_runs_what_failed_the_last_time_until_it_passes(call, tmp_path):
    args = ("run", "--backend", "fake:ok,wrong,late", "--mode", "decode", "--execution", "eager")
    assert call(*args)[0] == 1
    assert (tmp_path / ".attn_testkit_cache" / ".gitignore").read_text() == "*\n"
    code, out, err = call(*args, "--lf")
    assert code == 1
    assert out.splitlines()[-1] == "NOT CONFORMANT: 1 failed, 1 timed out of 2 selected case-runs (12 planned)"
    assert "--lf: 2 case-runs that failed" in err
    # Only one of them is asked for, and the other one is still remembered.
    call(*args, "--lf", "-k", "wrong")
    assert {case for _, _, case in failed_before()} == {"decode-wrong-k1", "decode-late-k2"}


def test_lf_forgets_what_has_passed_since(call):
    args = ("run", "--backend", "fake:ok,ok", "--mode", "decode", "--execution", "eager")
    call("run", "--backend", "fake:wrong", "--mode", "decode", "--execution", "eager")
    path = ".attn_testkit_cache/lastfailed.json"
    with open(path) as file:
        data = json.load(file)
    data["failed"].append(["fake:ok,ok", "eager", "decode-ok-k1"])
    with open(path, "w") as file:
        json.dump(data, file)
    assert "PARTIAL: 1 of 8 planned case-runs ran, all passed" in call(*args, "--lf")[1]
    assert failed_before() == {("fake:wrong", "eager", "decode-wrong-k0")}
    code, out, err = call(*args, "--lf")
    assert code == 0
    assert "none of the 1 case-runs that failed is selected according to .attn_testkit_cache" in err
    assert "PARTIAL: 2 of 8 planned case-runs ran" in out


def test_lf_runs_everything_if_nothing_failed(call, tmp_path):
    code, out, err = call("run", "--backend", "fake:ok", "--lf")
    assert code == 0
    assert "4 of 4 planned case-runs passed" in out
    assert "nothing failed according to .attn_testkit_cache/lastfailed.json; running all that is selected" in err
    assert not (tmp_path / ".attn_testkit_cache").exists(), "a green run leaves no folder"


def test_the_folder_of_lf_may_be_another_one(call, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTN_TESTKIT_CACHE", str(tmp_path / "deep" / "cache"))
    call("run", "--backend", "fake:wrong", "--mode", "decode")
    assert (tmp_path / "deep" / "cache" / "lastfailed.json").exists()
    assert len(failed_before()) == 2


@pytest.mark.parametrize("text", ["", "[]", '{"format": "other", "failed": []}', '{"format": 1'])
def test_a_damaged_file_of_lf_is_as_none(call, tmp_path, text):
    (tmp_path / ".attn_testkit_cache").mkdir()
    (tmp_path / ".attn_testkit_cache" / "lastfailed.json").write_text(text)
    code, out, _ = call("run", "--backend", "fake:ok", "--lf")
    assert (code, "4 of 4 planned" in out) == (0, True)


def test_collect_only_lists_names_for_k_and_runs_nothing(call):
    code, out, err = call("run", "--backend", "fake:ok,dies", "--collect-only", "-k", "decode and dies")
    assert code == 0
    assert out.splitlines() == ["eager-decode-dies-k1", "graph-decode-dies-k1"]
    assert "2 case-runs would run, but none did" in err
    assert call("run", "--backend", "fake:ok", "--co", "-k", "nowhere")[0] == 5


def test_durations_lists_the_slowest_first(call):
    out = call("run", "--backend", "fake:ok,segfault", "--mode", "decode", "--durations", "2")[1]
    lines = out[out.index("slowest 2 of 4 case-runs:") :].splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["0.50", "0.50"]
    assert lines[1].endswith(" s  eager-decode-ok-k0")
    assert "slowest 4 of 4" in call("run", "--backend", "fake:ok,ok", "--mode", "decode", "--durations", "0")[1]


def test_junit_has_what_the_plugin_writes(call, tmp_path):
    (tmp_path / "known.toml").write_text(known("*inf*", check="finite"))
    words = "fake:ok,wrong,segfault,inf"
    code, _, _ = call(
        "run", "--backend", words, "--mode", "decode", "--execution", "eager", "--junit", "out.xml",
        "--known-failures", "known.toml",
    )  # fmt: skip
    assert code == 1
    (suite,) = ElementTree.parse("out.xml").getroot()
    cases = {case.attrib["name"]: case for case in suite.iter("testcase")}
    (said,) = suite.find("properties")
    assert (said.attrib["name"], said.attrib["value"].partition(":")[0]) == ("attn_verdict", "NOT CONFORMANT")
    assert (suite.attrib["tests"], suite.attrib["failures"], suite.attrib["skipped"]) == ("5", "2", "2")
    failure = cases["eager-decode-wrong-k1"].find("failure")
    assert failure.attrib["message"] == "request 3 differs from the oracle, 56x over the limit"
    assert "  where    out[request 3" in failure.text
    crash = cases["eager-decode-segfault-k2"].find("failure")
    assert crash.attrib["message"] == "crashed: the process was killed by SIGSEGV"
    assert cases["eager-decode-inf-k3"].find("skipped").attrib["type"] == "pytest.xfail"
    found = {each.attrib["name"]: each.attrib["value"] for each in cases["eager-decode-ok-k0"].iter("property")}
    assert (found["attn_status"], found["attn_backend"], found["attn_mode"]) == ("passed", words, "decode")


def test_junit_of_a_run_that_is_killed_is_not_empty(call, tmp_path, monkeypatch):
    def killed(*_: object, **__: object) -> None:
        raise SystemError("killed")

    monkeypatch.setattr(sys.modules["attn_testkit.cli.run"], "Watch", killed)
    assert call("run", "--backend", "fake:ok", "--junit", "out.xml")[0] == 3
    (suite,) = ElementTree.parse("out.xml").getroot()
    assert suite.find("testcase/error").attrib["message"] == "the run has not ended"


def test_a_kit_error_is_an_error_of_junit(call):
    assert call("run", "--backend", "fake:ok,bug", "--mode", "decode", "--junit", "out.xml")[0] == 3
    assert len(ElementTree.parse("out.xml").getroot().findall("testsuite/testcase/error")) == 2


def test_junit_that_cannot_be_written_fails_before_anything_runs(call):
    code, out, err = call("run", "--backend", "fake:ok", "--junit", "no/where.xml")
    assert (code, out) == (4, "")
    assert "there is no directory no" in err

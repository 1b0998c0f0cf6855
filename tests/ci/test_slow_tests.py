"""Slow tests are those of the table, start first, and are left out by the command of the README.

What must pass before a change lands is that command, and then the tests that it leaves out.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace as Of

import pytest
import slow_tests
import yaml
from slow_tests import SLOW, slow_first

ROOT = Path(__file__).resolve().parents[2]
FLOWS = ROOT / ".github" / "workflows"


class Named:
    """An item of pytest as far as ``slow_first`` knows it."""

    def __init__(self, nodeid: str, **params: object) -> None:
        self.nodeid = f"tests/{nodeid}"
        self.callspec = Of(params=params)
        self.marks: list[str] = []

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.name)


def test_slow_items_are_marked_and_come_first_slowest_first_and_the_others_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slow_tests, "SLOW", ("tests/b.py::test_slowest", "tests/a.py::"))
    names = ["c.py::test_1", "a.py::test_x", "b.py::test_0", "b.py::test_slowest[1]", "a.py::test_y", "c.py::test_0"]
    items = [Named(name) for name in names]
    slow_first(items)  # type: ignore[arg-type]
    slow = ["b.py::test_slowest[1]", "a.py::test_x", "a.py::test_y"]
    assert [item.nodeid.removeprefix("tests/") for item in items] == [
        *slow, "c.py::test_1", "b.py::test_0", "c.py::test_0",
    ]  # fmt: skip
    assert [item.nodeid.removeprefix("tests/") for item in items if item.marks == ["slow"]] == slow
    assert [item.marks for item in items[len(slow) :]] == [[], [], []]


def test_the_first_case_and_the_first_bug_of_each_mechanism_are_not_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_tests, "SLOW", ("tests/bugs.py::test_caught[", "tests/a.py::test_x["))
    of = [("of_masks", "finite"), ("third_masks", "finite"), ("third_masks", "completes"), ("third_state", "finite")]
    backends = [type("Bug", (), {"__module__": f"bugs_{file}"}) for file, _ in of]
    bugs = [Of(backend=backend, checks=(check,)) for backend, (_, check) in zip(backends, of, strict=True)]
    items = [Named(f"bugs.py::test_caught[{number}]", bug=bug) for number, bug in enumerate(bugs)]
    items += [Named(f"a.py::test_x[{number}]") for number in range(3)]
    slow_first(items)  # type: ignore[arg-type]
    slow = ["bugs.py::test_caught[1]", "a.py::test_x[1]", "a.py::test_x[2]"]
    assert [item.nodeid.removeprefix("tests/") for item in items if item.marks] == slow


def test_every_row_names_a_file_or_a_test_that_is_there_once() -> None:
    assert [row for row, count in Counter(SLOW).items() if count > 1] == []
    for row in SLOW:
        path, _, test = row.partition("::")
        file = ROOT / path
        assert file.is_file() or (file.is_dir() and not test), row
        assert not test or re.search(rf"^def {re.escape(test.partition('[')[0])}\(", file.read_text(), re.M), row


def test_pytest_chooses_by_the_marks_of_the_table() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    file, _, test = next(row for row in SLOW if row.startswith("tests/new/test_new.py::")).partition("::")
    found = subprocess.run([*command, file], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    listed = re.findall(r"::(test_\w+)", found)
    assert test not in listed
    assert len(set(listed)) > 1


def commands(flow: str, job: str) -> list[str]:
    steps = yaml.safe_load((FLOWS / flow).read_text())["jobs"][job]["steps"]
    return [step["run"] for step in steps if "run" in step]


def main_of_marks(*expressions: str) -> str:
    """What pytest makes of several ``-m``."""
    options = [part for each in expressions for part in ("-m", each)]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # this process has imported the plugin
    return str(pytest.Config.fromdictargs({}, options).option.markexpr)


QUICK, REST = "bash ci/pr.sh", "bash ci/pytest.sh -m slow"


def test_a_pull_request_runs_every_test_and_the_nightly_all_of_them_on_every_python() -> None:
    assert commands("pr.yml", "cpu") == [QUICK]
    assert commands("pr.yml", "slow") == [REST]
    assert commands("nightly.yml", "tests") == [QUICK, REST]
    pythons = [
        yaml.safe_load((FLOWS / flow).read_text())["jobs"][job]["strategy"]["matrix"]["python"]
        for flow, job in (("pr.yml", "cpu"), ("nightly.yml", "tests"))
    ]
    assert pythons[0] == pythons[1]


def test_what_a_change_must_pass_is_the_readmes_command_and_all_tests_that_it_leaves_out() -> None:
    readme = (ROOT / "README.md").read_text()
    assert re.findall(r"^(bash ci/pr\.sh.*?) *(?:#.*)?$", readme, re.MULTILINE) == [QUICK]
    gate = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line and not line.startswith("#")]
    assert gate == ['cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit', f'exec {QUICK} -m ""']
    assert main_of_marks("not slow", "") == "", "the last -m counts, and an empty one chooses all tests"
    (tests,) = re.findall(r"^(bash ci/pytest\.sh .*) \|\| ", (ROOT / "ci" / "pr.sh").read_text(), re.MULTILINE)
    assert tests == 'bash ci/pytest.sh -m "not slow" "$@"'
    (given,) = re.findall(r'^exec "\$python" -m pytest (.*)$', (ROOT / "ci" / "pytest.sh").read_text(), re.MULTILINE)
    options = re.findall(r"(?<!\S)-[-\w]+", given)
    assert options == ["-n", "--dist"], "nothing is ignored or deselected"

"""ci/mutants.py: what it changes, that the change is seen wherever it is imported, and that no verdict is lost."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import textwrap
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

CI = Path(__file__).resolve().parents[2] / "ci"

CORE = """
def above(x, limit):
    return x > limit


def small(x):
    return x < 10
"""
TESTS = """
from toy.core import above, small

def test_the_boundary_of_above():
    assert above(5, 4) is True
    assert above(4, 4) is False

def test_small_far_from_its_boundary():
    assert small(3) is True
    assert small(100) is False
"""
CONFIG = """
root = "."
paths = ["toy"]
watched = ["toy", "tests"]
warm = ["pytest"]
[packages]
toy = "toy"
[tests]
toy = ["tests/test_core.py"]
"""


@pytest.fixture
def toy(tmp_path):
    """Make a package with one test file: its folder."""

    def _toy(core: str = CORE, tests: str = TESTS) -> Path:
        for name, text in (
            ("toy/__init__.py", ""), ("toy/core.py", core), ("tests/test_core.py", tests), ("mutants.toml", CONFIG),
            ("pytest.ini", "[pytest]\n"),
        ):  # fmt: skip
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(textwrap.dedent(text))
        return tmp_path

    return _toy


def command(folder: Path, *args: str) -> list[str]:
    return [sys.executable, str(CI / "mutants.py"), "--config", str(folder / "mutants.toml"), *args]


def mutate(folder: Path, *args: str) -> tuple[int, dict[str, str], str]:
    """Run it: exit code, the mutated line -> what became of it, and everything printed."""
    argv = command(folder, "--json", str(folder / "out.json"), *args)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
    file = folder / "out.json"
    rows = json.loads(file.read_text())["mutants"] if file.exists() else []
    return done.returncode, {row["becomes"]: row["status"] for row in rows}, done.stdout + done.stderr


def files(folder: Path) -> dict[str, bytes]:
    kept = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {str(path.relative_to(folder)): path.read_bytes() for path in kept}


@pytest.fixture
def operators(monkeypatch):
    monkeypatch.syspath_prepend(str(CI))
    from mutation import operators

    return operators


@pytest.mark.parametrize(
    ("source", "becomes"),
    [
        ("x = a < b", ["x = a <= b"]),
        ("x = a < b <= c", ["x = a <= b <= c", "x = a < b < c"]),
        ("x = a is not None", ["x = a is None"]),
        ("x = a not  in b", ["x = a in b"]),
        ("x = 3", ["x = 4", "x = 2"]),
        ("x = 0", ["x = 1"]),
        ("x = 0.5", ["x = 1.0", "x = 0.25"]),
        ("x = a - b", ["x = a + b"]),
        ("x -= a", ["pass", "x += a"]),
        ("x = a and b or c", ["x = a or b or c", "x = a and b and c"]),
        ("x = not a", ["x = (a)"]),
        ("x = a if b else c", ["x = a if (not (b)) else c"]),
        ("x = min(a)", ["x = max(a)"]),
        ("x = a.amax(b)", ["x = a.amin(b)"]),
        ("x = [a, b]", ["x = [b]", "x = [a]"]),
        ("x = {a: b, **c}", ["x = {**c}", "x = {a: b}"]),
        ("f(a, b=c, d=e)", ["pass", "f(a, d=e)", "f(a, b=c)"]),
        ("x = a[b:]", ["x = a[:]", "x = a[(b) + 1:]"]),
        ("def f(): return a", ["def f(): return None"]),
        ("def f(): return True", ["def f(): return False"]),
        ("raise a", ["pass"]),
        ("a.b = c", ["pass"]),
        ("é = a < b", ["é = a <= b"]),
        ("x = (a  # <\n  < b)", ["<= b)"]),
    ],
)
def test_an_operator_changes_one_thing_and_leaves_the_text_around_it(operators, source, becomes):
    assert sorted(m.becomes for m in operators.mutants_of(source.encode(), "a.py")) == sorted(becomes)


@pytest.mark.parametrize(
    "source",
    [
        '"""About 3 < 4."""', "x: Literal[3]", "def f(a: Literal[3] = b) -> Literal[4]: ...", "@f(3)\nclass A: ...",
        "__all__ = ['a', 'b']", "assert a < b", "x = f'{a < b}'", "if TYPE_CHECKING:\n    import a", "import a",
        "A = tuple[int, str, float]", "A = Callable[[B, C, D], E]",
    ],
)  # fmt: skip
def test_what_says_nothing_of_behaviour_is_left_alone(operators, source):
    assert operators.mutants_of(source.encode(), "a.py") == []


def test_a_keyword_that_nobody_sees_is_left_alone(operators):
    source = b"f(a, daemon=3, limit=4)"
    assert [m.becomes for m in operators.mutants_of(source, "a.py", {"daemon"})] == [
        "pass", "f(a, daemon=3)", "f(a, daemon=3, limit=5)", "f(a, daemon=3, limit=3)"
    ]  # fmt: skip


def test_an_id_outlives_lines_that_move_and_tells_equal_lines_apart(operators):
    source = b"def f():\n    g(a < b)\n    g(a < b)\n"
    before = [m.id for m in operators.mutants_of(source, "a.py")]
    moved = [m.id for m in operators.mutants_of(b"import os\n\n" + source, "a.py")]
    assert before == moved
    assert len(set(before)) == len(before) == 4
    assert before != [m.id for m in operators.mutants_of(source, "b.py")]


def test_a_boundary_that_is_tested_kills_and_one_that_is_not_survives(toy):
    folder = toy()
    before = files(folder)
    code, found, text = mutate(folder)
    assert code == 1
    assert found == {
        "return x >= limit": "killed", "return None": "killed", "return x <= 10": "survived",
        "return x < 11": "survived", "return x < 9": "survived",
    }  # fmt: skip
    assert "survived toy/core.py:7 comparison, in small" in text
    assert "-    return x < 10\n+    return x <= 10" in text
    after = files(folder)
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"out.json", "build/mutants.jsonl"}


ASK = "import toy.core, sys; sys.exit(toy.core.one() != 1)"
WAYS = {
    "an interpreter": f"subprocess.run([sys.executable, '-c', {ASK!r}], check=True)",
    "spawn": "assert multiprocessing.get_context('spawn').Pool(1).apply(ask) == 1",
    "forkserver": "assert multiprocessing.get_context('forkserver').Pool(1).apply(ask) == 1",
}


@pytest.mark.parametrize("way", WAYS)
def test_a_process_that_a_test_starts_imports_the_mutant_too(toy, way):
    tests = f"""
    import multiprocessing, subprocess, sys, pytest
    pytestmark = pytest.mark.filterwarnings("ignore")

    def ask():
        import toy.core
        return toy.core.one()

    def test_the_other_process():
        {WAYS[way]}
        assert "toy.core" not in sys.modules
    """
    code, found, text = mutate(toy("def one():\n    return 1\n", tests))
    assert set(found.values()) == {"killed"}, text
    assert code == 0


def test_a_package_itself_can_be_mutated(toy):
    folder = toy("", "import toy, toy.core\n\ndef test_one():\n    assert toy.ONE == 1\n")
    (folder / "toy" / "__init__.py").write_text("ONE = 1\n")
    assert mutate(folder)[1] == {"ONE = 2": "killed", "ONE = 0": "killed"}


def test_a_mutant_that_never_ends_is_ended_with_all_that_it_started(toy):
    core = "def count(n):\n    while n > 0:\n        n -= 1\n    return n\n"
    tests = """
    import subprocess, sys
    from toy.core import count

    def test_it_ends():
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)  # toy"], start_new_session=True)
        with open("pids", "a") as file:
            print(child.pid, file=file)
        assert count(3) == 0
        child.kill()
        child.wait()
    """
    folder = toy(core, tests)
    _, found, _ = mutate(folder, "--limit", "2")
    assert found["n += 1"] == found["pass"] == "timed out"
    assert found["while n >= 0:"] == "killed"
    for pid in (folder / "pids").read_text().split():
        # It may be gone already, or go while this is read; its number may be another's.
        command_line = b""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            command_line = Path("/proc", pid, "cmdline").read_bytes()
        assert b"# toy" not in command_line


def test_verdicts_are_kept_until_a_test_changes(toy):
    folder = toy()
    assert "2/2" in mutate(folder, "--sample", "2")[2]
    _, found, text = mutate(folder)
    assert len(found) == 5
    assert "/4 " in text, "six mutants, of which two were judged"
    assert "passes without a mutant" not in text
    tests = folder / "tests" / "test_core.py"
    tests.write_text(tests.read_text() + "    assert small(10) is False\n    assert small(9) is True\n")
    code, found, text = mutate(folder)
    assert set(found.values()) == {"killed"}
    assert code == 0
    assert "/6 " in text


def test_an_interrupted_run_goes_on_where_it_was(toy):
    folder = toy(tests="import time\ntime.sleep(0.3)\n" + TESTS)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # under nohup a child would inherit "ignored"
    process = subprocess.Popen(command(folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before)
    assert process.stderr is not None
    while not process.stderr.readline().startswith("1/6"):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "the same command goes on from here" in err
    kept = sum('"mutant"' in line for line in (folder / "build" / "mutants.jsonl").read_text().splitlines())
    assert 1 <= kept < 6
    _, found, text = mutate(folder)
    assert len(found) == 5
    assert f"/{6 - kept} " in text


def test_when_time_is_up_what_there_is_is_reported(toy):
    folder = toy(
        "def count(n):\n    while n > 0:\n        n -= 1\n    return n\n",
        """
    from toy.core import count

    def test_it_ends():
        assert count(3) == 0
    """,
    )
    code, found, text = mutate(folder, "--minutes", "0.08")
    assert code == 2
    assert "time is up: the same command goes on from here" in text
    assert "timed out" not in found.values()
    assert "score" in text


def test_a_test_that_cannot_run_here_is_left_out(toy):
    folder = toy(tests=TESTS + "\ndef test_elsewhere():\n    assert False\n")
    assert mutate(folder)[0] == 3
    assert mutate(folder, "--without", "tests/test_core.py::test_elsewhere")[0] == 1


def test_only_the_survivors_of_before_are_evaluated_again(toy):
    folder = toy()
    mutate(folder)
    (folder / "out.json").rename(folder / "before.json")
    _, found, _ = mutate(folder, "--again", str(folder / "before.json"))
    assert set(found.values()) == {"survived"}
    assert len(found) == 3


ENTRY = '[[equivalent]]\npath = "toy/core.py"\nwas = "return x < 10"\nbecomes = "{}"\nreason = "{}"\n'


def test_a_survivor_that_is_named_equivalent_is_not_counted(toy):
    folder = toy()
    lines = ("return x <= 10", "return x < 11", "return x < 9")
    (folder / "mutants_equivalent.toml").write_text("".join(ENTRY.format(line, "nobody asks") for line in lines))
    code, found, _ = mutate(folder)
    assert code == 0
    assert {line: found[line] for line in lines} == dict.fromkeys(lines, "equivalent")
    assert json.loads((folder / "out.json").read_text())["score"] == 1.0


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (ENTRY.format("return x != 10", "why"), "entry 1 (toy/core.py: return x != 10) matches no mutant"),
        (ENTRY.format("return x <= 10", "why").replace("core.py", "gone.py"), "matches no mutant"),
        (ENTRY.format("return x <= 10", "why") + 'scope = "above"\n', "matches no mutant"),
        (ENTRY.format("return x <= 10", " "), "entry 1 lacks reason"),
    ],
)
def test_an_entry_that_speaks_of_no_mutant_or_gives_no_reason_is_an_error(toy, entry, message):
    folder = toy()
    (folder / "mutants_equivalent.toml").write_text(entry)
    code, found, text = mutate(folder)
    assert code == 4
    assert message in text
    assert not found


def test_a_folder_of_tests_with_the_same_name_is_tried_first(toy):
    folder = toy()
    (folder / "tests" / "toy").mkdir()
    more = "import toy.core\n\ndef test_nine_and_a_half():\n    assert toy.core.small(9.5)\n"
    (folder / "tests" / "toy" / "test_more.py").write_text(more)
    _, found, text = mutate(folder)
    assert found["return x < 9"] == "killed"
    assert "pytest tests/toy" in text
    assert "pytest tests/test_core.py" in text


def test_where_an_entry_names_a_file_of_that_folder_the_rest_of_it_is_not_run(operators, toy):
    from mutation.config import load_config

    folder = toy()
    (folder / "tests" / "toy").mkdir()
    for name in ("one", "two"):
        (folder / "tests" / "toy" / f"test_{name}.py").write_text("")
    config = load_config(folder / "mutants.toml")
    assert [stage.name for stage in config.stages("toy/core.py")] == ["pytest tests/toy", "pytest tests/test_core.py"]
    entry = "tests/toy/test_one.py tests/test_core.py"
    named = replace(config, tests={"toy": (entry,)})
    assert [stage.name for stage in named.stages("toy/core.py")] == [f"pytest {entry}"]


def test_tests_that_fail_without_a_mutant_judge_nothing(toy):
    code, found, text = mutate(toy(tests="def test_it():\n    assert False\n"))
    assert code == 3
    assert "fails without a mutant: pytest tests/test_core.py" in text
    assert not found


def test_what_is_mutated_is_not_imported_before_the_processes_fork(operators, toy):
    from mutation.config import ConfigError, load_config
    from mutation.judge import Judge

    config = load_config(toy() / "mutants.toml")
    with pytest.raises(ConfigError, match="warm imports pytest; a mutant of it would not be seen"):
        Judge(replace(config, packages={"toy": "pytest"}), 30.0)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--jobs", "0"], "0 is less than 1"),
        (["--only", "nowhere"], "no Python file at nowhere"),
        (["--only", ".."], "no Python file at .."),
        (["--only", "tests"], "nothing to mutate in tests"),
        (["--only", "other.py"], "no tests are named for other.py"),
        (["--again", "nowhere.json"], "cannot read nowhere.json"),
    ],
)
def test_wrong_usage_is_four_with_a_line_that_says_why(toy, args, message):
    folder = toy()
    (folder / "other.py").write_text("x = 3\n")
    code, _, text = mutate(folder, *args)
    assert code == 4
    assert message in text
    assert "Traceback" not in text


def test_a_lot_draws_from_every_room_and_another_seed_draws_another(operators):
    import mutants

    source = "\n".join(f"a{n} = b{n} < c{n}" for n in range(30)).encode()
    drawn = [m for room in ("x", "y", "z") for m in operators.mutants_of(source, f"{room}/a.py")]
    first = mutants.lot(drawn, 6, 0)
    assert [m.path for m in first] == ["x/a.py", "y/a.py", "z/a.py"] * 2
    assert mutants.lot(drawn, 6, 0) == first
    assert mutants.lot(drawn, 9, 0)[:6] == first
    assert mutants.lot(drawn, 6, 1) != first
    assert len(mutants.lot(drawn, 1000, 0)) == len(drawn)


def test_every_file_of_the_kit_has_tests_and_no_entry_of_an_equivalent_mutant_is_stale(operators):
    import mutants
    from mutation.config import load_config

    config = load_config(CI / "mutants.toml")
    for file in config.files():
        path = str(file.relative_to(config.root))
        assert config.stages(path)
        assert config.module(path).startswith("attn_testkit.")
    entries = tomllib.loads((CI / "mutants_equivalent.toml").read_text())["equivalent"]
    paths = sorted({entry["path"] for entry in entries})
    # A stale entry is refused. Mutants of all files would take ten times as long.
    found, reasons = mutants.choose(mutants.arguments().parse_args([f"--only={path}" for path in paths]), config)
    assert len(found) > 200
    assert len(reasons) >= len(entries)

"""A worker that imports another text in a module's place, and notes what runs."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from attn_testkit.registry import UsageError
from attn_testkit.running.hygiene.other_sources import OtherSources, outermost_folder, root_of, use_other_sources

MODULE = """
import functools
import inspect
from pathlib import Path

def answer(x):
    if x:
        return "own"
    return None

def beside():
    return Path(__file__).with_name("data.txt").read_text()

SEEN = inspect.getsource(answer)
"""


def run(folder: Path, program: str) -> str:
    """In a process of its own: what is imported from where is a matter of the whole process."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=folder, capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "given.py").write_text(MODULE)
    (tmp_path / "data.txt").write_text("beside the module")
    (tmp_path / "notes").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "other.py").write_text(MODULE.replace('"own"', '"other"'))
    return tmp_path


USE = """
import sys; sys.path.insert(0, "")
from attn_testkit.running.hygiene.other_sources import OtherSources, use_other_sources
notes = use_other_sources(OtherSources((("given", "elsewhere/other.py"),), notes={notes!r}, memory={memory}))
import given
"""


def test_the_other_text_runs_is_what_source_is_asked_for_and_finds_what_lies_beside_the_module(folder: Path) -> None:
    printed = run(
        folder,
        USE.format(notes="", memory=0)
        + "print(given.answer(1), given.beside(), given.__file__.endswith('given.py'), '\"other\"' in given.SEEN)",
    )
    assert printed == "other beside the module True True\n"


def test_lines_are_noted_of_the_import_and_then_of_each_drive(folder: Path) -> None:
    run(
        folder,
        USE.format(notes="notes", memory=0)
        + "notes.imported('given'); given.answer(1); notes.drove('c', 'eager')\n"
        + "given.answer(0); notes.drove('d', 'graph')",
    )
    (file,) = (folder / "notes").iterdir()
    imported, first, second = map(json.loads, file.read_text().splitlines())
    lines = MODULE.splitlines()
    own, nothing = lines.index('        return "own"') + 1, lines.index("    return None") + 1
    assert imported["files"]["given"].endswith("given.py")
    assert lines.index("SEEN = inspect.getsource(answer)") + 1 in imported["lines"]["given"]
    assert own not in imported["lines"]["given"]
    assert (first["case"], first["execution"]) == ("c", "eager")
    assert own in first["lines"]["given"]
    assert nothing not in first["lines"]["given"]
    assert nothing in second["lines"]["given"]
    assert own not in second["lines"]["given"]


def test_addresses_that_are_only_reserved_are_no_memory_as_those_of_cuda(folder: Path) -> None:
    reserve = "import mmap; mmap.mmap(-1, 64 << 30, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0); print('reserved')"
    assert run(folder, USE.format(notes="", memory=1 << 30) + reserve) == "reserved\n"


def test_a_process_that_asks_for_more_memory_than_it_may_have_is_reported_so(folder: Path) -> None:
    ask = "try:\n    bytearray(3 << 30)\n    print('got it')\nexcept MemoryError:\n    print('refused')"
    assert run(folder, USE.format(notes="", memory=1 << 30) + ask) == "refused\n"
    assert run(folder, USE.format(notes="", memory=4 << 30) + ask) == "got it\n"


def test_a_module_that_is_imported_already_cannot_be_another_one() -> None:
    with pytest.raises(UsageError, match=r"attn_testkit\.registry is imported by the kit"):
        use_other_sources(OtherSources((("attn_testkit.registry", "x.py"),)))
    with pytest.raises(UsageError, match=r"attn_testkit\.registry is imported by the kit"):
        use_other_sources(OtherSources(located=("attn_testkit.registry",)))


FUNCTIONS = """
import sys; sys.path[:0] = ["", "site-packages"]
from attn_testkit.running.hygiene.other_sources import OtherSources, use_other_sources
notes = use_other_sources(OtherSources(notes="notes", functions=True))
import given, installed, threading
from attn_testkit.registry import UsageError, capabilities_line
notes.imported("given")
threading.Thread(target=given.beside).start()
given.Thing().method()
installed.answer(1)
notes.drove("decode-x", "eager")
given.answer(0)
notes.drove("decode-y", "graph")
"""


def test_functions_of_the_checkout_are_noted_for_each_case_run_and_no_others(folder: Path) -> None:
    (folder / ".git").mkdir()
    (folder / "site-packages").mkdir()
    (folder / "site-packages" / "installed.py").write_text(MODULE)
    thing = "class Thing:\n    def method(self):\n        return [self for _ in (lambda: [1])()]\n\nanswer(1)\n"
    (folder / "given.py").write_text(MODULE + thing)
    run(folder, FUNCTIONS)
    (notes,) = (folder / "notes").iterdir()
    imported, first, second = (json.loads(line) for line in notes.read_text().splitlines())
    assert imported["root"] == str(folder)
    assert imported["files"] == ["given.py"]
    assert imported["functions"] == [["given.py", name] for name in ("<module>", "Thing", "answer")]
    assert first["functions"] == [["given.py", name] for name in ("Thing.method", "beside")]
    assert (first["case"], first["execution"]) == ("decode-x", "eager")
    assert second["functions"] == [["given.py", "answer"]]


def test_without_a_checkout_the_root_is_the_folder_of_the_outermost_package(tmp_path: Path) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "outer" / "__init__.py").touch()
    (inner / "__init__.py").touch()
    assert outermost_folder(str(inner / "x.py")) == str(tmp_path / "outer")
    assert outermost_folder(str(tmp_path / "x.py")) == str(tmp_path)
    assert root_of(str(inner / "x.py")) == str(tmp_path / "outer")
    (tmp_path / ".git").touch()
    assert root_of(str(inner / "x.py")) == str(tmp_path)
    installed = tmp_path / "venv" / "site-packages" / "own"
    installed.mkdir(parents=True)
    assert root_of(str(installed / "x.py")) == str(installed), "an edit of the checkout does not change the copy"

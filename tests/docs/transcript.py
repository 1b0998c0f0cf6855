"""The pages' own examples: their files are written, their commands run, and what they print is compared with the page.

A page holds fences of three kinds that are run, from top to bottom, in one empty directory:

* ``python title="my_decode.py"`` (or another language) is a file, written whole;
* ``diff title="my_decode.py"`` changes it: the lines that begin with a space or a minus must stand in it, once. A line
  of ``@@`` parts two places;
* ``console`` holds commands behind ``$`` and what they print: stdout, or stderr where stdout is empty. A line of
  ``...`` stands for lines that the page leaves out.

Compared is everything but times, torch's version and the width of columns; margins may differ by 0.1, because another
CPU rounds otherwise.

``python tests/docs/transcript.py PAGE...`` writes what the commands print into the pages, where it is not the same, and
not into fences with ``...``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = "..."
MARGINS_APART = 0.1
_FENCE = re.compile(r"^```(?P<language>\w*)(?: +title=\"(?P<title>[^\"]+)\")?\n(?P<body>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Fence:
    """A fenced block of a page."""

    page: Path
    line: int
    """Of its first line of text, counted from 1."""
    language: str
    title: str
    body: str

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A command of a ``console`` fence, and what the page says that it prints."""

    text: str
    printed: tuple[str, ...]


def fences(page: Path) -> Iterator[Fence]:
    """Every fence of a page, in its order."""
    return fences_of(page, page.read_text())


def fences_of(page: Path, text: str) -> Iterator[Fence]:
    """Every fence of a text that a page has, in its order."""
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 2
        yield Fence(page, line, match["language"], match["title"] or "", match["body"])


def commands(body: str) -> list[Command]:
    """The commands of a ``console`` fence. One that ends with a backslash goes on in the next line."""
    found: list[tuple[list[str], list[str]]] = []
    for line in body.splitlines():
        if line.startswith("$ "):
            found.append(([line[2:]], []))
        elif not found:
            raise ValueError(f"a console fence begins with a command behind '$ ', got {line!r}")
        elif found[-1][0][-1].endswith("\\") and not found[-1][1]:
            found[-1][0].append(line)
        else:
            found[-1][1].append(line)
    return [Command("\n".join(text), tuple(printed)) for text, printed in found]


def changed(text: str, diff: str) -> str:
    """A file after a ``diff`` fence. Raises ``ValueError`` where the old lines do not stand in it exactly once."""
    lines = text.splitlines()
    for hunk in re.split(r"^@@.*\n", diff, flags=re.M):
        if not hunk:
            continue
        marked = [(line[:1] or " ", line[1:]) for line in hunk.splitlines()]
        old = [line for mark, line in marked if mark in " -"]
        new = [line for mark, line in marked if mark in " +"]
        places = [at for at in range(len(lines)) if lines[at : at + len(old)] == old]
        if len(places) != 1:
            raise ValueError(f"these lines stand in the file {len(places)} times, not once:\n" + "\n".join(old))
        lines[places[0] : places[0] + len(old)] = new
    return "\n".join(lines) + "\n"


def write(fence: Fence, folder: Path) -> None:
    """Put a fence with a title into the folder."""
    path = folder / fence.title
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(changed(path.read_text(), fence.body) if fence.language == "diff" else fence.body)


def execute(command: Command, folder: Path) -> tuple[str, ...]:
    """The lines that a command prints: on stdout, or on stderr where stdout stays empty.

    Pages that have written no file share what a command of the kit prints: a run takes some seconds.
    """
    if command.text.startswith("attn-testkit ") and not any(folder.iterdir()):
        return _run_once(command.text)
    return _run(command.text, folder)


@cache
def _run_once(text: str) -> tuple[str, ...]:
    with tempfile.TemporaryDirectory() as empty:
        return _run(text, Path(empty))


def _run(text: str, folder: Path) -> tuple[str, ...]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        ["bash", "-c", text], cwd=folder, env=env, capture_output=True, text=True, timeout=400, check=False
    )
    return tuple((done.stdout or done.stderr).replace(f"{folder}/", "").splitlines())


_SAME = (
    (re.compile(r"(?<=\S) {2,}"), "  "),
    # Seconds, and those of the diagnosis, at the end of a row or before the column "ran on".
    (re.compile(r"(?<=  )\d+\.\d(?=(?:  \d+\.\d)?(?:  (?:emulated:|cuda)|$))"), "TIME"),
    (re.compile(r"\b\d+\.\d+ s\b"), "TIME"),
    (re.compile(r"\btorch \d\S*"), "torch VERSION"),
)
_MARGIN = re.compile(r"\b\d\.\d\d(?=  TIME)|(?<=margin )\d\.\d\d\b")


def normal(line: str) -> tuple[str, tuple[float, ...]]:
    """A line without what differs from run to run and from machine to machine, and the margins in it."""
    line = line.rstrip()
    for pattern, word in _SAME:
        line = pattern.sub(word, line)
    return _MARGIN.sub("MARGIN", line), tuple(map(float, _MARGIN.findall(line)))


def same_line(shown: str, printed: str) -> bool:
    """Whether a page's line says what a program printed."""
    (text, margins), (other, others) = normal(shown), normal(printed)
    near = (abs(a - b) <= MARGINS_APART + 1e-9 for a, b in zip(margins, others, strict=False))
    return text == other and len(margins) == len(others) and all(near)


def same(shown: tuple[str, ...], printed: tuple[str, ...]) -> bool:
    """Whether a page shows what was printed; ``...`` stands for any lines, none included."""
    if not shown:
        return not printed
    if shown[0] == LEFT_OUT:
        return any(same(shown[1:], printed[at:]) for at in range(len(printed) + 1))
    return bool(printed) and same_line(shown[0], printed[0]) and same(shown[1:], printed[1:])


def without_blank_end(lines: tuple[str, ...]) -> tuple[str, ...]:
    while lines and not lines[-1].strip():
        lines = lines[:-1]
    return lines


def differences(page: Path, folder: Path) -> Iterator[str]:
    """What a page says otherwise than the programs, a text for each command."""
    for fence in fences(page):
        if fence.title:
            write(fence, folder)
        elif fence.language == "console":
            for command in commands(fence.body):
                printed = without_blank_end(execute(command, folder))
                if not same(without_blank_end(command.printed), printed):
                    yield "\n".join((f"{fence.place}: $ {command.text}", "prints now:", *printed))


def rewritten(page: Path, folder: Path) -> str:
    """The page's text with what the commands print now."""
    lines = page.read_text().splitlines(keepends=True)
    moved = 0
    for fence in fences(page):
        if fence.title:
            write(fence, folder)
        elif fence.language == "console":
            parts = [(command, execute(command, folder)) for command in commands(fence.body)]
            if any(LEFT_OUT in command.printed for command, _ in parts):
                print(f"{fence.place}: abbreviated, left as it is", file=sys.stderr)
                continue
            if all(same(without_blank_end(command.printed), without_blank_end(out)) for command, out in parts):
                continue
            new = [
                f"{line.rstrip()}\n"
                for command, printed in parts
                for line in (*f"$ {command.text}".splitlines(), *without_blank_end(printed))
            ]
            begin, old = fence.line - 1 + moved, fence.body.count("\n")
            lines[begin : begin + old] = new
            moved += len(new) - old
    return "".join(lines)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as empty:
            Path(name).write_text(rewritten(Path(name), Path(empty)))

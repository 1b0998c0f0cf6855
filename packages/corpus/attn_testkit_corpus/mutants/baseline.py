"""The unchanged backend: its source files, the check that it is green, and the lines that each case-run executes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from attn_testkit.registry import UsageError
from attn_testkit.results.case_result import BAD, CaseResult, Status
from attn_testkit.results.failure_text import repro_command
from attn_testkit.running.case_runs.loop import Runner
from attn_testkit.running.hygiene.other_sources import OtherSources
from attn_testkit.running.planning.candidate import Candidate
from attn_testkit.running.planning.request import Item, Options, Plan

from .journal import Journal, Run
from .order import name_of

MEMORY = 8 << 30
"""Bytes that a worker may take beyond what it has at its start: a mutant may ask for any number."""


def read_sources(backend: str, modules: Sequence[str], device: str) -> tuple[dict[str, bytes], frozenset[str]]:
    """Module -> its text: of the module that holds the backend's class, and of further ones. Next to it the names of
    the classes in the first module that are derived from the backend's, which are other backends.

    Raises ``UsageError`` for a module that cannot be imported, or that is not Python.
    """
    with tempfile.TemporaryDirectory(prefix="attn-testkit-mutants-") as folder:
        runner = Runner()
        with closing(runner):
            runner.declared(Candidate(backend, sources=OtherSources(located=tuple(modules), notes=folder)), device)
        imported = next(_Notes(Path(folder)).new())
    sources = {}
    for module, file in imported["files"].items():
        if not file.endswith(".py"):
            what = f"its file is {Path(file).name}" if file else "it has no file"
            raise UsageError(f"module {module!r} is not written in Python ({what}): there is nothing to mutate")
        sources[module] = Path(file).read_bytes()
    return sources, frozenset(imported["derived"])


def run_baseline(
    plan: Plan,
    items: Sequence[Item],
    sources: OtherSources,
    options: Options,
    journal: Journal,
    see: Callable[[str, int, int], None],
) -> None:
    """Run the case-runs that the journal lacks, and note the lines of each. Raises ``UsageError`` if one does not pass.

    Args:
        plan: the backend's plan.
        items: case-runs that have to be known.
        sources: unchanged copies of the backend's modules.
        options: options of the run.
        journal: the journal to write.
        see: called with the name of each, the number done, and the number of all.

    """
    waiting = [item for item in items if name_of(item) not in journal.runs]
    if not waiting:
        return
    with tempfile.TemporaryDirectory(prefix="attn-testkit-mutants-") as folder:
        notes = _Notes(Path(folder))
        candidates = tuple(replace(each, sources=replace(sources, notes=folder)) for each in plan.candidates)
        plan = replace(plan, candidates=candidates)
        _check_import(candidates, plan.device)
        seconds: dict[str, float] = {}
        with closing(Runner(options)) as runner, closing(runner.run(plan, waiting, ahead=False)) as results:
            for done, result in enumerate(results, start=1):
                name = f"{result.execution}:{result.case}"
                if result.status in BAD or result.of_the_kit:
                    raise _red(result)
                if result.status is Status.PASSED:
                    seconds[name] = sum(result.seconds.values())
                _note(journal, notes.new(), seconds)
                see(name, done, len(waiting))


def _check_import(candidates: Sequence[Candidate], device: str) -> None:
    """Raises ``UsageError`` if the copies cannot be imported, though the modules themselves can."""
    runner = Runner()
    with closing(runner):
        for candidate in candidates:
            runner.declared(replace(candidate, sources=replace(candidate.sources, notes="")), device)


def _red(result: CaseResult) -> UsageError:
    how = result.findings[0].check if result.findings else str(result.status)
    return UsageError(
        f"{result.backend} as it is fails: {how}; its mutants cannot be evaluated before it passes. Fix this first "
        f"({repro_command(result)}), or leave the mode out with --mode"
    )


def _note(journal: Journal, rows: Iterator[dict[str, Any]], seconds: dict[str, float]) -> None:
    for row in rows:
        lines = {module: frozenset(found) for module, found in row["lines"].items()}
        if "files" in row:
            if not journal.imported:
                journal.import_ran(lines)
        else:
            name = f"{row['execution']}:{row['case']}"
            journal.ran(Run(name, seconds.pop(name, 0.0), lines))


class _Notes:
    """Notes that workers wrote."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}

    def new(self) -> Iterator[dict[str, Any]]:
        """Notes that were not read before."""
        for file in sorted(self._folder.iterdir()):
            lines = file.read_text().splitlines(keepends=True)
            for line in lines[self._read.get(file, 0) :]:
                if line.endswith("\n"):
                    self._read[file] = self._read.get(file, 0) + 1
                    yield json.loads(line)

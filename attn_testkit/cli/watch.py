"""``run --watch``: after each save of the backend's files, the case-runs that failed, and then the others."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, groupby
from pathlib import Path
from typing import Any

import click

from ..registry import UsageError
from ..results.case_result import BAD, CaseResult, RunKey
from ..running.hygiene.other_sources import outermost_folder
from ..running.planning.candidate import Candidate
from ..running.planning.request import Item, Options, Prepared, Request, final_code, param_id, prepare
from ..running.processes.judge_process import judge_for
from .choosing import choose
from .last_failed import failed_before, keep_failed
from .options import refuse_together
from .show import Watch, echo_header, print_summary

_NOT_WITH = {
    "in_process": "--in-process",
    "ray_address": "--ray",
    "shard": "--shard",
    "rest_of": "--rest-of",
    "budget_s": "--budget",
    "json_file": "--json",
    "html_file": "--html",
    "junit_file": "--junit",
    "collect_only": "--collect-only",
    "maps": "--map",
    "last_failed": "--lf",
    "since": "--since",
    "changed": "--changed",
    "stop_first": "-x",
    "max_failures": "--max-failures",
}
POLL_S = 0.1
"""Seconds between two looks at the files."""


def refuse_with_watch(request: Request, values: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` for an option that a run which never ends cannot have."""
    if not values["watch"]:
        return
    refuse_together("--watch", _NOT_WITH, values)
    if len(request.candidates) != 1:
        raise UsageError("--watch runs one backend; name it with --backend or as FILE.py")


def watch_backend(request: Request, options: Options, values: Mapping[str, Any]) -> int:
    """Run until Ctrl-C, which ends it with the exit code of the last run. Raises ``UsageError`` if the first import
    fails, because nothing says then which files are to be watched.
    """
    # Python trusts the byte code of a file that was saved twice in a second, if both texts have one size.
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    (candidate,) = request.candidates
    files: Files | None = None
    code = 0
    with contextlib.closing(judge_for(options, request.device)) as judge:
        for edition in count():
            began = time.monotonic()
            edited = replace(request, backends=(replace(candidate, edition=edition),))
            try:
                prepared = choose(prepare(judge, edited), values["keyword_text"], last_failed=False)
                files = files or _files_of(prepared, candidate)
                code = _run_once(prepared, options, files, began, verbose=values["verbose"], first=not edition)
            except UsageError as error:
                if files is None:
                    raise
                code = 4
                click.echo(f"attn-testkit: {' '.join(str(error).split())}", err=True)
            click.echo(f"  watching {len(files.seen)} files in {files.folder}; Ctrl-C ends", err=True)
            try:
                saved = files.wait()
            except KeyboardInterrupt:
                return code
            click.echo(f"{time.strftime('%H:%M:%S')} {saved} was saved", err=True)
    raise AssertionError("count() has no end")


class Files:
    """Python files of a folder, as they were when ``wait`` last returned."""

    def __init__(self, file: Path) -> None:
        """``file``: of the backend. Its outermost package is watched, or its folder if it is in none."""
        self.folder = Path(outermost_folder(str(file)))
        self._pattern = "**/*.py" if (file.parent / "__init__.py").exists() else "*.py"
        self.seen = self._look()

    def have_changed(self) -> bool:
        """True if a file was saved, made or removed."""
        return self._look() != self.seen

    def wait(self) -> str:
        """Name of a file that was saved, when nothing more is being written."""
        before = self.seen
        while (now := self._look()) == before:
            time.sleep(POLL_S)
        # An editor may write several files, or one in several steps.
        time.sleep(POLL_S / 2)
        while (later := self._look()) != now:
            now = later
            time.sleep(POLL_S / 2)
        self.seen = now
        changed = [name for name in before.keys() | now.keys() if before.get(name) != now.get(name)]
        return min(changed, default="a file")

    def _look(self) -> dict[str, tuple[int, int]]:
        found = {}
        for path in self.folder.glob(self._pattern):
            with contextlib.suppress(OSError):  # removed meanwhile
                stat = path.stat()
                found[str(path.relative_to(self.folder))] = stat.st_mtime_ns, stat.st_size
        return found


def _files_of(prepared: Prepared, candidate: Candidate) -> Files:
    file = prepared.plan.header.sources.get(candidate.spec, {}).get("file", "")
    if not file:
        raise UsageError(f"{candidate.spec} has no file that could be watched")
    return Files(Path(file))


def _run_once(prepared: Prepared, options: Options, files: Files, began: float, *, verbose: bool, first: bool) -> int:
    """Run everything, what failed before first, until a file is saved. Returns the exit code."""
    header, results = prepared.plan.header, list(map(prepared.ledger.judge, prepared.preset))
    if first:
        echo_header(header)
    failed = failed_before()
    candidates = prepared.request.candidates
    told = False
    with Watch(len(prepared.items), header, verbose=verbose) as watch:
        for raw in in_parts(prepared, failed, options.jobs, files):
            result = prepared.ledger.judge(raw)
            results.append(result)
            if not told or (result.key in failed and result.status not in BAD):
                seconds = time.monotonic() - began
                click.echo(f"  {seconds:.1f} s: {param_id(result, candidates)} {result.status}", err=True)
                told = True
            watch.see(result)
    keep_failed(results)
    if files.have_changed():
        return final_code(header, results, (), interrupted=True)
    code = final_code(header, results)
    print_summary(header, results, problems=[], interrupted=False, code=code, verbose=verbose)
    return code


def in_parts(prepared: Prepared, failed: frozenset[RunKey], jobs: int, files: Files) -> Iterator[CaseResult]:
    """Results, first of the case-runs that failed. Between two parts nothing runs, so the judge and the process that
    workers are forked from stay when a save ends the run.
    """
    cases = [list(group) for _, group in groupby(prepared.items, lambda item: (item.backend, item.case))]
    cases = [
        *([item for item in group if item.key in failed] for group in cases),
        *([item for item in group if item.key not in failed] for group in cases),
    ]
    cases = [group for group in cases if group]
    for number in range(0, len(cases), jobs):
        if files.have_changed():
            return
        part: Sequence[Item] = [item for group in cases[number : number + jobs] for item in group]
        yield from prepared.judge.run(prepared.plan, part)

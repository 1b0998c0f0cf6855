"""Judge mutants: a process for each, forked from one that has imported all that is heavy and not mutated."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .bootstrap import mutant_hook
from .config import Config, ConfigError, Stage
from .operators import Mutant

_exit = os._exit
"""As it was: a run in its own process replaces it, so that no backend ends one with 0."""

BOOTSTRAP = Path(mutant_hook.__file__).parent
POLL_S = 0.02
KEPT = 4000
"""Characters of a failed stage's output that are kept."""


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant, or of one stage without any mutant."""

    status: str
    """``killed``, ``timed out`` or ``survived``."""
    by: str = ""
    """The test that failed, or the stage."""
    seconds: float = 0.0
    output: str = ""
    """The end of what the stage that failed printed."""
    last: str = ""
    """The stage that gave it."""


Trial = tuple[Mutant | None, list[Stage], Sequence[str]]
"""A mutant, the stages that judge it, and tests to try before others."""


@dataclass
class _UnderWay:
    """One mutant under judgement: its stages one after the other, each in its own process."""

    mutant: Mutant | None
    stages: list[Stage]
    first: Sequence[str]
    folder: Path
    started: float = field(default_factory=time.monotonic)
    pid: int = 0
    deadline: float = 0.0


class Judge:
    """Forks processes that judge.

    Args:
        config: what is mutated and by which stages it is judged.
        limit_s: least seconds that a stage gets before its mutant counts as timed out.
        without: tests that cannot run here: files, or names as pytest prints them.

    Raises:
        ConfigError: a package that is to be mutated has been imported by what ``warm`` names.
    """

    def __init__(self, config: Config, limit_s: float, without: Sequence[str] = ()) -> None:
        self._config = config
        self._limit_s = limit_s
        self._without = without
        self.seconds: dict[str, float] = {}
        """Stage -> seconds that it takes without a mutant."""
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a fork inherits no threads, and jobs share cores
        for name in config.warm:
            with contextlib.suppress(ImportError):  # then no test that runs here needs it
                importlib.import_module(name)
        early = sorted({name.split(".")[0] for name in config.packages.values()} & set(sys.modules))
        if early:
            raise ConfigError(f"warm imports {', '.join(early)}; a mutant of it would not be seen")
        gc.collect()
        gc.freeze()

    def baselines(self, stages: Iterable[Stage], jobs: int) -> Iterator[tuple[Stage, Verdict]]:
        """Run stages without a mutant, and learn how long they take. A verdict of ``survived`` is what must come."""
        trials = {stage.name: stage for stage in stages}
        for _, verdict in self.run([(None, [stage], ()) for stage in trials.values()], jobs):
            self.seconds[verdict.last] = verdict.seconds
            yield trials[verdict.last], verdict

    def run(
        self, trials: Iterable[Trial], jobs: int, until: float = float("inf")
    ) -> Iterator[tuple[Mutant | None, Verdict]]:
        """Mutants with their verdicts, as they come.

        Args:
            trials: asked for one by one, when a process is free.
            jobs: processes at a time.
            until: of ``time.monotonic``; what is under way then is ended without a verdict.
        """
        waiting = iter(trials)
        running: list[_UnderWay] = []
        more = True
        with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
            try:
                while (more or running) and time.monotonic() < until:
                    while more and len(running) < jobs:
                        trial = next(waiting, None)
                        more = trial is not None
                        if trial:
                            running.append(self._begin(*trial, Path(scratch)))
                    for under_way in tuple(running):
                        verdict = self._look(under_way)
                        if verdict:
                            running.remove(under_way)
                            yield under_way.mutant, verdict
                    time.sleep(POLL_S)
            finally:
                for under_way in running:
                    _end(under_way)

    def _begin(self, mutant: Mutant | None, stages: list[Stage], first: Sequence[str], scratch: Path) -> _UnderWay:
        folder = Path(tempfile.mkdtemp(dir=scratch))
        if mutant:
            path = self._config.root / mutant.path
            (folder / "source.py").write_bytes(mutant.apply(path.read_bytes()))
            change = {
                "module": self._config.module(mutant.path),
                "path": str(path),
                "source": str(folder / "source.py"),
            }
            (folder / "mutant.json").write_text(json.dumps(change))
        trial = _UnderWay(mutant, list(stages), first, folder)
        self._fork(trial)
        return trial

    def _fork(self, trial: _UnderWay) -> None:
        stage = trial.stages[0]
        trial.deadline = time.monotonic() + max(self._limit_s, 5 * self.seconds.get(stage.name, 120.0))
        trial.pid = os.fork()
        if not trial.pid:
            code = 70
            try:
                code = self._child(trial, stage)
            except BaseException:  # also SystemExit: nothing may return into the parent's loop
                traceback.print_exc()
            finally:
                _flush()
                _exit(code)

    def _look(self, trial: _UnderWay) -> Verdict | None:
        """A verdict when there is one; begins the next stage."""
        pid, status = os.waitpid(trial.pid, os.WNOHANG)
        over = time.monotonic() > trial.deadline
        if not pid and not over:
            return None
        _end(trial, waited=bool(pid))
        seconds = time.monotonic() - trial.started
        stage = trial.stages.pop(0)
        code = os.waitstatus_to_exitcode(status) if pid else 0
        if pid and code == 0:
            if not trial.stages:
                return Verdict("survived", seconds=seconds, last=stage.name)
            self._fork(trial)
            return None
        by = trial.folder / "by"
        output = (trial.folder / "output").read_text(errors="replace")[-KEPT:]
        named = by.read_text() if by.exists() else f"{stage.name} (exit code {code})"
        if pid:
            return Verdict("killed", named, seconds, output, stage.name)
        return Verdict("timed out", stage.name, seconds, output, stage.name)

    def _child(self, trial: _UnderWay, stage: Stage) -> int:
        """The child's side: the exit code of a stage."""
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        _redirect(trial.folder / "output")
        root = str(self._config.root)
        os.chdir(root)
        sys.path[0] = root
        # Processes that a test spawns run the main module of this one first, unless it has no file.
        sys.modules["__main__"] = types.ModuleType("__main__")
        if trial.mutant:
            os.environ[mutant_hook.VARIABLE] = str(trial.folder / "mutant.json")
            paths = [str(BOOTSTRAP), os.environ.get("PYTHONPATH", "")]
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
            mutant_hook.install()
        if stage.argv[0] == "pytest":
            return _pytest(stage.argv[1:], trial, self._without)
        sys.argv = list(stage.argv)
        try:
            runpy.run_module(stage.argv[0], run_name="__main__", alter_sys=True)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        return 0


def _pytest(args: Sequence[str], trial: _UnderWay, without: Sequence[str]) -> int:
    import pytest

    # Rewritten asserts fail like plain ones, and the rewriting would import modules of plugins past the mutant's hook.
    options = ["-x", "-q", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:xdist"]
    for name in without:
        options += ["--deselect", name] if "::" in name else ["--ignore", name]
    sys.argv = ["pytest", *args]
    return int(pytest.main([*options, *args], plugins=[_Watch(trial)]))


class _Watch:
    """A pytest plugin: notes the first test that fails, and tries those first that killed a neighbour."""

    def __init__(self, trial: _UnderWay) -> None:
        self._by = trial.folder / "by"
        self._first = {name: place for place, name in enumerate(trial.first)}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items.sort(key=lambda item: self._first.get(item.nodeid, len(self._first)))

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._note(report)

    def pytest_collectreport(self, report: Any) -> None:
        self._note(report)

    def _note(self, report: Any) -> None:
        if report.failed and not self._by.exists():
            self._by.write_text(report.nodeid or "collection")


def _redirect(output: Path) -> None:
    """Standard input from nowhere, both outputs to a file."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number, target in ((0, nothing), (1, file), (2, file)):
        os.dup2(target, number)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a test closed it
            stream.flush()


def _end(trial: _UnderWay, waited: bool = False) -> None:
    """End a stage's process and whatever it started: its group, and those that left the group but carry its mark."""
    try:
        os.killpg(trial.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        if not waited:  # it has not made its group yet
            os.kill(trial.pid, signal.SIGKILL)
    if not waited:
        os.waitpid(trial.pid, 0)
    mark = f"{mutant_hook.VARIABLE}={trial.folder}".encode()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in environment.read_bytes():
                os.kill(int(environment.parent.name), signal.SIGKILL)
        except OSError:
            continue  # gone, or somebody else's

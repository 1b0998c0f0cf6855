"""The worker's side of the pipe: it imports one backend, runs it as asked, and sends host copies back. It evaluates
nothing."""

from __future__ import annotations

import faulthandler
import os
import pickle
import sys
import traceback
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection

import torch

from ...checks.failures import device_full
from ...contract import AttentionBackend, Capabilities
from ...distributions import CODE
from ...environment import Environment, resolve
from ...graphs.capture import settle
from ...registry import UsageError
from ...results.texts import message_of
from ...runner_modes.messages import Described, Rerun, RunCase, RunRecord
from ...steps.data import forget_data
from ...steps.schedule import forget_schedules
from ...watches.launches import Launches
from ..hygiene.left_running import Running
from ..hygiene.oracle_sealed import seal_oracle
from ..hygiene.other_sources import derived_here, use_other_sources
from ..hygiene.process_state import ProcessState, changes, restore, take_state, unchanged
from ..hygiene.server_imports import ServerImports
from ..hygiene.tested_file import stale_byte_code, tested_file
from ..hygiene.vendor_packages import NOT_HERE, broken_packages
from ..planning.candidate import Candidate, resolve_candidate
from ..processes.device_memory import filled_by_others
from ..processes.host_memory import Trimmer
from ..processes.wire import read
from .case_run import rerun, run_case

_SETTLE_AFTER = (1, 4)
_SETTLE_EVERY = 16
"""Cases between two rounds of setting survivors aside from the garbage collector: a round takes as long as the one
collection that each capture begins with, and after 200 case-runs without one that is five times as long."""
_FIRST_SEEN_AT_IMPORT = ("environment variables", "signal handlers", "the current directory", "the filters of warnings")
"""Settings that packages change when they are imported, as servers expect."""


class LocalWorker:
    """A backend in this process, which is the worker, or with ``--in-process`` the judge."""

    def __init__(self, candidate: Candidate, device: str) -> None:
        """Raises ``UsageError`` if the backend cannot be imported."""
        self.candidate = candidate
        self.ended = False
        self.printed = ""
        """Empty: the backend prints to the output of this process."""
        self.history: list[RunCase] = []
        """Case-runs that this worker has run."""
        self.environment: Environment = resolve(device)
        self.environment.prepare_process()
        with self.environment.active():
            # torch imports modules here that replace one of torch's functions.
            pass
        self._launches = Launches()
        self._launches.install()
        before = take_state()
        self._servers = ServerImports(candidate.spec, _FIRST_SEEN_AT_IMPORT)
        self._servers.install()
        # A module may ask for the device where it is imported.
        with self.environment.active():
            self.backend_class: type[AttentionBackend] = resolve_candidate(candidate)
            declared = _plain(candidate, self.backend_class)
            broken = broken_packages(declared)
        before = self._servers.accept_into(before)
        changed = () if unchanged(before) else tuple(changes(before, skip=_FIRST_SEEN_AT_IMPORT))
        if changed:
            restore(before)
        self._state: ProcessState = take_state()
        self._running = Running(self.backend_class.__module__.partition(".")[0])
        self._packages = _packages()
        self._modules = 0
        self._cases = 0
        self._case = ""
        self._trimmer = Trimmer()
        notes = (*self.backend_class.notes, *self._servers.reported)
        if self.backend_class.not_here:
            broken[NOT_HERE] = str(self.backend_class.not_here)
        if stale := stale_byte_code(self.backend_class):
            raise UsageError(f"backend {candidate.spec!r}: {stale}; remove its __pycache__")
        source = tested_file(self.backend_class)
        if source.get("file", "").endswith(".pyc"):
            notes = (*notes, f"{source['file']} is byte code without source code, so nobody can read what was tested")
        self.described = Described(declared, changed, tuple(broken.items()), notes, source)
        self._told = len(self._servers.reported)

    def describe(self) -> Described:
        """Capabilities of the backend."""
        return self.described

    def drive(self, request: RunCase | Rerun) -> RunRecord:
        """Run a case or a rerun."""
        if isinstance(request, RunCase) and request.case != self._case:
            # Nobody asks for the numbers of another case again, and those of long requests are large.
            self._case = request.case
            self._cases += 1
            forget_data()
            self._trimmer.after_case()
            if self._cases in _SETTLE_AFTER or self._cases % _SETTLE_EVERY == 0:
                settle()
        self._modules = len(sys.modules)
        try:
            if isinstance(request, Rerun):
                return rerun(self.backend_class, request, self.environment, self.described.declared)
            counted = self._launches.begin()
            record = run_case(self.backend_class, request, self.environment, self.described.declared)
            record = replace(record, launches=self._launches.count(counted))
        except BaseException as error:
            changed = self._changed()
            if not changed or isinstance(error, (KeyboardInterrupt, MemoryError)):
                raise
            # Not a fault of the kit's own: a process that was left otherwise makes anything raise.
            return RunRecord(changed=(*changed, f"and then {type(error).__name__} was raised: {message_of(error)}"))
        return self._with_notes(_with_changes(record, self._changed()))

    def _with_notes(self, record: RunRecord) -> RunRecord:
        reported, self._told = tuple(self._servers.reported[self._told :]), len(self._servers.reported)
        return replace(record, notes=reported) if reported else record

    def _changed(self) -> tuple[str, ...]:
        # A package that is first imported during a case-run changes the same settings then as others do at import.
        imported = len(sys.modules) > self._modules and _packages() > self._packages
        skip = _FIRST_SEEN_AT_IMPORT if imported else ()
        self._state = self._servers.accept_into(self._state)
        changed: tuple[str, ...] = ()
        if not unchanged(self._state):
            changed = tuple(changes(self._state, skip=skip))
            # Also if it is not a finding: each case-run draws the same random numbers.
            restore(self._state, skip=skip)
        if imported:
            self._state, self._packages = take_state(), _packages()
            self._running.accept()
        return (*changed, *self._running.left())

    def ahead(self, request: RunCase) -> None:
        """Do nothing: there is no other process that could work meanwhile."""

    def last_words(self) -> str:
        """Empty: the output of the backend is already on the terminal."""
        return ""

    def close(self) -> None:
        """Stop watching this process. No process has to end."""
        self._launches.remove()
        self._servers.remove()
        self.ended = True


def _plain(candidate: Candidate, backend_class: type[AttentionBackend]) -> Capabilities:
    """The capabilities as the judge reads them. The worker uses the same ones, even if the class declares others the
    next time."""
    try:
        described = read(pickle.dumps(Described(backend_class.capabilities)))
    except Exception as error:
        raise UsageError(
            f"backend {candidate.spec!r}: its capabilities are not plain values: {message_of(error)}; write "
            "capabilities = Capabilities(eager={...}, ...) with numbers, strings and sets"
        ) from error
    assert isinstance(described, Described)
    return described.declared


def _packages() -> frozenset[str]:
    """Top-level packages that are imported, except Python's own and the ones that are always imported."""
    found = {name.partition(".")[0] for name in list(sys.modules)} - sys.stdlib_module_names - _ALWAYS_THERE
    # A package by its size, which torch imports where it is first asked for.
    return frozenset(found | {"torch._dynamo"} if "torch._dynamo" in sys.modules else found)


_ALWAYS_THERE = frozenset({*CODE, "torch", "triton", "numpy", "sympy", "mpmath", "networkx"})


def _with_changes(record: RunRecord, changed: tuple[str, ...]) -> RunRecord:
    return replace(record, changed=(*record.changed, *changed)) if changed else record


def serve(
    connection: Connection,
    candidate: Candidate,
    device: str,
    variables: Mapping[str, str],
    timeout_s: float,
    import_s: float,
) -> None:
    """Answer questions until the judge closes the pipe. Failures in here are the backend's.

    ``variables``: of the environment, as ``Gpu.variables``.
    """
    os.environ.update(variables)
    torch.set_num_threads(1)
    seal_oracle()
    faulthandler.dump_traceback_later(_patience(import_s), exit=False)
    try:
        notes = use_other_sources(candidate.sources)
        worker = LocalWorker(candidate, device)
        if notes:
            notes.imported(worker.backend_class.__module__, derived_here(worker.backend_class))
    except UsageError as error:
        connection.send(str(error))
        return
    faulthandler.cancel_dump_traceback_later()
    connection.send(worker.described)
    case = ""
    while True:
        try:
            number, request = connection.recv()
        except (EOFError, ConnectionError):
            os._exit(0)
        faulthandler.dump_traceback_later(_patience(timeout_s), exit=False)
        if isinstance(request, RunCase) and request.case != case:
            # Nobody asks for the steps of another case again, and every capture and every first replay begins with a
            # garbage collection, which looks at all that are kept. The judge's own process shares them among backends.
            case = request.case
            forget_schedules()
        answer = _answer(worker, request)
        if notes and isinstance(request, RunCase):
            notes.drove(request.case, request.execution)
        connection.send((number, answer))
        faulthandler.cancel_dump_traceback_later()


def _patience(seconds: float) -> float:
    """Shortly before the judge's time limit, print where the backend hangs."""
    return max(seconds - 0.5, seconds * 0.7)


def _answer(worker: LocalWorker, request: RunCase | Rerun) -> RunRecord | str:
    try:
        return worker.drive(request)
    except Exception as error:
        return given_up(error)


def given_up(error: Exception) -> RunRecord | str:
    """The answer after the harness raised: a full device is nobody's fault, and anything else is the kit's fault."""
    if others := filled_by_others(error):
        return RunRecord(not_here=others)
    if full := device_full(error):
        return RunRecord(lost=full)
    return f"{type(error).__name__}: {message_of(error)}\n{''.join(traceback.format_exception(error)).rstrip()}"

"""Hunt: first the unchanged backend, then each mutant through smoke until a case-run fails, then survivors through
core."""

from __future__ import annotations

import hashlib
import importlib.metadata
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path

from attn_testkit.contract import Capabilities
from attn_testkit.environment import resolve
from attn_testkit.registry import UsageError
from attn_testkit.results.case_result import BAD, CaseResult, Status
from attn_testkit.running.case_runs.loop import Runner
from attn_testkit.running.hygiene.other_sources import OtherSources
from attn_testkit.running.planning.candidate import Candidate
from attn_testkit.running.planning.request import Item, Options, Plan
from attn_testkit.running.processes.forking import begin_forking
from attn_testkit.running.processes.merging import merged

from .baseline import MEMORY, read_sources, run_baseline
from .equivalents import read_equivalents
from .journal import CAPABILITIES, KILLED, KIT, OPEN, SURVIVED, TIMED_OUT, UNREACHED, Journal, Verdict
from .operators import Mutant, mutants_of
from .order import Order, name_of
from .reach import Spot, reaches, spot_of
from .settings import Hunt, See, Settings
from .specials import ALL, UNSEEN, is_capability
from .stages import Stage, stages_of

_FIRST_TRY = 12
"""Number of case-runs of a mutant before the next mutant follows; they kill nearly all mutants that can be killed."""
_LEAST_LIMIT_S, _TIMES_THE_SLOWEST = 30.0, 10.0
"""Time limit of a mutant's case-run: at least these seconds, or a multiple of the slowest unmutated case-run."""


def _reasons(file: Path, mutants: Sequence[Mutant]) -> dict[str, str]:
    paths = {mutant.path for mutant in mutants}
    try:
        return read_equivalents(file, mutants, lambda path: path not in paths)
    except ValueError as error:
        raise UsageError(str(error)) from error


def hunt(settings: Settings, see: See = lambda what, done, total: None) -> Hunt:
    """Evaluate the mutants of a backend.

    Raises ``UsageError`` for a backend that cannot be loaded, is not Python, or is not green as it is.
    """
    started = time.monotonic()
    environment = resolve(settings.device)
    environment.prepare_process()
    begin_forking()
    sources, derived = read_sources(settings.backend, settings.modules, settings.device)
    everything = [m for module, text in sources.items() for m in _mutants(module, text)]
    if not everything:
        raise UsageError(f"there is nothing to mutate in {', '.join(sources)}; name a module with --mutate")
    reasons = _reasons(settings.equivalents, everything) if settings.equivalents else {}
    # No case of this backend could reach a class that is derived from it.
    everything = [mutant for mutant in everything if mutant.scope.partition(".")[0] not in derived]
    chosen = _lot(everything, settings.sample, settings.seed)
    with tempfile.TemporaryDirectory(prefix="attn-testkit-mutants-") as folder:
        party = _Party(settings, sources, Path(folder), see, started)
        with closing(party.journal):
            party.judge([mutant for mutant in chosen if mutant.id not in reasons])
    ids = {mutant.id for mutant in chosen}
    verdicts = {name: party.settled(verdict) for name, verdict in party.journal.verdicts.items() if name in ids}
    return Hunt(
        settings, sources, len(everything), tuple(chosen), verdicts, {k: v for k, v in reasons.items() if k in ids},
        party.runs, environment.name, time.monotonic() - started,
    )  # fmt: skip


def _path(module: str) -> str:
    return f"{module.replace('.', '/')}.py"


def _mutants(module: str, text: bytes) -> list[Mutant]:
    return mutants_of(text, _path(module), UNSEEN, ALL, is_capability)


def _lot(mutants: Sequence[Mutant], count: int | None, seed: int) -> list[Mutant]:
    """A sample of ``count`` mutants, in an order that does not change when mutants are added or removed."""
    if count is None:
        return list(mutants)
    return sorted(mutants, key=lambda m: hashlib.sha256(f"{seed} {m.id}".encode()).digest())[:count]


@dataclass
class _Party:
    """State that the threads of a hunt share."""

    settings: Settings
    sources: dict[str, bytes]
    folder: Path
    see: See
    started: float
    journal: Journal = field(init=False)

    def __post_init__(self) -> None:
        runner = Runner()
        with closing(runner):
            self.declared: Capabilities = runner.declared(Candidate(self.settings.backend), self.settings.device)
        self.journal = Journal(self.settings.journal, self._state())
        self.plain = OtherSources(tuple(self._copy(m, text, "as-it-is") for m, text in self.sources.items()))
        self.spots: dict[str, tuple[str, Spot]] = {}
        self._tried_on: dict[tuple[str, str], set[str]] = {}
        self._orders: dict[str, Order] = {}
        self._counts: dict[str, int] = {}
        self.stages: list[Stage] = []
        self._lock = threading.Lock()

    def _state(self) -> str:
        """Digest of everything that invalidates earlier verdicts, except the cases."""
        known = [importlib.metadata.version("attn-testkit"), resolve(self.settings.device).name, _stable(self.declared)]
        state = hashlib.sha256("\0".join(known).encode())
        for module, text in sorted(self.sources.items()):
            state.update(module.encode() + b"\0" + text)
        return state.hexdigest()[:16]

    def _copy(self, module: str, text: bytes, name: str) -> tuple[str, str]:
        file = self.folder / f"{module}.{name}.py"
        file.write_bytes(text)
        return module, str(file)

    def judge(self, mutants: Sequence[Mutant]) -> None:
        """Evaluate the mutants that have no verdict: first each by a few case-runs of every stage, then the rest by
        all."""
        self.stages = stages_of(self.settings, self.declared)
        for most in (_FIRST_TRY, None):
            for stage in self.stages:
                if self._is_over():
                    return
                waiting = [mutant for mutant in mutants if self._is_open(mutant, stage, first=most is not None)]
                if waiting:
                    self._prepare(stage)
                    self._judge(waiting, stage, most)

    def _prepare(self, stage: Stage) -> None:
        """Run a stage on the unchanged backend, if it has not been run."""
        if stage.seen in self._orders:
            return
        options = Options(jobs=self.settings.jobs, asks_afresh=False)
        run_baseline(stage.plan, stage.items, self.plain, options, self.journal, self.see)
        seconds = {name: run.seconds for name, run in self.journal.runs.items()}
        self._orders[stage.seen] = Order(stage.items, seconds, ranked=bool(stage.before))

    @property
    def runs(self) -> int:
        """Case-runs that a survivor may have seen."""
        return sum(name_of(item) in self.journal.runs for stage in self.stages for item in stage.items)

    def _judge(self, mutants: Sequence[Mutant], stage: Stage, most: int | None) -> None:
        """Evaluate mutants at a stage, in as many threads as there are jobs."""
        waiting, order, known = deque(mutants), self._orders[stage.seen], self.journal.runs
        slowest = max((known[name].seconds for name in map(name_of, stage.items) if name in known), default=0.0)
        jobs = max(1, min(self.settings.jobs, len(mutants)))
        options = Options(timeout_s=max(_LEAST_LIMIT_S, _TIMES_THE_SLOWEST * slowest), asks_afresh=False)
        runners = [Runner(options, apart=jobs > 1) for _ in range(jobs)]

        def end() -> None:
            waiting.clear()
            for runner in runners:
                runner.close()

        def verdicts(runner: Runner) -> Iterator[tuple[Mutant, Verdict]]:
            while waiting and not self._is_over():
                try:
                    mutant = waiting.popleft()
                except IndexError:
                    return
                yield mutant, self._verdict(mutant, stage, order, runner, most)

        try:
            for done, (mutant, verdict) in enumerate(merged([verdicts(r) for r in runners], end), start=1):
                # Keep the full verdict of an earlier stage until this one has its own.
                if verdict.status != OPEN or self._status(mutant) in ("", OPEN):
                    self.journal.evaluated(mutant.id, verdict, _readable(mutant))
                self.see(f"{verdict.status}: {mutant.path}:{mutant.line} {mutant.operator}", done, len(mutants))
        finally:
            end()

    def settled(self, verdict: Verdict) -> Verdict:
        """The verdict, or ``OPEN`` if it is that of a stage before the last."""
        early = verdict.status in (SURVIVED, UNREACHED) and verdict.tried != self.stages[-1].seen
        return replace(verdict, status=OPEN) if early else verdict

    def _is_over(self) -> bool:
        minutes = self.settings.minutes
        return minutes is not None and time.monotonic() - self.started > 60 * minutes

    def _status(self, mutant: Mutant) -> str:
        verdict = self.journal.verdicts.get(mutant.id)
        return verdict.status if verdict else ""

    def _is_open(self, mutant: Mutant, stage: Stage, *, first: bool) -> bool:
        """True if this stage can still evaluate the mutant. ``first``: with its first few case-runs."""
        verdict = self.journal.verdicts.get(mutant.id)
        if verdict is None:
            return not stage.before
        if verdict.status == OPEN:
            # Nothing of this run: it has gone through a few case-runs in an earlier one.
            return bool(stage.before) == first
        if verdict.status not in (SURVIVED, UNREACHED):
            return False
        # A survivor of other case-runs than the present ones starts again.
        return verdict.tried in stage.before if stage.before else verdict.tried not in (stage.seen, *stage.after)

    def _verdict(self, mutant: Mutant, stage: Stage, order: Order, runner: Runner, most: int | None) -> Verdict:
        """Verdict on a mutant: ``OPEN`` if ``most`` case-runs of this stage, or of an earlier one, are not all of
        them."""
        started = time.monotonic()
        earlier = self.journal.verdicts.get(mutant.id, Verdict(OPEN))
        is_last_word = not stage.before or (earlier.status in (SURVIVED, UNREACHED) and earlier.tried in stage.before)
        module, spot = self._spot(mutant)
        known = self.journal.runs
        runs = {name: known[name].lines for name in map(name_of, stage.items) if name in known}
        names = reaches(spot, module, self.journal.imported, runs)
        tried = self._tried_on.setdefault((mutant.id, stage.seen), set())
        items = order.of(mutant, names - tried)[:most]
        verdict = self._tried(mutant, module, stage.plan, items, runner) if items else Verdict(SURVIVED)
        tried |= set(map(name_of, items))
        killer = verdict.run if verdict.status in (KILLED, TIMED_OUT) else ""
        order.learn(mutant, map(name_of, items[: verdict.runs]), killer)
        in_full = earlier.runs if stage.before and earlier.status == SURVIVED else 0
        count = self._counts[mutant.id] = self._counts.get(mutant.id, in_full) + verdict.runs
        if verdict.status == SURVIVED:
            over = is_last_word and tried >= names
            status = OPEN if not over else SURVIVED if count else UNREACHED
            verdict = Verdict(status, tried=stage.seen if over else "")
        return replace(verdict, runs=count, seconds=round(earlier.seconds + time.monotonic() - started, 2))

    def _tried(self, mutant: Mutant, module: str, plan: Plan, items: Sequence[Item], runner: Runner) -> Verdict:
        copy = self._copy(module, mutant.apply(self.sources[module]), mutant.id)
        instead = dict(self.plain.instead) | dict([copy])
        candidate = Candidate(self.settings.backend, sources=OtherSources(tuple(instead.items()), memory=MEMORY))
        try:
            if runner.declared(candidate, self.settings.device) != self.declared:
                return Verdict(CAPABILITIES)
        except UsageError:
            return Verdict(KILLED, by="import")
        plan = replace(plan, candidates=(candidate,))
        count = 0
        with closing(runner.run(plan, items, ahead=False)) as results:
            for count, result in enumerate(results, start=1):
                if result.of_the_kit:
                    return Verdict(KIT, by=result.reason.splitlines()[0], run=_name(result), runs=count)
                if result.status in BAD:
                    return Verdict(*_how(result), run=_name(result), runs=count)
        Path(copy[1]).unlink()
        return Verdict(SURVIVED, runs=count)

    def _spot(self, mutant: Mutant) -> tuple[str, Spot]:
        with self._lock:
            if mutant.id not in self.spots:
                module = next(module for module in self.sources if _path(module) == mutant.path)
                self.spots[mutant.id] = module, spot_of(self.sources[module], mutant.edit)
            return self.spots[mutant.id]


def _stable(value: object) -> str:
    """Text of a value that is the same in every process. The ``repr`` of a set differs between processes."""
    if is_dataclass(value) and not isinstance(value, type):
        return f"({', '.join(f'{each.name}={_stable(getattr(value, each.name))}' for each in fields(value))})"
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(map(_stable, value)))}}}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{_stable(key)}: {_stable(held)}' for key, held in value.items()))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_stable, value))}]"
    return repr(value)


def _name(result: CaseResult) -> str:
    return f"{result.execution}:{result.case}"


def _how(result: CaseResult) -> tuple[str, str]:
    if result.status is Status.TIMED_OUT:
        return TIMED_OUT, str(result.status)
    return KILLED, result.findings[0].check if result.findings else str(result.status)


def _readable(mutant: Mutant) -> dict[str, object]:
    return {
        "path": mutant.path, "line": mutant.line, "scope": mutant.scope, "operator": mutant.operator,
        "was": mutant.was, "becomes": mutant.becomes,
    }  # fmt: skip

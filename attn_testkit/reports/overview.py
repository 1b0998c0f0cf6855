"""Tables of backends by mode and execution, separately for real and emulated case-runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from ..results.case_result import BAD, RAN, CaseResult, Status
from ..results.names import EXECUTIONS, MODES


@dataclass(frozen=True)
class Cell:
    """Numbers of case-runs of one backend in one mode and execution."""

    mode: str
    execution: str
    starts: bool
    """True for the first execution of its mode."""
    passed: int
    red: int
    known: int
    """Number of known failures, with quarantined ones."""
    missing: int
    """Number of case-runs that were planned and did not run."""
    margin: float | None
    """Largest error / limit of those that passed."""
    absent: bool
    """True if the whole mode is declared and cannot run here."""
    note: str
    """The reason why the whole mode did not run."""

    @property
    def kind(self) -> str:
        """The CSS class, worst first: ``red``, ``missing``, ``known``, ``passed``, ``absent``, or ``none`` (not
        declared or not selected).
        """
        kinds = ("red", "missing", "known", "passed", "absent")
        return next((kind for kind in kinds if getattr(self, kind)), "none")

    @property
    def declared(self) -> int:
        """Number of all planned case-runs."""
        return self.passed + self.red + self.known + self.missing

    @property
    def words(self) -> str:
        """All numbers in words, as ``3 passed, 1 did not run``."""
        counts = (
            (self.passed, "passed"),
            (self.red, "did not pass"),
            (self.known, "known failures"),
            (self.missing, "did not run"),
        )
        said = [f"{count} {what}" for count, what in counts if count]
        return ", ".join([*said, *([self.note] if self.note else [])]) or "not selected"


@dataclass(frozen=True)
class OverviewRow:
    """The cells of one backend in all modes and executions."""

    backend: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Overview:
    """A table of backends by mode and execution, of real or of emulated case-runs."""

    emulated: bool
    columns: tuple[tuple[str, tuple[str, ...]], ...]
    """Pairs of mode and its executions, in the order in which a server uses them."""
    rows: tuple[OverviewRow, ...]


def overviews(results: Sequence[CaseResult], *, emulated: bool, backends: Sequence[str] = ()) -> list[Overview]:
    """Make one table for real case-runs and one for emulated ones.

    ``emulated``: the run's device, for what did not run. ``backends``: their order; others follow.
    """
    results = sorted(results, key=lambda r: backends.index(r.backend) if r.backend in backends else len(backends))
    ran = {result.backend for result in results if result.case}
    return [
        overview
        for kind in (False, True)
        if (overview := _overview([r for r in results if is_emulated(r, emulated) is kind], kind, ran)).rows
    ]


def is_emulated(result: CaseResult, otherwise: bool) -> bool:
    """True if anything in the case-run was emulated; ``otherwise`` if it ended before that was known."""
    return result.emulated if result.status in RAN and result.device else otherwise


def _overview(results: Sequence[CaseResult], emulated: bool, ran: Collection[str]) -> Overview:
    """``ran``: backends with case-runs in this overview or the other one."""
    groups: dict[tuple[str, str, str], list[CaseResult]] = {}
    for result in results:
        groups.setdefault(result.place, []).append(result)
    modes = _known_first(MODES, (mode for _, mode, _ in groups))
    # A backend that cannot be imported has a row without mode and execution.
    columns = tuple((mode, _known_first(EXECUTIONS, (e for _, m, e in groups if m == mode))) for mode in modes)
    rows = tuple(
        OverviewRow(
            backend,
            tuple(
                _cell(mode, execution, execution == each[0], groups.get((backend, mode, execution), ()))
                for mode, each in columns
                for execution in each
            ),
        )
        for backend in dict.fromkeys(result.backend for result in results)
        if backend not in ran
        or any(r.backend == backend and (r.case or r.status is Status.NOT_RUN_HERE) for r in results)
    )
    return Overview(emulated, columns, rows)


def _known_first(known: Sequence[str], found: Iterable[str]) -> tuple[str, ...]:
    present = set(found)
    return (*(word for word in known if word in present), *sorted(present - {*known}))


def _cell(mode: str, execution: str, starts: bool, group: Sequence[CaseResult]) -> Cell:
    runs = [result for result in group if result.case]
    margins = [result.margin for result in runs if result.margin is not None and result.status is Status.PASSED]
    whole = [result for result in group if not result.case]

    def count(holds: Callable[[Status], bool]) -> int:
        return sum(holds(result.status) for result in runs)

    return Cell(
        mode,
        execution,
        starts,
        passed=count(lambda status: status is Status.PASSED),
        red=count(lambda status: status in BAD),
        known=count(lambda status: status in (Status.KNOWN_FAILURE, Status.QUARANTINED)),
        missing=count(lambda status: status is Status.NOT_RUN_HERE),
        margin=max(margins, default=None),
        absent=any(result.status is Status.NOT_RUN_HERE for result in whole),
        note="; ".join(dict.fromkeys(f"{r.status}: {r.reason}" if r.reason else str(r.status) for r in whole)),
    )

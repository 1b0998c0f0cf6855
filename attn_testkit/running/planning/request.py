"""Request and plan of a run, as plain values, without importing torch or a backend."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict, TypeVar

from ...profiles import profile_names, read_profile
from ...registry import UsageError, did_you_mean
from ...reports.verdict import conclude
from ...results.case_result import CaseResult, RunKey, Status
from ...results.finding import Finding
from ...results.names import EXECUTIONS as EXECUTIONS
from ...results.names import KIT_ERROR, NO_CASE, NOT_STARTED
from ...results.names import MODES as MODES
from ...results.run_header import RunHeader, Selection
from .candidate import Candidate
from .known_failures import KnownFailure, Ledger, load_known
from .reach import Since
from .run_option import DEVICE, FILE, GLOB, SPEC, SWITCH, FrontEnd, RunOption, offered, one_of, seconds, whole

F = TypeVar("F", bound=Callable[..., object])

TIERS = ("smoke", "core", "full")
ORDERS = ("listed", "plainest", "most valuable")

Explains = Literal["nothing", "check", "cause"]
"""Extent of a diagnosis. ``nothing``: a finding has the check that noticed it. ``check``: it has the check that really
fails, such as ``padding-inert`` for a failure that ``matches-oracle`` noticed. ``cause``: it also has the attended KV
tokens, and hints."""

Diagnose = Literal["first", "all", "none"]
"""Failures whose cause is searched for: the first of each symptom, all, or none."""
DIAGNOSE: tuple[Diagnose, ...] = ("first", "all", "none")

MPS = ("auto", "on", "off")

_OWN_JUDGES = "each process of pytest-xdist has its own judge, and does not see processes of others"
_XDIST = "pytest-xdist starts processes: -n 4"
_NOT_HERE = "pytest's process must stay free of the candidate; `attn-testkit repro --in-process` is for debuggers"


@dataclass(frozen=True)
class Request:
    """The user's selection. Raises ``UsageError`` for an impossible device, seed or order."""

    backends: tuple[str | Candidate, ...] = field(
        metadata=offered(SPEC, "Registered name or module:Class.", flag="backend", short="b", ini=True)
    )
    modes: tuple[str, ...] = field(
        default=(),
        metadata=offered(one_of("mode", MODES, "MODE"), "Only this mode, such as extend.", flag="mode"),
    )
    executions: tuple[str, ...] = field(
        default=(),
        metadata=offered(one_of("execution", EXECUTIONS), "Only eager or only graph.", flag="execution"),
    )
    tier: str = field(default="smoke", metadata=offered(one_of("tier", TIERS), "Number of cases.", ini=True))
    profile: str | None = field(
        default=None,
        metadata=offered(one_of("profile", profile_names(), "NAME"), "Only a frozen profile's cases."),
    )
    """A frozen profile, such as ``2026.12/decode``, in place of a tier: its cases that the backend declares."""
    device: str = field(default="auto", metadata=offered(DEVICE, "cpu emulates CUDA."))
    seed: int = field(default=0, metadata=offered(whole("seed"), "Random seed."))
    cases: tuple[str, ...] = field(default=(), metadata=offered(GLOB, "Only case ids like 'decode-*'.", flag="case"))
    """Globs on case ids of the tier, or exact ids of any case."""
    command: str = ""
    """Front end or command that made the request, for the results file."""
    order: str = "listed"
    """Order of the plan's case-runs: one of ``ORDERS``. ``listed``: as in the catalogue. ``plainest``:
    ``planning/order.py``, for a run that stops at the first failure. ``most valuable``:
    ``planning/most_valuable.py``, for a run that may have no time for all."""
    failed_before: tuple[tuple[str, str], ...] = ()
    """(backend, case id) of the last run's failures, which come first among the most valuable."""
    keep_unloadable: bool = field(
        default=False,
        metadata=offered(
            SWITCH,
            "Report a backend that cannot be imported as failed, and test the others.",
            lacking={
                "run": "a wrong name is corrected at once",
                "check_backend": "it checks one backend, and raises",
                "conformance_cases": "pytest reports the test that cannot be collected, and runs the others",
            },
        ),
    )
    counts_tier: bool = False
    """The plan of a selection also counts what the tier plans without it, for a verdict that reports how much was left
    out. This needs the time of planning the whole tier."""
    cases_from: str = ""
    """The file from which ``cases`` were read, for the words of the verdict."""
    since: Since | None = None
    """Selection by the functions that case-runs reach. The plan has all case-runs, and the selected ones in
    ``Plan.since``."""
    known_failures: str | Path | None = field(
        default=None, metadata=offered(FILE, "TOML file of failures to tolerate.", ini=True)
    )

    def __post_init__(self) -> None:
        _check(self)
        if self.order not in ORDERS:
            raise UsageError(f"unknown order {self.order!r} (known: {', '.join(ORDERS)})")
        if self.profile and (self.cases or self.seed):
            what = "cases" if self.cases else "a seed"
            raise UsageError(f"profile {self.profile} has cases and data of its own; leave out {what}, or the profile")

    @property
    def named(self) -> tuple[str, ...]:
        """Globs and ids of the selected cases: ``cases``, or those of the profile."""
        return tuple(read_profile(self.profile).cases) if self.profile else self.cases

    @property
    def tier_name(self) -> str:
        """The tier as the verdict names it; the profile if there is one."""
        return self.profile or self.tier

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Every backend that was named, once, in order."""
        found = (named if isinstance(named, Candidate) else Candidate(named) for named in self.backends)
        return tuple(dict.fromkeys(found))

    @property
    def selected_by(self) -> tuple[str, ...]:
        """Arguments that select case-runs, in words; empty if none does."""
        cases = f"the cases of {self.cases_from}" if self.cases_from else f"case {_few([*map(repr, self.cases)])}"
        words = (
            (self.modes, f"mode {_few(self.modes)}"),
            (self.executions, f"execution {_few(self.executions)}"),
            (self.cases, cases),
        )
        return tuple(text for given, text in words if given)


def _few(values: Sequence[str]) -> str:
    """The values if they are few, else the first ones and the number of the rest."""
    more = f" and {len(values) - MOST_NAMED} more" if len(values) > MOST_NAMED else ""
    return ", ".join(values[:MOST_NAMED]) + more


MOST_NAMED = 3
"""Number of values of an option that a verdict names."""


@dataclass(frozen=True)
class Options:
    """Settings of a run. Raises ``UsageError`` for impossible numbers."""

    jobs: int = field(
        default=1,
        metadata=offered(
            whole("jobs", 1),
            "Processes at the same time.",
            short="j",
            lacking={"pytest": _XDIST, "conformance_cases": _XDIST},
        ),
    )
    timeout_s: float = field(default=300.0, metadata=offered(seconds("timeout"), "Time limit of one case-run."))
    """Time limit of one case-run, and of each run of the diagnosis after a failure."""
    gpus: tuple[str, ...] = ()
    """``CUDA_VISIBLE_DEVICES`` values, assigned to the processes in rotation; empty: all processes use the visible
    devices."""
    mps: str = field(
        default="auto",
        metadata=offered(
            one_of("use of MPS", MPS),
            "Share a GPU by NVIDIA's MPS.",
            lacking={"pytest": _OWN_JUDGES, "conformance_cases": _OWN_JUDGES},
        ),
    )
    """``auto``: use MPS if several processes share a GPU and the daemon can be started. ``on``: refuse the run if MPS
    cannot be used. ``off``: do not use MPS."""
    in_process: bool = field(
        default=False,
        metadata=offered(
            SWITCH,
            "Run in this process, to debug. Not for CI.",
            lacking={"pytest": _NOT_HERE, "conformance_cases": _NOT_HERE},
        ),
    )
    """The backend could change the code that evaluates it."""
    after: tuple[str, ...] = ()
    """``eager:CASE`` or ``graph:CASE``: case-runs that every process runs first."""
    budget_s: float | None = field(
        default=None,
        metadata=offered(
            seconds("budget"),
            "Time after which no case-run begins.",
            lacking={
                "check_backend": "the rest of a run is run with --rest-of, which reads a results file",
                "conformance_cases": "each case-run is a test, and pytest decides which tests run",
            },
        ),
    )
    """Time limit of the run, planning included. Case-runs beyond it are reported as not run, and the most valuable ones
    come first."""
    spent_s: float = 0.0
    """Seconds of the budget that had passed before this judge began, if it replaces one that died."""
    asks_afresh: bool = True
    """True runs a failed case-run again in a fresh process, to see if an earlier case-run is the cause."""
    diagnose: Diagnose = field(default="first", metadata=offered(one_of("diagnose", DIAGNOSE), "Failures to explain."))
    diagnose_seconds: float | None = field(
        default=None,
        metadata=offered(seconds("diagnose-seconds"), "Time limit of one diagnosis.", default=20.0),
    )
    """Seconds after which the diagnosis of a case-run begins no further run; None: no limit, so that findings do not
    depend on the load of the machine. Without a limit a diagnosis can take several times as long as the case-run."""

    def __post_init__(self) -> None:
        _check(self)
        if self.in_process and self.mps == "on":
            raise UsageError("--in-process starts no process that could share a GPU; leave out --mps on")


class CaseArguments(TypedDict, total=False):
    """Arguments of ``conformance_cases`` and ``attn_check``: the options that they offer, for editors and mypy."""

    modes: Sequence[str]
    executions: Sequence[str]
    tier: str
    profile: str | None
    device: str
    seed: int
    cases: Sequence[str]
    known_failures: str | Path | None
    timeout_s: float
    diagnose: Diagnose
    diagnose_seconds: float | None


class CheckArguments(CaseArguments, total=False):
    """Arguments of ``check_backend`` and ``assert_conformant``."""

    jobs: int
    mps: str
    in_process: bool


def _options_of(record: type[Request | Options]) -> dict[str, RunOption]:
    """Name -> option, of the fields that are options."""
    found = {}
    for each in fields(record):
        option: RunOption | None = each.metadata.get("option")
        if option:
            found[each.name] = option.of_field(each.name, () if each.default is MISSING else each.default)
    return found


OPTIONS = {**_options_of(Request), **_options_of(Options)}
"""Name -> option of a run. Command line, pytest plugin and functions offer these options; ``lacking`` lists the
exceptions."""


def options_of(front_end: FrontEnd) -> dict[str, RunOption]:
    """Name -> option, of those that a front end offers."""
    return {name: option for name, option in OPTIONS.items() if front_end not in option.lacking}


def asked(
    front_end: FrontEnd, backends: Sequence[str | Candidate], given: Mapping[str, Any], **more: Any
) -> tuple[Request, Options]:
    """The option records for a front end's arguments, by the names of ``OPTIONS``; missing arguments have their
    defaults.

    ``more``: further fields of the request. Raises ``UsageError`` for a value that makes no sense, and ``TypeError``
    for a name that the front end does not offer.
    """
    values = {name: option.default for name, option in options_of(front_end).items()} | {**given}
    for name in given:
        if name not in options_of(front_end) or name == "backends":
            near = did_you_mean(name, {*options_of(front_end)} - {"backends"})
            raise TypeError(f"{front_end}() got an unexpected keyword argument {name!r}{near}")
        if OPTIONS[name].repeatable and isinstance(given[name], str):
            raise UsageError(f"{name} is a list of names: write {name}=[{given[name]!r}]")
    values = {name: tuple(value) if OPTIONS[name].repeatable else value for name, value in values.items()}
    values["backends"] = tuple(backends)
    of_request = {name: value for name, value in values.items() if name in _options_of(Request)}
    of_options = {name: value for name, value in values.items() if name not in of_request}
    if values.get("budget_s") is not None:
        more["order"] = "most valuable"
    return Request(**of_request, **more), Options(**of_options)


def with_options(front_end: FrontEnd) -> Callable[[F], F]:
    """Decorate a function that has ``**arguments``: ``help`` and notebooks show the options that it offers."""

    def decorate(function: F) -> F:
        found = inspect.signature(function)
        shown = [option for option in options_of(front_end).values() if option.name != "backends"]
        kinds = CheckArguments.__annotations__
        named = [each for each in found.parameters.values() if each.kind is not each.VAR_KEYWORD]
        named += [
            inspect.Parameter(
                each.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=each.default,
                annotation=kinds[each.name].__forward_arg__,
            )
            for each in shown
        ]
        function.__signature__ = found.replace(parameters=named)  # type: ignore[attr-defined]
        lines = [f"    {each.name}: {each.help_with_unit}" for each in shown]
        function.__doc__ = "\n".join([f"{inspect.cleandoc(function.__doc__ or '')}\n\nArgs:", *lines, ""])
        return function

    return decorate


def _check(record: Request | Options) -> None:
    """Raise ``UsageError`` for a number or a word that makes no sense."""
    for each in fields(record):
        option: RunOption | None = each.metadata.get("option")
        value = getattr(record, each.name)
        if option and not (value is None and each.default is None):
            for one in value if isinstance(value, tuple) else (value,):
                option.kind.check(one)


@dataclass(frozen=True)
class Item:
    """One case-run to do. The case is rebuilt from its id."""

    backend: str
    mode: str
    execution: str
    case: str
    probe: bool = False
    """True for an eager case that also tries a graph which is not declared. If that works, it leads to a hint only."""
    known: bool = False
    """True if a known failure may cover it: then the failing check decides the verdict, and is always determined."""
    lost: str = ""
    """The end of a process of the kit, in words, that left the first attempt without a result. This attempt is the
    last."""

    @property
    def key(self) -> RunKey:
        """Backend, execution and case."""
        return self.backend, self.execution, self.case


def selection_of(request: Request, items: Sequence[Item], whole: Collection[Item] | None, failed: int) -> Selection:
    """Compare the items with the whole tier; empty if they cover all of it. ``whole``: everything that the tier plans,
    without probes; None if it was not counted. ``failed``: planned rows that failed without running.
    """
    if not request.selected_by:
        return Selection()
    if whole is None:
        return Selection(request.selected_by)
    chosen = {replace(item, probe=False) for item in items}
    if chosen >= {*whole}:
        return Selection()
    return Selection(request.selected_by, len(whole) + failed, len(chosen - {*whole}))


@dataclass(frozen=True)
class Plan:
    """Everything a run will do, decided before anything runs."""

    header: RunHeader
    items: tuple[Item, ...]
    preset: tuple[CaseResult, ...]
    """Rows that are known without running: unsupported, not run here."""
    candidates: tuple[Candidate, ...] = ()
    device: str = "auto"
    explains: Explains = "cause"
    """Depth of the diagnosis of wrong numbers, which takes reruns."""
    elsewhere: tuple[Item, ...] = ()
    """Case-runs of other shards."""
    order: str = "listed"
    """``Request.order``."""
    since: tuple[Item, ...] = ()
    """Case-runs that ``Request.since`` selects."""

    def to_run(self) -> Plan:
        """The plan without its items: the part that is sent with every case-run of pytest."""
        return replace(
            self,
            header=replace(
                self.header, explained={}, not_covered={}, lacking={}, excluded={}, notes={}, not_declared={}
            ),
            items=(),
            preset=(),
            elsewhere=(),
            since=(),
        )


def param_id(item: Item | CaseResult, backends: Collection[object]) -> str:
    """Name of a case-run in a test's brackets and for ``-k``: the same in every worker and from every directory.

    ``backends``: the backends of the request. A single backend is left out: its spec would fill a third of the line
    that pytest cuts.
    """
    return f"{item.execution}-{item.case}" if len(backends) == 1 else f"{item.backend}-{item.execution}-{item.case}"


class Judge(Protocol):
    """Plans and runs, in this process or in another one."""

    def plan(self, request: Request) -> Plan:
        """Decide what to run. Raises ``UsageError``."""

    def run(self, plan: Plan, items: Sequence[Item]) -> Generator[CaseResult, None, None]:
        """Results as they come, one for each item, whatever the backend does."""

    def close(self) -> None:
        """End every process that was started."""


@dataclass(frozen=True)
class Prepared:
    """A plan without quarantined case-runs, and the ledger that evaluates the others."""

    request: Request
    plan: Plan
    items: tuple[Item, ...]
    """Items that are launched: all items of the plan except quarantined ones."""
    preset: tuple[CaseResult, ...]
    """Results known without launching anything, quarantined ones included."""
    ledger: Ledger
    judge: Judge = field(repr=False)

    def problems(self) -> list[str]:
        """Problems of the known-failures file, seen from this run."""
        runs = [item.key for item in (*self.items, *self.plan.elsewhere)] + [row.key for row in self.preset]
        return self.ledger.problems(runs, self._exists_beyond)

    def _exists_beyond(self, entry: KnownFailure) -> bool:
        # This run may be narrower than the file: look in everything that the same backends can be asked.
        request = replace(self.request, modes=(), executions=(), tier="full", profile=None, cases=(entry.cases,))
        try:
            items = self.judge.plan(request).items
        except UsageError:
            return False
        return any(entry.covers(item.backend, item.execution, item.case) for item in items)


def prepare(judge: Judge, request: Request, plan: Plan | None = None) -> Prepared:
    """Plan, read the known failures, and set quarantined case-runs aside. Raises ``UsageError``. ``plan``: an existing
    plan for the same request.
    """
    entries = load_known(request.known_failures) if request.known_failures else ()
    if not request.backends:
        raise UsageError("no backend is named; give --backend module:Class, or a name from `attn-testkit list`")
    plan = plan or judge.plan(request)
    ledger = Ledger(entries, plan.header)
    launched: list[Item] = []
    preset = list(plan.preset)
    for item in plan.items:
        row = ledger.quarantined(item.backend, item.mode, item.execution, item.case)
        if row is None:
            launched.append(replace(item, known=ledger.tolerates(item.backend, item.execution, item.case)))
        else:
            preset.append(row)
    return Prepared(request, plan, tuple(launched), tuple(preset), ledger, judge)


def bare_result(item: Item, status: Status, reason: str, device: str = "") -> CaseResult:
    """The result of a case-run without a record: only place and reason, no measurements."""
    graph = device if item.execution == "graph" else ""
    return CaseResult(
        item.backend, item.mode, item.execution, item.case, status, reason=reason, device=device, graph=graph
    )


def not_started(item: Item, budget_s: float) -> CaseResult:
    """The result of a case-run for which the budget left no time."""
    return bare_result(item, Status.NOT_RUN_HERE, f"{NOT_STARTED}the budget of {budget_s:g} s was over")


def unloadable(spec: str, reason: str) -> CaseResult:
    """The failing row of a backend that cannot be imported."""
    finding = Finding("completes", reason)
    return CaseResult(spec, "", "", NO_CASE, Status.FAILED, (finding,), ("completes",))


def kit_error(item: Item, reason: str) -> CaseResult:
    """The result of a case-run in which the kit itself failed, which proves nothing about the backend."""
    return bare_result(item, Status.CRASHED, f"{KIT_ERROR}{reason}")


def once_more(item: Item, how: str) -> Item | CaseResult:
    """The case-run to repeat after a process of the kit ended in the middle of it; after a second one, its result.

    ``how``: the process and the way in which it ended.
    """
    if not item.lost:
        return replace(item, lost=how)
    return kit_error(item, f"{how}; this was the second attempt, and in the first {item.lost}")


def final_code(
    header: RunHeader, results: Sequence[CaseResult], problems: Sequence[str] = (), interrupted: bool = False
) -> int:
    """The exit code of a run, which is the exit code of its verdict."""
    return conclude(header, results, problems=problems, interrupted=interrupted).code

"""The results of a run: plain values that can be pickled and written as JSON, without tensors."""

from __future__ import annotations

import os
import re
import shlex
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = [
    "CANNOT_IMPORT",
    "CHECK_IDS",
    "CUT",
    "EXECUTIONS",
    "FUZZ",
    "KIT_ERROR",
    "MODES",
    "NOT_STARTED",
    "NO_CASE",
    "NO_ROOM",
    "PYTHON_VARIABLE",
    "CaseResult",
    "ErrorMap",
    "Finding",
    "KeyMap",
    "RunHeader",
    "Selection",
    "Status",
    "emulated_parts",
    "exit_code",
    "failed_check",
    "format_failure",
    "is_generated",
    "launch_lines",
    "left_lines",
    "message_of",
    "not_covered_lines",
    "not_declared_lines",
    "note_lines",
    "printed_lines",
    "printed_rows",
    "program",
    "readable",
    "repro_command",
    "undeclared_line",
]


# The spellings of contract/modes.py, repeated here because it imports torch, for which reports and --help must not
# wait. A test compares them.
MODES = ("decode", "target-verify", "draft-extend", "draft-extend-v2", "extend", "draft-decode")
EXECUTIONS = ("eager", "graph")


KIT_ERROR = "the kit itself failed: "
"""Beginning of a result's reason if the kit itself failed, not the backend."""
NO_ROOM = "no room "
"""Beginning of a result's reason if the machine lacks the memory that the case takes."""
NOT_STARTED = "not started: "
"""Beginning of a result's reason if the budget of the run left no time for it."""
PYTHON_VARIABLE = "ATTN_TESTKIT_PYTHON"
"""Environment variable that ``attn-testkit --python PATH`` sets to PATH for the process that it continues in."""
CANNOT_IMPORT = "is installed and cannot be imported"
"""Part of the reason of what is not run because a package is broken."""
# The ids of checks/ in its reading order, repeated here because it imports torch. A test compares them.
CHECK_IDS = (
    "completes",
    "output-contract",
    "matches-oracle",
    "finite",
    "output-written",
    "keys-counted-once",
    "log-sum-exp",
    "mode-outputs",
    "reads-own-kv",
    "writes-own-kv",
    "inputs-unchanged",
    "graph-matches-eager",
    "captures-cleanly",
    "replay-follows-batch",
    "addresses-stable",
    "padding-inert",
    "buckets-independent",
    "steps-independent",
    "leaves-process-alone",
    "no-host-lengths",
    "compiles-once",
    "capabilities-honest",
    "refuses-undeclared",
    "repeatable",
    "batch-invariant",
    "lossless",
)
FUZZ = "fuzz"
"""The tier of a results file of random cases, which have no planned number."""
NO_CASE = "(no case)"
"""The case of a row for a declared mode that no case can satisfy, or for a backend that cannot be imported."""
WIDTH = 120
"""Columns of a failure's prose."""


MOST_CHARACTERS = {"headline": 600, "reason": 8000}
"""Longest text of a field of a result; other fields have ``MOST_OTHERS``."""
MOST_OTHERS = 4000
_UNREADABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")
"""Control characters and lone surrogates: they move a terminal's cursor, and cannot be written to a file."""


def readable(text: str, most: int = MOST_OTHERS) -> str:
    """The text as it is sent and recorded: without control characters, at most ``most`` characters. A longer text keeps
    its beginning and its end, with the number of characters left out between them.
    """
    text = _UNREADABLE.sub(lambda found: repr(found[0])[1:-1], text.replace("\r\n", "\n"))
    if len(text) <= most:
        return text
    room = most - len(_left_out(len(text)))
    head = room * 3 // 4
    return text[:head] + _left_out(len(text) - room) + text[len(text) - room + head :]


def _left_out(count: int) -> str:
    return f" [... {count} characters left out ...] "


def message_of(error: BaseException) -> str:
    """The message of an exception, even if its own ``__str__`` raises."""
    try:
        return str.__str__(str(error))
    except BaseException as broken:
        return f"(no message: its __str__ raised {type(broken).__name__})"


_GENERATED = re.compile(
    # FX graphs, dataclasses, decorators, frozen modules; not what somebody types into a notebook or at a prompt.
    r"^<(?!stdin|ipython-input|doctest)"
    # Inductor names a file after the hash of what is in it, in a folder that each user may choose.
    r"|(?:^|/)c[a-z2-7]{51}\.py$|/torchinductor_[^/]*/|/fxgraph/|/torch_compile_debug/"
    # Folders of compiled kernels: Triton's are hashes in base 32; FlashInfer, TileLang, CuTe and torch's extensions.
    r"|/[A-Z2-7]{52}/|/\.triton/|/triton[-_]cache/|/\.tilelang/|/\.cache/(?:flashinfer|tilelang|torch|triton|nvidia)/"
    r"|/torch_extensions/|/cutlass_python_cache"
)


def is_generated(filename: str) -> bool:
    """True if a compiler wrote this file, according to its path: no line of it belongs to an author."""
    return bool(_GENERATED.search(filename.replace("\\", "/")))


class Status(StrEnum):
    """Ending of one case-run. Each status means something else to the reader, so they are never merged."""

    PASSED = "passed"
    FAILED = "failed"
    CRASHED = "crashed"
    """The process died, or the device's context was lost."""
    TIMED_OUT = "timed out"
    KNOWN_FAILURE = "known failure"
    """The case-run failed as an entry of the known-failures file describes."""
    UNEXPECTEDLY_PASSED = "unexpectedly passed"
    """The known-failures file expects a failure, and there was none: the entry is out of date."""
    QUARANTINED = "quarantined"
    """The known-failures file forbids to launch the case-run. It counts as accounted for, not as passed."""
    UNSUPPORTED = "unsupported"
    """The backend does not declare it."""
    NOT_RUN_HERE = "not run here"
    """The backend declares it, but this machine lacks the hardware or a package."""


BAD = frozenset({Status.FAILED, Status.CRASHED, Status.TIMED_OUT, Status.UNEXPECTEDLY_PASSED})
"""Statuses that make a run fail."""
RAN = frozenset({Status.PASSED, Status.KNOWN_FAILURE}) | BAD
"""Statuses of case-runs that really executed."""


@dataclass(frozen=True)
class ErrorMap:
    """Error over limit of a wrong step by row and head, the largest over layers and dims.

    There are at most 32 by 32 cells: with more rows or heads, adjacent ones share a cell, which has the largest value.
    """

    ratios: tuple[tuple[float, ...], ...]
    """[rows, heads]; up to 1 is right, and 1e9 means more than that, NaN or Inf."""
    requests: tuple[int, ...]
    """The request of each cell's first row."""
    rows: int
    """Number of live rows of the step."""
    heads: int


@dataclass(frozen=True)
class KeyMap:
    """KV tokens that a wrong row attended to, as position ranges (first, last)."""

    request: int
    row: int
    """Index of the row inside the request."""
    head: int
    length: int
    """Number of KV tokens of the request."""
    used: tuple[tuple[int, int], ...]
    wanted: tuple[tuple[int, int], ...]
    doubled: tuple[tuple[int, int], ...] = ()
    """KV tokens that were counted more than once."""
    not_asked: tuple[tuple[int, int], ...] = ()
    """KV tokens of which it is unknown whether they had weight."""


@dataclass(frozen=True)
class Finding:
    """One failed check for a tired reader: what is wrong, where, how far it spreads, what to look at first."""

    check: str
    """Id of the check, as ``attn-testkit explain`` knows it."""
    headline: str
    """One complete line: ``request 3 differs from the oracle, 56x over the limit``."""
    where: str = ""
    spread: str = ""
    attended: str = ""
    hint: str = ""
    step: str = ""
    """The step of the case: empty for a single eager step, else for instance ``replay 4 of 6, bucket 4, 3 live``."""
    errors: ErrorMap | None = None
    """Data for a plot, if diagnosis looked at wrong numbers."""
    keys: KeyMap | None = None
    """Data of ``attended`` for a plot."""

    def __post_init__(self) -> None:
        for name, text in vars(self).items():
            if isinstance(text, str):
                object.__setattr__(self, name, readable(text, MOST_CHARACTERS.get(name, MOST_OTHERS)))


@dataclass(frozen=True)
class CaseResult:
    """One case-run: a backend, a mode, an execution and a case."""

    backend: str
    """The spec that named it."""
    mode: str
    execution: str
    case: str
    """The case id, or ``""`` for the row of a whole mode (unsupported, not run here)."""
    status: Status
    findings: tuple[Finding, ...] = ()
    checks: tuple[str, ...] = ()
    """Ids of the checks that were evaluated, passed or failed, in reading order."""
    not_evaluated: tuple[str, ...] = ()
    """Ids of checks that apply and could not be evaluated, because the case-run ended before, or because they depend on
    attention outputs that are wrong."""
    margin: float | None = None
    """Largest error / limit over all outputs; a passing case is at most 1."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall time by phase: setup, eager, capture, replay, oracle, checks."""
    graph: str = ""
    """One of ``cuda`` and ``emulated``; empty in eager."""
    device: str = ""
    """One of ``cuda`` and ``emulated`` (a CPU that emulates a device)."""
    kernels: str = "real"
    """One of ``real``, ``stores`` and ``emulated``: see ``AttentionBackend.kernels``. Also ``not compiled``: regions
    that torch.compile would have compiled ran eagerly."""
    launches: int | None = None
    """Number of launches of kernels that are not torch's: Triton's, and operators of other packages. 0: only torch ran.
    None: nobody counted."""
    reason: str = ""
    """The reason why it did not run or crashed, or the issue of a known failure."""
    after: tuple[str, ...] = ()
    """Case-runs, as ``eager:CASE`` or ``graph:CASE``, that must run before it in the same process for this result."""
    hints: tuple[str, ...] = ()
    """Remarks that are not failures, such as graph support that works but is not declared."""
    like: str = ""
    """The earlier failure, as ``eager:CASE`` or ``graph:CASE``, whose cause this one is taken to have: only that one
    was diagnosed, or both. A wrong number that was not has the check of that one."""
    diagnosed: bool = False
    """True if the cause of a failure was looked for."""
    failed_mode: str = ""
    """The mode of the step that failed first, if it is another than ``mode``: of an instance that runs several modes.
    Tables count the failure there."""
    printed: str = ""
    """Output that the backend printed in this case-run, stdout and stderr; of a long one, the end."""
    node: str = ""
    """The machine of a cluster that ran it; empty without a cluster."""
    gpu: str = ""
    """The GPU of that machine; empty without a cluster, or if the device is emulated."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", readable(self.reason, MOST_CHARACTERS["reason"]))
        object.__setattr__(self, "hints", tuple(map(readable, self.hints)))
        object.__setattr__(self, "printed", readable(self.printed))

    @property
    def emulated(self) -> bool:
        """True if something in this case-run was emulated, so that it proves nothing about hardware."""
        return bool(emulated_parts(self))

    @property
    def place(self) -> tuple[str, str, str]:
        """Backend, mode and execution under which tables count it."""
        return self.backend, self.failed_mode or self.mode, self.execution

    @property
    def is_case_run(self) -> bool:
        """True for a case that is declared, false for the row of a whole mode."""
        return bool(self.case) and self.status is not Status.UNSUPPORTED

    @property
    def left_out(self) -> bool:
        """True if the budget of the run left no time for it."""
        return self.status is Status.NOT_RUN_HERE and self.reason.startswith(NOT_STARTED)

    @property
    def had_no_room(self) -> bool:
        """True if the machine lacks the memory that it takes, so that nothing is known of it."""
        return self.status is Status.NOT_RUN_HERE and self.reason.startswith(NO_ROOM)

    @property
    def of_the_kit(self) -> bool:
        """True if the kit itself failed, so that the result says nothing about the backend."""
        return self.reason.startswith(KIT_ERROR)


NOT_COMPILED = "not compiled"
"""Value of ``CaseResult.kernels`` if torch.compile was kept from compiling."""


def failed_check(result: CaseResult) -> str:
    """The first check that failed, or the status: failures that share it are taken to have one cause."""
    return result.findings[0].check if result.findings else result.status.value


def emulated_parts(result: CaseResult) -> list[str]:
    """The emulated ones of device, graph and kernels; ``stores`` if torch stored new keys and values, and ``compiled
    regions`` if these ran eagerly.
    """
    parts = (("device", result.device), ("graph", result.graph), ("kernels", result.kernels))
    emulated = [name for name, how in parts if how == "emulated"]
    part = _EMULATED_PART.get(result.kernels)
    return [*emulated, part] if part else emulated


_EMULATED_PART = {"stores": "stores", NOT_COMPILED: "compiled regions"}
"""Value of ``CaseResult.kernels`` if only a part is emulated -> that part."""


@dataclass(frozen=True)
class Selection:
    """The part of a tier that a run takes. It is empty if the run takes everything that the tier plans for everything
    that is declared: only such a run can be ``CONFORMANT``. ``reports/verdict.py`` makes and reads it.
    """

    by: tuple[str, ...] = ()
    """Options and hooks that selected, in words such as ``mode decode``; empty if nothing was left out."""
    of: int = 0
    """Number of case-runs that the tier plans without the selection; 0 if nobody counted them."""
    beyond: int = 0
    """Number of selected case-runs that the tier does not plan: cases that were named by their ids."""
    asked: bool = True
    """False if no argument of the caller asked for it, as a hook of pytest that deselects tests: then the exit code is
    not 0."""
    shard: str = ""
    """``K/N`` if the run is one shard of N."""

    def __bool__(self) -> bool:
        return bool(self.by)

    @property
    def of_cases(self) -> bool:
        """True if it takes some cases of a mode and execution, and not only whole modes and executions."""
        return any(not text.startswith(("mode ", "execution ")) for text in self.by)


@dataclass(frozen=True)
class RunHeader:
    """Facts about the whole run that every report needs."""

    kit: str
    """Version of the kit."""
    started: str
    """ISO time, UTC."""
    command: str
    tier: str
    seed: int
    device: str
    """One of ``cuda`` and ``emulated``."""
    device_name: str
    """Name of the device: ``NVIDIA H200 sm90``, or ``CPU (emulated CUDA)``."""
    versions: Mapping[str, str]
    """Versions of python, torch, and of triton and flashinfer if they are installed."""
    backends: Mapping[str, str]
    """Spec -> version or origin."""
    planned: int
    """Number of case-runs that this run has to do: those of the tier, or of the selection."""
    limits: tuple[str, ...] = ()
    """Limits of the emulation; empty on hardware."""
    not_covered: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Spec -> declared values, in the modes that ran, that no case of the run covers. Empty if cases were named by
    hand."""
    notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Spec -> remarks on the backend on this machine: what importing its server changed in the process, and which parts
    of it are missing and done in torch."""
    sources: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Spec -> ``file`` and ``sha256`` of the module that was imported, ``kernels``: the Triton kernels in it and in the
    modules that it uses, empty for none, and ``code``: a hash of all these modules."""
    plan: str = ""
    """Digest, in the record of a shard, of every case-run of the plan, those of other shards included."""
    planned_in_all: int = 0
    """Number, in the record of a shard, of the case-runs of the plan, those of other shards included."""
    explained: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Id of each check -> ``text``, ``cause``, ``source`` and ``how_to_read``, so that a page can explain it."""
    not_declared: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Spec -> what the backend does not declare and others do, and capabilities that it leaves at their defaults."""
    selection: Selection = field(default_factory=Selection)
    """The part of the tier that this run takes."""


CUT = 7
"""Exit code of a run that its budget cut short and in which nothing failed. pytest uses 6 for warnings."""


def exit_code(
    planned: int,
    results: Iterable[CaseResult],
    interrupted: bool = False,
    problems: Sequence[str] = (),
    *,
    shard_of: int = 0,
) -> int:
    """The exit code, in pytest's numbers: 0 conformant, 1 not (or planned case-runs did not run), 2 interrupted, 3 the
    kit itself failed, 5 nothing to run; 7 if nothing failed and the budget left something out. ``problems``: what else
    fails the run. ``shard_of``: number of case-runs of the whole run, if this is a shard of it: whether something is
    known to work, only all shards together show.
    """
    runs = [result for result in results if result.is_case_run]
    if interrupted:
        return 2
    if any(result.of_the_kit for result in runs):
        return 3
    left = sum(result.left_out for result in runs)
    if not planned and not runs:
        return 1 if problems else 0 if shard_of else 5
    counts = Counter(result.status for result in runs)
    accounted = sum(counts[status] for status in RAN | {Status.QUARANTINED})
    accounted += sum(result.had_no_room for result in runs)
    # A run with only known failures does not pass: nothing is known to work.
    good = (
        (counts[Status.PASSED] or shard_of)
        and accounted + left >= planned
        and not any(counts[status] for status in BAD)
    )
    if not good or problems:
        return 1
    return CUT if left else 0


def format_failure(
    result: CaseResult, header: RunHeader | None = None, *, first_only: bool = False, brief: bool = False
) -> str:
    """The text of a case-run that did not pass. Its first line is complete in itself.

    ``first_only``: only the first finding. ``brief``: the others as one line each, and of a failure that is like an
    earlier one only what it takes to find both.
    """
    if not result.case:
        return f"{result.backend} {result.mode} {result.execution}: {result.status}: {result.reason}"
    lines: list[str] = []
    for finding in result.findings[:1] if first_only or brief else result.findings:
        lines.append(f"{result.case}: {finding.headline}")
        rows = [("check", finding.check), ("step", finding.step)]
        if not (brief and result.like and not result.diagnosed):
            names = ("where", "spread", "attended", "hint")
            rows += [(name, getattr(finding, name)) for name in names]
        lines += [line for name, text in rows if text for line in _row(name, text)]
    if brief:
        lines += [f"  also     {finding.check}: {finding.headline}" for finding in result.findings[1:]]
    if result.like and not result.diagnosed:
        lines += _row("cause", f"taken to be that of {result.like}; --diagnose all looks for the cause of each failure")
    if not result.findings:
        first, *rest = result.reason.splitlines() or [""]
        lines.append(f"{result.case}: {result.status}: {first}" if first else f"{result.case}: {result.status}")
        lines += [f"  {line}" for line in rest]
    if brief and result.like and not result.diagnosed:
        return "\n".join([*lines, f"  repro    {repro_command(result, header)}"])
    if result.not_evaluated:
        lines += _row("untested", _some(result.not_evaluated))
    lines += printed_rows(result)
    version = header.backends.get(result.backend, "") if header else ""
    parts = [f"{result.backend} {version}".strip()]
    if header:
        parts += [header.device_name, f"torch {header.versions.get('torch', '?')}"]
    parts += [f"graph: {result.graph}" if result.graph else result.execution] if result.execution else []
    if result.kernels != "real":
        parts.append(_KERNELS[result.kernels])
    lines.append(f"  backend  {' · '.join(parts)}")
    lines.append(f"  repro    {repro_command(result, header)}")
    return "\n".join(lines)


_KERNELS = {
    "emulated": "kernels: emulated",
    "stores": "stores: emulated",
    NOT_COMPILED: "compiled regions: run eagerly",
}


def _row(name: str, text: str) -> list[str]:
    # Values are not wrapped, so that they can be searched for and copied; prose is.
    lines = text.splitlines()
    if name in ("hint", "untested"):
        return [
            f"  {name if not index else '':<8} {part}"
            for line in lines
            for index, part in enumerate(textwrap.wrap(line, WIDTH - 11, break_long_words=False))
        ]
    return [f"  {name:<8} {line}" for line in lines]


def printed_rows(result: CaseResult) -> list[str]:
    """The last lines that the backend printed in a case-run, as rows of a failure."""
    lines = [line for line in result.printed.splitlines() if line.strip()]
    left = len(lines) - MOST_PRINTED_LINES
    shown = [f"({left} earlier lines)", *lines[-MOST_PRINTED_LINES:]] if left > 0 else lines
    return [line for text in shown for line in _row("printed", text[:WIDTH])]


MOST_PRINTED_LINES = 6
"""Number of lines of a backend's output that a failure's text shows; the results file has more."""


def _some(names: Sequence[str]) -> str:
    """All names if they are few, else the first ones and the number of the rest."""
    shown = names if len(names) <= MOST_UNTESTED + 1 else names[:MOST_UNTESTED]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


MOST_UNTESTED = 5
"""Number of unevaluated checks that a failure's text names; the results file has them all."""


def not_covered_lines(not_covered: Mapping[str, Sequence[str]], how: str = "") -> list[str]:
    """Declared values that were not covered, from ``RunHeader.not_covered``: one line per backend that has any.

    ``how``: the way to list the values, as ``--show-not-covered lists them``; the line then only counts them.
    """
    several = len(not_covered) > 1
    return [
        f"not covered{f' ({spec})' if several else ''}: "
        + (f"{_values(len(phrases))}; {how}" if how else "; ".join(phrases))
        for spec, phrases in not_covered.items()
        if phrases
    ]


def launch_lines(header: RunHeader, results: Iterable[CaseResult]) -> list[str]:
    """One line per backend that may not have run its own kernels: some case-runs launched none while others did, or it
    has Triton kernels and launched none at all. A backend that uses only torch has no line.
    """
    counted: dict[str, list[CaseResult]] = {}
    for result in results:
        if result.status is Status.PASSED and result.launches is not None:
            counted.setdefault(result.backend, []).append(result)
    lines = []
    for spec, rows in counted.items():
        without = Counter(f"{row.mode} {row.execution}" for row in rows if not row.launches)
        none, kernels = sum(without.values()), header.sources.get(spec, {}).get("kernels", "")
        if 0 < none < len(rows):
            places = ", ".join(f"{place} {count}" for place, count in without.items())
            lines.append(f"{none} of {len(rows)} case-runs launched no kernel of {spec}, only torch ran: {places}")
        elif none and kernels:
            lines.append(f"none of {len(rows)} case-runs launched a kernel of {spec}, which has {kernels}")
    return lines


def _values(count: int) -> str:
    return f"{count} declared value{'s' if count != 1 else ''}"


def undeclared_line(results: Iterable[CaseResult]) -> list[str]:
    """The modes and executions that a backend does not declare, in one line per backend that has any."""
    absent: dict[str, list[tuple[str, str]]] = {}
    rows = list(results)
    for row in rows:
        if not row.case and row.status is Status.UNSUPPORTED:
            absent.setdefault(row.backend, []).append((row.mode, row.execution))
    several = len({row.backend for row in rows}) > 1
    asked = {row.execution for row in rows if row.execution}
    lines = []
    for backend, pairs in absent.items():
        modes = dict.fromkeys(mode for mode, _ in pairs)
        whole = [mode for mode in modes if all((mode, execution) in pairs for execution in asked)]
        halves = [f"{mode} {execution}" for mode, execution in pairs if mode not in whole]
        lines.append(f"not declared{f' ({backend})' if several else ''}: {', '.join([*whole, *halves])}")
    return lines


def not_declared_lines(not_declared: Mapping[str, Sequence[str]]) -> list[str]:
    """Lines of ``RunHeader.not_declared``: one per backend that has any."""
    return [
        f"not declared{f' ({spec})' if len(not_declared) > 1 else ''}: {'; '.join(phrases)}"
        for spec, phrases in not_declared.items()
        if phrases
    ]


def note_lines(notes: Mapping[str, Sequence[str]]) -> list[str]:
    """Lines of ``RunHeader.notes``, one per remark."""
    return [f"{spec}: {text}" for spec, texts in notes.items() for text in texts]


def printed_lines(results: Iterable[CaseResult]) -> list[str]:
    """One line about what backends printed, which is shown with failures only; empty if they printed nothing."""
    counts = [len(result.printed.splitlines()) for result in results if result.printed.strip()]
    if not counts:
        return []
    return [
        f"printed by the backend: {sum(counts)} line{'s' if sum(counts) != 1 else ''} in {len(counts)} case-run"
        f"{'s' if len(counts) != 1 else ''}; failures show the end of it, and `attn-testkit repro` the rest"
    ]


def left_lines(header: RunHeader, results: Iterable[CaseResult]) -> list[str]:
    """Lines about what the budget left out, by mode and execution, and the command that runs it; empty for nothing."""
    left = Counter((result.mode, result.execution) for result in results if result.left_out)
    if not left:
        return []
    counts = ", ".join(f"{mode} {execution} {count}" for (mode, execution), count in left.items())
    return [f"left out by the budget: {counts}", f"the rest: {_without_budget(header.command)}"]


_OF_A_BUDGET = ("--budget", "--attn-budget", "--last", "--html")


def _without_budget(command: str) -> str:
    """The command of a run without its budget; if it kept results, only what they lack."""
    words = iter(shlex.split(command))
    kept: list[str] = []
    for word in words:
        name, given, value = word.partition("=")
        if name not in (*_OF_A_BUDGET, "--json"):
            kept.append(word)
            continue
        value = value if given else next(words, "")
        if name == "--json":
            kept += ["--rest-of", value]
    return shlex.join(kept)


def program() -> tuple[str, ...]:
    """The words before the verb of a command that repeats this one."""
    python = os.environ.get(PYTHON_VARIABLE)
    return ("attn-testkit", "--python", python) if python else ("attn-testkit",)


def repro_command(result: CaseResult, header: RunHeader | None = None) -> str:
    """The command that shows this result again; for a class that cannot be imported, the Python call."""
    if result.backend.startswith("__main__:") or "<locals>" in result.backend:
        name = result.backend.rpartition(":")[2].rpartition(".")[2]
        return f"check_backend({name}, executions=[{result.execution!r}], cases=[{result.case!r}])"
    rest = ["--execution", result.execution] if result.execution else []
    if (header.device if header else result.device) == "emulated":
        rest.append("--device cpu")
    if not result.case.endswith(NO_CASE):
        rest += [f"--after {each}" for each in result.after]
        return " ".join([shlex.join(program()), "repro --backend", result.backend, *rest, result.case])
    # Without a case to name, planning the mode again shows the failure.
    if header and header.tier != "smoke":
        rest.append(f"--tier {header.tier}")
    mode = ["--mode", result.mode] if result.mode else []
    return " ".join([shlex.join(program()), "run --backend", result.backend, *mode, *rest])

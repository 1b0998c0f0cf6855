"""What a run produces: plain values, picklable, JSON-ready, with no tensor and no knowledge of who shows them."""

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
    "Status",
    "emulated_parts",
    "exit_code",
    "failed_check",
    "format_failure",
    "is_generated",
    "left_lines",
    "message_of",
    "note_lines",
    "program",
    "readable",
    "repro_command",
    "untried_lines",
]


# The spellings of contract/modes.py, which comes with torch: reports and --help must not wait for it. A test compares.
MODES = ("decode", "target-verify", "draft-extend", "draft-extend-v2", "extend", "draft-decode")
EXECUTIONS = ("eager", "graph")


KIT_ERROR = "the kit itself failed: "
"""How the reason of a result begins when the fault is ours, not the backend's."""
NO_ROOM = "no room "
"""How the reason begins where the machine has not the memory that a case takes."""
NOT_STARTED = "not started: "
"""How the reason of a result begins that the budget of the run left no time for."""
PYTHON_VARIABLE = "ATTN_TESTKIT_PYTHON"
"""Set by ``attn-testkit --python PATH`` for the process that it continues in: PATH."""
CANNOT_IMPORT = "is installed and cannot be imported"
"""In the reason of what is not run because a package is broken."""
# The ids of checks/, which comes with torch, in its reading order. A test compares.
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
    "claims-honest",
    "refuses-undeclared",
    "repeatable",
    "batch-invariant",
    "lossless",
)
FUZZ = "fuzz"
"""The tier of a record of random cases, of which none was due."""
NO_CASE = "(no case)"
"""Stands for a case in the row of a mode that is claimed and that no case can satisfy, or of a backend that cannot be
imported."""
WIDTH = 120
"""Columns of a failure's prose."""


MOST_CHARACTERS = {"headline": 600, "reason": 8000}
"""Of a text in a result; of others ``MOST_OTHERS``."""
MOST_OTHERS = 4000
_UNREADABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")
"""Control characters and lone surrogates: they move a terminal's cursor, and no file takes them."""


def readable(text: str, most: int = MOST_OTHERS) -> str:
    """The text as it travels and is recorded: no control characters, and of a long one the beginning and the end, with
    the number of characters left out between them. At most ``most`` characters.
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
    """What an exception says, also where its own ``__str__`` raises."""
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
    """Whether a compiler wrote this file, as far as its path tells: none of its lines is an author's."""
    return bool(_GENERATED.search(filename.replace("\\", "/")))


class Status(StrEnum):
    """How one case-run ended. Never merged: each of these means something else to the reader."""

    PASSED = "passed"
    FAILED = "failed"
    CRASHED = "crashed"
    """The process died, or the device's context was lost."""
    TIMED_OUT = "timed out"
    KNOWN_FAILURE = "known failure"
    """It failed as an entry of the known-failures file says it does."""
    UNEXPECTEDLY_PASSED = "unexpectedly passed"
    """The known-failures file says it fails, and it did not: the entry is out of date."""
    QUARANTINED = "quarantined"
    """The known-failures file says not to launch it. Accounted for, and never green."""
    UNSUPPORTED = "unsupported"
    """Not claimed by the backend."""
    NOT_RUN_HERE = "not run here"
    """Claimed, but this machine lacks the hardware or a package."""


BAD = frozenset({Status.FAILED, Status.CRASHED, Status.TIMED_OUT, Status.UNEXPECTEDLY_PASSED})
"""Statuses that make a run fail."""
RAN = frozenset({Status.PASSED, Status.KNOWN_FAILURE}) | BAD
"""Statuses of case-runs that really executed."""


@dataclass(frozen=True)
class ErrorMap:
    """Where a wrong step is wrong: error over limit by row and head, the largest over layers and dims.

    At most 32 by 32 cells: of more rows or heads, neighbours share one, and it holds the largest.
    """

    ratios: tuple[tuple[float, ...], ...]
    """[rows, heads]; up to 1 is right, 1e9 stands for more than that, NaN and Inf included."""
    requests: tuple[int, ...]
    """The request of each cell's first row."""
    rows: int
    """Live rows of the step."""
    heads: int


@dataclass(frozen=True)
class KeyMap:
    """KV tokens that a wrong row attended to, by position, each as runs of (first, last)."""

    request: int
    row: int
    """Row inside the request."""
    head: int
    length: int
    """KV tokens of the request."""
    used: tuple[tuple[int, int], ...]
    wanted: tuple[tuple[int, int], ...]
    doubled: tuple[tuple[int, int], ...] = ()
    """Counted more than once."""
    not_asked: tuple[tuple[int, int], ...] = ()
    """Whether they had weight is unknown."""


@dataclass(frozen=True)
class Finding:
    """One failed check, written for a tired person: what, where, how far it spreads, what to look at first."""

    check: str
    """Id of the check, as ``attn-testkit explain`` knows it."""
    headline: str
    """Stands alone: ``request 3 differs from the oracle, 56x over the limit``."""
    where: str = ""
    spread: str = ""
    attended: str = ""
    hint: str = ""
    step: str = ""
    """Which step of the case: empty for a single eager step, else for instance ``replay 4 of 6, bucket 4, 3 live``."""
    errors: ErrorMap | None = None
    """For plots, where diagnosis looked at wrong numbers."""
    keys: KeyMap | None = None
    """What ``attended`` says, for plots."""

    def __post_init__(self) -> None:
        for name, text in vars(self).items():
            if isinstance(text, str):
                object.__setattr__(self, name, readable(text, MOST_CHARACTERS.get(name, MOST_OTHERS)))


@dataclass(frozen=True)
class CaseResult:
    """One case-run: a backend, a mode, an execution and a case."""

    backend: str
    """The spec it was named by."""
    mode: str
    execution: str
    case: str
    """The case id, or ``""`` for a row that stands for a whole mode (unsupported, not run here)."""
    status: Status
    findings: tuple[Finding, ...] = ()
    checks: tuple[str, ...] = ()
    """Ids of the checks that were judged, passed or failed, in reading order."""
    not_judged: tuple[str, ...] = ()
    """Ids of checks that apply and could not be judged, because the case-run ended before, or because the attention
    outputs that they look behind are wrong."""
    margin: float | None = None
    """Largest error / limit over all outputs; a passing case is below 1."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall time by phase: setup, eager, capture, replay, oracle, checks."""
    graph: str = ""
    """``cuda`` or ``emulated``; empty in eager."""
    device: str = ""
    """``cuda`` or ``emulated`` (a CPU that emulates a device)."""
    kernels: str = "real"
    """``real``, ``stores`` or ``emulated``: see ``AttentionBackend.kernels``. ``not compiled``: regions that
    torch.compile would have compiled ran eagerly."""
    reason: str = ""
    """Why it did not run or crashed, or the issue behind a known failure."""
    after: tuple[str, ...] = ()
    """``eager:CASE`` or ``graph:CASE``: what has to run before it in the same process for it to end like this."""
    hints: tuple[str, ...] = ()
    """Remarks that are no failure, such as graph support that works but is not claimed."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", readable(self.reason, MOST_CHARACTERS["reason"]))
        object.__setattr__(self, "hints", tuple(map(readable, self.hints)))

    @property
    def emulated(self) -> bool:
        """Something in this case-run was emulated: it is no proof about hardware."""
        return bool(emulated_parts(self))

    @property
    def is_case_run(self) -> bool:
        """It stands for a case that is claimed, and not for a whole mode."""
        return bool(self.case) and self.status is not Status.UNSUPPORTED

    @property
    def left_out(self) -> bool:
        """The budget of the run left no time for it."""
        return self.status is Status.NOT_RUN_HERE and self.reason.startswith(NOT_STARTED)

    @property
    def had_no_room(self) -> bool:
        """The machine has not the memory that it takes: nothing is known of it, and nobody is to blame."""
        return self.status is Status.NOT_RUN_HERE and self.reason.startswith(NO_ROOM)

    @property
    def of_the_kit(self) -> bool:
        """Our own code failed here: this says nothing about the backend."""
        return self.reason.startswith(KIT_ERROR)


NOT_COMPILED = "not compiled"
"""``CaseResult.kernels`` where torch.compile was kept from compiling."""


def failed_check(result: CaseResult) -> str:
    """The first check that failed, or how the case-run ended: failures that share it are taken to have one cause."""
    return result.findings[0].check if result.findings else result.status.value


def emulated_parts(result: CaseResult) -> list[str]:
    """Which of device, graph and kernels were emulated; ``stores`` where torch stored new keys and values, and
    ``compiled regions`` where these ran eagerly.
    """
    parts = (("device", result.device), ("graph", result.graph), ("kernels", result.kernels))
    emulated = [name for name, how in parts if how == "emulated"]
    part = _EMULATED_PART.get(result.kernels)
    return [*emulated, part] if part else emulated


_EMULATED_PART = {"stores": "stores", NOT_COMPILED: "compiled regions"}
"""``CaseResult.kernels`` where only a part of what ran is emulated -> that part."""


@dataclass(frozen=True)
class RunHeader:
    """What every report must say about the run as a whole."""

    kit: str
    """Version of the kit."""
    started: str
    """ISO time, UTC."""
    command: str
    tier: str
    seed: int
    device: str
    """``cuda`` or ``emulated``."""
    device_name: str
    """``NVIDIA H200 sm90``, or ``CPU (emulated CUDA)``."""
    versions: Mapping[str, str]
    """python, torch, and triton / flashinfer where installed."""
    backends: Mapping[str, str]
    """Spec -> version or origin."""
    planned: int
    """Case-runs that were claimed and planned: the denominator."""
    limits: tuple[str, ...] = ()
    """What the emulation cannot show; empty on hardware."""
    untried: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Spec -> what is claimed in the modes that ran and what no case of the run tries, in words. Empty where cases were
    named by hand."""
    notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Spec -> what a reader must know of the backend on this machine: what importing its server changed in the process,
    and what of it is missing and done in torch."""
    explained: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Id of each check -> ``text``, ``cause``, ``source`` and ``how_to_read``: a page explains it without the kit."""


CUT = 7
"""Exit code of a run that its budget cut short and that is good as far as it came. pytest has 6 for warnings."""


def exit_code(
    planned: int, results: Iterable[CaseResult], interrupted: bool = False, problems: Sequence[str] = ()
) -> int:
    """pytest's numbers: 0 conformant, 1 not (or claimed case-runs did not run), 2 interrupted, 3 the kit itself failed,
    5 nothing to run; and 7 where nothing failed and the budget of the run left something out. ``problems``: what fails
    the run besides its case-runs.
    """
    runs = [result for result in results if result.is_case_run]
    if interrupted:
        return 2
    if any(result.of_the_kit for result in runs):
        return 3
    left = sum(result.left_out for result in runs)
    if not planned and not runs:
        return 1 if problems else 5
    counts = Counter(result.status for result in runs)
    accounted = sum(counts[status] for status in RAN | {Status.QUARANTINED})
    accounted += sum(result.had_no_room for result in runs)
    # Known failures alone are no green: then nothing is known to work.
    good = counts[Status.PASSED] and accounted + left >= planned and not any(counts[status] for status in BAD)
    if not good or problems:
        return 1
    return CUT if left else 0


def format_failure(result: CaseResult, header: RunHeader | None = None, *, first_only: bool = False) -> str:
    """The text of a case-run that did not pass. Line 1 stands alone."""
    if not result.case:
        return f"{result.backend} {result.mode} {result.execution}: {result.status}: {result.reason}"
    lines: list[str] = []
    for finding in result.findings[:1] if first_only else result.findings:
        lines.append(f"{result.case}: {finding.headline}")
        rows = [
            ("check", finding.check),
            ("step", finding.step),
            ("where", finding.where),
            ("spread", finding.spread),
            ("attended", finding.attended),
            ("hint", finding.hint),
        ]
        lines += [line for name, text in rows if text for line in _row(name, text)]
    if not result.findings:
        first, *rest = result.reason.splitlines() or [""]
        lines.append(f"{result.case}: {result.status}: {first}" if first else f"{result.case}: {result.status}")
        lines += [f"  {line}" for line in rest]
    if result.not_judged:
        lines += _row("unjudged", _some(result.not_judged))
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
    # Values are left whole, to be searched for and copied; prose is made to fit a line.
    lines = text.splitlines()
    if name in ("hint", "unjudged"):
        return [
            f"  {name if not index else '':<8} {part}"
            for line in lines
            for index, part in enumerate(textwrap.wrap(line, WIDTH - 11, break_long_words=False))
        ]
    return [f"  {name:<8} {line}" for line in lines]


def _some(names: Sequence[str]) -> str:
    """All of a few names, the first of many and how many more there are."""
    shown = names if len(names) <= MOST_UNJUDGED + 1 else names[:MOST_UNJUDGED]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


MOST_UNJUDGED = 5
"""Checks that were not judged and that a failure's text names; the record has them all."""


def untried_lines(untried: Mapping[str, Sequence[str]]) -> list[str]:
    """What is claimed and not tried, from ``RunHeader.untried``: a line for each backend that has any of it."""
    return [
        f"claimed and not tried{f' ({spec})' if len(untried) > 1 else ''}: {'; '.join(phrases)}"
        for spec, phrases in untried.items()
        if phrases
    ]


def note_lines(notes: Mapping[str, Sequence[str]]) -> list[str]:
    """``RunHeader.notes``, a line for each."""
    return [f"{spec}: {text}" for spec, texts in notes.items() for text in texts]


def left_lines(header: RunHeader, results: Iterable[CaseResult]) -> list[str]:
    """What the budget has left out, by mode and execution, and the command that runs it; empty for nothing."""
    left = Counter((result.mode, result.execution) for result in results if result.left_out)
    if not left:
        return []
    counts = ", ".join(f"{mode} {execution} {count}" for (mode, execution), count in left.items())
    return [f"left out by the budget: {counts}", f"the rest: {_without_budget(header.command)}"]


_OF_A_BUDGET = ("--budget", "--attn-budget", "--last", "--html")


def _without_budget(command: str) -> str:
    """The command of a run without its budget; where that kept a record, only what this lacks."""
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
    """The words before the verb of a command that does the same again."""
    python = os.environ.get(PYTHON_VARIABLE)
    return ("attn-testkit", "--python", python) if python else ("attn-testkit",)


def repro_command(result: CaseResult, header: RunHeader | None = None) -> str:
    """The command that shows this result again; for a class that no import gives, the call."""
    if result.backend.startswith("__main__:") or "<locals>" in result.backend:
        name = result.backend.rpartition(":")[2].rpartition(".")[2]
        return f"check_backend({name}, executions=[{result.execution!r}], cases=[{result.case!r}])"
    rest = ["--execution", result.execution] if result.execution else []
    if (header.device if header else result.device) == "emulated":
        rest.append("--device cpu")
    if not result.case.endswith(NO_CASE):
        rest += [f"--after {each}" for each in result.after]
        return " ".join([shlex.join(program()), "repro --backend", result.backend, *rest, result.case])
    # There is no case to name: planning the mode again shows it.
    if header and header.tier != "smoke":
        rest.append(f"--tier {header.tier}")
    mode = ["--mode", result.mode] if result.mode else []
    return " ".join([shlex.join(program()), "run --backend", result.backend, *mode, *rest])

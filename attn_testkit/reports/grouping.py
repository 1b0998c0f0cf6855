"""Failures grouped by cause, so that one bug in forty case-runs is read once.

The cause of a case-run is the most informative text of its first finding, without words that belong to the case
(numbers, rows, requests) or that a compiler invents (names of files, kernels, buffers and symbols, addresses). A
case-run of a backend has the cause of an earlier one if any of these holds:

* the run assumed that they are alike, and diagnosed only the first (``CaseResult.like``);
* the same line of the author's source raised in both, or both have a stray access of the same kernel;
* the best hint of one is a hint of the other;
* they are the eager and the graph copy of a case, and each has wrong numbers or a stray access.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from ..results.case_result import CaseResult, failed_check
from ..results.finding import Finding
from ..results.texts import NOTE_ON_THE_CASE, RESTATES_THE_CHECK, is_generated, telling_first


@dataclass(frozen=True)
class Group:
    """Case-runs of one backend that failed for one cause, according to their texts."""

    backend: str
    check: str
    """Id of the first check that the first case-run fails; the status if there is no finding."""
    cause: str
    """The cause in the words of the first case-run."""
    results: tuple[CaseResult, ...]
    """The case-runs, never empty: first the one that names the cause, then the others in the order of the results
    file.
    """


@dataclass(frozen=True)
class _Line:
    """One text of a case-run about its cause."""

    key: str
    """The part of the text that case-runs of one cause share."""
    text: str
    """The whole text."""


@dataclass
class _Cause:
    """A cause while failures are added."""

    results: list[CaseResult]
    lines: list[tuple[_Line, ...]]
    """The lines of each result, the most telling first; none for a result that is assumed to be like another."""
    names: set[str]
    """``eager:CASE`` or ``graph:CASE`` of each result."""
    best: set[str] = field(default_factory=set)
    """The key of the most telling line of each result."""
    keys: set[str] = field(default_factory=set)
    """The keys of all lines."""

    def group(self) -> Group:
        first = self._named_by()
        others = (result for result in self.results if result is not first)
        return Group(first.backend, failed_check(first), self.named().text, (first, *others))

    def _named_by(self) -> CaseResult:
        """The last case-run that was diagnosed although it is like another, because it has fewer options. Else the
        first."""
        again = [result for result in self.results if result.like and result.diagnosed]
        return again[-1] if again else self.results[0]

    def named(self) -> _Line:
        """The best hint that most case-runs share, in the words of the first such case-run: with its numbers, but
        without names that a compiler invented.
        """
        named_by = self._named_by()
        if named_by is not self.results[0]:
            return self.lines[self.results.index(named_by)][0]
        best = Counter(lines[0].key for lines in self.lines if lines)
        shared = Counter(line.key for lines in self.lines for line in lines)
        key = max(best, key=lambda each: (shared[each], best[each]))
        texts = [line.text for lines in self.lines for line in lines if line.key == key]
        return _Line(key, texts[0] if len(set(texts)) == 1 else _without_made_up(texts[0]))


class Causes:
    """Causes of the failures that were added so far, so that a terminal can print each once while a run goes on."""

    def __init__(self) -> None:
        self._causes: list[_Cause] = []

    def add(self, result: CaseResult) -> bool:
        """Add one failure. Returns True if no earlier failure has its cause, or if it adds information about that
        cause."""
        lines = () if result.like and not result.diagnosed else _lines(result)
        cause = next((each for each in self._causes if _same(each, result, lines)), None)
        new = cause is None
        if cause is None:
            lines = lines or _lines(result)
            cause = _Cause([], [], set())
            self._causes.append(cause)
        cause.results.append(result)
        cause.lines.append(lines)
        cause.names.add(_name(result))
        cause.best.update(line.key for line in lines[:1])
        cause.keys.update(line.key for line in lines)
        return new or bool(result.like and result.diagnosed)

    @property
    def groups(self) -> list[Group]:
        """One group per cause, the largest first. Causes that end up with the same line are one group."""
        named: dict[tuple[str, str], Group] = {}
        for cause in self._causes:
            group = cause.group()
            key = group.backend, cause.named().key
            there = named.get(key)
            named[key] = replace(there, results=(*there.results, *group.results)) if there else group
        return sorted(named.values(), key=lambda group: -len(group.results))


def group_failures(results: Iterable[CaseResult]) -> list[Group]:
    """Group failures, the largest group first. Every result is in exactly one group."""
    causes = Causes()
    for result in results:
        causes.add(result)
    return causes.groups


def _same(cause: _Cause, result: CaseResult, lines: Sequence[_Line]) -> bool:
    """Report whether a failure has a cause. ``lines``: of the failure."""
    first = cause.results[0]
    if first.backend != result.backend:
        return False
    if result.like:
        return result.like in cause.names
    if lines[0].key in cause.keys or any(line.key in cause.best for line in lines):
        return True
    if not _of_numbers(result):
        return False
    other = {"eager": "graph", "graph": "eager"}.get(result.execution, "")
    return any(_name(each) == f"{other}:{result.case}" and _of_numbers(each) for each in cause.results)


def _of_numbers(result: CaseResult) -> bool:
    """Report whether a failure is about a wrong number that eager mode has, too, or about a stray access."""
    return any(
        (each.check in _IN_EAGER and _ABOUT_A_ROW.match(each.headline)) or _STRAY in each.headline
        for each in result.findings[:1]
    )


def _name(result: CaseResult) -> str:
    return f"{result.execution}:{result.case}"


def _lines(result: CaseResult) -> tuple[_Line, ...]:
    """The lines of a case-run about its cause, the most telling first; never empty, no key twice."""
    lines = _of_finding(result.findings[0]) if result.findings else _of_reason(result)
    return tuple({line.key: line for line in reversed(lines)}.values())[::-1]


def _of_finding(finding: Finding) -> list[_Line]:
    raised = _RAISED_AT.match(finding.where)
    if raised and not is_generated(raised["file"]):
        # An author's line that raises is one cause, in whichever phase it is reached, and whatever message a compiler
        # adds for each shape. The emulation's errors have no type: one line of code calls several of torch's operators.
        kind = _PHASE.search(finding.headline)
        # One wrong offset makes several accesses of a kernel stray: which of them comes first depends on the case.
        line = f"{raised['file']} in {raised['function']}" if _STRAY in finding.headline else raised[0]
        hint = telling_first(finding.hint).partition("\n")[0] if _ACCESS.search(finding.headline) else ""
        text = f"{finding.headline}; {hint}" if hint else finding.headline
        return [_Line(f"{line} {kind['kind'] if kind else ''}", text)]
    if not _ABOUT_A_ROW.match(finding.headline):
        return [_Line(without_numbers(finding.headline), finding.headline)]
    named = (line for line in finding.hint.splitlines() if line and not line.startswith(NOTE_ON_THE_CASE))
    hints = [_Line(without_numbers(line), line) for line in named]
    telling = [line for line in hints if not line.key.startswith(RESTATES_THE_CHECK)]
    return telling or hints or [_Line(without_numbers(finding.headline), finding.headline)]


def _of_reason(result: CaseResult) -> list[_Line]:
    first = result.reason.partition("\n")[0] or result.status.value
    frames = list(_FRAME.finditer(result.reason))
    written = [each for each in frames if not is_generated(each["path"])]
    own = (each for each in written if not _OF_A_LIBRARY.search(each["path"]))
    frame = next(own, written[0] if written else None)
    text = f"{first}, in {frame['file']}:{frame['line']} {frame['function']}" if frame else first
    # The frame is part of the key: two lines that hang are two causes.
    return [_Line(f"{result.status} {without_numbers(first)}" + (f" {frame[0]}" if frame else ""), text)]


_STRAY = " raised StrayAccessError: "
"""Part of the headline of an access outside of a tensor. A stray access that hits other memory gives wrong results."""
_ACCESS = re.compile(r" raised \w+Error: an? [\w ]+ of triton kernel \S+$")
"""End of a headline that names an error of the emulation and a kernel: only the hint says what is wrong."""
_RAISED_AT = re.compile(r"(?P<file>\S+):\d+ in (?P<function>\S+?)(?=:|$)", re.MULTILINE)
"""Beginning of the ``where`` of an exception, as ``checks/failures.py`` writes it: ``file.py:12 in function``."""
_FRAME = re.compile(r'File "(?P<path>(?:[^"]*/)?(?P<file>[^"/]+))", line (?P<line>\d+),? in (?P<function>\S+)')
"""A frame of the stack that Python dumps when a process dies or is ended, the innermost first."""
_OF_A_LIBRARY = re.compile(
    r"/lib/python3\.\d+/(?!(?:site|dist)-packages/)|/(?:site|dist)-packages/(?:torch|numpy|triton)/"
)
"""A frame of a library; the line that called the library shows the cause."""
_IN_EAGER = ("matches-oracle", "finite", "output-written", "keys-counted-once", "reads-own-kv", "reads-own-state",
             "log-sum-exp")  # fmt: skip
"""Checks of numbers that diagnosis reports only if eager mode is wrong, too, or does not exist."""
_PHASE = re.compile(r"^.*? raised (?P<kind>\w+): ")
_ABOUT_A_ROW = re.compile(r"requests? \d")
"""Beginning of the headline of a wrong number: it names a request of one case, and not the cause."""

_NUMBER = r"-?(?:0x[0-9a-f]+|\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
_MADE_UP = (
    # A path into a folder of compiled code, as far as it goes.
    (r"[\w./~-]*(?:torchinductor_|/\.triton/|/triton[-_]cache/|/torch_compile_debug/)[\w./:-]*", "generated code"),
    (r"(?<![\w/])(?:/[\w.-]+)*/?\bc[a-z2-7]{51}(?:\.\w+)?", "generated code"),
    (r"<eval_with_key>(?:\.\d+)?|<lambda_\d+>", "generated code"),
    # Hashes and handles.
    (r"\b(?=\w*\d)(?:[A-Z2-7]{26,}|[a-z2-7]{26,}|[0-9a-f]{16,})\b", "N"),
    # Kernels of Inductor, and names of graphs: buf12, s17, primals_3, triton_poi_fused_add_0.
    (r"\btriton_(?:poi|per|red|tem|mm|for)_\w+", "triton_N"),
    (r"\b(buf|arg|tmp|inp|xindex|zuf|ks|s|u|ps|op|subgraph|graph_?)\d+(?:_\d+)*\b", r"\1N"),
    (r"\b([A-Za-z]\w*?_)\d+(?:_\d+)*\b", r"\1N"),
    # Names of temporary files.
    (r"/tmp/[\w./-]+", "a temporary file"),
)
_ALIKE: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), instead)
    for pattern, instead in (
        *_MADE_UP,
        (r"\b(eager|graph):[\w.-]+", "another case-run"),
        (r"the \d+ case-runs that repro names", "another case-run"),
        # The advice depends on the case's features.
        (r": look at .*", ""),
        (r"(over a million times|just|[\d.]+x) over the limit", "over the limit"),
        (rf"(?<![\w.]){_NUMBER}(?![\w])(?:(?:, | and |\.\.|-){_NUMBER}(?![\w]))*", "N"),
        (r"\s*\((?!N\))[^()]*\bN\b[^()]*\)", ""),
        (r"\b(first|last) (?:N KV tokens are|KV token is) missing", r"\1 N KV tokens are missing"),
        (r"\b(head|request|row|dim|replay)s N\b", r"\1 N"),
        (r"\brequest N row N\b", "request N"),
        # ``why: request 0 holds ..., request 1 holds ...``
        (r"(?<=: )(request N [^,:]+)(?:, request N [^,:]+)+(?: and so on)?$", r"\1"),
        # ``request 0 holds ..., request 1 holds ... and so on: why``
        (r"^(request N [^:]{0,400}?)(, \1)*( and so on)?(?=:)", r"\1"),
    )
)


_NAMES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), instead) for pattern, instead in (*_MADE_UP, (r"\b0x[0-9a-f]+", "N"))
)


def _without_made_up(text: str) -> str:
    for pattern, instead in _NAMES:
        text = pattern.sub(instead, text)
    return text


@lru_cache(maxsize=4096)
def without_numbers(text: str) -> str:
    """A text without what belongs to one case: its numbers, ranges and lists become ``N``, however long they are."""
    for pattern, instead in _ALIKE:
        text = pattern.sub(instead, text)
    return text

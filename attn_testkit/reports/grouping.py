"""Failures grouped by cause, so that one bug in forty case-runs is read once.

The cause of a case-run is the most telling text of its first finding, without words that belong to the case (numbers,
rows, requests) or that a compiler makes up (names of files, kernels, buffers and symbols, addresses). Case-runs of one
backend and check with equal texts are a group. For an exception, only its type and the author's line count.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..results import CaseResult, Finding, is_generated

__all__ = ["Group", "cause_lines", "group_failures", "without_numbers"]


@dataclass(frozen=True)
class Group:
    """Case-runs of one backend that failed for one cause, according to their texts."""

    backend: str
    check: str
    """Id of the first check that they fail; the status if there is no finding."""
    cause: str
    """The cause in words. Numbers that differ from case-run to case-run are ``N``."""
    results: tuple[CaseResult, ...]
    """The case-runs in the order of the results file; never empty."""


@dataclass(frozen=True)
class _Line:
    """One text of a case-run about its cause."""

    key: str
    """The part of the text that case-runs of one cause share."""
    text: str
    """The whole text."""


def group_failures(results: Iterable[CaseResult]) -> list[Group]:
    """Group failures, the largest group first. Every result is in exactly one group."""
    together: dict[tuple[str, str], list[tuple[CaseResult, tuple[_Line, ...]]]] = {}
    for result in results:
        check = result.findings[0].check if result.findings else result.status.value
        together.setdefault((result.backend, check), []).append((result, _lines(result)))
    groups = [group for key, members in together.items() for group in _split(*key, members)]
    return sorted(groups, key=lambda group: -len(group.results))


def cause_lines(groups: Sequence[Group], most: int = 10) -> list[str]:
    """Lines for a terminal, one per cause with its number of case-runs; nothing if no two case-runs share a cause."""
    if all(len(group.results) == 1 for group in groups):
        return []
    width = len(str(len(groups[0].results)))
    lines = [f"  {len(g.results):>{width}}  {g.cause} [{g.check}; {g.backend}]" for g in groups[:most]]
    more = len(groups) - most
    return ["failures by cause:", *lines, *([f"  and {more} more causes"] if more > 0 else [])]


def _split(backend: str, check: str, members: Sequence[tuple[CaseResult, tuple[_Line, ...]]]) -> Iterable[Group]:
    """Split case-runs into groups: the line that most of them share names the first group; the rest is split further.

    The first line is not enough: the first pattern of a case depends on its shapes, and one bug shows several.
    """
    rest = list(members)
    while rest:
        counts: Counter[str] = Counter()
        places: Counter[str] = Counter()
        for _, lines in rest:
            for place, key in enumerate(dict.fromkeys(line.key for line in lines)):
                counts[key] += 1
                places[key] += place
        # Of two lines that are shared equally often, the one that comes first in the texts tells more.
        key = max(counts, key=lambda each: (counts[each], -places[each]))
        mine = [(result, line.text) for result, lines in rest for line in lines if line.key == key]
        yield Group(backend, check, _in_words([text for _, text in mine]), tuple(result for result, _ in mine))
        rest = [(result, lines) for result, lines in rest if all(line.key != key for line in lines)]


def _in_words(texts: Sequence[str]) -> str:
    """The text itself if all are equal, else the most common one without what differs."""
    alike = Counter(map(without_numbers, texts))
    return texts[0] if len(set(texts)) == 1 else alike.most_common(1)[0][0]


def _lines(result: CaseResult) -> tuple[_Line, ...]:
    """The lines of a case-run about its cause, the most telling first; never empty, no key twice."""
    lines = _of_finding(result.findings[0]) if result.findings else _of_reason(result)
    return tuple({line.key: line for line in reversed(lines)}.values())[::-1]


def _of_finding(finding: Finding) -> list[_Line]:
    raised = _RAISED_AT.match(finding.where)
    if raised and not is_generated(raised["file"]):
        # An author's line that raises is one cause, in whichever phase it is reached, and whatever message a compiler
        # adds for each shape.
        kind = _PHASE.search(finding.headline)
        said = kind["kind"] if kind else without_numbers(finding.headline)
        return [_Line(f"{raised[0]} {said}", finding.headline)]
    if not _ABOUT_A_ROW.match(finding.headline):
        return [_Line(without_numbers(finding.headline), finding.headline)]
    hints = [_Line(without_numbers(line), line) for line in finding.hint.splitlines() if line]
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
    return [_Line(without_numbers(first) + (f" {frame[0]}" if frame else ""), text)]


_RAISED_AT = re.compile(r"(?P<file>\S+):\d+ in \S+?(?=:|$)", re.MULTILINE)
"""Beginning of the ``where`` of an exception, as ``checks/failures.py`` writes it: ``file.py:12 in function``."""
_FRAME = re.compile(r'File "(?P<path>(?:[^"]*/)?(?P<file>[^"/]+))", line (?P<line>\d+),? in (?P<function>\S+)')
"""A frame of the stack that Python dumps when a process dies or is ended, the innermost first."""
_OF_A_LIBRARY = re.compile(
    r"/lib/python3\.\d+/(?!(?:site|dist)-packages/)|/(?:site|dist)-packages/(?:torch|numpy|triton)/"
)
"""A frame of a library: the line that called the library tells the cause."""
_PHASE = re.compile(r"^.*? raised (?P<kind>\w+): ")
_ABOUT_A_ROW = re.compile(r"requests? \d")
"""Beginning of the headline of a wrong number: it names a request of one case, and not the cause."""

RESTATES_THE_CHECK = (
    "the graph still uses a value from capture time",
    "with zeros instead of NaN in unowned slots the result is finite",
    "as the only replay of the only bucket it is right",
    "it is right when no other mode and no eager step uses the instance",
    "data of padded rows reach real ones",
    "on a fresh instance, without graphs, the same eager step is right",
    "state of an earlier step is kept",
)
"""Beginnings of hints that every failure of a check has: they repeat why diagnosis chose that check."""

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
        # ``request 0 holds ..., request 1 holds ... and so on: why``
        (r"^(request N [^:]{0,400}?)(, \1)*( and so on)?(?=:)", r"\1"),
    )
)


@lru_cache(maxsize=4096)
def without_numbers(text: str) -> str:
    """A text without what belongs to one case: its numbers, ranges and lists become ``N``, however long they are."""
    for pattern, instead in _ALIKE:
        text = pattern.sub(instead, text)
    return text

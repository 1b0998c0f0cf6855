"""Failures grouped by cause: what one bug breaks in forty case-runs is one thing to read, not forty.

A case-run's cause is what its first finding says most tellingly, without what belongs to the case: numbers, rows,
requests, and without what a compiler makes up: names of files, kernels, buffers and symbols, addresses. Case-runs of
one backend and check that say the same are a group; of what was raised the type and the author's line count alone.
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
    """Case-runs of one backend that failed for one cause, as far as their texts tell."""

    backend: str
    check: str
    """Id of the check that they fail first; the status in words where there is no finding."""
    cause: str
    """In words. Numbers that differ from case-run to case-run are ``N``."""
    results: tuple[CaseResult, ...]
    """In the order of the record; never empty."""


@dataclass(frozen=True)
class _Line:
    """One thing that a case-run says about its cause."""

    key: str
    """What case-runs of one cause have in common."""
    text: str
    """As the case-run says it."""


def group_failures(results: Iterable[CaseResult]) -> list[Group]:
    """Groups, the largest first. Every result is in exactly one of them."""
    together: dict[tuple[str, str], list[tuple[CaseResult, tuple[_Line, ...]]]] = {}
    for result in results:
        check = result.findings[0].check if result.findings else result.status.value
        together.setdefault((result.backend, check), []).append((result, _lines(result)))
    groups = [group for key, members in together.items() for group in _split(*key, members)]
    return sorted(groups, key=lambda group: -len(group.results))


def cause_lines(groups: Sequence[Group], most: int = 10) -> list[str]:
    """For a terminal: a line each, with the number of case-runs; nothing where no two have one cause."""
    if all(len(group.results) == 1 for group in groups):
        return []
    width = len(str(len(groups[0].results)))
    lines = [f"  {len(g.results):>{width}}  {g.cause} [{g.check}; {g.backend}]" for g in groups[:most]]
    more = len(groups) - most
    return ["did not pass, by cause:", *lines, *([f"  and {more} more causes"] if more > 0 else [])]


def _split(backend: str, check: str, members: Sequence[tuple[CaseResult, tuple[_Line, ...]]]) -> Iterable[Group]:
    """The line that most case-runs share names the first group; what does not have it is split further.

    Not simply the first line: which pattern a case shows first depends on its shapes, and one bug shows several.
    """
    rest = list(members)
    while rest:
        counts: Counter[str] = Counter()
        places: Counter[str] = Counter()
        for _, lines in rest:
            for place, key in enumerate(dict.fromkeys(line.key for line in lines)):
                counts[key] += 1
                places[key] += place
        # Of two that are shared as widely, the one that stands first in the texts tells more.
        key = max(counts, key=lambda each: (counts[each], -places[each]))
        mine = [(result, line.text) for result, lines in rest for line in lines if line.key == key]
        yield Group(backend, check, _in_words([text for _, text in mine]), tuple(result for result, _ in mine))
        rest = [(result, lines) for result, lines in rest if all(line.key != key for line in lines)]


def _in_words(texts: Sequence[str]) -> str:
    """What most of them say: the text itself where it is one, else without what differs."""
    alike = Counter(map(without_numbers, texts))
    return texts[0] if len(set(texts)) == 1 else alike.most_common(1)[0][0]


def _lines(result: CaseResult) -> tuple[_Line, ...]:
    """What a case-run says about its cause, the most telling first; never empty, no key twice."""
    lines = _of_finding(result.findings[0]) if result.findings else _of_reason(result)
    return tuple({line.key: line for line in reversed(lines)}.values())[::-1]


def _of_finding(finding: Finding) -> list[_Line]:
    raised = _RAISED_AT.match(finding.where)
    if raised and not is_generated(raised["file"]):
        # One line of the author's that raises is one cause, in whichever phase it is reached, and whatever a compiler
        # says of it for each shape.
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
    # Its number is the frame's name: two lines that hang are two causes.
    return [_Line(without_numbers(first) + (f" {frame[0]}" if frame else ""), text)]


_RAISED_AT = re.compile(r"(?P<file>\S+):\d+ in \S+?(?=:|$)", re.MULTILINE)
"""Begins the ``where`` of what was raised, as ``checks/failures.py`` writes it: ``file.py:12 in function``."""
_FRAME = re.compile(r'File "(?P<path>(?:[^"]*/)?(?P<file>[^"/]+))", line (?P<line>\d+),? in (?P<function>\S+)')
"""Of a stack that Python dumps when a process dies or is given up, the innermost first."""
_OF_A_LIBRARY = re.compile(
    r"/lib/python3\.\d+/(?!(?:site|dist)-packages/)|/(?:site|dist)-packages/(?:torch|numpy|triton)/"
)
"""Somebody called it with what it died of: the caller's line tells the cause."""
_PHASE = re.compile(r"^.*? raised (?P<kind>\w+): ")
_ABOUT_A_ROW = re.compile(r"requests? \d")
"""Begins the headline of a wrong number: it names one request of one case, and no cause."""

RESTATES_THE_CHECK = (
    "the graph still uses a value from capture time",
    "with zeros instead of NaN in unowned slots the result is finite",
    "as the only replay of the only bucket it is right",
    "it is right when no other mode and no eager step uses the instance",
    "data of padded rows reach real ones",
    "on a fresh instance, without graphs, the same eager step is right",
    "something of an earlier step is kept",
)
"""Hints that every failure of a check has: what diagnosis found out to blame that check."""

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
        # What to look at follows from the case's features.
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
    """A text without what belongs to one case: its numbers, ranges and lists are ``N``, however long."""
    for pattern, instead in _ALIKE:
        text = pattern.sub(instead, text)
    return text

"""The verdict on a run: its word, its line, and the resulting exit code.

``CONFORMANT (TIER)`` is reserved for everything that a tier plans for everything that is declared. A run of a part of
it is ``PARTIAL``, whatever selected the part, and the part of one machine in a shared run is ``SHARD K/N``. Random
cases have no verdict, and their line has no word.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..registry import UsageError
from ..results.case_result import BAD, RAN, CaseResult, Status, emulated_parts
from ..results.names import EXECUTIONS, FUZZ, MODES
from ..results.remarks import not_covered_lines
from ..results.run_header import CUT, RunHeader, Selection, exit_code


@dataclass(frozen=True)
class Verdict:
    """The conclusion of a run about its backends."""

    word: str
    """``CONFORMANT (TIER)``, ``PARTIAL``, ``SHARD K/N``, ``INCOMPLETE``, ``NOT CONFORMANT`` or ``NOTHING RAN``; empty
    for random cases."""
    text: str
    code: int
    """The exit code."""

    def __str__(self) -> str:
        return f"{self.word}: {self.text}" if self.word else self.text

    @property
    def conforms(self) -> bool:
        """True if the backend conforms to everything that the tier plans."""
        return self.word.startswith("CONFORMANT")


def verdict(
    header: RunHeader, results: Iterable[CaseResult], *, problems: Sequence[str] = (), interrupted: bool = False
) -> str:
    """The verdict in one line: whether the backend conforms, how many case-runs that is based on, what was emulated."""
    return str(conclude(header, results, problems=problems, interrupted=interrupted))


def conclude(
    header: RunHeader, results: Iterable[CaseResult], *, problems: Sequence[str] = (), interrupted: bool = False
) -> Verdict:
    """The verdict on the results of a run. ``problems``: further reasons why the run fails."""
    rows = list(results) if header.tier == FUZZ else _once(results)
    shard_of = header.planned_in_all if header.selection.shard else 0
    code = exit_code(header.planned, rows, interrupted, problems, shard_of=shard_of)
    if code == 0 and (not header.selection.asked or _nothing_passes(header, rows) or _unplanned(header, rows)):
        code = 1
    word, text = _words(header, rows, problems, interrupted, code)
    shard = header.selection.shard
    if shard and not word.startswith("SHARD"):
        # The verdict on the whole run is that of `results merge`, also if a shard is red.
        return Verdict(f"SHARD {shard}", f"{word}: {text}", code)
    return Verdict(word, text, code)


def _words(
    header: RunHeader, rows: Sequence[CaseResult], problems: Sequence[str], interrupted: bool, code: int
) -> tuple[str, str]:
    runs = [row for row in rows if row.is_case_run]
    counts = Counter(run.status for run in runs)
    ran = sum(counts[status] for status in RAN)
    no_room = sum(run.had_no_room for run in runs)
    left = sum(run.left_out for run in runs)
    accounted = ran + counts[Status.QUARANTINED] + no_room + left
    of, shard = _denominator(header), bool(header.selection.shard and header.planned_in_all)
    ours = sum(run.of_the_kit for run in runs)
    counts[Status.CRASHED] -= ours
    cut = f"; {left} were not started because the budget was used up" if left else ""
    bad = [f"{counts[status]} {status}" for status in Status if status in BAD and counts[status]]
    other = [(counts[Status.KNOWN_FAILURE], "known failures"), (counts[Status.QUARANTINED], "quarantined")]
    other.append((no_room, "not run here for lack of memory"))
    besides = [f"{n} {what}" for n, what in other if n]
    if header.tier == FUZZ and runs and not ours:
        words = ", ".join([f"{counts[Status.PASSED]} passed", *bad])
        return "", f"of {len(runs)} random case-runs {words}" + ("; the search was interrupted" if interrupted else "")
    if interrupted:
        return "INCOMPLETE", f"interrupted after {ran} {of}" + (f"; {', '.join(bad)}" if bad else "")
    if ours:
        rest = ", ".join([f"{counts[Status.PASSED]} passed", *bad])
        return "INCOMPLETE", f"the kit itself failed in {ours} {of}, which says nothing about the backend; {rest}"
    if not header.planned and not runs and not shard:
        return "NOTHING RAN", _why_nothing(header, rows)
    if bad:
        missing = header.planned - accounted
        return "NOT CONFORMANT", f"{', '.join(bad)} {of}" + (f"; {missing} did not run" if missing > 0 else "") + cut
    if accounted < header.planned:
        return "INCOMPLETE", f"{ran} {of} ran"
    text = ", ".join([f"{counts[Status.PASSED]} {of} passed", *besides])
    if not counts[Status.PASSED] and not shard:
        return "NOT CONFORMANT", f"{text}; nothing is known to work{cut}"
    if places := _nothing_passes(header, rows):
        return "NOT CONFORMANT", f"{text}; nothing is known to work in {_and(places)}{cut}"
    if unplanned := _unplanned(header, rows):
        return "NOT CONFORMANT", f"{text}, but {unplanned} case-runs have a result that nobody planned{cut}"
    if problems:
        return "NOT CONFORMANT", f"{text}, but {problems[0]}{cut}"
    parts = sorted({part for run in runs for part in emulated_parts(run)})
    emulated = f"; emulated {', '.join(parts)}: no proof about hardware" if parts else ""
    emulated = "".join(f"; {phrase}" for phrase in _silent_backends(header, rows)) + emulated
    if code == CUT:
        return "INCOMPLETE", f"{text}{cut}{emulated}"
    if header.selection:
        passed = ", ".join([f"{counts[Status.PASSED]} passed", *besides]) if besides else "all passed"
        passed = passed if runs else "since this shard has none"
        lacking = sum(bool(row.case) and row.status is Status.UNSUPPORTED for row in rows)
        undeclared = f"; {lacking} selected case-runs are not declared" if lacking else ""
        return _partial(header, runs, ran, passed, undeclared + emulated)
    if untried := _named(header, header.lacking):
        return "PARTIAL", f"{text}; no case tries {untried}, which is declared{emulated}"
    return f"CONFORMANT ({header.tier})", f"{text}{_not_tried(header)}{emulated}"


MOST_NOT_TRIED = 3
"""Number of declared values without a case-run up to which a verdict names them; more are only counted."""


def _not_tried(header: RunHeader) -> str:
    """The declared values that no case of a green run tried, as a phrase of its verdict; empty if there are none."""
    count = _count_not_tried(header)
    if not count or count > MOST_NOT_TRIED:
        return f"; {count} declared values were not tried" if count else ""
    return f"; not tried: {_named(header, header.not_covered)}"


def _named(header: RunHeader, phrases: Mapping[str, Sequence[str]]) -> str:
    several = len(header.backends) > 1
    return "; ".join(f"{each} of {spec}" if several else each for spec, some in phrases.items() for each in some)


def _count_not_tried(header: RunHeader) -> int:
    return sum(map(len, header.not_covered.values()))


def not_tried_lines(header: RunHeader, concluded: Verdict, how: str) -> list[str]:
    """The lines about declared values that no case tried, which front ends print before the verdict.

    ``how``: as in ``not_covered_lines``; then there is no line if the verdict names the values.
    """
    named = how and concluded.conforms and _count_not_tried(header) <= MOST_NOT_TRIED
    return [] if named else not_covered_lines(header.not_covered, how)


def next_lines(header: RunHeader, concluded: Verdict, option: str) -> list[str]:
    """One line that names the tier after a green smoke run. ``option``: how this front end spells that tier."""
    smoke = concluded.conforms and header.tier == "smoke"
    return [f"next: {option}, which tries many more combinations of what is declared"] if smoke else []


def _once(results: Iterable[CaseResult]) -> list[CaseResult]:
    """Keep each case-run once, with its worse result: a case-run that ran twice counts once."""
    kept: dict[object, CaseResult] = {}
    for number, row in enumerate(results):
        key = (row.backend, row.mode, row.execution, row.case) if row.case and row.status in RAN else number
        if key not in kept or (row.status in BAD and kept[key].status not in BAD):
            kept[key] = row
    return list(kept.values())


def _unplanned(header: RunHeader, rows: Sequence[CaseResult]) -> int:
    """Number of results that were not planned: from another run or another plan."""
    if header.tier == FUZZ:
        return 0
    return max(0, sum(row.is_case_run and row.status in RAN | {Status.QUARANTINED} for row in rows) - header.planned)


def _silent_backends(header: RunHeader, rows: Sequence[CaseResult]) -> list[str]:
    """One phrase for each backend of which nothing ran, if there are several: the results of the others prove nothing
    about it."""
    ran = {row.backend for row in rows if row.is_case_run and row.status in RAN}
    phrases = []
    for spec in header.backends if ran else ():
        if spec not in ran:
            own = [row for row in rows if row.backend == spec]
            reasons = dict.fromkeys(row.reason for row in own if row.status is Status.NOT_RUN_HERE and row.reason)
            phrases.append(f"nothing of {spec} ran ({', '.join(reasons) or 'nothing declared or selected'})")
    return phrases


def _nothing_passes(header: RunHeader, rows: Sequence[CaseResult]) -> list[str]:
    """Modes, executions and families in which every case-run is excused, so that nothing is known to work.

    A selection of cases, or a shard, may by chance hold only excused case-runs of a mode. Case-runs that the budget
    left out may pass.
    """
    if header.selection.of_cases:
        return []
    places: dict[tuple[str, ...], list[CaseResult]] = {}
    for row in rows:
        if row.is_case_run:
            places.setdefault((row.backend, row.mode, row.execution, *_families([row])), []).append(row)
    several = len(header.backends) > 1
    return [
        " ".join(place if several else place[1:])
        for place, group in places.items()
        if any(row.status in (Status.KNOWN_FAILURE, Status.QUARANTINED) for row in group)
        if not any(row.status is Status.PASSED or row.left_out for row in group)
    ]


def _denominator(header: RunHeader) -> str:
    """Name what counts are compared with: planned case-runs, or selected ones."""
    selection = header.selection
    if not selection:
        return f"of {header.planned} planned case-runs"
    return f"of {header.planned} selected case-runs" + (f" ({selection.of} planned)" if selection.of else "")


def _partial(header: RunHeader, runs: Sequence[CaseResult], ran: int, passed: str, rest: str) -> tuple[str, str]:
    """The line of a selection in which nothing failed: which part of the tier it covers, and how it was selected."""
    selection = header.selection
    inside = max(0, ran - selection.beyond)
    parts = [f"{inside} of {selection.of} planned case-runs"] if selection.of else [f"{ran} selected case-runs"]
    if selection.of and selection.beyond:
        parts.append(f"{selection.beyond} that the tier does not plan")
    count = (
        f"{' and '.join(parts)} ran, {passed}" if not passed[0].isdigit() else f"{' and '.join(parts)} ran: {passed}"
    )
    made_of = [f"tier {header.tier}", _and(_families(runs)), _and(dict.fromkeys(run.execution for run in runs))]
    text = f"{count}; {', '.join(filter(None, made_of))}; selected by {', '.join(selection.by)}"
    if not selection.asked:
        text += ", which no argument of this command asked for"
    if selection.shard:
        count = selection.shard.partition("/")[2]
        return (
            f"SHARD {selection.shard}",
            f"{text}{rest}; `attn-testkit results merge` of all {count} shards has the verdict",
        )
    return "PARTIAL", f"{text}{rest}"


def _families(runs: Iterable[CaseResult]) -> list[str]:
    """Names of the head layouts in the ids of the cases, such as ``gqa``."""
    found = (re.match(r"([a-z]+)\d", run.case.removeprefix(f"{run.mode}-")) for run in runs)
    return list(dict.fromkeys(each[1] for each in found if each))


def _and(words: Iterable[str]) -> str:
    *first, last = [*words] or [""]
    return f"{', '.join(first)} and {last}" if first else last


def narrowed(header: RunHeader, planned: int, by: str, *, asked: bool = True, shard: str = "") -> RunHeader:
    """The header of a run that does only ``planned`` of this header's case-runs; the same header if those are all.

    ``by``: the selection in words. ``asked``: true if an argument of the caller selected it. ``shard``: ``K/N``.
    """
    if planned == header.planned:
        return header
    was = header.selection
    selection = Selection(
        (*was.by, by), was.of or (0 if was else header.planned), min(was.beyond, planned), was.asked and asked, shard
    )
    return replace(header, planned=planned, selection=selection)


MUST_AGREE = ("kit", "kit_digest", "tier", "profile", "seed", "device", "device_name", "backends", "versions")
"""Fields of a header that must be equal in runs whose case-runs are counted together."""


def refuse_another_run(name: str, header: RunHeader, other_name: str, other: RunHeader) -> None:
    """Raise ``UsageError`` if the case-runs of two runs must not be counted together; it names both values.

    ``other_name``: words before the other's value, such as ``that of b.json``.
    """
    for what in MUST_AGREE:
        ours, theirs = getattr(header, what), getattr(other, what)
        if ours != theirs:
            raise UsageError(f"{name} is from another run: its {what} is {ours!r}, {other_name} {theirs!r}")
    refuse_other_code(name, header, other_name, other)


def refuse_other_code(name: str, header: RunHeader, other_name: str, other: RunHeader) -> None:
    """Raise ``UsageError`` if a backend's files have other contents in one of two runs."""
    for spec in header.sources.keys() & other.sources.keys():
        if other_code(header.sources[spec], other.sources[spec]):
            ours, theirs = (
                f"{each['file']} ({each['code'][:12]})" for each in (header.sources[spec], other.sources[spec])
            )
            raise UsageError(
                f"{name} is from other code: {spec} was {ours} there, {other_name} {theirs}, or a module that it uses; "
                "run everything again"
            )


def other_code(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Report whether two entries of ``RunHeader.sources`` are of different code; False if one is unknown."""
    ours, theirs = one.get("code", ""), other.get("code", "")
    return bool(ours and theirs) and ours != theirs


def _why_nothing(header: RunHeader, rows: Sequence[CaseResult]) -> str:
    lacking = dict.fromkeys(row.reason for row in rows if row.case and row.status is Status.UNSUPPORTED)
    absent = [row for row in rows if row.status is Status.NOT_RUN_HERE]
    reasons = ", ".join(dict.fromkeys(row.reason for row in absent if row.reason))
    if lacking:
        beside = f"; not runnable here: {reasons}" if reasons else ""
        words = ", ".join(reason.removeprefix("not declared: ") for reason in lacking)
        return f"no backend declares what the selected cases need; not declared: {words}{beside}"
    undeclared = sum(row.status is Status.UNSUPPORTED for row in rows)
    if header.selection.of and not absent:
        named = {_mode_named(text) for text in header.selection.by}
        asked = dict.fromkeys(row.mode for row in rows if row.status is Status.UNSUPPORTED and row.mode in named)
        so = f"not declared: {', '.join(asked)}" if asked else "without it, `--collect-only` lists them"
        return f"none of {header.selection.of} planned case-runs is selected by {', '.join(header.selection.by)}; {so}"
    pairs = len(header.backends) * len(MODES) * len(EXECUTIONS)
    counts = [
        (undeclared, "not declared"),
        (len(absent), "not runnable here" + (f" ({reasons})" if reasons else "")),
        (pairs - undeclared - len(absent), "not selected"),
    ]
    return f"of {pairs} pairs of mode and execution " + ", ".join(f"{n} {why}" for n, why in counts if n > 0)


def _mode_named(selected_by: str) -> str:
    """The mode of a selection by a mode or by a case's id; empty if it names none."""
    what = selected_by.removeprefix("mode ")
    of_case = [mode for mode in MODES if selected_by.startswith(f"case '{mode}-")]
    return what if what in MODES else max(of_case, key=len, default="")

"""Lines about a whole run that are not failures: values and case-runs that were not covered, not declared, not launched
or left out."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from .case_result import CaseResult, Status
from .names import IN_MPS
from .run_header import RunHeader


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


def excluded_lines(excluded: Mapping[str, Sequence[str]]) -> list[str]:
    """Lines of ``RunHeader.excluded``, one per pair of features."""
    return [
        f"never together{f' ({spec})' if len(excluded) > 1 else ''}: {phrase}"
        for spec, phrases in excluded.items()
        for phrase in phrases
    ]


def _values(count: int) -> str:
    return f"{count} declared value{'s' if count != 1 else ''}"


def not_declared_lines(not_declared: Mapping[str, Sequence[str]]) -> list[str]:
    """Lines of ``RunHeader.not_declared``: one per backend that has any."""
    return [
        f"not declared{f' ({spec})' if len(not_declared) > 1 else ''}: {'; '.join(phrases)}"
        for spec, phrases in not_declared.items()
        if phrases
    ]


def launch_lines(header: RunHeader, results: Iterable[CaseResult]) -> list[str]:
    """One line per backend that may not have run its own kernels: some case-runs launched no kernel while others did,
    or the backend has Triton kernels and launched none at all. A backend that uses only torch has no line.
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


def repeated_lines(results: Iterable[CaseResult]) -> list[str]:
    """Lines about case-runs that were repeated, with how the first attempts ended; empty for none."""
    how = Counter(result.repeated.partition("\n")[0] for result in results if result.repeated)
    lines = []
    for why, in_mps in _REPEATED.items():
        of_these = {reason: count for reason, count in how.items() if reason.startswith(IN_MPS) == in_mps}
        if of_these:
            reasons = "; ".join(f"{count}: {reason.removeprefix(IN_MPS)}" for reason, count in of_these.items())
            lines.append(f"{why}: {reasons}")
    return lines


_REPEATED = {
    "repeated, since a process of the kit ended in the middle of them": False,
    "repeated without MPS, where a fault of one process may end those of all lanes": True,
}


def left_lines(header: RunHeader, results: Iterable[CaseResult]) -> list[str]:
    """Lines about case-runs that the budget left out, by mode and execution, and the command that runs them; empty if
    there are none."""
    left = Counter((result.mode, result.execution) for result in results if result.left_out)
    if not left:
        return []
    counts = ", ".join(f"{mode} {execution} {count}" for (mode, execution), count in left.items())
    return [f"left out by the budget: {counts}", f"the rest: {_without_budget(header.command)}"]


_OF_A_BUDGET = ("--budget", "--attn-budget", "--last", "--html")


def _without_budget(command: str) -> str:
    """The command of a run without its budget; if it kept results, a command for the missing ones."""
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

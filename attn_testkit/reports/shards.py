"""A shard of a run: one of several parts that different machines run; their results files are merged into one run."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..registry import UsageError
from ..results.case_result import CaseResult
from ..results.run_header import RunHeader, Selection
from .record import Report, read_report
from .verdict import MUST_AGREE, conclude, refuse_other_code

INDEX, COUNT = "SHARD_INDEX", "SHARD_COUNT"
"""Environment variables of a CI job that name its shard."""
MOST_SHARDS = 10_000

Key = tuple[str, str, str]
"""Backend, execution and case of a case-run."""


@dataclass(frozen=True)
class Shard:
    """Part ``number`` of ``count``, from 1."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def parse_shard(text: str, what: str = "shard") -> Shard:
    """Read ``3/8``. Raises ``UsageError``."""
    found = re.fullmatch(r"(\d{1,5})/(\d{1,5})", text)
    if found is None:
        raise UsageError(f"{what} is {text!r}; expected K/N, such as 3/8")
    number, count = map(int, found.groups())
    if not 1 <= count <= MOST_SHARDS or not 1 <= number <= count:
        first = " (the first shard is 1)" if number == 0 else ""
        raise UsageError(f"{what} is {text!r}; expected K from 1 to N{first}, and N up to {MOST_SHARDS}")
    return Shard(number, count)


def requested_shard(option: str | None, environment: Mapping[str, str]) -> Shard | None:
    """Return the shard of an option or, without one, of ``SHARD_INDEX`` and ``SHARD_COUNT``; None for the whole run.

    Raises ``UsageError``, also if only one of the two variables is set.
    """
    if option:
        return parse_shard(option)
    index, count = environment.get(INDEX, ""), environment.get(COUNT, "")
    if not index and not count:
        return None
    if not index or not count:
        given, missing = (INDEX, COUNT) if index else (COUNT, INDEX)
        raise UsageError(f"{given} is set and {missing} is not; set both, or neither to run everything")
    return parse_shard(f"{index}/{count}", f"{INDEX}/{COUNT}")


def digest_of(keys: Iterable[Key]) -> str:
    """A digest of case-runs, whatever their order."""
    digest = hashlib.blake2b(digest_size=16)
    for key in sorted(keys):
        digest.update("\0".join((*key, "\n")).encode())
    return digest.hexdigest()


def shard_selection(header: RunHeader, shard: Shard) -> Selection:
    """The selection of a shard of a run; ``_whole`` is the inverse."""
    was = header.selection
    return replace(was, by=(*was.by, f"shard {shard}"), of=was.of or (0 if was else header.planned), shard=str(shard))


def _whole(selection: Selection) -> Selection:
    """The selection of the run that a shard is a part of."""
    by = selection.by[:-1]
    return replace(selection, by=by, of=selection.of if by else 0, shard="")


_SAME = (*MUST_AGREE, "plan", "planned_in_all")
"""Fields of a header that must be equal in all shards of one run."""


def merge_reports(files: Sequence[tuple[str, Report]], *, missing: bool = False) -> Report:
    """One report of all shards of a run, from pairs of a file's name and its report.

    Raises ``UsageError`` in one line for files that do not belong together: of different versions, tiers, seeds,
    backends, devices or plans; for a shard that is given twice; and, unless ``missing``, for a missing shard.
    """
    first, one = files[0]
    shards: dict[Shard, str] = {}
    for name, report in files:
        if not report.header.selection.shard:
            raise UsageError(
                f"{name} is not a shard of a run: its command was {report.header.command!r}, without --shard"
            )
        _refuse_other_run(first, one.header, name, report.header)
        shard = parse_shard(report.header.selection.shard, f"the shard of {name}")
        if shard in shards:
            raise UsageError(f"shard {shard} is in {shards[shard]} and in {name}; give each shard once")
        shards[shard] = name
    count = next(iter(shards)).count
    if other := next((shard for shard in shards if shard.count != count), None):
        raise UsageError(f"{first} is a shard of {count} and {shards[other]} is a shard of {other.count}")
    absent = sorted(set(range(1, count + 1)) - {shard.number for shard in shards})
    if absent and not missing:
        have = ", ".join(str(shard.number) for shard in sorted(shards, key=lambda each: each.number))
        names = ", ".join(f"{number}/{count}" for number in absent)
        what = f"shards {names} are missing" if len(absent) > 1 else f"shard {names} is missing"
        raise UsageError(f"{what}: there are {have} of {count}; --missing merges what there is")
    by_number = sorted(files, key=lambda each: parse_shard(each[1].header.selection.shard).number)
    results = _joined(by_number)
    planned = sum(report.header.planned for _, report in files)
    if not absent and planned != one.header.planned_in_all:
        raise UsageError(
            f"the {count} shards have {planned} case-runs and the plan has {one.header.planned_in_all}: give all "
            "shards the same file with --durations-from, or none"
        )
    header = replace(
        one.header,
        selection=_whole(one.header.selection),
        plan="",
        planned_in_all=0,
        started=min(report.header.started for _, report in files),
        planned=one.header.planned_in_all,
        notes=_notes(report.header for _, report in files),
    )
    interrupted = any(report.interrupted for _, report in files)
    problems = tuple(dict.fromkeys(problem for _, report in files for problem in report.problems))
    return Report(
        header,
        results,
        finished=not absent and all(report.finished for _, report in files),
        interrupted=interrupted,
        exit_code=conclude(header, results, problems=problems, interrupted=interrupted).code,
        problems=problems,
    )


def _refuse_other_run(first: str, wanted: RunHeader, name: str, found: RunHeader) -> None:
    pairs = {field: (getattr(wanted, field), getattr(found, field)) for field in _SAME}
    pairs["selection"] = _whole(wanted.selection), _whole(found.selection)
    for field, (one, other) in pairs.items():
        if one == other:
            continue
        what = field.replace("_", " ")
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            key = next(key for key in {**one, **other} if one.get(key) != other.get(key))
            what, one, other = f"{what}, {key}", one.get(key, "absent"), other.get(key, "absent")
        raise UsageError(
            f"{name} is from a different run than {first}: {what} is {other!r} there and {one!r} in {first}"
        )
    refuse_other_code(name, found, f"in {first}", wanted)


def _joined(files: Sequence[tuple[str, Report]]) -> tuple[CaseResult, ...]:
    """Results of all files; rows of whole modes, which each shard has, once. Raises ``UsageError``."""
    found: dict[tuple[str, str, str, str], tuple[str, CaseResult]] = {}
    for name, report in files:
        for result in report.results:
            key = (result.backend, result.mode, result.execution, result.case)
            if key in found and result.case:
                raise UsageError(
                    f"{result.execution} {result.case} of {result.backend} is in {found[key][0]} and in {name}: give "
                    "all shards the same file with --durations-from, or none"
                )
            found.setdefault(key, (name, result))
    return tuple(result for _, result in found.values())


def _notes(headers: Iterable[RunHeader]) -> dict[str, tuple[str, ...]]:
    notes: dict[str, dict[str, None]] = {}
    for header in headers:
        for spec, texts in header.notes.items():
            notes.setdefault(spec, {}).update(dict.fromkeys(texts))
    return {spec: tuple(texts) for spec, texts in notes.items()}


def read_merged(names: Sequence[str]) -> Report:
    """Read one results file, or all shards of a run as one. Raises ``UsageError``."""
    if len(names) == 1:
        return read_report(names[0])
    return merge_reports([(name, read_report(name)) for name in names])


def read_runs(names: Sequence[str]) -> list[Report]:
    """Read results files of one or more runs: shards of one run are merged; whole runs and a single shard stay.

    Raises ``UsageError`` as ``merge_reports`` does.
    """
    files = [(name, read_report(name)) for name in names]
    shards: dict[tuple[str, str], list[tuple[str, Report]]] = {}
    for name, report in files:
        if report.header.selection.shard:
            shards.setdefault((report.header.plan, report.header.device_name), []).append((name, report))
    whole = [report for _, report in files if not report.header.selection.shard]
    return [*whole, *(merge_reports(each) if len(each) > 1 else each[0][1] for each in shards.values())]

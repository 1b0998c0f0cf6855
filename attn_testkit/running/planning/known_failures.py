"""Known failures: debts with an owner and a date, in a file that the backend's author keeps.

docs/how-to/known-failures.md documents the file. ``kind`` is one of ``KINDS``.
"""

from __future__ import annotations

import datetime
import importlib.metadata as metadata
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from ...registry import UsageError, did_you_mean
from ...reports.record import Report, read_report
from ...results.case_result import CaseResult, Status
from ...results.checks import CHECKS
from ...results.run_header import RunHeader

FORMAT = 1
"""The version of the file, its key ``version``. A file without the key has it. It grows if a reader of the old form
would misread the new one."""
MOST_DAYS = {"tolerated": 366, "quarantine": 366, "flaky": 14}
"""Kind of an entry -> most days until the date of ``until``, after which somebody has to look again. ``tolerated``: the
case-run fails. ``quarantine``: it is never launched. ``flaky``: it may fail or pass."""
KINDS = tuple(MOST_DAYS)
EXECUTIONS = ("eager", "graph")
ENDINGS = (Status.CRASHED.value, Status.TIMED_OUT.value)
"""Words that an entry may have instead of a check's id: ways in which a case-run ends without one."""
WARN_DAYS = 14


@dataclass(frozen=True)
class KnownFailure:
    """One entry of the file, for one of its globs: an entry with a list of globs makes several records with one
    number."""

    number: int
    """Place in the file, from 1."""
    cases: str
    kind: str
    checks: tuple[str, ...]
    issue: str
    until: datetime.date
    backend: str = "*"
    execution: str = ""
    when: str = ""
    crashed: frozenset[tuple[str, str, str]] = frozenset()
    """(backend, execution, case without the seed) of what crashed or timed out in the ``record`` of a quarantine."""

    @property
    def name(self) -> str:
        """Name of the entry in messages."""
        return f"known failure {self.number} (cases = {self.cases!r}, {self.issue})"

    def covers(self, backend: str, execution: str, case: str) -> bool:
        """True if the entry covers this case-run, on whatever device."""
        return (
            fnmatchcase(case, self.cases) and fnmatchcase(backend, self.backend) and self.execution in ("", execution)
        )

    def expired(self, today: datetime.date) -> bool:
        """True if its last day has passed."""
        return today > self.until

    @property
    def is_exact(self) -> bool:
        """Names one case, with no wildcard."""
        return not re.search(r"[*?\[]", self.cases)


def load_known(path: str | Path, today: datetime.date | None = None) -> tuple[KnownFailure, ...]:
    """Read the file; ``UsageError`` naming the entry and the field for anything malformed."""
    path = Path(path)
    try:
        return parse_known(path, path.read_text("utf-8"), today)
    except FileNotFoundError:
        raise UsageError(
            f"there is no file of known failures {path.absolute()}; if no failure is known, leave it out"
        ) from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not TOML: {error}") from error


def parse_known(path: str | Path, text: str, today: datetime.date | None = None) -> tuple[KnownFailure, ...]:
    """Read the text of a file; ``path`` is its name in errors. Raises as ``load_known`` does."""
    today = today or _today()
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not TOML: {error}") from error
    if data.get("version", FORMAT) != FORMAT:
        raise UsageError(f"{path} has version {data['version']!r}; this kit reads version {FORMAT}: update the kit")
    unknown = [key for key in data if key not in ("version", "known")]
    if unknown:
        raise UsageError(f"{path}: unknown table {unknown[0]!r}; entries are written [[known]]")
    entries = data.get("known", [])
    if not isinstance(entries, list):
        raise UsageError(f"{path}: entries are written [[known]], with two brackets")
    return tuple(each for number, raw in enumerate(entries, start=1) for each in _entry(path, number, raw, today))


def _today() -> datetime.date:
    return datetime.datetime.now(datetime.UTC).date()


def _entry(path: str | Path, number: int, raw: dict[str, Any], today: datetime.date) -> list[KnownFailure]:
    def refuse(what: str) -> UsageError:
        return UsageError(f"{path}, entry {number}: {what}")

    fields = ("cases", "kind", "check", "issue", "until", "backend", "execution", "when", "record")
    for key in raw:
        if key not in fields:
            raise refuse(f"unknown key {key!r}{did_you_mean(key, fields)}")
    for key in ("cases", "kind", "issue", "until"):
        if not raw.get(key):
            raise refuse(f"{key} is missing")
    globs = raw["cases"] if isinstance(raw["cases"], list) else [raw["cases"]]
    if not all(isinstance(glob, str) and glob for glob in globs):
        raise refuse("cases must be text, a glob on case ids, or a list of them")
    for key in ("kind", "issue", "backend", "execution", "when", "record"):
        if key in raw and not isinstance(raw[key], str):
            raise refuse(f"{key} must be text")
    for key, allowed in (("kind", KINDS), ("execution", EXECUTIONS)):
        if key in raw and raw[key] not in allowed:
            hint = did_you_mean(raw[key], allowed) or f" ({' or '.join(allowed)})"
            raise refuse(f"{key} = {raw[key]!r}{hint}")
    checks = _checks(raw, refuse)
    if not re.fullmatch(r"https?://[^\s/]+\.[^\s]+", raw["issue"]):
        raise refuse(f"issue = {raw['issue']!r} is not an address; write where it is followed up: https://...")
    _refuse_date(raw["until"], today + datetime.timedelta(days=MOST_DAYS[raw["kind"]]), raw["kind"], refuse)
    try:
        _conditions(raw.get("when", ""))
    except ValueError as error:
        raise refuse(f"when: {error}") from error
    crashed: frozenset[tuple[str, str, str]] = frozenset()
    if "record" in raw:
        if raw["kind"] != "quarantine":
            raise refuse(
                f'record shows the crash of what is quarantined; kind = "{raw["kind"]}" runs the case, and needs none'
            )
        try:
            crashed = _crashed(read_report(Path(path).parent / raw["record"]))
        except UsageError as error:
            raise refuse(f"record: {error}") from error
    optional = {key: raw[key] for key in ("backend", "execution", "when") if key in raw}
    return [
        KnownFailure(number, glob, raw["kind"], checks, raw["issue"], raw["until"], **optional, crashed=crashed)
        for glob in globs
    ]


def _crashed(report: Report) -> frozenset[tuple[str, str, str]]:
    """Case-runs in which the process or the device died, according to a results file."""
    return frozenset(
        (row.backend, row.execution, row.case.removesuffix(f"-s{report.header.seed}"))
        for row in report.results
        if row.status in (Status.CRASHED, Status.TIMED_OUT) and not row.of_the_kit
    )


def _refuse_date(until: object, last: datetime.date, kind: str, refuse: Callable[[str], UsageError]) -> None:
    if not isinstance(until, datetime.date) or isinstance(until, datetime.datetime):
        raise refuse(f"until must be a date without quotes, like 2027-03-31, not {until!r}")
    if until > last:
        far = "two weeks ahead, the longest time of what is flaky" if kind == "flaky" else "a year ahead"
        raise refuse(f"until = {until} is more than {far}; write {last} at the latest, and look again then")


def _checks(raw: dict[str, Any], refuse: Callable[[str], UsageError]) -> tuple[str, ...]:
    check = raw.get("check", [])
    checks = [check] if isinstance(check, str) else check
    if not isinstance(checks, list) or not all(isinstance(c, str) for c in checks):
        raise refuse("check must be a check id or a list of them")
    if raw["kind"] != "quarantine" and not checks:
        raise refuse('check is missing: name the check that may fail, or "crashed" or "timed out"')
    names = (*CHECKS, *ENDINGS)
    for name in checks:
        if name not in names:
            raise refuse(f"no check {name!r}{did_you_mean(name, names)}")
    return tuple(checks)


def _conditions(when: str) -> list[Callable[[RunHeader], bool]]:
    return [_condition(term.strip()) for term in re.split(r"\band\b", when)] if when.strip() else []


def _condition(term: str) -> Callable[[RunHeader], bool]:
    if term in ("cuda", "emulated"):
        return lambda header: header.device == term
    if re.fullmatch(r"sm\d+", term):
        return lambda header: term in header.device_name.split()
    try:
        requirement = Requirement(term)
    except InvalidRequirement:
        raise ValueError(f"{term!r} is not one of smNN, cuda, emulated, PACKAGE<version") from None
    return lambda _: _installed(requirement)


def _installed(requirement: Requirement) -> bool:
    try:
        return requirement.specifier.contains(metadata.version(requirement.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False


@dataclass
class Ledger:
    """The entries that apply in this run, and the ones that matched."""

    entries: tuple[KnownFailure, ...]
    header: RunHeader
    today: datetime.date = field(default_factory=_today)

    def __post_init__(self) -> None:
        self._active = tuple(e for e in self.entries if all(holds(self.header) for holds in _conditions(e.when)))

    def quarantined(self, backend: str, mode: str, execution: str, case: str) -> CaseResult | None:
        """The result of a case-run that must not be launched, or None. Expired entries still apply, because the device
        would die."""
        for entry in self._active:
            if entry.kind == "quarantine" and entry.covers(backend, execution, case):
                return CaseResult(backend, mode, execution, case, Status.QUARANTINED, reason=entry.issue)
        return None

    def tolerates(self, backend: str, execution: str, case: str) -> bool:
        """Report whether an entry may make a failure of this case-run a known one."""
        return any(entry.kind != "quarantine" and entry.covers(backend, execution, case) for entry in self._active)

    @staticmethod
    def undone(result: CaseResult) -> CaseResult | None:
        """The result before other known failures were applied, so that new ones can be applied; None if it is not known
        any more."""
        if result.status is Status.UNEXPECTEDLY_PASSED:
            return replace(result, status=Status.PASSED, reason="")
        if result.status is not Status.KNOWN_FAILURE:
            return result
        # A known failure without a finding was a crash or a timeout, and does not say which.
        return replace(result, status=Status.FAILED, reason="") if result.findings else None

    def judge(self, result: CaseResult) -> CaseResult:
        """The result, in which an expected failure is marked as such, and a missing expected failure as broken.
        Failures of the kit itself are not changed: entries never apply to them.
        """
        entries = [
            e
            for e in self._active
            if e.kind != "quarantine"
            and not e.expired(self.today)
            and e.covers(result.backend, result.execution, result.case)
        ]
        if not entries or not result.case or result.of_the_kit:
            return result
        issues = ", ".join(dict.fromkeys(e.issue for e in entries))
        if result.status is Status.PASSED:
            failing = [e for e in entries if e.kind == "tolerated"]
            if not failing:
                return result
            text = f"passed, though {failing[0].name} says it fails; narrow or remove the entry"
            return replace(result, status=Status.UNEXPECTEDLY_PASSED, reason=text)
        allowed = {check for e in entries for check in e.checks}
        if result.status is Status.FAILED:
            broken = {finding.check for finding in result.findings}
        elif result.status.value in ENDINGS:
            broken = {result.status.value}
        else:
            return result
        if broken and broken <= allowed:
            return replace(result, status=Status.KNOWN_FAILURE, reason=issues)
        return result

    def problems(self, runs: Iterable[tuple[str, str, str]], exists: Callable[[KnownFailure], bool]) -> list[str]:
        """Reasons why the file itself fails the run: entries past their date, and entries that match nothing.

        ``runs`` are the (backend, execution, case) of this run. A run may be narrower than the file, so for an entry
        that matches none of them ``exists`` searches all cases.
        """
        runs = list(runs)
        found = [f"{e.name} expired on {e.until}" for e in self.entries if e.expired(self.today)]
        for entry in self._active:
            if not any(fnmatchcase(spec, entry.backend) for spec in self.header.backends):
                continue
            if not any(entry.covers(*run) for run in runs) and not exists(entry):
                found.append(f"{entry.name} matches no case")
            if unshown := self._unshown(entry, runs):
                more = f" and {len(unshown) - 1} more" if len(unshown) > 1 else ""
                found.append(
                    f"{entry.name} quarantines {' '.join(unshown[0])}{more}, and no record shows that it crashes. Run "
                    'that case with --json crash.json, and write record = "crash.json"'
                )
        return found

    def _unshown(self, entry: KnownFailure, runs: Sequence[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
        """Case-runs that an entry quarantines, and that did not crash in its record."""
        end = f"-s{self.header.seed}"
        return [
            (backend, execution, case)
            for backend, execution, case in runs
            if entry.kind == "quarantine" and case and entry.covers(backend, execution, case)
            if (backend, execution, case.removesuffix(end)) not in entry.crashed
        ]

    def warnings(self) -> list[str]:
        """Entries that will expire soon."""
        soon = self.today + datetime.timedelta(days=WARN_DAYS)
        return [f"{e.name} expires on {e.until}" for e in self.entries if self.today <= e.until <= soon]

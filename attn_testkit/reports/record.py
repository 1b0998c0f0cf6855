"""The results file of a run: one JSON document that is complete and readable at every moment, even after a crash."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import IO, Any

from ..registry import UsageError
from ..results.case_result import CaseResult, Status
from ..results.finding import ErrorMap, Finding, KeyMap
from ..results.run_header import RunHeader, Selection
from .record_check import Digest, contradiction
from .verdict import conclude

FORMAT = "attn-testkit-report/1"
"""The format of a results file; its number grows if a reader of the old form would misread the new one."""


@dataclass(frozen=True)
class Report:
    """The contents of a results file."""

    header: RunHeader
    results: tuple[CaseResult, ...]
    finished: bool
    """False if the run was killed or crashed: the results are those up to that point."""
    interrupted: bool = False
    exit_code: int | None = None
    problems: tuple[str, ...] = ()
    """Reasons besides its case-runs why the run failed, such as a known failure that expired."""


def plain(value: object) -> Any:
    """Convert to dict, list, str, int, float, bool and None, which JSON and execnet can carry.

    Subclasses are converted too: execnet refuses a ``numpy.float64`` and a ``str`` enum, and xdist then loses the test.
    """
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, Iterable):
        return [plain(item) for item in value]
    return str(value)


def result_from_plain(data: Mapping[str, Any]) -> CaseResult:
    """The inverse of ``plain(asdict(result))``; ``KeyError``, ``TypeError`` or ``ValueError`` for anything else."""
    values = dict(data)
    margin = values["margin"]
    values |= {
        "status": Status(values["status"]),
        "findings": tuple(map(_finding_from_plain, values["findings"])),
        "checks": tuple(values["checks"]),
        "not_evaluated": tuple(values.get("not_evaluated", ())),  # a file of an earlier version lacks it
        "hints": tuple(values["hints"]),
        "after": tuple(values.get("after", ())),
        "margin": None if margin is None else float(margin),
    }
    return CaseResult(**values)


_OF_FAILURES = ("like", "diagnosed", "failed_mode", "printed", "memory", "repeated")
"""Fields that are written only if they are not empty, because most case-runs pass."""


def _finding_from_plain(data: Mapping[str, Any]) -> Finding:
    values = {name: value for name, value in data.items() if name != "rule"}  # it follows from the check
    for name, kind in (("errors", ErrorMap), ("keys", KeyMap)):
        if values.get(name) is not None:
            values[name] = kind(**{key: _tuples(value) for key, value in values[name].items()})
    return Finding(**values)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def cannot_write(path: Path, error: OSError) -> UsageError:
    """Make an error with the reason in one line: a directory that does not exist was probably misspelt."""
    if not path.parent.is_dir():
        return UsageError(f"cannot write {path}: there is no directory {path.parent}; create it, or fix the name")
    return UsageError(f"cannot write {path}: {error.strerror or error}")


def write_text(path: str, text: str) -> None:
    """Write a file that a command was asked to write. Raises ``UsageError`` with the reason in one line."""
    try:
        Path(path).write_text(text, "utf-8")
    except OSError as error:
        raise cannot_write(Path(path), error) from error


def refuse_unwritable(*paths: str | None) -> None:
    """Raise ``UsageError`` for a file that cannot be written, before the work whose results are written to it. An
    existing file keeps its contents until then, and a new file is empty.
    """
    for path in filter(None, paths):
        try:
            Path(path).open("ab").close()
        except OSError as error:
            raise cannot_write(Path(path), error) from error


class Record:
    """A writer of results as they come. The file is a whole JSON document after every call; ``finished`` marks the end.

    Raises ``UsageError`` if the file cannot be opened. If it cannot be written any more, as on a full disk, its
    contents up to the last result that fitted remain, ``failure`` has the reason, and nothing is raised.
    """

    def __init__(self, path: str | Path, header: RunHeader) -> None:
        self._path, self._header = Path(path), header
        self._results: list[CaseResult] = []
        self._counts: Counter[str] = Counter()
        self._written = 0
        self._tail, self._end = b"", 0
        self.failure = ""
        """The reason why the file lacks the last results; empty while it is complete."""
        try:
            # Unbuffered: data that does not fit must not be written again when the file is closed.
            self._file: IO[bytes] = self._path.open("wb", buffering=0)
        except OSError as error:
            raise cannot_write(self._path, error) from error
        head = json.dumps({"format": FORMAT, "header": plain(asdict(header))}, indent=1)
        self._digest = Digest(plain(asdict(header)))
        self._append(head[:-2].encode() + b',\n "results": [')

    def add(self, result: CaseResult) -> None:
        """Write one result."""
        self._results.append(result)
        if result.case:
            self._counts[result.status.value] += 1
        values = {name: value for name, value in plain(asdict(result)).items() if value or name not in _OF_FAILURES}
        text = json.dumps(values, separators=(",", ":"))
        self._digest.add(values)
        self._append((b",\n  " if self._written else b"\n  ") + text.encode())
        self._written += not self.failure

    def finish(self, exit_code: int, *, interrupted: bool = False, problems: Iterable[str] = ()) -> None:
        """Record how the run ended, and close the file."""
        found = conclude(self._header, self._results, problems=[*problems], interrupted=interrupted)
        self._append(
            b"",
            finished=not interrupted,
            interrupted=interrupted,
            exit_code=exit_code,
            problems=problems,
            verdict=str(found),
        )
        self._file.close()

    def close(self) -> None:
        """Close the file of a run that broke off."""
        self._file.close()

    def _append(
        self,
        body: bytes,
        *,
        finished: bool = False,
        interrupted: bool = False,
        exit_code: int | None = None,
        problems: Iterable[str] = (),
        verdict: str | None = None,
    ) -> None:
        # The tail is written with every result and overwritten by the next, so that the document can be read whatever
        # ends the run.
        if self.failure:
            return
        end: dict[str, Any] = {
            "counts": dict(sorted(self._counts.items())),
            "problems": list(problems),
            "interrupted": interrupted,
            "exit_code": exit_code,
            "finished": finished,
            "verdict": verdict,
        }
        end["digest"] = self._digest.with_end(end)
        tail = b"\n ],\n " + json.dumps(end)[1:].encode() + b"\n"
        try:
            self._put(body + tail)
        except OSError as error:
            self.failure = f"{self._path} lacks what came after {self._written} results: {error.strerror or error}"
            with contextlib.suppress(OSError):
                # There was room for the tail before.
                self._put(self._tail)
            return
        self._tail, self._end = tail, self._end + len(body)

    def _put(self, data: bytes) -> None:
        """Replace the last tail of the file by ``data``."""
        self._file.seek(self._end)
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        self._file.truncate()


def write_report(name: str, report: Report) -> str:
    """Write a results file at once; returns the reason why it is incomplete, or nothing. Raises ``UsageError``."""
    record = Record(name, report.header)
    for result in report.results:
        record.add(result)
    if report.finished or report.interrupted:
        record.finish(report.exit_code or 0, interrupted=report.interrupted, problems=report.problems)
    else:
        record.close()
    return record.failure


_EXPECTED = "expected a results file, which `attn-testkit run --json FILE` writes"


def read_report(path: str | Path) -> Report:
    """Read a results file; raises ``UsageError`` with one line for another file, or for one that contradicts itself."""
    path = Path(path)
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}; {_EXPECTED}") from error
    found = data.get("format") if isinstance(data, dict) else None
    if found != FORMAT:
        what = f"has format {found!r}" if found else "is not a results file of attn-testkit"
        raise UsageError(f"{path} {what}; this kit reads {FORMAT}; {_EXPECTED}")
    try:
        header = _header_from_plain(data["header"])
        results = tuple(result_from_plain(item) for item in data["results"])
        wrong = contradiction(data, header, results)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if wrong:
        raise UsageError(f"{path} {wrong}. Run the kit again; results files are not edited")
    return Report(
        header, results, data["finished"], data["interrupted"], data["exit_code"], tuple(data.get("problems", ()))
    )


def _header_from_plain(data: Mapping[str, Any]) -> RunHeader:
    values = dict(data)
    selection = {**values.get("selection", {})}
    values |= {
        "limits": tuple(values["limits"]),
        "not_covered": {spec: tuple(phrases) for spec, phrases in values.get("not_covered", {}).items()},
        "lacking": {spec: tuple(phrases) for spec, phrases in values.get("lacking", {}).items()},
        "excluded": {spec: tuple(phrases) for spec, phrases in values.get("excluded", {}).items()},
        "notes": {spec: tuple(texts) for spec, texts in values.get("notes", {}).items()},
        "not_declared": {spec: tuple(texts) for spec, texts in values.get("not_declared", {}).items()},
        "selection": Selection(**{**selection, "by": tuple(selection.get("by", ()))}),
    }
    return RunHeader(**values)


def schema() -> dict[str, Any]:
    """The JSON Schema of a results file, shipped next to this module."""
    loaded: dict[str, Any] = json.loads(Path(__file__).with_name("report.schema.json").read_text("utf-8"))
    return loaded

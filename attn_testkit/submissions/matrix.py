"""The matrix of a folder of submissions, as one static page: devices, backends, and cells of mode and family."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jinja2
from markupsafe import Markup

from ..registry import UsageError
from ..results.case_result import BAD, CaseResult, Status
from ..results.failure_text import repro_command
from ..results.names import MODES
from ..results.rules import VERSION
from ..results.run_header import RunHeader
from .archive import Submission, read_submission
from .referee import refusals
from .standing import FAILING, KNOWN_FAILURES, NOT_DECLARED, standing

__all__ = ["matrix_page", "read_folder"]

MOST_FAILURES = 5
"""Number of failing case-runs of a cell that the page shows; the results file has all."""


@dataclass(frozen=True)
class Cell:
    """The case-runs of one mode and family of layers."""

    mode: str
    family: str
    rows: tuple[tuple[CaseResult, RunHeader], ...]
    """Each case-run with the header of its submission."""

    @property
    def standing(self) -> str:
        """One of the four words of ``standing``."""
        return standing(row for row, _ in self.rows)

    @property
    def passed(self) -> int:
        """Number of case-runs that passed."""
        return sum(row.status is Status.PASSED for row, _ in self.rows)

    @property
    def ran(self) -> int:
        """Number of declared case-runs."""
        return sum(row.is_case_run for row, _ in self.rows)

    @property
    def failures(self) -> list[tuple[CaseResult, RunHeader]]:
        """The first failing case-runs, each with the header of its submission."""
        return [each for each in self.rows if each[0].status in BAD][:MOST_FAILURES]

    @property
    def issues(self) -> list[str]:
        """Issues of its known failures."""
        known = (Status.KNOWN_FAILURE, Status.QUARANTINED)
        found = [issue for row, _ in self.rows if row.status in known for issue in row.reason.split(", ")]
        return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Entry:
    """One backend on one device."""

    newest: tuple[Submission, ...]
    """The newest submission of each profile, in the order of their names."""
    earlier: tuple[Submission, ...]

    @cached_property
    def cells(self) -> Mapping[tuple[str, str], Cell]:
        """(family, mode) -> cell of its declared case-runs, of the newest submissions."""
        rows: dict[tuple[str, str], list[tuple[CaseResult, RunHeader]]] = {}
        for each in self.newest:
            for row in each.report.results:
                if row.is_case_run:
                    rows.setdefault((_family_of(row), row.mode), []).append((row, each.header))
        return {place: Cell(place[1], place[0], tuple(found)) for place, found in rows.items()}

    @property
    def families(self) -> list[str]:
        """Families of the cells, in the order of the results."""
        return list(dict.fromkeys(family for family, _ in self.cells))

    @property
    def modes(self) -> list[str]:
        """Modes of the cells."""
        return [mode for mode in MODES if any(mode == of for _, of in self.cells)]

    @property
    def runs(self) -> Mapping[tuple[str, str], list[str]]:
        """(standing, date and versions) -> profiles of the newest submissions."""
        found: dict[tuple[str, str], list[str]] = {}
        for each in self.newest:
            found.setdefault((standing(each.report.results), _facts(each)), []).append(each.header.tier)
        return found

    @property
    def declared(self) -> list[str]:
        """Declared features of the newest submissions; equal ones once."""
        return list(dict.fromkeys(each.header.declared[each.backend] for each in self.newest if each.header.declared))

    @property
    def explained(self) -> list[Cell]:
        """Cells with something to explain below the table."""
        return [cell for cell in self.cells.values() if cell.standing in (FAILING, KNOWN_FAILURES)]


@dataclass(frozen=True)
class Device:
    """One device, real or emulated, with what ran on it."""

    name: str
    real: bool
    entries: tuple[Entry, ...]


def _facts(found: Submission) -> str:
    """Date and versions of a run, in one line."""
    header = found.header
    versions = {"version": header.backends[found.backend], "attn-testkit": header.kit, **header.versions}
    named = [f"{name} {version}" for name, version in versions.items() if name != "python"]
    return " · ".join([header.started[:10], *named])


def _family_of(row: CaseResult) -> str:
    """Head layout of a case, as its id names it; of selected keys and of ranks, too."""
    found = re.match(r"([a-z]+)\d", row.case.removeprefix(f"{row.mode}-"))
    return (found[1] if found else "other") + "".join(name for name, part in _PARTS if re.search(part, row.case))


_PARTS = ((", selected keys", r"-sel\d"), (", ranks", r"-ranks\d"))
"""Addition to the family's name -> what the case id says then."""


def read_folder(folder: str | Path) -> tuple[list[Submission], list[str]]:
    """The submissions in a folder, and reasons why others were left out. Raises ``UsageError`` for a folder without an
    archive."""
    paths = sorted(Path(folder).glob("*.zip"))
    if not paths:
        raise UsageError(f"{folder} has no submission; expected archives *.zip, which `attn-testkit submit` writes")
    found, left = [], []
    for path in paths:
        try:
            submission = read_submission(path)
        except UsageError as error:
            left.append(str(error))
            continue
        if reasons := refusals(submission, in_the_past=True):
            left.append(f"{path.name}: {reasons[0]}")
        else:
            found.append(submission)
    return found, left


def _devices(found: Iterable[Submission]) -> list[Device]:
    """Devices, the real ones first; the submissions of one backend on one device are one entry."""
    groups: dict[tuple[bool, str], dict[str, list[Submission]]] = {}
    for each in sorted(found, key=lambda each: each.header.started, reverse=True):
        groups.setdefault((not each.on_hardware, each.header.device_name), {}).setdefault(each.backend, []).append(each)
    return [
        Device(name, not emulated, tuple(_entry(each) for _, each in sorted(of.items())))
        for (emulated, name), of in sorted(groups.items())
    ]


def _entry(found: Sequence[Submission]) -> Entry:
    """The entry of a backend's submissions, the newest first."""
    newest: dict[str, Submission] = {}
    earlier = [each for each in found if newest.setdefault(each.header.tier, each) is not each]
    return Entry(tuple(newest[name] for name in sorted(newest)), tuple(earlier))


def matrix_page(found: Sequence[Submission], left_out: Sequence[str] = ()) -> str:
    """Render the page. ``left_out``: reasons why other archives are not on it."""
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(
            [jinja2.PackageLoader("attn_testkit.submissions", "."), jinja2.PackageLoader("attn_testkit.reports", ".")]
        ),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = lambda name: Markup("<wbr>").join(re.split(r"(?<=[.:_])", name))
    return environment.get_template("matrix.html.j2").render(
        devices=_devices(found),
        left_out=left_out,
        contract=VERSION,
        standing=standing,
        facts=_facts,
        repro=repro_command,
        not_declared=NOT_DECLARED,
        symbols={"conformant": "✓", "known failures": "!", "failing": "✗", "not declared": "·"},
    )

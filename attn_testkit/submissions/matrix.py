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
    rows: tuple[CaseResult, ...]

    @property
    def standing(self) -> str:
        """One of the four words of ``standing``."""
        return standing(self.rows)

    @property
    def passed(self) -> int:
        """Number of case-runs that passed."""
        return sum(row.status is Status.PASSED for row in self.rows)

    @property
    def ran(self) -> int:
        """Number of declared case-runs."""
        return sum(row.is_case_run for row in self.rows)

    @property
    def failures(self) -> list[CaseResult]:
        """The first failing case-runs."""
        return [row for row in self.rows if row.status in BAD][:MOST_FAILURES]

    @property
    def issues(self) -> list[str]:
        """Issues of its known failures."""
        known = (Status.KNOWN_FAILURE, Status.QUARANTINED)
        found = [issue for row in self.rows if row.status in known for issue in row.reason.split(", ")]
        return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Entry:
    """One backend on one device, with one profile."""

    newest: Submission
    earlier: tuple[Submission, ...]

    @cached_property
    def cells(self) -> Mapping[tuple[str, str], Cell]:
        """(family, mode) -> cell, of the newest submission."""
        rows: dict[tuple[str, str], list[CaseResult]] = {}
        for row in self.newest.report.results:
            if row.case:
                rows.setdefault((_family_of(row), row.mode), []).append(row)
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
    def explained(self) -> list[Cell]:
        """Cells with something to explain below the table."""
        return [cell for cell in self.cells.values() if cell.standing in (FAILING, KNOWN_FAILURES)]


@dataclass(frozen=True)
class Device:
    """One device, real or emulated, with what ran on it."""

    name: str
    real: bool
    entries: tuple[Entry, ...]


def _family_of(row: CaseResult) -> str:
    """Head layout of a case, as its id names it; of selected keys, too."""
    found = re.match(r"([a-z]+)\d", row.case.removeprefix(f"{row.mode}-"))
    return (found[1] if found else "other") + (", selected keys" if re.search(r"-sel\d", row.case) else "")


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
    """Devices, the real ones first; submissions of one backend, device and profile are one entry."""
    groups: dict[tuple[bool, str], dict[tuple[str, str], list[Submission]]] = {}
    for each in sorted(found, key=lambda each: each.header.started, reverse=True):
        place = (not each.on_hardware, each.header.device_name)
        groups.setdefault(place, {}).setdefault((each.backend, each.header.tier), []).append(each)
    return [
        Device(name, not emulated, tuple(Entry(newest, tuple(rest)) for _, (newest, *rest) in sorted(of.items())))
        for (emulated, name), of in sorted(groups.items())
    ]


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
        repro=repro_command,
        not_declared=NOT_DECLARED,
        symbols={"conformant": "✓", "known failures": "!", "failing": "✗", "not declared": "·"},
    )

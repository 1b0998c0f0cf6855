"""Views of an audit, on a terminal and as a page, and the list of what it runs."""

from __future__ import annotations

import textwrap

import jinja2

from attn_testkit.results.checks import CHECKS

from ..faults import all_controls, all_faults
from ..faults.catalogue import CLASSES, entry_of
from .verdicts import Audit, ControlVerdict, FaultVerdict


def audit_text(audit: Audit, *, verbose: bool = False) -> str:
    """Text of an audit: survivors and false alarms, then the kill matrix, then each check's share."""
    lines: list[str] = []
    for verdict in audit.survivors:
        why = verdict.not_run and f"not run: {verdict.not_run}"
        lines.append(f"SURVIVED  {verdict.slug}  {why or f'{verdict.case_runs} case-runs, {verdict.seconds:.1f} s'}")
    for alarm in audit.alarms:
        lines.append(f"FALSE ALARM  {alarm.name} {alarm.mode} {alarm.execution}: {alarm.alarms} of {alarm.case_runs}")
        lines += [f"  {line}" for line in alarm.texts[0].splitlines()]
    for found in audit.adversarial:
        if found.green:
            lines.append(f"GREEN  {found.slug}: an adversarial backend that passes")
        elif not found.proves:
            lines.append(f"FALSE ALARM  {found.slug} without its cheat: {found.honest_ending}")
    unexpected = [verdict for verdict in audit.faults if verdict.caught and not verdict.as_expected]
    for verdict in unexpected:
        lines.append(
            f"OTHERWISE  {verdict.slug}: caught by {', '.join(verdict.caught_by)}, not by {', '.join(verdict.expected)}"
        )
    lines += ["", *_matrix(audit), "", *_check_table(audit), "", *_adversarial_table(audit), ""]
    if verbose:
        lines += [line for verdict in audit.faults if verdict.text for line in (verdict.text, "")]
    lines.append(verdict_line(audit))
    return "\n".join(lines).lstrip("\n")


def verdict_line(audit: Audit) -> str:
    """Summary of the audit in a line."""
    caught = sum(verdict.caught for verdict in audit.faults)
    case_runs = sum(v.case_runs for v in audit.faults) + sum(v.case_runs for v in audit.controls)
    alarms = sum(verdict.alarms for verdict in audit.controls)
    refused = sum(not verdict.green for verdict in audit.adversarial)
    idle, controls = audit.idle_checks, {verdict.name for verdict in audit.controls}
    parts = [
        *([f"{caught} of {len(audit.faults)} faults caught"] if audit.faults else []),
        *([f"{alarms} false alarms in {len(controls)} healthy controls"] if controls else []),
        *([f"adversarial backends: {refused} of {len(audit.adversarial)} failed"] if audit.adversarial else []),
        *([f"checks that catch nothing that others do not: {', '.join(idle)}"] if idle else []),
        f"{case_runs} case-runs in {audit.seconds:.0f} s",
        f"tier {audit.settings.tier}, seed {audit.settings.seed}",
        audit.device,
    ]
    return ("GOOD: " if audit.exit_code == 0 else "NOT GOOD: ") + "; ".join(parts)


def _columns(audit: Audit) -> list[str]:
    """Columns of the kill matrix: all checks. In a partial audit: those that caught a fault or were expected to."""
    used = {check for verdict in audit.faults for check in verdict.caught_by}
    asked = {check for v in audit.faults for check in v.expected} if audit.settings.partial else set(CHECKS)
    return [check for check in (*CHECKS, "crashed", "timed out") if check in asked | used]


def _matrix(audit: Audit) -> list[str]:
    if not audit.faults:
        return []
    columns, wide = _columns(audit), max(len(verdict.slug) for verdict in audit.faults)
    numbers = " ".join(f"{i:>2}" for i in range(1, len(columns) + 1))
    lines = [f"  {'':<{wide}}  {numbers}  runs   s  first caught by"]
    for verdict in audit.faults:
        cells = " ".join(f"{_cell(verdict, check):>2}" for check in columns)
        place = f"{verdict.case} ({verdict.execution})" if verdict.case else verdict.first or "SURVIVED"
        cost = f"{verdict.case_runs:>4} {verdict.seconds:>3.0f}"
        lines.append(f"{verdict.bug_class} {verdict.slug:<{wide}}  {cells}  {cost}  {place}")
    return lines


def _cell(verdict: FaultVerdict, check: str) -> str:
    if check == verdict.first:
        return "#"
    return "+" if check in verdict.caught_by else "·"


def _check_table(audit: Audit) -> list[str]:
    if not audit.faults:
        return []
    first, alone = audit.first_catches, audit.caught_alone
    lines = ["   #  check                  first    of those only it"]
    for number, check in enumerate(_columns(audit), start=1):
        lines.append(f"  {number:>2}  {check:<22} {first.get(check, 0):>5}  {alone.get(check, 0):>5}")
    return lines


def _adversarial_table(audit: Audit) -> list[str]:
    if not audit.adversarial:
        return []
    wide = max(len(verdict.slug) for verdict in audit.adversarial)
    refused = sum(not verdict.green for verdict in audit.adversarial)
    honest = sum(verdict.honest_exit_code == 0 for verdict in audit.adversarial)
    many = len(audit.adversarial)
    lines = [f"adversarial backends: {refused} of {many} failed; {honest} of {many} pass without the cheat"]
    for verdict in audit.adversarial:
        ending = textwrap.shorten(verdict.ending, _ENDING, placeholder=" ...")
        lines.append(f"  {verdict.slug:<{wide}}  exit code {verdict.exit_code}  {ending}")
    return lines


_ENDING = 110
"""Columns for the ending of an adversarial backend; the record has all of it."""


def _template(name: str, *, autoescape: bool) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(
            [jinja2.PackageLoader("attn_testkit_corpus.audit", "."), jinja2.PackageLoader("attn_testkit.reports", ".")]
        ),
        autoescape=autoescape,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def audit_page(audit: Audit) -> str:
    """The kill matrix as an HTML page that needs nothing else."""
    groups = [
        (letter, words, [(verdict, entry_of(verdict.slug)) for verdict in audit.faults if verdict.bug_class == letter])
        for letter, words in {**CLASSES, "": "field bugs"}.items()
    ]
    controls: dict[str, list[ControlVerdict]] = {}
    for verdict in audit.controls:
        controls.setdefault(verdict.name, []).append(verdict)
    return _template("audit.html.j2", autoescape=True).render(
        audit=audit,
        columns=_columns(audit),
        first=audit.first_catches,
        alone=audit.caught_alone,
        groups=[group for group in groups if group[2]],
        controls=controls,
        entries={name: entry_of(name) for name in controls},
        checks=CHECKS,
        partial=audit.settings.partial,
        line=verdict_line(audit),
    )


def list_text() -> str:
    """Broken and known-good backends, one per line: class of bug, name, the check that must catch it, what it does."""
    faults, controls = all_faults(), all_controls()
    wide = max(len(entry.slug) for entry in (*faults, *controls))
    check = max(len(fault.checks[0]) for fault in faults)
    lines = []
    for fault in faults:
        scaled = f" (scaled down: {fault.modelled})" if fault.modelled else ""
        lines.append(f"{fault.bug_class} {fault.slug:<{wide}}  {fault.checks[0]:<{check}}  {fault.about}{scaled}")
    lines += [f"  {control.slug:<{wide}}  {'must pass':<{check}}  {control.about}" for control in controls]
    lines += ["", *(f"{letter}  {words}" for letter, words in CLASSES.items())]
    lines.append(f"{len(faults)} broken backends, {len(controls)} known-good ones")
    return "\n".join(lines)

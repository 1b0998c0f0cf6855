"""``explain``: describe a check, a rule or a word, or decode a case id."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

import click

from ..cases.explained import all_entries, entry_of
from ..registry import UsageError, did_you_mean
from ..results.checks import CHECKS
from ..results.names import MODES
from ..results.rules import RULES, Rule, rule_of

if TYPE_CHECKING:
    from ..cases.case import Case

_LEAST_HYPHENS = 5
"""Fewest hyphens in a text that is read as a case id although no mode leads it; no check and no word has as many."""


@click.command(
    short_help="Describe a check, a rule or a word, or decode a case id.",
    epilog="""\b
Examples:
  attn-testkit explain
  attn-testkit explain replay-follows-batch
  attn-testkit explain AB-GRAPH-002
  attn-testkit explain bucket
  attn-testkit explain --list
  attn-testkit explain decode-gqa4x2-d64-bf16-p16-k33-shuffled-gauss-b1prod
  attn-testkit explain CASE --limit --at 'layer 0, request 1 row 0, head 0, dim 0'""",
)
@click.argument("what", nargs=-1, metavar="[CHECK|RULE|WORD|CASE]")
@click.option("--list", "show_words", is_flag=True, help="List every word of the glossary.")
@click.option("--limit", is_flag=True, help="Show how the limit of an element of a case is computed.")
@click.option("--at", metavar="ELEMENT", help="The element of --limit, as `where` names it; default: the first.")
@click.option("--step", type=click.IntRange(0), metavar="N", help="The step of --limit; default: 0, the first.")
def explain(what: tuple[str, ...], show_words: bool, limit: bool, at: str | None, step: int | None) -> int:
    """Describe a check and what usually breaks it, a rule of the contract, or a word of case ids, failures and
    tables, or decode a case id.

    Without an argument, every check is listed in one line.
    """
    name = " ".join(what)
    if (at is not None or step is not None) and not limit:
        raise UsageError("--at and --step name an element of --limit; add --limit")
    if limit:
        _explain_limit(name, at or "0 0 0 0 0", step or 0)
        return 0
    if show_words:
        if name:
            raise UsageError(f"--list lists every word; leave out {name!r}, or leave out --list")
        _list_words()
    elif not name or name in CHECKS:
        _explain_check(name)
    elif rule := _RULES.get(name.upper()):
        _explain_rule(rule)
    elif entry := entry_of(name):
        click.secho(entry.word, bold=True)
        for label, text in (("meaning", entry.text), ("also", ", ".join(entry.also)), ("page", f"docs/{entry.page}")):
            if text:
                click.echo(f"  {label:<8} {text}")
    else:
        _explain_case(name)
    return 0


def _list_words() -> None:
    group = ""
    for entry in all_entries():
        if entry.group != group:
            click.secho(("\n" if group else "") + entry.group, bold=True)
            group = entry.group
        click.echo(f"  {', '.join((entry.word, *entry.also))}")


def _explain_check(name: str) -> None:
    if not name:
        width = max(map(len, CHECKS))
        for check in CHECKS.values():
            click.echo(f"{click.style(check.id.ljust(width), bold=True)}  {check.text}")
        return
    check = CHECKS[name]
    click.secho(check.id, bold=True)
    rows = [("rule", rule_of(name)), ("check", check.text)]
    rows += [("cause", check.cause), ("source", check.source), ("reading", check.how_to_read)]
    entry = entry_of(name)
    for label, text in [*rows, *([("word", entry.text)] if entry else [])]:
        click.echo(f"  {label:<8} {text}")


_RULES = {rule.id: rule for rule in RULES}


def _explain_rule(rule: Rule) -> None:
    click.secho(f"{rule.id} ({rule.level})", bold=True)
    for label, text in (("rule", rule.text), *rule.facts):
        click.echo(f"  {label:<8} {text}")


def _explain_case(name: str) -> None:
    case = _case(name)
    from .explain_case import explain_case  # imports torch

    explain_case(case)


def _explain_limit(name: str, at: str, step: int) -> None:
    case = _case(name)
    from .explain_limit import explain_limit

    explain_limit(case, at, step)


def _case(name: str) -> Case:
    """Parse a case id."""
    if name.count("-") < _LEAST_HYPHENS and not name.startswith(tuple(f"{mode}-" for mode in MODES)):
        near = _near(name) or "; attn-testkit explain --list lists every word"
        raise UsageError(f"no check, word or case id {name!r}{near}")
    from ..cases.case import parse_case

    try:
        return parse_case(name)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _near(name: str) -> str:
    """The word that was probably meant, and up to two similar ones."""
    words = [*CHECKS, *_RULES, *(word for entry in all_entries() for word in (entry.word, *entry.also))]
    first = did_you_mean(name, words)
    others = [word for word in difflib.get_close_matches(name, words, n=3, cutoff=0.7) if repr(word) not in first]
    return first + (f" Also near: {', '.join(others)}" if first and others else "")

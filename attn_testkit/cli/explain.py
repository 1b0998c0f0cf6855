"""``explain``: what a check means, or what a case is."""

from __future__ import annotations

import click

from ..registry import UsageError, did_you_mean

__all__ = ["explain"]


@click.command(
    short_help="Say what a check or a case is.",
    epilog="""\b
Examples:
  attn-testkit explain
  attn-testkit explain replay-follows-batch
  attn-testkit explain decode-gqa4x2-d64-bf16-p16-k33-shuffled-gauss-b1prod""",
)
@click.argument("what", required=False, metavar="[CHECK|CASE]")
def explain(what: str | None) -> int:
    """Say what a check means and what usually breaks it, or what a case id stands for.

    Without an argument: every check in one line.
    """
    from ..checks import CHECKS

    if what is None:
        width = max(map(len, CHECKS))
        for check in CHECKS.values():
            click.echo(f"{click.style(check.id.ljust(width), bold=True)}  {check.text}")
        return 0
    if what in CHECKS:
        check = CHECKS[what]
        click.secho(check.id, bold=True)
        rows = (("check", check.text), ("cause", check.cause), ("source", check.source), ("reading", check.how_to_read))
        for name, text in rows:
            click.echo(f"  {name:<8} {text}")
        return 0
    return _explain_case(what, tuple(CHECKS))


def _explain_case(what: str, checks: tuple[str, ...]) -> int:
    from ..cases.case import parse_case
    from .explain_case import explain_case

    hint = did_you_mean(what, checks)
    try:
        case = parse_case(what)
    except ValueError as error:
        raise UsageError(f"no check {what!r}{hint}" if hint else str(error)) from error
    explain_case(case)
    return 0

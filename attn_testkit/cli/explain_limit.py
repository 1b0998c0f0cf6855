"""The limit of one element of a case, term by term, for ``explain --limit``."""

from __future__ import annotations

import re

import click

from ..cases.case import Case, parse_case
from ..families.softmax.family import SOFTMAX
from ..families.softmax.limit_terms import limit_terms
from ..families.table import family_of
from ..registry import UsageError
from ..results.case_result import CaseResult
from ..steps.schedule import make_schedule


def has_limit_terms(case: Case) -> bool:
    """Return whether the limits of a case can be split into terms."""
    return family_of(case) is SOFTMAX


def explain_limit_of(result: CaseResult) -> None:
    """Print the limit of the element that a failure names in ``where``, if there is one."""
    case = parse_case(result.case)
    pairs = ((finding, _WHERE.search(finding.where)) for finding in result.findings)
    finding, found = next((pair for pair in pairs if pair[1]), (None, None))
    if finding is None or found is None or not has_limit_terms(case):
        click.echo("no limit: the failure names no element of the output of a softmax layer")
        return
    layer, request, row, head, dim, limit = found.groups()
    replay = re.match(r"replay (\d+) of", finding.step)
    if finding.step and not replay:
        click.echo(f"no terms of the limit: the element is of a step that --limit does not have: {finding.step}")
        return
    steps = make_schedule(case).steps
    before = steps[: int(replay[1]) - 1] if replay else ()
    step = sum(bool(each.requests) for each in before)
    total = explain_limit(case, f"{int(layer) - case.layers.first} {request} {row or 0} {head} {dim}", step)
    if abs(total - float(limit)) > _ROUNDED * total:
        click.echo(f"  {'declared':<14} {float(limit):>10.4g}  the limit of this backend, which declares its numerics")


_WHERE = re.compile(
    r"out\[layer (\d+)[^,]*, request (\d+)(?: row (\d+))?, head (\d+), dim (\d+)\] = .*\(limit ([^)]+)\)"
)
"""Element of the output that was compared with its limit, as `where` names it, and the limit."""
_ROUNDED = 0.001
"""Relative error of a limit in print, because of rounded digits."""


def explain_limit(case: Case, at: str, step: int) -> float:
    """Print how the limit of an element is computed: the answer, each term with its reason, and their sum.

    ``at``: layer, request, row, head and dim of the element, five numbers, with any words in between. Returns the sum.
    Raises ``UsageError`` for an element or a step that the case does not have, and if its layers are not softmax
    attention.
    """
    if not has_limit_terms(case):
        raise UsageError("--limit explains limits of softmax attention, and the layers of this case are others")
    place = [int(number) for number in re.findall(r"\d+", at)]
    if len(place) != 5:
        raise UsageError(f"--at {at!r}: write layer, request, row, head and dim, such as --at 0,1,0,0,0")
    schedule = make_schedule(case)
    steps = [each for each in schedule.steps if each.requests]
    if step >= len(steps):
        raise UsageError(f"--step {step}: the case has steps 0 to {len(steps) - 1}")
    data = family_of(case).data(schedule, steps[step], None)
    layer, request, row, head, dim = place
    out, terms = limit_terms(schedule, data)
    rows = (data.row_request == request).nonzero().flatten().tolist()
    layers, _, heads, dims = out.shape
    if row >= len(rows) or layer >= layers or head >= heads or dim >= dims:
        raise UsageError(f"--at {at!r}: step {step} of this case has no such element")
    index = layer, int(rows[row]), head, dim
    element = f"out[layer {layer}, request {request} row {row}, head {head}, dim {dim}]"
    click.secho(f"{element}, {steps[step].name}", bold=True)
    click.echo(f"  {'answer':<14} {float(out[index]):>10.4g}  float64 attention")
    for term in terms:
        if float(term.value[index]) > 0:
            click.echo(f"  {term.name:<14} {float(term.value[index]):>10.4g}  {term.about}")
    total = float(sum(term.value[index] for term in terms))
    click.echo(f"  {'limit':<14} {total:>10.4g}  the sum of the terms")
    return total

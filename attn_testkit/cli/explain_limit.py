"""The limit of one element of a case, term by term, for ``explain --limit``."""

from __future__ import annotations

import re

import click

from ..cases.case import Case
from ..families.softmax.family import SOFTMAX
from ..families.softmax.limit_terms import limit_terms
from ..families.table import family_of
from ..registry import UsageError
from ..steps.schedule import make_schedule


def explain_limit(case: Case, at: str, step: int) -> None:
    """Print how the limit of an element comes about: the answer, each term with its reason, and their sum.

    ``at``: layer, request, row, head and dim of the element, five numbers with any words around them. Raises
    ``UsageError`` for an element or a step that the case does not have, and if its layers are not softmax attention.
    """
    if family_of(case) is not SOFTMAX:
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
    click.echo(f"  {'limit':<14} {float(sum(term.value[index] for term in terms)):>10.4g}  the sum of the terms")

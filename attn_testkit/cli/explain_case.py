"""A case id in words for ``explain``: its fields, the steps of its schedule, and its derived parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

from ..cases.case import Case
from ..cases.derived_parameters import chosen
from ..cases.explained import entry_of
from ..cases.features.feature import Without
from ..cases.features.numbers import listed
from ..cases.features.table import FEATURES
from ..contract import ForwardMode
from ..steps.schedule import Schedule, Step, make_schedule


def explain_case(case: Case) -> None:
    """Print a case in words: fields, then steps, then derived parameters, one line each."""
    click.secho(case.id, bold=True)
    _print_rows(list(_phrases(case)))
    click.secho("\nSteps (keys include those of the step)", bold=True)
    _print_rows(list(_steps(make_schedule(case))))
    click.secho("\nDerived parameters (a hash of the id decides them)", bold=True)
    _print_rows(list(_derived_parameters(case)))


def _print_rows(rows: Sequence[tuple[str, str]]) -> None:
    width = max(10, *(len(name) for name, _ in rows))
    for name, text in rows:
        click.echo(f"  {name:<{width}} {text}")


def _phrases(case: Case) -> Iterator[tuple[str, str]]:
    for feature in FEATURES:
        if not isinstance(feature.describe, Without):
            yield from ((label, _with_meaning(phrase)) for label, phrase in feature.describe(case).items() if phrase)


def _with_meaning(phrase: str) -> str:
    """Append the glossary's text to a phrase that is only a word of the glossary, such as ``rising_logits``."""
    entry = entry_of(phrase)
    return f"{phrase}: {entry.text}" if entry and phrase in (entry.word, *entry.also) else phrase


def _steps(schedule: Schedule) -> Iterator[tuple[str, str]]:
    case = schedule.case
    buckets = " and ".join(map(str, schedule.buckets))
    yield "sizes", f"buckets {buckets}, max_context_len {schedule.max_context_len}, {schedule.num_pages} pages"
    for step in schedule.steps:
        after = "; then the same eagerly" if step.eager_too else ""
        yield step.name, f"bucket {step.bucket}, {_in_words(step, case)}{after}"
    second = schedule.second
    yield second.name, "; ".join((f"eager after step 0, {_in_words(second, case)}", *second.own_variations))
    yield schedule.oversized.name, f"eager between replays, {_in_words(schedule.oversized, case)}"


def _in_words(step: Step, case: Case) -> str:
    drafts = case.mode.is_draft_extend(include_v2=True)
    accepted = f"; accepted {listed([r.accepted for r in step.requests])}" if drafts else ""
    rows = f"; {case.width} rows each" if case.mode.is_speculative() and not case.mode.is_ragged() else ""
    if case.mode is ForwardMode.EXTEND:
        rows = f"; {listed([r.new for r in step.requests])} new"
    padding = f", padding {step.padding}" if step.bucket > step.bs else ""
    if not step.requests:
        return f'"{step.label}"{padding}'
    encoder = f"; {listed([r.encoder_len for r in step.requests])} of an encoder" if case.encoder_len else ""
    return f'"{step.label}": keys {listed(step.lens)}{encoder}{accepted}{rows}; {step.layout}, {step.data}{padding}'


def _derived_parameters(case: Case) -> Iterator[tuple[str, str]]:
    for parameter, value in chosen(case):
        where = f"; only in {parameter.execution} runs" if parameter.execution else ""
        yield parameter.name, f"{value.words} ({parameter.about}{where})" if value else f"{parameter.about}{where}"

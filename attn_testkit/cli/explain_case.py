"""What ``explain`` says of a case id: its words, the steps of its schedule, and what it chose without saying so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import click

from ..cases.case import Case
from ..cases.choices import chosen
from ..cases.layers import PERIOD, Layers
from ..cases.parts import parts_text
from ..cases.schedule import Schedule, Step, make_schedule
from ..cases.ways import way_of
from ..contract import ForwardMode

__all__ = ["explain_case"]

_MOST_LISTED = 8
"""Longer lists of numbers are shortened to so many runs."""


def explain_case(case: Case) -> None:
    """Print a case in words: fields, then steps, then choices, one line each."""
    click.secho(case.id, bold=True)
    _print_rows([(name, text) for name, text in _fields(case) if text])
    click.secho("\nSteps (keys include those of the step)", bold=True)
    _print_rows(list(_steps(make_schedule(case))))
    click.secho("\nChoices that the id decides without saying so", bold=True)
    _print_rows(list(_choices(case)))


def _print_rows(rows: Sequence[tuple[str, str]]) -> None:
    width = max(10, *(len(name) for name, _ in rows))
    for name, text in rows:
        click.echo(f"  {name:<{width}} {text}")


def _listed(values: Sequence[int]) -> str:
    """1, 3, 3, 3 -> ``1, 3 x 3``: the second number counts."""
    runs = [(value, len(list(same))) for value, same in groupby(values)]
    words = [f"{value} x {times}" if times > 2 else ", ".join([str(value)] * times) for value, times in runs]
    if len(words) <= _MOST_LISTED:
        return ", ".join(words)
    return f"{', '.join(words[:_MOST_LISTED])}, ... ({len(values)} in all, {min(values)} to {max(values)})"


def _fields(case: Case) -> list[tuple[str, str]]:
    """Field -> what it says, empty where the case has no such thing."""
    heads, tree, padded = case.heads, case.tree, case.bucket - case.bs
    nodes = f"{len(tree)} nodes, {'a chain' if case.topk == 1 else 'parents ' + _listed(tree.parents)}" if tree else ""
    turns = "one layer" if case.layers.count <= PERIOD else "every second layer"
    of_all = ", which hold those of all layers" if case.layers.shapes else ""
    padding = f", {padded} of them padding ({case.padding})" if padded else ""
    return [
        ("mode", case.mode.value),
        (
            "heads",
            f"{heads.family}: {heads.q_heads} query heads, {heads.kv_heads} KV head{'s'[: heads.kv_heads - 1]}{of_all}",
        ),
        ("head_dim", str(case.head_dim)),
        ("rope_dim", str(case.rope_dim or "")),
        ("dtype", case.dtype),
        ("kv_dtype", "" if case.kv_dtype == "same" else case.kv_dtype),
        ("kv_layout", "" if case.kv_layout == "nhd" else case.kv_layout),
        ("page_size", str(case.page_size)),
        ("prefixes", f"{_listed(case.prefixes)} keys before this step"),
        ("new", _new(case)),
        ("chunks", f"{case.chunks}: the own batch is the first, and the others follow it" if case.chunks > 1 else ""),
        ("tree", nodes),
        ("draft", f"{case.draft.branches} branches, {case.draft.steps} steps" if case.draft else ""),
        ("prefixed", "no request of any step is without a prefix" if case.prefixed else ""),
        ("rounds", f"{case.rounds} of a lossless loop, beside the steps" if case.rounds else ""),
        ("layout", case.layout),
        ("data", case.data),
        ("window", "" if case.window < 0 else f"{case.window} keys back, {_windowed_layers(case, turns)}"),
        ("scaling", "1/sqrt(head_dim) in all layers" if case.usual_scaling else ""),
        ("logit_cap", f"{case.logit_cap:g}, in {turns}" if case.logit_cap else ""),
        ("sinks", "one more logit for each query head" if case.sinks else ""),
        ("layers", "" if case.layers == Layers() else case.layers.words),
        ("parts", parts_text(case)),
        ("bucket", f"{case.bucket} request{'s'[: case.bucket - 1]} in the graph{padding}"),
        ("mixed", "graphs of all claimed modes on one instance, interleaved" if case.mixed else ""),
        ("way", f"{case.way}: {way_of(case).about}" if case.way else ""),
        ("seed", str(case.seed or "")),
    ]


def _windowed_layers(case: Case, turns: str) -> str:
    if case.layer_windows == "same":
        return "in all layers"
    return f"in {turns}" + ("; the others have none" if case.layer_windows == "one" else "")


def _new(case: Case) -> str:
    if case.mode is ForwardMode.EXTEND:
        rows = case.bucket * case.width
        return f"new tokens of each request: {_listed(case.new)}; {sum(case.new)} of {rows} rows of the graph"
    return f"accepted tokens of each request: {_listed(case.new)} of {case.width} rows" if case.new else ""


def _steps(schedule: Schedule) -> Iterator[tuple[str, str]]:
    case = schedule.case
    buckets = " and ".join(map(str, schedule.buckets))
    yield "sizes", f"buckets {buckets}, max_context_len {schedule.max_context_len}, {schedule.num_pages} pages"
    for step in schedule.steps:
        after = "; then the same eagerly" if step.eager_too else ""
        yield step.name, f"bucket {step.bucket}, {_in_words(step, case)}{after}"
    second = schedule.second
    yield second.name, "; ".join((f"eager after step 0, {_in_words(second, case)}", *second.own_ways))
    yield schedule.oversized.name, f"eager between replays, {_in_words(schedule.oversized, case)}"


def _in_words(step: Step, case: Case) -> str:
    drafts = case.mode.is_draft_extend(include_v2=True)
    accepted = f"; accepted {_listed([r.accepted for r in step.requests])}" if drafts else ""
    rows = f"; {case.width} rows each" if case.mode.is_speculative() and not case.mode.is_ragged() else ""
    if case.mode is ForwardMode.EXTEND:
        rows = f"; {_listed([r.new for r in step.requests])} new"
    padding = f", padding {step.padding}" if step.bucket > step.bs else ""
    if not step.requests:
        return f'"{step.label}"{padding}'
    return f'"{step.label}": keys {_listed(step.lens)}{accepted}{rows}; {step.layout}{padding}'


def _choices(case: Case) -> Iterator[tuple[str, str]]:
    for choice, value in chosen(case):
        where = f"; {choice.execution} runs alone" if choice.execution else ""
        yield choice.name, f"{value.words} ({choice.about}{where})" if value else f"{choice.about}{where}"

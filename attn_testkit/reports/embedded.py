"""All case-runs in compact form for a page's script, which lists and filters them: columns of word indices."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from markupsafe import Markup

from ..results.case_result import CaseResult
from ..results.failure_text import repro_command
from ..results.names import NO_CASE
from ..results.run_header import RunHeader
from .page import Card
from .tally import seconds_of

_CASE = "{case}"


def embedded_runs(results: Iterable[CaseResult], header: RunHeader, cards: Sequence[Card]) -> Markup:
    """Return JSON for a script element. A case id is written once, however many backends and executions ran it."""
    runs = [result for result in results if result.case]
    backend, mode, execution, status, case = (_Words() for _ in range(5))
    card_of = {id(result): card.number for card in cards for result in card.group.results}
    columns: dict[str, list[Any]] = {
        "backend": [backend.index(run.backend) for run in runs],
        "mode": [mode.index(run.mode) for run in runs],
        "execution": [execution.index(run.execution) for run in runs],
        "status": [status.index(run.status.value) for run in runs],
        "case": [case.index(run.case) for run in runs],
        "card": [card_of.get(id(run), 0) for run in runs],
        "margin": [None if run.margin is None else _short(run.margin) for run in runs],
        "seconds": [_short(seconds_of(run)) for run in runs],
    }
    data = {
        "words": {
            name: words.known
            for name, words in (
                ("backend", backend),
                ("mode", mode),
                ("execution", execution),
                ("status", status),
                ("case", case),
            )
        },
        "runs": columns,
        "causes": {card.number: f"{card.group.check} {card.group.cause}" for card in cards},
        "repro": _repro_by_place(runs, header),
        "own_repro": {
            index: repro_command(run, header)
            for index, run in enumerate(runs)
            if run.after or run.case.endswith(NO_CASE)
        },
    }
    text = json.dumps(data, separators=(",", ":"))
    # Inside a script element nothing may look like its end, or like a comment.
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _repro_by_place(runs: Iterable[CaseResult], header: RunHeader) -> dict[str, str]:
    """Map ``backend execution`` to the repro command, with ``{case}`` for the case."""
    places = {f"{run.backend} {run.execution}": run for run in runs}
    return {place: repro_command(replace(run, case=_CASE, after=()), header) for place, run in places.items()}


def _short(number: float) -> float | str:
    return float(f"{number:.3g}") if math.isfinite(number) else str(number)


class _Words:
    """Words in the order in which they first occurred."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    def index(self, word: str) -> int:
        return self._places.setdefault(word, len(self._places))

    @property
    def known(self) -> list[str]:
        return list(self._places)

"""Results as an HTML report in one file, and as a summary for a CI job."""

from __future__ import annotations

import re

import jinja2
from markupsafe import Markup, escape

from ..results.failure_text import format_failure
from ..results.names import EXECUTIONS, MODES
from ..results.remarks import left_lines
from ..results.texts import telling_first
from .embedded import embedded_runs
from .history import History
from .page import MOST_LINES, page_model
from .plots import LEVELS, error_plot, keys_plot
from .record import Report
from .verdict import conclude, not_tried_lines

MOST_IN_SUMMARY = 10
"""Number of causes that a summary shows with a failure in full."""


def html_page(report: Report, previous: Report | None = None, history: History | None = None) -> str:
    """Render the HTML report.

    ``previous``: the night to compare with. ``history``: it and older nights, for trends.
    """
    model = page_model(report, previous, history or History())
    present = [result for result in report.results if result.case]
    template = _environment(autoescape=True).get_template("report.html.j2")
    return template.render(
        **model,
        data=embedded_runs(report.results, report.header, model["all_cards"]),
        modes=_present(MODES, {result.mode for result in present}),
        executions=_present(EXECUTIONS, {result.execution for result in present}),
        levels=["right", *(f"up to {level:,.0f}x" for level in LEVELS[1:]), "more, NaN"],
        error_plot=error_plot,
        keys_plot=keys_plot,
        most_lines=MOST_LINES,
    )


def _present(known: tuple[str, ...], found: set[str]) -> list[str]:
    return [*(word for word in known if word in found), *sorted(word for word in found - {*known} if word)]


def markdown_summary(report: Report, previous: Report | None = None, history: History | None = None) -> str:
    """Render the summary as Markdown."""
    model = page_model(report, previous, history or History())
    causes = [
        (card, format_failure(card.shown[0].result, report.header, brief=True))
        for card in model["all_cards"][:MOST_IN_SUMMARY]
    ]
    template = _environment(autoescape=False).get_template("report.md.j2")
    found = conclude(report.header, report.results, problems=report.problems, interrupted=report.interrupted)
    model["not_covered"] = [
        *left_lines(report.header, report.results),
        *not_tried_lines(report.header, found, "the page of `results report --html` lists them"),
    ]
    return template.render(**model, causes=causes)


def _environment(*, autoescape: bool) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("attn_testkit.reports", "."),
        autoescape=autoescape,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "cell": _markdown_cell,
        "breakable": _breakable,
        "quoted": _quoted,
        "telling_first": telling_first,
    }
    return environment


def _markdown_cell(text: object) -> str:
    return " ".join(str(text).replace("|", "\\|").split())


def _breakable(name: str) -> Markup:
    """A name that may be wrapped after a dot or a colon, and is unchanged when it is copied."""
    return Markup("<wbr>").join(re.split(r"(?<=[.:])", name))


def _quoted(text: str) -> Markup:
    """Render words in backquotes as code."""
    words = enumerate(text.split("`"))
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if index % 2 else escape(part) for index, part in words
    )

"""What a page's figures draw, to the letter: a bar that is wrong by a little is a lie that nobody sees."""

from __future__ import annotations

import re

import pytest

from attn_testkit.reports.plots import LEVELS, error_plot, keys_plot, level_of, margin_plot, nights_plot
from attn_testkit.results.finding import ErrorMap, KeyMap


@pytest.mark.parametrize(
    ("ratio", "level"),
    [(0.0, 0), (1.0, 0), (1.01, 1), (2.0, 1), (2.1, 2), (10.0, 2), (11, 3), (100, 3), (101, 4), (1e4, 4), (10_001, 5)],
)
def test_the_colour_of_an_error(ratio, level):
    assert level_of(ratio) == level <= len(LEVELS)


def whole(kind: str, width: float, height: float, label: str, body: str, more: str = "") -> str:
    return (
        f'<svg class="plot {kind}" role="img" aria-label="{label}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}"{more}>{body}</svg>'
    )


def test_an_error_plot_has_a_cell_for_each_row_and_head_and_a_line_between_requests():
    found = error_plot(ErrorMap(((0.5, 3.0, 3.0), (1.0, 1e9, 1.5), (0.0, 0.0, 0.0)), (0, 0, 4), 3, 3))
    assert found == whole(
        "errors", 62, 36, "error by row and head: 3 rows, 3 heads, largest 1e+09 times the limit",
        '<path class="e0" d="M26 0h12v12h-12zM26 12h12v12h-12zM26 24h36v12h-36z"/>'
        '<path class="e1" d="M50 12h12v12h-12z"/>'
        '<path class="e2" d="M38 0h24v12h-24z"/>'
        '<path class="e5" d="M38 12h12v12h-12z"/>'
        '<path class="grid" d="M26 0V36M38 0V36M50 0V36M62 0V36M26 0H62M26 12H62M26 24H62M26 36H62"/>'
        '<text x="0" y="10">r0</text>'
        '<text x="0" y="34">r4</text><path class="rule" d="M0 24h62"/>',
    )  # fmt: skip


def test_a_keys_plot_draws_runs_to_scale():
    found = keys_plot(KeyMap(1, 0, 5, 60, ((0, 29),), ((0, 9), (30, 59)), ((3, 5),), ((30, 59),)))
    assert found == whole(
        "keys", 600, 27, "KV tokens 0 to 59 of request 1: expected above, attended below",
        '<path class="lane" d="M0 0h600v12h-600zM0 15h600v12h-600z"/>'
        '<path class="wanted" d="M0.0 0h100.0v12h-100.0zM300.0 0h300.0v12h-300.0z"/>'
        '<path class="used" d="M0.0 15h300.0v12h-300.0z"/>'
        '<path class="doubled" d="M30.0 15h30.0v12h-30.0z"/>'
        '<path class="unknown" d="M300.0 15h300.0v12h-300.0z"/>',
        ' preserveAspectRatio="none"',
    )  # fmt: skip


def test_one_key_of_very_many_is_to_be_seen():
    last = str(keys_plot(KeyMap(0, 0, 0, 66_000, ((65_999, 65_999),), ((0, 65_999),))))
    assert 'class="used" d="M598.0 15h2.0v12h-2.0z"' in last


def test_a_margin_plot_marks_all_the_middle_half_the_median_and_the_largest():
    found = margin_plot({"decode <bf16>": [0.0, 0.2, 0.4, 0.6, 1.0], "one": [0.4]})
    assert found == whole(
        "margins", 446, 58, "margins by dtype and mode",
        '<path class="rule" d="M195.0 0V42"/><path class="rule" d="M248.8 0V42"/><path class="rule" d="M302.5 0V42"/>'
        '<path class="rule" d="M356.2 0V42"/><path class="limit" d="M410.0 0V42"/>'
        '<text class="axis" x="195.0" y="55">0</text><text class="axis" x="302.5" y="55">0.5</text>'
        '<text class="axis" x="410.0" y="55">limit</text>'
        "<g><title>decode &lt;bf16&gt;: 5 passed, median 0.40, largest 1.000</title>"
        '<text x="0" y="14">decode &lt;bf16&gt;</text><path class="whole" d="M195.0 10H410.0"/>'
        '<path class="half" d="M238.0 10H324.0"/><path class="median" d="M281.0 5v10"/>'
        '<circle cx="410.0" cy="10" r="3"/><text x="416" y="14">1.00</text></g>'
        "<g><title>one: 1 passed, median 0.40, largest 0.400</title>"
        '<text x="0" y="34">one</text><path class="whole" d="M281.0 30H281.0"/>'
        '<path class="half" d="M281.0 30H281.0"/><path class="median" d="M281.0 25v10"/>'
        '<circle cx="281.0" cy="30" r="3"/><text x="416" y="34">0.40</text></g>',
    )  # fmt: skip


def heights(svg: str) -> dict[str, float]:
    return {
        kind: float(bottom) - float(top)
        for kind, top, bottom in re.findall(r'<path class="(\w+)" d="M0 ([\d.]+)h8V([\d.]+)h-8z"/>', svg)
    }


@pytest.mark.parametrize(
    ("passed", "red_runs", "declared", "tall"),
    [
        (10, 0, 10, {"good": 30}),
        (0, 10, 10, {"bad": 30}),
        (5, 5, 10, {"bad": 15, "good": 15}),
        (999, 1, 1000, {"bad": 4, "good": 26}),
        (998, 1, 1000, {"bad": 4, "known": 4, "good": 22}),
        (0, 1, 1000, {"bad": 30 * 4 / 33.97, "known": 30 * 29.97 / 33.97}),
    ],
)
def test_a_column_of_a_night_is_to_scale_but_for_what_would_be_too_thin_to_see(passed, red_runs, declared, tall):
    svg = str(nights_plot([("2026-11-20", passed, red_runs, declared, True)]))
    assert heights(svg) == pytest.approx(tall, abs=0.11)


def test_a_night_without_the_backend_is_a_gap_and_one_that_was_cut_off_is_pale():
    found = nights_plot([("a", 0, 0, 0, True), ("b", 5, 0, 5, False), ("c", 2, 2, 5, True)])
    assert found == whole(
        "nights", 28, 30, "passed case-runs of those planned, over 3 nights",
        '<path class="absent" d="M0 28h8v2h-8z"/>'
        '<g class="cut"><title>b: 5 of 5 passed; the night did not finish</title>'
        '<path class="good" d="M10 0.0h8V30.0h-8z"/></g>'
        "<g><title>c: 2 of 5 passed, 2 red</title>"
        '<path class="bad" d="M20 0.0h8V12.0h-8z"/><path class="known" d="M20 12.0h8V18.0h-8z"/>'
        '<path class="good" d="M20 18.0h8V30.0h-8z"/></g>',
    )  # fmt: skip

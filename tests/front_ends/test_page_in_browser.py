"""The page as its readers have it: opened from disk in a real browser, wide and narrow, light and dark."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import nights
import pytest
from browser import DoesNotStart, Page, installed, page_in

from attn_testkit.reports.history import History, night_of
from attn_testkit.reports.render import html_page
from attn_testkit.results.case_result import BAD, Status

pytestmark = pytest.mark.skipif(
    not installed(), reason="no Chromium or Chrome on the path; name one in ATTN_BROWSER (ci/browser.sh installs one)"
)
SECONDS = 30.0
"""A page that is not there by then is too heavy, on any machine: the largest takes half a second."""


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    with contextlib.ExitStack() as stack:
        try:
            page = stack.enter_context(page_in(installed()))
        except DoesNotStart as error:
            pytest.skip(f"the browser does not start: {error}")
        yield page


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    before = [
        nights.green_night(1000, "2026-11-19T02:17:00+00:00"),
        nights.red_night(1000, "2026-11-20T02:17:00+00:00", every=160),
    ]
    history = History(tuple(map(night_of, before)))
    pages = {
        "red": html_page(nights.red_night(1000), before[-1], history),
        "green": html_page(nights.green_night(1000), before[-1], history),
        "many": html_page(nights.red_night(20_000)),
        "both": html_page(mixed_night()),
    }
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text)
    return folder


def mixed_night():
    """One backend's kernels were emulated where the device was real; names that nobody foresaw."""
    report = nights.red_night(200)
    results = [
        replace(result, kernels="emulated", backend="pkg:<b>&amp;'\"") if result.backend == "flashinfer" else result
        for result in report.results
    ]
    return nights.night(results)


@pytest.fixture
def red(tab: Page, folder: Path) -> Iterator[Page]:
    """The red night of a thousand case-runs, as after opening."""
    tab.screen(1280, 900)
    tab.open(folder / "red.html")
    yield tab
    assert tab.errors == []


def choose(page: Page, name: str, value: str) -> None:
    """As a reader does: choose, and wait until the page has followed."""
    page.run(
        f"form = document.getElementById('filter'); form.{name}.value = {value!r}; "
        f"form.{name}.dispatchEvent(new Event('input', {{bubbles: true}}))"
    )
    page.run("new Promise(done => setTimeout(done, 150))")


def visible(page: Page, selector: str) -> int:
    """Elements of the page that have a size."""
    return page.run(f"[...document.querySelectorAll({selector!r})].filter(e => e.getClientRects().length).length")


def matched(page: Page) -> str:
    return page.run("document.getElementById('matched').textContent")


@pytest.mark.parametrize("name", ["red", "green", "many", "both"])
def test_a_page_opens_without_an_error_asks_nobody_and_shows_its_matrix(tab, folder, name):
    tab.screen(1280, 900)
    tab.errors.clear()
    tab.requests.clear()
    assert tab.open(folder / f"{name}.html") < SECONDS
    tab.wait("document.documentElement.dataset.ready === 'yes'")
    assert tab.errors == []
    assert tab.requests == [(folder / f"{name}.html").as_uri()]
    assert visible(tab, "table.overview td.passed, table.overview td.red, table.overview td.known") == 32
    assert tab.run("document.querySelector('table.overview').getBoundingClientRect().top") < 900


@pytest.mark.parametrize(("name", "count"), [("red", 1000), ("many", 20_000)])
def test_the_filter_follows_at_once_however_many_case_runs_there_are(tab, folder, name, count):
    tab.open(folder / f"{name}.html")
    assert matched(tab) == f"{count} case-runs"
    started = tab.run("performance.now()")
    choose(tab, "text", "fp8e4m3 Graph")
    assert tab.run("performance.now()") - started < 1000 * SECONDS
    wanted = sum("fp8e4m3" in run.case and run.execution == "graph" for run in nights.red_night(count).results)
    assert matched(tab) == f"{wanted} of {count} case-runs"


def test_real_and_emulated_case_runs_have_a_matrix_each(tab, folder):
    tab.open(folder / "both.html")
    titles = tab.run("[...document.querySelectorAll('h2')].map(e => e.textContent)")
    assert titles[:2] == ["Real hardware: backend, mode, execution", "Emulated: backend, mode, execution"]
    tables = "[...document.querySelectorAll('table.overview')]"
    assert tab.run(f"{tables}.map(table => [...table.tBodies[0].rows].map(row => row.cells[0].textContent))") == [
        ["torch_native", "triton", "my_company.serving.attention:PagedBackend", "flashinfer_mla"],
        ["pkg:<b>&amp;'\""],
    ]


def test_a_red_cell_leads_to_its_cause_and_leaves_only_that(red):
    assert visible(red, ".card") == 3
    red.run("document.querySelector('td.red[data-backend=triton][data-execution=graph] a').click()")
    red.wait("location.hash")
    target = red.run("location.hash")
    found = red.run(f"document.querySelector('{target}').textContent")
    assert "a maximum length, a grid or a number of splits" in found
    top = red.run(f"document.querySelector('{target}').getBoundingClientRect().top")
    assert 0 <= top < 900
    assert visible(red, ".card") == 1
    assert red.run("['backend', 'mode', 'execution', 'status'].map(name => document.forms[0][name].value)") == [
        "triton", "draft-extend-v2", "graph", "red",
    ]  # fmt: skip
    assert matched(red) == "6 of 1000 case-runs"


@pytest.mark.parametrize(
    ("name", "value", "cards", "said"),
    [
        ("backend", "triton", 2, "250 of 1000 case-runs"),
        ("backend", "torch_native", 0, "250 of 1000 case-runs"),
        ("mode", "decode", 1, "256 of 1000 case-runs"),
        ("execution", "graph", 2, "500 of 1000 case-runs"),
        ("status", "red", 3, "13 of 1000 case-runs"),
        ("status", "crashed", 1, "1 of 1000 case-runs"),
        ("status", "passed", 0, "985 of 1000 case-runs"),
        ("text", "WINDOW first", 1, "6 of 1000 case-runs"),
        ("text", "0.4121", 1, "0 of 1000 case-runs"),
        ("text", "no such words", 0, "0 of 1000 case-runs"),
    ],
)
def test_the_filter_hides_and_shows_by_each_of_its_fields(red, name, value, cards, said):
    choose(red, name, value)
    assert visible(red, ".card") == cards
    assert matched(red) == said
    assert visible(red, "#list tr") == min(25, int(said.split()[0]))
    red.run("document.getElementById('clear').click()")
    red.run("new Promise(done => setTimeout(done, 150))")
    assert (visible(red, ".card"), matched(red)) == (3, "1000 case-runs")


def test_fields_of_the_filter_work_together_and_a_card_says_how_many_of_its_case_runs_are_meant(red):
    choose(red, "status", "red")
    choose(red, "text", "triton bf16")
    failed = [r for r in nights.red_night(1000).results if r.backend == "triton" and r.status is Status.FAILED]
    meant = sum("-bf16-" in result.case for result in failed)
    assert 0 < meant < len(failed)
    assert matched(red) == f"{meant} of 1000 case-runs"
    said = "[...document.querySelectorAll('.card:not([hidden]) h3 b')].map(e => e.textContent)"
    assert red.run(said) == [f"{meant // 2} of 6 case-runs"] * 2


def test_tables_of_lines_follow_the_filter(red):
    known = "tr[data-line$='known failure']"
    assert visible(red, known) == 2
    choose(red, "backend", "triton")
    assert visible(red, known) == 0
    assert 0 < visible(red, "tr[data-line]") < 18


def test_the_list_of_case_runs_grows_on_demand(red):
    assert visible(red, "#list tr") == 25
    red.run("document.getElementById('more').click()")
    assert visible(red, "#list tr") == 125


def test_the_copy_buttons_copy_the_repro(red):
    red.ask("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    shown = red.run("document.querySelector('.card .repro pre').textContent")
    assert shown.startswith("attn-testkit repro --backend triton --execution eager draft-extend-v2-")
    red.run("document.querySelector('.card button.copy').click()")
    red.wait("document.querySelector('.card button.copy').textContent === 'copied'")
    assert red.run("navigator.clipboard.readText()") == shown
    choose(red, "text", "illegal memory access")
    red.run("document.querySelector('#list button').click()")
    red.wait("document.querySelector('#list button').textContent === 'copied'")
    last = nights.red_night(1000).results[999].case
    expected = f"attn-testkit repro --backend {nights.BACKENDS[-1]} --execution graph {last}"
    assert red.run("navigator.clipboard.readText()") == expected


def test_a_link_to_a_card_that_the_filter_hides_shows_it_again(red):
    choose(red, "text", "no such words")
    red.run("location.hash = 'cause-3'")
    red.wait("document.getElementById('cause-3').getClientRects().length")
    assert visible(red, ".card") == 3


def test_names_of_checks_lead_to_what_they_mean(red):
    assert red.run("document.querySelector('.card .meta a').getAttribute('href')") == "#check-matches-oracle"
    assert "What matches-oracle asks of" in red.run(
        "document.getElementById('check-matches-oracle').nextElementSibling.textContent"
    )
    links = red.run("[...document.querySelectorAll('a[href^=\"#\"]')].map(e => e.getAttribute('href').slice(1))")
    ids = red.run("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert set(links) <= set(ids), set(links) - set(ids)


@pytest.mark.parametrize("name", ["red", "green", "both"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_a_narrow_screen(tab, folder, name, scheme):
    tab.screen(420, 900, scheme)
    tab.open(folder / f"{name}.html")
    tab.run("for (const each of document.querySelectorAll('details')) each.open = true")
    assert tab.run("document.documentElement.scrollWidth") == 420
    assert visible(tab, "table.overview td.passed") > 0


def test_colours_follow_the_readers_scheme_and_can_be_read_in_both(tab, folder):
    grounds = set()
    for scheme in ("light", "dark"):
        tab.screen(1280, 900, scheme)
        tab.open(folder / "red.html")
        grounds.add(tab.run("getComputedStyle(document.body).backgroundColor"))
        for selector in (
            "body",
            ".dim",
            "td.passed",
            "td.red a",
            "td.known",
            ".tag",
            "h1",
            ".card .meta",
            "button.copy",
        ):
            assert tab.run(CONTRAST % selector) >= 4.5, (scheme, selector)
    assert grounds == {"rgb(251, 251, 250)", "rgb(20, 22, 26)"}


CONTRAST = """(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const element = document.querySelector(%r);
  let behind = element;
  while (rgb(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
  const [a, b] = [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor].map(rgb).map(light);
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
})()"""


def test_without_scripts_all_failures_are_there_and_nothing_that_would_not_work(tab, folder):
    with page_in(installed()) as page:
        page.without_script()
        page.screen(1280, 900)
        page.open(folder / "red.html")
        failed = [r for r in nights.red_night(1000).results if r.status in BAD]
        page.ask("Emulation.setScriptExecutionDisabled", value=False)
        text = page.run("document.querySelector('main').textContent")
        assert all(result.case in text for result in failed)
        assert visible(page, ".card") == 3
        assert visible(page, "button, select, input, #list") == 0
        assert "This list needs JavaScript. 1000 case-runs are in the results file" in text


def test_what_is_drawn_has_a_size(red):
    for selector in ("svg.errors", "svg.keys", "svg.margins", "svg.nights"):
        box = red.run(f"(b => [b.width, b.height])(document.querySelector('{selector}').getBoundingClientRect())")
        assert min(box) > 10, selector
    assert visible(red, "svg.nights g path") > 0

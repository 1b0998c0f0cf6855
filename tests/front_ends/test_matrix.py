"""The matrix of submissions: what a cell says, what it leads to, and that it can be read on a phone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from browser import DoesNotStart, Page, installed, page_in
from profile_runs import FAILED, KNOWN, concluded, passed_on_h200, with_row

from attn_testkit.cli import main
from attn_testkit.registry import UsageError
from attn_testkit.reports.record import Report, write_report
from attn_testkit.results.case_result import Status
from attn_testkit.submissions.archive import pack
from attn_testkit.submissions.matrix import Entry, matrix_page, read_folder
from attn_testkit.submissions.standing import standing

ENTRY = """[[known]]
cases = "*"
kind = "tolerated"
check = "writes-own-state"
issue = "https://example.org/issues/12"
until = 2026-12-31
"""


def submit(folder: Path, name: str, report: Report, known: str = "") -> None:
    write_report(str(folder / "results.json"), report)
    if known:
        (folder / "known.toml").write_text(known)
    (folder / f"{name}.zip").write_bytes(pack(folder / "results.json", folder / "known.toml" if known else None))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("submissions")
    red = with_row(passed_on_h200(), **FAILED)
    submit(folder, "h200", red)
    submit(folder, "h200-older", passed_on_h200(started="2026-01-01T00:00:00+00:00", kit="0.0.9"))
    b200 = passed_on_h200(device_name="NVIDIA B200 sm100")
    submit(folder, "b200", with_row(b200, **KNOWN), ENTRY)
    emulated = passed_on_h200(device="emulated", device_name="CPU (emulated CUDA)")
    rows = tuple(replace(row, device="emulated") if row.status is Status.PASSED else row for row in emulated.results)
    submit(folder, "cpu", concluded(replace(emulated, results=rows)))
    submit(folder, "changed", passed_on_h200(profile="sha256:0"))
    (folder / "broken.zip").write_text("no")
    return folder


def test_real_devices_come_first_and_what_is_refused_is_named(folder: Path) -> None:
    found, left_out = read_folder(folder)
    assert len(found) == 4
    assert [reason.partition(": ")[0] for reason in left_out][1] == "changed.zip"
    assert "broken.zip is damaged" in left_out[0]
    page = matrix_page(found, left_out)
    places = [page.index(f"<h2>{name}") for name in ("NVIDIA B200", "NVIDIA H200", "CPU (emulated CUDA)", "Left out")]
    assert places == sorted(places)
    assert page.count('<span class="tag">emulated</span>') == 1
    assert all(reason.replace("'", "&#39;") in page for reason in left_out)


def test_a_cell_counts_its_case_runs_and_leads_to_failure_command_and_entry(folder: Path) -> None:
    page = matrix_page(*read_folder(folder))
    assert "slot 3 changed" in page
    assert "writes-own-state (AB-STATE-002)" in page
    assert "attn-testkit repro --backend torch_native_state --execution eager" in page
    assert '<a href="https://example.org/issues/12">' in page
    assert "tolerated, until 2026-12-31" in page
    assert "1 earlier" in page
    assert '2026.12/state: conformant <span class="dim">2026-01-01 · ' in page


def test_cells_are_of_mode_and_family_and_an_undeclared_one_is_empty(folder: Path) -> None:
    (newest,) = (each for each in read_folder(folder)[0] if each.header.device_name == "NVIDIA B200 sm100")
    entry = Entry((newest,), ())
    assert entry.modes == ["decode", "target-verify", "extend"]
    assert set(entry.families) == {"gdn", "kda", "lightning"}, "mamba is not declared"
    assert sum(cell.ran for cell in entry.cells.values()) == newest.header.planned
    (cell,) = entry.explained
    assert (cell.standing, cell.ran - cell.passed) == ("known failures", 1)
    assert cell.issues == ["https://example.org/issues/12"]
    assert cell.failures == []
    assert standing([]) == "not declared"


def test_the_command_writes_the_page_and_refuses_an_empty_folder(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["matrix", str(folder), "--html", str(tmp_path / "index.html")]) == 0
    assert "submissions: 4, left out: 2" in capsys.readouterr().err
    assert (tmp_path / "index.html").read_text() == matrix_page(*read_folder(folder))
    with pytest.raises(UsageError, match=r"has no submission; expected archives \*\.zip"):
        read_folder(tmp_path)


def test_no_submission_of_the_repository_is_left_out() -> None:
    found, left_out = read_folder(Path(__file__).resolve().parents[2] / "docs" / "evidence" / "submissions")
    assert left_out == []
    assert len(found) > 40


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    if not installed():
        pytest.skip("no Chromium or Chrome on the path; name one in ATTN_BROWSER (ci/browser.sh installs one)")
    try:
        with page_in(installed()) as page:
            yield page
    except DoesNotStart as error:
        pytest.skip(f"the browser does not start: {error}")


@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_fits_a_phone_and_its_links_lead_to_failures(
    width: int, tab: Page, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "index.html").write_text(matrix_page(*read_folder(folder)))
    tab.screen(width, 740)
    tab.errors.clear()
    tab.requests.clear()
    tab.open(tmp_path / "index.html")
    assert tab.errors == []
    assert tab.requests == [(tmp_path / "index.html").as_uri()], "nothing is fetched"
    assert tab.run("document.documentElement.scrollWidth") <= width, "only tables scroll sideways"
    links = "[...document.querySelectorAll('td.failing a, td.known-failures a')]"
    assert tab.run(f"{links}.length") == 2
    assert tab.run(f"{links}.every(link => document.getElementById(decodeURIComponent(link.hash.slice(1))))")

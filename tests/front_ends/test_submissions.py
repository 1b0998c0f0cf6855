"""Submissions: what is packed is accepted, and what was cut, skipped or edited is refused, each for its reason."""

from __future__ import annotations

import datetime
import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from profile_runs import FAILED, H200, KNOWN, PROFILE, concluded, passed_on_h200, planned, with_row

from attn_testkit.cli import main
from attn_testkit.registry import UsageError
from attn_testkit.reports.record import Report, write_report
from attn_testkit.results.case_result import Status
from attn_testkit.results.run_header import Selection
from attn_testkit.submissions.archive import pack, read_submission
from attn_testkit.submissions.referee import refusals
from attn_testkit.submissions.standing import badge

Files = dict[str, bytes]
SOON = datetime.datetime.now(datetime.UTC).date() + datetime.timedelta(days=30)


def entry(**changes: object) -> str:
    fields = {
        "cases": "'*'",
        "kind": "'tolerated'",
        "check": "'writes-own-state'",
        "issue": "'https://example.org/issues/12'",
        "until": SOON,
        **changes,
    }
    return "[[known]]\n" + "".join(f"{key} = {value}\n" for key, value in fields.items() if value is not None)


def packed(folder: Path, report: Report, known: str = "") -> Path:
    write_report(str(folder / "results.json"), report)
    if known:
        (folder / "known.toml").write_text(known)
    archive = folder / "submission.zip"
    archive.write_bytes(pack(folder / "results.json", folder / "known.toml" if known else None))
    return archive


def reasons(folder: Path, report: Report, known: str = "") -> list[str]:
    return refusals(read_submission(packed(folder, report, known)))


def test_a_whole_run_is_accepted_and_its_archive_depends_on_nothing_else(tmp_path: Path) -> None:
    report = passed_on_h200()
    assert reasons(tmp_path, report) == []
    first = (tmp_path / "submission.zip").read_bytes()
    assert packed(tmp_path, report).read_bytes() == first
    found = read_submission(tmp_path / "submission.zip")
    assert found.backend == "torch_native_state"
    assert found.manifest["profile_digest"].startswith("sha256:")
    assert found.manifest["kit_digest"].startswith("sha256:")
    assert "decode eager+graph" in found.manifest["declared"]["torch_native_state"]
    assert found.manifest["sources"] == {}


def test_failures_and_known_failures_with_an_entry_are_accepted(tmp_path: Path) -> None:
    assert reasons(tmp_path, with_row(passed_on_h200(), **FAILED)) == []
    assert reasons(tmp_path, with_row(passed_on_h200(), **KNOWN), entry()) == []


def cut(report: Report) -> Report:
    return concluded(replace(report, results=report.results[:-1], header=_planned(report, -1)))


def _planned(report: Report, more: int) -> Any:
    return replace(report.header, planned=report.header.planned + more)


def another(report: Report) -> Report:
    row = next(row for row in report.results if row.status is Status.PASSED)
    row = replace(row, case="decode-gqa2x2-d64-bf16-p16-k33-shuffled-gauss-b1prod")
    return concluded(replace(report, results=(*report.results, row), header=_planned(report, 1)))


def selected(report: Report) -> Report:
    return concluded(replace(report, header=replace(report.header, selection=Selection(("mode decode",)))))


def with_header(**changes: object) -> Callable[[Report], Report]:
    def change(report: Report) -> Report:
        return concluded(replace(report, header=replace(report.header, **changes)))

    return change


TAMPERED: dict[str, tuple[Callable[[Report], Report], str, str]] = {
    "a case-run is missing": (cut, "", "of the profile have no result; run the whole profile"),
    "a case-run of another case": (another, "", "are not of the profile; run only the profile"),
    "a mode was selected": (selected, "", "the run is a part of the profile, selected by mode decode; run all of it"),
    "no case is declared": (
        lambda report: concluded(
            replace(report, results=tuple(replace(row, status=Status.UNSUPPORTED) for row in report.results))
        ),
        "",
        "no case of the profile ran: the backend declares none of them",
    ),
    "a case-run was skipped": (
        lambda report: with_row(report, status=Status.NOT_RUN_HERE, reason="no room for it", margin=None, checks=()),
        "",
        "were skipped: no room for it; run them on a machine that can",
    ),
    "nothing was checked": (
        lambda report: with_row(report, checks=()),
        "",
        "passed without a check; the results were edited",
    ),
    "no entry for a known failure": (
        lambda report: with_row(report, **KNOWN),
        "",
        "are known failures without an entry in the submission; submit with --known-failures FILE",
    ),
    "an entry for another check": (
        lambda report: with_row(report, **KNOWN),
        entry(check="'finite'"),
        "are known failures without an entry",
    ),
    "an expired entry": (
        lambda report: with_row(report, **KNOWN),
        entry(until="2020-01-31"),
        "has expired; fix the failure",
    ),
    "an emulated device": (
        lambda report: with_row(report, device="emulated"),
        "",
        "it names a real device, and eager",
    ),
    "emulated kernels": (
        lambda report: with_row(report, kernels="emulated"),
        "",
        "ran with an emulated kernels; run them on the device",
    ),
    "another profile's digest": (
        with_header(profile="sha256:0"),
        "",
        "profile 2026.12/state has digest sha256:0 in the run",
    ),
    "a tier": (with_header(tier="core", profile=""), "", "the run is of core, which is not a profile of this kit"),
    "a changed kit": (with_header(kit_digest="sha256:0"), "", "and sha256:0 in the run: one of the two was changed"),
    "another version": (with_header(kit="0.0.1"), "", "the run is of attn-testkit 0.0.1, and this is"),
    "in process": (with_header(command="attn-testkit run --in-process"), "", "the run was --in-process"),
    "an interrupted run": (
        lambda report: concluded(replace(report, interrupted=True, finished=False)),
        "",
        "the run did not end",
    ),
    "a problem of the run": (
        lambda report: concluded(replace(report, problems=("known failure 1 matches no case",))),
        "",
        "the run itself failed: known failure 1 matches no case",
    ),
    "two backends": (
        lambda report: with_header(backends={**report.header.backends, "triton": "1"})(report),
        "",
        "the run is of 2 backends; submit one for each",
    ),
    "the kit failed": (
        lambda report: with_row(
            report, status=Status.CRASHED, reason="the kit itself failed: no lane", margin=None, checks=()
        ),
        "",
        "the kit itself failed in",
    ),
}
"""A run that must not be submitted -> how it is made, its known failures, and the reason of the refusal."""


@pytest.mark.parametrize("name", TAMPERED)
def test_a_run_that_was_cut_skipped_or_edited_is_refused_for_its_reason(name: str, tmp_path: Path) -> None:
    change, known, reason = TAMPERED[name]
    found = reasons(tmp_path, change(passed_on_h200()), known)
    assert len(found) == 1, found
    assert reason in found[0]


def repacked(archive: Path, change: Callable[[Files], None]) -> Path:
    with zipfile.ZipFile(archive) as opened:
        files = {name: opened.read(name) for name in opened.namelist()}
    change(files)
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as written:
        for name, content in files.items():
            written.writestr(name, content)
    archive.write_bytes(data.getvalue())
    return archive


def edit(files: Files, name: str, was: bytes, becomes: bytes) -> None:
    assert was in files[name]
    files[name] = files[name].replace(was, becomes, 1)


def in_manifest(**changes: object) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        files["submission.json"] = json.dumps({**json.loads(files["submission.json"]), **changes}).encode()

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda files: edit(files, "known_failures.toml", b"'*'", b"'d*'"),
            "known_failures.toml is not as the manifest",
        ),
        (lambda files: files.update({"more.json": b"{}"}), "more.json is not as the manifest says"),
        (lambda files: files.pop("known_failures.toml"), "known_failures.toml is not as the manifest says"),
        (in_manifest(device_name="NVIDIA B200 sm100"), "the manifest says device_name 'NVIDIA B200 sm100', and the"),
        (in_manifest(profile="2026.12/decode"), "the manifest says profile '2026.12/decode', and the results say"),
        (in_manifest(kit_digest="sha256:0"), "the manifest says kit_digest 'sha256:0'"),
    ],
)
def test_an_archive_that_was_edited_is_refused(change: Callable[[Files], None], reason: str, tmp_path: Path) -> None:
    archive = repacked(packed(tmp_path, with_row(passed_on_h200(), **KNOWN), entry()), change)
    (found,) = refusals(read_submission(archive))
    assert reason in found


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda files: edit(files, "results.json", b'"failed"', b'"passed"'), "results.json was changed after it was"),
        (lambda files: edit(files, "known_failures.toml", b"issue", b"isue"), "unknown key 'isue'"),
        (lambda files: edit(files, "known_failures.toml", b"issue", b"# issue"), "entry 1: issue is missing"),
        (in_manifest(format="attn-testkit-submission/9"), "has format 'attn-testkit-submission/9'; this kit reads"),
        (lambda files: files.pop("results.json"), "has the files known_failures.toml; expected an archive"),
        (lambda files: files.pop("submission.json"), "has no readable submission.json"),
        (lambda files: files.update({"../up.json": b"{}"}), "expected an archive that `attn-testkit submit` writes"),
    ],
)
def test_an_archive_that_contradicts_itself_is_not_read(
    change: Callable[[Files], None], reason: str, tmp_path: Path
) -> None:
    archive = repacked(packed(tmp_path, with_row(passed_on_h200(), **FAILED), entry()), change)
    with pytest.raises(UsageError) as raised:
        read_submission(archive)
    assert reason in str(raised.value)
    assert "/tmp" not in str(raised.value).replace(str(tmp_path), ""), "the user knows no other folder"


def test_a_file_that_is_no_archive_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_text("no")
    with pytest.raises(UsageError, match=r"x.zip is damaged, or not a zip file: .*; expected an archive that"):
        read_submission(tmp_path / "x.zip")
    with pytest.raises(UsageError, match=r"cannot read .*y.zip: No such file"):
        read_submission(tmp_path / "y.zip")


def test_records_of_quarantines_are_packed_and_a_path_is_refused(tmp_path: Path) -> None:
    crashed = with_row(passed_on_h200(), status=Status.CRASHED, margin=None, checks=(), reason="died")
    write_report(str(tmp_path / "crash.json"), crashed)
    row = next(row for row in crashed.results if row.status is Status.CRASHED)
    quarantine = entry(kind="'quarantine'", cases=repr(row.case), execution=repr(row.execution), record="'crash.json'")
    report = with_row(passed_on_h200(), status=Status.QUARANTINED, margin=None, checks=(), reason="https://e.org/1")
    assert reasons(tmp_path, report, quarantine) == []
    assert set(read_submission(tmp_path / "submission.zip").digests) == {
        "results.json", "known_failures.toml", "crash.json",
    }  # fmt: skip
    (tmp_path / "in").mkdir()
    write_report(str(tmp_path / "in" / "crash.json"), crashed)
    with pytest.raises(UsageError, match="expected a file next to it"):
        reasons(tmp_path, report, quarantine.replace("crash.json", "in/crash.json"))


def test_the_past_accepts_other_kits_and_entries_whose_day_is_over(tmp_path: Path) -> None:
    old = with_header(kit="0.0.1")(with_row(passed_on_h200(), **KNOWN))
    found = read_submission(packed(tmp_path, old, entry(until="2020-01-31")))
    assert refusals(found) != []
    assert refusals(found, in_the_past=True) == []


@pytest.mark.parametrize(
    ("changes", "emulated", "message", "color"),
    [
        ({}, False, "2026.12/state conformant in 46 of 64 cases", "brightgreen"),
        (FAILED, False, "2026.12/state failing", "red"),
        (KNOWN, False, "2026.12/state known failures", "yellow"),
        ({}, True, "2026.12/state conformant in 46 of 64 cases, emulated", "brightgreen"),
    ],
)
def test_a_badge_says_the_worst_how_much_ran_and_whether_it_is_emulated(
    changes: dict[str, Any], emulated: bool, message: str, color: str, tmp_path: Path
) -> None:
    report = passed_on_h200(**({"device": "emulated"} if emulated else {}))
    found = badge(read_submission(packed(tmp_path, with_row(report, **changes) if changes else report)))
    assert found == {"schemaVersion": 1, "label": "attention contract 1.0", "message": message, "color": color}


def test_the_commands_submit_verify_and_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_report(str(tmp_path / "red.json"), with_row(passed_on_h200(), **FAILED))
    to, badge_file = tmp_path / "red.zip", tmp_path / "badge.json"
    assert main(["submit", str(tmp_path / "red.json"), "--to", str(to), "--badge", str(badge_file)]) == 0
    assert "accepted: torch_native_state on NVIDIA H200 sm90: NOT CONFORMANT" in capsys.readouterr().out
    assert json.loads(badge_file.read_text())["color"] == "red"
    assert main(["verify", str(to)]) == 0
    write_report(str(tmp_path / "cut.json"), cut(passed_on_h200()))
    assert main(["submit", str(tmp_path / "cut.json"), "--to", str(tmp_path / "cut.zip")]) == 1
    assert main(["submit", str(tmp_path / "red.json"), "--to", str(tmp_path / "red.tar")]) == 4
    assert "cut.json: refused: " in capsys.readouterr().out
    assert not (tmp_path / "cut.zip").exists(), "a refused run is not packed"
    repacked(to, in_manifest(device="emulated"))
    assert main(["verify", str(to)]) == 1


def test_the_planned_run_is_of_the_whole_profile() -> None:
    assert planned().header.tier == PROFILE
    assert H200["device"] == "cuda"

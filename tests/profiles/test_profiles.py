"""Frozen profiles: a released one stays as it is, and a run of one covers what the backend declares."""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from attn_testkit.backends.torch_native_state import TorchNativeStateBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.cli import main
from attn_testkit.profiles import DRAFT, FOLDER, RELEASED, Profile, profile_names, read_profile, written
from attn_testkit.registry import UsageError
from attn_testkit.results.case_result import Status
from attn_testkit.running.planning.plan import plan_run
from attn_testkit.running.planning.request import Plan, Request, prepare
from attn_testkit.steps.digest import digests_of

PINNED: Mapping[str, str] = tomllib.loads(Path(__file__).with_name("released.toml").read_text())
CASE = "decode-gqa2x2-d64-bf16-p16-k33-shuffled-gauss-b1prod"


def changed(profile: Profile, pinned: Mapping[str, str]) -> list[str]:
    """What a profile's file says otherwise than the kit; of a draft only ids, which the next kit may rename."""
    found = []
    for case, digests in profile.cases.items():
        try:
            parsed = parse_case(case)
        except ValueError as error:
            found.append(f"{case} is no case: {error}")
            continue
        if parsed.id != case:
            found.append(f"{case} is now {parsed.id}")
        elif profile.status == RELEASED and digests_of(parsed) != digests:
            found.append(f"{case} has other data")
    if profile.status == RELEASED and pinned.get(profile.name) != profile.digest:
        found.append("its digest is not the one in tests/profiles/released.toml")
    return found


@pytest.mark.parametrize("name", profile_names())
def test_ids_and_digests_of_a_profile_are_those_of_the_kit(name: str) -> None:
    profile = read_profile(name)
    assert changed(profile, PINNED) == [], "write a draft anew: python ci/make_profile.py choose RELEASE"
    assert 30 <= len(profile.cases) <= 80


def test_no_released_profile_is_missing() -> None:
    assert {name for name in profile_names() if read_profile(name).status == RELEASED} == {*PINNED}


def in_a_folder(folder: Path, text: str) -> Profile:
    (folder / "2020.01").mkdir(exist_ok=True)
    (folder / "2020.01" / "decode.toml").write_text(text)
    read_profile.cache_clear()
    return read_profile("2020.01/decode", folder)


def test_a_change_of_a_released_profile_is_seen_and_a_draft_may_change(tmp_path: Path) -> None:
    digests = digests_of(parse_case(CASE))
    good = in_a_folder(tmp_path, written({CASE: digests}, RELEASED))
    assert changed(good, {good.name: good.digest}) == []
    other_data = in_a_folder(tmp_path, written({CASE: ("0" * 12, digests[1])}, RELEASED))
    assert changed(other_data, {good.name: good.digest}) == [
        f"{CASE} has other data",
        "its digest is not the one in tests/profiles/released.toml",
    ]
    assert changed(in_a_folder(tmp_path, written({CASE: ("0" * 12, "0" * 12)}, DRAFT)), {}) == []
    (gone,) = changed(in_a_folder(tmp_path, written({CASE.replace("gqa", "gqq"): digests}, DRAFT)), {})
    assert "is no case" in gone


def test_the_digest_follows_cases_contract_and_recipe_and_not_the_status(tmp_path: Path) -> None:
    text = written({CASE: ("a", "b")})
    digest = in_a_folder(tmp_path, text).digest
    assert in_a_folder(tmp_path, text.replace(DRAFT, RELEASED)).digest == digest
    assert in_a_folder(tmp_path, text.replace('"a b"', '"a c"')).digest != digest
    with pytest.raises(UsageError, match="is for recipe 2 of expected results, and this kit has recipe 1"):
        in_a_folder(tmp_path, text.replace("recipe = 1", "recipe = 2"))


def test_a_run_of_a_profile_plans_what_the_backend_declares_and_lists_the_rest() -> None:
    declared = TorchNativeStateBackend.capabilities
    plan = plan_run(Request(("torch_native_state",), profile="2026.12/state", device="cpu"), lambda _: declared)
    profile = read_profile("2026.12/state")
    assert plan.header.tier == profile.name
    assert plan.header.profile == profile.digest
    assert not plan.header.selection
    draft = read_profile(profile.name).status == DRAFT
    assert ("2026.12/state is a draft" in str(plan.header.notes)) == draft
    planned = {item.case for item in plan.items}
    undeclared = {row.case for row in plan.preset if row.status is Status.UNSUPPORTED and row.case}
    assert planned <= profile.cases.keys()
    assert len(planned) > 20
    assert planned | undeclared == profile.cases.keys(), "a case is planned, or it says what is not declared"
    one = plan_run(Request(("x",), profile="2026.12/state", modes=("extend",), device="cpu"), lambda _: declared)
    assert one.header.selection.by == ("mode extend",)
    assert {item.mode for item in one.items} == {"extend"}


def test_an_entry_for_cases_beyond_the_profile_is_no_problem(tmp_path: Path) -> None:
    known = tmp_path / "known.toml"
    entry = "[[known]]\ncases = 'extend-*'\nkind = 'tolerated'\ncheck = 'finite'\n"
    known.write_text(f"{entry}issue = 'https://example.org/1'\nuntil = {datetime.date.today()}\n")

    class Judge:
        def plan(self, request: Request) -> Plan:
            return plan_run(request, lambda _: TorchNativeStateBackend.capabilities)

    request = Request(
        ("torch_native_state",), profile="2026.12/state", modes=("decode",), device="cpu", known_failures=known
    )
    assert prepare(Judge(), request).problems() == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--profile", "2026.12/decod"], "unknown profile '2026.12/decod'; did you mean '2026.12/decode'?"),
        (["--profile", "2026.12/decode", "--case", "decode-*"], "leave out cases, or the profile"),
        (["--profile", "2026.12/decode", "--seed", "3"], "leave out a seed, or the profile"),
    ],
)
def test_a_request_that_a_profile_excludes_is_refused(
    more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--backend", "torch_native", *more]) == 4
    assert message in capsys.readouterr().err


def test_profiles_ship_with_the_package() -> None:
    assert FOLDER.is_relative_to(Path(__file__).parents[2] / "attn_testkit")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert project["package-data"]["attn_testkit.profiles"] == ["*/*.toml"]

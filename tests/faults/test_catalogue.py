"""The catalogue itself: complete, well-formed, importable from the command line."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from attn_testkit.audit.show import checks_page
from attn_testkit.checks import CHECKS
from attn_testkit.contract import ForwardMode
from attn_testkit.faults import all_faults, all_left_out, all_twins
from attn_testkit.faults.catalogue import CLASSES, fault
from attn_testkit.faults.parent import PlannedBackend

ROOT = Path(__file__).resolve().parents[2]


def test_there_are_at_least_a_hundred_faults_of_every_class_and_a_dozen_twins() -> None:
    assert len(all_faults()) >= 100
    assert {entry.bug_class for entry in all_faults()} == set(CLASSES)
    assert len(all_twins()) >= 12


def test_every_spec_names_the_class_that_registered() -> None:
    for entry in (*all_faults(), *all_twins()):
        module, _, name = entry.spec.partition(":")
        assert getattr(importlib.import_module(module), name) is entry.backend


def test_no_two_entries_share_a_slug_and_left_out_ones_are_really_absent() -> None:
    slugs = [entry.slug for entry in all_faults()]
    assert len(slugs) == len(set(slugs))
    assert not set(slugs) & {entry.slug for entry in all_left_out()}
    assert all(entry.reason for entry in all_left_out())


def test_every_check_is_the_expected_one_of_a_fault() -> None:
    assert set(CHECKS) == {entry.promises[0] for entry in all_faults()}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"promises": ("matches-orakle",)}, "unknown promises"),
        ({"promises": ()}, "at least one promise"),
        ({"bug_class": "Z"}, "class 'Z'"),
        ({"slug": "Not A Slug"}, "lower-case words"),
        ({"slug": "qlens-packed-vs-uniform-stride"}, "taken"),
        ({"modes": ()}, "none of its modes"),
        ({"source": ""}, "must be told"),
    ],
)
def test_an_entry_that_cannot_be_audited_is_refused(changes: dict[str, object], told: str) -> None:
    all_faults()
    entry: dict[str, object] = {
        "slug": "a-slug",
        "bug_class": "A",
        "source": "general",
        "modes": (ForwardMode.DECODE,),
        "mechanism": "does it wrong",
        "promises": ("matches-oracle",),
    }
    with pytest.raises(ValueError, match=told):
        fault(**{**entry, **changes})(PlannedBackend)  # type: ignore[arg-type]


def test_the_page_of_checks_is_up_to_date() -> None:
    page = ROOT / "docs" / "checks.md"
    assert page.read_text() == checks_page(), "run: attn-testkit audit --docs docs/checks.md"

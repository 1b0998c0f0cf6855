"""What the limits and the data patterns are for: errors that a fixed tolerance cannot see."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from attn_testkit_corpus.faults.sensitivity import KINDS, Point, markdown, point, svg

DOCS = Path(__file__).resolve().parents[4] / "docs" / "explanation"


@pytest.mark.parametrize("length", [64, 4096])
def test_a_fiftieth_of_one_key_is_seen_in_bfloat16_at_any_length(length: int) -> None:
    found = point("key", "bf16", length)
    assert found.kit is not None
    assert found.kit < 0.02


@pytest.mark.parametrize("length", [512, 4096])
def test_half_of_any_key_is_seen_at_any_length_and_was_not_seen_without_codes(length: int) -> None:
    found = point("any", "bf16", length)
    assert found.kit is not None
    assert 0.4 < found.kit < 0.6
    assert (found.pattern, found.before, found.fixed) == ("plus_minus_one", None, None)


def test_a_fixed_tolerance_misses_a_key_of_512_that_is_left_out() -> None:
    assert point("key", "bf16", 512).fixed is None


@pytest.mark.parametrize("kind", ["row", "head"])
def test_a_hundredth_of_a_row_or_head_is_seen_where_a_fixed_tolerance_needs_a_tenth(kind: str) -> None:
    found = point(kind, "bf16", 512)
    assert found.kit is not None
    assert found.fixed is not None
    assert found.kit < 0.01
    assert found.fixed > 0.05


def test_the_page_of_the_docs_has_these_numbers() -> None:
    found = point("key", "bf16", 512)
    (row,) = [line for line in markdown([found]).splitlines() if "| bf16 | 512 |" in line]
    assert row in (DOCS / "sensitivity.md").read_text(), "run: python -m attn_testkit_corpus.faults.sensitivity docs"


def test_the_plot_is_well_formed_and_has_every_series() -> None:
    points = [Point(k, d, n, 0.01, "one_hot", None) for k in KINDS for d in ("fp32", "fp16", "bf16") for n in (64, 512)]
    root = ElementTree.fromstring(svg(points))
    lines = list(root.iter("{http://www.w3.org/2000/svg}polyline"))
    assert len(lines) == len(KINDS) * 3 * 2 + 3, "of a key in the middle, the kit without codes as well"
    heights = {line.get("class", "").split()[-1]: line.get("points", "").split()[0].split(",")[1] for line in lines}
    assert float(heights["kit"]) > float(heights["fixed"]), "what is caught stands below what is never caught"
    assert all(0 < float(y) < 320 for y in heights.values())
    ElementTree.parse(DOCS / "sensitivity.svg")

"""A bit-packed tree mask is filled as the contract says, in eager steps and at replays."""

import pytest
from in_process import check_backend

from attn_testkit.results.case_result import CaseResult, Status

_CASE = "target-verify-gqa2x2-d64-fp16-p16-k29.125.61-{tree}-reversed-gauss-b5{padding}"
TREES = {
    "uint8": "t0.0.1.1.3",
    "uint8, full": "t0.0.1.1.2.2.3",
    "uint16": "t0.0.1.1.2.2.3.3.4",
    "uint16, full": "t0.0.1.1.2.2.3.3.4.4.5.5.6.6.7",
    "uint32": "t0.0.1.1.2.2.3.3.4.4.5.5.6.6.7.7",
    "uint32, full": "chain32",
}


def run(name: str, tree: str, padding: str = "prod") -> list[CaseResult]:
    cases = [_CASE.format(tree=tree, padding=padding)]
    return [r for r in check_backend(f"packed_masks:{name}", device="cpu", cases=cases) if r.case]


@pytest.mark.parametrize("name", TREES)
def test_a_bit_packed_mask_passes_eager_and_graph(name: str) -> None:
    results = run("Packed", TREES[name], "prod" if "full" in name else "stale")
    assert [(r.execution, r.status, r.findings) for r in results] == [
        ("eager", Status.PASSED, ()),
        ("graph", Status.PASSED, ()),
    ]


@pytest.mark.parametrize(
    ("name", "tree"),
    [
        ("FirstNodeInTheHighestBit", TREES["uint8"]),
        ("FirstNodeInTheHighestBit", TREES["uint16"]),
        ("RowsOfAnotherWidth", TREES["uint16"]),
    ],
)
def test_bits_that_are_read_in_another_order_fail(name: str, tree: str) -> None:
    results = run(name, tree)
    assert [r.status for r in results] == [Status.FAILED] * 2
    assert all("differs from the oracle" in r.findings[0].headline for r in results)


def test_trees_that_no_item_can_hold_are_reported() -> None:
    (finding,) = run("Packed", "chain33")[0].findings
    assert finding.check == "output-contract"
    assert "hold at most 32 nodes, for trees of 33" in finding.headline
    assert "use QLEN_ONLY" in finding.hint

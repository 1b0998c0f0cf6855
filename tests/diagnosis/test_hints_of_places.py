"""Hints about columns of the output, parts of every tile, lengths of another forward, and values of a capture."""

from __future__ import annotations

from dataclasses import replace

import broken_grids
import broken_places as broken
import pytest
import torch
from in_process import check_backend
from wrong_steps import observed, v1

from attn_testkit.cases.case import parse_case
from attn_testkit.checks import Comparison
from attn_testkit.diagnosis.attended_keys import AttendedKeys
from attn_testkit.diagnosis.hints import Evidence
from attn_testkit.diagnosis.hints.forwards import lengths_of_the_last_forward
from attn_testkit.diagnosis.hints.periods import missing_in_every_tile
from attn_testkit.diagnosis.launch_grids import programs_of_nobody
from attn_testkit.diagnosis.moved_columns import moved_columns
from attn_testkit.families.expected import expect
from attn_testkit.results.finding import Finding
from attn_testkit.steps.schedule import make_schedule
from attn_testkit_corpus.faults.o_draft_decode import FirstLengths, ReadsASibling, StepCountedTwice

DECODE = "decode-gqa4x2-d64-bf16-p16-k200.33.120-shuffled-gauss-b4prod"
DRAFT = "draft-decode-mha2-d64-bf16-p4-k9.30.3-topk3steps6-shuffled-gauss-b3prod"
VERIFY = "target-verify-gqa2x2-d64-bf16-p16-k40.9.100-chain4-shuffled-gauss-b3prod"


def finding_of(backend: type, case_id: str, execution: str = "eager") -> Finding:
    found = check_backend(backend, device="cpu", cases=[case_id], executions=[execution])
    return next(each.findings for each in found if each.case)[0]


@pytest.mark.parametrize(
    ("backend", "case_id", "execution", "said", "not_said"),
    [
        (broken.ColumnsSwizzled, DECODE, "eager", "column 0 holds what column 8 should", "missing"),
        (
            broken.EndOfATileFromItsStart,
            DECODE,
            "eager",
            "KV tokens 32..47 of every 48 are missing, in each tile of 48, and 0..15 count twice",
            "a page or tile is looked up instead of another",
        ),
        (
            broken.EndOfATileLost,
            DECODE,
            "eager",
            "KV tokens 32..47 of every 48 are missing, in each tile of 48: probably",
            "a page or a split is skipped",
        ),
        (
            broken.LengthsOfTheLastForward,
            DRAFT,
            "eager",
            "all forwards of a draft probably use the lengths of the last one",
            "a page of another branch",
        ),
        (
            broken.EpilogueOfEightRows,
            VERIFY,
            "graph",
            "only the graph is wrong, even if it is captured with this batch",
            "captured batch",
        ),
        (
            broken.LengthsOfTheCapture,
            DECODE.replace("b4prod", "b3prod"),
            "graph",
            "still uses a value from capture time (a length, stride, grid size or pointer): captured with this batch",
            "only the graph is wrong",
        ),
        (
            broken.ValuesIn32BitsInGraphs,
            "decode-gqa2x2-d64-bf16-p16-k9.37.1-shuffled-gauss-layers1from0-b3prod-bigpool",
            "graph",
            "an address overflows 32 bits, only in the graph",
            "never computed",
        ),
    ],
)
def test_a_mistake_about_places_is_named_and_no_other(
    backend: type, case_id: str, execution: str, said: str, not_said: str
) -> None:
    hint = finding_of(backend, case_id, execution).hint
    assert said in hint
    assert not_said not in hint


GRID = "decode-gqa4x2-d64-bf16-p16-k20.33.12-shuffled-gauss-b3prod"


@pytest.mark.parametrize("execution", ["eager", "graph"])
def test_programs_that_belong_to_no_request_are_named_with_their_kernel_and_nothing_else(execution: str) -> None:
    hint = finding_of(broken_grids.GridOfTheBuffer, GRID, execution).hint
    assert hint == (
        "programs 3..5 of kernel clear_rows_without_keys along axis 0 belong to no request, and what they write spoils "
        "the result: the step has 3 requests, and the result is right with 3"
    )


def test_a_grid_that_is_larger_than_the_batch_is_not_blamed_for_another_mistake() -> None:
    assert "belong to no" not in finding_of(broken_grids.GuardedGridAndAWrongScale, GRID).hint
    found = check_backend(broken_grids.GuardedGrid, device="cpu", cases=[GRID])
    assert {each.status for each in found if each.case} == {"passed"}


def test_one_program_more_than_rows_is_cut_and_every_axis_is_asked_about_at_most_once() -> None:
    schedule = make_schedule(parse_case(VERIFY))
    step, asked = schedule.steps[0], list[tuple[int, int]]()
    right = observed(schedule, expect(schedule, step).attention)

    class Kernels:
        grids = frozenset({("merge", (step.tokens + 1, 2)), ("attend", (step.bs, step.tokens))})
        last_grids = (("attend", (step.bs, step.tokens)), ("merge", (step.tokens + 1, 2)))

        def eager(self, schedule, step, *, most_programs):
            asked.append(most_programs)
            return right if most_programs == (0, step.tokens) else None

    text = programs_of_nobody(Kernels(), schedule, step, in_graph=False)  # type: ignore[arg-type]
    assert text.startswith("program 12 of kernel merge along axis 0 belongs to no row")
    assert asked == [(0, step.bs), (1, step.bs), (0, step.tokens)]


def test_no_more_than_four_grids_are_tried_for_one_failure() -> None:
    schedule, asked = make_schedule(parse_case(VERIFY)), list[tuple[int, int]]()

    class Kernels:
        grids = frozenset({("attend", (90, 90, 90))})
        last_grids = (("attend", (90, 90, 90)),)

        def eager(self, schedule, step, *, most_programs):
            asked.append(most_programs)

    assert programs_of_nobody(Kernels(), schedule, schedule.steps[0], in_graph=False) == ""  # type: ignore[arg-type]
    assert asked == [(0, 3), (1, 3), (2, 3), (0, 12)]


def test_no_attended_keys_are_reported_where_columns_are_moved() -> None:
    assert finding_of(broken.ColumnsSwizzled, DECODE).attended == ""


@pytest.mark.parametrize("backend", [FirstLengths, ReadsASibling, StepCountedTwice])
def test_other_mistakes_of_a_draft_are_not_lengths_of_its_last_forward(backend: type) -> None:
    assert "lengths of the last" not in finding_of(backend, DRAFT).hint


def moved(change) -> list[int] | None:
    schedule = v1()
    expected = expect(schedule, schedule.steps[0])
    return moved_columns(Comparison(observed(schedule, change(expected.attention.clone())), expected))


def test_columns_are_moved_if_every_wrong_row_has_its_numbers_in_the_same_other_columns() -> None:
    turned = [*range(8, 32), *range(8)]

    def one_row_otherwise(out: torch.Tensor) -> torch.Tensor:
        return torch.cat([out[:, :1].roll(3, -1), out[:, 1:].roll(-8, -1)], 1)

    def one_number_otherwise(out: torch.Tensor) -> torch.Tensor:
        out = out.roll(-8, -1)
        out[1, 2, 1, 5] += 1.0
        return out

    def three_heads(out: torch.Tensor) -> torch.Tensor:
        out[0, 0, :3] = out[0, 0, :3].roll(-8, -1)
        return out

    def four_heads(out: torch.Tensor) -> torch.Tensor:
        out[0, 0] = out[0, 0].roll(-8, -1)
        return out

    assert moved(lambda out: out.roll(-8, -1)) == turned
    assert moved(four_heads) == turned
    assert moved(three_heads) is None
    assert moved(one_row_otherwise) is None
    assert moved(one_number_otherwise) is None
    # Each column holds a number that many columns should hold: nothing says which.
    assert moved(lambda out: torch.zeros_like(out)) is None
    assert moved(lambda out: out) is None


def attended(length: int, missing: set[int], doubled: set[int] | None = None, **changes) -> AttendedKeys:
    wanted = frozenset(range(length))
    found = AttendedKeys(
        request=0, row=0, used=wanted - missing, wanted=wanted, doubled=frozenset(doubled or ()), looked_at=wanted,
        length=length, elsewhere={}, total=1.0,
    )  # fmt: skip
    return replace(found, **changes)


def periodic(found: AttendedKeys) -> str:
    schedule = v1()
    expected = expect(schedule, schedule.steps[0])
    comparison = Comparison(observed(schedule, expected.attention), expected)
    return missing_in_every_tile(Evidence(schedule, comparison, found, [], in_graph=False))


def test_missing_keys_are_part_of_every_tile_if_each_tile_up_to_the_last_lacks_them() -> None:
    of_every_ten = {key for key in range(100) if 6 <= key % 10 < 8}
    assert periodic(attended(100, of_every_ten)).startswith(
        "KV tokens 6..7 of every 10 are missing, in each tile of 10:"
    )
    cut_by_the_end = {key for key in range(97) if 6 <= key % 10 < 8}
    assert "6..7 of every 10" in periodic(attended(97, cut_by_the_end))
    in_pages = {key for key in range(100) if key % 4 == 3}
    assert periodic(attended(100, in_pages)).startswith("KV token 3 of every 4 is missing, in each page of 4:")
    from_the_front = {key - 6 for key in of_every_ten}
    assert "and 0..1 count twice: a part of a tile is" in periodic(attended(100, of_every_ten, from_the_front))


@pytest.mark.parametrize(
    "found",
    [
        attended(100, {6, 7}),
        attended(100, {6, 7, 16, 17}),
        attended(100, {key for key in range(100) if 6 <= key % 10 < 8} - {7}),
        attended(100, {key for key in range(20, 100) if 6 <= key % 10 < 8}),
        attended(100, {key for key in range(100) if key % 3 == 2}),
        attended(100, {key for key in range(100) if 6 <= key % 10 < 8}, {0, 1}),
        attended(100, {key for key in range(100) if 6 <= key % 10 < 8}, elsewhere={"others": 0.1}),
        attended(100, {key for key in range(100) if 6 <= key % 10 < 8}, heads=(1,)),
        attended(100, {key for key in range(100) if 6 <= key % 10 < 8}, looked_at=frozenset(range(99))),
    ],
)
def test_missing_keys_without_a_period_of_all_tiles_are_not_part_of_every_tile(found: AttendedKeys) -> None:
    assert periodic(found) == ""


def test_a_row_of_a_draft_gives_weight_to_as_many_slots_as_later_forwards_fill() -> None:
    schedule = make_schedule(parse_case(DRAFT))
    step = schedule.steps[0]
    expected = expect(schedule, step)
    depth = [d for request in step.requests for d in request.draft.depths]

    def hint(weight: float, last: int = 4) -> str:
        out = expected.attention.clone()
        out[:, [row for row, d in enumerate(depth) if d < last]] += 9.0
        comparison = Comparison(observed(schedule, out), expected)
        found = attended(10, set(), elsewhere={"tail": weight})
        return lengths_of_the_last_forward(Evidence(schedule, comparison, found, [], in_graph=False))

    assert max(depth) == 4
    assert "a row 4 forwards before it gives weight to 4 slots" in hint(4 / 14)
    assert hint(4 / 14 + 0.45 / 14) != ""
    assert hint(4 / 14 + 0.55 / 14) == ""
    assert hint(4 / 14 - 0.55 / 14) == ""
    # The last forward is wrong, too.
    assert hint(4 / 14, last=5) == ""

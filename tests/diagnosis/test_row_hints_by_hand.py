"""Each hint about rows, heads and requests: evidence that just fits it, and evidence that just does not."""

from __future__ import annotations

from types import SimpleNamespace as Of
from typing import Any

import pytest
import torch

from attn_testkit.checks.describe import index_ranges
from attn_testkit.contract import ForwardMode, HeadShape
from attn_testkit.diagnosis.hints import batch, heads, keys, rows
from attn_testkit.diagnosis.misrouted_rows import MisroutedRow


def request(new: int = 1, prefix: int = 9, topk: int = 0, first_page: int = 1) -> Any:
    slots = torch.arange(new + prefix) + 4 * first_page
    return Of(new=new, prefix=prefix, tree=Of(topk=topk) if topk else None, draft=None, shared=0, slots=slots, spans=())


def case(**fields: Any) -> Any:
    shape = HeadShape(fields.pop("q_heads", 4), fields.pop("kv_heads", 2), 32)
    values = {
        "mode": ForwardMode.DECODE,
        "width": 4,
        "page_size": 4,
        "data": "gauss",
        "layout": "shuffled",
        "kv_splits": "",
        "kv_dtype": "same",
        **fields,
    }
    return Of(head_shape=shape, rope_dim=0, head_maps=(), **values)


def evidence(lens: list[int], wrong: list[int] = [], requests: list[Any] | None = None, **fields: Any) -> Any:  # noqa: B006
    requests = requests or [request(prefix=n - 1) for n in lens]
    schedule = fields.pop("schedule", Of(case=case()))
    vars(schedule).setdefault("max_context_len", 0)
    data = getattr(schedule.case, "data", "gauss")
    step = Of(requests=requests, bs=len(requests), tokens=sum(r.new for r in requests), data=data)
    values = {
        "step": step,
        "lens": lens,
        "wrong": wrong,
        "rows": [],
        "passed": [],
        "in_graph": False,
        "of_capture": None,
        "misrouted": (),
        "schedule": schedule,
        "attended": None,
        "before": None,
        "reads_foreign": False,
        "right_with_zeros": True,
        "computes_nan": False,
        "can_be_asked": False,
        "wrong_shapes": [HeadShape(4, 2, 32)],
        "changed": None,
        "comparison": Of(unwritten=torch.zeros(1, step.tokens, 4, 32, dtype=torch.bool)),
    }
    return Of(**{**values, **fields})


def mine(request: int, row: int, of: int, of_row: int | None = None, **fields: Any) -> MisroutedRow:
    return MisroutedRow(request, row, of, of_row, **fields)


ONE_EACH = [request(prefix=4), request(prefix=7)]
TWO_EACH = [request(2, 4), request(2, 7)]
SWAPS: list[tuple[str, Any, tuple[MisroutedRow, ...], str]] = [
    (
        "copied",
        ONE_EACH,
        (mine(0, 0, 1, 0, copied=True),),
        "are wrong: requests 0-1 hold the same values as each other",
    ),
    (
        "copied of several",
        TWO_EACH,
        (mine(0, 0, 1, 0, copied=True),),
        "are wrong: request 0 holds the same values as request 1",
    ),
    ("inside", TWO_EACH, (mine(0, 0, 0, 1), mine(0, 1, 0, 0)), "the order of rows in a request"),
    (
        "inside and between",
        TWO_EACH,
        (mine(0, 0, 0, 1), mine(0, 1, 1, 0)),
        "or a reordering of requests is not undone",
    ),
    ("one row each", ONE_EACH, (mine(0, 0, 1, 0), mine(1, 0, 0, 0)), "results are returned in another order than"),
    ("several rows", TWO_EACH, (mine(0, 0, 1, 0), mine(1, 0, 0, 0)), "or a reordering of requests is not undone"),
    ("as long as its own", ONE_EACH, (mine(0, 0, 1, None, keys=5),), "the request row (req_pool_indices)"),
    ("as long as theirs", ONE_EACH, (mine(0, 0, 1, None, keys=8),), "the request row (req_pool_indices)"),
    (
        "one as long as its own",
        ONE_EACH,
        (mine(0, 0, 1, None, keys=5), mine(1, 0, 0, None, keys=3)),
        "offsets of query rows (cu_seqlens_q) are wrong: ",
    ),
    (
        "one as long as theirs",
        ONE_EACH,
        (mine(0, 0, 1, None, keys=8), mine(1, 0, 0, None, keys=3)),
        "offsets of query rows (cu_seqlens_q) are wrong: ",
    ),
    ("of no length", ONE_EACH, (mine(0, 0, 1, None, keys=6),), "offsets of query rows (cu_seqlens_q) are wrong: "),
    (
        "a part of the rows",
        TWO_EACH,
        (mine(0, 0, 1, None, keys=5),),
        "offsets of query rows (cu_seqlens_q) are wrong: ",
    ),
    (
        "all rows of one",
        TWO_EACH,
        (mine(0, 0, 1, None, keys=5), mine(0, 1, 1, None, keys=6)),
        "the request row (req_pool_indices)",
    ),
    (
        "all rows of one, of any length",
        TWO_EACH,
        (mine(0, 0, 1, None, keys=3), mine(0, 1, 1, None, keys=3)),
        "the request row (req_pool_indices)",
    ),
]


@pytest.mark.parametrize(("requests", "misrouted", "text"), [s[1:] for s in SWAPS], ids=[s[0] for s in SWAPS])
def test_whose_rows_they_are_says_what_was_mixed_up(
    requests: Any, misrouted: tuple[MisroutedRow, ...], text: str
) -> None:
    lens = [r.prefix + r.new for r in requests]
    assert text in rows.rows_of_others(evidence(lens, requests=requests, misrouted=misrouted))


@pytest.mark.parametrize(
    ("mode", "accepted", "misrouted", "said"),
    [
        (ForwardMode.DRAFT_EXTEND_V2, 1, mine(0, 0, 1, 0, copied=True), True),
        (ForwardMode.DRAFT_EXTEND_V2, 2, mine(0, 0, 1, 0, copied=True), False),
        (ForwardMode.TARGET_VERIFY, 1, mine(0, 0, 1, 0, copied=True), False),
        (ForwardMode.DRAFT_EXTEND_V2, 1, mine(0, 0, 0, 1), False),
    ],
    ids=["packed", "all are accepted", "another mode", "inside a request"],
)
def test_offsets_of_draft_extend_v2_may_be_those_of_accepted_rows(
    mode: ForwardMode, accepted: int, misrouted: MisroutedRow, said: bool
) -> None:
    requests = [request(2, 4), request(2, 7)]
    for each in requests:
        each.accepted = accepted
    found = evidence([6, 9], requests=requests, misrouted=(misrouted,), schedule=Of(case=case(mode=mode)))
    text = rows.rows_of_others(found)
    assert ("probably the running sum of accepted counts, though in this mode each request has 2 rows" in text) is said


@pytest.mark.parametrize(
    ("new", "misrouted", "said"),
    [
        # Two heads for a KV head: 4 rows are 8 pairs, and a tile of 16 is 8 rows.
        (4, [mine(1, 0, 0, 3), mine(1, 3, 0, 3), mine(2, 0, 1)], "in tiles of 16 pairs of token and head, 8 rows for"),
        (4, [mine(1, 0, 0, 3), mine(1, 3, 0), mine(2, 0, 1), mine(2, 1, 2, 3, copied=True)], "in tiles of 16 pairs"),
        (8, [mine(1, 0, 0), mine(1, 7, 0), mine(2, 0, 1)], "in tiles of 32 pairs of token and head, 16 rows for"),
        (4, [mine(1, 0, 0, 3), mine(2, 0, 1)], ""),
        (4, [mine(1, 0, 0, 3), mine(1, 3, 0, 3), mine(2, 0, 0)], ""),
        (4, [mine(1, 0, 0, 3), mine(1, 3, 1), mine(2, 0, 1)], ""),
        (64, [mine(1, 0, 0), mine(1, 3, 0), mine(2, 0, 1)], ""),
    ],
    ids=["sixteen", "copied", "thirty-two", "two rows", "all of request 0", "another request", "whole tiles"],
)
def test_offsets_in_tiles_lead_each_row_to_another_request(new: int, misrouted: list[MisroutedRow], said: str) -> None:
    requests = [request(new, 4) for _ in range(3)]
    found = rows.rows_of_others(evidence([9] * 3, requests=requests, misrouted=tuple(misrouted)))
    assert ("tiles of" in found) is bool(said)
    assert said in found


def test_a_count_of_the_widest_request_is_named_if_offsets_are_right_either_way() -> None:
    assert rows.counted_as_widest(v1([2, 2, 1], [2], [4])) == 2
    assert rows.counted_as_widest(v1([2, 1, 2], [1], [2])) == 2
    assert rows.counted_as_widest(v1([1, 2, 1], [2], [3])) == 0, "offsets behind the first request are wrong, too"
    assert rows.counted_as_widest(v1([2, 2, 1], [1, 2], [3, 4])) == 0, "one has as many rows"
    assert rows.counted_as_widest(v1([2, 2, 1], [], [])) == 0
    assert "the causal bound, or the number of new rows, is that of 2" in rows.uneven_offsets(v1([2, 2, 1], [2], [4]))


def test_two_swapped_rows_are_named() -> None:
    swaps = tuple(mine(i, 0, 1 - i, 0) for i in (0, 1))
    text = rows.rows_of_others(evidence([5, 8], misrouted=swaps))
    assert text.endswith(": request 0 holds the result of request 1, request 1 holds the result of request 0")
    third = rows.rows_of_others(evidence([5, 8], misrouted=(*swaps, swaps[0])))
    assert third.endswith("of request 0 and so on")
    assert rows.rows_of_others(evidence([5, 8])) == ""
    mixed = (mine(0, 0, 1, 0, copied=True), mine(1, 0, 0, 0))
    assert "hold the same values as each other" not in rows.rows_of_others(evidence([5, 8], misrouted=mixed))


def test_a_swapped_row_is_named_with_what_tells_it_apart() -> None:
    assert mine(1, 0, 0, 2).text == "request 1 holds the result of request 0 row 2"
    assert mine(1, 2, 0, 0).text == "request 1 row 2 holds the result of request 0"
    assert mine(1, 2, 1, 0).text == "request 1 row 2 holds the result of request 1 row 0"
    assert mine(1, 0, 0, 0, copied=True).text == "request 1 holds the same values as request 0"
    assert mine(1, 0, 0, 2).keys == 0, "it has the other row's query as well, and says nothing of a length"
    assert mine(1, 0, 0, None, keys=4).text == "request 1 was computed with KV tokens 0..3 of request 0"


def v1(
    counts: list[int], wrong: list[int], flat: list[int], in_graph: bool = False, passed: Any = (), width: int = 4
) -> Any:
    schedule = Of(case=case(mode=ForwardMode.DRAFT_EXTEND, width=width))
    requests = [request(new) for new in counts]
    return evidence([9] * len(counts), wrong, requests, rows=flat, in_graph=in_graph, passed=passed, schedule=schedule)


@pytest.mark.parametrize(
    ("counts", "flat", "said"),
    [
        ([1, 3], [1, 2, 3], "a uniform stride of 4"),
        ([4, 1], [0, 1, 2, 3, 4], ""),
        ([2, 4], [2, 3, 4, 5], "a uniform stride of 4"),
        ([2, 4], [4, 5], "a uniform stride of 2"),
        ([1, 4], [1, 2, 3], "a uniform stride of 2"),
        ([4, 4], [4], ""),
        ([3], [0], ""),
        ([1, 3], [0], ""),
        ([1, 3], [], ""),
    ],
)
def test_in_eager_the_wrong_rows_must_be_those_of_a_uniform_stride(
    counts: list[int], flat: list[int], said: str
) -> None:
    found = rows.uneven_offsets(v1(counts, [0], flat))
    if said and flat in rows._wrong_under(int(said.split()[-1]), counts):
        assert said in found
        assert f"rows are packed: accepted counts are {', '.join(map(str, counts))} of 4, and the wrong rows" in found
    elif not said:
        assert found == ""


def test_rows_that_a_stride_gets_wrong_are_counted_from_both_ends() -> None:
    assert rows._wrong_under(2, [2, 2]) == []
    assert rows._wrong_under(2, [1, 2]) == [[0, 1, 2], [1, 2]]
    assert rows._wrong_under(3, [3, 1]) == [[3]]
    assert rows._wrong_under(2, [2, 1, 2]) == [[2, 3, 4], [3, 4]]


EVEN, UNEVEN = Of(requests=[request(4), request(4)]), Of(requests=[request(1), request(4)])


@pytest.mark.parametrize(
    ("counts", "wrong", "passed", "said"),
    [
        ([1, 4], [1], [], True),
        ([3, 3], [1], [], True),
        ([4, 4], [1], [], False),
        ([1, 4], [0, 1], [], False),
        ([1, 4], [0, 1], [Of(step=EVEN, replay=True)], True),
        ([1, 4], [0, 1], [Of(step=EVEN, replay=False)], False),
        ([1, 4], [0, 1], [Of(step=UNEVEN, replay=True)], False),
        ([1, 4, 4], [0, 1], [], True),
    ],
)
def test_under_a_graph_uneven_counts_are_named_unless_everything_is_wrong(
    counts: list[int], wrong: list[int], passed: Any, said: bool
) -> None:
    found = rows.uneven_offsets(v1(counts, wrong, [], in_graph=True, passed=passed))
    assert bool(found) is said
    if said:
        assert (
            f": accepted counts are {', '.join(map(str, counts))} of 4, so rows are packed at 0, {counts[0]}" in found
        )


@pytest.mark.parametrize("in_graph", [False, True])
def test_in_extend_the_wrong_rows_must_be_those_of_a_uniform_stride(in_graph: bool) -> None:
    def found(flat: list[int]) -> str:
        schedule = Of(case=case(mode=ForwardMode.EXTEND, width=3))
        requests = [request(new) for new in (2, 4)]
        return rows.uneven_offsets(evidence([9, 9], [1], requests, rows=flat, in_graph=in_graph, schedule=schedule))

    assert "new rows are 2, 4, and the wrong rows are those that a uniform stride of 2 gets" in found([4, 5])
    assert found([5]) == ""


def test_nan_in_whole_requests_that_read_nothing_foreign_needs_no_stride() -> None:
    schedule, requests = Of(case=case(mode=ForwardMode.EXTEND, width=3)), [request(new) for new in (2, 4)]

    def found(wrong: list[int], flat: list[int], **fields: Any) -> str:
        return rows.uneven_offsets(evidence([9, 9], wrong, requests, rows=flat, schedule=schedule, **fields))

    assert rows._wrong_under(2, [2, 4])[-1] == [4, 5]
    assert "a uniform stride of 3 gets wrong" in found([1], [2, 3, 4, 5])
    assert found([1], [2, 3, 4, 5], computes_nan=True) == ""
    assert found([1], [4, 5], computes_nan=True), "a part of a request's rows"


def test_where_all_rows_are_wrong_or_one_used_its_own_keys_no_stride_is_blamed() -> None:
    counts, every = [5, 1], [0, 1, 2, 3, 4, 5]
    assert every in rows._wrong_under(2, counts)
    schedule = Of(case=case(mode=ForwardMode.EXTEND, width=2))
    requests = [request(new) for new in counts]

    def said(flat: list[int], attended: Any) -> bool:
        return bool(
            rows.uneven_offsets(evidence([9, 9], [1], requests, rows=flat, schedule=schedule, attended=attended))
        )

    some = rows._wrong_under(2, counts)[1]
    assert some != every
    assert said(some, None)

    def asked(right: bool = False, used: frozenset[int] = frozenset(), row: int = 4, **elsewhere: float) -> Any:
        return Of(
            right=right, used=used, wanted=frozenset({1}), elsewhere=elsewhere, own=False, request=row // 5, row=row % 5
        )

    assert said(some, asked(used=frozenset({0})))
    assert not said(some, asked(right=True))
    assert not said(every, None)
    assert said(every, asked(others=1.0))
    assert not said(every, asked(row=1, others=1.0)), "under a stride of two it is a row of its own request"
    assert said(every, asked(row=5, others=1.0))
    assert not said(every, asked()), "it may have attended to nothing"
    assert not said(every, asked(unowned=1.0)), "an offset of rows leads to rows"
    assert not said(every, asked(used=frozenset({1}), others=0.5)), "an offset of rows leads to one request's"


def test_where_a_row_used_its_own_keys_alone_request_0_says_nothing_of_strides() -> None:
    assert batch.later_requests(evidence([3, 4, 5], [1, 2], attended=Of(own=False)))
    assert not batch.later_requests(evidence([3, 4, 5], [1, 2], attended=Of(own=True)))


def test_other_modes_have_no_uneven_rows() -> None:
    assert rows.uneven_offsets(evidence([5, 8], [1], [request(1), request(2)], in_graph=True)) == ""


def test_what_the_step_before_has_in_common() -> None:
    def reported(before: list[int], lens: list[int], wrong: list[int]) -> str:
        return batch.kept_from_before(evidence(lens, wrong, before=Of(lens=before, bs=len(before), requests=before)))

    assert "has the same lengths and other requests" in reported([3, 9], [9, 3], [0])
    assert "the step before: it had up to 8 KV tokens, and only longer requests" in reported([3, 8], [9, 3], [0])
    assert reported([3, 9], [9, 4], [0]) == ""
    assert "the step before: it had up to 9" in reported([3, 9], [2, 10, 11], [1, 2])
    assert reported([3, 9], [2, 10, 9], [1, 2]) == ""
    assert reported([3, 9], [2, 4, 5], [2]).endswith("only requests from 2 on are wrong, and that step had 2")
    assert reported([3, 9], [2, 4, 5], [1, 2]) == ""
    assert reported([3, 9], [9, 3], []) == ""
    assert batch.kept_from_before(evidence([3], [0])) == ""
    same = evidence([3, 9], [0])
    same.before = same.step
    same.step.lens = [3, 9]
    assert "the same step was right the first time" in batch.kept_from_before(same)


def finite(**bad: bool) -> Any:
    values = torch.ones(1, 1, 2, 4, dtype=torch.bool)
    values[0, 0, 0, 1:] = not bad.get("part", True)
    if bad.get("whole"):
        values[0, 0, 0] = False
    return Of(finite=values, exists=torch.ones_like(values))


def test_a_part_of_a_head_that_is_nan_is_a_layout() -> None:
    def reported(comparison: Any, **fields: Any) -> str:
        return heads.part_of_a_head(evidence([5], [0], comparison=comparison, **fields))

    assert reported(finite()).startswith("only a part of a head's values is NaN or Inf")
    assert reported(finite(whole=True)) == ""
    assert reported(finite(part=False)) == ""
    assert reported(finite(), reads_foreign=True) == ""
    for data in ("peaked", "negative", "rising_logits"):
        assert reported(finite(), schedule=Of(case=case(data=data))) == ""


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "misrouted", "text"),
    [
        (
            4,
            2,
            (2, 3),
            "probably an offset or stride of KV heads, or",
        ),
        (
            4,
            2,
            (2,),
            "probably packing of grouped heads",
        ),
        (4, 2, (0, 2), "packing of grouped heads"),
        (6, 2, (0, 1, 2, 3), "packing of grouped heads"),
        (6, 2, (1, 2), "packing of grouped heads"),
        (
            2,
            2,
            (1,),
            "probably an offset or stride of heads, or",
        ),
        (4, 2, (), ""),
    ],
)
def test_heads_that_differ_say_how_heads_are_packed(q_heads: int, kv_heads: int, misrouted: Any, text: str) -> None:
    schedule = Of(case=case(q_heads=q_heads, kv_heads=kv_heads))
    none: frozenset[int] = frozenset()
    attended = Of(heads=misrouted, shape=None, elsewhere={}, used=none, wanted=none)
    found = heads.some_heads(evidence([5], [0], schedule=schedule, attended=attended))
    which = (
        f"only head{'s' * (len(misrouted) > 1)} {index_ranges(misrouted)} of {q_heads} attended to the wrong KV tokens"
    )
    assert text in found
    assert found.startswith(which) is bool(found) is bool(text)
    assert heads.some_heads(evidence([5], [0])) == ""


@pytest.mark.parametrize(
    ("wrong", "topk", "text"),
    [
        (
            range(8, 12),
            0,
            "the second tile of rows is wrong (tiles of 8, or of 16 rows with the 2 heads of a KV head packed)",
        ),
        (range(8, 12), 1, "rows from 8 on"),
        (range(8, 12), 2, ""),
        (range(8, 11), 0, ""),
        (range(7, 12), 0, ""),
        (range(4, 12), 0, ""),
        (range(12), 0, ""),
        ([8, 10, 11], 0, ""),
        ([11], 0, ""),
    ],
)
def test_rows_from_a_multiple_of_eight_on_are_a_tile(wrong: Any, topk: int, text: str) -> None:
    data = Of(row_request=torch.zeros(12, dtype=torch.int64), row_offset=torch.arange(12))
    expected = Of(data=data)
    found = rows.row_tile(evidence([20], [0], [request(12, 8, topk)], rows=list(wrong), expected=expected))
    assert bool(found) is bool(text)
    assert text in found


def test_a_tile_of_rows_begins_at_one_place_in_all_requests() -> None:
    data = Of(row_request=torch.arange(2).repeat_interleave(24), row_offset=torch.arange(24).repeat(2))
    for starts, said in (((8, 8), True), ((8, 16), False), ((16, 16), True)):
        flat = [*range(starts[0], 24), *range(24 + starts[1], 48)]
        found = evidence([40, 40], [0, 1], [request(24), request(24)], rows=flat, expected=Of(data=data))
        assert bool(rows.row_tile(found)) is said
    alone = evidence([40], [0], [request(24)], rows=list(range(8, 24)), expected=Of(data=data))
    alone.wrong_shapes = [HeadShape(2, 2, 32)]
    assert "(tiles of 8): rows from 8 on" in rows.row_tile(alone)
    nothing = evidence([40], [], [request(24)], expected=Of(data=data))
    assert rows.row_tile(nothing) == ""


@pytest.mark.parametrize(
    ("first", "last", "data", "said"),
    [
        (16, 32, "gauss", True),
        (16, 32, "one_hot", False),
        (0, 32, "gauss", False),
        (8, 32, "gauss", False),
        (16, 24, "gauss", False),
        (16, 27, "gauss", True),
        (16, 26, "gauss", False),
    ],
)
def test_dims_to_the_last_are_a_padded_head(first: int, last: int, data: str, said: bool) -> None:
    wrong = torch.zeros(1, 2, 2, 32, dtype=torch.bool)
    wrong[0, 1, 1, first:last] = True
    comparison = Of(wrong=wrong, finite=torch.ones_like(wrong), exists=torch.ones_like(wrong))
    found = heads.some_dims(evidence([5], [0], comparison=comparison, schedule=Of(case=case(data=data))))
    assert bool(found) is said
    if said:
        assert found.startswith(f"only dims from {first} on are wrong: probably a head dim of 32")


@pytest.mark.parametrize(
    ("dims", "size", "said"),
    [
        ([12, 13, 14, 15], 16, "only dims 12..15 of 16 are wrong"),
        ([4, 5, 6, 7], 16, "only dims 4..7 of 16 are wrong"),
        ([13, 14, 15], 16, ""),
        ([12, 13, 15], 16, ""),
        ([12, 13, 14], 16, ""),
        ([0, 1, 2, 3], 4, ""),
        ([], 16, ""),
    ],
)
def test_four_dims_of_every_head_are_what_one_thread_loads(dims: list[int], size: int, said: str) -> None:
    wrong = torch.zeros(1, 2, 2, size, dtype=torch.bool)
    wrong[..., dims] = True
    comparison = Of(wrong=wrong, finite=torch.ones_like(wrong), exists=torch.ones_like(wrong))
    found = heads.some_dims(evidence([5], [0], comparison=comparison, wrong_shapes=[HeadShape(4, 2, size)]))
    assert found.startswith(said)
    assert bool(found) is bool(said)


def test_a_few_dims_say_nothing() -> None:
    for count, size in ((7, 23), (8, 24)):
        wrong = torch.zeros(1, 1, 1, size, dtype=torch.bool)
        wrong[..., 16:] = True
        comparison = Of(wrong=wrong, finite=torch.ones_like(wrong), exists=torch.ones_like(wrong))
        shapes = [HeadShape(4, 2, size)]
        assert bool(heads.some_dims(evidence([5], [0], comparison=comparison, wrong_shapes=shapes))) is (count == 8)
    assert heads.some_dims(evidence([5], [0], comparison=comparison, wrong_shapes=[])) == ""
    two = [*shapes, HeadShape(4, 2, size // 2)]
    assert heads.some_dims(evidence([5], [0], comparison=comparison, wrong_shapes=two)) == "", "of which head dim?"
    none = Of(wrong=torch.zeros(1, 1, 1, 32, dtype=torch.bool), finite=torch.ones(1, 1, 1, 32, dtype=torch.bool))
    assert heads.some_dims(evidence([5], comparison=none, wrong_shapes=shapes)) == ""
    nan = Of(wrong=wrong, finite=~wrong, exists=torch.ones_like(wrong))
    assert heads.some_dims(evidence([5], comparison=nan, wrong_shapes=shapes)) == "", "part of a head says so"


def test_a_length_from_which_on_replays_are_wrong() -> None:
    def reported(lens: list[int], wrong: list[int], passed: Any = (), in_graph: bool = True, **more: Any) -> str:
        return batch.length_threshold(evidence(lens, wrong, passed=passed, in_graph=in_graph, **more))

    def read(**elsewhere: float) -> str:
        asked = Of(elsewhere=elsewhere, used=frozenset({0}), wanted=frozenset({0, 1}))
        return batch.length_threshold(evidence([3, 9], [1], in_graph=True, attended=asked))

    assert read() == read(others=1.0) == reported([3, 9], [1]), "a stride of the capture leads to others"
    assert read(page0=0.1) == read(unowned=0.1) == "", "what is too short reads too little, and not what is nobody's"
    first = Of(elsewhere={}, used=frozenset({0}), wanted=frozenset({0, 1}))
    assert batch.length_threshold(evidence([1, 9], [1], in_graph=True, attended=first)) == "", "the length of a capture"
    more = Of(elsewhere={}, used=frozenset({0, 1}), wanted=frozenset({0, 1}))
    assert batch.length_threshold(evidence([1, 9], [1], in_graph=True, attended=more)) != ""
    text = "requests of up to 3 KV tokens are right, but requests of 9 or more are wrong"
    assert reported([3, 9], [1]).endswith(text)
    assert reported([3, 9], [1], in_graph=False) == ""
    assert "of the captured batch" in reported([3, 9], [1], of_capture=True)
    assert "of the captured batch" not in reported([3, 9], [1]) + reported([3, 9], [1], of_capture=False)
    assert reported([3, 9], [0]) == ""
    assert reported([3, 3], [1]) == ""
    assert reported([9], [0]) == ""
    assert reported([5, 3, 9], [1, 2]) == "", "one that is shorter than a right one is wrong too"
    assert reported([9], []) == ""
    assert "up to 8" in reported([9], [0], [Of(replay=True, step=Of(lens=[8]))])
    assert reported([9], [0], [Of(replay=True, step=Of(lens=[9]))]) == ""
    assert reported([9], [0], [Of(replay=False, step=Of(lens=[8]))]) == ""


@pytest.mark.parametrize(
    ("lens", "wrong", "page", "said"),
    [
        ([4, 5], [1], 4, True),
        ([4, 5], [0], 4, False),
        ([3, 5], [0, 1], 4, False),
        ([4, 8], [], 4, False),
        ([4, 5], [1], 1, False),
        ([4, 5, 6], [1], 4, False),
    ],
)
def test_requests_with_a_partly_filled_last_page(lens: list[int], wrong: list[int], page: int, said: bool) -> None:
    found = batch.last_page(evidence(lens, wrong, schedule=Of(case=case(page_size=page))))
    assert bool(found) is said
    assert found in ("", "only requests with a partly filled last page are wrong")


@pytest.mark.parametrize(
    ("lens", "wrong", "said"),
    [
        ([3, 4, 5], [1, 2], True),
        ([5, 4, 3], [1, 2], False),
        ([4, 4, 4], [1, 2], False),
        ([3, 5], [1], False),
        ([3, 4, 5], [1], False),
        ([3, 4, 5], [0, 1, 2], False),
    ],
)
def test_all_but_request_0_are_at_a_stride(lens: list[int], wrong: list[int], said: bool) -> None:
    assert bool(batch.later_requests(evidence(lens, wrong))) is said


@pytest.mark.parametrize(("unwritten", "said"), [((1, 2), True), ((1,), False), ((), False)])
def test_requests_behind_the_first_that_nobody_computed_are_no_stride(unwritten: tuple[int, ...], said: bool) -> None:
    found = evidence([3, 4, 5], [1, 2], rows=[1, 2])
    found.comparison.unwritten[0, list(unwritten), 3, 31] = True
    text = batch.later_requests(found)
    assert text.endswith("request 0 is computed and no other is") is said
    found.reads_foreign = True
    assert "is computed" not in batch.later_requests(found), "a NaN that is read may have the bits of poison"
    assert ("a stride is probably wrong" in text) is not said


def test_a_row_with_the_request_of_its_number_is_a_table_by_rows() -> None:
    said = "is indexed by query row: row j uses the entry of request j"
    three = [request(3, 4), request(3, 7), request(3, 9)]

    def text(*of: int) -> str:
        misrouted = tuple(mine(0, row, other, None, keys=5 + row) for row, other in enumerate(of, 1))
        return rows.rows_of_others(evidence([7, 10, 12], requests=three, misrouted=misrouted))

    assert said in text(1, 2)
    assert said not in text(1)
    assert said not in text(2, 1)
    assert said not in text(1, 1)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [(range(8, 12), True), (range(7, 12), False), (range(8, 11), False), (range(9, 12), True), ((), False)],
)
def test_requests_from_a_number_on(wrong: Any, said: bool) -> None:
    found = batch.later_by_number(evidence([5] * 12, list(wrong)))
    assert bool(found) is said
    assert not said or f"requests from {wrong[0]} on are wrong" in found


def test_only_padded_replays() -> None:
    def reported(padded: int, *passed: tuple[bool, int], in_graph: bool = True) -> bool:
        seen = [Of(replay=replay, padded=n) for replay, n in passed]
        found = evidence([5], [0], observed=Of(padded=padded), passed=seen, in_graph=in_graph)
        return bool(rows.only_padded(found))

    assert reported(1, (True, 0))
    assert reported(2, (True, 0), (False, 3))
    assert not reported(1, (True, 0), in_graph=False), "in eager it is wrong too, where nothing is padded"
    assert not reported(0, (True, 0))
    assert not reported(1)
    assert not reported(1, (False, 0))
    assert not reported(1, (True, 0), (True, 1))


# Hints about KV tokens.


def attended(used: Any, wanted: Any, **fields: Any) -> Any:
    used, wanted = frozenset(used), frozenset(wanted)
    values = {
        "request": 0,
        "row": 0,
        "used": used,
        "wanted": wanted,
        "doubled": frozenset(),
        "widths_differ": False,
        "elsewhere": {},
        "heads": (),
        "length": len(wanted),
        "not_asked": [],
        "right": used == wanted,
        "weighed_otherwise": False,
        "window": -1,
    }
    return Of(**{**values, **fields})


def of_keys(found: Any, requests: list[Any] | None = None, window: bool = False, **fields: Any) -> Any:
    requests = requests or [request(prefix=found.length - 1)]
    visible = torch.zeros(1, 1, 100000 if found.length > 4096 else 4096, dtype=torch.bool)
    visible[0, 0, : found.length] = window
    expected = Of(data=Of(visible=visible, row_request=torch.zeros(1), row_offset=torch.zeros(1)))
    return evidence([found.length], [0], requests, attended=found, expected=expected, rows=[0], **fields)


@pytest.mark.parametrize(
    ("elsewhere", "used", "text"),
    [
        ({"tail": 0.5, "page0": 0.1}, (0,), "slots after the last KV token are read"),
        ({"tail": 0.5, "page0": 0.5}, (), "none of its own KV tokens is read"),
        ({"tail": 0.1, "page0": 0.5}, (0,), "page 0 is read"),
        ({"others": 0.5}, (0,), "KV tokens of other requests are read"),
        ({"unowned": 0.5}, (0,), "unowned slots are read"),
        ({"unowned": 0.5}, (), "none of its own KV tokens is read"),
        ({"unowned": 0.5}, (7,), "none of its own KV tokens is read"),
        ({"page0": 0.9}, (), "page 0 is read"),
        ({"page0": 0.89}, (), "none of its own KV tokens is read"),
        ({"page0": 0.5}, range(5), "page 0 is read"),
        ({"unowned": 0.5}, range(5), "all of its own KV tokens are read, and slots after them"),
        ({"others": 0.5}, range(6), "all of its own KV tokens are read, and slots after them"),
        ({"others": 0.5}, range(4), "KV tokens of other requests are read"),
        ({}, (0,), ""),
    ],
)
def test_where_the_weight_went(elsewhere: dict[str, float], used: Any, text: str) -> None:
    found = of_keys(attended(used, range(5), elsewhere=elsewhere))
    assert text in keys.elsewhere(found)
    assert bool(keys.elsewhere(found)) is bool(text)
    found.misrouted = (mine(0, 0, 1, 0),)
    assert keys.elsewhere(found) == ""
    assert keys.elsewhere(evidence([5])) == ""


@pytest.mark.parametrize(
    ("first_page", "used", "size", "said"),
    [(2, (), 4, True), (3, (), 4, False), (2, (0,), 4, False), (0, (), 1, False), (0, (), 16, True)],
)
def test_page_ids_may_be_taken_for_slots_if_all_are_slots_of_page_0(
    first_page: int, used: Any, size: int, said: bool
) -> None:
    requests, schedule = [request(prefix=4, first_page=first_page)], Of(case=case(page_size=size))
    found = of_keys(attended(used, range(5), elsewhere={"page0": 1.0}), requests, schedule=schedule)
    assert keys.elsewhere(found).startswith("page 0 is read")
    assert (f"a page id that is not multiplied by page_size ({size})" in keys.elsewhere(found)) is said


def test_a_mask_that_comes_too_late() -> None:
    right, wrong = attended(range(5), range(5)), attended(range(4), range(5))
    assert keys.masked_too_late(of_keys(right, reads_foreign=True)).startswith(
        "the kernel multiplies foreign slots by weight 0"
    )
    of_keys_alone = keys.masked_too_late(of_keys(right, reads_foreign=True, right_with_zeros=False))
    assert of_keys_alone.endswith("values of this row are read correctly, but with zeros the result is still wrong")
    assert keys.masked_too_late(of_keys(right)) == ""
    assert keys.masked_too_late(of_keys(wrong, reads_foreign=True)) == ""
    unexamined = keys.masked_too_late(evidence([5], reads_foreign=True))
    assert unexamined.startswith("probably the kernel multiplies foreign slots by weight 0")
    assert keys.masked_too_late(evidence([5], reads_foreign=True, right_with_zeros=False)) == ""


@pytest.mark.parametrize(
    ("used", "new", "layout", "said"),
    [
        ({0, 1, 2, 4}, 2, "shuffled", True),
        ({0, 1, 2, 4}, 2, "contiguous", False),
        ({0, 1, 2, 4}, 1, "shuffled", False),
        ({0, 1, 3, 4}, 2, "shuffled", False),
        ({0, 1, 2}, 2, "shuffled", False),
        ({0, 1, 2, 3}, 2, "shuffled", False),
        ({0, 1, 2, 4, 5}, 2, "shuffled", False),
    ],
)
def test_new_tokens_that_are_mixed_up(used: set[int], new: int, layout: str, said: bool) -> None:
    found = of_keys(attended(used, range(4)), [request(new, 3)])
    found.step.layout = layout
    assert bool(keys.own_rows_mixed(found)) is said
    assert keys.own_rows_mixed(evidence([4])) == ""


def test_a_branch_that_attends_to_another_ones_draft_is_reported_as_that_even_of_one_row() -> None:
    branch = request(1, 3)
    branch.draft = Of()
    found = of_keys(attended({0, 1, 2, 4}, range(4)), [branch])
    found.step.layout = "contiguous"
    assert keys.own_rows_mixed(found).startswith("a branch attends to tokens of another one")
    missing = of_keys(attended({0, 1, 2}, range(4)), [branch])
    missing.step.layout = "contiguous"
    assert keys.own_rows_mixed(missing) == ""


@pytest.mark.parametrize(
    ("used", "said"),
    [
        ({0, 2, 5}, True),
        ({0, 5}, False),
        ({0}, False),
        ({0, 2, 4, 5, 6}, False),
        ({0, 1, 2, 3}, False),
        ({4, 5, 6}, False),
        ({0, 2, 3}, False),
        ({0, 2, 5, 9}, False),
    ],
)
@pytest.mark.parametrize("page", [1, 2])
def test_keys_that_are_missing_by_their_slots_are_reported_from_those_missing_by_their_place(
    used: set[int], said: bool, page: int
) -> None:
    found = of_keys(attended(used, range(7)))
    found.schedule = Of(case=case(page_size=page))
    found.step.requests[0].slots = [20, 90, 24, 80, 85, 30, 95]
    text = keys.beyond_a_slot(found)
    assert bool(text) is said
    if said:
        assert "KV tokens in slots up to 30 are read, and none from slot 80 on" in text
        assert ("pages from" in text) is (page == 2)


def test_as_many_keys_as_pages_are_a_length_in_pages() -> None:
    said = "as many as the request has pages: probably a length that is counted in pages"
    assert said in of_row({0, 1}, prefix=6)
    assert said not in of_row({0, 1}, prefix=8), "three pages"
    assert said not in of_row({0, 2}, prefix=6)
    assert said in of_row(range(3), prefix=9), "three pages"
    assert said not in of_row({0, 1}, prefix=3), "as many less as it has new ones"
    assert ", or a length that is counted in pages" in of_row({0}, prefix=2)
    assert "in pages" not in of_row({0}, prefix=6)
    assert "in pages" not in of_row({0}, prefix=2, in_graph=True)


def of_row(used: Any, row: int = 0, prefix: int = 5, **fields: Any) -> str:
    """What is said of a row of two that sees the prefix, itself and what is before it."""
    wanted = range(prefix + row + 1)
    found = attended(used, wanted, row=row, **{name: fields.pop(name) for name in ("elsewhere",) if name in fields})
    data = torch.zeros(1, 2, 4096, dtype=torch.bool)
    e = of_keys(found, [request(2, prefix)], **fields)
    e.expected.data.visible = data
    return keys.key_range(e)


def test_new_tokens_that_are_read_before_they_are_stored() -> None:
    said = "attention runs before the store, or does not wait for it: new KV tokens are read"
    assert of_row(range(5), reads_foreign=True).startswith(said)
    assert said not in of_row(range(5)), "nothing foreign was read"
    assert said not in of_row(range(4), reads_foreign=True), "one of the prefix is missing"
    assert said not in of_row(range(5), reads_foreign=True, elsewhere={"tail": 0.2}), "the NaN came from there"


def test_a_row_that_sees_as_many_as_its_place_is_aligned_to_the_first() -> None:
    said = "as if there were no prefix: probably a causal mask that is aligned to the first KV token"
    assert said in of_row({0})
    assert of_row({0, 1}, row=1).startswith("row 1 attends to KV tokens 0..1")
    assert said not in of_row({0, 1})
    assert said not in of_row({0}, elsewhere={"others": 0.3})
    assert said in of_row({0}, prefix=2)
    assert said not in of_row({0}, prefix=1), "it is the prefix"


def test_a_prefix_that_is_missing_as_a_whole() -> None:
    said = "the whole prefix is missing, only new tokens are attended to"
    assert of_row({5}).startswith(said)
    assert of_row({5, 6}, row=1).startswith(said)
    assert said not in of_row({4, 5})
    assert said not in of_row({6}, row=1)


@pytest.mark.parametrize(("count", "bits"), [(65535, False), (65536, True), (65537, False), (131072, True)])
def test_a_multiple_of_65536_that_is_missing_is_a_length_in_16_bits(count: int, bits: bool) -> None:
    found = attended(range(70), range(70 + count), length=70 + count)
    assert keys.key_range(of_keys(found)).endswith("kept in 16 bits") is bits


def test_the_last_ones_that_are_missing_in_a_graph_alone_are_not_blamed_on_the_mode() -> None:
    assert of_row(range(3), in_graph=True).startswith(
        "the last 3 KV tokens are missing, only in the graph: probably a length, a"
    )
    assert of_row(range(3)).startswith("the last 3 KV tokens are missing: probably seq_lens of this mode")


LONG = 2000
KEYS: list[tuple[str, Any, dict[str, Any], str]] = [
    (
        "twice",
        attended(range(5), range(5), doubled=frozenset({1})),
        {},
        "KV tokens of the prefix are counted more than",
    ),
    ("new twice", attended(range(5), range(5), doubled=frozenset({4})), {}, "KV tokens are counted more than once"),
    ("all right", attended(range(5), range(5)), {}, ""),
    (
        "the last",
        attended(range(6), range(7)),
        {},
        "the last KV token is missing: probably seq_lens of this mode, or an end that",
    ),
    ("the last of a page", attended(range(4), range(5)), {}, "the only one in the last page"),
    ("a page", attended(range(4), range(7)), {}, "the KV tokens of the last page are missing"),
    ("a page or 16", attended(range(16), range(19)), {}, "the last page are missing, or a fixed capacity of 16"),
    ("a page of 256", attended(range(256), range(258)), {}, "the last page are missing, or a fixed capacity of 256"),
    ("one or 256", attended(range(256), range(257)), {}, "off by 1, or a partly filled page that is dropped, or a f"),
    ("a page of 1", attended(range(256), range(257)), {"page": 1}, "probably a fixed capacity of 256"),
    (
        "two",
        attended(range(5), range(7)),
        {},
        "the last 2 KV tokens are missing: probably seq_lens of this mode, or an end that is off by 2",
    ),
    ("pages of one", attended(range(4), range(5)), {"page": 1}, "the last KV token is missing: probably seq_lens"),
    ("128", attended(range(128), range(LONG)), {}, "the last 1872 KV tokens are missing"),
    ("256", attended(range(256), range(LONG)), {}, "from 256 on are missing: probably a fixed capacity of 256"),
    ("257", attended(range(257), range(LONG)), {}, "the last 1743 KV tokens"),
    ("1024", attended(range(1024), range(LONG)), {}, "from 1024 on are missing"),
    ("3072", attended(range(3072), range(3500)), {}, "from 3072 on are missing"),
    ("3000", attended(range(3000), range(3500)), {}, "the last 500 KV tokens"),
    ("first", attended(range(1, 5), range(5)), {}, "the first KV token is missing: probably the start of a window"),
    ("first two", attended(range(2, 5), range(5)), {}, "the first 2 KV tokens are missing"),
    (
        "middle",
        attended({0, 2, 3}, range(4)),
        {},
        "KV tokens in the middle are missing: probably a page or a split is skipped",
    ),
    ("none", attended((), range(4)), {}, "all KV tokens are missing, none is read"),
    ("none of one", attended((), range(1)), {}, "the last KV token is missing"),
    ("later", attended(range(6), range(5)), {}, "later tokens are visible: probably the causal mask"),
    ("behind a window", attended(range(5), range(2, 5)), {}, "KV tokens before the window are visible"),
    ("in sight", attended(range(5), {0, 4}, length=5), {"window": True}, "KV tokens before the window are visible"),
    ("shifted", attended(range(1, 6), range(5)), {}, "all KV tokens are shifted by 1: probably the length or position"),
    ("shifted back", attended(range(1, 4), range(2, 5)), {}, "all KV tokens are shifted by -1"),
    ("others", attended({0, 1, 2, 6}, range(4)), {}, "other KV tokens than the right ones"),
    ("a node too much", attended(range(6), {0, 1, 2, 5}, length=6), {"topk": 1}, "draft nodes that are not ancestors"),
    (
        "an ancestor behind a window",
        attended(range(6), {0, 1, 2, 5}, length=6),
        {"topk": 1, "window": True},
        "KV tokens before the window are visible",
    ),
    (
        "a node that nobody may see beside it",
        attended(range(7), {0, 1, 2, 5}, length=6),
        {"topk": 1, "window": True},
        "draft nodes that are not ancestors",
    ),
    ("before the tree", attended(range(6), {0, 3, 4, 5}, length=6), {"topk": 1}, "before the window are visible"),
    (
        "a node too few",
        attended({0, 1, 2, 5}, {0, 1, 2, 3, 5}, length=6),
        {"topk": 2},
        "a draft node does not see its own KV token",
    ),
    (
        "two nodes too few",
        attended({0, 1, 2}, {0, 1, 2, 3, 5}, length=6),
        {"topk": 2},
        "draft nodes that should be visible are masked",
    ),
    (
        "another node too few",
        attended({0, 1, 2, 3}, {0, 1, 2, 3, 5}, length=6),
        {"topk": 2},
        "draft nodes that should be visible are masked",
    ),
    ("a chain", attended({0, 1, 2, 5}, {0, 1, 2, 3, 5}, length=6), {"topk": 1}, "in the middle are missing"),
    ("of the prefix", attended({0, 2, 3, 5}, {0, 1, 2, 3, 5}, length=6), {"topk": 2}, "in the middle are missing"),
    ("a heads own", attended(range(4), range(5), heads=(1,)), {}, ""),
    ("nowhere", attended((), range(5), elsewhere={"tail": 1.0}), {}, ""),
    ("others in its place", attended(range(4), range(5), elsewhere={"others": 0.2}), {}, ""),
    ("page 0 in its place", attended(range(4), range(5), elsewhere={"page0": 0.2}), {}, ""),
    ("nobody's in its place", attended(range(4), range(5), elsewhere={"unowned": 0.2}), {}, ""),
    ("and the tail", attended(range(6), range(5), elsewhere={"tail": 0.2}), {}, ""),
    ("partly nowhere", attended(range(4), range(5), elsewhere={"tail": 0.2}), {}, "the last KV token is missing"),
]


@pytest.mark.parametrize(("found", "more", "text"), [k[1:] for k in KEYS], ids=[k[0] for k in KEYS])
def test_what_was_attended_to_says_what_is_wrong(found: Any, more: dict[str, Any], text: str) -> None:
    requests = [request(3, 3, more["topk"])] if "topk" in more else None
    schedule = Of(case=case(page_size=more.get("page", 4)))
    reported = keys.key_range(of_keys(found, requests, more.get("window", False), schedule=schedule))
    assert text in reported
    assert bool(reported) is bool(text)


def test_what_says_nothing_of_keys() -> None:
    found = of_keys(attended(range(4), range(5)))
    found.misrouted = (mine(0, 0, 1, 0),)
    assert keys.key_range(found) == ""
    assert keys.key_range(evidence([5])) == ""


@pytest.mark.parametrize(
    ("used", "page", "elsewhere", "larger"),
    [
        ((0, 1, 2, 3, 16, 17), 4, {"unowned": 0.5}, 16),
        ((0, 1, 8, 9, 16, 17), 2, {"others": 0.5}, 8),
        ((0, 1, 2, 3, 8, 9, 10, 11, 16, 17), 4, {"others": 0.5}, 8),
        ((0, 1, 2, 3), 4, {"unowned": 0.5}, 0),
        ((0, 1, 2, 3, 16, 17), 4, {}, 0),
        ((0, 1, 2, 3, 17), 4, {"unowned": 0.5}, 0),
        (range(18), 4, {"tail": 0.1}, 0),
    ],
)
def test_the_first_page_of_each_larger_one_alone_is_read_if_pages_are_counted_as_larger(
    used: Any, page: int, elsewhere: dict[str, float], larger: int
) -> None:
    found = of_keys(attended(used, range(18), elsewhere=elsewhere), schedule=Of(case=case(page_size=page)))
    text = keys.pages_counted_as_larger(found)
    assert (f"as if they had {larger} slots" in text) is bool(text) is bool(larger)
    found.misrouted = (mine(0, 0, 1, 0),)
    assert keys.pages_counted_as_larger(found) == ""


@pytest.mark.parametrize(
    ("lens", "wrong", "most", "said"),
    [
        ([7, 9], [1], 9, True),
        ([9, 9], [0, 1], 9, False),
        ([7, 9], [0, 1], 9, False),
        ([7, 9], [1], 10, False),
        ([9, 7], [0], 9, True),
    ],
)
def test_the_token_that_fills_the_context_is_named_if_shorter_requests_are_right(
    lens: list[int], wrong: list[int], most: int, said: bool
) -> None:
    place = Of(visible=torch.zeros(1, 2, 4096), row_request=torch.arange(2), row_offset=torch.zeros(2))
    found = attended(range(8), range(9), request=wrong[-1])
    schedule = Of(case=case(), max_context_len=most)
    e = evidence(lens, wrong, attended=found, expected=Of(data=place), rows=wrong, schedule=schedule)
    assert (f"only requests of max_context_len ({most}) KV tokens are wrong" in keys.key_range(e)) is said


@pytest.mark.parametrize(("length", "bits"), [(60000, False), (65536, False), (65537, True), (70000, True)])
def test_where_not_all_was_asked_about_a_range_is_said(length: int, bits: bool) -> None:
    asked = {*range(96), *range(length - 96, length)}
    reported = keys.key_range(of_keys(attended(range(96), asked, length=length, not_asked=[*range(96, length - 96)])))
    assert reported.startswith(
        f"KV tokens are missing from somewhere between 96 and {length - 96} on: probably a fixed capacity"
    )
    assert ("16 bits" in reported) is bits
    near = keys.key_range(of_keys(attended(range(95), range(96), length=length, not_asked=[97])))
    assert near.startswith("the last KV token is missing")


@pytest.mark.parametrize(
    ("prefixes", "wrong", "draft", "said"),
    [
        ([0, 5, 0], [0, 2], True, True),
        ([0, 5, 0], [0], True, False),
        ([0, 5, 1], [0, 2], True, False),
        ([0, 0], [0, 1], True, False),
        ([1, 5], [0], True, False),
        ([0, 5], [0], False, False),
        ([1, 5], [], True, False),
    ],
)
def test_requests_without_a_prefix_are_named_in_a_draft_where_exactly_they_are_wrong(
    prefixes: list[int], wrong: list[int], draft: bool, said: bool
) -> None:
    of_draft = case(draft=object() if draft else None)
    given = evidence(
        [prefix + 3 for prefix in prefixes], wrong, [request(3, prefix) for prefix in prefixes],
        schedule=Of(case=of_draft),
    )  # fmt: skip
    assert batch.only_empty_prefixes(given).startswith("only requests without a prefix are wrong. ") is said


@pytest.mark.parametrize(
    ("shared", "missing", "said"),
    [(4, range(4), True), (4, range(5), False), (4, range(3), False), (0, range(4), False), (8, range(8), True)],
)
def test_what_requests_have_in_common_is_named_where_exactly_that_is_missing(
    shared: int, missing: range, said: bool
) -> None:
    mine = request(prefix=8)
    mine.shared = shared
    found = attended(set(range(9)) - set(missing), range(9))
    reported = keys.key_range(of_keys(found, [mine]))
    assert ("that the request shares with others are missing" in reported) is said

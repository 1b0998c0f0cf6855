"""What a tier tries: never beyond a capability, always up to it, and the cases that have names."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import Case, Heads
from attn_testkit.cases.co_residents import co_residents
from attn_testkit.cases.plan import most_context
from attn_testkit.cases.rows import Accepted, Decode
from attn_testkit.cases.trees import chain
from attn_testkit.catalogue import tiers
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import Capabilities, ForwardMode
from attn_testkit.steps.data import make_layers
from attn_testkit.steps.schedule import make_schedule

DECODE, VERIFY, V1, V2, EXTEND, DRAFT = ForwardMode
CAPABILITIES = TorchNativeBackend.capabilities


def declared(**changes: object) -> Capabilities:
    """Everything of every mode that is small."""
    every = {
        "eager": set(ForwardMode),
        "graph": set(ForwardMode),
        "heads": {"families": {"mha", "gqa"}, "gqa_ratios": {2}, "head_dims": {64}},
        "kv_pool": {"page_sizes": {16}},
        "bounds": {"max_q_rows": 8, "max_topk": 8, "max_context_len": 1 << 13},
    }
    return Capabilities(**every).with_changes(**changes)  # type: ignore[arg-type]


def core(mode: ForwardMode, **changes: object) -> tuple[Case, ...]:
    return generate(declared(**changes), mode, "core")


def picked(mode: ForwardMode, tier: str = "core", **changes: object) -> tuple[Case, ...]:
    """Without cases that choose their own heads and pages: what the covering array and the named cases have."""
    others = ("code", "large", "page_count", "batch_mates", "declared_pair", "shared_prefix")
    others += ("full_context", "layer", "split", "uniform_batch")
    left_out = {f"{name}_cases": mock.Mock(return_value=()) for name in others}
    left_out["cases_for_uncovered"] = mock.Mock(return_value=())
    with mock.patch.multiple(tiers, **left_out):
        cases: tuple[Case, ...] = generate.__wrapped__(declared(**changes), mode, tier)
    return cases


def test_latent_rows_of_512_are_as_frequent_in_core_where_narrower_heads_are_declared_too() -> None:
    heads = {"families": {"gqa", "mla"}, "gqa_ratios": {2}, "head_dims": {64, 128, 512}, "mla_rope_dims": {64}}
    cases = picked(DECODE, heads=heads, kv_pool={"page_sizes": {1, 16, 64}})
    latent = [case for case in cases if case.heads.layout.values_in_keys]
    wide = [case for case in latent if case.head_dim == 512]
    assert len(wide) * 3 >= len(latent)
    assert {case.page_size for case in wide} == {1, 16, 64}
    assert max(case.head_dim for case in cases if not case.heads.layout.values_in_keys) == 128


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 16, 17, 32, 33, 39, 40])
@pytest.mark.parametrize("mode", [VERIFY, V1, V2], ids=str)
def test_requests_have_as_many_rows_as_are_declared_and_never_more(mode: ForwardMode, rows: int) -> None:
    cases = core(mode, bounds={"max_q_rows": rows})
    every = [each for case in cases for each in (case, *co_residents(case, set(ForwardMode), rows, 8))]
    assert max(case.width for case in every) == rows
    widths = {case.width for case in cases}
    assert {min(n, rows) for n in ((2, 4, 7) if mode is VERIFY else (2, 4, 6))} <= widths
    if mode is VERIFY:
        assert (17 in widths) is (rows >= 17)
        assert (40 in widths) is (rows >= 40)
        assert all(case.tree is not None and len(case.tree) == case.width for case in cases)
    elif rows > 6:
        assert max(case.width for case in picked(mode, bounds={"max_q_rows": rows})) == min(rows, 33), (
            "rows times heads of a KV head are more than one tile"
        )


@pytest.mark.parametrize("topk", [1, 2, 3, 4])
def test_trees_branch_as_widely_as_is_declared_and_never_more(topk: int) -> None:
    cases = picked(VERIFY, bounds={"max_q_rows": 64, "max_topk": topk})
    assert {case.topk for case in cases} == set(range(1, min(topk, 3) + 1))
    assert any(case.width == 40 for case in cases) is (topk >= 3)
    assert max(each.topk for case in cases for each in co_residents(case, {VERIFY, DECODE}, 8, topk)) <= topk
    assert max(e.topk for case in core(DECODE) for e in co_residents(case, {VERIFY}, 8, topk)) == min(topk, 2)


@pytest.mark.parametrize("context", [100, 128, 200, 300, 350, 512, 4200])
@pytest.mark.parametrize("mode", list(ForwardMode), ids=str)
def test_no_step_of_a_case_is_longer_than_is_declared(mode: ForwardMode, context: int) -> None:
    wanted = declared(kv_pool={"page_sizes": {1, 16, 64}}, bounds={"max_context_len": context})
    # Another seed has other derived parameters, which add tokens; one short and one long context show it.
    for seed in (0, 5) if context in (128, 350) else (0,):
        cases = generate(wanted, mode, "core", seed)
        assert len(cases) > 20
        every = [e for c in cases for e in (c, *(co_residents(c, set(ForwardMode), 8, 8) if c.multi_mode else ()))]
        assert max(make_schedule(case).max_context_len for case in every) <= context


@pytest.mark.parametrize("mode", list(ForwardMode), ids=str)
def test_a_context_that_is_not_computed_is_never_longer_than_its_bound(mode: ForwardMode) -> None:
    wanted = CAPABILITIES.with_changes(kv_pool={"page_sizes": {1, 128}})
    bounds = [(case, bound) for case in generate(wanted, mode, "smoke") if (bound := most_context(case)) is not None]
    assert bounds
    assert [case.id for case, bound in bounds if make_schedule(case).max_context_len > bound] == []


def test_a_case_that_fills_what_is_declared_to_the_last_token_is_tried() -> None:
    for case in core(DECODE)[:6]:
        length = make_schedule(case).max_context_len
        assert case in core(DECODE, bounds={"max_context_len": length})
        assert case not in core(DECODE, bounds={"max_context_len": length - 1})


def test_a_window_with_a_branching_tree_is_tried_where_it_is_declared_alone() -> None:
    windows = {"modes": set(ForwardMode)}
    without = core(VERIFY, windows=windows)
    assert any(case.window >= 0 for case in without)
    assert not any(case.window >= 0 and case.topk > 1 for case in without)
    assert any(case.window >= 0 and case.topk > 1 for case in core(VERIFY, windows={**windows, "in_trees": True}))


@pytest.mark.parametrize(
    ("ratios", "groups"),
    [
        ({1, 2}, {2}),
        ({2, 8}, {2, 8}),
        ({2, 3, 4, 5, 8}, {2, 3, 8}),
        ({2, 8, 9, 16}, {2, 8, 9, 16}),
        ({2, 7, 16, 24, 32}, {2, 7, 24, 32}),
        ({64}, {64}),
    ],
)
def test_groups_are_the_smallest_one_that_is_no_power_of_two_and_the_largest(
    ratios: set[int], groups: set[int]
) -> None:
    cases = picked(DECODE, heads={"families": {"gqa"}, "gqa_ratios": ratios})
    assert {case.heads.q_heads // case.heads.kv_heads for case in cases} == groups
    assert {case.heads.kv_heads for case in cases} == {2, 3}


def test_a_group_of_16_beside_mla_has_no_rope() -> None:
    cases = core(
        DECODE, heads={"families": {"gqa", "mla"}, "gqa_ratios": {2, 16}, "head_dims": {64, 512}, "mla_rope_dims": {32}}
    )
    assert {c.rope_dim for c in cases if c.heads.family == "gqa"} == {0}
    assert {c.rope_dim for c in cases if c.heads.family == "mla"} == {32}


def test_families_have_the_heads_that_define_them() -> None:
    assert {case.heads for case in core(DECODE, heads={"families": {"mha"}})} == {
        Heads("mha", n, n) for n in (1, 2, 3, 128)
    }
    assert {c.heads for c in picked(DECODE, heads={"families": {"mqa"}, "gqa_ratios": {1, 3, 6}})} == {
        Heads("mqa", 3, 1)
    }
    mla = picked(
        DECODE, heads={"families": {"mla"}, "gqa_ratios": {2, 8, 16, 128}, "head_dims": {512}, "mla_rope_dims": {64}}
    )
    assert {case.heads.q_heads for case in mla} == {2, 16, 128}
    assert {(case.head_dim, case.rope_dim) for case in mla} == {(512, 64)}
    assert {c.heads.q_heads for c in picked(DECODE, heads={"families": {"mla"}, "gqa_ratios": {8, 12}})} == {8}


def test_values_are_the_smallest_the_largest_and_some_between() -> None:
    sizes = {1, 2, 4, 8, 16, 32, 64, 128, 256}
    assert {case.page_size for case in picked(DECODE, kv_pool={"page_sizes": sizes})} == {1, 4, 16, 64, 256}
    smoke = generate(declared(kv_pool={"page_sizes": sizes}), DECODE, "smoke")
    assert {case.page_size for case in smoke} == {1, 16, 256}
    found = picked(DECODE, heads={"head_dims": {32, 64, 96, 128, 256, 512}})
    assert {case.head_dim for case in found if "bigpool" not in case.variants} == {32, 96, 256}
    assert {case.head_dim for case in core(DECODE, heads={"head_dims": {512}})} == {512}


@pytest.mark.parametrize(
    ("name", "page", "lens"),
    [
        ("edges", 16, (15, 16, 17)),
        ("edges", 1, (7, 8, 9)),
        ("zero", 16, (0, 1, 16)),
        ("ragged", 16, (3, 37, 9, 17)),
        ("one", 16, (21,)),
        ("same", 16, (7, 7)),
        ("long", 16, (600, 70, 12)),
        ("wide", 16, (1, 2, 5, 9, 14, 2, 30)),
        ("tiles", 16, (32, 128, 64, 16, 63)),
    ],
)
def test_lengths_lie_at_the_edges_of_pages_and_tiles(name: str, page: int, lens: tuple[int, ...]) -> None:
    assert lens in {case.prefixes for case in core(DECODE, kv_pool={"page_sizes": {page}})}, name


def test_the_rows_of_a_request_lie_on_both_sides_of_a_tile() -> None:
    tiles = {case.prefixes for case in core(V2) if case.width == 4}
    assert (30, 126, 62, 14, 63) in tiles
    for tile in (16, 32, 64, 128):
        assert any(k < tile < k + 4 for k in (30, 126, 62, 14, 63))


def every(mode: ForwardMode, tier: str = "core", **changes: object) -> list[Case]:
    return [
        c for c in generate(CAPABILITIES.with_changes(**changes) if changes else CAPABILITIES, mode, tier) if not c.seed
    ]


NAMED: dict[str, Callable[[Case], bool]] = {
    "4096 keys, fp16": lambda c: c.prefixes == (4096,) and c.dtype == "fp16" and c.data == "one_hot",
    "4096 keys, bf16": lambda c: c.prefixes == (4096,) and c.dtype == "bf16" and c.data == "one_hot",
    "everything at once, long": lambda c: (
        (c.prefixes, c.window, c.logit_cap, c.sinks, c.kv_dtype, c.bucket)
        == ((1500, 70), 700, 1.5, True, "fp8_e4m3", 3)
    ),
    "a cliff over several tiles": lambda c: c.prefixes == (300, 70) and c.data == "rising_logits" and c.window == -1,
    "132 requests": lambda c: c.prefixes == (3,) * 45 + (1,) * 43 + (9,) * 44 and c.bucket == 132,
    "66,000 keys": lambda c: c.prefixes == (66_000,) and c.data == "one_hot" and c.bucket == 1,
    "all modes on one instance": lambda c: c.multi_mode and c.bucket == c.bs + 1 and c.window == -1,
}


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("mode", list(ForwardMode), ids=str)
def test_core_has_the_cases_that_no_covering_array_is_sure_to_meet(mode: ForwardMode, name: str) -> None:
    # Draft-decode is in the mixed cases of the other modes.
    assert sum(map(NAMED[name], every(mode))) == (0 if mode is DRAFT and name == "all modes on one instance" else 1)


@pytest.mark.parametrize("mode", [V1, V2], ids=str)
def test_of_132_requests_one_half_accepts_one_token_and_the_other_all(mode: ForwardMode) -> None:
    (case,) = filter(NAMED["132 requests"], every(mode))
    assert case.new == (1,) * 66 + (2,) * 66
    assert case.width == 2


def test_draft_extend_has_a_sum_that_divides_by_the_batch_size() -> None:
    assert any((c.prefixes, c.new, c.width, c.bucket) == ((5, 9), (1, 3), 4, 2) for c in every(V1))


def test_mla_tries_66000_keys_in_full_alone_and_as_many_heads_as_there_are() -> None:
    mla = {"heads": {"families": {"mla"}, "head_dims": {512}}}
    assert not any(map(NAMED["66,000 keys"], every(DECODE, **mla)))
    assert sum(map(NAMED["66,000 keys"], every(DECODE, "full", **mla))) == 1
    assert max(case.heads.q_heads for case in every(DECODE, **mla)) == 128


def test_smoke_shares_an_instance_once_and_core_once_a_mode() -> None:
    assert [sum(case.multi_mode for case in every(mode, "smoke")) for mode in ForwardMode] == [1, 0, 0, 0, 0, 0]
    assert not any(case.multi_mode for case in core(DECODE, graph={DECODE}, eager={DECODE}))
    for graph in ({DECODE}, set[ForwardMode]()):
        beside = [sum(case.multi_mode for case in core(mode, graph=graph, eager={DECODE, V2})) for mode in (DECODE, V2)]
        assert beside == [1, 1], "modes that run eagerly share an instance too"
    assert not any(case.multi_mode for case in core(V2, graph={DECODE, ForwardMode.EXTEND}, eager={DECODE, V2}))
    assert all(case.prefixes != (4096,) for mode in ForwardMode for case in every(mode, "smoke"))


def test_companions_have_the_layers_of_the_case_whose_instance_they_share() -> None:
    """A mixed case has one set of layers; with those of their own ids companions would be judged by others."""
    case = Case(Decode(), Heads("mha", 2, 2), 64, "bf16", 16, (5, 9), bucket=3, window=4, sinks=True, multi_mode=True)
    for seed in range(8):
        mine = make_layers(case.with_seed(seed))
        for other in co_residents(case.with_seed(seed), set(ForwardMode), 8, 2):
            assert [layer.sliding_window_size for layer in make_layers(other)] == [
                layer.sliding_window_size for layer in mine
            ]
            for a, b in zip(make_layers(other), mine, strict=True):
                assert a.sinks is not None
                assert b.sinks is not None
                assert a.sinks.equal(b.sinks)


@pytest.mark.parametrize(
    ("width", "rows", "others"), [(1, 8, 4), (1, 4, 4), (1, 3, 3), (1, 1, 1), (2, 8, 2), (7, 8, 7)]
)
def test_companions_have_the_rows_of_the_case_or_four_where_it_has_one(width: int, rows: int, others: int) -> None:
    own = Decode() if width == 1 else Accepted((width, 1), width, v2=True)
    case = Case(own, Heads("mha", 2, 2), 64, "bf16", 16, (5, 9), bucket=3, multi_mode=True)
    for other in co_residents(case, set(ForwardMode), rows, 1):
        assert other.width == {DECODE: 1, DRAFT: others - 2}.get(other.mode, others)
        assert not other.multi_mode
        if other.mode is VERIFY:
            assert other.tree == chain(others)
        elif other.new:
            assert other.new == (1, min(3, others) if others != 2 else 1)


def test_prompts_of_more_than_a_tile_meet_each_head_dim_with_each_dtype_of_the_pool() -> None:
    """FlashInfer's prefill of FP8 with heads of 512 did not fit from 17 rows on (flashinfer #3863)."""
    dims, dtypes = {32, 64, 128, 256, 512}, {"same", "fp8_e4m3"}
    cases = core(
        ForwardMode.EXTEND, heads={"head_dims": dims}, kv_pool={"kv_dtypes": dtypes}, promises={"deterministic": True}
    )
    found = {(case.head_dim, case.kv_dtype) for case in cases if max(case.new) > 16}
    assert found >= {(dim, dtype) for dim in dims for dtype in dtypes}

"""What not every server does: words of case ids, who is tried in it, and which steps it has."""

from __future__ import annotations

from itertools import combinations

import pytest

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import Case, parse_case
from attn_testkit.cases.features.server.table import SERVER_VARIANTS, variant_of
from attn_testkit.cases.indexing import Indexing
from attn_testkit.cases.traits import TRAITS
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import Capabilities, ForwardMode, Indexer, Sparse
from attn_testkit.examples import MinimalBackend
from attn_testkit.families.expected import expect
from attn_testkit.steps.data import make_step_data, pool_image
from attn_testkit.steps.kv_groups import pages_in_pool, slot_map
from attn_testkit.steps.schedule import make_schedule
from attn_testkit_corpus.faults.indexer import IndexerParent

ALL = TorchNativeBackend.capabilities
PLAIN = MinimalBackend.capabilities
DECODE, EXTEND = ForwardMode.DECODE, ForwardMode.EXTEND
VERIFY, V2 = ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2


def variants(declared: Capabilities, mode: ForwardMode = ForwardMode.DECODE, tier: str = "core") -> dict[str, Case]:
    """By word, the last case that has it and no other."""
    alone = [case for case in generate(declared, mode, tier) if len(case.variants) == 1]
    return {word: case for case in alone for word in case.variants}


def test_each_way_is_a_word_of_ids_and_says_what_it_is() -> None:
    assert all(variant.word == word and variant.about for word, variant in SERVER_VARIANTS.items())
    assert variant_of(parse_case("decode-gqa2x2-d64-bf16-p16-k3-shuffled-gauss-b1prod")).word == ""


@pytest.mark.parametrize("mode", ForwardMode)
def test_ids_rebuild_the_cases_of_ways(mode: ForwardMode) -> None:
    for word, case in (*variants(ALL, mode, "smoke").items(), *variants(ALL, mode).items()):
        assert parse_case(case.id) == case
        assert f"-{word}" in case.id


@pytest.mark.parametrize("mode", ForwardMode)
def test_what_is_declared_decides_which_ways_are_tried(mode: ForwardMode) -> None:
    verify = {"seq_lens_with_new", "no_tree_tensors"} if mode is ForwardMode.TARGET_VERIFY else set()
    more = set() if mode is ForwardMode.DRAFT_DECODE else {"padded_tokens", "freed_minus_one", "freed_null_page"}
    if mode in (ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY):
        more = more | {"noncausal"}
    far = {"far", "shapes"} if mode is ForwardMode.DECODE else set()
    big = {"bigpool"} if mode in (ForwardMode.DECODE, ForwardMode.EXTEND) else set()
    pieces = set() if mode is ForwardMode.DRAFT_DECODE else {"piecewise"}
    drafts = {"narrower_widths", "context_of_prefixes"}
    drafts = set() if mode in (ForwardMode.DECODE, ForwardMode.EXTEND) else drafts
    assert set(variants(PLAIN, mode)) == {"empty_batches", "overlap_scheduling"} | far | big | pieces
    assert (
        set(variants(ALL, mode))
        == {"empty_batches", "overlap_scheduling", "zero_length_padding", "given_out"}
        | far
        | big
        | more
        | verify
        | pieces
        | drafts
    )
    assert "overlap_scheduling" not in variants(PLAIN.with_changes(server={"overlap_scheduling": False}), mode)
    assert "zero_length_padding" not in variants(ALL.with_changes(graph=()), mode)
    assert "zero_length_padding" not in variants(ALL.with_changes(server={"padded_requests": {"nothing"}}), mode), (
        "all cases have it so"
    )
    assert "seq_lens_with_new" not in variants(ALL.with_changes(server={"verify_lens": {"all"}}), mode), (
        "all cases have it so"
    )


@pytest.mark.parametrize("mode", ForwardMode)
def test_in_full_every_mode_but_draft_decode_has_a_pool_beyond_32_bits(mode: ForwardMode) -> None:
    found = [case for case in generate(PLAIN, mode, "full") if "bigpool" in case.variants]
    assert len([case for case in found if case.head_dim == 128]) == (mode is not ForwardMode.DRAFT_DECODE)
    own = PLAIN.with_changes(kv_pool={"kv_layouts": {"custom"}})
    assert not [case for case in generate(own, mode, "full") if "bigpool" in case.variants]


@pytest.mark.parametrize(
    ("layout", "ratio", "dims", "widths"),
    [
        ("gqa", 2, {32, 64, 128}, [128, 64]),
        ("gqa", 2, {32, 96}, [96, 32]),
        ("gqa", 2, {65, 128}, [128]),
        ("gqa", 2, {64}, [64]),
        ("mqa", 4, {64, 128}, [128]),
        ("mla", 16, {512}, [512]),
    ],
)
def test_decode_has_a_pool_of_slots_beyond_24_bits_if_rows_can_be_so_narrow(
    layout: str, ratio: int, dims: set[int], widths: list[int]
) -> None:
    declared = PLAIN.with_changes(heads={"families": {layout}, "gqa_ratios": {ratio}, "head_dims": dims})
    for mode in (DECODE, EXTEND):
        found = [case for case in generate(declared, mode, "core") if "bigpool" in case.variants]
        assert [case.head_dim for case in found] == widths[: None if mode is DECODE else 1]
        for case in found:
            _, heads, width = case.head_shape
            slots = (pages_in_pool(make_schedule(case)) + 1) * case.page_size
            if heads * width <= 128:
                assert slots > 2**24
            assert slots * heads * width < 1.01 * 2**31, "of more, nothing fits a small device"


@pytest.mark.parametrize(("tier", "modes"), [("core", {DECODE, EXTEND}), ("full", {DECODE, EXTEND, VERIFY, V2})])
@pytest.mark.parametrize("fused", [False, True])
def test_a_backend_with_an_indexer_has_one_case_per_mode_of_an_index_pool_beyond_32_bits(
    tier: str, modes: set[ForwardMode], fused: bool
) -> None:
    declared = IndexerParent.capabilities.with_changes(sparse=Sparse(topk={1, 16}, indexer=Indexer({4}, fused=fused)))
    for mode in ForwardMode:
        found = [c for c in generate(declared, mode, tier) if "bigpool" in c.variants and c.indexer]
        assert len(found) == (mode in modes)
        for case in found:
            assert case.selection is not None
            assert (case.indexer, case.selection.topk) == (Indexing(4, fused=fused), 16)
            assert sorted(case.prefixes) == [1, 25, 2 * 16 + 2 * case.page_size + 5], "two requests leave keys out"
            assert pages_in_pool(make_schedule(case)) * case.page_size * 128 > 2**31


def test_a_large_pool_of_latent_rows_with_index_keys_is_of_fp8_where_that_is_declared() -> None:
    latent = IndexerParent.capabilities.with_changes(
        heads={"families": {"mla"}, "head_dims": {512}, "gqa_ratios": {16}}
    )
    kinds = {}
    for name, formats in (("narrow", {"same", "fp8_e4m3"}), ("wide", {"same"})):
        cases = generate(latent.with_changes(kv_pool={"kv_dtypes": formats}), DECODE, "core")
        (kinds[name],) = {case.kv_dtype for case in cases if "bigpool" in case.variants and case.indexer}
    assert kinds == {"narrow": "fp8_e4m3", "wide": "same"}


@pytest.mark.parametrize("declared", [PLAIN, ALL])
def test_pages_of_every_request_lie_at_both_ends_of_a_pool_beyond_32_bits(declared: Capabilities) -> None:
    case = variants(declared, ForwardMode.DECODE)["bigpool"]
    assert (case.layers.count, case.dtype) == (1, "bf16")
    schedule = make_schedule(case)
    _, heads, width = case.head_shape
    places, row, page = slot_map(schedule, 0), heads * width, case.page_size
    half = (schedule.num_pages // 2 + 1) * page
    assert places[:half].tolist() == list(range(half)), "the first pages lie where they lay"
    assert len(places) == (schedule.num_pages + 1) * page
    assert places[half] * row >= 2**31 > (places[half] - page) * row * 0.99
    assert places[-1] == (pages_in_pool(schedule) + 1) * page - 1
    slots = {int(slot) for step in schedule.steps for request in step.requests for slot in request.slots}
    assert min(slots) < half <= max(slots)


@pytest.mark.parametrize("mode", ForwardMode)
def test_every_mode_has_steps_without_a_live_request(mode: ForwardMode) -> None:
    schedule = make_schedule(variants(PLAIN, mode)["empty_batches"])
    labels = [step.label for step in schedule.steps]
    assert labels[:5] == ["own batch", "no live request", "longer, exact", "no live request", "no live request again"]
    assert labels[-2:] == ["no live request", "own batch again"]
    assert {step.bucket for step in schedule.idle} == set(schedule.buckets)
    assert [step.bs for step in schedule.idle] == [0, 0, 0, 0]
    assert min(step.bs for step in schedule.steps if step not in schedule.idle) > 0


def test_an_empty_step_runs_eagerly_for_who_takes_it() -> None:
    schedule = make_schedule(variants(PLAIN)["empty_batches"])
    empty, *_ = (step for step in schedule.idle if step.eager_too)
    live, *_ = (step for step in schedule.steps if step.eager_too and step.requests)
    takes = PLAIN.with_changes(server={"takes_empty_batches": True})
    assert (schedule.runs_eagerly(empty, PLAIN), schedule.runs_eagerly(empty, takes)) == (False, True)
    assert schedule.runs_eagerly(live, PLAIN)


def test_no_step_runs_eagerly_in_a_mode_of_graphs_alone() -> None:
    schedule = make_schedule(variants(PLAIN)["empty_batches"])
    alone = PLAIN.with_changes(eager={"extend"}, server={"takes_empty_batches": True})
    assert not [step for step in schedule.steps if schedule.runs_eagerly(step, alone)]
    assert [step for step in schedule.steps if schedule.runs_eagerly(step, alone.with_changes(eager={"decode"}))]


@pytest.mark.parametrize("mode", ForwardMode)
def test_nothing_is_expected_of_a_step_without_requests_but_that_no_slot_changes(mode: ForwardMode) -> None:
    schedule = make_schedule(variants(PLAIN, mode)["empty_batches"])
    step = schedule.idle[0]
    data, expected = make_step_data(schedule, step), expect(schedule, step)
    assert data.q.shape[1] == data.out_cache_loc.numel() == 0
    assert expected.attention.shape[:2] == (len(data.q), 0)
    assert expected.logits.shape[0] == expected.hidden_limit.shape[0] == 0
    for tails in (False, True):
        assert pool_image(schedule, step, data, tails, after=True).float().isnan().all()


@pytest.mark.parametrize(("longest", "is_tried"), [(1 << 18, True), ((1 << 18) - 1, False)])
def test_a_far_context_is_tried_where_it_is_declared_and_no_request_is_near_it(longest: int, is_tried: bool) -> None:
    found = variants(PLAIN.with_changes(bounds={"max_context_len": longest}))
    assert ("far" in found) == is_tried
    if is_tried:
        schedule = make_schedule(found["far"])
        assert schedule.max_context_len == schedule.steps[0].req_to_token.shape[1] == 1 << 18
        assert max(max(step.lens) for step in (*schedule.steps, schedule.oversized)) < 1 << 9
        assert len(schedule.steps) == 3, "a table takes a megabyte a row"


def test_a_backend_without_decode_has_its_far_context_in_one_other_mode() -> None:
    draft = {ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND}
    declared = PLAIN.with_changes(eager=draft, graph=())
    assert [mode for mode in ForwardMode if "far" in variants(declared, mode)] == [ForwardMode.TARGET_VERIFY]


def test_pieces_are_of_eager_modes_and_each_of_their_steps_runs_eagerly() -> None:
    words = {"piecewise", "given_out", "padded_tokens"}
    cases = [case for case in generate(ALL, ForwardMode.EXTEND, "core") if "piecewise" in case.variants]
    assert [case.variants for case in cases] == [{"piecewise"}, words]
    schedule = make_schedule(cases[0])
    assert [step.label for step in schedule.steps if not schedule.runs_eagerly(step, ALL)] == ["longer, exact"]
    assert "piecewise" not in variants(PLAIN.with_changes(eager=(), graph={"extend"}), ForwardMode.EXTEND)


def test_more_shapes_than_a_cache_of_128_entries_holds_stand_between_two_replays_of_the_own_batch() -> None:
    schedule = make_schedule(variants(PLAIN, ForwardMode.DECODE)["shapes"])
    steps = schedule.steps
    assert [step.label for step in (steps[0], steps[-1])] == ["own batch", "own batch after many others"]
    assert {step.bucket for step in (steps[0], steps[-1])} == {max(schedule.buckets)}
    between = [step for step in steps if step.bucket == min(schedule.buckets)]
    assert len({tuple(step.lens) for step in between}) > 128
    assert all(schedule.runs_eagerly(step, PLAIN) for step in between)
    assert "shapes" not in variants(PLAIN.with_changes(graph={"extend"}), ForwardMode.DECODE), (
        "eager plans are not kept"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("lseprefix-b2prod-given_out", "given_out and KV splits: forward_return_lse has no out="),
        ("lseprefix-b2prod-padded_tokens", "padded_tokens and KV splits: rows of no request have no keys"),
        ("lseprefix-b2prod-empty_batches", "empty_batches and KV splits: without rows nothing is merged"),
        ("b2prod-empty_batches-padded_tokens", "padded_tokens and empty_batches: "),
        ("b2prod-empty_batches-far", "far and empty_batches: "),
        ("b2prod-far-shapes", "far and shapes: "),
        ("b2prod-given_out-zero_length_padding", "not in its usual form; write .*-zero_length_padding-given_out$"),
        ("b2prod-given_out-given_out", "not in its usual form; write .*-given_out$"),
    ],
)
def test_what_excludes_each_other_is_refused_with_the_reason(words: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_case(f"decode-gqa2x2-d64-bf16-p16-k3x2-shuffled-gauss-{words}")


def test_what_variants_exclude_are_variants_and_things_that_a_case_has_and_each_says_why() -> None:
    for word, variant in SERVER_VARIANTS.items():
        assert variant.excludes.keys() <= TRAITS.keys() - {word}
        assert all(variant.excludes.values())


def test_two_variants_of_a_case_come_to_what_both_do() -> None:
    both = variant_of(
        parse_case("target-verify-gqa2x2-d64-bf16-p16-k3-chain4-shuffled-gauss-b2prod-seq_lens_with_new-noncausal")
    )
    assert (both.word, both.causal, both.gives_none, dict(both.says)) == (
        "seq_lens_with_new-noncausal", False, True, {"verify_lens": "all"},
    )  # fmt: skip
    idle = parse_case(
        "decode-gqa2x2-d64-bf16-p16-k3x2-shuffled-gauss-b3prod-empty_batches-zero_length_padding-overlap_scheduling"
    )
    assert any(not step.requests for step in make_schedule(idle).steps)
    assert variant_of(idle).says == {"padded_requests": "nothing"}


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND])
def test_core_has_each_two_variants_that_do_not_exclude_each_other(mode: ForwardMode) -> None:
    cases = generate(ALL, mode, "core")
    words = [
        word
        for word, variant in SERVER_VARIANTS.items()
        if variant.combines and any(word in case.variants for case in cases)
    ]
    met = {
        pair for case in cases for pair in combinations([word for word in SERVER_VARIANTS if word in case.variants], 2)
    }
    assert set(combinations(words, 2)) - met == {
        ("empty_batches", "padded_tokens"),
        ("freed_minus_one", "freed_null_page"),
    }
    assert any(case.variants and case.kv_splits for case in cases)
    assert any(case.variants and case.layers.groups for case in cases)

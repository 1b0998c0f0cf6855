"""Every declared value is tried or named, and what tries it is counted from the cases."""

from __future__ import annotations

import importlib.metadata
import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import Case, Heads
from attn_testkit.cases.features.rows import MOST_ROWS
from attn_testkit.cases.features.table import FEATURES
from attn_testkit.cases.plans import context_len
from attn_testkit.cases.rows import Accepted, Decode, Rows, Verify
from attn_testkit.cases.trees import Tree, chain
from attn_testkit.catalogue.array import array_cases
from attn_testkit.catalogue.cases_for_uncovered import MOST_VALUES, cases_for_uncovered
from attn_testkit.catalogue.not_covered import DECLARED_VALUES, Value, describe_not_covered, not_covered
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import Capabilities, ForwardMode
from attn_testkit.examples import MinimalBackend
from attn_testkit.steps.data import make_layers
from attn_testkit.steps.schedule import make_schedule

DECODE, VERIFY, V1, V2, EXTEND, DRAFT = ForwardMode
TIERS_PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "running.md"
BUNDLED = {
    entry.name: entry.load().capabilities
    for entry in importlib.metadata.entry_points(group="attn_testkit.backends")
}  # fmt: skip


def declared(**changes: object) -> Capabilities:
    every: dict[str, object] = {
        "eager": set(ForwardMode),
        "heads": {"families": {"mha"}, "gqa_ratios": {1}, "head_dims": {64}},
        "precision": {"dtypes": {"bf16"}},
        "kv_pool": {"page_sizes": {16}},
        "bounds": {"max_q_rows": 4, "max_topk": 1, "max_context_len": 1 << 12},
    }
    return Capabilities(**every).with_changes(**changes)  # type: ignore[arg-type]


def case(rows: Rows | None = None, **changes: object) -> Case:
    minimal = Case(rows or Decode(), Heads("mha", 2, 2), 64, "bf16", 16, (20, 3), bucket=2)
    return replace(minimal, **changes)  # type: ignore[arg-type]


def v2(*new: int) -> Rows:
    return Accepted(new, 4, v2=True)


def tries(name: str, one: Case, **changes: object) -> list[Value]:
    """Values of a capability that a case tries."""
    supported = declared(**changes)
    left = {value for found, value in not_covered(supported, one.mode, [one]) if found == name}
    return sorted(set(DECLARED_VALUES[name].declared(supported, one.mode)) - left, key=str)


def lacking(tier: str, mode: ForwardMode, supported: Capabilities) -> dict[str, list[Value]]:
    """Without lengths of contexts and prompts, of which a capability is seldom tried to the end."""
    left = [(name, value) for name, value in not_covered(supported, mode, generate(supported, mode, tier))
            if name not in ("context", "extend")]  # fmt: skip
    return {name: [value for found, value in left if found == name] for name, _ in left}


@pytest.mark.parametrize("mode", list(ForwardMode), ids=str)
@pytest.mark.parametrize("name", BUNDLED)
def test_core_tries_every_value_that_a_bundled_backend_declares_but_those_of_long_capabilities(
    name: str, mode: ForwardMode
) -> None:
    left = lacking("core", mode, BUNDLED[name])
    if name in ("torch_native", "torch_native_sparse"):
        # With several rows 7 has a case of its own (``catalogue/row_edges.py``), in decode each usual one
        # (``catalogue/declared_pairs.py``).
        tried = {DECODE: {3, 5, 6, 7, 12}, ForwardMode.DRAFT_DECODE: {3}}.get(mode, {3, 7})
        assert left.pop("group") == [n for n in range(2, 127) if n & (n - 1) and n not in tried]
        assert left.pop("mla_heads") == [n for n in range(2, 128) if n & (n - 1)]
    assert left == {}


def test_full_tries_every_value_of_a_long_capability_too() -> None:
    long = declared(
        heads={"families": {"gqa", "mla"}, "gqa_ratios": set(range(1, 21)), "mla_rope_dims": {32}, "head_dims": {32}}
    )
    assert lacking("core", DECODE, long) == {
        "group": [5, 6, 7, 9, 10, 11, *range(12, 16), 17, 18, 19],
        "mla_heads": [3, 5, 6, 7, 9, *range(10, 16), 17, 18, 19],
    }
    assert lacking("full", DECODE, long) == {}


@pytest.mark.parametrize(("most", "left"), [(16, []), (17, [10, 11, 12, 14, 15])])
def test_of_sixteen_values_core_tries_all_and_of_more_powers_of_two(most: int, left: list[int]) -> None:
    sizes = set(range(1, most + 1))
    found = lacking("core", DECODE, declared(kv_pool={"page_sizes": sizes})).get("page", [])
    assert [n for n in found if isinstance(n, int) and n > 8] == left


@pytest.mark.parametrize("mode", list(ForwardMode), ids=str)
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("head_dim", {"heads": {"head_dims": {64, 96, 128, 512, 1024}}}),
        ("page", {"kv_pool": {"page_sizes": {1, 2, 4, 8, 16, 32, 64, 128}}}),
        ("group", {"heads": {"families": {"gqa"}, "gqa_ratios": {2, 8, 16, 32}}}),
        ("group", {"heads": {"families": {"mqa"}, "gqa_ratios": {2, 8, 16, 32}}}),
        ("mla_heads", {"heads": {"families": {"mla"}, "gqa_ratios": {4, 16}}}),
        ("latent", {"heads": {"families": {"mha", "mla"}, "gqa_ratios": {2}, "head_dims": {64, 128, 512}}}),
        ("rope", {"heads": {"families": {"mha", "mla"}, "gqa_ratios": {2}, "mla_rope_dims": {16, 32, 64}}}),
        ("dtypes", {"precision": {"dtypes": {"fp16", "bf16", "fp32"}}, "kv_pool": {"kv_dtypes": {"same", "fp8_e4m3"}}}),
        ("rows", {"bounds": {"max_q_rows": 100}}),
        ("topk", {"bounds": {"max_q_rows": 100, "max_topk": 8}}),
        ("branches", {"bounds": {"max_draft_branches": 9}}),
    ],
)
def test_core_leaves_no_value_of_a_capability_and_smoke_prints_what_it_leaves(
    name: str, changes: dict[str, object], mode: ForwardMode
) -> None:
    supported = declared(**changes)
    assert lacking("core", mode, supported) == {}
    left = {
        value for values in lacking("smoke", mode, supported).values() for value in values if isinstance(value, int)
    }
    said = (
        " ".join(describe_not_covered(supported, [mode], generate(supported, mode, "smoke"))).replace(",", "").split()
    )
    assert {str(value) for value in left} <= {*said}


def test_a_mode_that_is_not_declared_lacks_nothing() -> None:
    some = declared(eager={DECODE}, graph={VERIFY})
    assert not_covered(some, V1, []) == []
    assert [bool(not_covered(some, mode, [])) for mode in (DECODE, VERIFY)] == [True, True]


def test_no_two_features_have_a_kind_of_value_of_the_same_name() -> None:
    names = [covered.name for feature in FEATURES for covered in feature.covered]
    assert sorted(names) == sorted(DECLARED_VALUES), "one of them would take the place of the other"


def test_a_page_is_tried_by_a_request_of_more_than_one() -> None:
    assert tries("page", case(prefixes=(15, 3))) == []
    assert tries("page", case(prefixes=(3, 16))) == [16]
    assert tries("page", case(v2(1, 1), prefixes=(12, 3))) == []
    assert tries("page", case(v2(1, 1), prefixes=(13, 3))) == [16]
    assert tries("page", case(Accepted((3, 1), 4), prefixes=(13, 3))) == []
    assert tries("page", case(Accepted((4, 1), 4), prefixes=(13, 3))) == [16]


def test_rows_are_tried_by_a_request_of_that_many() -> None:
    assert tries("rows", case(Verify(chain(4)))) == [4]
    assert tries("rows", case(Verify(chain(3)))) == []
    assert tries("rows", case(v2(1, 1))) == [4]
    assert tries("rows", case(Accepted((1, 3), 4))) == []
    assert tries("rows", case(Accepted((1, 4), 4))) == [4]
    assert list(DECLARED_VALUES["rows"].declared(declared(), DECODE)) == []


def test_a_tree_is_as_wide_as_declared_or_as_rows_allow() -> None:
    star = case(Verify(Tree((0, 0, 0))))
    assert tries("topk", star, bounds={"max_topk": 3}) == [3]
    assert tries("topk", star, bounds={"max_topk": 100}) == [3], "a fourth child would be a fifth row"
    assert tries("topk", star, bounds={"max_topk": 100, "max_q_rows": 5}) == []


@pytest.mark.parametrize("data", ["mean", "negative"])
def test_data_without_differences_between_keys_try_nothing(data: str) -> None:
    supported = declared(bounds={"max_context_len": 21})
    assert not_covered(supported, DECODE, [case()]) == []
    assert len(not_covered(supported, DECODE, [case(data=data)])) == len(not_covered(supported, DECODE, []))


def test_groups_are_those_of_gqa_or_where_it_is_not_declared_of_mqa() -> None:
    gqa, mqa = (case(heads=Heads(family, 8, kv)) for family, kv in (("gqa", 2), ("mqa", 1)))
    assert tries("group", gqa, heads={"families": {"gqa", "mqa"}, "gqa_ratios": {1, 4, 8}}) == [4]
    assert tries("group", mqa, heads={"families": {"gqa", "mqa"}, "gqa_ratios": {1, 4, 8}}) == []
    assert tries("group", mqa, heads={"families": {"mqa"}, "gqa_ratios": {1, 4, 8}}) == [8]
    assert list(DECLARED_VALUES["group"].declared(declared(heads={"gqa_ratios": {1, 4}}), DECODE)) == []


def test_widths_of_mla_and_of_other_families_are_tried_apart() -> None:
    mixed = {"heads": {"families": {"mha", "mla"}, "gqa_ratios": {2}, "mla_rope_dims": {32}}}
    mla = case(heads=Heads("mla", 2, 1), rope_dim=32)
    assert [tries(name, mla, **mixed) for name in ("head_dim", "latent", "rope", "mla_heads")] == [[], [64], [32], [2]]
    names = ("head_dim", "latent", "rope", "mla_heads")
    assert [tries(name, case(), **mixed) for name in names] == [[64], [], [], []]


def test_a_window_is_tried_where_it_leaves_a_key_out() -> None:
    windows = {"windows": {"modes": {DECODE, VERIFY}, "in_trees": True}, "bounds": {"max_topk": 2}}
    assert tries("sliding window", case(window=20), **windows) == []
    assert tries("sliding window", case(window=19), **windows) == ["sliding window"]
    assert tries("sliding window", case(window=0), **windows) == ["sliding window"]
    tree = case(Verify(Tree((0, 0))), window=4)
    assert tries("sliding window in trees", tree, **windows) == ["sliding window in trees"]
    assert tries("sliding window in trees", replace(tree, rows=Verify(chain(3))), **windows) == []
    assert not list(
        DECLARED_VALUES["sliding window in trees"].declared(
            declared(**windows).with_changes(bounds={"max_q_rows": 2}), VERIFY
        )
    )


def test_more_rows_than_cases_are_made_of_are_named() -> None:
    endless = declared(bounds={"max_q_rows": 1 << 20, "max_topk": 1 << 20})
    cases = generate(endless, VERIFY, "core")
    assert max(one.width for one in cases) == MOST_ROWS
    assert max(one.topk for one in cases) == MOST_ROWS - 1
    assert describe_not_covered(endless, [VERIFY], cases) == (
        "more than 256 of 1,048,576 query rows",
        "more than 255 of 1,048,575 children of a tree node",
    )


def test_a_value_for_which_the_context_has_no_room_is_named() -> None:
    short = declared(kv_pool={"page_sizes": {16, 512}}, bounds={"max_context_len": 400})
    cases = generate(short, DECODE, "core")
    assert describe_not_covered(short, [DECODE], cases)[0] == "page size 512"


def test_a_family_without_a_ratio_is_named() -> None:
    assert "family gqa" in describe_not_covered(
        declared(heads={"families": {"mha", "gqa"}}), [DECODE], generate(declared(), DECODE, "core")
    )


@pytest.mark.parametrize("mode", list(ForwardMode), ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {"heads": {"families": {"gqa", "mla"}, "gqa_ratios": {1}, "head_dims": {64, 512}}},
        {
            "heads": {"families": {"mqa", "mla"}, "gqa_ratios": {1, 3, 24}, "mla_rope_dims": {0, 32}},
            "bounds": {"max_q_rows": 1},
        },
        {
            "heads": {"families": {"gqa"}, "gqa_ratios": {12, 24}},
            "kv_pool": {"page_sizes": {1, 2, 3, 5, 6, 7}},
            "bounds": {"max_q_rows": 2, "max_topk": 9},
        },
        {
            "heads": {"families": {"mha", "mqa"}, "gqa_ratios": {5}},
            "bounds": {"max_context_len": 150, "max_q_rows": 120},
        },
        {
            "precision": {"dtypes": {"fp32"}},
            "kv_pool": {"kv_dtypes": {"fp8_e4m3"}, "page_sizes": {256, 512}},
            "heads": {"head_dims": {640}},
        },
    ],
)
def test_small_cases_keep_within_what_is_declared(changes: dict[str, object], mode: ForwardMode) -> None:
    supported = declared(**changes)
    for one in generate(supported, mode, "core"):
        ratio = one.heads.q_heads // one.heads.kv_heads
        assert one.heads.family in supported.heads.families
        assert ratio in supported.heads.gqa_ratios or one.heads.family == "mha"
        assert ratio > 1 or one.heads.family in ("mha", "mla")
        assert one.rope_dim in (supported.heads.mla_rope_dims if one.heads.family == "mla" else {0})
        assert (one.head_dim, one.page_size) in set(
            itertools.product(supported.heads.head_dims, supported.kv_pool.page_sizes)
        )
        assert (one.dtype, one.kv_dtype) in set(
            itertools.product(supported.precision.dtypes, supported.kv_pool.kv_dtypes)
        )
        most = {EXTEND: supported.bounds.max_extend_tokens, DRAFT: supported.bounds.max_draft_branches}
        assert (one.rows_at_once if one.draft else one.most_new) <= most.get(mode, supported.bounds.max_q_rows)
        assert one.topk <= supported.bounds.max_topk
        assert context_len(one) <= supported.bounds.max_context_len


def test_one_small_case_takes_what_it_can() -> None:
    wide = declared(
        heads={"families": {"gqa"}, "gqa_ratios": {2, 8, 16, 32}, "head_dims": {32, 64, 96, 128, 256}},
        bounds={"max_q_rows": 40},
    )
    small = list(cases_for_uncovered(wide, V1, "core", generate(wide, V1, "smoke"), lambda case: True))[:2]
    assert small[0].new == (40, 3)
    assert all(case.heads.q_heads > 4 and case.head_dim > 32 for case in small), "a group and a head dim each"


def test_what_is_left_is_said_in_few_words_and_where() -> None:
    supported = declared(
        heads={"families": {"gqa"}, "gqa_ratios": {1, 2, 3, 4, 6, 7}, "head_dims": {32, 64}},
        precision={"dtypes": {"fp16", "bf16"}},
        options={"logit_cap": True},
    )
    heads = Heads("gqa", 4, 2)
    decode, draft = case(heads=heads, dtype="fp16"), case(Accepted((1, 3), 3), heads=heads, head_dim=32)
    assert describe_not_covered(supported, [DECODE, V1], [decode, draft, case(v2(1, 1))]) == (
        "group 3, 4, 6, 7",
        "head dim 32 (decode)",
        "dtype and KV dtype bf16 with same (decode)",
        "soft cap",
        "more than 21 of 4,096 tokens of context",
        "more than 3 of 4 query rows (draft-extend)",
        "head dim 64 (draft-extend)",
        "dtype and KV dtype fp16 with same (draft-extend)",
    )
    ratios = declared(heads={"families": {"gqa"}, "gqa_ratios": {2, 3, 4, 6, 7}}, bounds={"max_context_len": 21})
    assert describe_not_covered(ratios, [DECODE], [case(heads=Heads("gqa", 12, 2))]) == ("group 2-4, 7",)


def test_small_cases_have_the_seed_of_the_others() -> None:
    supported = declared(kv_pool={"page_sizes": {1, 2, 4, 8, 16, 32}})
    small = generate(supported, DECODE, "core", 3)[-1]
    assert small.seed == 3
    assert small.with_seed(0) == generate(supported, DECODE, "core")[-1]


def meets_every(strength: int, cases: list[Case]) -> bool:
    """Whether every combination of so many values occurs, of values that occur, in a layer of a replay."""
    replays = {
        (one.dtype, one.kv_dtype, one.page_size, step.layout, step.data, layer.logit_cap, layer.sinks is not None)
        for one in cases
        for step in make_schedule(one).steps
        for layer in make_layers(one)
    }
    for places in itertools.combinations(range(len(next(iter(replays)))), strength):
        found = {tuple(replay[place] for place in places) for replay in replays}
        each = [{values[i] for values in found} for i in range(strength)]
        if len(found) < len(list(itertools.product(*each))):
            return False
    return True


def test_the_page_says_what_the_tiers_try() -> None:
    everything = TorchNativeBackend.capabilities
    mla = everything.with_changes(heads={"families": {"mla"}})
    core = [one for mode in ForwardMode for one in generate(everything, mode, "core")]
    deep = [one for mode in ForwardMode for one in generate(mla, mode, "core")]
    named = {
        tier: [one for mode in ForwardMode for one in array_cases(MinimalBackend.capabilities, mode, tier, 0)]
        for tier in ("smoke", "core", "full")
    }
    assert [meets_every(1, named["smoke"]), meets_every(2, named["core"]), meets_every(3, named["full"])] == [True] * 3
    assert not meets_every(2, named["smoke"])
    assert not meets_every(3, named["core"])
    requests, keys = max(one.bs for one in core), max(max(one.prefixes) for one in core)
    mla_keys = {mode: max(max(one.prefixes) for one in deep if one.mode is mode) for mode in ForwardMode}
    (elsewhere,) = {most for mode, most in mla_keys.items() if mode is not DECODE}
    (row,) = [line for line in TIERS_PAGE.read_text().splitlines() if line.startswith("| `core` |")]
    assert f"{requests} requests;" in row
    assert f"{keys:,} keys (MLA: {mla_keys[DECODE]:,} in decode, {elsewhere:,} elsewhere)" in row
    assert f"{MOST_ROWS} at most" in row
    assert f"more than {MOST_VALUES} values" in row


def test_layers_that_are_not_causal_are_named_where_they_are_declared() -> None:
    declared, name = TorchNativeBackend.capabilities, "layers that are not causal"
    for tier in ("smoke", "core"):
        cases = generate(declared, EXTEND, tier)
        assert not any(name in line for line in describe_not_covered(declared, [EXTEND], cases))
        causal = [case for case in cases if "noncausal" not in case.variants]
        assert any(name in line for line in describe_not_covered(declared, [EXTEND], causal))
    without = declared.with_changes(options={"non_causal": {"target-verify"}})
    assert not any(name in line for line in describe_not_covered(without, [EXTEND], generate(without, EXTEND, "smoke")))

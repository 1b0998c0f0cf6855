"""What a backend declares of a case: every case that its capabilities make, and no other."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

import pytest

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.cases.declared import not_declared
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import Capabilities, ForwardMode

CAPABILITIES = TorchNativeBackend.capabilities
BUNDLED: Mapping[str, Capabilities] = {
    entry.name: entry.load().capabilities for entry in importlib.metadata.entry_points(group="attn_testkit.backends")
}


@pytest.mark.parametrize("name", sorted(BUNDLED))
def test_every_case_that_declares_make_is_declared(name: str) -> None:
    declared = BUNDLED[name]
    for mode in sorted(declared.eager | declared.graph):
        cases = generate(declared, mode, "core")
        assert cases
        assert {case.id: lacking for case in cases if (lacking := not_declared(declared, case))} == {}


DECODE = "decode-gqa4x2-d64-bf16-p16-k33-shuffled-gauss-b1prod"
MLA = "decode-mla16-d512r64-bf16-p16-k33-shuffled-gauss-b1prod"
V1 = "draft-extend-mha2-d64-bf16-p16-k33-n4a2-shuffled-gauss-b1prod"
EXTEND = "extend-mha2-d64-bf16-p16-k33-n9a9-shuffled-gauss-b1prod"
TREE = "target-verify-mha2-d64-bf16-p16-k33-t0.0.0-shuffled-gauss-b1prod"
DRAFT = "draft-decode-mha2-d64-bf16-p16-k33-topk2steps3-shuffled-gauss-b1prod"
DECODES, EXTENDS = {ForwardMode.DECODE}, {ForwardMode.EXTEND}
LOOP = "a greedy-equivalence loop of this draft, with these options"
AT_THE_EDGE: list[tuple[str, dict[str, object], dict[str, object], str]] = [
    (DECODE, {"eager": DECODES, "graph": ()}, {"eager": EXTENDS, "graph": ()}, "mode decode"),
    (DECODE, {}, {"heads": {"families": {"mha"}}}, "heads gqa4x2"),
    (DECODE, {"heads": {"gqa_ratios": {4}}}, {"heads": {"gqa_ratios": {2, 8}}}, "heads gqa4x2"),
    (DECODE.replace("gqa4x2", "mha2"), {"heads": {"gqa_ratios": {4}}}, {"heads": {"families": {"gqa"}}}, "heads mha2"),
    (DECODE, {"heads": {"head_dims": {64}}}, {"heads": {"head_dims": {128}}}, "head dim 64"),
    (MLA, {"heads": {"mla_rope_dims": {64}}}, {"heads": {"mla_rope_dims": {32}}}, "MLA rope width 64"),
    (MLA, {"heads": {"gqa_ratios": {16}}}, {"heads": {"gqa_ratios": {8}}}, "heads mla16"),
    (DECODE, {"precision": {"dtypes": {"bf16"}}}, {"precision": {"dtypes": {"fp16"}}}, "dtype bf16"),
    (DECODE.replace("-b1", "-kvfp8e4m3-b1"), {}, {"kv_pool": {"kv_dtypes": {"same"}}}, "KV dtype fp8_e4m3"),
    (
        DECODE.replace("-b1", "-kvhnd-b1"),
        {"kv_pool": {"kv_layouts": {"hnd"}}},
        {"kv_pool": {"kv_layouts": {"nhd"}}},
        "KV layout hnd",
    ),
    (DECODE, {"kv_pool": {"page_sizes": {16}}}, {"kv_pool": {"page_sizes": {1, 32}}}, "page size 16"),
    (V1, {"bounds": {"max_q_rows": 4}}, {"bounds": {"max_q_rows": 3}}, "as many rows of a request"),
    (EXTEND, {"bounds": {"max_extend_tokens": 9}}, {"bounds": {"max_extend_tokens": 8}}, "as many rows of a request"),
    # As much room in the graph is no capability.
    (
        EXTEND.replace("n9a9", "n12a9"),
        {"bounds": {"max_extend_tokens": 9}},
        {"bounds": {"max_extend_tokens": 8}},
        "as many rows of a request",
    ),
    (DRAFT, {"bounds": {"max_draft_branches": 2}}, {"bounds": {"max_draft_branches": 1}}, "as many rows of a request"),
    (TREE, {"bounds": {"max_topk": 3}}, {"bounds": {"max_topk": 2}}, "a tree with 3 children of a node"),
    (
        DECODE.replace("-b1", "-w5-b1"),
        {"windows": {"smallest": 5}},
        {"windows": {"smallest": 6}},
        "sliding window 5 (any)",
    ),
    (DECODE.replace("-b1", "-w5-b1"), {"windows": DECODES}, {"windows": EXTENDS}, "sliding window 5 (any)"),
    (
        DECODE.replace("-b1", "-w5one-b1"),
        {"windows": {"layers": "one"}},
        {"windows": {"layers": "same"}},
        "sliding window 5 (one)",
    ),
    (
        TREE.replace("-b1", "-w5-b1"),
        {"windows": {"in_trees": True}},
        {"windows": {"in_trees": False}},
        "a sliding window with a branching tree",
    ),
    (
        DECODE.replace("-b1", "-usualscale-b1"),
        {"options": {"any_scaling": False}},
        {"precision": {"dtypes": {"fp16"}}},
        "dtype bf16",
    ),
    (DECODE, {}, {"options": {"any_scaling": False}}, "a softmax scale that is not 1/sqrt(head_dim)"),
    (DECODE.replace("-b1", "-cap1.5-b1"), {}, {"options": {"logit_cap": False}}, "soft cap"),
    (DECODE.replace("-b1", "-sink-b1"), {}, {"options": {"sinks": False}}, "sinks"),
    (
        DECODE.replace("-b1", "-layers3from5groups-b1"),
        {"kv_pool": {"kv_groups": True}},
        {"kv_pool": {"kv_groups": False}},
        "KV groups",
    ),
    (DECODE.replace("-b1", "-lsewhole-b1"), {}, {"lse": None}, "log-sum-exp: whole"),
    (
        DECODE.replace("-b1prod", "-b1prod-multi_mode"),
        {},
        {"graph": DECODES, "eager": DECODES},
        "several modes on one instance",
    ),
    (
        DRAFT.replace("steps3", "steps3-prefixed"),
        {"server": {"drafts_without_prefix": False}},
        {"precision": {"dtypes": {"fp16"}}},
        "dtype bf16",
    ),
    (DRAFT, {}, {"server": {"drafts_without_prefix": False}}, "a draft without a prefix"),
    (DRAFT.replace("steps3", "steps3-loop2"), {"bounds": {"max_q_rows": 7}}, {"bounds": {"max_q_rows": 6}}, LOOP),
    (DRAFT.replace("steps3", "steps3-loop2"), {"bounds": {"max_topk": 2}}, {"bounds": {"max_topk": 1}}, LOOP),
    (
        DECODE.replace("-b1prod", "-b1prod-given_out"),
        {"server": {"takes_out": True}},
        {"server": {"takes_out": False}},
        "the server variant given_out",
    ),
    (
        DECODE.replace("-b1prod", "-b1prod-far"),
        {"bounds": {"max_context_len": 1 << 18}},
        {"bounds": {"max_context_len": (1 << 18) - 1}},
        "as many tokens of context",
    ),
]


@pytest.mark.parametrize(("name", "enough", "too_little", "words"), AT_THE_EDGE)
def test_a_capability_that_is_just_enough_holds_a_case_and_one_that_is_not_is_named(
    name: str, enough: dict[str, object], too_little: dict[str, object], words: str
) -> None:
    case = parse_case(name)
    assert not_declared(CAPABILITIES.with_changes(**enough), case) == ""
    assert not_declared(CAPABILITIES.with_changes(**too_little), case) == words


def test_of_layers_that_differ_the_heads_of_each_are_asked_for() -> None:
    case = parse_case("decode-gqa4x2-d64-bf16-p16-k33-shuffled-gauss-layers3from5by8x2d32.8x1d64-b1prod")
    both = CAPABILITIES.with_changes(
        heads={"heads_by_layer": True, "families": {"gqa", "mqa"}, "gqa_ratios": {4, 8}, "head_dims": {32, 64}}
    )
    assert not_declared(both, case) == ""
    assert not_declared(both.with_changes(heads={"gqa_ratios": {4}}), case) == "heads gqa4x2"
    assert not_declared(both.with_changes(heads={"head_dims": {64}}), case) == "head dim 64"
    assert not_declared(both.with_changes(heads={"heads_by_layer": False}), case) == "heads by layer"

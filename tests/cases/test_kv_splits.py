"""Parts of a request's keys: what each has, by three rules that agree, and which cases a capability gives."""

from __future__ import annotations

import pytest
import torch

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.cases.features.kv_splits import KV_SPLITS, splits_of
from attn_testkit.catalogue.not_covered import DECLARED_VALUES, describe_not_covered, not_covered
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import Capabilities, ForwardMode, KVSplit, LogSumExp

DECODE, VERIFY = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY
ALL = TorchNativeBackend.capabilities
PARTS = [
    KVSplit(),
    KVSplit("prefix"),
    KVSplit("new"),
    *(KVSplit("rank", rank, ranks, interleave) for ranks in (2, 3) for rank in range(ranks) for interleave in (1, 4)),
]


@pytest.mark.parametrize("part", PARTS, ids=repr)
def test_what_a_part_holds_how_many_and_which_is_the_same_answer(part: KVSplit) -> None:
    for kv_len in range(40):
        for prefix in {0, kv_len // 2, max(0, kv_len - 1), kv_len}:
            lens, key = torch.tensor([prefix]), torch.arange(kv_len)
            held = key[part.holds(key, lens)]
            count = int(part.lens(torch.tensor([kv_len]), lens))
            assert count == len(held)
            assert part.key(torch.arange(count), lens).tolist() == held.tolist()


def test_what_is_held_is_broadcast_whatever_the_kind() -> None:
    for part in PARTS:
        assert part.holds(torch.arange(7), torch.zeros(3, 1, dtype=torch.int64)).shape == (3, 7)
        assert part.key(torch.arange(7), torch.zeros(3, 1, dtype=torch.int64)).shape == (3, 7)


@pytest.mark.parametrize("mode", ForwardMode)
def test_parts_of_a_case_have_every_key_once_and_the_sinks_once(mode: ForwardMode) -> None:
    key, prefix = torch.arange(50), torch.tensor([23])
    for case in generate(ALL, mode, "core"):
        if case.kv_splits:
            parts = splits_of(case)
            assert (sum(part.holds(key, prefix).int() for part in parts) == 1).all(), case.id
            assert [part.sinks for part in parts] == [True] + [False] * (len(parts) - 1), case.id


def test_each_declared_kind_is_tried_in_each_mode_of_core_and_once_in_smoke() -> None:
    smoke = [case for mode in ForwardMode for case in generate(ALL, mode, "smoke")]
    assert {case.kv_splits.rstrip("0123456789") for case in smoke} == {"", "whole", "prefix", "pages", "tokens"}
    for mode in ForwardMode:
        wanted = set(DECLARED_VALUES["kv_splits"].declared(ALL, mode))
        assert {DECLARED_VALUES["kv_splits"].tried(ALL, case) for case in generate(ALL, mode, "core")} - {
            None
        } == wanted
        assert "kv_splits" not in dict(not_covered(ALL, mode, generate(ALL, mode, "core")))
    without = [case for case in generate(ALL, DECODE, "smoke") if not case.kv_splits]
    said = describe_not_covered(ALL, [DECODE], without)
    assert "log-sum-exp: merged by the backend, pages, prefix, tokens, whole" in said


@pytest.mark.parametrize(
    "mode", [mode for mode in ForwardMode if "pages" in DECLARED_VALUES["kv_splits"].declared(ALL, mode)]
)
@pytest.mark.parametrize(("sizes", "tried"), [({1, 16, 64}, {1, 16}), ({1, 4}, {4}), ({1}, {1}), ({32, 64}, {32})])
def test_ranks_have_pages_of_several_keys_where_any_are_declared(
    mode: ForwardMode, sizes: set[int], tried: set[int]
) -> None:
    cases = generate(ALL.with_changes(kv_pool={"page_sizes": sizes}), mode, "core")
    of_pages = [case for case in cases if case.kv_splits.startswith("pages")]
    assert {case.page_size for case in of_pages} >= tried
    assert all(splits_of(case)[0].interleave == case.page_size for case in of_pages)
    whole = {case.page_size for case in cases if case.kv_splits == "whole"}
    assert whole >= {min(sizes)} | set(sorted(sizes)[:2] if 1 in sizes else ())


def test_cases_without_the_capability_have_no_splits() -> None:
    for mode in ForwardMode:
        assert not [case for case in generate(ALL.with_changes(lse=None), mode, "core") if case.kv_splits]


def test_cases_are_of_what_is_declared_alone() -> None:
    declared = ALL.with_changes(lse=LogSumExp("2", whole={"decode"}, pages={"decode"}, prefix={"target-verify"}))
    tried = {mode: {case.kv_splits for case in generate(declared, mode, "core")} - {""} for mode in ForwardMode}
    assert tried.pop(DECODE) == {"whole", "pages2"}
    assert tried.pop(VERIFY) == {"prefix"}
    assert set().union(*tried.values()) == set()
    assert not [case for case in generate(declared, DECODE, "core") if case.merged_by_backend]


def test_with_new_rows_as_given_no_part_has_an_fp8_pool() -> None:
    declared = ALL.with_changes(precision={"new_rows_as_given": {"extend"}})
    pools = {case.kv_dtype for case in generate(declared, ForwardMode.EXTEND, "core") if case.kv_splits}
    assert pools == {"same"}
    assert "fp8_e4m3" in {case.kv_dtype for case in generate(ALL, ForwardMode.EXTEND, "core") if case.kv_splits}


def test_some_requests_leave_parts_without_keys() -> None:
    for kind in ("prefix", "pages", "tokens"):
        cases = [case for case in generate(ALL, DECODE, "core") if case.kv_splits.startswith(kind)]
        lens = [
            int(part.lens(torch.tensor(prefix + 1), torch.tensor(prefix)))
            for case in cases
            for prefix in case.prefixes
            for part in splits_of(case)
        ]
        assert 0 in lens, kind


def test_what_cannot_be_is_refused() -> None:
    minimal = "decode-gqa2x2-d32-fp32-p4-k9-shuffled-gauss-{}-b1prod"
    assert parse_case(minimal.format("lsetokens12merged")).merged_by_backend
    for word in ("lsewholeown", "lsepages", "lseparts"):
        with pytest.raises(ValueError, match=f"cannot read '{word}'"):
            parse_case(minimal.format(word))
    for word, count in (("lsepages1", 1), ("lsetokens0", 0)):
        with pytest.raises(ValueError, match=f"'{word}': number of KV splits is {count}; expected 2 to 4096"):
            parse_case(minimal.format(word))
    with pytest.raises(ValueError, match="KV splits and multi-mode instance: "):
        parse_case("decode-gqa2x2-d32-fp32-p4-k9-shuffled-gauss-lsewhole-b2prod-multi_mode")
    with pytest.raises(ValueError, match="KV splits of fewer keys and draft-decode: "):
        parse_case("draft-decode-gqa2x2-d32-fp32-p4-k9-topk2steps3-shuffled-gauss-lsepages2-b2prod")


def test_explain_says_which_parts() -> None:
    case = parse_case("decode-gqa2x2-d32-fp32-p4-k9-shuffled-gauss-lsepages2merged-b1prod")
    assert (
        KV_SPLITS.describe(case)["kv_splits"]
        == "rank 0 of 2, rank 1 of 2, each with its log-sum-exp; merged by the backend"
    )
    whole = parse_case("decode-gqa2x2-d32-fp32-p4-k9-shuffled-gauss-lsewhole-b1prod")
    assert KV_SPLITS.describe(whole) == {"kv_splits": "all keys, each with its log-sum-exp"}


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"base": "10"}, "unknown LogSumExp.base '10'"),
        ({"base": "e", "layout": "[H,T]"}, r"unknown LogSumExp.layout '\[H,T\]'; did you mean '\[H, T\]'"),
        ({"base": "e", "dtype": "float32"}, "unknown LogSumExp.dtype 'float32'; did you mean 'fp32'"),
        ({"base": "e"}, "names no mode; write whole="),
        (
            {"base": "e", "whole": "decode"},
            "LogSumExp.whole must be a set or list of values, got 'decode'; write {'decode'}",
        ),
        ({"base": "e", "whole": {"decod"}}, "unknown whole 'decod'; did you mean 'decode'"),
        ({"base": "e", "pages": {"draft-decode"}}, "draft-decode has no KV splits"),
        ({"base": "e", "whole": {"decode"}, "merges": 1}, "merges must be True or False, got 1"),
    ],
)
def test_a_capability_that_cannot_be_meant_is_answered_with_what_can(declared: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LogSumExp(**declared)  # type: ignore[arg-type]


def test_a_capability_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Capabilities\.lse must be a LogSumExp, got 'e'; write LogSumExp"):
        Capabilities(eager={"decode"}, lse="e")  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", [DECODE, VERIFY, ForwardMode.EXTEND])
def test_the_first_request_has_no_key_in_some_part_and_many_stand_behind_it(mode: ForwardMode) -> None:
    """A program that ends at the first tile without keys loses those that it would have come to later."""
    for kind in ("prefix", "pages", "tokens"):
        of_kind = [case for case in generate(ALL, mode, "core") if case.kv_splits.startswith(kind) and case.bs >= 9]
        found = [case for case in of_kind if case.prefixes[0] == 0 and case.bs == 9]
        assert found
        assert all(sum(prefix > 0 for prefix in case.prefixes[5:]) == 4 for case in found)

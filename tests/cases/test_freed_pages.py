"""Request tables that do not list the pages which a windowed KV group has freed."""

from __future__ import annotations

import pytest
from in_process import check_backend

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.backends.triton import TritonBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import ForwardMode
from attn_testkit.steps.kv_groups import table_of_group
from attn_testkit.steps.schedule import make_schedule
from attn_testkit_corpus.faults import i_kv_groups as faults

CASE = "decode-gqa2x2-d64-bf16-p4-k3.70.6-shuffled-gauss-w7-layers3from5groups-b4prod-{}"
WORDS = {"minus_one": "freed_minus_one", "null_page": "freed_null_page"}


@pytest.mark.parametrize("entry", WORDS)
def test_entries_before_the_first_page_that_a_row_sees_are_not_those_of_the_keys(entry: str) -> None:
    schedule = make_schedule(parse_case(CASE.format(WORDS[entry])))
    found = 0
    for step in schedule.every_step:
        table = table_of_group(schedule, step, 7, freed=entry)
        for request in step.requests:
            row, before = table[request.pool_row], step.req_to_token[request.pool_row]
            first = max(0, request.prefix - 7) // 4 * 4
            assert row[first:].tolist() == before[first:].tolist()
            assert row[:first].tolist() == [-1 if entry == "minus_one" else key % 4 for key in range(first)]
            found += first
        assert table_of_group(schedule, step, -1, freed=entry) is step.req_to_token, "the other group frees nothing"
    assert found


@pytest.mark.parametrize("word", WORDS.values())
@pytest.mark.parametrize("backend", [TorchNativeBackend, faults.FreedBackend])
def test_who_begins_at_the_window_is_right(backend: type, word: str) -> None:
    found = check_backend(backend, cases=[CASE.format(word)], device="cpu", modes=["decode"])
    assert found, found


@pytest.mark.parametrize("word", WORDS.values())
@pytest.mark.parametrize("backend", [faults.FreedEntriesAreRead, faults.FreedEntriesAreNotCounted])
def test_an_entry_that_is_read_is_found_and_the_table_is_named(backend: type, word: str) -> None:
    (result,) = check_backend(
        backend, cases=[CASE.format(word)], device="cpu", modes=["decode"], executions=["eager"], diagnose="all"
    )
    assert result.findings[0].check == "reads-own-kv"
    assert "in this case the request table of a windowed KV group has" in result.findings[0].hint


@pytest.mark.parametrize("mode", [mode for mode in ForwardMode if not mode.is_draft_decode()])
def test_each_declared_entry_is_tried_in_windowed_groups_only(mode: ForwardMode) -> None:
    for tier in ("smoke", "core"):
        cases = [case for case in generate(TorchNativeBackend.capabilities, mode, tier) if case.variants]
        freed = [case for case in cases if case.variants & {*WORDS.values()}]
        assert {word for case in freed for word in case.variants & {*WORDS.values()}} == {*WORDS.values()}
        assert all(case.layers.groups and case.window >= 0 for case in freed)
        gone = [case for case in freed if max(case.prefixes) - case.window >= case.page_size]
        assert gone or tier == "smoke"
    assert not any(case.variants & {*WORDS.values()} for case in generate(TritonBackend.capabilities, mode, "core"))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("w7-layers3from5-b4prod-freed_minus_one", "one KV group: a table that other layers use lists all pages"),
        ("layers3from5groups-b4prod-freed_null_page", "no window: only layers with a window pass pages"),
        ("w7-layers3from5groups-b4prod-freed_minus_one-freed_null_page", "a table has one kind of entry"),
    ],
)
def test_without_a_windowed_group_of_its_own_nothing_is_freed(words: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_case(f"decode-gqa2x2-d64-bf16-p4-k3.70.6-shuffled-gauss-{words}")


def test_a_backend_that_declares_only_one_entry_gets_it_in_every_case() -> None:
    class Only(faults.FreedBackend):
        capabilities = faults.FreedBackend.capabilities.with_changes(server={"freed_pages": {"minus_one"}})

    found = check_backend(Only, cases=[CASE.removesuffix("-{}")], device="cpu", modes=["decode"], executions=["eager"])
    assert found, found

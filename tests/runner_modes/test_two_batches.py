"""Steps that are cut into two batches: where they are cut, and what the instances of the two are given and share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attn_testkit.runner_modes.capture import capture_schedules
from attn_testkit.runner_modes.clock import Clock
from attn_testkit.runner_modes.eager import batch_of
from attn_testkit.runner_modes.harness import ServerHarness
from attn_testkit.runner_modes.replay import fill_static, view_of
from attn_testkit.runner_modes.two_batches import Part, TwoBatches, _items, cut_evenly, cut_prompts
from in_process import check_backend
from typing_extensions import override

from attn_testkit.backends.torch_native_two_batches import (
    TorchNativeSparseTwoBatchesBackend,
    TorchNativeStateTwoBatchesBackend,
    TorchNativeTwoBatchesBackend,
)
from attn_testkit.cases.case import parse_case
from attn_testkit.cases.features.server.two_batch_overlap import may_cut_prompts
from attn_testkit.cases.features.server_variant import SERVER_VARIANT
from attn_testkit.contract import AttentionBackend, ForwardBatch, VerifyInput
from attn_testkit.steps.schedule import Schedule, make_schedule
from attn_testkit_corpus.faults.catalogue import entry_of
from cuda_on_cpu import emulated_cuda

DECODED = "decode-gqa2x2-d64-bf16-p16-k9.70.1.33-shuffled-gauss-b4prod-two_batch_overlap"
PROMPTS = "extend-gqa2x2-d64-bf16-p16-k9.0.1-n8a12.7.3-shuffled-gauss-b3prod-two_batch_overlap"
VERIFIED = "target-verify-gqa2x2-d64-bf16-p16-k9.20.1-t0.0.1-shuffled-gauss-b4prod-two_batch_overlap"
STATES = "extend-gdn2x2-d32-bf16-p16-k40.0-n9a7.2-shuffled-mild_decay-k32w4s32-b2prod-two_batch_overlap"
INDEXED = "extend-mla4-d128r64-bf16-p64-k9.70-n4a5.3-shuffled-gauss-sel16-idx4-b2prod-two_batch_overlap"
CASES = (DECODED, PROMPTS, VERIFIED, STATES, INDEXED)


def ends(parts: tuple[Part, Part] | None) -> Any:
    return parts and [(p.requests.start, p.requests.stop, p.rows.start, p.rows.stop, p.before, p.after) for p in parts]


def test_a_batch_of_one_request_is_not_cut_and_others_are_cut_in_half() -> None:
    assert cut_evenly(1, 4) is None
    assert ends(cut_evenly(5, 3)) == [(0, 2, 0, 6, 0, 0), (2, 5, 6, 15, 0, 0)]


@pytest.mark.parametrize(
    ("lens", "inside", "found"),
    [
        ((8, 3, 5), True, [(0, 1, 0, 8, 0, 0), (1, 3, 8, 16, 0, 0)]),
        ((12, 7, 3), True, [(0, 1, 0, 11, 0, 1), (0, 3, 11, 22, 11, 0)]),
        ((12, 7, 3), False, [(0, 1, 0, 12, 0, 0), (1, 3, 12, 22, 0, 0)]),
        ((2, 9), True, [(0, 2, 0, 5, 0, 6), (1, 2, 5, 11, 3, 0)]),
        ((9,), True, [(0, 1, 0, 4, 0, 5), (0, 1, 4, 9, 4, 0)]),
        ((9,), False, None),
        ((1,), True, None),
        ((4, 0), False, None),
        ((0, 4), True, [(0, 2, 0, 2, 0, 2), (1, 2, 2, 4, 2, 0)]),
        ((), True, None),
    ],
)
def test_prompts_are_cut_between_two_or_inside_one(lens: tuple[int, ...], inside: bool, found: Any) -> None:
    assert ends(cut_prompts(lens, inside=inside)) == found


@pytest.fixture
def device() -> Iterator[torch.device]:
    with torch.no_grad(), emulated_cuda():
        yield torch.device("cuda")


def harness_of(case: str, device: torch.device) -> tuple[ServerHarness, Schedule, list[ForwardBatch]]:
    """A harness, its schedule, and the batches that its instances plan: the whole one, and the two."""
    seen: list[ForwardBatch] = []

    class Noted(TorchNativeTwoBatchesBackend):
        capabilities = TorchNativeTwoBatchesBackend.capabilities.with_changes(needs={"cpu_seq_lens": True})

        @override
        def init_forward_metadata(self, batch: ForwardBatch) -> None:
            seen.append(batch)
            super().init_forward_metadata(batch)

        @override
        def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
            seen.append(batch)
            super().init_forward_metadata_out_graph(batch, in_capture)

    schedule = make_schedule(parse_case(case))
    return ServerHarness(Noted, [schedule], device), schedule, seen


def test_the_second_batch_continues_the_prompt_that_is_cut(device: torch.device) -> None:
    harness, schedule, seen = harness_of(PROMPTS, device)
    batch, _ = batch_of(harness, harness.load(schedule, schedule.steps[0]))
    harness.backend.init_forward_metadata(batch)
    whole, first, second = {id(each): each for each in seen}.values()
    assert whole.extend_seq_lens_cpu == [12, 7, 3]
    names = ("extend_seq_lens", "extend_prefix_lens", "extend_start_loc", "seq_lens", "seq_lens_cpu")
    assert [getattr(first, name).tolist() for name in names] == [[11], [9], [0], [20], [20]]
    assert [getattr(second, name).tolist() for name in names] == [
        [1, 7, 3], [20, 0, 1], [0, 1, 8], [21, 7, 4], [21, 7, 4]
    ]  # fmt: skip
    assert (first.extend_seq_lens_cpu, second.extend_seq_lens_cpu) == ([11], [1, 7, 3])
    assert (first.extend_prefix_lens_cpu, second.extend_prefix_lens_cpu) == ([9], [20, 0, 1])
    assert [(each.batch_size, each.extend_num_tokens, each.seq_lens_sum) for each in (first, second)] == [
        (1, 11, 20), (3, 11, 32)
    ]  # fmt: skip
    assert torch.equal(torch.cat([first.positions, second.positions]), whole.positions)
    assert second.out_cache_loc.data_ptr() == whole.out_cache_loc[11:].data_ptr(), "a slice, as in servers"


def test_padded_requests_of_a_replay_are_in_the_second_batch_and_each_has_its_mask(device: torch.device) -> None:
    harness, schedule, seen = harness_of(VERIFIED, device)
    (graphs,) = capture_schedules(harness, [schedule], None, Clock())
    seen.clear()
    staged = harness.load(schedule, schedule.steps[0])
    fill_static(graphs, staged)
    harness.backend.init_forward_metadata_out_graph(view_of(graphs, staged))
    whole, first, second = seen
    assert [each.batch_size for each in (whole, first, second)] == [4, 2, 2]
    assert [each.num_padding for each in (whole, first, second)] == [1, 0, 1]
    masks, sizes = [], []
    for each in (whole, first, second):
        assert isinstance(each.spec_info, VerifyInput)
        assert each.spec_info.custom_mask is not None
        masks.append(each.spec_info.custom_mask.view(torch.uint8))
        sizes.append([_items(each.spec_info.tree_mask_mode, 4, prefix) for prefix in (9, 20, 1)])
    assert sizes[0] == sizes[1] == sizes[2]
    end = sum(sizes[0][:2])
    assert masks[0][:end].any()
    assert torch.equal(masks[1][:end], masks[0][:end])
    assert torch.equal(masks[2][: sizes[0][2]], masks[0][end : sum(sizes[0])])
    assert len({mask.data_ptr() for mask in masks}) == 3


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        (TorchNativeTwoBatchesBackend, DECODED),
        (TorchNativeStateTwoBatchesBackend, STATES),
        (TorchNativeSparseTwoBatchesBackend, INDEXED),
    ],
)
def test_instances_that_share_nothing_are_right(backend: type[AttentionBackend], case: str) -> None:
    found = check_backend(
        backend, cases=[case], modes=[parse_case(case).mode], executions=["eager"], device="cpu", diagnose="none"
    )
    assert found, found


def test_what_two_batches_share_is_found_only_if_steps_are_cut_and_the_text_says_so() -> None:
    fault = entry_of("output-buffer-of-the-pool")
    (result,) = check_backend(
        fault.backend, cases=[DECODED], modes=["decode"], executions=["eager"], device="cpu", diagnose="all"
    )
    assert [finding.check for finding in result.findings] == ["matches-oracle"]
    assert "without two-batch overlap the step is right" in result.findings[0].hint
    plain = DECODED.removesuffix("-two_batch_overlap")
    assert check_backend(fault.backend, cases=[plain], executions=["eager"], device="cpu", diagnose="none")


def test_all_instances_have_one_pool_and_the_two_are_captured_with_half_of_the_requests(device: torch.device) -> None:
    schedule = make_schedule(parse_case(DECODED))
    harness = ServerHarness(TorchNativeTwoBatchesBackend, [schedule], device)
    assert isinstance(harness.backend, TwoBatches)
    whole, *two = [instance.context for instance in harness.backend.instances]
    assert {id(each.kv_pool) for each in (whole, *two)} == {id(whole.kv_pool)}
    assert all(each.capture_sizes == tuple(bs // 2 for bs in whole.capture_sizes if bs % 2 == 0) for each in two)


def test_no_graph_runs_prompts_that_are_cut_and_no_draft_model_is_cut() -> None:
    declared = TorchNativeTwoBatchesBackend.capabilities
    why = {case: SERVER_VARIANT.eager_only and SERVER_VARIANT.eager_only(declared, parse_case(case)) for case in CASES}
    assert [case for case in CASES if why[case]] == [PROMPTS, STATES, INDEXED]
    with pytest.raises(ValueError, match="servers do not cut the batches of a draft model"):
        parse_case("draft-extend-v2-gqa2x2-d64-bf16-p16-k9.70-n2a1.2-shuffled-gauss-b2prod-two_batch_overlap")


@pytest.mark.parametrize(
    ("case", "may"),
    [
        (PROMPTS, True),
        (PROMPTS.replace("gauss-", "gauss-kvfp8e4m3-"), False),
        (PROMPTS.replace("gauss-", "gauss-spans-"), False),
        (PROMPTS.replace("prod-", "prod-noncausal-"), False),
        (STATES, True),
        (STATES.replace("s32-", "s32.snap16-"), False),
    ],
)
def test_a_prompt_is_cut_inside_only_if_its_later_rows_need_nothing_but_the_keys_of_the_earlier(
    case: str, may: bool
) -> None:
    assert may_cut_prompts(TorchNativeTwoBatchesBackend.capabilities, parse_case(case)) is may
    assert not may_cut_prompts(
        TorchNativeTwoBatchesBackend.capabilities.with_changes(promises={"batch_invariant": True}), parse_case(case)
    )

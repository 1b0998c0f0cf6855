"""A context that counts keys before the step: what a backend is told of it, and what requests have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attn_testkit.runner_modes.errors import RunError
from attn_testkit.runner_modes.harness import ServerHarness
from attn_testkit.runner_modes.hook_answers import verify_mask_of

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import SGLANG, VLLM, ForwardMode, TreeMaskMode, Unsupported, VerifyMask
from attn_testkit.steps.schedule import make_schedule
from cuda_on_cpu import emulated_cuda

DECLARED = TorchNativeBackend.capabilities
DRAFTS = sorted(set(ForwardMode) - {ForwardMode.DECODE, ForwardMode.EXTEND})


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with torch.no_grad(), emulated_cuda():
        yield


def harness_of(case_id: str, backend: type[TorchNativeBackend] = TorchNativeBackend) -> ServerHarness:
    return ServerHarness(backend, [make_schedule(parse_case(case_id))], torch.device("cuda"), declared=DECLARED)


@pytest.mark.parametrize("mode", DRAFTS)
def test_a_request_is_exactly_at_the_cap_and_its_drafts_begin_a_page_behind_it(mode: ForwardMode) -> None:
    found = [each for each in generate(DECLARED, mode, "core") if "context_of_prefixes" in each.variants]
    trees = [case for case in found if case.tree is not None and case.topk > 1]
    assert len(trees) == (mode is ForwardMode.TARGET_VERIFY)
    (case,) = (each for each in found if each not in trees)
    harness, schedule = harness_of(case.id), make_schedule(case)
    cap = harness.context.max_context_len
    assert cap == max(case.prefixes)
    assert cap % case.page_size == 0
    steps = (*schedule.steps, schedule.second, schedule.oversized)
    assert all(request.prefix <= cap for step in steps for request in step.requests)
    assert any(request.prefix == cap and request.new > 1 for request in schedule.steps[0].requests)
    assert harness.context.req_to_token.shape[1] == schedule.max_context_len > cap
    assert harness.context.dialect.context_len == "prefix"
    usual = harness_of(case.id.removesuffix("-context_of_prefixes"))
    assert usual.context.max_context_len == usual.context.req_to_token.shape[1]


def test_decode_and_extend_have_no_such_context_and_neither_have_backends_that_do_not_declare_it() -> None:
    for mode in (ForwardMode.DECODE, ForwardMode.EXTEND):
        assert not [each for each in generate(DECLARED, mode, "core") if "context_of_prefixes" in each.variants]
    narrow = DECLARED.with_changes(server={"context_len": {"all"}})
    verify = generate(narrow, ForwardMode.TARGET_VERIFY, "core")
    assert not [each for each in verify if "context_of_prefixes" in each.variants]
    assert SGLANG.context_len == VLLM.context_len == {"all"}


CASE = "target-verify-mha2-d32-fp32-p4-k9.16-chain4-shuffled-gauss-b2prod-context_of_prefixes"


def test_an_undeclared_context_is_refused() -> None:
    class All(TorchNativeBackend):
        capabilities = DECLARED.with_changes(server={"context_len": {"all"}})

    with pytest.raises(Unsupported, match="context_len prefix"):
        All(harness_of(CASE).context)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_full_mask_has_room_for_drafts_behind_the_cap(missing: int) -> None:
    class OwnsAMask(TorchNativeBackend):
        """A mask buffer for 2 requests of 4 rows."""

        @property
        def verify_mask(self) -> VerifyMask | None:
            cells = 2 * 4 * (self.context.max_context_len + 4) - missing
            return VerifyMask(torch.zeros(cells, dtype=torch.bool, device="cuda"), TreeMaskMode.FULL_MASK, 2)

    harness = harness_of(CASE, OwnsAMask)
    assert harness.context.max_context_len == 16
    if missing:
        with pytest.raises(RunError):
            verify_mask_of(harness, 4)
    else:
        assert verify_mask_of(harness, 4) is not None

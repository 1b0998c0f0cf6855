"""A device allocates memory without clearing it; after a failure the kit runs the step again with known bytes there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from in_process import plan_run, run_item

from attn_testkit.environment import Environment
from attn_testkit.graphs.poison import FreshMemory, fresh_memory
from attn_testkit.results.case_result import Status
from attn_testkit_corpus.faults.catalogue import entry_of
from cuda_on_cpu import Policy, emulated_cuda


@pytest.mark.parametrize("byte", [0xFF, 0xBC])
def test_every_way_to_make_a_tensor_without_numbers_is_filled(byte: int) -> None:
    with emulated_cuda(Policy(fill=None)), torch.no_grad(), FreshMemory(byte):
        like = torch.zeros(3, 4, dtype=torch.bfloat16, device="cuda")
        made = [
            torch.empty(3, 4, device="cuda", dtype=torch.int64),
            torch.empty_like(like),
            like.new_empty(5),
            torch.empty_strided((3, 4), (8, 1), device="cuda"),
            like.new_empty_strided((2, 2), (1, 2)),
            torch.empty(0, device="cuda"),
            torch.empty(7, dtype=torch.float8_e4m3fn, device="cuda"),
        ]
        for tensor in made:
            assert (tensor.contiguous().view(torch.uint8) == byte).all(), tensor
        assert not like.any(), "what torch makes with numbers keeps them"


def test_a_capture_records_no_fill_of_ours() -> None:
    with emulated_cuda(Policy(fill=None)), torch.no_grad(), FreshMemory():
        graph = torch.cuda.CUDAGraph()
        kept = torch.zeros(4, device="cuda")
        with torch.cuda.graph(graph):
            scratch = torch.empty_like(kept)
            kept.copy_(scratch)
        scratch.fill_(3.0)
        graph.replay()
        assert (kept == 3.0).all()


@pytest.mark.parametrize("slug", ["decode-plan-assumes-one-row", "early-exit-without-writing"])
def test_unwritten_rows_are_reported_from_nan_also_where_memory_comes_with_old_numbers(
    slug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def like_a_device(
        self: Environment, fill: int = 0xFF, *, controlled: bool = False, last_first: bool = False
    ) -> Iterator[None]:
        with emulated_cuda(Policy(fill=None)), FreshMemory(fill) if controlled else nullcontext():
            yield

    monkeypatch.setattr(Environment, "active", like_a_device)
    monkeypatch.setattr(Environment, "poisons_fresh_memory", False)
    fault = entry_of(slug)
    plan = plan_run(
        backends=[fault.spec], modes=[fault.modes[0].value], executions=["eager"], device="cpu", tier="core"
    )
    failed = (result for result in (run_item(item, plan) for item in plan.items[:20]) if result.status is Status.FAILED)
    assert any(finding.check == "output-written" for result in failed for finding in result.findings)


def test_compiled_code_is_compiled_inside_and_afterwards() -> None:
    compiled = []

    def backend(module: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        compiled.append(module)
        return module.forward

    function = torch.compile(lambda x: x + 1, backend=backend, dynamic=False)
    with fresh_memory():
        function(torch.zeros(3))
    assert len(compiled) == 1
    function(torch.zeros(4))
    assert len(compiled) == 2, "torch compiles it again for another shape"

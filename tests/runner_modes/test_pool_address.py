"""Pools of ordinary size across a multiple of 4 GiB: where they lie, and what they cost."""

from __future__ import annotations

import resource

import pytest
import torch
from attn_testkit.runner_modes import pool_address
from attn_testkit.runner_modes.clock import Clock
from attn_testkit.runner_modes.eager import run_eager
from attn_testkit.runner_modes.harness import ServerHarness
from attn_testkit.runner_modes.pool_address import allocate_for, pools_anywhere

from attn_testkit import environment
from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.backends.torch_native_sparse import TorchNativeSparseBackend
from attn_testkit.backends.torch_native_state import TorchNativeStateBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.cases.derived_parameters import address_varies
from attn_testkit.environment import memory_across_4_gib
from attn_testkit.steps.schedule import make_schedule
from cuda_on_cpu import emulated_cuda

SPAN, CUDA = 1 << 32, torch.device("cuda")
KV = "decode-gqa2x2-d64-bf16-p16-k40.70.12-shuffled-gauss"
QUARTERS = [f"{KV}-b3prod-{seed}" for seed in ("s12", "s13", "s1", "s5")]
"""Cases of two layers with the pool's boundary in each quarter: K and V of layer 0, K and V of layer 1."""
ANYWHERE = f"{KV}-b3prod-s2"
STATES = "decode-gdn4x2-d64-bf16-p16-k9.37.1-shuffled-mild_decay-k64w4s32-b4prod-s6"
INDEX = "decode-mqa4-d64-bf16-p16-k40.70.12-shuffled-gauss-sel16-idx4-b3prod-s2"


def server_of(case: str, backend: type = TorchNativeBackend) -> ServerHarness:
    return ServerHarness(backend, [make_schedule(parse_case(case))], CUDA)


def crosses(view: torch.Tensor) -> bool:
    """True if the first byte of ``view`` and its last have other upper words."""
    sizes = zip(view.shape, view.stride(), strict=True)
    last = view.data_ptr() + sum((size - 1) * stride for size, stride in sizes) * view.element_size()
    return view.data_ptr() >> 32 != last >> 32


@pytest.mark.parametrize("below", [0, 512, 99_840])
def test_bytes_below_the_boundary_are_as_many_as_asked_and_the_storage_is_the_pools_own(below: int) -> None:
    with emulated_cuda():
        memory = memory_across_4_gib(100_000, below)
        assert memory is not None
        assert (memory.data_ptr() + below) % SPAN == 0
        assert memory.is_cuda
    storage = memory.untyped_storage()
    assert (storage.nbytes(), storage.data_ptr(), memory.storage_offset()) == (100_000, memory.data_ptr(), 0)


@pytest.mark.parametrize(("quarter", "case"), list(enumerate(QUARTERS)))
def test_one_of_the_layers_keys_or_values_has_pages_on_both_sides(quarter: int, case: str) -> None:
    with torch.no_grad(), emulated_cuda():
        pool = server_of(case).context.kv_pool
        assert [crosses(view) for layer in (0, 1) for view in pool.get_kv_buffer(layer)] == [
            place == quarter for place in range(4)
        ]
        part = pool.get_kv_buffer(quarter // 2)[quarter % 2]
        address = part.data_ptr() + torch.arange(pool.num_slots) * part.stride(0) * part.element_size()
        above = float((address >> 32 != part.data_ptr() >> 32).float().mean())
    assert 0.4 < above < 0.6


def test_the_boundary_is_behind_an_aligned_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(pool_address, "memory_across_4_gib", lambda *sizes: asked.append(sizes[:2]))
    make = allocate_for(parse_case(QUARTERS[0]), 4)
    assert make(1000, dtype=torch.float32, device=torch.device("cpu")).tolist() == [0.0] * 1000
    make(1023, dtype=torch.float32, device=torch.device("cpu"))
    make(1024, dtype=torch.float32, device=torch.device("cpu"))
    make(1, dtype=torch.float32, device=torch.device("cpu"))
    assert asked == [(4096, 512)], "an eighth of the others is less than a device aligns"


def test_only_the_first_piece_of_a_pool_takes_addresses() -> None:
    case = parse_case(QUARTERS[0])
    with emulated_cuda():
        make = allocate_for(case, 4)
        one, other = (make((100, 64), dtype=torch.bfloat16, device=CUDA) for _ in range(2))
    assert one.shape == other.shape == (100, 64)
    assert not one.any()
    assert crosses(one)
    assert one.untyped_storage().nbytes() == other.untyped_storage().nbytes()


def test_a_pool_of_states_and_one_of_index_keys_lie_across_it_too() -> None:
    with torch.no_grad(), emulated_cuda():
        state = server_of(STATES, TorchNativeStateBackend).context.state
        assert state is not None
        assert sum(crosses(state.pool.temporal(layer.layer_id)) for layer in state.layers) == 1
        index = server_of(INDEX, TorchNativeSparseBackend).context.index_pool
        assert index is not None
        assert sum(crosses(index.get_index_buffer(layer)) for layer in index.layer_ids) == 1


def test_other_cases_and_runs_of_the_diagnosis_have_it_anywhere() -> None:
    large = parse_case(f"{KV}-layers1from0-b3prod-bigpool")
    assert not address_varies(large)
    assert not address_varies(parse_case(f"{KV}-kvcustom-b3prod"))
    assert allocate_for(parse_case(ANYWHERE), 4) is torch.zeros
    assert allocate_for(large, 2, cleared=False) is torch.empty
    assert allocate_for(parse_case(QUARTERS[0]), 0) is torch.zeros, "of no layers"
    with pools_anywhere():
        assert allocate_for(parse_case(QUARTERS[0]), 4) is torch.zeros
        with pools_anywhere(wanted=False):
            assert allocate_for(parse_case(QUARTERS[0]), 4) is not torch.zeros
    assert allocate_for(parse_case(QUARTERS[0]), 4) is not torch.zeros


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_a_case_takes_memory_for_what_it_touches() -> None:
    schedule = make_schedule(parse_case(QUARTERS[0]))
    with torch.no_grad(), emulated_cuda():
        before, server = _resident(), server_of(QUARTERS[0])
        run_eager(server, schedule, schedule.steps[0], Clock())
    assert _resident() - before < 1 << 28


def test_without_so_many_addresses_the_pool_is_anywhere_and_the_case_runs() -> None:
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * 4096
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + (2 << 30), hard))
    try:
        with torch.no_grad(), emulated_cuda():
            pool = server_of(QUARTERS[0]).context.kv_pool
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert not pool.get_key_buffer(0).any()


def test_a_gpu_gives_no_block_of_4_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **named: object) -> None:
        raise AssertionError("nothing is allocated")

    monkeypatch.setattr(environment, "is_active", lambda: False)
    monkeypatch.setattr(torch, "empty", full)
    assert memory_across_4_gib(100, 0) is None

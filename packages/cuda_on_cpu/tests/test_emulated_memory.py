"""Whose memory a graph uses: what is gone, what its pool keeps, what nobody has written."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from cuda_on_cpu import DanglingMemoryError, Policy, emulated_cuda, peak_above, tags
from cuda_on_cpu import capture as capturing

pytestmark = pytest.mark.usefixtures("cuda")


def ones(n: int = 4) -> torch.Tensor:
    return torch.ones(n, device="cuda")


def test_freed_memory_is_an_error_that_names_both_lines(capture):
    inputs = [ones()]
    graph, _ = capture(lambda: inputs[0] * 2)
    graph.replay()
    inputs.clear()
    with pytest.raises(DanglingMemoryError, match="16 bytes that were freed") as caught:
        graph.replay()
    assert "test_emulated_memory.py" in str(caught.value)
    assert caught.value.site.filename.endswith("test_emulated_memory.py")
    assert "allocated at" in caught.value.cuda
    assert caught.value.cure.startswith("allocate it once, before the capture")


def test_freed_memory_is_an_error_even_when_the_address_is_used_again(capture):
    inputs = [ones(1000)]
    graph, _ = capture(lambda: inputs[0] * 2)
    inputs.clear()
    others = [ones(1000) for _ in range(8)]
    with pytest.raises(DanglingMemoryError):
        graph.replay()
    assert all(other.tolist() == [1] * 1000 for other in others)


def test_under_the_poison_policy_freed_memory_reads_as_fill():
    with emulated_cuda(Policy(dangling="poison")):
        inputs = [ones()]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = inputs[0] * 2
        inputs.clear()
        graph.replay()
        graph.replay()
        assert y.isnan().all()


def test_a_view_keeps_its_base_alive(capture):
    base = ones(8)
    views = [base[2:4]]
    graph, y = capture(lambda: views[0] * 2)
    views.clear()
    graph.replay()
    assert y.tolist() == [2, 2]


def test_resized_input_is_an_error(capture):
    x = ones()
    graph, _ = capture(lambda: x * 2)
    x.resize_(100_000)
    with pytest.raises(DanglingMemoryError, match="moved"):
        graph.replay()


def test_resized_output_is_an_error_and_not_a_write_to_freed_memory(capture):
    x = ones()
    graph, y = capture(lambda: x * 2)
    graph.replay()
    y.resize_(100_000)
    with pytest.raises(DanglingMemoryError, match="moved"):
        graph.replay()


def test_a_graph_does_not_keep_its_inputs_alive(capture):
    from torch.multiprocessing.reductions import StorageWeakRef

    inputs = [ones()]
    weak = StorageWeakRef(inputs[0].untyped_storage())
    graph, _ = capture(lambda: inputs[0] * 2)
    graph.replay()
    inputs.clear()
    gc.collect()
    assert weak.expired()


def test_a_dead_pinned_source_is_an_error(capture):
    x = ones()
    graph, _ = capture(lambda: x.copy_(torch.zeros(4).pin_memory(), non_blocking=True))
    with pytest.raises(DanglingMemoryError):
        graph.replay()


def test_a_graph_keeps_its_pool_alive_when_outputs_die(capture):
    x, out = ones(), torch.zeros(4, device="cuda")
    graph, y = capture(lambda: out.copy_(x * 2 + 1))
    del y
    gc.collect()
    graph.replay()
    assert out.tolist() == [3] * 4


def test_an_output_outlives_its_graph(capture):
    x = ones()
    graph, y = capture(lambda: x * 2)
    graph.replay()
    graph.reset()
    del graph
    gc.collect()
    assert y.tolist() == [2] * 4


def test_use_of_a_dropped_temporary_reads_fill_on_every_replay(capture):
    """Somebody kept a bare pointer to a temporary of the captured forward."""
    x = ones()
    graph, y = capture(lambda: x * 2 + 1)
    dropped = [block for block in graph.recorded.blocks.values() if block.dead]
    assert len(dropped) == 1
    graph.replay()
    alias = torch.empty(0).set_(dropped[0].raw, 0, (4,), (1,))
    assert alias.isnan().all()
    assert y.tolist() == [3] * 4


LARGE = capturing.SHARED // 4
"""As many float32 fill the smallest block that may share memory."""


def _chain(x: torch.Tensor, count: int) -> torch.Tensor:
    for _ in range(count):
        x = x + 1
    return x


def _pool_addresses(graph: torch.cuda.CUDAGraph) -> set[int]:
    return {block.address for node in graph.recorded.nodes for block in node.blocks if block.in_pool}


@pytest.mark.parametrize(("size", "moved"), [(LARGE, 4), (LARGE - 1, 0)])
def test_large_temporaries_lie_where_earlier_ones_were_dropped(capture, size, moved):
    x = ones(size)
    graph, y = capture(lambda: _chain(x, 8))
    assert len(_pool_addresses(graph)) == 8 - moved
    assert len(graph._program) == 8 + (7 - moved), "only memory of their own is filled where they are dropped"
    x.fill_(5)
    graph.replay()
    graph.replay()
    assert y.unique().tolist() == [13]


def test_the_heap_is_trimmed_after_so_many_bytes_of_moved_temporaries(capture, monkeypatch):
    trimmed: list[None] = []
    monkeypatch.setattr(capturing, "give_back_free_memory", lambda: trimmed.append(None))
    monkeypatch.setattr(capturing, "_FREED", 2 * capturing.SHARED - 1)
    x = ones(LARGE)
    capture(lambda: _chain(x, 8))  # four of them are moved
    assert len(trimmed) == 2


def test_temporaries_that_are_in_use_at_once_share_no_memory(capture):
    x = ones(LARGE)

    def program() -> torch.Tensor:
        first = _chain(x, 2)
        kept = _chain(x, 3) * 2
        return _chain(first, 2) + kept

    graph, y = capture(program)
    x.fill_(5)
    graph.replay()
    assert y.unique().tolist() == [5 + 4 + 2 * (5 + 3)]


def test_a_smaller_temporary_may_lie_in_a_larger_one_and_not_the_other_way(capture):
    x = ones(2 * LARGE)
    graph, y = capture(lambda: (_chain(x[:LARGE], 4).sum() + _chain(x, 4).sum()) + _chain(x[:LARGE], 4).sum())
    graph.replay()
    assert y.item() == 5 * 4 * LARGE
    assert all(
        block.owner.nbytes() >= block.nbytes for node in graph.recorded.nodes for block in node.blocks if block.in_pool
    )


def test_shared_memory_that_was_dropped_is_clobbered_by_a_later_graph_of_the_pool(capture):
    x = ones(LARGE)
    first, y = capture(lambda: _chain(x, 8))
    second, z = capture(lambda: _chain(x, 8), pool=first.pool())
    for graph in (second, first, second):
        graph.replay()
    assert y.unique().tolist() == z.unique().tolist() == [9]


def test_memory_that_a_kernel_was_given_stays_where_it_is(capture):
    triton_kernels = pytest.importorskip("emulation_kernels")
    x = ones(LARGE)

    def program() -> torch.Tensor:
        y = x
        for _ in range(4):
            y = y + 1
            triton_kernels.add[(1,)](y, 1, 4)
        return y[:4].clone()

    graph, y = capture(program)
    assert len(_pool_addresses(graph)) == 5
    graph.replay()
    assert y.tolist() == [9] * 4


def test_poison_of_temporaries_can_be_turned_off():
    with emulated_cuda(Policy(poison_temporaries=False)):
        x = ones()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * 2 + 1
        dropped = next(block for block in graph.recorded.blocks.values() if block.dead)
        graph.replay()
        alias = torch.empty(0).set_(dropped.raw, 0, (4,), (1,))
        assert alias.tolist() == [2] * 4
        assert y.tolist() == [3] * 4


def test_a_later_graph_of_the_pool_clobbers_dropped_outputs_only(capture):
    x = ones()
    seen_dropped, seen_kept = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
    first, outputs = capture(lambda: [x * 2, x * 4])
    readers = [
        capture(lambda: seen_dropped.copy_(outputs[0]))[0],
        capture(lambda: seen_kept.copy_(outputs[1]))[0],
    ]
    del outputs[0]
    second, _ = capture(lambda: x * 3, pool=first.pool())
    first.replay()
    second.replay()
    for reader in readers:
        reader.replay()
    assert seen_dropped.isnan().all()
    assert seen_kept.tolist() == [4] * 4


def test_memory_of_a_reset_graph_may_not_be_used_by_another(capture):
    x = ones()
    first, outputs = capture(lambda: [x * 2])
    second, _ = capture(lambda: outputs[0] + 1)
    outputs.clear()
    first.replay()
    second.replay()
    first.reset()
    with pytest.raises(DanglingMemoryError):
        second.replay()


def test_a_graph_that_is_captured_anew_leaves_its_old_pool(capture):
    x, seen = ones(), torch.zeros(4, device="cuda")
    stays, _ = capture(lambda: x * 2)
    moves, _ = capture(lambda: x * 3, pool=stays.pool())
    moves.reset()
    with torch.cuda.graph(moves):
        outputs = [x * 4]
    reader, _ = capture(lambda: seen.copy_(outputs[0]))
    outputs.clear()
    later, _ = capture(lambda: x * 5, pool=stays.pool())
    for graph in (moves, later, reader):
        graph.replay()
    assert seen.tolist() == [4] * 4


@pytest.mark.parametrize(("fill", "reads"), [(0xFF, None), (0x00, 0.0), (None, "anything")])
def test_empty_memory_holds_the_fill_byte_in_eager_code_and_at_replay(fill, reads):
    with emulated_cuda(Policy(fill=fill)):
        eager = [
            torch.empty(4, device="cuda"),
            ones().new_empty(4),
            torch.empty_like(ones()),
            torch.empty_strided((2, 2), (2, 1), device="cuda").flatten(),
        ]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = torch.empty(4, device="cuda")
        graph.replay()
        for tensor in [*eager, recorded]:
            if fill == 0xFF:
                assert tensor.isnan().all()
            elif fill == 0:
                assert tensor.tolist() == [0] * 4


def test_two_fills_separate_uninitialised_memory_from_wrong_results():
    def partly_written(fill: int) -> torch.Tensor:
        with emulated_cuda(Policy(fill=fill)):
            out = torch.empty(4, device="cuda")
            out[:2] = 1.0
            return out.cpu()

    a, b = partly_written(0x00), partly_written(0x3C)
    assert (a != b).tolist() == [False, False, True, True]


def test_host_memory_is_left_alone():
    assert not torch.zeros(4).isnan().any()
    host = torch.empty(4)
    assert host.device.type == "cpu"


def test_under_the_poison_policy_an_output_that_was_resized_is_left_alone():
    with emulated_cuda(Policy(dangling="poison")):
        x = ones(1000)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x * 2
            y.add_(torch.empty(1000, device="cuda").fill_(1))
        y.resize_(100_000).fill_(5)
        bystanders = [torch.full((1000,), 7.0, device="cuda") for _ in range(16)]
        graph.replay()
        graph.replay()
        assert (y == 5).all()
        assert all((each == 7).all() for each in bystanders)


def test_memory_that_is_gone_is_forgotten_and_what_is_kept_stays_device_memory():
    kept = [ones() for _ in range(3 * tags._YOUNG)]
    for _ in range(4 * tags._YOUNG):
        ones()
    assert all(each.is_cuda for each in kept)
    assert len(tags.DEVICE.entries) < 3 * (len(kept) + tags._YOUNG)
    kept.clear()
    for _ in range(12 * tags._YOUNG):
        ones()
    assert len(tags.DEVICE.entries) < 6 * tags._YOUNG


def test_a_walk_over_what_is_live_forgets_what_is_gone():
    kept = ones()
    before = torch.cuda.memory_allocated()
    for _ in range(tags._YOUNG // 2):
        ones()
    assert torch.cuda.memory_allocated() == before
    assert all(storage is not None for storage in map(tags.storage_at, tags.DEVICE.entries))
    assert kept.is_cuda


@pytest.mark.parametrize("oldest_first", [True, False])
def test_a_peak_is_followed_within_a_256th_whatever_is_freed_meanwhile(oldest_first):
    draws, kept = random.Random(0), []
    first = torch.cuda.memory_allocated()
    with peak_above() as above:
        now = most = 0
        for turn in range(1500):
            kept.append(torch.empty(draws.randrange(1, 4000), dtype=torch.uint8, device="cuda"))
            now += kept[-1].nbytes
            most = max(most, now)
            while now > (200_000 if turn < 1000 else 300_000):
                now -= kept.pop(0 if oldest_first else draws.randrange(len(kept))).nbytes
        found = above()
    assert most - ((first + most) >> 8) <= found <= most


def test_a_snapshot_names_the_line_of_each_allocation():
    x = ones(77)
    y = torch.zeros(78, device="cuda")
    for _ in range(2):  # the second time from what is remembered
        frames = {each["address"]: each["blocks"][0]["frames"][0] for each in torch.cuda.memory_snapshot()}
        here = test_a_snapshot_names_the_line_of_each_allocation.__code__.co_firstlineno
        assert frames[x.data_ptr()]["name"] == "ones"
        assert (frames[y.data_ptr()]["line"], frames[y.data_ptr()]["filename"]) == (here + 2, __file__)

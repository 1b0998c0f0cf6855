"""Other kernels than an operation's own leave its very bits, laid out as its own, and refuse what it refuses."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from cuda_on_cpu import emulated_cuda, quick_kernels
from cuda_on_cpu.private import direct_call

ATEN = torch.ops.aten
EVERY_FP8 = torch.arange(256, dtype=torch.uint8).repeat(8)
ODD = torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 1.5, -3.0, 65504.0]).repeat(512)
ROWS = torch.arange(64 * 128).view(64, 2, 64)
PLACES = torch.tensor([[63, 0, 7], [7, 1, 2]]).repeat(32, 1)


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (found.dtype, found.size(), found.stride()) == (wanted.dtype, wanted.size(), wanted.stride())
    as_bytes = [each.contiguous().view(-1).view(torch.uint8) for each in (found, wanted)]
    assert torch.equal(*as_bytes)


def others(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """Which of the other kernels ran."""
    ran: list[str] = []
    for name in names:
        own = getattr(quick_kernels, name)

        def noted(*args, own=own, name=name):
            ran.append(name)
            return own(*args)

        monkeypatch.setattr(quick_kernels, name, noted)
    return ran


def both(monkeypatch: pytest.MonkeyPatch, op, name: str, *args, **kwargs) -> list[str]:
    """Compare what runs in the place of ``op`` with ``op`` itself, at once and into memory; which other kernel ran."""
    wanted = direct_call(op)(*args, **kwargs)
    ran = others(monkeypatch, name)
    same(quick_kernels.run_of(op)(*args, **kwargs), wanted)
    target = torch.empty_like(wanted)
    quick_kernels.INTO[op](target, *args)()
    same(target, wanted)
    return ran


@pytest.mark.parametrize("wide", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("narrow", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_fp8_number_becomes_the_bits_that_torch_gives_it(narrow, wide, monkeypatch):
    source = EVERY_FP8.view(narrow).view(16, 128)
    assert both(monkeypatch, ATEN._to_copy.default, "_convert", source, dtype=wide) == ["_convert"] * 2


@pytest.mark.parametrize(
    "source",
    [
        EVERY_FP8[:-1].view(torch.float8_e4m3fn),
        EVERY_FP8.view(torch.float8_e4m3fn).view(16, 128).t(),
        EVERY_FP8.view(torch.float8_e8m0fnu),
        EVERY_FP8.float(),
    ],
    ids=["too few", "transposed", "another FP8", "wide already"],
)
def test_other_conversions_are_torchs_own(source, monkeypatch):
    assert both(monkeypatch, ATEN._to_copy.default, "_convert", source, dtype=torch.float64) == []


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.int64])
def test_rows_are_picked_by_their_numbers(dtype, index, monkeypatch):
    rows, places = ROWS.to(dtype), PLACES.to(index)
    ran = both(monkeypatch, ATEN.index.Tensor, "_pick", rows, [places])
    assert ran == ["_pick", "_pick"]


def test_numbers_below_zero_count_from_the_end(monkeypatch):
    places = PLACES.clone()
    places[5, 1] = -64
    both(monkeypatch, ATEN.index.Tensor, "_pick", ROWS, [places])


@pytest.mark.parametrize("wrong", [64, -65])
def test_numbers_that_name_no_row_are_refused_in_the_words_of_the_operation(wrong):
    places = PLACES.clone()
    places[0, 0] = wrong
    with pytest.raises(IndexError) as own:
        direct_call(ATEN.index.Tensor)(ROWS, [places])
    with pytest.raises(IndexError) as found:
        quick_kernels.run_of(ATEN.index.Tensor)(ROWS, [places])
    assert str(found.value) == str(own.value)
    with pytest.raises(IndexError):
        quick_kernels.INTO[ATEN.index.Tensor](torch.empty(64, 3, 2, 64, dtype=torch.int64), ROWS, [places])()


@pytest.mark.parametrize(
    ("rows", "indices"),
    [
        (ROWS, [PLACES[:21]]),
        (ROWS.transpose(1, 2), [PLACES]),
        (ROWS.view(64, 128), [PLACES.view(-1), torch.tensor([3])]),
        (ROWS, [PLACES.t()]),
        (ROWS, [torch.ones(64, dtype=torch.bool)]),
        (ROWS > 0, [PLACES]),
    ],
    ids=["too few", "strided rows", "two indices", "a strided index", "a mask", "rows of booleans"],
)
def test_other_indices_are_torchs_own(rows, indices, monkeypatch):
    assert both(monkeypatch, ATEN.index.Tensor, "_pick", rows, indices) == []


@pytest.mark.parametrize("value", [0, 0.0, -0.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_mask_fills_with_the_bits_of_the_number(dtype, value, monkeypatch):
    source = ODD.to(dtype).view(4, 8, 128)
    masks = [source > 1, source[:, :1] > 1, source[..., :1] > -5, source[0] > 1, source[0, 0] > 1]
    for mask in masks:
        ran = others(monkeypatch, "_fills")
        wanted = direct_call(ATEN.masked_fill.Scalar)(source, mask, value)
        same(quick_kernels.run_of(ATEN.masked_fill.Scalar)(source, mask, value), wanted)
        target = torch.empty_like(wanted)
        step = quick_kernels.INTO[ATEN.masked_fill.Scalar](target, source, mask, value)
        assert isinstance(step, functools.partial)
        step()
        same(target, wanted)
        assert len(ran) == 2
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("source", "mask", "value"),
    [
        (ODD[:2047], ODD[:2047] > 1, 0.0),
        (ODD.view(64, 64).t(), ODD.view(64, 64) > 1, 0.0),
        (ODD, ODD > 1, 1.5),
        (ODD.int(), ODD > 1, 0),
        (ODD, ODD.view(2, -1)[:, :1].expand(2, 4096) > 1, 0.0),
    ],
    ids=["too few", "strided", "a number that a dtype may not hold", "integers", "a mask of more dimensions"],
)
def test_other_fills_are_torchs_own(source, mask, value, monkeypatch):
    ran = others(monkeypatch, "_fill")
    wanted = direct_call(ATEN.masked_fill.Scalar)(source, mask, value)
    same(quick_kernels.run_of(ATEN.masked_fill.Scalar)(source, mask, value), wanted)
    target = torch.empty_like(wanted)
    step = quick_kernels.INTO[ATEN.masked_fill.Scalar](target, source, mask, value)
    assert not isinstance(step, functools.partial)
    step()
    same(target, wanted)
    assert ran == []


def test_gradients_are_torchs_own():
    source = ODD.nan_to_num().clone().requires_grad_()
    filled = quick_kernels.run_of(ATEN.masked_fill.Scalar)(source, ODD > 1, 0.0)
    picked = quick_kernels.run_of(ATEN.index.Tensor)(source.view(64, 64), [PLACES])
    (filled.sum() + picked.sum()).backward()
    assert source.grad is not None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_eager_calls_and_replays_leave_what_torch_alone_leaves(mode):
    def program(kv, rows, places, mask):
        keys = rows[places]
        return kv.float(), kv.to(torch.float16), keys.masked_fill(mask, -math.inf), kv.float() + 1

    def inputs():
        kv = (EVERY_FP8 % 127).view(torch.float8_e4m3fn).view(16, 128)
        return kv, ROWS.float(), PLACES, ROWS[PLACES] % 3 == 0

    with mode():
        wanted = program(*inputs())
        with emulated_cuda():
            on_device = [each.view(torch.uint8).cuda().view(each.dtype) for each in inputs()]
            eager = [each.cpu() for each in program(*on_device)]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = program(*on_device)
            graph.replay()
            replayed = [each.cpu() for each in captured]
    for one, two, three in zip(wanted, eager, replayed, strict=True):
        same(two, one)
        same(three, one)


def test_a_replay_picks_the_rows_that_stand_there_then():
    with torch.inference_mode(), emulated_cuda():
        rows, places = ROWS.float().cuda(), PLACES.cuda()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = rows[places]
        places.fill_(3)
        rows[3] = 7.0
        graph.replay()
        assert found.unique().tolist() == [7.0]
        places.fill_(-61)
        graph.replay()
        assert found.unique().tolist() == [7.0]
        places.fill_(64)
        with pytest.raises(IndexError):
            graph.replay()


def test_inside_a_custom_operation_they_are_not_taken_for_its_operations() -> None:
    """Their table of all FP8 numbers lies on the host, and was refused as a mixture of host and device memory."""

    def widened(x: torch.Tensor) -> torch.Tensor:
        return x.view(torch.float8_e4m3fn).float()

    library = torch.library.Library("quick_kernels_of_tests", "FRAGMENT")
    library.define("widened(Tensor x) -> Tensor")
    library.impl("widened", widened, "CompositeImplicitAutograd")
    with emulated_cuda(), torch.inference_mode():
        x = EVERY_FP8.cuda()
        torch.cuda.Stream().synchronize()  # from here on the order of streams is kept
        torch.cuda.set_sync_debug_mode("error")
        found = torch.ops.quick_kernels_of_tests.widened(x)
        torch.cuda.set_sync_debug_mode("default")
        same(found.cpu(), EVERY_FP8.view(torch.float8_e4m3fn).float())

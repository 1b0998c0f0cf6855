"""bfloat16 and float8 in Triton kernels hold what a GPU's do, although the interpreter keeps them as integer words."""

from __future__ import annotations

import importlib
import os

import pytest
import torch

from cuda_on_cpu import EmulationError, triton_floats

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton was set up without its interpreter (TRITON_INTERPRET=1)", allow_module_level=True)

kernels = importlib.import_module("emulation_kernels")

pytestmark = [
    pytest.mark.usefixtures("cuda"),
    # Triton before 3.9, with a NumPy that warns of it
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    # Infinities and NaN are among the inputs.
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
]
BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2


def every_word(dtype: torch.dtype) -> torch.Tensor:
    """All values of a type of 8 or 16 bits."""
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def around(dtype: torch.dtype) -> torch.Tensor:
    """float32: all values of `dtype`, the points half-way between them, and their neighbours on both sides."""
    values = every_word(dtype).float()
    values = values[values.isfinite()].unique()
    ties = (values[1:].double() + values[:-1].double()).div(2).float()
    near = torch.cat([values, ties])
    up, down = (torch.nextafter(near, torch.tensor(sign * torch.inf)) for sign in (1, -1))
    ends = torch.tensor([torch.inf, -torch.inf, torch.nan, -torch.nan, 0.0, -0.0, 3e38, -3e38, 1e-45])
    return torch.cat([near, up, down, ends])


def cast(values: torch.Tensor, dtype: torch.dtype, kernel: object = kernels.cast) -> torch.Tensor:
    block = 8192
    padded = torch.zeros(-(-len(values) // block) * block, dtype=values.dtype)
    padded.view(torch.int8)[: len(values) * values.itemsize] = values.view(torch.int8)
    out = torch.empty(len(padded), dtype=dtype, device="cuda")
    kernel[(len(padded) // block,)](padded.cuda(), out, BLOCK=block)
    return out.cpu()[: len(values)]


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """NaN may be any NaN."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[found.itemsize]
    nan = expected.float().isnan()
    return torch.equal(found.float().isnan(), nan) and torch.equal(found.view(words)[~nan], expected.view(words)[~nan])


def test_float32_rounds_to_bfloat16():
    values = torch.cat([around(BF16), torch.randn(50_000) * torch.logspace(-38, 38, 50_000)])
    assert same_bits(cast(values, BF16), values.to(BF16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_every_bfloat16_widens(dtype):
    assert same_bits(cast(every_word(BF16), dtype), every_word(BF16).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int64])
def test_other_types_become_bfloat16(dtype):
    if dtype.is_floating_point:
        values = every_word(torch.float16).to(dtype)
    else:
        ends = torch.iinfo(dtype)
        values = torch.cat([torch.arange(0, 128), torch.tensor([ends.min, ends.max, ends.max // 3])]).to(dtype)
    assert same_bits(cast(values, BF16), values.to(BF16))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64], ids=str)
def test_bfloat16_becomes_an_integer(dtype):
    values = torch.linspace(-120, 120, 999).to(BF16)
    assert torch.equal(cast(values, dtype), values.to(dtype))


@pytest.mark.parametrize("target", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.float16, BF16], ids=str)
def test_float8_rounds_and_saturates(source, target):
    values = (around(target) if source is torch.float32 else every_word(source)).to(source)
    top = torch.finfo(target).max
    assert same_bits(cast(values, target), values.float().clamp(-top, top).to(target))


@pytest.mark.parametrize("target", [torch.float32, torch.float16, BF16], ids=str)
@pytest.mark.parametrize("source", [E4M3, E5M2], ids=str)
def test_every_float8_widens(source, target):
    assert same_bits(cast(every_word(source), target), every_word(source).to(target))


def test_a_cast_may_truncate():
    nan = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)  # nothing of it in the upper 16 bits
    values = torch.cat([nan, torch.tensor([1 + 2**-7 - 2**-10, -1 - 2**-7 + 2**-10, torch.inf, 3.4e38])])
    found = cast(values, BF16, kernels.cast_toward_zero).float()
    assert same_bits(found, torch.tensor([torch.nan, 1, -1, torch.inf, torch.finfo(BF16).max]))


@pytest.mark.parametrize("dtype", [BF16, torch.float16, E4M3, E5M2], ids=str)
def test_a_dot_multiplies_values(dtype):
    torch.manual_seed(0)
    a, b, start = torch.randn(16, 64).to(dtype), torch.randn(64, 32).to(dtype), torch.randn(16, 32)
    out = torch.empty(16, 32, device="cuda")
    kernels.multiply[(1,)](a.cuda(), b.cuda(), start.cuda(), out, M=16, N=32, K=64)
    expected = a.double() @ b.double() + start
    assert (out.cpu() - expected).abs().max() < 1e-5 * expected.abs().max()


ELEMENTWISE = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a, b: -a,
    "abs": lambda a, b: a.abs(),
    "scale": lambda a, b: a * torch.tensor(0.3).to(BF16),
    "fma": lambda a, b: a * b + a,
    "maximum": torch.fmax,
    "minimum": torch.fmin,
    "clamp": lambda a, b: a.clamp(-0.5, 0.5),
    "where": lambda a, b: torch.where(a < b, a, b),
    "exp": lambda a, b: a.exp(),
    "bool": lambda a, b: (a > 0).float() + (a == a).float(),
    "int": lambda a, b: (a * 8).to(BF16).int(),
    "full": lambda a, b: torch.full_like(a, 1.1),
    "masked": lambda a, b: torch.where(torch.arange(len(a)) % 2 == 0, a, 1),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_operation_is_rounded_once(name):
    torch.manual_seed(1)
    a, b = (torch.randn(1024).to(BF16) for _ in range(2))
    special = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0, 1e-40, -2.0])
    if name not in ("int", "neg"):  # there is no integer infinity, and Triton before 3.7 negates 0 to 0
        a[: len(special)] = special
    b[1] = 2.0
    out = torch.empty(1024, dtype=BF16, device="cuda")
    kernels.operate[(1,)](a.cuda(), b.cuda(), out, OP=name, N=1024)
    assert same_bits(out.cpu(), ELEMENTWISE[name](a.float(), b.float()).to(BF16))


def test_sorting_and_scanning():
    torch.manual_seed(2)
    a = torch.randn(256).to(BF16)
    expected = {
        "sort": a.sort().values,
        "cumsum": a.double().cumsum(0),
        "reversed": a.double().flip(0).cumsum(0).flip(0),
        "cumprod": a.double().cumprod(0),
    }
    for name, want in expected.items():
        out = torch.empty(256, device="cuda")
        kernels.operate[(1,)](a.cuda(), a.cuda(), out, OP=name, N=256)
        scale = a.double().abs().cumsum(0).max() if name in ("cumsum", "reversed") else want.abs()
        steps = 0 if name == "sort" else 2**-8 * 9
        assert ((out.cpu() - want).abs() <= steps * scale + 1e-30).all(), name


def test_reductions():
    torch.manual_seed(3)
    m, n = 8, 64
    x = torch.randn(m, n).to(BF16)
    out = torch.empty(6 * m, dtype=BF16, device="cuda")
    where = torch.empty(2 * m, dtype=torch.int32, device="cuda")
    kernels.reduce[(1,)](x.cuda(), out, where, M=m, N=n)
    total, top, low, low_too, top_too, whole = out.cpu().view(6, m)
    exact, size = x.double().sum(1), x.double().abs().sum(1)
    assert ((total - exact).abs() <= 2**-8 * 6 * size).all()
    assert (whole - exact.sum()).abs().max() <= 2**-8 * 9 * size.sum()
    assert torch.equal(torch.stack([top, top_too]), x.amax(1).expand(2, m))
    assert torch.equal(torch.stack([low, low_too]), x.amin(1).expand(2, m))
    assert where.cpu().tolist() == [*x.float().argmax(1).tolist(), *x.float().argmin(1).tolist()]


def test_a_sum_rounds_as_bfloat16_does():
    x = torch.full((8, 64), 1 / 3).to(BF16)
    x[:, 0] = 256.0  # the others are lost in it one by one, not in a tree
    out = torch.empty(48, dtype=BF16, device="cuda")
    kernels.reduce[(1,)](x.cuda(), out, torch.empty(16, dtype=torch.int32, device="cuda"), M=8, N=64)
    assert out[0].item() == pytest.approx(256 + 63 / 3, abs=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16, torch.int32], ids=str)
def test_a_comparison_of_scalars_joins_a_mask(dtype):
    out = torch.zeros(4, device="cuda")
    kernels.mark_if_positive[(1,)](torch.zeros(1, dtype=dtype, device="cuda"), out, N=4)
    assert out.tolist() == [0] * 4
    kernels.mark_if_positive[(1,)](torch.ones(1, dtype=dtype, device="cuda"), out, N=4)
    assert out.tolist() == [1, 1, 1, 0]


def test_atomic_additions_meet():
    x, out = torch.arange(16).to(BF16).cuda(), torch.ones(2, dtype=BF16, device="cuda")
    kernels.accumulate[(1,)](x, out, N=16)
    assert out.tolist() == [1 + sum(range(0, 16, 2)), 1 + sum(range(1, 16, 2))]


def test_a_captured_kernel_rounds_at_replay_too(capture):
    x, out = torch.zeros(8192, device="cuda"), torch.empty(8192, dtype=BF16, device="cuda")
    graph, _ = capture(lambda: kernels.cast[(1,)](x, out, BLOCK=8192))
    values = torch.randn(8192)
    x.copy_(values)
    graph.replay()
    assert torch.equal(out.cpu(), values.to(BF16))


@pytest.mark.parametrize("name", triton_floats.SELF_TESTS)
def test_an_interpreter_that_computes_something_else_is_refused(monkeypatch, name):
    monkeypatch.setitem(triton_floats.SELF_TESTS, name, lambda module: False)
    triton_floats.complaint.cache_clear()
    try:
        with pytest.raises(EmulationError, match=f"would compute wrong numbers: {name}"):
            kernels.add[(1,)](torch.zeros(8, device="cuda"), 1.0, N=8)
    finally:
        triton_floats.complaint.cache_clear()

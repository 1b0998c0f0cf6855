"""`tl.dot` of float32 is tf32 unless the kernel asks for more, as on a GPU."""

from __future__ import annotations

import importlib
import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton was set up without its interpreter (TRITON_INTERPRET=1)", allow_module_level=True)

kernels = importlib.import_module("emulation_kernels")

pytestmark = [
    pytest.mark.usefixtures("cuda"),
    # Triton before 3.9, with a NumPy that warns of it
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]
M, N, K = 16, 32, 64
ROUNDOFF = K * 2.0**-24
"""Of K additions in float32."""
DIGIT = 2.0**-10
"""What the last bit of a tf32 number in [1, 2) is worth."""


def product(a: torch.Tensor, b: torch.Tensor, start: torch.Tensor, **options: object) -> torch.Tensor:
    out = torch.empty(M, N, device="cuda")
    kernels.multiply[(1,)](a.cuda(), b.cuda(), start.cuda(), out, M=M, N=N, K=K, **options)
    return out.cpu()


def truncated(values: torch.Tensor) -> torch.Tensor:
    return (values.view(torch.int32) & -(2**13)).view(torch.float32)


def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(M, K), torch.randn(K, N), torch.randn(M, N)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


TF32 = {"by default": {}, "as asked": {"PRECISION": "tf32"}, "as allowed": {"ALLOW_TF32": True}}
EXACT = {"ieee": {"PRECISION": "ieee"}, "tf32x3": {"PRECISION": "tf32x3"}, "not allowed": {"ALLOW_TF32": False}}


@pytest.mark.parametrize("name", TF32)
def test_a_dot_of_float32_multiplies_operands_that_are_cut_to_tf32(name):
    a, b, start = problem()
    found = product(a, b, start, **TF32[name])
    assert error(found, truncated(a).double() @ truncated(b).double() + start) < ROUNDOFF
    assert error(found, a.double() @ b.double() + start) > 30 * ROUNDOFF


@pytest.mark.parametrize("name", EXACT)
def test_a_dot_of_float32_is_exact_where_the_kernel_asks_for_it(name):
    a, b, start = problem()
    assert error(product(a, b, start, **EXACT[name]), a.double() @ b.double() + start) < ROUNDOFF


@pytest.mark.parametrize("side", ["left", "right"])
def test_an_operand_is_cut_off_and_not_rounded_and_what_is_added_to_is_neither(side):
    values = torch.tensor([1 + DIGIT, 1 + DIGIT * (1 - 2**-10), -1 - DIGIT * 0.75, 3 - DIGIT / 4])
    cut = torch.tensor([1 + DIGIT, 1, -1, 3 - 2 * DIGIT])
    ones, tail = torch.ones(4), DIGIT * 2**-10
    left, right = (values, ones) if side == "left" else (ones, values)
    a, b = torch.zeros(M, K), torch.zeros(K, N)
    a[:4, 0], b[0, :4] = left, right
    found = product(a, b, torch.full((M, N), tail))
    expected = cut[:, None].expand(4, 4) if side == "left" else cut[None, :].expand(4, 4)
    assert torch.equal(found[:4, :4], expected + tail)


def test_the_default_is_what_the_environment_says(monkeypatch):
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    a, b, start = problem()
    assert error(product(a, b, start), a.double() @ b.double() + start) < ROUNDOFF


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_what_has_ten_bits_or_fewer_is_multiplied_as_it_is(dtype):
    a, b, start = problem()
    a, b = a.to(dtype), b.to(dtype)
    assert error(product(a, b, start, PRECISION="tf32"), a.double() @ b.double() + start) < ROUNDOFF

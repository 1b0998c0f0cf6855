"""Rows that the kit packs are byte for byte those of the servers that have the format, and mean the same numbers."""

from __future__ import annotations

import importlib.util
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from alone import load

from attn_testkit.contract import ROW_FORMATS, AttentionLayer
from attn_testkit.steps.packed_rows import with_halfway_numbers, with_one_packing

WIDTH, INSIDE = 64, 32
_GIVEN = {
    "sglang.srt.runtime_context": {
        "get_platform": lambda: SimpleNamespace(is_sm100=False, is_sm120=False, is_sm90=True)
    }
}


@pytest.fixture(scope="module")
def of_sglang() -> Any:
    if not importlib.util.find_spec("sglang"):
        pytest.skip("the wheels are not installed: ci/servers.sh public-kernels")
    with warnings.catch_warnings():
        # torch.compile decorates its functions; torch's own import of it is what warns.
        warnings.simplefilter("ignore", DeprecationWarning)
        return load("sglang.srt.layers.quantization.kvfp4_tensor", _GIVEN)


def keys() -> torch.Tensor:
    draws = torch.Generator().manual_seed(1)
    sizes = torch.randn(500, 1, 1, generator=draws).mul(3).exp()
    return torch.randn(500, 2, WIDTH, generator=draws).mul(sizes).bfloat16()


def test_fp4_rows_of_sglang_are_those_of_the_kit(of_sglang: Any) -> None:
    packed = ROW_FORMATS["fp4_mx_block16"].of(AttentionLayer(0, 4, 2, WIDTH, WIDTH, 0.1))
    chosen = with_one_packing(packed, keys())
    with torch.compiler.set_stance("force_eager"):
        numbers, scales = of_sglang.FP4MXBlock16KVQuantizeUtil.batched_quantize(chosen)
        meant = of_sglang.FP4MXBlock16KVQuantizeUtil.batched_dequantize(numbers, scales, torch.float32)
    rows = packed.pack(chosen)
    assert torch.equal(rows[..., :INSIDE], numbers)
    assert torch.equal(rows[..., INSIDE:].reshape(len(rows), -1), scales)
    assert torch.equal(packed.unpack(rows), meant)


def test_sglang_rounds_quotients_between_two_fp4_numbers_away_from_zero(of_sglang: Any) -> None:
    packed = ROW_FORMATS["fp4_mx_block16"].with_ties("away").of(AttentionLayer(0, 4, 2, WIDTH, WIDTH, 0.1))
    chosen = with_halfway_numbers(packed, keys())
    with torch.compiler.set_stance("force_eager"):
        numbers, _ = of_sglang.FP4MXBlock16KVQuantizeUtil.batched_quantize(chosen)
    assert torch.equal(packed.pack(chosen)[..., :INSIDE], numbers)


def test_nvfp4_rows_mean_what_sglang_reads_in_them(of_sglang: Any) -> None:
    packed, scale = ROW_FORMATS["nvfp4"].of(AttentionLayer(0, 4, 2, WIDTH, WIDTH, 0.1)), torch.tensor(0.25)
    rows = packed.pack(with_one_packing(packed, keys(), scale) / scale)
    blocks = rows[..., INSIDE:].contiguous().view(torch.float8_e4m3fn).view(len(rows), -1)
    meant = of_sglang.NVFP4KVQuantizeUtil.dequantize(rows[..., :INSIDE].contiguous(), blocks, scale, torch.float32)
    assert torch.equal(packed.unpack(rows) * scale, meant)

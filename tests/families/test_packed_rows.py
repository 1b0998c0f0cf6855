"""Packed rows: planes of a row, the one right packing of test data, what is accepted, limits, and named mistakes."""

from __future__ import annotations

import pytest
import torch
from in_process import check_backend

from attn_testkit.backends.torch_native_sparse import TorchNativeSparsePackedBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.contract import ROW_FORMATS, AttentionLayer, Capabilities, KVPool, PackedRows
from attn_testkit.contract.row_format import ALL_NAN
from attn_testkit.families.sparse.data import make_sparse_data
from attn_testkit.families.sparse.family import SPARSE
from attn_testkit.steps.data import nan_of, pool_image
from attn_testkit.steps.packed_rows import accepted, with_one_packing
from attn_testkit.steps.schedule import make_schedule
from attn_testkit_corpus.faults.controls_of_selections import SparsePackedRowsInBf16
from attn_testkit_corpus.faults.s_packed_rows import (
    OneScaleForARow,
    RowsOfOtherTiles,
    ScaleOfTheNextTile,
    ScalesRoundedToAPowerOfTwo,
    ScalesStoredOncePerSlot,
)

CASE = "decode-mla4-d256r64-bf16-p16-k100.37-shuffled-gauss-kv{}-sel16-b2prod"
AMAX, POW2 = "fp8dsmla", "fp8dsmlapow2"
V32 = ["fp8_ds_mla", "fp8_ds_mla_pow2"]


def rows_of(name: str) -> PackedRows:
    return PackedRows(ROW_FORMATS[name], 512, 576)


def keys(rows: int = 64) -> torch.Tensor:
    return torch.randn(rows, 576, generator=torch.Generator().manual_seed(3)).bfloat16()


@pytest.mark.parametrize("name", V32)
def test_a_row_of_deepseek_has_656_bytes_whose_planes_are_views(name: str) -> None:
    packed, rows = rows_of(name), torch.zeros(3, 656, dtype=torch.uint8)
    assert packed.nbytes == 656
    assert packed.offsets == {"numbers": (0, 512), "scales": (512, 528), "rope": (528, 656)}
    for each in packed.planes(rows).values():
        each.fill_(1)
    assert bool((packed.unpack(rows) == 1).all())


@pytest.mark.parametrize("name", V32)
def test_a_row_means_its_numbers_within_half_a_step_of_fp8_of_their_tile(name: str) -> None:
    packed, given = rows_of(name), keys()
    rows = packed.pack(given)
    scales, meant = packed.planes(rows)["scales"], packed.unpack(rows, torch.float64)
    largest = given[:, :512].double().unflatten(1, (4, 128)).abs().amax(-1)
    exact = largest / 448
    if name.endswith("pow2"):
        assert torch.equal(scales.double().log2(), exact.log2().ceil())
    else:
        assert bool(((scales - exact).abs() <= 2.0**-23 * exact).all())
    off = (meant - given.double()).abs()
    step = given.double().abs() * 2.0**-4
    step[:, :512] += 2.0**-10 * scales.double().repeat_interleave(128, 1)
    assert bool((off <= step).all())
    assert torch.equal(meant[:, 512:], given[:, 512:].double()), "the rope part is not rounded"
    assert float(off[:, :512].max()) > 0, "the latent part is"


@pytest.mark.parametrize("name", V32)
def test_keys_of_the_kit_are_packed_alike_by_scales_that_differ_by_rounding(name: str) -> None:
    packed, given = rows_of(name), keys()
    given[0, :128] = 0
    given[1, 0], given[1, 1:128] = 3.5, 0.5  # 3.5 / 448 is a power of two
    chosen = with_one_packing(packed, given)
    assert torch.equal(with_one_packing(packed, chosen), chosen)
    assert bool((chosen[:, :512].unflatten(1, (4, 128)) != 0).any(-1).all()), "no tile is all 0"
    assert torch.equal(chosen[:, 512:], given[:, 512:])
    scales, numbers = (packed.planes(packed.pack(chosen))[plane] for plane in ("scales", "numbers"))
    tiles = chosen[:, :512].float().unflatten(1, (4, 128))
    if name.endswith("pow2"):
        for off in (-(2.0**-22), 2.0**-22):
            again = (tiles.abs().amax(-1) * (1 + off) / 448).clamp(min=1e-4).log2().ceil().exp2()
            assert torch.equal(again, scales)
        return
    for ulps in (-4, 4):
        other = (scales.contiguous().view(torch.int32) + ulps).view(torch.float32)
        again = (tiles / other[..., None]).clamp(-448, 448).to(numbers.dtype).flatten(1)
        assert torch.equal(again.view(torch.uint8), numbers.contiguous().view(torch.uint8))


def test_only_scales_may_differ_and_only_by_rounding() -> None:
    packed = rows_of("fp8_ds_mla")
    want = packed.pack(keys())
    for ulps, fine in ((4, True), (-4, True), (5, False)):
        rows = want.clone()
        packed.planes(rows)["scales"].view(torch.int32).add_(ulps)
        assert torch.equal(accepted(packed, rows, want), want) is fine
    for place in (0, 511, 528, 655):
        rows = want.clone()
        rows[:, place] ^= 1
        assert not torch.equal(accepted(packed, rows, want), want)


def test_poison_is_nan_in_every_plane_and_in_fp8() -> None:
    planes = rows_of("fp8_ds_mla").planes(torch.full((1, 656), ALL_NAN, dtype=torch.uint8))
    assert all(bool(each.float().isnan().all()) for each in planes.values())
    assert all(bool(nan_of(dtype).float().isnan()) for dtype in (torch.float8_e4m3fn, torch.bfloat16))


@pytest.mark.parametrize(
    "given",
    [
        {"heads": {"families": {"mla", "mha"}}},
        {"precision": {"dtypes": {"bf16", "fp16"}}},
        {"heads": {"head_dims": {512, 64}}},
    ],
)
def test_formats_are_declared_for_what_has_such_rows(given: dict) -> None:
    fitting = {
        "heads": {"families": {"mla"}, "head_dims": {512}},
        "precision": {"dtypes": {"bf16"}},
        "kv_pool": {"kv_dtypes": {"fp8_ds_mla"}},
    }
    declared = Capabilities(eager={"decode"}, **fitting)
    with pytest.raises(ValueError, match="which has no row format for"):
        declared.with_changes(**given)


@pytest.mark.parametrize("words", ["mqa4-d128-bf16", "mla4-d256r64-fp16", "mla4-d64r64-bf16"])
def test_a_case_of_other_rows_is_refused(words: str) -> None:
    with pytest.raises(ValueError, match="whole tiles of 128"):
        parse_case(f"decode-{words}-p16-k9-shuffled-gauss-kvfp8dsmla-b1prod")


def test_pools_find_a_row_by_slot_and_store_it_packed() -> None:
    layer = AttentionLayer(0, 4, 1, 576, 512, 0.1, kv_lora_rank=512)
    pool = KVPool(32, 16, (layer,), torch.uint8, "cpu", row_format="fp8_ds_mla")
    given = keys(2)
    pool.set_kv_buffer(layer, torch.tensor([17, 40]), given[:, None])
    packed = pool.rows_of(layer)
    assert packed is not None
    assert torch.equal(pool.get_key_buffer(0)[[17, 40], 0], packed.pack(given))
    assert pool.get_kv_pages(0)[1].shape == (3, 16, 1, 656)


def test_memory_between_live_rows_is_nan_and_keys_that_no_row_selects_are_too() -> None:
    schedule = make_schedule(parse_case(CASE.format(AMAX)))
    step = schedule.steps[1]
    data = make_sparse_data(schedule, step)
    assert data.row_format is not None
    image = SPARSE.memory.image(schedule, step, data, False, after=False)
    numbers = data.row_format.unpack(image)
    assert bool(numbers[:, :, :16].isnan().all()), "page 0"
    whole = data.row_format.unpack(pool_image(schedule, step, data, False, after=False))
    lost = numbers.isnan().all(-1) & ~whole.isnan().any(-1)
    assert bool(lost.any())


def test_a_right_backend_passes_each_format_and_one_that_rounds_keys_to_bf16_too() -> None:
    for backend, case in (
        (TorchNativeSparsePackedBackend, CASE.format(POW2)),
        (SparsePackedRowsInBf16, CASE.format(AMAX)),
        (SparsePackedRowsInBf16, CASE.format(AMAX).replace("gauss", "one_hot")),
    ):
        case = case.replace("d256", "d128") if backend is TorchNativeSparsePackedBackend else case
        found = [each for each in check_backend(backend, device="cpu", cases=[case]) if each.case]
        assert [each.status for each in found] == ["passed", "passed"]


@pytest.mark.parametrize(
    ("backend", "check", "hint"),
    [
        (ScaleOfTheNextTile, "matches-oracle", "for the tile before its own"),
        (OneScaleForARow, "matches-oracle", "the scale of the first tile is used for all tiles"),
        (ScalesRoundedToAPowerOfTwo, "matches-oracle", "rounded up to a power of two"),
        (ScalesStoredOncePerSlot, "writes-own-kv", ""),
        (RowsOfOtherTiles, "writes-own-kv", ""),
    ],
)
def test_mistakes_about_scales_are_found_and_named(backend: type, check: str, hint: str) -> None:
    found = check_backend(backend, device="cpu", cases=[CASE.format(AMAX)], executions=["eager"])
    finding = next(each.findings for each in found if each.case)[0]
    assert finding.check == check
    assert hint in finding.hint

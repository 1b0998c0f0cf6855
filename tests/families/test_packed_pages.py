"""Packed rows of DeepSeek V4 and V4.1, whose scales come after the numbers of a page, and FP4 rows of 352 bytes."""

from __future__ import annotations

import pytest
import torch
from in_process import check_backend

from attn_testkit.backends.torch_native_sparse import (
    TorchNativeSparsePackedBackend,
    TorchNativeSparsePackedPagesBackend,
)
from attn_testkit.cases.case import parse_case
from attn_testkit.contract import ROPE_IN_VALUE, ROW_FORMATS, AttentionLayer, KVPool, PackedRows
from attn_testkit.steps.packed_rows import accepted, with_one_packing
from attn_testkit_corpus.faults.controls_of_selections import SparseFp4Rows, SparsePackedPagesInBf16
from attn_testkit_corpus.faults.s_packed_pages import (
    ScalesInTheOrderOfTiles,
    ScalesOfFp4RowsRoundedToTheNearest,
    ScalesStoredWithoutUnusedBytes,
    TilesOfV4InV41,
    UnusedByteAsAScale,
    ValuesWithoutTheirRopePart,
)

V4, V41, FP4 = "fp8_ds_mla_v4", "fp8_ds_mla_v41", "nvfp4_ds_mla"
PAGES = "decode-mla4-d256-bf16-p16-k37.20-shuffled-gauss-kv{}-sel16-b2prod"
ROWS = PAGES.replace("d256", "d256r64")


def case(name: str) -> str:
    return (PAGES if name in ROPE_IN_VALUE else ROWS).format(name.replace("_", ""))


def layer(name: str, index: int = 0) -> AttentionLayer:
    width = 512 if name in ROPE_IN_VALUE else 576
    return AttentionLayer(index, 64, 1, width, 512, 0.1, kv_lora_rank=512)


def rows_of(name: str) -> PackedRows:
    return ROW_FORMATS[name].of(layer(name))


def keys(name: str, rows: int = 64) -> torch.Tensor:
    return torch.randn(rows, layer(name).head_dim, generator=torch.Generator().manual_seed(3)).bfloat16()


@pytest.mark.parametrize(
    ("name", "inside", "apart", "page"), [(V4, 576, 8, 37_440), (V41, 512, 16, 33_792), (FP4, 352, 0, 0)]
)
def test_rows_and_pages_have_the_bytes_of_servers(name: str, inside: int, apart: int, page: int) -> None:
    packed = rows_of(name)
    assert (packed.nbytes - packed.nbytes_apart, packed.nbytes_apart) == (inside, apart)
    if page:
        pool = KVPool(128, 64, (layer(name),), torch.uint8, "cpu", row_format=name)
        assert pool.get_layer_buffer(0).shape == (3, page)


@pytest.mark.parametrize("layout", ["nhd", "layers-in-block", "padded-pages"])
@pytest.mark.parametrize(("name", "numbers", "tile"), [(V4, 448, 64), (V41, 512, 32)])
def test_a_page_holds_the_numbers_of_its_rows_and_then_their_scales(
    layout: str, name: str, numbers: int, tile: int
) -> None:
    pool = KVPool(48, 16, (layer(name), layer(name, 1)), torch.uint8, "cpu", layout, row_format=name)
    given = with_one_packing(rows_of(name), keys(name, 2))
    pool.set_kv_buffer(layer(name, 1), torch.tensor([17, 47]), given[:, None])
    page = pool.get_layer_buffer(1)[[1, 2]]
    stride, bytes_of_scales = numbers + 2 * (512 - numbers), numbers // tile + (numbers < 512)
    for row, (held, place) in enumerate(zip(page, (1, 15), strict=True)):
        of_row = held[place * stride :][:stride]
        first = 16 * stride + place * bytes_of_scales
        scales = torch.exp2(held[first : first + numbers // tile].float() - 127)
        meant = of_row[:numbers].view(torch.float8_e4m3fn).float() * scales.repeat_interleave(tile)
        off = (meant - given[row, :numbers].float()).abs()
        assert float((off / scales.repeat_interleave(tile)).max()) <= 16, "half the step of numbers up to 448"
        if numbers < 512:
            assert torch.equal(of_row[numbers:].view(torch.bfloat16), given[row, 448:])
    assert not pool.get_layer_buffer(0).any()


def test_a_pool_with_pages_of_one_slot_stores_numbers_and_scales() -> None:
    pool, given = KVPool(3, 1, (layer(V4),), torch.uint8, "cpu", row_format=V4), keys(V4, 2)
    pool.set_kv_buffer(layer(V4), torch.tensor([1, 3]), given[:, None])
    held = torch.cat((pool.get_kv_pages(0)[0], pool.get_scale_pages(0)[0]), -1)[[1, 3], 0, 0]
    assert torch.equal(held, rows_of(V4).pack(given))


def test_fp4_rows_round_scales_up_and_store_those_of_every_fourth_tile_together() -> None:
    packed, given = rows_of(FP4), keys(FP4)
    rows = packed.pack(given)
    exact = given[:, :512].float().unflatten(1, (32, 16)).abs().amax(-1) / 6
    for tile in range(32):
        byte = 320 + 8 * (tile & 3) + (tile >> 2)
        held = rows[:, byte].view(torch.float8_e4m3fn).float()
        below = (rows[:, byte] - 1).view(torch.float8_e4m3fn).float()
        assert bool(((held >= exact[:, tile]) & (below < exact[:, tile])).all())
    assert torch.equal(rows[:, 256:320], given[:, 512:].to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("name", [V4, V41])
def test_keys_of_the_kit_have_one_packing_whatever_the_smallest_scale_of_a_server_is(name: str) -> None:
    packed, given = rows_of(name), keys(name)
    given[0], given[1] = 0.0, 1e-3
    chosen = with_one_packing(packed, given)
    assert torch.equal(with_one_packing(packed, chosen), chosen)
    plane = packed.format.planes[-1]
    tiles = chosen[:, : packed.latent].float().unflatten(1, (-1, plane.tile))
    largest, scales = tiles.abs().amax(-1), packed.scales(plane, chosen)
    for exact in ((largest / 448).clamp(min=1e-4), largest.clamp(min=1e-4) * (1 / 448), largest.clamp(min=1e-8) / 448):
        assert torch.equal(exact.log2().ceil().exp2(), scales)


def test_the_unused_byte_of_v4_may_hold_anything_and_no_other_byte_may() -> None:
    packed = rows_of(V4)
    want = packed.pack(with_one_packing(packed, keys(V4)))
    for place, fine in ((583, True), (582, False), (576, False), (575, False), (0, False)):
        rows = want.clone()
        rows[:, place] ^= 1
        assert torch.equal(accepted(packed, rows, want), want) is fine


@pytest.mark.parametrize("words", ["mla4-d256r64", "mla4-d64", "mla4-d96", "mqa4-d256"])
def test_a_case_whose_value_is_not_the_whole_row_is_refused(words: str) -> None:
    with pytest.raises(ValueError, match="whole tiles of 64 numbers and 64 more"):
        parse_case(f"decode-{words}-bf16-p16-k9-shuffled-gauss-kvfp8dsmlav4-b1prod")


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        (TorchNativeSparsePackedPagesBackend, V4),
        (SparsePackedPagesInBf16, V4),
        (SparsePackedPagesInBf16, V41),
        (TorchNativeSparsePackedBackend, FP4),
        (SparseFp4Rows, FP4),
    ],
)
def test_a_right_backend_passes_each_format(backend: type, name: str) -> None:
    own = case(name).replace("d256", "d128") if backend.__module__.startswith("attn_testkit.") else case(name)
    found = [each for each in check_backend(backend, device="cpu", cases=[own]) if each.case]
    assert [each.status for each in found] == ["passed", "passed"]


@pytest.mark.parametrize(
    ("backend", "name", "check", "hint"),
    [
        (ValuesWithoutTheirRopePart, V4, "matches-oracle", "the last 64 numbers of values"),
        (UnusedByteAsAScale, V4, "finite", "16 rows of 320 bytes with numbers, then 16 rows of 4 bytes with scales"),
        (TilesOfV4InV41, V41, "matches-oracle", "two tiles share the scale of the first"),
        (ScalesStoredWithoutUnusedBytes, V4, "writes-own-kv", ""),
        (ScalesInTheOrderOfTiles, FP4, "matches-oracle", "in the order of their bytes"),
        (ScalesOfFp4RowsRoundedToTheNearest, FP4, "writes-own-kv", "one e4m3 number too small"),
    ],
)
def test_mistakes_about_places_of_scales_are_found_and_named(backend: type, name: str, check: str, hint: str) -> None:
    found = check_backend(backend, device="cpu", cases=[case(name)], executions=["eager"])
    finding = next(each.findings for each in found if each.case)[0]
    assert finding.check == check
    assert hint in finding.hint

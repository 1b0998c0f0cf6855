"""Row formats of K and V: planes, packing, meaning, memory that lies apart, scales that change, and mistakes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from attn_testkit.runner_modes.harness import context_for
from in_process import check_backend

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.backends.torch_native_formats import TorchNativeFormatsBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.catalogue.tiers import generate
from attn_testkit.checks.key_counts import code_sizes
from attn_testkit.checks.wrong_planes import wrong_planes
from attn_testkit.contract import (
    LATENT_FORMATS,
    ROW_FORMATS,
    AttentionLayer,
    ForwardMode,
    KVLayer,
    KVPool,
    KVPoolSpec,
    PackedRows,
)
from attn_testkit.contract.backend import Unsupported, refuse_undeclared
from attn_testkit.contract.row_format import ALL_NAN, FP4, INT4, codes_of
from attn_testkit.families.softmax.packed_rows import misread_rows
from attn_testkit.steps.data import make_layers, make_step_data, pool_image
from attn_testkit.steps.packed_rows import accepted, with_one_packing
from attn_testkit.steps.schedule import make_schedule
from attn_testkit.watches.pool_watch import PoolWatch
from attn_testkit_corpus.faults.catalogue import entry_of

FORMATS = sorted(set(ROW_FORMATS) - LATENT_FORMATS)
APART = [name for name in FORMATS if ROW_FORMATS[name].apart]
CASE = "decode-gqa4x2-d64-bf16-p16-k37.9.0-shuffled-{}-kv{}-b4prod"
UNUSED = "decode-gqa4x2-d64-bf16-p16-k37.9.0-shuffled-gauss-b4prod-unusedscales"
SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def case(name: str, data: str = "gauss") -> str:
    return CASE.format(data, name.replace("_", ""))


def layer(kv_heads: int = 2) -> AttentionLayer:
    return AttentionLayer(0, 4, kv_heads, 64, 64, 0.1)


def packed_of(name: str) -> PackedRows:
    return ROW_FORMATS[name].of(layer())


def keys(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize(
    ("name", "inside", "apart"),
    [
        ("fp4_mx_block16", 32, 4),
        ("fp8_per_head", 64, 0),
        ("fp8_per_token_head", 68, 0),
        ("int4_group8", 32, 16),
        ("int4_zeros_per_token_head", 32, 8),
        ("int8_zeros_per_token_head", 64, 8),
        ("int8_per_token_head", 68, 0),
        ("int8_per_token_head_apart", 64, 4),
        ("nvfp4", 32, 4),
    ],
)
def test_bytes_of_a_row_are_those_of_servers(name: str, inside: int, apart: int) -> None:
    packed = packed_of(name)
    assert (packed.nbytes - packed.nbytes_apart, packed.nbytes_apart) == (inside, apart)


def test_numbers_of_fp4_are_rounded_to_the_nearest_and_two_lie_in_a_byte() -> None:
    packed = packed_of("fp4_mx_block16")
    numbers = torch.tensor([*SIZES, *(-size for size in SIZES)]).repeat(4)
    rows = packed.pack(numbers)
    assert rows[0].item() == 0x10, "0 is the lower half of the first byte, 0.5 the upper one"
    assert rows[32:].tolist() == [127] * 4, "a scale of 1 is an exponent of 127"
    assert torch.equal(packed.unpack(rows), numbers)
    middles = [(a + b) / 2 for a, b in pairwise(SIZES)]
    for index, middle in enumerate(middles):
        below, above = codes_of(torch.tensor([middle * (1 - 1e-5), -middle * (1 + 1e-5)]), FP4).tolist()
        assert (below, above) == (index, index + 1 + 8)
    assert codes_of(torch.tensor([1e9]), FP4).item() == 7, "a store saturates"


def test_integers_of_4_bits_have_a_sign_and_lie_as_fp4_does() -> None:
    packed = packed_of("int4_group8")
    numbers = torch.tensor([7.0, -7.0, 1.0, -1.0, 0.0, 2.4, -2.6, 3.0]).repeat(8)
    rows = packed.pack(numbers)
    assert rows[:4].tolist() == [0x97, 0xF1, 0x20, 0x3D]
    assert torch.equal(packed.unpack(rows)[:8], torch.tensor([7.0, -7.0, 1.0, -1.0, 0.0, 2.0, -3.0, 3.0]))
    assert codes_of(torch.tensor([-9.0]), INT4).item() == 9, "a store saturates"


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_means_its_numbers_within_half_a_step_of_their_tile(name: str) -> None:
    packed, given = packed_of(name), keys(50, 2)
    step = {"int8": 1 / 250, "int4": 1 / 13, "fp8_": 1 / 16, "fp4_": 1 / 3, "nvfp": 1 / 4}[name[:4]]
    off = (packed.unpack(packed.pack(given)) - given.float()).abs()
    tile = {"nvfp4": 16, "fp4_mx_block16": 16, "int4_group8": 8}.get(name, 64)
    largest = given.float().abs().unflatten(-1, (-1, tile)).amax(-1).repeat_interleave(tile, -1)
    assert bool((off <= step * 1.02 * largest).all())
    assert float(off.max()) > 0


@pytest.mark.parametrize("name", FORMATS)
def test_test_data_have_one_packing_however_a_quotient_and_a_scale_are_rounded(name: str) -> None:
    packed, given = packed_of(name), keys(60, 2)
    given[0], given[1, :, :16], given[2, 0, 5] = 0, 2.0**-20, -0.0
    by = torch.tensor(0.25 if ROW_FORMATS[name].layer_scale != "none" else 1.0)
    chosen = with_one_packing(packed, given, by)
    assert torch.equal(with_one_packing(packed, chosen, by), chosen)
    want = packed.pack(chosen / by)
    for off in (1 - 2.0**-20, 1 + 2.0**-20):
        # Other rounding in any order of operations moves the quotient by a few units of float32.
        moved = packed.pack(chosen / by * off)
        numbers = packed.format.planes[0]
        assert torch.equal(packed.raw(moved, numbers), packed.raw(want, numbers)), off
        if numbers is not packed.format.planes[-1] and packed.format.planes[-1].dtype != torch.float32:
            assert torch.equal(moved, want)


def test_a_scale_of_32_bits_may_be_off_by_rounding_and_one_of_8_may_not() -> None:
    for name, fine in (("int8_per_token_head", True), ("nvfp4", False)):
        packed = packed_of(name)
        want = packed.pack(keys(4, 2))
        rows = want.clone()
        rows[..., packed.offsets["scales"][0]] ^= 1
        assert torch.equal(accepted(packed, rows, want), want) is fine


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"fp8_per_head"}))
def test_some_rows_and_tiles_of_gauss_data_are_zeros_of_either_sign_and_never_of_other_data(name: str) -> None:
    found = None
    for seed in range(8):
        schedule = make_schedule(parse_case(f"{case(name)}{f'-s{seed}' if seed else ''}"))
        if schedule.case.derived("tiles-of-zeros"):
            found = schedule
    assert found is not None
    step = found.steps[0]
    data, tile = make_step_data(found, step), {"nvfp4": 16, "fp4_mx_block16": 16, "int4_group8": 8}.get(name, 64)
    longest = max(range(step.bs), key=lambda b: step.lens[b])
    own = (data.row_request == longest).nonzero()[-1]
    for rows, meant in ((data.k, data.keys), (data.v, data.values)):
        assert not rows[0, own, 0].any(), "of a new row that is always one"
        zeros = (rows.unflatten(-1, (-1, tile)) == 0).all(-1)
        of_pool = (meant.unflatten(-1, (-1, tile)) == 0).all(-1)
        assert 0.05 < float(of_pool.float().mean()) < 0.5
        assert bool((~zeros).any())
        if tile < 64:
            assert bool((of_pool.sum(-1) == of_pool.shape[-1] - 1).any()), "all but one tile of a row"
        signs = rows[rows == 0].signbit()
        assert bool(signs.any())
        assert not bool(signs.all())
    other = make_step_data(found, step, "one_hot")
    assert bool((other.values.unflatten(-1, (-1, tile)) != 0).any(-1).all())


@pytest.mark.parametrize("name", ["int8_per_token_head", "fp8_per_token_head", "nvfp4", "int4_group8"])
def test_a_tile_of_zeros_may_have_any_scale_if_its_products_are_0_and_no_other_tile_may(name: str) -> None:
    packed, given = packed_of(name), keys(4, 2)
    tile = packed.scale_planes[0].tile or 64
    given[1, 0, -tile:] *= 0
    want = packed.pack(given)
    (scales,) = packed.scale_planes

    def changed(at: tuple[int, int], scale: int, number: int) -> torch.Tensor:
        rows = want.clone()
        packed.raw(rows, scales)[at][-scales.dtype.itemsize :] = scale
        packed.raw(rows, packed.format.planes[0])[at][-packed.format.planes[0].nbytes(tile) :] = number
        return accepted(packed, rows, want)

    for scale, number, fine in (
        (0, 0, True),
        (0, 0x11, True),
        (0x3C, 0, True),
        (0x3C, 0x11, False),
        (ALL_NAN, 0, False),
    ):
        assert torch.equal(changed((1, 0), scale, number), want) is fine, (scale, number)
        assert not torch.equal(changed((2, 1), scale, number), want)


@pytest.mark.parametrize("name", ["int8_zeros_per_token_head", "int4_zeros_per_token_head"])
def test_numbers_with_a_zero_span_the_range_of_their_row_and_two_of_4_bits_are_half_a_row_apart(name: str) -> None:
    packed = packed_of(name)
    numbers = torch.linspace(2.0, 5.0, 64)
    planes = packed.planes(packed.pack(numbers))
    most = 255 if "int8" in name else 15
    torch.testing.assert_close(planes["scales"], torch.tensor([3.0 / most]))
    torch.testing.assert_close(planes["zeros"], torch.tensor([-2.0 * most / 3.0]))
    codes = planes["numbers"]
    assert (codes[0].item(), codes[-1].item()) == ((0, 255) if most == 255 else (0x80, 0xF7))
    assert bool(((packed.unpack(packed.pack(numbers)) - numbers).abs() <= 3.0 / most / 2 * 1.001).all())


@pytest.mark.parametrize("name", ["int8_zeros_per_token_head", "int4_zeros_per_token_head"])
def test_data_with_zeros_have_a_range_and_no_number_near_a_midpoint(name: str) -> None:
    packed, given = packed_of(name), keys(400, 2)
    given[0], given[1], given[2], given[3] = 0, 2.5, -(2.0**-20), 2.0**-20
    given[4:100] += 3.0
    chosen = with_one_packing(packed, given)
    assert bool(((chosen.float().amax(-1) - chosen.float().amin(-1)) >= 2.0**-10).all())
    of_row = packed.quotients(packed.format.planes[0], chosen)
    assert float((of_row - of_row.floor() - 0.5).abs().min()) > 2.0**-12
    assert float((chosen != given).float().mean()) < 0.12


@pytest.mark.parametrize("name", ["int8_zeros_per_token_head", "int4_zeros_per_token_head"])
@pytest.mark.parametrize(("low", "high"), [(-0.625, 5.75), (0.0, 2.5), (-2.5, -2.5), (0.0, 0.0), (-1.0, 2.0)])
def test_a_number_that_means_0_does_so_with_scales_of_reciprocals_too(name: str, low: float, high: float) -> None:
    packed, given = packed_of(name), keys(3, 2) * 0 + high
    given[..., 0], given[..., 1:9] = low, low if low == high else 0.0
    numbers, scales, zeros = packed.format.planes
    chosen = with_one_packing(packed, given)
    codes, least = packed.quotients(numbers, chosen).round(), chosen.float().amin(-1, keepdim=True)
    meant = codes - packed.scales(zeros, chosen)[..., None]
    for off in (-1, 1):
        scale = (packed.scales(scales, chosen).view(torch.int32) + off).view(torch.float32)[..., None]
        assert torch.equal(meant == 0, codes + least[..., None] / scale == 0)


@pytest.mark.parametrize("layout", ["nhd", "hnd", "side-by-side-hnd", "padded-pages"])
@pytest.mark.parametrize("name", ["int8_per_token_head", "int8_per_token_head_apart", "nvfp4"])
def test_pools_store_rows_and_show_their_planes_in_every_layout(name: str, layout: str) -> None:
    own = AttentionLayer(0, 4, 2, 64, 64, 0.1, k_scale=0.25, v_scale=0.5)
    pool = KVPool(32, 16, (own,), torch.uint8, "cpu", layout, row_format=name)
    k, v, slots = keys(2, 2), keys(2, 2, seed=4), torch.tensor([17, 40])
    pool.set_kv_buffer(own, slots, k, v)
    packed = pool.rows_of(own)
    assert packed is not None
    by = (0.25, 0.5) if ROW_FORMATS[name].layer_scale == "tensor" else (1.0, 1.0)
    for planes, given, scale in zip(pool.get_planes(0), (k, v), by, strict=True):
        want = packed.planes(packed.pack(given / scale))
        for plane, held in planes.items():
            assert torch.equal(
                held.view(torch.uint8)[slots // 16, slots % 16], want[plane].contiguous().view(torch.uint8)
            )
            held.view(torch.uint8)[2, 3] = 1
    assert len(pool.get_scale_pages(0)) == 2 * (name in APART)


@pytest.mark.parametrize("name", FORMATS)
def test_a_byte_of_a_scale_of_nobody_is_watched_as_a_slot_is(name: str) -> None:
    schedule = make_schedule(parse_case(case(name)))
    step = schedule.steps[0]
    layers = make_layers(schedule.case)
    slots = (schedule.num_pages + 1) * 16
    pool = KVPool(slots - 16, 16, layers, torch.uint8, "cpu", "padded-pages", row_format=name)
    watch = PoolWatch(pool)
    image = pool_image(schedule, step, make_step_data(schedule, step), False, after=False)
    watch.fill(step, lambda: (torch.arange(slots).numpy(), image.contiguous().view(-1).numpy()), float("nan"))
    due = torch.tensor([0])
    assert not watch.written(due.numpy(), [raw[:n].numpy() for raw, n in watch.look(slots, due, 1)])[0].size
    plane = list(pool.get_planes(layers[-1].layer_id)[1].values())[-1].view(torch.uint8)
    plane[1, 5, 1, -1] ^= 1
    found = [raw[:n].numpy() for raw, n in watch.look(slots, due, 1)]
    changed, rows, shape = watch.written(due.numpy(), found)
    assert changed.tolist() == [21]
    now = torch.from_numpy(rows.copy()).view(shape)
    differs = (now != image[:, :, changed].view(torch.uint8)).nonzero().tolist()
    assert differs == [[len(layers) - 1, 1, 0, 1, shape[-1] - 1]], "in its own layer, part, head and byte"
    memory = pool.pieces[-1][0]
    assert memory.numel() > sum(view.numel() for view in pool.pieces[-1][1]), "there is memory between pages"
    memory[-1] ^= 1
    assert len(watch.outside([raw[:n].numpy() for raw, n in watch.look(slots, due, 1)])) == 1


def test_a_custom_layout_has_views_of_scales_that_lie_apart_and_no_others() -> None:
    def laid(spec: KVPoolSpec, *, scales: bool) -> list[KVLayer]:
        def make(width: int) -> torch.Tensor:
            return torch.zeros(spec.pages, spec.page_size, 2, width, dtype=torch.uint8)

        held = (make(spec.width_apart(layer()) or 4), make(spec.width_apart(layer()) or 4))
        row = spec.row_width(layer())
        return [KVLayer(make(row), make(row), scales=held if scales else ())]

    def pool(name: str, scales: bool) -> KVPool:
        own = (layer(),)
        return KVPool(
            32, 16, own, torch.uint8, "cpu", "custom", lambda spec: laid(spec, scales=scales), row_format=name
        )

    assert pool("nvfp4", True).get_scale_pages(0)[1].shape == (3, 16, 2, 4)
    assert pool("int8_per_token_head", False).get_scale_pages(0) == ()
    for name, scales, text in (("nvfp4", False, "4 bytes per row"), ("int8_per_token_head", True, "have none")):
        with pytest.raises(ValueError, match=text):
            pool(name, scales)


def test_rows_without_planes_are_refused_with_a_reason() -> None:
    with pytest.raises(ValueError, match="no planes of K and V"):
        KVPool(32, 16, (layer(),), torch.bfloat16, "cpu").get_planes(0)


@pytest.mark.parametrize("words", ["mla4-d512r64-bf16", "mha2-d64-fp32", "gqa4x2-d64-fp16"])
def test_a_case_of_other_rows_is_refused(words: str) -> None:
    with pytest.raises(ValueError, match="in bf16"):
        parse_case(f"decode-{words}-p16-k9-shuffled-gauss-kvnvfp4-b1prod")


def test_scales_of_a_checkpoint_over_an_unquantized_pool_are_refused_where_they_are_not_declared() -> None:
    schedule = make_schedule(parse_case(UNUSED))
    context = context_for([schedule], torch.device("cpu"), make_layers(schedule.case))
    refuse_undeclared(TorchNativeFormatsBackend.capabilities, context)
    with pytest.raises(Unsupported, match="k_scale or v_scale other than 1"):
        refuse_undeclared(TorchNativeBackend.capabilities, context)


@pytest.mark.parametrize("name", FORMATS)
def test_codes_of_plus_and_minus_one_have_one_size_in_each_layer(name: str) -> None:
    schedule = make_schedule(parse_case(case(name, "plus_minus_one")))
    data = make_step_data(schedule, schedule.steps[0])
    sizes = data.values[:, 0, :30].abs()
    assert torch.allclose(sizes, code_sizes(data).view(-1, 1, 1, 1).expand_as(sizes), rtol=2**-20)
    assert bool((sizes.amax((1, 2, 3)) <= 1.1).all()), "a scale's rounding changes them by some per cent"


def test_scales_of_heads_differ_from_step_to_step_and_between_heads() -> None:
    schedule = make_schedule(parse_case(case("fp8_per_head")))
    first, other = (make_step_data(schedule, step).kv_scales for step in schedule.steps[:2])
    assert not torch.equal(first, other) or len({step.seed % 4 for step in schedule.steps}) == 1
    assert bool((first[..., 0, :] != first[..., 1, :]).all())
    assert bool((first[0] != first[1]).all()), "scales of K and V"


@pytest.mark.parametrize("name", ["int8_per_token_head", "nvfp4"])
def test_mistakes_about_scales_change_what_is_attended_to_and_a_swap_of_halves_is_one_of_fp4(name: str) -> None:
    schedule = make_schedule(parse_case(case(name)))
    data = make_step_data(schedule, schedule.steps[0])
    texts = dict(misread_rows(data, 16))
    for text, misread in texts.items():
        assert misread.stored_values is not None
        assert not (
            torch.equal(misread.stored_keys, data.stored_keys)
            and torch.equal(misread.stored_values, data.stored_values)
            and torch.equal(misread.kv_scales, data.kv_scales)
        ), text
    assert any("halves" in text for text in texts) == (name == "nvfp4")
    assert any("of the first key of a page" in text for text in texts)


def test_a_wrong_row_is_described_by_its_planes() -> None:
    packed = packed_of("int8_per_token_head")
    want = packed.pack(keys(2))
    scales, numbers = want.clone(), want.clone()
    packed.planes(scales)["scales"].mul_(torch.tensor([[2.0], [3.0]]))
    packed.planes(numbers)["numbers"].sub_(1)
    assert "its values are right" in wrong_planes(packed, scales, want)
    assert "truncated" in wrong_planes(packed, numbers, want)
    packed.planes(numbers)["numbers"].sub_(1)
    assert wrong_planes(packed, numbers, want) == "its scales are right, but its values are wrong"
    packed.planes(scales)["scales"].fill_(0.5)
    assert "one scale for all heads" in wrong_planes(packed, scales, want)
    assert wrong_planes(packed, packed.pack(keys(2, seed=9)), want) == ""
    halves = packed_of("nvfp4").pack(keys(2))
    swapped = halves.clone()
    swapped[:, :32] = (halves[:, :32] >> 4) + (halves[:, :32] & 15) * 16
    assert "swapped" in wrong_planes(packed_of("nvfp4"), swapped, halves)


@pytest.mark.parametrize("name", FORMATS)
def test_the_reference_backend_passes_every_format_in_graphs(name: str) -> None:
    found = check_backend(TorchNativeFormatsBackend, device="cpu", cases=[case(name)], executions=["graph"])
    assert [each.status for each in found if each.case] == ["passed"]


@pytest.mark.parametrize(
    ("slug", "case", "execution", "check", "hint"),
    [
        ("row-scale-of-another-head", case("int8_per_token_head"), "eager", "matches-oracle", "are used for the next"),
        ("block-scale-off-by-one", case("nvfp4"), "eager", "matches-oracle", "for the tile before its own"),
        ("int4-without-sign", case("int4_group8"), "eager", "matches-oracle", ""),
        ("fp4-halves-swapped", case("fp4_mx_block16"), "eager", "matches-oracle", "halves of a byte"),
        ("head-scales-of-the-capture", case("fp8_per_head"), "graph", "replay-follows-batch", ""),
        ("head-scale-as-per-tensor", case("fp8_per_head"), "eager", "matches-oracle", "scale of KV head 0 is used"),
        ("row-scales-stored-two-at-once", case("int8_per_token_head_apart"), "eager", "writes-own-kv", ""),
        ("row-scale-of-zeros", case("fp8_per_token_head") + "-s1", "eager", "writes-own-kv", "a tile of zeros is NaN"),
        ("int8-truncated", case("int8_per_token_head"), "eager", "writes-own-kv", "truncated"),
        ("unused-scales-applied", UNUSED, "eager", "matches-oracle", "takes_unused_scales"),
        ("unused-scales-in-the-store", UNUSED, "eager", "writes-own-kv", "takes_unused_scales"),
    ],
)
def test_mistakes_about_formats_are_found_and_named(
    slug: str, case: str, execution: str, check: str, hint: str
) -> None:
    found = check_backend(entry_of(slug).backend, device="cpu", cases=[case], executions=[execution])  # type: ignore[list-item]
    finding = next(each.findings for each in found if each.case)[0]
    assert finding.check == check
    assert hint in finding.hint


@pytest.mark.parametrize(("kv_dtypes", "layers_differ"), [({"nvfp4"}, False), ({"same", "fp8_per_token_head"}, True)])
def test_a_backend_of_packed_rows_has_layers_of_other_heads_in_other_pools_alone(
    kv_dtypes: set[str], layers_differ: bool
) -> None:
    declared = TorchNativeFormatsBackend.capabilities.with_changes(
        kv_pool={"kv_dtypes": kv_dtypes}, heads={"heads_by_layer": True}
    )
    found = [each for each in generate(declared, ForwardMode.DECODE, "core") if each.layers.shapes]
    assert bool(found) is layers_differ
    assert {each.kv_dtype for each in found} <= {"same"}

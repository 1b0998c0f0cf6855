"""KV pools of every layout: where slots lie, what is filled and what is found changed, and own pools that are wrong."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from attn_testkit.contract import KV_LAYOUTS, AttentionLayer, KVLayer, KVPool, KVPoolSpec
from attn_testkit.watches.pool_watch import PoolWatch
from cuda_on_cpu import emulated_cuda

CUDA = torch.device("cuda")
NAMED = [name for name in KV_LAYOUTS if name != "custom"]
PAGES, PAGE, HEADS, WIDTH = 3, 4, 2, 8
MHA = tuple(AttentionLayer(i, 4, HEADS, WIDTH, WIDTH, 1.0) for i in (0, 1))
MLA = tuple(AttentionLayer(i, 4, 1, WIDTH, WIDTH - 2, 1.0, kv_lora_rank=WIDTH - 2) for i in (0, 1))
SHAPES = {
    "nhd": (2, PAGES, PAGE, HEADS, WIDTH),
    "hnd": (2, PAGES, HEADS, PAGE, WIDTH),
    "kv-in-block": (PAGES, 2, PAGE, HEADS, WIDTH),
    "side-by-side": (PAGES, PAGE, HEADS, 2, WIDTH),
    "side-by-side-hnd": (PAGES, HEADS, PAGE, 2, WIDTH),
    "layers-in-block": (PAGES, 2, PAGE, HEADS, WIDTH),
    "padded-pages": (2, PAGES, PAGE, HEADS, WIDTH),
}


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with torch.no_grad(), emulated_cuda():
        yield


def pieces_of_eight(spec: KVPoolSpec) -> Sequence[KVLayer]:
    """Keys in pieces, values with slots last, every tensor alone, and room behind the keys."""
    found = []
    for layer in spec.layers:
        heads, width, more = layer.tp_k_head_num, layer.head_dim, {"dtype": spec.dtype, "device": spec.device}
        key = torch.zeros(spec.pages + 1, heads, width // 2, spec.page_size, 2, **more)[:-1]  # type: ignore[call-overload]
        value = torch.zeros(spec.pages, heads, width, spec.page_size, **more)  # type: ignore[call-overload]
        found.append(KVLayer(key.permute(0, 3, 1, 2, 4), None if layer.is_mla else value.permute(0, 3, 1, 2)))
    return found


def pool_of(
    layout: str, dtype: torch.dtype = torch.bfloat16, layers: tuple[AttentionLayer, ...] = MHA, page: int = PAGE
) -> KVPool:
    return KVPool((PAGES - 1) * page, page, layers, dtype, CUDA, layout, pieces_of_eight)


def rows_of(pool: KVPool, slot: int) -> torch.Tensor:
    """[L, parts, H, D]: what the pool's own views show of a slot, by arithmetic on pages alone."""
    found = []
    for layer in pool.memory.values():
        parts = [part[slot // pool.page_size, slot % pool.page_size] for part in layer.parts]
        found.append(torch.stack([part.reshape(part.shape[0], -1) for part in parts]))
    return torch.stack(found)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().cpu().view(torch.uint8)


@pytest.mark.parametrize("layout", NAMED)
def test_the_buffer_of_a_layer_has_the_axes_of_its_layout_and_shares_memory_with_its_views(layout: str) -> None:
    pool = pool_of(layout)
    buffer, (key, value) = pool.get_layer_buffer(1), pool.get_kv_pages(1)
    assert buffer.shape == SHAPES[layout]
    assert key.shape == value.shape == (PAGES, PAGE, HEADS, WIDTH)
    key.fill_(1.0)
    value.fill_(2.0)
    assert buffer.float().sum() == 3 * key.numel(), "two views of all of the buffer, and of nothing twice"
    assert not any(view.any() for view in pool.get_kv_pages(0)), "of no other layer"


@pytest.mark.parametrize("layout", NAMED)
def test_there_is_a_view_by_slot_where_strides_give_one_and_an_answer_elsewhere(layout: str) -> None:
    assert pool_of(layout, page=1).get_key_buffer(0).shape == (PAGES, HEADS, WIDTH)
    pool = pool_of(layout)
    if layout in ("nhd", "side-by-side"):
        pool.get_value_buffer(0)[6] = 5.0
        assert pool.get_kv_pages(0)[1][1, 2].eq(5.0).all()
    else:
        with pytest.raises(ValueError, match=f"layout '{layout}' with 4-slot pages has no view .slots, heads, width."):
            pool.get_kv_buffer(0)


def test_of_a_latent_pool_values_are_a_part_of_the_keys() -> None:
    for layout in NAMED:
        key, value = pool_of(layout, layers=MLA).get_kv_pages(1)
        assert value.shape == (PAGES, PAGE, 1, WIDTH - 2)
        key[2, 1] = 3.0
        assert value[2, 1].eq(3.0).all()
        assert value.eq(3.0).sum() == WIDTH - 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("layout", [*NAMED, "custom"])
def test_rows_are_stored_where_their_slots_are(layout: str, dtype: torch.dtype) -> None:
    pool, loc = pool_of(layout, dtype), torch.tensor([9, 4, 3], device=CUDA)
    k = torch.arange(3 * HEADS * WIDTH, device=CUDA).view(3, HEADS, WIDTH).bfloat16() / 4
    pool.set_kv_buffer(MHA[1], loc, k, -k)
    for row, slot in enumerate(loc.tolist()):
        want = torch.stack([k[row], -k[row]]).to(dtype)
        assert torch.equal(bits(rows_of(pool, slot)[1].to(dtype)), bits(want))
    assert not rows_of(pool, 8).float().any()
    assert not any(rows_of(pool, slot)[0].float().any() for slot in range(12))


def filled(pool: KVPool) -> PoolWatch:
    """0 in slot 4, NaN in all other memory."""
    watch = PoolWatch(pool)
    held = np.zeros(sum(part.nbytes for layer in pool.memory.values() for part in layer.parts) // pool.num_slots)
    watch.fill("first", lambda: (np.array([4]), held.astype(np.uint8)), math.nan)
    return watch


def written(watch: PoolWatch, due: list[int], slots: int) -> tuple[list[int], torch.Tensor, list[int]]:
    look = watch.look(slots, torch.tensor(due, device=CUDA), len(due))
    assert [each.numel() for each, _ in look] == [size for _, size in look]
    looked = [each.cpu().numpy() for each, _ in look]
    found, held, shape = watch.written(np.array(due), looked)
    places = watch.outside(looked).tolist()
    return found.tolist(), torch.from_numpy(held).view(watch.bits).view(shape), places


def flip(number: torch.Tensor) -> None:
    """One bit of one number."""
    number.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[number.dtype.itemsize]).bitwise_xor_(1)


ONE_KV_HEAD = tuple(AttentionLayer(i, 4, 1, WIDTH, WIDTH, 1.0) for i in (0, 1))


@pytest.mark.parametrize("slots", [PAGE + 1, 3 * PAGE - 1, 3 * PAGE])
@pytest.mark.parametrize("part", [0, 1], ids=["keys", "values"])
def test_with_one_head_keys_and_values_may_count_slots_in_other_dimensions(part: int, slots: int) -> None:
    """vLLM's ROCm pools: keys are contiguous by slot then, and values [pages, D, page_size] are not."""

    def lay_out(spec: KVPoolSpec) -> Sequence[KVLayer]:
        found = []
        for _ in spec.layers:
            key = torch.zeros(spec.pages, 1, spec.page_size, WIDTH, dtype=spec.dtype, device=spec.device)
            value = torch.zeros(spec.pages, 1, WIDTH, spec.page_size, dtype=spec.dtype, device=spec.device)
            found.append(KVLayer(key.transpose(1, 2), value.permute(0, 3, 1, 2)))
        return found

    pool = KVPool((PAGES - 1) * PAGE, PAGE, ONE_KV_HEAD, torch.bfloat16, CUDA, "custom", lay_out)
    watch = filled(pool)
    assert written(watch, [0, 4], slots)[0] == []
    flip(pool.memory[1].parts[part][(slots - 1) // PAGE, (slots - 1) % PAGE, 0, WIDTH - 1])
    assert written(watch, [0, 4], slots)[0] == [slots - 1]


@pytest.mark.parametrize("layers", [MHA, MLA], ids=["mha", "mla"])
@pytest.mark.parametrize("page", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("layout", [*NAMED, "custom"])
def test_one_changed_bit_is_found_in_every_layer_part_and_slot_and_put_back(
    layout: str, dtype: torch.dtype, page: int, layers: tuple[AttentionLayer, ...]
) -> None:
    pool = pool_of(layout, dtype, layers, page)
    watch, count = filled(pool), pool.num_slots
    for layer, part in ((0, 0), (1, 0), (1, -1)):
        for slot in (1, page, count - 1):
            row = pool.memory[layer].parts[part][slot // page, slot % page]
            flip(row[(-1,) * row.dim()])
            for due in ([0, 4], [0, 4, count - 1]):
                slots, rows, outside = written(watch, due, count)
                assert (slots, outside) == ([slot], [])
                assert torch.equal(bits(rows[:, :, 0].view(dtype)), bits(rows_of(pool, slot).view(rows[:, :, 0].shape)))
            assert written(watch, [0], slot)[0] == [], "slots behind those that are asked for are not looked at"
            watch.fill("first", lambda: (np.zeros(0, np.int64), np.zeros(0, np.uint8)), math.nan)
            assert written(watch, [0], count)[0] == []
    assert not any(rows_of(pool, 4)[layer].float().any() for layer in (0, 1))
    assert rows_of(pool, 1).float().isnan().all()


@pytest.mark.parametrize("layout", [*NAMED, "custom"])
def test_memory_that_is_no_slots_is_filled_and_looked_at(layout: str) -> None:
    pool = pool_of(layout)
    watch = filled(pool)
    key = pool.memory[1].key
    whole = key.as_strided((key.untyped_storage().nbytes() // 2,), (1,), 0)
    slots = torch.zeros(whole.numel(), dtype=torch.bool)
    for part in (part for layer in pool.memory.values() for part in layer.parts):
        if part.untyped_storage().data_ptr() == key.untyped_storage().data_ptr():
            slots.as_strided(part.shape, part.stride(), part.storage_offset()).fill_(True)
    free = (~slots).nonzero().flatten().tolist()
    assert len(free) == {"padded-pages": 2 * 2 * PAGES * HEADS * WIDTH, "custom": HEADS * WIDTH * PAGE}.get(layout, 0)
    for number in free[:1] + free[-1:]:
        assert whole[number].isnan()
        whole[number] = 1.0
        assert written(watch, [0], pool.num_slots)[::2] == ([], [2 * number])
        whole[number] = torch.nan
        assert written(watch, [0], pool.num_slots)[::2] == ([], [])


def test_rows_are_moved_as_if_all_were_read_before_one_is_written() -> None:
    for layout in (*NAMED, "custom"):
        pool = pool_of(layout)
        watch = filled(pool)
        watch.store(
            torch.tensor([5, 6]), torch.arange(2 * 2 * 2 * HEADS * WIDTH).view(2, 2, 2, HEADS, WIDTH).bfloat16()
        )
        five, six = rows_of(pool, 5), rows_of(pool, 6)
        watch.move(torch.tensor([5, 6]), torch.tensor([6, 11]))
        assert torch.equal(rows_of(pool, 6), five)
        assert torch.equal(rows_of(pool, 11), six)
        watch.clear()
        assert [slot for slot in range(12) if not rows_of(pool, slot).isnan().all()] == [0, 1, 2, 3]
        assert not any(rows_of(pool, slot).any() for slot in range(4))


def halves(pages: int = PAGES, dtype: torch.dtype = torch.bfloat16) -> KVLayer:
    both = torch.zeros(2, pages, PAGE, HEADS, WIDTH, dtype=dtype, device=CUDA)
    return KVLayer(both[0], both[1], both)


def of_shared_memory() -> list[KVLayer]:
    one = halves()
    return [one, KVLayer(one.value, halves().value)]  # type: ignore[arg-type]


def shifted() -> list[KVLayer]:
    memory = torch.zeros(2 * PAGES * PAGE * HEADS * WIDTH, dtype=torch.bfloat16, device=CUDA)
    row, shape = HEADS * WIDTH, (PAGES, PAGE, HEADS, WIDTH)
    key, value = (memory.as_strided(shape, (PAGE * row, row, WIDTH, 1), first) for first in (0, row))
    return [halves(), KVLayer(key, value)]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: None, "must return a list of KVLayer, one per layer; it returned None"),
        (lambda: [halves().key] * 2, "must return a list of KVLayer"),
        (lambda: [halves()], "returned 1 KVLayers for 2 layers"),
        (lambda: [halves(), KVLayer(halves().key)], "layer 1 has no values"),
        (lambda: [KVLayer("k", halves().value), halves()], "the keys of layer 0 are not a plain torch.Tensor: 'k'"),  # type: ignore[arg-type]
        (
            lambda: [KVLayer(torch.nn.Parameter(halves().key), halves().value)] * 2,
            "the keys of layer 0 are not a plain",
        ),
        (lambda: [halves(dtype=torch.float16)] * 2, "are torch.float16 on cuda:0; the pool is torch.bfloat16"),
        (lambda: [halves(PAGES + 1)] * 2, "have shape [4, 4, 2, 8]; expected are dimensions that count 12 slots, "),
        (
            lambda: [halves(), KVLayer(halves().key, halves().key.transpose(1, 3))],
            "the values of layer 1 have shape [3, 8, 2, 4]; expected are dimensions that count 12 slots, then 2 heads "
            "of 8, such as [3, 4, 2, 8]: transpose the view",
        ),
        (lambda: [halves(), KVLayer(halves().key[:1].expand(PAGES, -1, -1, -1), halves().key)], "have a stride of 0"),
        (lambda: [halves(), KVLayer(halves().key, halves().value, halves().buffer)], "not in the layer's buffer"),
        (of_shared_memory, "two values of the pool share one address"),
        (shifted, "two values of the pool share one address"),
    ],
)  # fmt: skip
def test_an_own_layout_that_the_kit_cannot_find_slots_in_is_answered(made: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        KVPool(8, 4, MHA, torch.bfloat16, CUDA, "custom", lambda spec: made())  # type: ignore[operator]
    assert "lay_out_kv_pool" in str(refused.value)


def test_a_latent_pool_of_ones_own_has_keys_alone() -> None:
    with pytest.raises(ValueError, match="layer 0 is MLA: leave value out"):
        KVPool(
            8,
            4,
            MLA,
            torch.bfloat16,
            CUDA,
            "custom",
            lambda spec: [KVLayer(each.key, each.key) for each in pieces_of_eight(spec)],
        )


def test_a_layout_without_a_name_and_one_that_nobody_lays_out_are_answered() -> None:
    with pytest.raises(ValueError, match=re.escape("no KV layout is called 'dhn'; there are: nhd, hnd, kv-in-block")):
        pool_of("dhn")
    with pytest.raises(ValueError, match="the backend lays out a pool of layout 'custom': give its lay_out_kv_pool"):
        KVPool(8, 4, MHA, torch.bfloat16, CUDA, "custom")
    with pytest.raises(ValueError, match="gave no buffer for layer 1"):
        pool_of("custom").get_layer_buffer(1)
    with pytest.raises(ValueError, match=r"has no view .pages, page_size, heads, width."):
        pool_of("custom").get_kv_pages(0)

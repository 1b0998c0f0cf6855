"""Layers that compress keys: the formula, what a window needs, what is refused, and what a watch sees."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from attn_testkit.backends.torch_native_compressor import TorchNativeCompressorBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.cases.compression import Compression
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import Capabilities, Compressor, CompressorPool, ForwardMode
from attn_testkit.families.compressor.compress import Slip, compress
from attn_testkit.families.compressor.data import CompressorData, make_compressor_data, rope_table
from attn_testkit.families.compressor.family import SLIPS
from attn_testkit.families.compressor.memory import COMPRESSOR_POOL, CompressorWatch
from attn_testkit.steps.schedule import make_schedule

EXTEND = "extend-compressor1-d128-fp32-p64-k0.6.15-n21a21.3.2-shuffled-gauss-{}-b3prod"
WORDS = ["ratio4overlap", "ratio16"]


def data_of(word: str) -> CompressorData:
    schedule = make_schedule(parse_case(EXTEND.format(word)))
    return make_compressor_data(schedule, schedule.steps[0])


@pytest.mark.parametrize("word", WORDS)
def test_rows_are_those_of_the_formula_token_by_token(word: str) -> None:
    data = data_of(word)
    made, ratio = compress(data), data.compression.ratio
    for place, layer in enumerate(data.layers):
        assert layer.ape is not None
        assert layer.norm_weight is not None
        for token, position in enumerate(data.positions.tolist()):
            if (position + 1) % ratio:
                assert not made.ends[token]
                continue
            request, wide = int(data.row_request[token]), layer.head_dim
            terms = []
            for at in range(max(0, position + 1 - layer.width // wide * ratio), position + 1):
                own = at // ratio == position // ratio
                columns = slice(wide, 2 * wide) if own and data.compression.overlaps else slice(0, wide)
                kv, score = data.states[place, request, at].double()
                terms.append((kv[columns], score[columns]))
            weights = torch.softmax(torch.stack([score for _, score in terms]), 0)
            row = sum(weight * kv for weight, (kv, _) in zip(weights, terms, strict=True))
            assert isinstance(row, torch.Tensor)
            row = row / (row.square().mean() + layer.norm_eps).sqrt() * layer.norm_weight.double()
            table = rope_table(position + 1)[position // ratio * ratio].double()
            for pair in range(32):
                x, y = row[wide - 64 + 2 * pair].clone(), row[wide - 63 + 2 * pair].clone()
                row[wide - 64 + 2 * pair] = x * table[pair] - y * table[32 + pair]
                row[wide - 63 + 2 * pair] = y * table[pair] + x * table[32 + pair]
            assert torch.allclose(made.rows[place, token], row, rtol=0, atol=1e-12)
    assert int(made.ends.sum()) >= 2


@pytest.mark.parametrize("slip", SLIPS)
def test_each_named_mistake_moves_a_row_by_more_than_its_limit(slip: Slip) -> None:
    data = data_of("ratio4overlap")
    right, wrong = compress(data), compress(data, slip)
    moved = (wrong.rows - right.rows).abs() > 4 * right.limit
    assert moved[:, right.ends].any()


def test_every_position_has_a_rotation_of_its_own() -> None:
    table = rope_table(1024)
    assert len(table.unique(dim=0)) == len(table)
    assert (table[:, :32].square() + table[:, 32:].square() == 1).all()


@pytest.mark.parametrize(
    ("compression", "tokens", "first"),
    [
        (Compression(4, overlaps=True), 0, 0),
        (Compression(4, overlaps=True), 7, 0),
        (Compression(4, overlaps=True), 8, 4),
        (Compression(4), 7, 4),
        (Compression(4), 8, 8),
    ],
)
def test_states_are_needed_from_the_window_of_the_next_row_on(
    compression: Compression, tokens: int, first: int
) -> None:
    assert compression.first_needed(tokens) == first


def test_states_before_the_window_hold_nan_and_so_do_compressed_rows() -> None:
    schedule = make_schedule(parse_case(EXTEND.format("ratio4overlap")))
    step = schedule.steps[0]
    data = make_compressor_data(schedule, step)
    image = COMPRESSOR_POOL.image(schedule, step, data, False, after=False)[:, 0, :, 0]
    third, wide = step.requests[2], 2 * data.q.shape[-1]
    held = ~image[0, torch.from_numpy(third.slots[: third.prefix]), :wide].isnan().any(-1)
    assert held.nonzero().flatten().tolist() == list(range(8, 15))
    last = torch.arange(image.shape[1]) % 4 == 3
    assert image[:, last, wide:].isnan().all()


@pytest.mark.parametrize(("row", "slot"), [(19, 79), (16, 67)])
def test_a_compressed_row_belongs_to_the_slot_of_its_last_token(row: int, slot: int) -> None:
    layers = data_of("ratio4overlap").layers
    pool = CompressorPool(128, layers, torch.bfloat16, torch.device("cpu"), 64)
    watch = CompressorWatch(pool)
    nothing = np.empty(0, np.int64), np.empty(0, np.uint8)
    watch.fill((), lambda: nothing, math.nan)
    pool.get_rows(layers[1].layer_id)[row] = 1.0
    assert watch.written_since_clear().tolist() == [slot]


def test_every_array_case_of_decode_completes_a_group_with_its_first_row() -> None:
    found = list(generate(TorchNativeCompressorBackend.capabilities, ForwardMode.DECODE, "smoke"))
    complete = [
        case
        for case in found
        if case.compression and any((prefix + 1) % case.compression.ratio == 0 for prefix in case.prefixes)
    ]
    assert {(each.ratio, each.overlaps) for each in (case.compression for case in complete) if each} == {
        (4, True), (128, False)
    }  # fmt: skip
    assert len(complete) > len(found) // 2


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"page_sizes": {64}}, "contains 64, and compressor a ratio of 128: a page holds whole groups"),
        ({"families": {"compressor", "mha"}}, "layers that compress keys are compressor"),
        ({"compressor": {"rows": {"fp8_ds_mla_v4"}}}, "which has no row format for rows of 128 in fp16"),
        ({"compressor": None}, "need compressor=Compressor"),
        ({"eager": {"decode", "draft-extend"}}, "draft models have no compressor"),
    ],
)
def test_declarations_that_contradict_a_compressor_say_what_to_do(changes: dict[str, object], text: str) -> None:
    declared = TorchNativeCompressorBackend.capabilities
    records = {"page_sizes": "kv_pool", "families": "heads"}
    given = {records.get(name, name): {name: value} if name in records else value for name, value in changes.items()}
    with pytest.raises(ValueError, match="Capabilities") as caught:
        declared.with_changes(**given)
    assert text in str(caught.value)


def test_a_compressor_needs_a_ratio_above_one() -> None:
    with pytest.raises(ValueError, match="must be a Compressor, got 4; write"):
        Capabilities(eager={ForwardMode.DECODE}, compressor=4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="declares no ratio; write"):
        Compressor()
    with pytest.raises(ValueError, match="ratios must be whole numbers from 2 on"):
        Compressor(ratios={1})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (EXTEND.format("seed").replace("-seed", ""), "add a ratio, such as ratio4overlap"),
        (EXTEND.format("ratio3"), "ratio3 and pages of 64: a page holds whole groups"),
        (EXTEND.format("ratio4").replace("compressor1", "mha2"), "layers of mha compress nothing"),
        (EXTEND.format("ratio4").replace("compressor1", "compressor2"), "write compressor1"),
        (EXTEND.format("ratio4").replace("d128", "d32"), "64 numbers of a row are rotated"),
    ],
)
def test_ids_that_contradict_a_compressor_say_what_to_do(name: str, text: str) -> None:
    with pytest.raises(ValueError, match="compress") as caught:
        parse_case(name)
    assert text in str(caught.value)

"""Which plane of a wrong row is wrong, and what it holds: values, scales of K, scales of V."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from by_hand import DECODE, empty_pool, expected_zeros, observation, schedule_of, with_pool

from attn_testkit.checks.memory import writes_own_kv
from attn_testkit.checks.misplaced import NEW, OLD, UNOWNED, _by_a_factor, _only_some_planes
from attn_testkit.checks.wrong_planes import scales_held, wrong_planes
from attn_testkit.contract import ROW_FORMATS, AttentionLayer, PackedRows
from attn_testkit.steps.data import make_layers

PACKED_CASE = schedule_of("decode-gqa4x2-d64-bf16-p4-k9.6-shuffled-gauss-kvint8pertokenhead-b2prod")
FP8_CASE = schedule_of("decode-gqa2x2-d32-fp16-p4-k9.6-shuffled-gauss-kvfp8e4m3-b2prod")
PLAIN = schedule_of(DECODE)


def packed_of(name: str) -> PackedRows:
    layer: AttentionLayer = make_layers(PACKED_CASE.case)[0]
    return ROW_FORMATS[name].of(layer)


INT8 = packed_of("int8_per_token_head")


def keys(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()


def with_scales(rows: torch.Tensor, change: Any) -> torch.Tensor:
    held = rows.clone()
    plane = INT8.planes(held)["scales"]
    plane.copy_(change(plane.clone()))
    return held


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (torch.ones_like, "all of them are 1, as if they were reset"),
        (torch.zeros_like, "all of them are 0, as if they were reset"),
        (lambda scales: torch.full_like(scales, 0.25), "all of them are 0.25"),
        (lambda scales: torch.full_like(scales.view(torch.uint8), 255).view(torch.float32), "they were not stored"),
        (lambda scales: scales.roll(1, 0), "they are those of other KV heads"),
        (lambda scales: scales * 3, "they are 3 times the right ones"),
        (lambda scales: scales * torch.tensor([[3.0], [5.0]]), ""),
    ],
)
def test_what_wrong_scales_hold_is_named(change: Any, said: str) -> None:
    want = INT8.pack(keys(2))
    held = scales_held(INT8, INT8.scale_planes[0], with_scales(want, change), want)
    assert said in held
    assert bool(held) == bool(said)


def test_scales_of_another_row_are_named_and_the_numbers_are_called_right() -> None:
    want, other = INT8.pack(keys(2)), INT8.pack(keys(2, seed=8))
    held = with_scales(want, lambda _: INT8.planes(other)["scales"])
    assert "its values are right, but its scales are wrong: they are those of V instead of K" in wrong_planes(
        INT8, held, want, [("V instead of K", other)]
    )
    assert wrong_planes(INT8, held, want).endswith("or are those of another row, head or step")


def packed_pool(part: int, change: Any, slot_owner: int = NEW) -> str:
    """Text on a pool of two slots whose slot 0 has changed scales in a part."""
    want = INT8.pack(keys(1, 2, 2, 2))
    got = want.clone()
    got[0, part, 0] = with_scales(want[0, part, 0], change)
    seen: Any = SimpleNamespace(
        schedule=PACKED_CASE,
        step=PACKED_CASE.steps[0],
        inputs=SimpleNamespace(data=SimpleNamespace(row_format=INT8)),
        pool=torch.empty(1, 2, 2 + PACKED_CASE.case.page_size, 1, dtype=torch.uint8),
    )
    owner = torch.tensor([slot_owner, UNOWNED])
    return _only_some_planes(seen, got, want, owner, (0, part, 0))


@pytest.mark.parametrize(("part", "name"), [(0, "K"), (1, "V")])
@pytest.mark.parametrize("owner", [NEW, OLD])
def test_the_plane_that_changed_is_named_with_those_that_did_not(part: int, name: str, owner: int) -> None:
    text = packed_pool(part, torch.ones_like, owner)
    assert text.startswith(f"only {name} scales changed, and ")
    assert f"{name} scales" not in text.split(" changed, and ")[1].split(" did not")[0]
    assert text.endswith("all of them are 1, as if they were reset")
    assert packed_pool(part, lambda scales: scales, owner) == "", "nothing changed"


def stored_hint(*rows: tuple[int, int, float]) -> str:
    """(part, slot, value) of a step that must store nothing."""
    expected, step = expected_zeros(PLAIN), replace(PLAIN.steps[0], stored=True)
    after, held = empty_pool(PLAIN), empty_pool(PLAIN)
    for part, slot, value in rows:
        held[0, part, slot] = value
    (finding,) = writes_own_kv(with_pool(observation(PLAIN, expected, step=step), expected, after, held), PLAIN.case)
    return finding.hint


def test_a_step_that_must_store_nothing_is_told_what_it_changed() -> None:
    slot = int(PLAIN.steps[0].requests[0].slots[-1])
    one = stored_hint((1, slot, 5.0))
    assert one.startswith("only V changed, and K did not. save_kv_cache was False")
    assert stored_hint((0, slot, 5.0), (1, slot, 5.0)).startswith("save_kv_cache was False, so k and v must not")


def factor_text(change: Any, values: torch.Tensor | None = None) -> str:
    fp8 = torch.float8_e4m3fn
    values = torch.linspace(0.25, 4.0, 32).repeat(2, 1) if values is None else values
    seen: Any = SimpleNamespace(schedule=FP8_CASE, inputs=None, pool=torch.empty(1, dtype=fp8))
    held, want = (each.to(fp8).view(torch.uint8) for each in (change(values.clone()), values))
    return _by_a_factor(seen, held, want, 0, 0)


def scaled(*factors: float) -> Any:
    return lambda values: values * torch.tensor(factors)[:, None]


def test_heads_that_are_right_but_for_a_scale_are_no_heads_that_were_left_out() -> None:
    own = make_layers(FP8_CASE.case)[0].k_scale
    assert "it holds K of KV head 1 of 2 times 2, else the right row: only a scale is wrong" in factor_text(
        scaled(1, 2)
    )
    assert "it holds K times 2, 4 by head, else" in factor_text(scaled(2, 4))
    assert f"times {own:.3g}, which is k_scale" in factor_text(scaled(1, own))
    other = torch.randn(32, generator=torch.Generator().manual_seed(1))
    assert factor_text(lambda values: torch.stack((values[0], other))) == "", "another row"
    assert factor_text(lambda values: torch.stack((values[0], 0 * values[1]))) == "", "a head that was not stored"
    assert factor_text(lambda values: torch.stack((values[0], -values[1]))) == "", "no scale is negative"
    assert factor_text(scaled(1, 2), torch.ones(2, 32)) == "", "equal numbers show no factor"

"""Every two declared values meet in a decode: of heads, head dims, dtypes, page sizes, pool layouts and options."""

from __future__ import annotations

from itertools import combinations

from as_made import as_made
from later import came_later

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import Case
from attn_testkit.contract import Capabilities, ForwardMode

WIDE = TorchNativeBackend.capabilities.with_changes(
    families={"mha", "gqa"}, gqa_ratios={1, 2, 3, 4, 16}, dtypes={"fp16", "bf16"}, kv_dtypes={"same", "fp8_e4m3"},
    head_dims={64, 128, 256, 512}, page_sizes={1, 16, 256}, kv_layouts={"nhd", "hnd"},
)  # fmt: skip


def found(declared: Capabilities, mode: ForwardMode = ForwardMode.DECODE, tier: str = "core") -> list[Case]:
    return [case for case in as_made(declared, mode, tier) if case.prefixes == (530, 33, 1)]


def values(case: Case) -> tuple[object, ...]:
    options = (case.window, case.logit_cap, case.sinks)
    return (case.heads, case.head_dim, case.dtype, case.kv_dtype, case.page_size, case.kv_layout, options)


def test_each_two_values_of_two_capabilities_meet() -> None:
    rows = [values(case) for case in found(WIDE)]
    for one, other in combinations(range(7), 2):
        met = {(row[one], row[other]) for row in rows}
        assert len(met) == len({row[one] for row in rows}) * len({row[other] for row in rows})
    assert [len(set(column)) for column in zip(*rows, strict=True)] == [3, 3, 2, 2, 3, 2, 2]
    assert {(row[-1]) for row in rows} == {(-1, 0.0, False), (40, 1.5, True)}
    assert {head.q_heads // head.kv_heads for head, *_ in rows} == {1, 2, 16}  # type: ignore[attr-defined]


def test_mla_has_an_array_of_its_own() -> None:
    declared = WIDE.with_changes(
        families={"gqa", "mla"}, gqa_ratios={2, 16, 32, 128}, head_dims={128, 512}, mla_rope_dims={64}
    )
    rows = [values(case) for case in found(declared) if case.heads.layout.values_in_keys]
    assert {(head.q_heads, kv) for head, _, _, kv, *_ in rows} == {  # type: ignore[attr-defined]
        (count, kv) for count in (16, 32, 128) for kv in ("same", "fp8_e4m3")
    }
    assert {dim for _, dim, *_ in rows} == {128, 512}
    assert {case.rope_dim for case in found(declared)} == {0, 64}


def test_other_modes_and_smoke_have_none_and_these_came_later() -> None:
    assert not found(WIDE, ForwardMode.TARGET_VERIFY)
    assert not found(WIDE, tier="smoke")
    assert all(came_later(case) for case in found(WIDE))


def test_what_is_not_declared_is_not_asked_for() -> None:
    minimal = WIDE.with_changes(windows=(), logit_cap=False, sinks=False)
    assert {values(case)[-1] for case in found(minimal)} == {(-1, 0.0, False)}
    assert not found(WIDE.with_changes(families={"mqa"}))
    assert not found(WIDE.with_changes(max_context_len=512))

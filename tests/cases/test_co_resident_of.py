"""The case of the instance that runs beside another in one process."""

from __future__ import annotations

import pytest

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.backends.torch_native_state import TorchNativeStateBackend
from attn_testkit.cases.case import Case, parse_case
from attn_testkit.cases.co_residents import co_resident_of
from attn_testkit.contract import Capabilities

ALL = TorchNativeBackend.capabilities
CASE = parse_case("decode-gqa2x2-d64-bf16-p16-k9.37-shuffled-gauss-b2prod-multi_mode")
MLA = parse_case("decode-mla2-d512r64-bf16-p64-k9.37-shuffled-gauss-b2prod-multi_mode")


@pytest.mark.parametrize("own", [CASE, MLA])
def test_it_has_other_heads_and_other_pages_and_all_else_alike(own: Case) -> None:
    found = co_resident_of(ALL, own)
    assert found.heads.q_heads != own.heads.q_heads
    assert (found.heads.family == "mla") == (own.heads.family == "mla")
    assert found.page_size == 1
    assert (found.mode, found.dtype, found.prefixes, found.multi_mode) == (own.mode, own.dtype, own.prefixes, True)


@pytest.mark.parametrize(
    ("changes", "page", "q_heads"),
    [
        ({"kv_pool": {"page_sizes": {16}}}, 16, 2),
        ({"kv_pool": {"page_sizes": {16, 128, 256}}}, 128, 2),
        ({"kv_pool": {"page_sizes": {16, 64, 128}}}, 64, 2),
        ({"heads": {"families": {"gqa"}, "gqa_ratios": {2}}}, 1, 4),
    ],
)
def test_what_is_not_declared_it_has_not(changes: dict[str, object], page: int, q_heads: int) -> None:
    declared: Capabilities = ALL.with_changes(**changes)
    found = co_resident_of(declared, CASE)
    assert (found.page_size, found.heads.q_heads) == (page, q_heads)


def test_next_to_layers_without_a_recurrence_are_such_layers() -> None:
    """Their cases have keys of width 0, which other kinds of states do not have."""
    case = parse_case("target-verify-conv2-d32-fp16-p16-k33.5.12-chain4-shuffled-mild_decay-k0w4s32-b4prod-multi_mode")
    other = co_resident_of(TorchNativeStateBackend.capabilities, case)
    assert other.heads.family == "conv"

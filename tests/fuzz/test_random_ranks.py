"""Random cases of a backend that can be a rank: none has what ranks exclude, and some have ranks."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from attn_testkit.backends.torch_native_pcp import TorchNativePcpBackend
from attn_testkit.backends.torch_native_ranks import TorchNativeRanksBackend
from attn_testkit.backends.torch_native_sparse_ranks import TorchNativeSparseRanksBackend
from attn_testkit.backends.torch_native_state_pcp import TorchNativeStatePcpBackend
from attn_testkit.cases.case import Case, parse_case
from attn_testkit.cases.features.kv_splits import has_own_pools
from attn_testkit.contract import AttentionBackend, ForwardMode
from attn_testkit.fuzz.strategies import random_cases


@pytest.mark.parametrize("backend", [TorchNativeRanksBackend, TorchNativeSparseRanksBackend])
@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY])
def test_random_cases_of_ranks_can_be_read_again(mode: ForwardMode, backend: type[AttentionBackend]) -> None:
    seen: list[bool] = []

    @settings(max_examples=60, database=None, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(random_cases(backend.capabilities, mode))
    def read(case: Case) -> None:
        assert parse_case(case.id) == case
        seen.append(has_own_pools(case))

    read()
    assert any(seen)


@pytest.mark.parametrize("backend", [TorchNativePcpBackend, TorchNativeStatePcpBackend])
def test_random_prompts_whose_rows_are_dealt_can_be_read_again(backend: type[AttentionBackend]) -> None:
    seen: list[bool] = []

    @settings(max_examples=60, database=None, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(random_cases(backend.capabilities, ForwardMode.EXTEND))
    def read(case: Case) -> None:
        assert parse_case(case.id) == case
        seen.append(bool(case.row_ranks))

    read()
    assert any(seen)

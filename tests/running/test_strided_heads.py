"""Whether heads of new k and v are strided is declared: what is given without the capability, and what is said with
it."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from in_process import check_backend

from attn_testkit.cases.case import Case, parse_case
from attn_testkit.contract import Capabilities
from attn_testkit.examples import MinimalBackend

EXTEND = "extend-gqa2x2-d64-bf16-p16-k3.21.5-n4a1.3.4-shuffled-gauss-b3prod"
DECODE = "decode-gqa2x2-d64-bf16-p16-k3.21.5-shuffled-gauss-b3prod"
CAPABILITIES: Capabilities = MinimalBackend.capabilities.with_changes(server={"takes_strided_heads": True})
SEEDS = [parse_case(EXTEND).with_seed(seed) for seed in range(16)]
STRIDED = next(case for case in SEEDS if case.strided_heads)
PLAIN = next(case for case in SEEDS if not case.strided_heads)


class Spy(MinimalBackend):
    """Healthy; remembers the strides of heads and rows of k and v, beside their widths."""

    seen: ClassVar[set[tuple[bool, bool]]] = set()

    def forward(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True) -> torch.Tensor:
        for rows in (k, v):
            in_line = rows.stride(1) == rows.shape[2]
            self.seen.add((in_line, rows.stride(0) == rows.shape[1] * rows.shape[2]))
        return super().forward(q, k, v, layer, batch, save_kv_cache)


class DeclaringSpy(Spy):
    capabilities = CAPABILITIES
    seen: ClassVar[set[tuple[bool, bool]]] = set()


def _in_line(rows: torch.Tensor) -> torch.Tensor:
    """Rows as a cache writer reads them that addresses token * stride + head * head_dim."""
    return rows.as_strided(rows.shape, (rows.stride(0), rows.shape[2], 1))


class RowsOfAProjection(MinimalBackend):
    """Healthy: its cache writer is as vLLM's in Triton, right for what the layers of servers give."""

    def forward(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True) -> torch.Tensor:
        return super().forward(q, _in_line(k), _in_line(v), layer, batch, save_kv_cache)


class DeclaresMore(RowsOfAProjection):
    """The same writer, and strided heads declared."""

    capabilities = CAPABILITIES


class HonoursStrides(MinimalBackend):
    capabilities = CAPABILITIES


class Refuses(HonoursStrides):
    def forward(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True) -> torch.Tensor:
        k.view(len(k), -1)
        return super().forward(q, k, v, layer, batch, save_kv_cache)


class WrongNumbers(HonoursStrides):
    """Stores what it should, and attends otherwise."""

    def forward(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True) -> torch.Tensor:
        out = super().forward(q, k, v, layer, batch, save_kv_cache)
        return out if k.stride(1) == k.shape[2] else out * 2


class WrongWhatever(HonoursStrides):
    def forward(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True) -> torch.Tensor:
        return super().forward(q, k, v, layer, batch, save_kv_cache) * 2


def findings(backend: type[MinimalBackend], case: Case, execution: str = "eager") -> dict[str, str]:
    """Check -> hint of each finding."""
    (result,) = [r for r in check_backend(backend, device="cpu", executions=[execution], cases=[case.id]) if r.case]
    return {finding.check: finding.hint for finding in result.findings}


@pytest.mark.parametrize("execution", ["eager", "graph"])
def test_without_the_capability_heads_lie_one_behind_the_other_and_rows_may_be_strided(execution: str) -> None:
    Spy.seen.clear()
    for case in (STRIDED, PLAIN):
        assert findings(Spy, case, execution) == {}
    assert {in_line for in_line, _ in Spy.seen} == {True}
    assert (True, False) in Spy.seen, "rows that are a part of q, k and v of one projection"


def test_with_the_capability_heads_are_strided_in_extend_where_the_case_says_so() -> None:
    assert {case.id: case.strided_heads for case in SEEDS} != dict.fromkeys((case.id for case in SEEDS), True)
    for case, in_line in ((STRIDED, {False}), (PLAIN, {True}), (parse_case(DECODE), {True})):
        DeclaringSpy.seen.clear()
        assert findings(DeclaringSpy, case) == {}
        assert {heads for heads, _ in DeclaringSpy.seen} == in_line
    assert not parse_case(DECODE).strided_heads


@pytest.mark.parametrize("execution", ["eager", "graph"])
def test_a_writer_of_packed_heads_passes_unless_it_declares_strided_ones(execution: str) -> None:
    assert findings(RowsOfAProjection, STRIDED, execution) == {}
    found = findings(DeclaresMore, STRIDED, execution)
    assert "declare takes_strided_heads" in found["writes-own-kv"]
    assert "token * stride(0) + h * head_dim" in found["writes-own-kv"]
    assert findings(HonoursStrides, STRIDED, execution) == {}


def test_who_refuses_strided_heads_or_attends_them_wrongly_is_reported_of_the_capability() -> None:
    (refused,) = findings(Refuses, STRIDED).items()
    assert refused[0] == "completes"
    assert refused[1].startswith("the step passes if the heads of k and v are contiguous: in this case they are")
    (wrong,) = findings(WrongNumbers, STRIDED).items()
    assert wrong[0] == "matches-oracle"
    assert wrong[1].startswith("the step passes if the heads of k and v are contiguous")
    assert "declare takes_strided_heads" in wrong[1]


def test_another_cause_is_not_put_down_to_strided_heads() -> None:
    for case in (STRIDED, PLAIN):
        (hint,) = findings(WrongWhatever, case).values()
        assert "takes_strided_heads" not in hint
    assert findings(DeclaresMore, PLAIN) == findings(WrongNumbers, PLAIN) == {}

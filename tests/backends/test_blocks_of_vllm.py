"""A backend that lays its KV pool out itself, and what is said of one that does it wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from in_process import check_backend

import attn_testkit.examples.blocks_of_vllm as example
from attn_testkit import Results
from attn_testkit.contract import KVLayer, KVPoolSpec
from attn_testkit.examples import MinimalBackend
from attn_testkit.examples.blocks_of_vllm import BlocksOfVllmBackend


def test_the_example_is_as_long_as_its_page_says() -> None:
    lines = len(Path(example.__file__).read_text().splitlines())
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "kv-layouts.md").read_text()
    assert f"in {lines} lines" in page


@pytest.mark.parametrize(("mode", "execution"), [("decode", "graph"), ("extend", "eager"), ("draft-decode", "eager")])
def test_a_backend_over_a_pool_of_its_own_conforms(mode: str, execution: str) -> None:
    found = check_backend(BlocksOfVllmBackend, device="cpu", modes=[mode], executions=[execution], tier="smoke")
    assert found.ok, found


class Forgets(MinimalBackend):
    capabilities = MinimalBackend.capabilities.with_changes(kv_pool={"kv_layouts": {"custom"}})


class Breaks(Forgets):
    @classmethod
    def lay_out_kv_pool(cls, spec: KVPoolSpec) -> Sequence[KVLayer]:
        raise RuntimeError("no room")


class Exits(Forgets):
    @classmethod
    def lay_out_kv_pool(cls, spec: KVPoolSpec) -> Sequence[KVLayer]:
        raise SystemExit(0)


class SwapsKAndV(BlocksOfVllmBackend):
    @classmethod
    def lay_out_kv_pool(cls, spec: KVPoolSpec) -> Sequence[KVLayer]:
        right = super().lay_out_kv_pool(spec)
        return [KVLayer(layer.value, layer.key, layer.buffer) for layer in right]  # type: ignore[arg-type]


def first_failure(backend: type) -> tuple[str, str]:
    found: Results = check_backend(backend, device="cpu", modes=["decode"], executions=["eager"], tier="smoke")
    assert not found.ok
    (finding, *_) = found.failures[0].findings
    return finding.check, f"{finding.headline}\n{finding.where}"


@pytest.mark.parametrize(
    ("backend", "check", "text"),
    [
        (Forgets, "completes", "declares kv_layouts={'custom'}, so it must define lay_out_kv_pool"),
        (Breaks, "completes", "lay_out_kv_pool raised RuntimeError: no room"),
        (Breaks, "completes", "test_blocks_of_vllm.py"),
        (Exits, "completes", "lay_out_kv_pool raised SystemExit"),
        (SwapsKAndV, "writes-own-kv", "a slot of this step's tokens does not hold their K and V"),
    ],
)
def test_what_a_layout_of_ones_own_breaks_is_the_backends(backend: type, check: str, text: str) -> None:
    found = first_failure(backend)
    assert found[0] == check
    assert text in found[1]

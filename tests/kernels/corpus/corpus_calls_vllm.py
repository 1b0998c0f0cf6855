"""Calls of vLLM's own code: cases of its attention backends."""

from __future__ import annotations

from collections.abc import Callable

from corpus_bridges import cases_of


def calls() -> list[tuple[str, Callable[[], None]]]:
    """Cases of the backends of vLLM whose kernels are Triton's."""
    return cases_of(("vllm:triton", "vllm:triton_2d", "vllm:triton_fp8", "vllm:triton_mla"))

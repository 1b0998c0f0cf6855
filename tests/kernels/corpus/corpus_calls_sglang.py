"""Calls of SGLang's own code: cases of its attention backends."""

from __future__ import annotations

from collections.abc import Callable

from corpus_bridges import cases_of


def calls() -> list[tuple[str, Callable[[], None]]]:
    """Cases of the backends of SGLang whose kernels are Triton's."""
    return cases_of(("sglang:triton", "sglang:triton_mla", "sglang:triton_draft"))

"""The numbers that the bridge gives vLLM, each in the unit in which vLLM counts it.

vLLM accepts a number in a wrong unit silently. For example, buckets in requests, which vLLM compares with tokens, left
graphs of extend to a heuristic of FlashAttention 3 that does not work in a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from attn_testkit.contract import BackendContext, ForwardMode

_LARGEST_CAPTURE = 512
"""The default of ``max_cudagraph_capture_size``, in tokens."""


@dataclass(frozen=True)
class Number:
    """One number of vLLM's configuration."""

    name: str
    """Name of its field."""
    unit: Literal["tokens", "requests", "tokens of a request", "tokens of a block"]
    value: Callable[[BackendContext], int]
    place: str
    """``file:Class.function`` under ``vllm``, where it is declared in this unit, or compared with another number of
    this unit."""


def width_of(context: BackendContext, mode: ForwardMode) -> int:
    """Most rows of a request in a mode; in all modes except the ragged ones, every request has as many."""
    if mode is ForwardMode.EXTEND:
        return context.max_extend_tokens
    if mode is ForwardMode.DRAFT_EXTEND:
        return context.speculative_num_steps + 1
    return context.num_draft_tokens if mode.is_speculative() else 1


def drafts(context: BackendContext) -> int:
    """Draft tokens of a request, to which the target adds one."""
    return max([width_of(context, mode) for mode in context.modes if mode.is_speculative()] or [1]) - 1


def capture_sizes(context: BackendContext) -> tuple[int, ...]:
    """``cudagraph_capture_sizes``, in tokens. Without graphs vLLM's default list up to the largest batch."""
    if context.capture_tokens:
        return context.capture_tokens
    usual = (1, 2, 4, *range(8, 256, 8), *range(256, _LARGEST_CAPTURE + 1, 16))
    return tuple(size for size in usual if size <= max(context.max_num_tokens, 1))


_SCHEDULER = "config/scheduler.py:SchedulerConfig"
NUMBERS: tuple[Number, ...] = (
    Number("max_num_seqs", "requests", lambda context: context.max_bs, _SCHEDULER),
    Number("max_num_batched_tokens", "tokens", lambda context: max(context.max_num_tokens, context.max_bs), _SCHEDULER),
    Number("max_model_len", "tokens of a request", lambda context: context.max_context_len, _SCHEDULER),
    Number("block_size", "tokens of a block", lambda context: context.page_size, "config/cache.py:CacheConfig"),
    Number(
        "max_cudagraph_capture_size",
        "tokens",
        lambda context: capture_sizes(context)[-1],
        "v1/attention/backends/flash_attn.py:FlashAttentionMetadataBuilder.build",
    ),
    Number("num_speculative_tokens", "tokens of a request", drafts, "config/speculative.py:SpeculativeConfig"),
)
"""Every number that ``make_config`` takes from a context; those of layers are dimensions."""

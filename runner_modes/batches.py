"""Forward batches: the eager kind, the static kind of a graph, and the view that a backend gets at a replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch

from attn_testkit.cases.data import HIDDEN
from attn_testkit.contract import ForwardBatch, ForwardMode, SpecInput

from .harness import LoadedStep, ServerHarness
from .uploads import upload

__all__ = ["ReplayView", "StaticInputs", "eager_batch", "make_static_inputs", "seq_lens_of"]

ReplayView = SimpleNamespace
"""What a backend gets at a replay: fewer attributes than a ``ForwardBatch``, whose docstring lists them."""


def seq_lens_of(mode: ForwardMode, loaded: LoadedStep) -> list[int]:
    """``seq_lens`` of the live requests, in tokens, by the convention of each mode."""
    if mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_DECODE):
        return [r.prefix for r in loaded.step.requests]
    return loaded.step.lens


def eager_batch(
    harness: ServerHarness,
    loaded: LoadedStep,
    mode: ForwardMode,
    spec_info: SpecInput | None,
    extends: Mapping[str, Any],
) -> ForwardBatch:
    """The live batch, unpadded, on the device: [T] and [bs] int64, lengths on the host for those who need them.

    ``spec_info`` and ``extends``: what the mode adds, or says otherwise.
    """
    step, data, device = loaded.step, loaded.data, harness.device
    lens = torch.tensor(seq_lens_of(mode, loaded), dtype=torch.int64)
    mirrors = harness.capabilities.needs_cpu_seq_lens
    fields: dict[str, Any] = {
        "forward_mode": mode,
        "batch_size": step.bs,
        "input_ids": upload(torch.arange(step.tokens, dtype=torch.int64), device),
        "req_pool_indices": upload(torch.tensor([r.pool_row for r in step.requests], dtype=torch.int64), device),
        "seq_lens": upload(lens, device),
        "out_cache_loc": upload(data.out_cache_loc, device),
        "positions": upload(data.positions, device),
        "seq_lens_cpu": lens if mirrors else None,
        "seq_lens_sum": int(lens.sum()) if mirrors else None,
        "spec_info": spec_info,
    }
    return ForwardBatch(**{**fields, **extends})


@dataclass(frozen=True)
class StaticInputs:
    """The device buffers that every graph of one runner reads. Heads are live, tails are padding."""

    input_ids: torch.Tensor
    """[max_bs * N] int64: rows of the model's table."""
    positions: torch.Tensor
    """[max_bs * N] int64."""
    out_cache_loc: torch.Tensor
    """[max_bs * N] int64: KV slots; 0 wherever a row is padding."""
    req_pool_indices: torch.Tensor
    """[max_bs] int64: rows of ``req_to_token``."""
    seq_lens: torch.Tensor
    """[max_bs] int64; the fill value wherever a request is padding."""
    num_accept_tokens: torch.Tensor
    """[max_bs] int32; N wherever a request is padding."""
    num_correct_drafts: torch.Tensor
    """[max_bs] int32: accepted tokens less one."""
    extend_seq_lens: torch.Tensor
    """[max_bs] int32: rows of the step; N wherever a request is padding, in extend 0."""
    extend_prefix_lens: torch.Tensor
    """[max_bs] int32, extend: keys before the step."""
    extend_start_loc: torch.Tensor
    """[max_bs] int32, extend: first row of each request."""
    select_index: torch.Tensor
    """[max_bs] int64: flat row of each request's last accepted token."""
    hidden_states: torch.Tensor
    """[max_bs * N, hidden] float32."""
    draft_slots: torch.Tensor
    """[max_bs * K * S] int64, draft-decode: slots of all forwards; 0 wherever a request is padding."""
    custom_mask: torch.Tensor
    """Flat bool: the runner's own mask buffer, named in the captured batch of a backend that has none. Nothing updates
    it."""
    seq_lens_cpu: torch.Tensor
    """[max_bs] int64, host."""


def make_static_inputs(harness: ServerHarness, width: int, max_bs: int, fill: int) -> StaticInputs:
    """As a server has them before it captures: lengths at ``fill``, accept counts at ``width``, tokens and rows zero.

    ``width``: N, rows a request.
    """
    device, tokens = harness.device, max_bs * width

    def zeros(count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device=device)

    def full(count: int, value: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((count,), value, dtype=dtype, device=device)

    mask_size = max_bs * width * (fill + width) if harness.context.topk else 0
    return StaticInputs(
        input_ids=zeros(tokens, torch.int64),
        positions=zeros(tokens, torch.int64),
        out_cache_loc=zeros(tokens, torch.int64),
        req_pool_indices=zeros(max_bs, torch.int64),
        seq_lens=full(max_bs, fill, torch.int64),
        num_accept_tokens=full(max_bs, width, torch.int32),
        num_correct_drafts=full(max_bs, width - 1, torch.int32),
        extend_seq_lens=full(max_bs, width, torch.int32),
        extend_prefix_lens=zeros(max_bs, torch.int32),
        extend_start_loc=zeros(max_bs, torch.int32),
        select_index=torch.arange(1, max_bs + 1, device=device) * width - 1,
        hidden_states=torch.zeros(tokens, HIDDEN, device=device),
        draft_slots=zeros(max_bs * harness.context.draft_branches * harness.context.speculative_num_steps, torch.int64),
        custom_mask=torch.ones(mask_size, dtype=torch.bool, device=device),
        seq_lens_cpu=torch.full((max_bs,), fill, dtype=torch.int64),
    )


def captured_batch(
    harness: ServerHarness,
    static: StaticInputs,
    mode: ForwardMode,
    bs: int,
    width: int,
    fill: int,
    spec: SpecInput | None,
    extends: Mapping[str, Any],
) -> ForwardBatch:
    """The dummy batch of a bucket of ``bs`` requests of ``width`` rows: slices of the static buffers, all padding.

    ``extends``: what the mode says otherwise, or adds.
    """
    tokens, mirrors = bs * width, harness.capabilities.needs_cpu_seq_lens
    fields: dict[str, Any] = {
        "forward_mode": mode,
        "batch_size": bs,
        "input_ids": static.input_ids[:tokens],
        "req_pool_indices": static.req_pool_indices[:bs],
        "seq_lens": static.seq_lens[:bs],
        "out_cache_loc": static.out_cache_loc[:tokens],
        "positions": static.positions[:tokens],
        "seq_lens_cpu": static.seq_lens_cpu[:bs] if mirrors else None,
        "seq_lens_sum": bs * fill if mirrors else None,
        "spec_info": spec,
    }
    return ForwardBatch(**{**fields, **extends})


def replay_view(
    harness: ServerHarness,
    loaded: LoadedStep,
    static: StaticInputs,
    mode: ForwardMode,
    bs: int,
    width: int,
    fill: int,
    spec: SpecInput | None,
    extends: Mapping[str, Any],
) -> ForwardBatch:
    """As production servers give it: a namespace, with attributes missing and some buffers longer than the batch.

    ``bs``: the bucket's requests, padded ones included; ``width``: N; ``fill``: ``seq_lens`` of padded requests;
    ``extends``: what the mode adds, or says otherwise.
    """
    live, mirrors = loaded.step.bs, harness.capabilities.needs_cpu_seq_lens
    drafts = mode.is_draft_extend(include_v2=True)
    upto = None if drafts else bs
    view = SimpleNamespace(
        forward_mode=mode,
        batch_size=bs,
        input_ids=static.input_ids[: loaded.step.tokens] if drafts else static.input_ids[: bs * width],
        req_pool_indices=static.req_pool_indices[:upto],
        seq_lens=static.seq_lens[:upto],
        seq_lens_cpu=static.seq_lens_cpu[:upto] if mirrors else None,
        seq_lens_sum=sum(seq_lens_of(mode, loaded)) + (bs - live) * fill if mirrors else None,
        out_cache_loc=static.out_cache_loc[: bs * width if extends else loaded.step.tokens],
        spec_info=spec,
    )
    if not drafts:
        view.positions = static.positions[: bs * width]
        view.num_padding = bs - live
        view.actual_forward_mode = mode
    vars(view).update(extends)
    return cast(ForwardBatch, view)

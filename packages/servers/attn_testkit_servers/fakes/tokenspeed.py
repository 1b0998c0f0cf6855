"""Fake of ``tokenspeed_mla_decode``: the package's own Python over a compiled kernel that computes in torch.

Checks, tiles, the number of splits and the slice of the workspace are the package's; the kernel that its compiler would
make is replaced.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from attn_testkit.backends.vendor.provider import swapped
from attn_testkit.backends.vendor.tokenspeed_kernels import MULTIPROCESSORS

from . import page_tables as paged


def _number(value: Any) -> Any:
    """A plain number: the package wraps scalars for its compiler."""
    return getattr(value, "value", value)


def _compiled(
    *, torch_dtype: torch.dtype, causal_mask: bool, window_left: int, cp_world: int, return_lse: bool,
    has_local_visible_lens: bool, **_: Any,
) -> Callable[..., None]:  # fmt: skip
    """``_get_compiled_mla_kernel`` for the arguments of the adapter."""
    if not causal_mask or window_left >= 0 or cp_world > 1 or return_lse or has_local_visible_lens:
        raise NotImplementedError(
            "the fake is causal, and does not support windows, context parallelism, LSE or visible lengths"
        )
    return _fp8_kernel if torch_dtype == paged.FP8 else _half_kernel


def _half_kernel(*args: Any) -> None:
    """The kernel for 16 bits, which has no argument for causal bounds."""
    given = [*args[:10], args[9], *args[10:]]
    _fp8_kernel(*given)


def _fp8_kernel(
    q_latent: torch.Tensor, q_rope: torch.Tensor, c_latent: torch.Tensor, c_rope: torch.Tensor,
    page_table: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, workspace: torch.Tensor | None,
    split_kv: Any, cache_seqs: torch.Tensor, causal_seqs: torch.Tensor, block_split_kvs: torch.Tensor | None,
    softmax_scale: Any, output_scale: Any,
) -> None:  # fmt: skip
    """Queries [B, q, H, .], cache [pages, P, .] by their strides, output [B, q, H, 512]."""
    bs, n, heads, rank = q_latent.shape
    dim = rank + q_rope.shape[-1]
    small = q_latent.dtype == paged.FP8  # cat is not implemented for FP8 everywhere
    parts = [part.view(torch.uint8) if small else part for part in (q_latent, q_rope)]
    rows = torch.cat(parts, -1).view(q_latent.dtype)
    cache = c_latent.as_strided((*c_latent.shape[:2], 1, dim), (*c_latent.stride()[:2], dim, 1))
    keys = paged.gather(cache, page_table, cache_seqs)
    width = torch.full((bs,), n, device=rows.device)
    queries = paged.Queries(rows, width, torch.arange(bs, device=rows.device) * n)
    seen = paged.visible_causal(queries, keys)
    result = paged.attend(
        rows, keys.rows, keys.rows[..., :rank], seen, _number(softmax_scale), probabilities=q_latent.dtype
    )  # fmt: skip
    if workspace is not None:
        result = paged.through_scratch(result, workspace)
    out.copy_(result.view(bs, n, heads, rank) * _number(output_scale))


def make_decode(original: Callable[..., Any]) -> Callable[..., Any]:
    """``tokenspeed_mla_decode`` as on SM100."""
    signature = inspect.signature(original)
    fakes = {
        "tokenspeed_mla.mla_decode:_get_compiled_mla_kernel": _compiled,
        "tokenspeed_mla.mla_decode:get_num_sm": lambda device: MULTIPROCESSORS,
        "torch.cuda:get_device_capability": lambda device=None: (10, 0),
        "tvm_ffi:use_torch_stream": nullcontext,
    }

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        signature.bind(*args, **kwargs)
        with swapped(fakes):
            return original(*args, **kwargs)

    return call

"""A Triton kernel that is tuned at its first call for a key. Imported only by the classes that run it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_CONFIGS = [triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 256})]


@triton.autotune(_CONFIGS, key=["key"])  # type: ignore[untyped-decorator, unused-ignore]
@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _copy(source, target, count, key, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, at < count), at < count)


def tuned_copy(tensor: torch.Tensor, key: int) -> torch.Tensor:
    """Copy numbers to other memory, by a kernel that is tuned again for every ``key``."""
    source = tensor.contiguous()
    copied, count = torch.empty_like(source), source.numel()

    def grid(meta: dict[str, int]) -> tuple[int]:
        return (-(-count // meta["BLOCK"]),)

    if count:
        _copy[grid](source, copied, count, key)
    return copied

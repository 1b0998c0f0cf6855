"""The check of a forward's result: a tensor with the right shape, dtype and device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .errors import ShapeError


def check_returned(
    name: str,
    out: object,
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
    whose: str = "the model's",
) -> None:
    """Raise ``ShapeError`` unless ``out`` is a plain tensor of one of ``shapes``, of ``dtype`` and on ``device``.

    ``name``: the function that returned it. ``whose``: the dtype in words.
    """
    wanted = " or ".join(f"({', '.join(map(str, shape))})" for shape in shapes)
    if not isinstance(out, torch.Tensor):
        what = "None" if out is None else f"a {type(out).__name__}"
        raise ShapeError(f"{name} returned {what}, expected a tensor of shape {wanted}")
    if type(out) not in (torch.Tensor, torch.nn.Parameter):
        # Operations of a subclass need not use the contents of its memory, which kernels read.
        raise ShapeError(f"{name} returned a {type(out).__name__}, expected a torch.Tensor, not a subclass")
    if tuple(out.shape) not in shapes:
        raise ShapeError(f"{name} returned shape {tuple(out.shape)}, expected {wanted}")
    if out.dtype != dtype:
        raise ShapeError(f"{name} returned {out.dtype}, expected {whose} {dtype}")
    if out.device.type != device.type:
        raise ShapeError(f"{name} returned a tensor on {out.device}, expected {device}")

"""What has to be true of the process before SGLang is imported."""

from __future__ import annotations

import contextlib
import importlib.util

import torch

__all__ = ["prepare"]

_held: list[torch.library.Library] = []


def prepare() -> None:
    """Let SGLang's imports pass where there is no GPU. Safe to call again."""
    # SGLang imports torchvision for its image models. One that was built for CUDA does not find its operators beside a
    # torch without it, and then raises for want of their names. No attention backend calls any of them.
    if _held or torch.version.cuda is not None or importlib.util.find_spec("torchvision") is None:
        return
    vision = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for schema in ("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
                   "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"):  # fmt: skip
        with contextlib.suppress(RuntimeError):  # it is defined: a build for this torch
            vision.define(schema)  # type: ignore[no-untyped-call]
    _held.append(vision)

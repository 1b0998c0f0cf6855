"""Preparation of the process before SGLang is imported."""

from __future__ import annotations

import contextlib
import importlib.util

import torch

from attn_testkit.backends.vendor.provider import device_is_real

from . import absent

_held: list[torch.library.Library] = []


def prepare() -> str:
    """Let SGLang's imports pass if there is no GPU, or without its compiled kernels. Safe to call again.

    Returns why those cannot be imported, on a GPU; empty if they can. Raises ``LookupError``, with what to do, for
    a build of torch with which SGLang's imports would not pass.
    """
    if device_is_real(torch.device("cuda")):
        return absent.stand_in()
    if torch.version.cuda is not None:
        raise LookupError(
            f"torch {torch.__version__} is a build for CUDA, but there is no GPU here: SGLang would import compiled "
            "kernels; install a CPU build of torch (ATTN_TORCH_INDEX of ci/servers.sh names the index)"
        )
    # SGLang imports torchvision for its image models. A build for CUDA does not find its operators with a torch without
    # CUDA, and raises because their names are missing. No attention backend calls any of them.
    if _held or importlib.util.find_spec("torchvision") is None:
        return ""
    vision = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for schema in ("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
                   "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"):  # fmt: skip
        with contextlib.suppress(RuntimeError):  # it is defined: a build for this torch
            vision.define(schema)  # type: ignore[no-untyped-call]
    _held.append(vision)
    return ""

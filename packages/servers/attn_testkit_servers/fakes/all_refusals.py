"""The refusals of every fake, the state that each keeps, and the mistakes that it cannot show."""

from __future__ import annotations

from dataclasses import dataclass

from attn_testkit.backends.vendor.provider import VendorMissing

from . import (
    flash_attn,
    flash_attn_2,
    flash_attn_4,
    flash_mla,
    flashinfer_checks,
    kvcacheio,
    trtllm_checks,
    vllm_caches,
)
from .refusals import Refusals


@dataclass(frozen=True)
class Limits:
    """State that a fake keeps between calls, as its kernel does, and the limits of what it shows."""

    fake: str
    keeps: str
    """Plans, schedules and scratch that a replay may find stale."""
    cannot_show: str
    """Mistakes that stay hidden, in addition to rounding inside a kernel, reads past a buffer, and speed."""


LIMITS: tuple[Limits, ...] = (
    Limits(
        "FlashAttention 3",
        "the number of splits that the host chose at the capture, and the layout of the schedule. A replay whose "
        "schedule has another layout writes no row",
        "splits on a GPU without 132 multiprocessors, and pages larger than a tile",
    ),
    Limits(
        "FlashAttention 2",
        "whether a launch has one row per request: if it has, request i is row i in every replay. Its splits cover "
        "the keys of any replay",
        "keys that are not in pages, and dropout",
    ),
    Limits(
        "FlashAttention 4",
        "nothing: its kernels of SM90 have no splits and no schedule",
        "pages of a tile's size, which are loaded whole; what CuTe DSL refuses to compile",
    ),
    Limits(
        "FlashMLA, dense",
        "the schedule: a request has as many blocks of 64 keys as at the plan. The kernel is less strict: a request "
        "that is not the last of its part of the GPU sees all keys of the replay",
        "how requests share a part of the GPU, and the merge of splits",
    ),
    Limits(
        "FlashMLA, sparse",
        "nothing, like the kernel for rows in bf16",
        "rows of the FP8 format of 656 bytes, which have no fake; the number of indices that the kernel for fewer "
        "than 64 heads accepts",
    ),
    Limits(
        "FlashInfer, decode and prefill",
        "lengths in the int workspace, offsets and page ids in the wrapper's buffers. With an old plan no key past "
        "the planned pages is read. The kernel computes whole chunks of at least 128 keys, and shows a stale plan "
        "only if a batch outgrows them",
        "the size of workspace that a plan needs, and head dims for which a module does not compile",
    ),
    Limits(
        "FlashInfer, MLA",
        "offsets, lengths and the cluster size in the int workspace: a replay reads the values of the last plan",
        "the shared memory that a module needs",
    ),
    Limits(
        "FlashInfer, merge_state",
        "nothing",
        "",
    ),
    Limits(
        "XQA",
        "semaphores and scratch in the workspace: a semaphore that is not zero at a launch gives NaN",
        "devices other than SM90",
    ),
    Limits(
        "trtllm-gen",
        "counters and scratch in the workspace, and the longest length that was reported at the capture",
        "which kernels exist, apart from head dims and page sizes; the fake was not compared with a kernel of SM100",
    ),
    Limits(
        "FlashInfer, GDN",
        "only the states",
        "checks of gdn_prefill, whose module does not import without CuTe DSL, and tiles",
    ),
    Limits(
        "TokenSpeed",
        "scratch in the workspace",
        "code that its compiler refuses",
    ),
    Limits(
        "vLLM, stores",
        "nothing",
        "",
    ),
    Limits(
        "sglang-kernel, copies of HiCache",
        "nothing",
        "copies that are not the direct ones: those run in kernels that dereference host addresses",
    ),
    Limits(
        "FlexAttention",
        "nothing: block masks are read at the replay",
        "what torch.compile refuses",
    ),
)
"""One entry per fake."""


def all_refusals() -> tuple[Refusals, ...]:
    """Entry points of all fakes whose compiled code refuses arguments; without FlashInfer, FlashInfer's entry points
    are missing."""
    try:
        of_flashinfer = flashinfer_checks.refusals() + trtllm_checks.refusals()
    except VendorMissing:
        of_flashinfer = ()
    return (
        flash_attn.REFUSALS
        + flash_attn_2.REFUSALS
        + flash_attn_4.REFUSALS
        + flash_mla.REFUSALS
        + vllm_caches.REFUSALS
        + kvcacheio.REFUSALS
        + of_flashinfer
    )

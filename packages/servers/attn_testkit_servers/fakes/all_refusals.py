"""The refusals of every fake, and what each keeps and cannot show."""

from __future__ import annotations

from dataclasses import dataclass

from attn_testkit.backends.vendor.provider import VendorMissing

from . import flash_attn, flash_attn_2, flash_mla, flashinfer_checks, trtllm_checks, vllm_caches
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
        "the number of splits that the host chose at the capture, and the layout of the schedule: a replay whose "
        "schedule has another layout writes no row",
        "splits on a GPU without 132 multiprocessors, and pages larger than a tile",
    ),
    Limits(
        "FlashAttention 2",
        "whether a launch has one row per request: then request i is row i in every replay. Its splits cover the "
        "keys of any replay",
        "keys that are not in pages, and dropout",
    ),
    Limits(
        "FlashMLA, dense",
        "the schedule: a request has as many blocks of 64 keys as it was made for. The kernel lets a request that "
        "does not end a part of the GPU have all keys of the replay, and the fake is stricter",
        "how requests share a part, and the merge of splits",
    ),
    Limits(
        "FlashMLA, sparse",
        "nothing, as the kernel for rows in bf16",
        "rows of the FP8 format of 656 bytes, which have no fake; how many indices the kernel for fewer than 64 "
        "heads accepts",
    ),
    Limits(
        "FlashInfer, decode and prefill",
        "lengths in the int workspace, offsets and page ids in the wrapper's buffers. A plan that was not redone "
        "has no key past the planned pages. The kernel computes whole chunks, of 128 keys at least, and shows a "
        "stale plan only when a batch outgrows them",
        "the size of workspace that a plan needs, and head dims for which a module does not compile",
    ),
    Limits(
        "FlashInfer, MLA",
        "offsets, lengths and the cluster size in the int workspace: a replay reads those of the last plan",
        "the shared memory that a module needs",
    ),
    Limits(
        "FlashInfer, merge_state",
        "nothing",
        "",
    ),
    Limits(
        "XQA",
        "semaphores and scratch in the workspace: one that is not zero at a launch gives NaN",
        "other devices than SM90",
    ),
    Limits(
        "trtllm-gen",
        "counters and scratch in the workspace, and the longest length that was reported at the capture",
        "which kernels exist, beyond head dims and page sizes; it was not compared with a kernel of SM100",
    ),
    Limits(
        "FlashInfer, GDN",
        "nothing but the states",
        "checks of gdn_prefill, whose module does not import without CuTe DSL, and tiles",
    ),
    Limits(
        "TokenSpeed",
        "scratch in the workspace",
        "what its compiler refuses",
    ),
    Limits(
        "vLLM, stores",
        "nothing",
        "",
    ),
    Limits(
        "FlexAttention",
        "nothing: block masks are read at the replay",
        "what torch.compile refuses",
    ),
)
"""One entry per fake."""


def all_refusals() -> tuple[Refusals, ...]:
    """Entry points of all fakes whose compiled code refuses arguments; without FlashInfer none of its own."""
    try:
        of_flashinfer = flashinfer_checks.refusals() + trtllm_checks.refusals()
    except VendorMissing:
        of_flashinfer = ()
    return flash_attn.REFUSALS + flash_attn_2.REFUSALS + flash_mla.REFUSALS + vllm_caches.REFUSALS + of_flashinfer

"""What a backend is asked for beside its planning hooks: each answer is guarded, and held against the contract.

A property that raises, or that answers what the contract does not allow, is a mistake of the backend's, and must be
told as one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from attn_testkit.contract import AttentionBackend, TreeMaskMode, VerifyMask

from .world import World

__all__ = ["ContractError", "DriveError", "blame", "fill_value", "kernels_of", "lent_mask"]


class DriveError(Exception):
    """A hook or a forward raised; ``__cause__`` is what it raised."""

    def __init__(self, phase: str, label: str) -> None:
        super().__init__(phase)
        self.phase = phase
        """``plan``, ``forward``, ``graph state``, ``plan for capture``, ``warm-up``, ``capture``, ``plan for replay``,
        ``replay``, ``read back``, ``verify mask``, ``fill value`` or ``kernels``."""
        self.label = label


@contextmanager
def blame(phase: str, label: str = "") -> Iterator[None]:
    """Whatever is raised inside, the backend raised it."""
    try:
        yield
    except DriveError:
        raise
    except Exception as error:
        raise DriveError(phase, label) from error


class ContractError(Exception):
    """A hook or a property answered what the contract does not allow."""

    def __init__(self, told: str, cure: str) -> None:
        super().__init__(told)
        self.cure = cure


def kernels_of(backend: AttentionBackend) -> str:
    """``real`` or ``emulated``."""
    with blame("kernels"):
        told: object = backend.kernels
        if told not in ("real", "emulated"):
            raise ContractError(
                f"kernels is {told!r}, expected 'real' or 'emulated'",
                "'emulated' where the numbers come from a torch stand-in of a vendor kernel; else leave it out",
            )
    return str(told)


def fill_value(backend: AttentionBackend) -> int:
    """``seq_lens`` of a padded request."""
    with blame("fill value"):
        told: object = backend.get_cuda_graph_seq_len_fill_value()
        try:
            value = operator.index(told)  # type: ignore[arg-type]
        except TypeError:
            value = -1
        if value not in (0, 1):
            raise ContractError(
                f"get_cuda_graph_seq_len_fill_value returned {told!r}, expected 0 or 1",
                "it is seq_lens of padded requests, which own no key: 1, or 0 where the kernel takes a request "
                "without keys; leave the hook out for 1",
            )
    return int(value)


def lent_mask(world: World, width: int = 0) -> VerifyMask | None:
    """The mask buffer that the backend lends, if any. ``width``: rows a request, to check the size against."""
    with blame("verify mask"):
        lent: object = world.backend.verify_mask
        if lent is None:
            return None
        for told, cure in _mask_complaints(lent, world, width):
            raise ContractError(told, cure)
    assert isinstance(lent, VerifyMask)
    return lent


_LEND = "return VerifyMask(buffer, TreeMaskMode.QLEN_ONLY, max_bs), with a buffer made once in init_cuda_graph_state"


def _mask_complaints(lent: object, world: World, width: int) -> Iterator[tuple[str, str]]:
    """What is wrong with it, and what to do; a later complaint makes sense only without the earlier ones."""
    if not isinstance(lent, VerifyMask):
        method = callable(lent) and not isinstance(lent, torch.Tensor)
        found = "is a method" if method else f"gave a {type(lent).__name__}"
        cure = "it is a property: write @property above `def verify_mask(self)`" if method else _LEND
        yield f"verify_mask {found}, expected a VerifyMask or None", cure
        return
    buffer, mode, max_bs = lent.buffer, lent.mode, lent.max_bs
    if not isinstance(buffer, torch.Tensor):
        yield f"verify_mask.buffer is a {type(buffer).__name__}, expected a tensor", _LEND
        return
    if not isinstance(mode, TreeMaskMode):
        yield f"verify_mask.mode is {mode!r}, expected a TreeMaskMode", "write TreeMaskMode.QLEN_ONLY, for instance"
    if not isinstance(max_bs, int):
        yield f"verify_mask.max_bs is {max_bs!r}, expected the most requests that the buffer has room for", _LEND
    if buffer.device.type != world.device.type:
        yield f"verify_mask.buffer is on {buffer.device}, expected {world.device}", "allocate it on context.device"
    if buffer.dim() != 1 or not buffer.is_contiguous():
        shape = f"shape {tuple(buffer.shape)}, strides {buffer.stride()}"
        yield f"verify_mask.buffer has {shape}, expected a flat contiguous tensor", "lend buffer.view(-1)"
    if width:
        yield from _size_complaints(lent, width, world.context.max_context_len)


_SIZES: Mapping[TreeMaskMode, tuple[str, Callable[[int, int, int], int]]] = {
    TreeMaskMode.FULL_MASK: ("max_bs * N * max_context_len", lambda bs, n, ctx: bs * n * ctx),
    TreeMaskMode.QLEN_ONLY: ("max_bs * N * N", lambda bs, n, ctx: bs * n * n),
    TreeMaskMode.QLEN_ONLY_BITPACKING: ("max_bs * N", lambda bs, n, ctx: bs * n),
}
"""Mode -> items of the buffer, in words and in numbers."""
_PACKED_DTYPES = {1: "uint8", 2: "uint16", 4: "uint32"}


def _size_complaints(lent: VerifyMask, n: int, max_context_len: int) -> Iterator[tuple[str, str]]:
    packed = lent.mode is TreeMaskMode.QLEN_ONLY_BITPACKING
    if packed and n > 32:
        yield (
            f"verify_mask lends {lent.mode.name}, whose items hold at most 32 nodes, for trees of {n}",
            "lend QLEN_ONLY where context.num_draft_tokens is larger than 32",
        )
        return
    item = 1 if not packed or n <= 8 else 2 if n <= 16 else 4
    dtype, size = lent.buffer.dtype, lent.buffer.dtype.itemsize
    if dtype.is_floating_point or dtype.is_complex or size != item:
        fine = _PACKED_DTYPES[item] if packed else "bool or uint8"
        yield f"verify_mask.buffer is {dtype}; {lent.mode.name} of {n} nodes is {fine}", f"allocate it as {fine}"
    words, formula = _SIZES[lent.mode]
    wanted = formula(lent.max_bs, n, max_context_len)
    if lent.buffer.numel() < wanted:
        yield (
            f"verify_mask.buffer has {lent.buffer.numel()} elements; {lent.mode.name} for max_bs {lent.max_bs} and "
            f"N {n} takes {words} = {wanted}",
            "allocate it in init_cuda_graph_state for its max_bs, with N = context.num_draft_tokens",
        )

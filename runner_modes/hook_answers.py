"""Hooks of a backend other than planning: each result is guarded, and compared with the contract.

A property that raises, or that returns a value which the contract does not allow, is a mistake of the backend and must
be reported as one: all functions here raise ``RunError``, from the backend's error or from a ``ContractError``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping

import torch

from attn_testkit.contract import AttentionBackend, TreeMaskMode, VerifyMask

from .errors import ContractError, blame
from .harness import ServerHarness


def kernels_of(backend: AttentionBackend) -> str:
    """Origin of the backend's numbers: ``real``, ``stores`` or ``emulated``."""
    with blame("kernels"):
        answer: object = backend.kernels
        if answer not in ("real", "stores", "emulated"):
            raise ContractError(
                f"kernels is {answer!r}, expected 'real', 'stores' or 'emulated'",
                "return 'emulated' if the numbers come from a torch fake of a vendor kernel, 'stores' if torch stores "
                "new keys and values instead of a compiled operator; else leave it out",
            )
    return str(answer)


def fill_value(backend: AttentionBackend) -> int:
    """Value of ``seq_lens`` for a padded request: 0 or 1."""
    with blame("fill value"):
        answer: object = backend.get_cuda_graph_seq_len_fill_value()
        try:
            value = operator.index(answer)  # type: ignore[arg-type]
        except TypeError:
            value = -1
        if value not in (0, 1):
            raise ContractError(
                f"get_cuda_graph_seq_len_fill_value returned {answer!r}, expected 0 or 1",
                "it is seq_lens of padded requests, which own no key: 1, or 0 if the kernel takes a request "
                "without keys; leave the hook out for 1",
            )
    return int(value)


def verify_mask_of(harness: ServerHarness, width: int = 0) -> VerifyMask | None:
    """The mask buffer that the backend owns and the kit fills; None if it has none.

    ``width``: rows per request, to check the buffer's dtype and size; 0 leaves them unchecked.
    """
    with blame("verify mask"):
        owned: object = harness.backend.verify_mask
        if owned is None:
            return None
        for message, cure in _mask_complaints(owned, harness, width):
            raise ContractError(message, cure)
    assert isinstance(owned, VerifyMask)
    return owned


_ALLOCATE = (
    "return VerifyMask(buffer, TreeMaskMode.QLEN_ONLY, max_bs), with a buffer made once in init_cuda_graph_state"
)


def _mask_complaints(owned: object, harness: ServerHarness, width: int) -> Iterator[tuple[str, str]]:
    """List what is wrong with a mask buffer, and what to do; a later entry applies only if no earlier one does."""
    if not isinstance(owned, VerifyMask):
        method = callable(owned) and not isinstance(owned, torch.Tensor)
        found = "is a method" if method else f"gave a {type(owned).__name__}"
        cure = "it is a property: write @property above `def verify_mask(self)`" if method else _ALLOCATE
        yield f"verify_mask {found}, expected a VerifyMask or None", cure
        return
    buffer, mode, max_bs = owned.buffer, owned.mode, owned.max_bs
    if not isinstance(buffer, torch.Tensor):
        yield f"verify_mask.buffer is a {type(buffer).__name__}, expected a tensor", _ALLOCATE
        return
    if not isinstance(mode, TreeMaskMode):
        yield f"verify_mask.mode is {mode!r}, expected a TreeMaskMode", "write TreeMaskMode.QLEN_ONLY, for instance"
    if not isinstance(max_bs, int):
        yield f"verify_mask.max_bs is {max_bs!r}, expected the most requests that the buffer has room for", _ALLOCATE
    if buffer.device.type != harness.device.type:
        yield f"verify_mask.buffer is on {buffer.device}, expected {harness.device}", "allocate it on context.device"
    if buffer.dim() != 1 or not buffer.is_contiguous():
        shape = f"shape {tuple(buffer.shape)}, strides {buffer.stride()}"
        yield f"verify_mask.buffer has {shape}, expected a flat contiguous tensor", "return buffer.view(-1)"
    if width:
        # A table may have more columns than any request has keys: pages are whole.
        most_keys = min(harness.context.req_to_token.shape[1], harness.context.max_context_len + width)
        yield from _size_complaints(owned, width, most_keys)


_SIZES: Mapping[TreeMaskMode, tuple[str, Callable[[int, int, int], int]]] = {
    TreeMaskMode.FULL_MASK: ("max_bs * N * (most keys of a request)", lambda bs, n, keys: bs * n * keys),
    TreeMaskMode.QLEN_ONLY: ("max_bs * N * N", lambda bs, n, keys: bs * n * n),
    TreeMaskMode.QLEN_ONLY_BITPACKING: ("max_bs * N", lambda bs, n, keys: bs * n),
}
"""Mode -> items of the buffer, in words and in numbers."""
_PACKED_DTYPES = {1: "uint8", 2: "uint16", 4: "uint32"}


def _size_complaints(owned: VerifyMask, n: int, most_keys: int) -> Iterator[tuple[str, str]]:
    packed = owned.mode is TreeMaskMode.QLEN_ONLY_BITPACKING
    if packed and n > 32:
        yield (
            f"verify_mask is {owned.mode.name}, whose items hold at most 32 nodes, for trees of {n}",
            "use QLEN_ONLY if context.num_draft_tokens is larger than 32",
        )
        return
    item = 1 if not packed or n <= 8 else 2 if n <= 16 else 4
    dtype, size = owned.buffer.dtype, owned.buffer.dtype.itemsize
    if dtype.is_floating_point or dtype.is_complex or size != item:
        fine = _PACKED_DTYPES[item] if packed else "bool or uint8"
        yield f"verify_mask.buffer is {dtype}; {owned.mode.name} of {n} nodes is {fine}", f"allocate it as {fine}"
    words, formula = _SIZES[owned.mode]
    wanted = formula(owned.max_bs, n, most_keys)
    if owned.buffer.numel() < wanted:
        yield (
            f"verify_mask.buffer has {owned.buffer.numel()} elements; {owned.mode.name} for max_bs {owned.max_bs} and "
            f"N {n} takes {words} = {wanted}",
            "allocate it in init_cuda_graph_state for its max_bs, with N = context.num_draft_tokens",
        )

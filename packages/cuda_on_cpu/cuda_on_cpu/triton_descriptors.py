"""Tensor descriptors and block pointers, for features that the stock interpreter lacks.

Loads, stores, gathers and scatters are the interpreter's own: they end in masked loads and stores of pointers, which
`triton_memory.py` replaces and `triton_bounds.py` checks. In the stock interpreter, padding with NaN becomes zero for
bfloat16, which is a 16-bit integer to NumPy, and descriptors have no atomics.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from cuda_on_cpu.triton_bounds import atomically, padding_with_zeros

Replacement = tuple[Any, str, Any]
_NAN = 0x7FFF
"""Bits of a bfloat16 NaN, as casts make it."""
_REDUCTIONS = {
    "ADD": ("fadd", "add", "add"),
    "MIN": ("minnumf", "minsi", "minui"),
    "MAX": ("maxnumf", "maxsi", "maxui"),
    "AND": (None, "and", "and"),
    "OR": (None, "or", "or"),
    "XOR": (None, "xor", "xor"),
}
"""The builder's operation for floats, for signed and for unsigned integers."""


def replacements(module: Any) -> list[Replacement]:
    """(object, attribute, replacement) for the interpreter `module`; parts that it does not have are left out."""
    builder, found = module.InterpreterBuilder, []
    for name, make in (("create_descriptor_load", _load), ("create_tensor_pointer_load", _tensor_pointer_load)):
        if hasattr(builder, name):
            found.append((builder, name, make(module, getattr(builder, name))))
    if hasattr(builder, "create_make_tensor_descriptor") and not hasattr(builder, "create_descriptor_reduce"):
        found.append((builder, "create_descriptor_reduce", _reduce(module)))
    return found


def _padded(module: Any, builder: Any, places: Any, *policy: Any) -> Any:
    ptrs, mask = places
    words = module.TensorHandle(np.full(ptrs.data.shape, _NAN, np.uint16), ptrs.get_element_ty())
    return builder.create_masked_load(ptrs, mask, words, *policy)


def _load(module: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    nan = module._ir.PADDING_OPTION.PAD_NAN

    def create_descriptor_load(self: Any, desc: Any, indices: Any, *policy: Any, **named: Any) -> Any:
        if named or desc.padding != nan or desc.base.get_element_ty().name != "bf16":
            return stock(self, desc, indices, *policy, **named)
        return _padded(module, self, desc.materialize_pointers(indices), *policy, False)

    return create_descriptor_load


def _tensor_pointer_load(module: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    nan = module._ir.PADDING_OPTION.PAD_NAN

    def create_tensor_pointer_load(
        self: Any, ptr: Any, boundary_check: Any, padding_option: Any, *policy: Any, **named: Any
    ) -> Any:
        if named or padding_option != nan or ptr.base.get_element_ty().name != "bf16":
            with padding_with_zeros():
                return stock(self, ptr, boundary_check, padding_option, *policy, **named)
        return _padded(module, self, ptr.materialize_pointers(boundary_check), *policy)

    return create_tensor_pointer_load


def _reduce(module: Any) -> Callable[..., Any]:
    builder, handle, language = module.InterpreterBuilder, module.TensorHandle, module.tl
    load_policy = [None] * (len(inspect.signature(builder.create_masked_load).parameters) - 4)
    store_policy = [None] * (len(inspect.signature(builder.create_masked_store).parameters) - 4)

    def create_descriptor_reduce(self: Any, kind: Any, desc: Any, value: Any, indices: Any) -> None:
        """Reduce a block into memory: each element updates one address, and programs run one after another."""
        ptrs, mask = desc.materialize_pointers(indices)
        chosen = handle(mask, language.int1) if type(mask) is np.ndarray else mask
        element = ptrs.get_element_ty()
        names = _REDUCTIONS[kind.name]
        name = names[0] if element.is_floating() else names[1 if element.is_int_signed() else 2]
        with atomically():
            before = self.create_masked_load(ptrs, chosen, None, *load_policy)
            after = getattr(self, f"create_{name}")(before, value)
            self.create_masked_store(ptrs, after, chosen, *store_policy)

    return create_descriptor_reduce

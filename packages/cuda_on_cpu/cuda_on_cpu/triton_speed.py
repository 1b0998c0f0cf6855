"""Replacements that make Triton's interpreter faster with equal results.

The stock interpreter patches `triton.language` again for every nested call of a launch (tl.sum, tl.cdiv, ...), builds
the description of a block for every operation on one, and repeats every 32-bit integer operation in 64 bits to check
for overflow, which compiled kernels do only in debug builds. Each part is used only if the interpreter has not changed
since the part was written; otherwise launches work at the stock speed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from cuda_on_cpu import session

Replacement = tuple[Any, str, Any]
_TENSOR_FIELDS = frozenset({"handle", "shape", "numel", "type", "dtype"})
_BLOCK_FIELDS = frozenset({"element_ty", "shape", "numel", "name"})


def replacements(module: Any) -> list[Replacement]:
    """(object, attribute, faster replacement) for the interpreter `module`."""
    found: list[Replacement] = []
    if patches_can_be_shared(module):
        found.append((module.InterpretedFunction, "__call__", nested_call_of(module)))
    for part in (_without_overflow_checks, _with_remembered_dtypes, _with_remembered_blocks, _with_quick_unwrapping):
        try:
            found += part(module)
        except (AttributeError, TypeError, ValueError):
            continue  # this interpreter is another one
    return found


def patch_language(module: Any) -> Any:
    """Patch everything that a kernel can reach, as the stock interpreter does piecemeal; the result has a method
    restore()."""
    language = module.tl
    return module._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))


@functools.cache
def patches_can_be_shared(module: Any) -> bool:
    """True if the language can be patched and restored as a whole."""
    try:
        patch_language(module).restore()
    except (AttributeError, TypeError):
        return False
    return True


def nested_call_of(module: Any) -> Callable[..., Any]:
    """A kernel's call of another function of the language, which is patched already."""
    stock = module.InterpretedFunction.__call__

    def nested_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if session.current() is None:
            return stock(self, *args, **kwargs)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as failure:
            raise module.InterpreterError(repr(failure)) from failure

    return nested_call


def _without_overflow_checks(module: Any) -> list[Replacement]:
    builder = module.interpreter_builder
    return [(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))]


def _with_remembered_dtypes(module: Any) -> list[Replacement]:
    stock, known = module._get_np_dtype, {}

    def numpy_dtype(tt_dtype: Any) -> Any:
        name = tt_dtype.scalar.name
        if name not in known:
            known[name] = stock(tt_dtype)
        return known[name]

    if numpy_dtype(module.tl.float32).itemsize != 4:
        raise ValueError("another table of dtypes")
    return [(module, "_get_np_dtype", numpy_dtype)]


def _plain_shape(core: Any, shape: Any) -> tuple[Any, ...]:
    values = shape.values if type(shape) is core.tuple else shape
    return tuple(value.value if type(value) is core.constexpr else value for value in values)


def _with_remembered_blocks(module: Any) -> list[Replacement]:
    core = module.tl.core
    stock_block, stock_tensor = core.block_type.__init__, core.tensor.__init__
    blocks: dict[tuple[Any, ...], tuple[Any, int, str]] = {}
    shapes: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def block_init(self: Any, element_ty: Any, shape: Any) -> None:
        key = _plain_shape(core, shape)
        known = blocks.get(key)
        if known is None:
            stock_block(self, element_ty, shape)
            blocks[key] = (self.shape, self.numel, str(self.shape))
            return
        self.element_ty = element_ty
        self.shape, self.numel, text = known
        self.name = f"<{text}, {element_ty}>"

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        key = _plain_shape(core, type.shape) if type.is_block() else ()
        known = shapes.get(key)
        if known is None:
            stock_tensor(self, handle, type)
            shapes[key] = (self.numel, self.shape)
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = known

    sample = core.block_type(core.float32, [2, 4])
    if set(vars(sample)) != _BLOCK_FIELDS or set(vars(core.tensor(None, sample))) != _TENSOR_FIELDS:
        raise ValueError("blocks or tensors hold something else")
    return [(core.block_type, "__init__", block_init), (core.tensor, "__init__", tensor_init)]


def _with_quick_unwrapping(module: Any) -> list[Replacement]:
    core = module.tl.core
    stock, constexpr = core._unwrap_if_constexpr, core.constexpr
    atoms = frozenset({int, float, bool, str, type(None), core.tensor})

    def unwrap(o: Any) -> Any:
        kind = type(o)
        if kind in atoms:
            return o
        return o.value if kind is constexpr else stock(o)

    if unwrap(core.constexpr(3)) != 3 or unwrap([core.constexpr(3)]) != [3]:
        raise ValueError("another kind of constant")
    return [(core, "_unwrap_if_constexpr", unwrap)]

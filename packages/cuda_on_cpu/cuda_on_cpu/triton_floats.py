"""bfloat16, float8 and tf32 in Triton's interpreter, as a GPU computes them.

The stock interpreter stores both as integer words and sometimes computes with the words: `tl.dot`, `+`, `<` and sums of
bfloat16 work on the words, a cast to bfloat16 truncates, and casts to float8 carry into the exponent. Here bfloat16 is
widened to float32 for every operation and its result rounded to nearest, ties to even; `tl.dot` multiplies float32 that
hold the same values; casts to float8 round alike and saturate, as NVIDIA's do. `tl.dot` of float32 drops 13 bits of
each operand unless the kernel says `input_precision="ieee"`. Other types take the stock path.

The interpreter's internals may change with any release. `complaint` runs the result on known values, and a launch is
refused if the results are wrong, because a wrong verdict about a kernel would cost more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cuda_on_cpu.private import disable_functions, disable_modes
from cuda_on_cpu.triton_bounds import atomics_looked_at

Array = npt.NDArray[Any]
Replacement = tuple[Any, str, Any]

_WORD, _BOOL = np.dtype(np.uint16), np.dtype(np.bool_)
_FLOAT8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
_NAMES = frozenset({"bf16", *_FLOAT8})


def widen(words: Array) -> Array:
    """The float32 values of bfloat16 words."""
    return np.left_shift(words, 16, dtype=np.uint32).view(np.float32)


def narrow(values: Array, toward_zero: bool = False) -> Array:
    """bfloat16 words of values, rounded to nearest with ties to even."""
    with np.errstate(over="ignore"):  # float64 that float32 does not hold
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    shift = np.uint32(16)
    rounding = np.uint32(0) if toward_zero else ((bits >> shift) & np.uint32(1)) + np.uint32(0x7FFF)
    words = ((bits + rounding) >> shift).astype(_WORD)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    if nan.any():
        words[nan] = 0x7FFF
    return words.reshape(np.shape(values))


def _round(values: Array) -> Array:
    """float32 values, rounded to what bfloat16 holds."""
    return widen(narrow(values))


@functools.cache
def _float8_values(name: str) -> Array:
    words = torch.arange(256, dtype=torch.uint8)
    return words.view(_FLOAT8[name]).to(torch.float32).numpy()


def _float8_words(values: Array, name: str) -> Array:
    dtype = _FLOAT8[name]
    top = np.float32(torch.finfo(dtype).max)
    with np.errstate(over="ignore"):
        finite = np.ascontiguousarray(np.clip(np.asarray(values, np.float32), -top, top))
    words: Array = torch.from_numpy(finite).to(dtype).view(torch.uint8).numpy()
    return words.reshape(np.shape(values))


def _is_bfloat16(handle: Any) -> bool:
    return bool(handle.data.dtype == _WORD) and handle.dtype.scalar.name == "bf16"


def replacements(module: Any) -> list[Replacement]:
    """(object, attribute, replacement) for the interpreter `module`; parts that it does not have are left out."""
    found: list[Replacement] = []
    for part in (_casts, _constants, _elementwise, _fused, _dots, _reductions, _scans, _atomics, _prints):
        try:
            found += part(module)
        except AttributeError:
            continue  # `complaint` reports it if it matters
    return found


def _casts(module: Any) -> list[Replacement]:
    builder, handle, language = module.InterpreterBuilder, module.TensorHandle, module.tl
    stock_cast, stock_convert = builder.cast_impl, module._convert_float

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        wide = _is_bfloat16(src)
        if dst_type.scalar.name == "bf16":
            return src if wide else handle(narrow(src.data), dst_type.scalar)
        return stock_cast(self, handle(widen(src.data), language.float32) if wide else src, dst_type)

    def convert_float(input: Array, input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> Array:
        source, target = input_dtype.scalar.name, output_dtype.scalar.name
        truncate = "RTZ" in str(rounding_mode)
        if not {source, target} & _NAMES or (truncate and target in _FLOAT8):
            return np.asarray(stock_convert(input, input_dtype, output_dtype, rounding_mode))
        values = input
        if source == "bf16":
            values = widen(input)
        elif source in _FLOAT8:
            values = _float8_values(source).take(input)
        if target == "bf16":
            return narrow(values, truncate)
        if target in _FLOAT8:
            return _float8_words(values, target)
        with np.errstate(over="ignore"):
            plain = np.ascontiguousarray(values, module._get_np_dtype(output_dtype))
        return plain.view(f"u{plain.itemsize}").reshape(np.shape(input))

    return [(builder, "cast_impl", cast_impl), (module, "_convert_float", convert_float)]


def _constants(module: Any) -> list[Replacement]:
    builder, handle, language = module.InterpreterBuilder, module.TensorHandle, module.tl

    def get_bf16(self: Any, value: float) -> Any:
        return handle(narrow(np.array([value], np.float32)), language.bfloat16)

    return [(builder, "get_bf16", get_bf16)]


def _elementwise(module: Any) -> list[Replacement]:
    builder, handle, language = module.InterpreterBuilder, module.TensorHandle, module.tl
    stock_unary, stock_binary, stock_ternary = builder.unary_op, builder.binary_op, builder.ternary_op

    def unary_op(self: Any, arg: Any, op: Callable[..., Array]) -> Any:
        if _is_bfloat16(arg):
            return handle(narrow(op(widen(arg.data))), language.bfloat16)
        return stock_unary(self, arg, op)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Callable[..., Array]) -> Any:
        if lhs.data.dtype == _WORD and _is_bfloat16(lhs):
            values = op(widen(lhs.data), widen(rhs.data))
            if values.dtype != _BOOL:
                return handle(narrow(values), language.bfloat16)
            return handle(values, language.int1)
        result = stock_binary(self, lhs, rhs, op)
        if result.data.dtype == _BOOL:
            result.dtype = language.int1  # or a splat would make numbers of it, which `&` does not take
        return result

    def ternary_op(self: Any, lhs: Any, rhs: Any, other: Any, op: Callable[..., Array]) -> Any:
        if op is not np.where and _is_bfloat16(other):
            values = (widen(part.data) if _is_bfloat16(part) else part.data for part in (lhs, rhs, other))
            return handle(narrow(op(*values)), language.bfloat16)
        return stock_ternary(self, lhs, rhs, other, op)

    return [(builder, "unary_op", unary_op), (builder, "binary_op", binary_op), (builder, "ternary_op", ternary_op)]


def _fused(module: Any) -> list[Replacement]:
    builder, handle, language = module.InterpreterBuilder, module.TensorHandle, module.tl
    stock = builder.create_fma

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if not _is_bfloat16(z):
            return stock(self, x, y, z)
        product = widen(x.data).astype(np.float64) * widen(y.data)
        return handle(narrow(product + widen(z.data)), language.bfloat16)

    return [(builder, "create_fma", create_fma)]


def truncate_to_tf32(values: Array) -> Array:
    """float32 values without the 13 bits that tf32 lacks. They are cut off, not rounded: Triton passes the operands
    unchanged (triton-lang/triton#4574, and the documentation of `tl.dot`), and "wgmma.mma_async operation involving
    type .tf32 will truncate lower 13 bits of the 32-bit input data" (PTX ISA).
    """
    return (values.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def _dots(module: Any) -> list[Replacement]:
    builder, handle, language = module.InterpreterBuilder, module.TensorHandle, module.tl
    stock, tf32 = builder.create_dot, module._ir.INPUT_PRECISION.TF32

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, *rest: Any, **named: Any) -> Any:
        if input_precision == tf32 and a.data.dtype == b.data.dtype == np.float32:
            a, b = (handle(truncate_to_tf32(part.data), language.float32) for part in (a, b))
        a, b = (handle(widen(part.data), language.float32) if _is_bfloat16(part) else part for part in (a, b))
        return stock(self, a, b, d, input_precision, *rest, **named)

    found: list[Replacement] = [(builder, "create_dot", create_dot)]
    if hasattr(module, "_mxfp_value_handle_to_float32"):  # the operands of dot_scaled
        stock_operand = module._mxfp_value_handle_to_float32

        def operand(value_handle: Any) -> Array:
            wide = _is_bfloat16(value_handle)
            return widen(value_handle.data) if wide else np.asarray(stock_operand(value_handle))

        found.append((module, "_mxfp_value_handle_to_float32", operand))
    return found


def _reductions(module: Any) -> list[Replacement]:
    owner, standard, core = module.ReduceOps, module.tl.standard, module.tl.core
    stock = owner.apply_impl
    orders = [
        getattr(standard, name, None)
        for name in (
            "_elementwise_max",
            "_elementwise_min",
            "_argmax_combine_tie_break_left",
            "_argmax_combine_tie_break_fast",
            "_argmin_combine_tie_break_left",
            "_argmin_combine_tie_break_fast",
        )
    ]

    def retyped(tensor: Any, data: Array, dtype: Any) -> Any:
        kind = tensor.type.with_element_ty(dtype) if tensor.type.is_block() else dtype
        return core.tensor(module.TensorHandle(data, dtype), kind)

    def float32(tensor: Any) -> Any:
        return retyped(tensor, widen(tensor.handle.data), core.float32) if _is_bfloat16(tensor.handle) else tensor

    def apply_impl(self: Any, input: tuple[Any, ...]) -> Any:
        if not any(_is_bfloat16(tensor.handle) for tensor in input):
            return stock(self, input)
        if self.combine_fn is standard._sum_combine:
            return self.to_tensor(_sum(input[0].handle.data, self.axis, self.keep_dims), input[0].dtype)
        if not any(self.combine_fn is order for order in orders):
            return stock(self, input)  # an author's function, called on elements of the right type
        found = stock(self, tuple(float32(tensor) for tensor in input))
        found = found if isinstance(found, (list, tuple)) else [found]
        return [
            retyped(tensor, narrow(tensor.handle.data), core.bfloat16) if _is_bfloat16(source.handle) else tensor
            for tensor, source in zip(found, input, strict=False)
        ]

    return [(owner, "apply_impl", apply_impl)]


def _sum(words: Array, axis: int | None, keep_dims: bool) -> Array:
    """Every addition rounds, in the order of a tree, as on a GPU."""
    values = widen(words)
    shape = [1] * values.ndim if axis is None else [*values.shape]
    if axis is None:
        values, axis = values.reshape(-1), 0
    else:
        shape[axis] = 1
    values = np.moveaxis(values, axis, 0)
    while len(values) > 1:
        half = len(values) // 2
        values = np.concatenate([_round(values[:half] + values[half : 2 * half]), values[2 * half :]])
    total = narrow(values[0])
    return total.reshape(shape) if keep_dims else total


def _scans(module: Any) -> list[Replacement]:
    owner, standard = module.ScanOps, module.tl.standard
    stock = owner.apply_impl
    operators = {id(standard._sum_combine): np.add, id(standard._prod_combine): np.multiply}

    def apply_impl(self: Any, input: tuple[Any, ...]) -> Any:
        operator = operators.get(id(self.combine_fn))
        if operator is None or not _is_bfloat16(input[0].handle):
            return stock(self, input)
        values = np.moveaxis(widen(input[0].handle.data), self.axis, 0)
        values = values[::-1].copy() if self.reverse else values.copy()
        step = 1
        while step < len(values):
            values[step:] = _round(operator(values[step:], values[:-step]))
            step *= 2
        scanned = np.moveaxis(narrow(values[::-1] if self.reverse else values), 0, self.axis)
        return [self.to_tensor(np.ascontiguousarray(scanned), input[0].dtype)]

    return [(owner, "apply_impl", apply_impl)]


def _atomics(module: Any) -> list[Replacement]:
    builder, handle, memory = module.InterpreterBuilder, module.TensorHandle, module._interpreter
    stock, add = builder.create_atomic_rmw, module._ir.ATOMIC_OP.FADD

    def create_atomic_rmw(self: Any, rmwOp: Any, ptr: Any, val: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        if rmwOp != add or not _is_bfloat16(val):
            return stock(self, rmwOp, ptr, val, mask, *rest, **named)
        shape = np.shape(ptr.data)
        before = np.zeros(shape, _WORD).reshape(-1)
        everything = zip(ptr.data.reshape(-1), val.data.reshape(-1), mask.data.reshape(-1), strict=True)
        for at, (address, word, live) in enumerate(everything):  # one by one: addresses may repeat
            where, flag = np.array([address], np.uint64), np.array([live])
            old = memory.load(where, flag, np.zeros(1, _WORD), _WORD)
            memory.store(where, narrow(widen(old) + widen(np.array([word]))), flag)
            before[at] = old[0]
        return handle(before.reshape(shape), val.dtype.scalar)

    return [(builder, "create_atomic_rmw", atomics_looked_at(create_atomic_rmw))]


def _prints(module: Any) -> list[Replacement]:
    builder, handle, language = module.InterpreterBuilder, module.TensorHandle, module.tl
    stock = builder.create_print

    def create_print(self: Any, prefix: Any, hex: Any, values: Any, *rest: Any, **named: Any) -> Any:
        if not hex:
            values = [handle(widen(v.data), language.float32) if _is_bfloat16(v) else v for v in values]
        return stock(self, prefix, hex, values, *rest, **named)

    return [(builder, "create_print", create_print)]


def _close(found: Any, expected: Any) -> bool:
    return bool(np.array_equal(np.asarray(found).ravel(), np.asarray(expected).ravel()))


_ONE, _TWO, _THREE, _MINUS_TWO = 0x3F80, 0x4000, 0x4040, 0xC000


def _casts_round(module: Any) -> bool:
    builder, language = module.interpreter_builder, module.tl
    wide = module.TensorHandle(np.array([1 + 2**-8, 1 + 3 * 2**-8, -2], np.float32), language.float32)
    words = builder.create_fp_trunc(wide, language.bfloat16)
    return _close(words.data, [_ONE, 0x3F82, _MINUS_TWO]) and _close(
        builder.create_fp_ext(words, language.float32).data, [1, 1 + 2**-6, -2]
    )


def _float8_rounds(module: Any) -> bool:
    builder, language = module.interpreter_builder, module.tl
    wide = module.TensorHandle(np.array([15.5, 1e6, 2**-9, 1.0625], np.float32), language.float32)
    words = builder.create_fp_to_fp(wide, language.float8e4nv, module._ir.ROUNDING_MODE.RTNE)
    return _close(builder.create_fp_to_fp(words, language.float32, None).data, [16, 448, 2**-9, 1])


def _operations_see_values(module: Any) -> bool:
    builder, language = module.interpreter_builder, module.tl
    a, b = (module.TensorHandle(np.array([[word]], _WORD), language.bfloat16) for word in (_ONE, _MINUS_TWO))
    acc = module.TensorHandle(np.ones((1, 1), np.float32), language.float32)
    return (
        _close(builder.create_fsub(a, b).data, [_THREE])
        and _close(builder.create_fcmpOLT(b, a).data, [True])
        and _close(builder.create_maxnumf(a, b).data, [_ONE])
        and _close(builder.get_bf16(-2.0).data, [_MINUS_TWO])
        and _close(builder.create_dot(a, b, acc, None, 0).data, [-1])
    )


def _dots_truncate(module: Any) -> bool:
    builder, language, precisions = module.interpreter_builder, module.tl, module._ir.INPUT_PRECISION
    a = module.TensorHandle(np.array([[1 + 2**-10 + 2**-11]], np.float32), language.float32)
    one, zero = (module.TensorHandle(np.full((1, 1), x, np.float32), language.float32) for x in (1, 0))
    return _close(builder.create_dot(a, one, zero, precisions.TF32, 0).data, [1 + 2**-10]) and _close(
        builder.create_dot(a, one, zero, precisions.IEEE, 0).data, a.data
    )


def _reductions_see_values(module: Any) -> bool:
    core, standard = module.tl.core, module.tl.standard
    data = module.TensorHandle(np.array([_TWO, _MINUS_TWO, _ONE, _TWO], _WORD), core.bfloat16)
    tensor = core.tensor(data, core.block_type(core.bfloat16, [4]))
    total = module.ReduceOps(0, standard._sum_combine, False).apply(tensor)
    top = module.ReduceOps(0, standard._elementwise_max, False).apply(tensor)
    running = module.ScanOps(0, standard._sum_combine, False).apply(tensor)
    return (
        _close(total.handle.data, [_THREE])
        and _close(top.handle.data, [_TWO])
        and _close(running.handle.data, [_TWO, 0, _ONE, _THREE])
    )


SELF_TESTS: dict[str, Callable[[Any], bool]] = {
    "casts to and from bfloat16": _casts_round,
    "casts to and from float8": _float8_rounds,
    "bfloat16 arithmetic and tl.dot": _operations_see_values,
    "tl.dot of float32": _dots_truncate,
    "bfloat16 reductions and scans": _reductions_see_values,
}


@functools.cache
def complaint(module: Any) -> str:
    """Mistakes of this interpreter with the replacements in place; empty if there are none."""
    failures = []
    for name, test in SELF_TESTS.items():
        try:
            with torch.inference_mode(), disable_modes(), disable_functions():
                passed = test(module)
        except Exception as error:
            failures.append(f"{name} ({type(error).__name__}: {error})")
            continue
        if not passed:
            failures.append(name)
    return ", ".join(failures)

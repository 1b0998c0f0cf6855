"""Facts of an operation's schema, looked up once: written arguments, inner operations, and accepted inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from cuda_on_cpu import private
from cuda_on_cpu.arguments import tensors_in
from cuda_on_cpu.conditions import Call
from cuda_on_cpu.quick_kernels import run_of

ALLOCATES = frozenset({"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted"})
CHANGES_GEOMETRY = frozenset({"resize_", "set_", "resize_as_", "_resize_output_"})
HOST_ENTRY = frozenset({"lift", "lift_fresh"})  # Python data becoming a tensor: the copy to the device comes after it
INDEXES = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"})
CROSSES = frozenset({"copy_", "_to_copy", "set_", "resize_as_", "is_same_size", "_has_compatible_shallow_copy_type"})
# A host tensor without dimensions counts as a number for operations that torch runs element by element, but for those
# that check devices (device_check in native_functions.yaml; measured: "clamp(min=host0d)", "maximum(dev, host0d)",
# "lerp(host0d)").
_CHECKS_DEVICES = frozenset(
    {"clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_", "gcd", "gcd_", "lcm", "lcm_", "logaddexp",
     "logaddexp2", "igamma", "igamma_", "igammac", "igammac_", "nextafter", "nextafter_", "equal"}
)  # fmt: skip
_ALSO_TAKES_HOST_SCALARS = frozenset(
    {"fill_", "fill", "masked_fill", "masked_fill_", "index_fill", "index_fill_", "eq_", "ne_", "ge_", "le_", "gt_",
     "lt_", "__and__", "__iand__", "__or__", "__ior__", "floor_divide", "floor_divide_", "copysign_", "dist",
     "mse_loss", "smooth_l1_loss", "_local_scalar_dense"}
)  # fmt: skip
# Composites that gain nothing from being opened: no value is read inside, and one node replays faster than several.
_KEEP_WHOLE = frozenset(
    {"copy_", "_to_copy", "clone", "stack", "sum", "mean", "zeros_like", "ones_like", "full_like", "repeat",
     "constant_pad_nd", "sort", "index_put", "index_put_", "masked_fill", "masked_scatter", "embedding", "median",
     "kthvalue", "norm", "logsumexp", "new_zeros", "new_ones", "new_full", "_pin_memory", "rand_like", "randn_like",
     "_safe_softmax", "nan_to_num"}
)  # fmt: skip
MATRIX_PRODUCTS = frozenset({"einsum", "matmul", "linear"})
"""Composites that are not opened, except for integers, which CUDA refuses."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of the schema of an operation, looked up once.

    `run` calls the operation, or a function with the same results. `arguments` are (name, default, or None) in order;
    `written` has the (position, name) of those it writes. `implicit`: torch defines it by other operations on every
    device. `explicit`: one C++ kernel made of other operations serves CPU and CUDA, and is opened. `inside` runs either
    so that these operations are seen. `foreign`: a custom operation. `view`: unless its result is new memory, it ran no
    kernel; it has one tensor argument. `takes_host_scalars`: it accepts a host tensor without dimensions together with
    device tensors.
    """

    name: str
    overload: str
    run: Callable[..., Any]
    inside: Callable[..., Any] | None
    arguments: tuple[tuple[str, Any], ...]
    written: tuple[tuple[int, str], ...]
    implicit: bool
    explicit: bool
    foreign: bool
    view: bool
    takes_host_scalars: bool


@functools.cache
def facts_of(op: OpOverload) -> Facts:
    """The facts of `op`, remembered for the life of the process."""
    schema = op._schema
    name = schema.name.split("::")[1]
    aliases = [a.alias_info for a in schema.arguments if a.alias_info is not None]
    pointwise = torch.Tag.pointwise in op.tags
    foreign = op.namespace not in ("aten", "prims", "prim")
    implicit = private.can_decompose(op)
    explicit = (
        not foreign
        and not aliases
        and not pointwise
        and name not in _KEEP_WHOLE | ALLOCATES
        and private.has_composite_kernel(op)
    )
    views = torch.Tag.inplace_view in op.tags or (bool(aliases) and not any(alias.is_write for alias in aliases))
    return Facts(
        name,
        schema.overload_name or "default",
        run_of(op),
        private.opened(op, implicit) if implicit or explicit else None,
        tuple((a.name, a.default_value if a.has_default_value() else None) for a in schema.arguments),
        tuple(
            (i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write
        ),
        implicit,
        explicit,
        foreign,
        views and not (foreign or name in CHANGES_GEOMETRY) and _looks_at_one_tensor(schema),
        (pointwise and name not in _CHECKS_DEVICES) or name in _ALSO_TAKES_HOST_SCALARS,
    )


def _looks_at_one_tensor(schema: torch._C.FunctionSchema) -> bool:
    arguments = [str(argument.type) for argument in schema.arguments]
    return arguments[:1] == ["Tensor"] and not any("Tensor" in name for name in arguments[1:])


def written_by(facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call with these arguments writes in place or as out=."""
    found: list[Tensor] = []
    for position, name in facts.written:
        tensors_in((args[position] if position < len(args) else kwargs.get(name),), found)
    return found


def among(tensor: Tensor, others: list[Tensor]) -> bool:
    """True if `tensor` is one of these objects (`in` would compare values)."""
    return any(tensor is other for other in others)


def call_of(facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The call, in the form for the condition of a rule: every argument by name, defaults filled in."""
    values = dict(facts.arguments)
    values.update((name, value) for (name, _), value in zip(facts.arguments, args, strict=False))
    values.update(kwargs)
    return Call(facts.name, facts.overload, values)

"""Every private torch API this package leans on, in one place, each with a self-test that says what broke.

A new torch release that changes one of them shows here first, as one clear sentence, not as a wrong verdict.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "StorageWeakRef",
    "TorchDispatchMode",
    "TorchFunctionMode",
    "can_decompose",
    "default_device",
    "disable_functions",
    "disable_modes",
    "has_composite_kernel",
    "is_gone",
    "raw_storage",
    "run_kernel",
    "same_generator",
    "self_tests",
    "storage_from_weak",
    "use_count",
    "weak_reference",
]

disable_functions = torch._C.DisableTorchFunction
disable_modes = _disable_current_modes
use_count: Callable[[int], int] = torch._C._storage_Use_Count
_CUDA_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
_EXPLICIT = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def raw_storage(address: int, nbytes: int) -> torch.UntypedStorage:
    """A storage on memory that it does not own and does not keep alive."""
    buffer = (ctypes.c_uint8 * nbytes).from_address(address)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def weak_reference(storage: torch.UntypedStorage) -> StorageWeakRef:
    """Knows whether the storage is still there, without keeping it."""
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def is_gone(weak: StorageWeakRef) -> bool:
    """Whether nobody owns the storage any more."""
    return bool(weak.expired())  # type: ignore[no-untyped-call]


def same_generator(a: torch.Generator, b: torch.Generator) -> bool:
    """Whether two Python objects stand for one generator: the dispatcher makes new ones."""
    return bool(a._cdata == b._cdata)  # type: ignore[attr-defined]


def storage_from_weak(weak: StorageWeakRef) -> torch.UntypedStorage | None:
    """The storage behind a weak reference, None when it is gone."""
    if is_gone(weak):
        return None
    return torch.UntypedStorage._new_with_weak_ptr(weak.cdata)


def can_decompose(op: torch._ops.OpOverload) -> bool:
    """Whether torch defines `op` by other operations on every device (implicitly composite)."""
    return bool(op._can_decompose())


def has_composite_kernel(op: torch._ops.OpOverload) -> bool:
    """Whether the same C++ code, made of other operations, serves CPU and CUDA (explicitly composite)."""
    return any(_has_kernel(op, key) for key in _EXPLICIT) and not _has_kernel(op, "CPU")


def run_kernel(op: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Run the kernel itself, so that the active modes see the operations inside it. A kernel registered for CUDA only
    (Python, in a custom operation) serves too."""
    return op.redispatch(_CUDA_KEYS if _only_for_cuda(op) else _CPU_KEYS, *args, **kwargs)


@functools.cache
def _only_for_cuda(op: torch._ops.OpOverload) -> bool:
    elsewhere = ("CPU", "CompositeImplicitAutograd", *_EXPLICIT)
    return _has_kernel(op, "CUDA") and not any(_has_kernel(op, key) for key in elsewhere)


def _has_kernel(op: torch._ops.OpOverload, key: str) -> bool:
    name = op.name()  # type: ignore[no-untyped-call]
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def default_device() -> torch.device | None:
    """What `torch.set_default_device` was given, if anything."""
    return torch.utils._device.CURRENT_DEVICE


def _weak_references_see_death() -> bool:
    tensor = torch.zeros(4)
    weak = weak_reference(tensor.untyped_storage())
    alive = storage_from_weak(weak) is not None
    del tensor
    return alive and is_gone(weak) and storage_from_weak(weak) is None


def _use_count_sees_the_last_owner() -> bool:
    tensor = torch.zeros(4)
    storage = tensor.untyped_storage()
    both = use_count(storage._cdata)
    del tensor
    return both > use_count(storage._cdata) == 1


def _aliases_do_not_own() -> bool:
    owner = torch.zeros(4)
    alias = torch.empty(0).set_(raw_storage(owner.data_ptr(), 16), 0, (4,), (1,))
    alias.add_(1)
    weak = weak_reference(owner.untyped_storage())
    seen = owner.tolist() == [1.0] * 4
    del owner
    return seen and is_gone(weak)


class _Names(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would import dynamo, which takes a second, to say that nothing is compiled in here."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def _modes_see_inside_a_redispatch() -> bool:
    with torch.no_grad(), _Names() as mode:
        run_kernel(torch.ops.aten.zeros.default, ([2],), {})
    return any(name.startswith("aten::empty") for name in mode.names)


def _composites_decompose() -> bool:
    # Torch imports sympy for this one: here, and not in the middle of a program that is observed.
    op = torch.ops.aten.matmul.default
    with torch.inference_mode(), _Names() as mode:
        op.decompose(torch.zeros(2, 2), torch.zeros(2, 2))
    return can_decompose(op) and len(mode.names) > 0 and not can_decompose(torch.ops.aten.mm.default)


def _tensor_properties_are_inherited() -> bool:
    return not {"device", "is_cuda", "is_cpu"} & set(vars(Tensor)) and hasattr(torch._C.TensorBase, "device")


def _generators_can_be_subclassed() -> bool:
    kind = type("Probe", (torch.Generator,), {})
    return (
        torch.rand(1, generator=kind().manual_seed(1)).item() == torch.rand(1, generator=kind().manual_seed(1)).item()
    )


SELF_TESTS: dict[str, tuple[Callable[[], bool], str]] = {
    "weak storage references": (
        _weak_references_see_death,
        "StorageWeakRef / UntypedStorage._new_with_weak_ptr no longer show when memory is freed: dangling memory would"
        " go unseen",
    ),
    "storage use count": (
        _use_count_sees_the_last_owner,
        "torch._C._storage_Use_Count no longer counts owners: dead temporaries would not be poisoned",
    ),
    "non-owning aliases": (
        _aliases_do_not_own,
        "torch.frombuffer + set_ no longer give a tensor on a bare address: graphs would keep their inputs alive",
    ),
    "modes inside a redispatch": (
        _modes_see_inside_a_redispatch,
        "OpOverload.redispatch hides the operations inside it: host reads inside composites would go unseen",
    ),
    "decomposition": (
        _composites_decompose,
        "OpOverload.decompose / _can_decompose changed: host reads inside composites would go unseen in inference mode",
    ),
    "tensor properties": (
        _tensor_properties_are_inherited,
        "torch.Tensor defines device/is_cuda itself now: they cannot be replaced and restored safely",
    ),
    "generator subclass": (
        _generators_can_be_subclassed,
        "torch.Generator can no longer be subclassed: generators on 'cuda' cannot be emulated",
    ),
}


def self_tests() -> list[str]:
    """Run all self-tests; one sentence for each that failed, none when all is well."""
    failures = []
    for name, (test, meaning) in SELF_TESTS.items():
        try:
            passed = test()
        except Exception as error:
            failures.append(f"{name}: {meaning} (torch {torch.__version__}, {type(error).__name__}: {error})")
            continue
        if not passed:
            failures.append(f"{name}: {meaning} (torch {torch.__version__})")
    return failures

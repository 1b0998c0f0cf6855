"""Private torch APIs that this package uses, in one place, each with a self-test. If a new torch release changes one of
them, a self-test reports it in one sentence, before there can be a wrong verdict.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._device
from torch import Tensor
from torch._ops import OpOverload as OpOverload
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef
from torch.overrides import TorchFunctionMode as TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

disable_functions = torch._C.DisableTorchFunction
dtype_of: Callable[[Tensor], torch.dtype] = torch._C.TensorBase.dtype.__get__  # type: ignore[attr-defined]
"""`tensor.dtype`, without the property that replaces it while a thread is inside."""
inference = functools.partial(torch._C._InferenceMode, True)
"""`torch.inference_mode()` without a Python function in between."""
disable_modes = _disable_current_modes
_functorch: Any = torch._C._functorch
vmap_level: Callable[[], object] = _functorch.peek_interpreter_stack
"""Stack of vmap and similar transforms; None outside of them."""
use_count: Callable[[int], int] = torch._C._storage_Use_Count
"""Number of owners of the storage of an identity; 0 when it is gone and its identity is kept."""
keep_identity: Callable[[torch.UntypedStorage], int] = torch.UntypedStorage._weak_ref  # type: ignore[assignment]
"""The identity of a storage, which is given to no other until `release_identity`; the storage itself may go."""
release_identity: Callable[[int], None] = torch.UntypedStorage._free_weak_ref
storage_at: Callable[[int], torch.UntypedStorage | None] = torch.UntypedStorage._new_with_weak_ptr
"""The storage of a kept identity, None when it is gone."""
_CPU = torch.device("cpu")
_CUDA_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
_IMPLICIT = torch._C.DispatchKey.CompositeImplicitAutograd
_EXPLICIT = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def in_backward() -> bool:
    """True if a backward pass of autograd runs in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def raw_storage(address: int, nbytes: int) -> torch.UntypedStorage:
    """A storage on memory that it does not own and does not keep alive."""
    raw: torch.UntypedStorage = torch._C._construct_storage_from_data_pointer(address, _CPU, nbytes)  # type: ignore[assignment]
    return raw


def weak_reference(storage: torch.UntypedStorage) -> StorageWeakRef:
    """A weak reference that knows if the storage still exists."""
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def is_gone(weak: StorageWeakRef) -> bool:
    """True if the storage has no owner any more."""
    return bool(weak.expired())  # type: ignore[no-untyped-call]


def same_generator(a: torch.Generator, b: torch.Generator) -> bool:
    """True if two Python objects represent one generator: the dispatcher makes new ones."""
    return bool(a._cdata == b._cdata)  # type: ignore[attr-defined]


def storage_from_weak(weak: StorageWeakRef) -> torch.UntypedStorage | None:
    """The storage of a weak reference, None when it is gone."""
    return torch.UntypedStorage._new_with_weak_ptr(weak.cdata)


def can_decompose(op: OpOverload) -> bool:
    """True if torch defines `op` by other operations on every device (implicitly composite)."""
    return bool(op._can_decompose())


def has_composite_kernel(op: OpOverload) -> bool:
    """True if the same C++ code, made of other operations, serves CPU and CUDA (explicitly composite)."""
    return any(_has_kernel(op, key) for key in _EXPLICIT) and not _has_kernel(op, "CPU")


def direct_call(op: OpOverload) -> Callable[..., object]:
    """The C++ function of `op`, without a Python function in between."""
    return op._op if type(op) is OpOverload else op


def opened(op: OpOverload, implicit: bool) -> Callable[..., object]:
    """Call a composite so that the active modes see the operations inside it."""
    if not implicit:
        return functools.partial(op.redispatch, _CPU_KEYS)
    return op.decompose if _IMPLICIT in op.py_kernels else functools.partial(op._op_dk, _IMPLICIT)


def run_kernel(op: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Run the kernel itself, so that the active modes see the operations inside it. A kernel that is registered only
    for CUDA (Python, in a custom operation) is used as well."""
    return op.redispatch(_CUDA_KEYS if _only_for_cuda(op) else _CPU_KEYS, *args, **kwargs)


def run_dense_kernel(op: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Run the kernel of a higher-order operator (``cond``, ``while_loop``), which is Python made of operations.

    NotImplemented for an operator that has none.
    """
    kernel = op.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)
    return NotImplemented if kernel is None else kernel(*args, **kwargs)


@functools.cache
def _only_for_cuda(op: OpOverload) -> bool:
    elsewhere = ("CPU", "CompositeImplicitAutograd", *_EXPLICIT)
    return _has_kernel(op, "CUDA") and not any(_has_kernel(op, key) for key in elsewhere)


def _has_kernel(op: OpOverload, key: str) -> bool:
    name = op.name()  # type: ignore[no-untyped-call]
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


modes_entered: Callable[[], int] = torch._C._len_torch_dispatch_stack
push_mode: Callable[[TorchDispatchMode], None] = torch._C._push_on_torch_dispatch_stack
"""Activate a dispatch mode, as `with mode:` does, without the accounts that torch.compile keeps."""
pop_mode: Callable[[], TorchDispatchMode] = functools.partial(torch._C._pop_torch_dispatch_stack, None)
"""End the last `push_mode`, and return what it pushed."""


def without_modes(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function with no dispatch mode active."""
    if not modes_entered():
        return function(*args, **kwargs)
    with disable_modes():
        return function(*args, **kwargs)


def default_device() -> torch.device | None:
    """Device given to `torch.set_default_device`, or None."""
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
    key = keep_identity(storage)
    both = use_count(key)
    del tensor
    one = use_count(key)
    del storage
    none = use_count(key)
    release_identity(key)
    return both > one == 1 and none == 0


def _identities_are_kept() -> bool:
    tensor = torch.zeros(4)
    key = keep_identity(tensor.untyped_storage())
    same = key == tensor.untyped_storage()._cdata and storage_at(key) is not None
    del tensor
    gone = storage_at(key) is None
    release_identity(key)
    return same and gone


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
        """Answer without torch, which would import dynamo for a second to find out that nothing is compiled here."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def _modes_see_inside_a_redispatch() -> bool:
    with torch.no_grad(), _Names() as mode:
        run_kernel(torch.ops.aten.zeros.default, ([2],), {})
    return any(name.startswith("aten::empty") for name in mode.names)


def _modes_can_be_pushed() -> bool:
    mode = _Names()
    push_mode(mode)
    try:
        torch.zeros(2)
    finally:
        same = modes_entered() == 1 and pop_mode() is mode
    return same and len(mode.names) > 0 and modes_entered() == 0


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


def unwrapped(tensor: Tensor) -> Tensor | None:
    """The tensor inside a wrapper that vmap, or a similar transform, passes to its function; None for other tensors.

    The wrapper has no storage.
    """
    return _functorch.get_unwrapped(tensor) if _functorch.is_functorch_wrapped_tensor(tensor) else None


def _vmap_wraps_what_it_is_given() -> bool:
    seen: list[bool] = []

    def note(row: Tensor) -> Tensor:
        inner = unwrapped(row)
        seen.append(inner is not None and inner.untyped_storage()._cdata == source.untyped_storage()._cdata)
        seen.append(vmap_level() is not None)
        return row + 0

    source = torch.zeros(2, 1)
    torch.vmap(note)(source)
    return seen == [True, True] and unwrapped(source) is None and vmap_level() is None


def _a_backward_pass_is_seen() -> bool:
    seen: list[bool] = []
    with torch.enable_grad(), torch.inference_mode(False):
        leaf = torch.zeros(1, requires_grad=True)
        result = leaf * 1
        result.register_hook(lambda _: seen.append(in_backward()))  # type: ignore[no-untyped-call]
        torch.autograd.grad(result, leaf)
    return seen == [True] and not in_backward()


SELF_TESTS: dict[str, tuple[Callable[[], bool], str]] = {
    "weak storage references": (
        _weak_references_see_death,
        "StorageWeakRef / UntypedStorage._new_with_weak_ptr no longer show when memory is freed: dangling memory would"
        " go unseen",
    ),
    "storage identities": (
        _identities_are_kept,
        "UntypedStorage._weak_ref / _cdata / _free_weak_ref no longer name one storage: host memory could pass for"
        " device memory",
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
    "pushed modes": (
        _modes_can_be_pushed,
        "torch._C._push_on_torch_dispatch_stack / _pop_torch_dispatch_stack / _len_torch_dispatch_stack changed:"
        " operations would go unseen",
    ),
    "decomposition": (
        _composites_decompose,
        "OpOverload.decompose / _can_decompose changed: host reads inside composites would go unseen in inference mode",
    ),
    "tensor properties": (
        _tensor_properties_are_inherited,
        "torch.Tensor defines device/is_cuda itself now: they cannot be replaced and restored safely",
    ),
    "vmap": (
        _vmap_wraps_what_it_is_given,
        "torch._C._functorch no longer says what vmap wraps: device memory inside of it would pass for host memory",
    ),
    "backward passes": (
        _a_backward_pass_is_seen,
        "torch._C._current_graph_task_id no longer says whether autograd runs: its own waits between streams would be"
        " taken for missing ones",
    ),
    "generator subclass": (
        _generators_can_be_subclassed,
        "torch.Generator can no longer be subclassed: generators on 'cuda' cannot be emulated",
    ),
}


def self_tests() -> list[str]:
    """Run all self-tests; one sentence for each that failed."""
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

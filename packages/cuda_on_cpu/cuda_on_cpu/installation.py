"""Replacements in torch and Triton, process-wide, while at least one thread is inside the emulation."""

from __future__ import annotations

import atexit
import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.dlpack
from torch import Tensor

from cuda_on_cpu import generators, private, session, torch_cuda, triton_driver, triton_launch
from cuda_on_cpu.compiled import run_eagerly
from cuda_on_cpu.private import disable_functions
from cuda_on_cpu.tags import DEVICE, looks_device, storage_key

_CUDA = torch.device("cuda", 0)
_MISSING = object()
_device = DEVICE.entries


class Installation:
    """The replaced attributes, and the number of threads inside. `checked`: this torch passed the self-tests.
    `compiled_regions`: number of times that code ran eagerly that torch.compile would have compiled."""

    def __init__(self) -> None:
        self.checked = False
        self.compiled_regions = 0
        self._lock = threading.Lock()
        self._users = 0
        self._entries = 0
        self._saved: list[tuple[Any, str, Any]] = []
        self._froze = False
        self._stance: contextlib.ExitStack | None = None
        self._eager = False

    def enter(self) -> None:
        """Count one more thread inside; the first replaces everything.

        Raises RuntimeError, and replaces nothing, if torch's private APIs are not those that this package expects.
        """
        self._check_torch()
        with self._lock:
            self._users += 1
            self._entries += 1
            if self._users > 1:
                return
            self._freeze_once()
            triton_driver.answer_without_a_gpu()
            for target, name, emulated in _replacements():
                self._saved.append((target, name, vars(target).get(name, _MISSING)))
                setattr(target, name, emulated)
            self._stance = contextlib.ExitStack()
            if "torch._dynamo" in sys.modules:
                self.run_compiled_code_eagerly()

    def entries(self) -> int:
        """Number of times that a thread entered so far; -1 while several are inside."""
        return self._entries if self._users == 1 else -1

    def leave(self) -> None:
        """Count one thread less inside; the last restores everything."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            if self._stance is not None:
                self._stance.close()
                self._stance, self._eager = None, False
            while self._saved:
                target, name, original = self._saved.pop()
                if original is _MISSING:
                    delattr(target, name)
                else:
                    setattr(target, name, original)

    def run_compiled_code_eagerly(self) -> None:
        """Keep torch.compile from compiling until the last thread leaves; dynamo must be imported."""
        if self._stance is not None and not self._eager:
            self._eager = True
            run_eagerly(self._stance, self._note_region)

    def _note_region(self) -> None:
        self.compiled_regions += 1

    def _check_torch(self) -> None:
        if self.checked:
            return
        failures = private.self_tests()
        if failures:
            raise RuntimeError("this torch cannot be emulated on:\n  " + "\n  ".join(failures))
        self.checked = True

    def _freeze_once(self) -> None:
        """Freeze the garbage collector once per process: a capture collects garbage, and old objects need not be
        searched each time."""
        if self._froze:  # asking gc how much is frozen takes 28 ms
            return
        gc.collect()
        gc.freeze()
        atexit.register(gc.unfreeze)
        self._froze = True


INSTALLED = Installation()


def compiled_regions_run() -> int:
    """Number of times that code ran eagerly in this process that torch.compile would have compiled."""
    return INSTALLED.compiled_regions


def _replacements() -> list[tuple[Any, str, Any]]:
    return [
        *_tensor_properties(),
        *torch_cuda.replacements(),
        *triton_launch.replacements(),
        (torch, "Generator", generators.GeneratorFactory),
        (torch, "compile", _compile_eagerly(torch.compile)),
        (torch.nested, "nested_tensor", _watched(torch.nested.nested_tensor)),
        (torch, "from_dlpack", _share_by_dlpack(torch.utils.dlpack.from_dlpack)),
        (torch.utils.dlpack, "from_dlpack", _share_by_dlpack(torch.utils.dlpack.from_dlpack)),
    ]


def _tensor_properties() -> Iterator[tuple[Any, str, Any]]:
    base: Any = torch._C.TensorBase
    yield Tensor, "device", _answer(base.device, _CUDA)
    yield Tensor, "is_cuda", _answer(base.is_cuda, True)
    yield Tensor, "is_cpu", _answer(base.is_cpu, False)
    # The same on host and device, and asked for so often that a function mode should not see it.
    yield Tensor, "shape", _unseen(base.shape)
    yield Tensor, "dtype", _unseen(base.dtype)
    get_device, record_stream = base.get_device, base.record_stream
    yield Tensor, "get_device", lambda tensor: 0 if looks_device(tensor) else get_device(tensor)
    yield Tensor, "record_stream", _recording_streams(record_stream)


def _recording_streams(stock: Callable[..., Any]) -> Callable[..., Any]:
    def record_stream(tensor: Tensor, s: Any) -> Any:
        if not looks_device(tensor):
            return stock(tensor, s)
        order = session.require().keeps_order
        if order is not None:
            with disable_functions():
                order.recorded(tensor.untyped_storage(), s.cuda_stream)
        return None

    return record_stream


def _answer(original: Any, of_device: Any) -> property:
    """A property that returns `of_device` for device tensors."""
    of_host = original.__get__

    def get(tensor: Tensor) -> Any:
        with disable_functions():
            if storage_key(tensor) in _device:
                return of_device
            if type(tensor) is Tensor:
                return of_host(tensor)
        return of_host(tensor)  # a subclass may have its own answer

    return property(get)


def _unseen(original: Any) -> property:
    """The property as it is, hidden from function modes."""
    of_any = original.__get__

    def get(tensor: Tensor) -> Any:
        if type(tensor) is not Tensor:
            return of_any(tensor)
        with disable_functions():
            return of_any(tensor)

    return property(get)


def _compile_eagerly(original: Any) -> Any:
    def compile(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if session.is_active():  # dynamo may only just have been imported
            INSTALLED.run_compiled_code_eagerly()
        return result

    return compile


def _watched(original: Any) -> Any:
    """A function of torch that function modes do not see."""

    def call(*args: Any, **kwargs: Any) -> Any:
        current = session.current()
        return original(*args, **kwargs) if current is None else current.function_mode.watch(original, args, kwargs)

    return call


def _share_by_dlpack(original: Any) -> Any:
    """Export by DLPack, through which the memory would lose its tag."""

    def from_dlpack(source: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(source, Tensor) and looks_device(source):
            return source.detach()
        return original(source, *args, **kwargs)

    return from_dlpack

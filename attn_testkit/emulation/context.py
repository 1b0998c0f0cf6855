"""The door: `with emulated_cuda(): ...`"""

from __future__ import annotations

import atexit
import contextlib
import gc
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.dlpack
from torch import Tensor

from attn_testkit.emulation import generators, private, session, torch_cuda, triton_launch
from attn_testkit.emulation.functions import DeviceFunctions
from attn_testkit.emulation.policy import Policy
from attn_testkit.emulation.session import Session
from attn_testkit.emulation.streams import Stream, default_stream
from attn_testkit.emulation.tags import looks_device

_CUDA = torch.device("cuda", 0)
_MISSING = object()
_lock = threading.Lock()


@contextlib.contextmanager
def emulated_cuda(policy: Policy | None = None) -> Iterator[None]:
    """Run the block as an ordinary CUDA program on CPU memory.

    Inside it `device="cuda"`, `torch.cuda.CUDAGraph`, streams, events, pinned memory and Triton launches under the
    interpreter work, and what breaks or goes stale under a CUDA graph on a GPU breaks or goes stale here. It may be
    nested (an inner policy holds until the inner block ends); each thread enters for itself. Everything is restored at
    the end.
    """
    outer = session.current()
    if outer is not None:
        with _nested(outer, policy):
            yield
        return
    _check_torch()
    _install()
    current = Session(policy or Policy(), default_stream(), Stream())
    current.function_mode = DeviceFunctions(current)
    session.install(current)
    try:
        with current.function_mode:
            yield
    finally:
        if current.capture is not None:
            current.capture.abandon_capture()
        session.install(None)
        _uninstall()


@contextlib.contextmanager
def _nested(current: Session, policy: Policy | None) -> Iterator[None]:
    before = current.policy, current.stream, current.sync_mode, current.capture
    current.policy = policy or current.policy
    try:
        yield
    finally:
        if current.capture is not None and current.capture is not before[3]:
            current.capture.abandon_capture()
        current.policy, current.stream, current.sync_mode, _ = before


_checked = False


def _check_torch() -> None:
    global _checked
    if _checked:
        return
    failures = private.self_tests()
    if failures:
        raise RuntimeError("this torch cannot be emulated on:\n  " + "\n  ".join(failures))
    _checked = True


# What is replaced, process-wide, while at least one thread is inside.
_users = 0
_saved: list[tuple[Any, str, Any]] = []
_froze = False
_undo_stance: contextlib.ExitStack | None = None


def _install() -> None:
    global _users, _froze, _undo_stance
    with _lock:
        _users += 1
        if _users > 1:
            return
        if not _froze:
            # Once a process: a capture collects garbage, and what exists already need not be searched each time.
            # (Asking gc how much is frozen takes 28 ms, so an own flag.)
            gc.collect()
            gc.freeze()
            atexit.register(gc.unfreeze)
            _froze = True
        for target, name, stand_in in _replacements():
            _saved.append((target, name, vars(target).get(name, _MISSING)))
            setattr(target, name, stand_in)
        _undo_stance = contextlib.ExitStack()
        if "torch._dynamo" in sys.modules:
            _undo_stance.enter_context(torch.compiler.set_stance("force_eager"))


def _uninstall() -> None:
    global _users, _undo_stance
    with _lock:
        _users -= 1
        if _users:
            return
        if _undo_stance is not None:
            _undo_stance.close()
            _undo_stance = None
        while _saved:
            target, name, original = _saved.pop()
            if original is _MISSING:
                delattr(target, name)
            else:
                setattr(target, name, original)


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
    device, is_cuda, is_cpu = base.device.__get__, base.is_cuda.__get__, base.is_cpu.__get__
    get_device = base.get_device
    yield Tensor, "device", property(lambda tensor: _CUDA if looks_device(tensor) else device(tensor))
    yield Tensor, "is_cuda", property(lambda tensor: looks_device(tensor) or is_cuda(tensor))
    yield Tensor, "is_cpu", property(lambda tensor: not looks_device(tensor) and is_cpu(tensor))
    record_stream = base.record_stream
    yield Tensor, "get_device", lambda tensor: 0 if looks_device(tensor) else get_device(tensor)
    # memory is never given to another stream here
    yield Tensor, "record_stream", lambda tensor, s: None if looks_device(tensor) else record_stream(tensor, s)


def _compile_eagerly(original: Any) -> Any:
    def compile(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if session.is_active() and _undo_stance is not None:
            # dynamo may only just have been imported
            _undo_stance.enter_context(torch.compiler.set_stance("force_eager"))
        return result

    return compile


def _watched(original: Any) -> Any:
    """A function of torch that function modes do not see."""

    def call(*args: Any, **kwargs: Any) -> Any:
        current = session.current()
        return original(*args, **kwargs) if current is None else current.function_mode.watch(original, args, kwargs)

    return call


def _share_by_dlpack(original: Any) -> Any:
    """Through DLPack the memory would lose its tag."""

    def from_dlpack(source: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(source, Tensor) and looks_device(source):
            return source.detach()
        return original(source, *args, **kwargs)

    return from_dlpack

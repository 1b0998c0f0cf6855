"""Every Triton launch of a program, run twice on the same memory: by the emulation, and by the stock interpreter.

A launch under `compared` forks a child that has the memory of the launch at the same addresses. The child takes the
emulation out of the process, so that nothing of Triton is replaced, and runs the launch; the parent runs it under the
emulation. Then every byte of every device tensor is compared, also of tensors that the kernel was not given.

Where the two differ, or the stock interpreter raises, more children tell why: the stock interpreter with the kit's
float arithmetic (what `triton_floats.py` says of stock), and with small repairs of what it cannot run.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import inspect
import os
import pickle
import select
import signal
import struct
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from cuda_on_cpu import session, triton_floats
from cuda_on_cpu.installation import INSTALLED
from cuda_on_cpu.private import disable_functions, disable_modes
from cuda_on_cpu.tags import DEVICE

Memory = dict[int, bytes]
Lines = tuple[tuple[int, ...], int]

SAME, FLOATS, DIFFERENT = "same", "floats", "different"
STOCK_RAISES, EMULATION_RAISES, BOTH_RAISE = "stock raises", "emulation raises", "both raise"
SLOW, UNCOMPARED = "stock too slow", "not compared"


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch: the kernel as `module.name`, how it compared, what the stock interpreter needed for it, and errors.

    `lines` are the kernel's own lines that ran in the stock interpreter, `of` how many it has; `wrote`: memory changed.
    """

    kernel: str
    verdict: str
    repairs: tuple[str, ...] = ()
    detail: str = ""
    lines: tuple[int, ...] = ()
    of: int = 0
    wrote: bool = False


def name_of(function: Any) -> str:
    """A kernel's Python function as `module.name`; what the interpreter rewrote keeps its module's globals."""
    return f"{function.__globals__.get('__name__', function.__module__)}.{function.__name__}"


@contextlib.contextmanager
def compared(interpreter: Any, found: list[Launch], most: int = 4, seconds: float = 60) -> Iterator[None]:
    """Inside `emulated_cuda()`: compare launches, at most `most` of a kernel, and add what was seen to `found`."""
    launcher = interpreter.GridExecutor
    emulated = launcher.__call__
    seen: dict[str, int] = {}

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        name = name_of(executor.fn)
        seen[name] = seen.get(name, 0) + 1
        if seen[name] > most:
            emulated(executor, *args, **kwargs)
            return
        comparison = _Comparison(interpreter, executor, args, kwargs, seconds)
        failure: Exception | None = None
        try:
            emulated(executor, *args, **kwargs)
        except Exception as raised:
            failure = raised
        try:
            verdict = comparison.verdict(failure)
            lines, of = comparison.lines
            found.append(dataclasses.replace(verdict, kernel=name, lines=lines, of=of, wrote=comparison.wrote))
            if failure is not None and not comparison.finish():
                raise failure
        finally:
            comparison.end()

    launcher.__call__ = launch
    try:
        yield
    finally:
        launcher.__call__ = emulated


def device_memory() -> Memory:
    """The bytes of every live device storage, by its address."""
    found: Memory = {}
    with disable_functions(), disable_modes():
        for _, storage in DEVICE.live():
            size = storage.nbytes()
            if size:
                found[storage.data_ptr()] = bytes((np.ctypeslib.as_array(_bytes_at(storage.data_ptr(), size))).data)
    return found


def _bytes_at(address: int, size: int) -> Any:
    return (ctypes.c_ubyte * size).from_address(address)


class _Comparison:
    """A launch that a forked keeper can run again from the memory that it began with, in any of several ways."""

    def __init__(self, interpreter: Any, executor: Any, args: Any, kwargs: Any, seconds: float) -> None:
        self._seconds = seconds
        self.lines: Lines = ((), 0)
        self.wrote = False
        self._before = device_memory()
        self._request, self._keeper = _keeper(lambda ways: _run_stock(interpreter, executor, args, kwargs, ways))
        self._stock = self._ask(())
        self._right: Memory | None = None

    def _ask(self, ways: tuple[str, ...]) -> Callable[[float], tuple[Memory | None, str] | None]:
        wait = self._request(ways)

        def answer(seconds: float) -> tuple[Memory | None, str] | None:
            got = wait(seconds)
            if got is None or got[0] is None:
                return got  # type: ignore[no-any-return]
            memory, self.lines = got[0]
            return memory, ""

        return answer

    def verdict(self, failure: Exception | None) -> Launch:
        """How the launch that just ran under the emulation compares; `failure` is what it raised."""
        after = device_memory()
        self.wrote = not same(self._before, after)
        answer = self._stock(self._seconds)
        if answer is None:
            return Launch("", SLOW)
        memory, error = answer
        if failure is not None:
            return self._of_a_failure(_cause(failure), memory, error)
        if memory is not None and same(memory, after):
            return Launch("", SAME)
        first = "" if memory is None else difference(memory, after)
        repairs = ("repairs",) if memory is None else ()
        for ways in (repairs, (*repairs, "floats")):
            if not ways:
                continue
            again = self._ask(ways)(self._seconds)
            if again is None:
                return Launch("", SLOW, ways, error)
            if again[0] is None:
                return Launch("", STOCK_RAISES, ways, error + (f" | repaired: {again[1]}" if again[1] != error else ""))
            if same(again[0], after):
                return Launch("", FLOATS if "floats" in ways else SAME, ways, error or first)
            first = difference(again[0], after)
        return Launch("", DIFFERENT, repairs, f"{first} {error}".strip())

    def _of_a_failure(self, failure: str, memory: Memory | None, error: str) -> Launch:
        self._right = memory
        if memory is not None:
            return Launch("", EMULATION_RAISES, (), failure)
        again = self._ask(("repairs",))(self._seconds)
        if again is not None and again[0] is not None:
            self._right = again[0]
            return Launch("", EMULATION_RAISES, ("repairs",), f"{failure} | stock: {error}")
        return Launch("", BOTH_RAISE, (), f"{failure} | stock: {error}")

    def finish(self) -> bool:
        """Leave the memory as the stock interpreter left it, if it could, so that a program goes on without us."""
        for address, content in (self._right or {}).items():
            ctypes.memmove(address, content, len(content))
        return self._right is not None

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._keeper, signal.SIGKILL)
        os.waitpid(self._keeper, 0)


def same(one: Memory, other: Memory) -> bool:
    """Whether memory that is in both has the same bytes."""
    return all(one[address] == other[address] for address in one.keys() & other.keys())


def difference(one: Memory, other: Memory) -> str:
    """How many bytes of how many tensors differ."""
    counts = []
    for address in sorted(one.keys() & other.keys()):
        if one[address] != other[address]:
            left, right = (np.frombuffer(memory[address], np.uint8) for memory in (one, other))
            counts.append(f"{np.count_nonzero(left != right)} of {len(left)} bytes")
    return ", ".join(counts)


def _keeper(run: Callable[[tuple[str, ...]], Any]) -> tuple[Callable[[tuple[str, ...]], Any], int]:
    """A forked process that forks once for each request. Returns how to ask, which gives how to wait, and its id."""
    requests, asks = os.pipe()
    answers, replies = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: other threads of torch sleep
        keeper = os.fork()
    if keeper == 0:
        with contextlib.suppress(BaseException):
            warnings.simplefilter("ignore")
            os.close(asks)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            while size := os.read(requests, 4):
                ways = pickle.loads(os.read(requests, struct.unpack("<I", size)[0]))
                child = os.fork()
                if child == 0:
                    _send(replies, _guarded(run, ways))
                    os._exit(0)
                with contextlib.suppress(ChildProcessError):
                    _, status = os.waitpid(child, 0)
                    if os.WIFSIGNALED(status):
                        _send(replies, (None, f"died of signal {os.WTERMSIG(status)}"))
        os._exit(0)
    os.close(requests)
    os.close(replies)

    def ask(ways: tuple[str, ...]) -> Callable[[float], Any]:
        text = pickle.dumps(ways)
        os.write(asks, struct.pack("<I", len(text)) + text)
        return lambda seconds: _receive(answers, time.monotonic() + seconds)

    return ask, keeper


def _guarded(run: Callable[[tuple[str, ...]], Any], ways: tuple[str, ...]) -> tuple[Any, str]:
    try:
        return run(ways), ""
    except BaseException as failure:
        return None, _cause(failure)


def _cause(failure: BaseException) -> str:
    while failure.__cause__ is not None:
        failure = failure.__cause__
    frame, trace = "", failure.__traceback__
    while trace is not None:
        frame, trace = f"{trace.tb_frame.f_code.co_name}:{trace.tb_lineno}", trace.tb_next
    return f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]} [{frame}]"


def _send(file: int, answer: Any) -> None:
    text = pickle.dumps(answer)
    view = memoryview(struct.pack("<Q", len(text)) + text)
    while view:
        view = view[os.write(file, view) :]


def _receive(file: int, until: float) -> Any:
    """The next answer, or None if there is none in time."""

    def exactly(size: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < size:
            if not select.select([file], [], [], max(0.0, until - time.monotonic()))[0]:
                return None
            part = os.read(file, min(size - len(parts), 1 << 20))
            if not part:
                return None
            parts += part
        return bytes(parts)

    head = exactly(8)
    body = exactly(struct.unpack("<Q", head)[0]) if head is not None else None
    return None if body is None else pickle.loads(body)


def _run_stock(interpreter: Any, executor: Any, args: Any, kwargs: Any, ways: tuple[str, ...]) -> tuple[Memory, Lines]:
    """In a child: take the emulation out of this process, launch, and return device memory and the lines that ran."""
    memory_of = device_memory  # the list of device storages outlives the session
    session.install(None)
    INSTALLED.leave()
    sys.settrace(None)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    warnings.simplefilter("ignore")
    if "floats" in ways:
        for target, name, replacement in triton_floats.replacements(interpreter):
            setattr(target, name, replacement)
    if "repairs" in ways:
        executor = repaired(interpreter, executor)
    code = executor.fn.__code__
    ran: set[int] = set()

    def line(frame: Any, event: str, _: Any) -> Any:
        if event == "line":
            ran.add(frame.f_lineno)
        return line

    with torch.no_grad(), disable_modes(), disable_functions():
        sys.settrace(lambda frame, *_: line if frame.f_code is code else None)
        interpreter.GridExecutor.__call__(executor, *args, **kwargs)
        sys.settrace(None)
    written = {number for *_, number in code.co_lines() if number is not None} - {code.co_firstlineno}
    return memory_of(), (tuple(sorted(ran & written)), len(written))


class _Number(int):
    """A loop variable that a kernel converts, as it may in compiled code."""

    def to(self, dtype: Any, *_: Any, **__: Any) -> Any:
        from triton.language import core

        return core.to_tensor(int(self)).to(dtype)


def _kept(operation: str) -> Any:
    stock = getattr(int, operation)

    def operate(self: int, other: Any) -> Any:
        result = stock(self, other)
        return _Number(result) if type(result) is int else result

    return operate


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "rfloordiv", "mod", "rmod"):
    setattr(_Number, f"__{_name}__", _kept(f"__{_name}__"))


def _range(*args: Any, **_: Any) -> Iterator[int]:
    numbers = [int(arg.handle.data.item()) if hasattr(arg, "handle") else int(arg) for arg in args]
    return map(_Number, range(*numbers))


def repaired(interpreter: Any, executor: Any) -> Any:
    """The launch with what the stock interpreter lacks: names that hold functions of triton.language are looked up
    when they are called, loop variables can be converted, a grid may be a list, a mask of whole numbers is one of
    booleans, and a launch does not wait for the one before it."""
    tl = interpreter.tl
    functions = {
        id(value): name
        for space in (tl.core, tl.math, tl.standard, tl)
        for name, value in vars(space).items()
        if isinstance(value, types.FunctionType)
    }
    for namespace in [vars(module) for module in list(sys.modules.values()) if isinstance(module, types.ModuleType)]:
        if "tl" not in namespace and "triton" not in namespace:
            continue
        if str(namespace.get("__name__", "")).split(".")[0] in ("triton", __name__):
            continue
        for name, value in list(namespace.items()):
            if isinstance(value, types.FunctionType) and id(value) in functions:
                namespace[name] = _late(tl, functions[id(value)], value)
    for name in ("gdc_wait", "gdc_launch_dependents"):  # programs run one after another
        if hasattr(tl.extra.cuda, name):
            setattr(tl.extra.cuda, name, lambda *_, **__: None)
    for name in ("create_masked_load", "create_masked_store"):
        setattr(interpreter.InterpreterBuilder, name, _with_masks(getattr(interpreter.InterpreterBuilder, name)))
    grid = executor.grid
    plain = (lambda meta: tuple(int(n) for n in grid(meta))) if callable(grid) else tuple(int(n) for n in grid)
    executor.fn.__globals__["range"] = _range
    return type(executor)(executor.fn, executor.arg_names, plain, executor.pre_run_hooks)


def _with_masks(stock: Any) -> Any:
    names = list(inspect.signature(stock).parameters)

    def access(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        mask = given["mask"]
        if mask is not None and mask.data.dtype != np.bool_:
            mask.data = mask.data.astype(np.bool_)
        return stock(**given)

    return access


def _late(tl: Any, name: str, value: Any) -> Any:
    places = [space for space in (tl, tl.math, tl.core) if vars(space).get(name) is value]
    space = places[0] if places else tl

    def function(*args: Any, **kwargs: Any) -> Any:
        return getattr(space, name)(*args, **kwargs)

    return function

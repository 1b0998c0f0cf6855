"""Conversion of an exception of a backend to a finding: which check it fails, in which phase, and what to do."""

from __future__ import annotations

import dis
import inspect
import linecache
import multiprocessing
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

from ..contract import AttentionBackend
from ..distributions import DISTRIBUTIONS, folder_of
from ..results.finding import Finding
from ..results.texts import is_generated, message_of
from .compiler_texts import said_by_compiler

_LOST = re.compile(
    r"device-side assert triggered|illegal memory access|unspecified launch failure|misaligned address"
    r"|an illegal instruction"
    r"|hardware stack error|CUDA_ERROR_(ILLEGAL|ASSERT|LAUNCH)",
    re.IGNORECASE,
)
LOST_HINT = "the device context is lost; errors of asynchronous kernels appear late, so the cause may be earlier"
_SYNC = re.compile(r"synchroniz|HostSync|called a synchronizing CUDA operation", re.IGNORECASE)

_PHASE_WORDS = {
    "constructor": "the constructor",
    "KV pool": "lay_out_kv_pool",
    "graph state": "init_cuda_graph_state",
    "plan": "init_forward_metadata",
    "forward": "forward",
    "forward without k and v": "forward",
    "plan for capture": "init_forward_metadata_out_graph(in_capture=True)",
    "plan before capture": "init_forward_metadata_before_capture",
    "warm-up": "a warm-up before capture",
    "capture": "capture",
    "plan for replay": "init_forward_metadata_out_graph before a replay",
    "replay": "replay",
    "read back": "reading the results back",
    "verify mask": "verify_mask",
    "fill value": "get_cuda_graph_seq_len_fill_value",
    "kernels": "kernels",
}
_BEFORE_ANY_BATCH = ("constructor", "KV pool", "graph state", "verify mask", "fill value", "kernels")
"""Phases in which no lengths are given yet, so that a None is not a missing length."""


def is_ctrl_c(error: BaseException) -> bool:
    """True if the interrupt may come from the user and not from the backend. Ctrl-C does not reach a worker."""
    return isinstance(error, KeyboardInterrupt) and multiprocessing.parent_process() is None


def context_lost(error: BaseException) -> bool:
    """True if the device is unusable for the rest of the process."""
    # Only the first line counts: every CUDA error of torch mentions device-side assertions further down.
    return bool(_LOST.search(first_line(error)))


def device_full(error: BaseException) -> str:
    """Text for a device that ran out of memory; empty for any other error."""
    kind, first = type(error).__name__, first_line(error)
    # torch's allocator raises the first. The driver has no room for a stream or a kernel: cudaErrorMemoryAllocation.
    full = kind == "OutOfMemoryError" or (kind == "AcceleratorError" and first == "CUDA error: out of memory")
    return f"{_asked_for(first)} {_FULL_HINT}" if full else ""


def _asked_for(message: str) -> str:
    """Remove the list of all processes on the device from the end of a message."""
    return re.split(r" Process [0-9]+ has| Including ", message)[0]


def from_exception(error: BaseException, phase: str, label: str, *, needs_cpu_lengths: bool) -> Finding:
    """Make the finding for an exception in ``phase`` (of ``RunError``), in the step called ``label``.

    ``needs_cpu_lengths``: the capability. If it is False, an error about None is probably a missing host length.
    """
    kind, message = type(error).__name__, _said(error, "operation") or reason_of(error)
    check, headline, hint = _classify(error, kind, message, phase, needs_cpu_lengths)
    # Errors of the emulation know what CUDA would have done and how such code is usually fixed.
    # The cure of a sync is written for captures; an eager step and a plan have others.
    cure = "" if check == "no-host-lengths" else _said(error, "cure")
    lines = [_said(error, "cuda"), cure or _forgotten_super(error) or hint]
    where = "\n".join(filter(None, (site_of(error, phase), _kernel_line(error))))
    return Finding(check, headline, where=where, hint="\n".join(line for line in lines if line), step=label)


def _said(error: BaseException, name: str) -> str:
    """Read an attribute of an emulation's error; an error of a backend may have an unrelated attribute of this name."""
    found = inspect.getattr_static(error, name, "")
    return found if isinstance(found, str) else ""


def _classify(
    error: BaseException, kind: str, message: str, phase: str, needs_cpu_lengths: bool
) -> tuple[str, str, str]:
    """Return the id of the check, the headline and the hint."""
    place = _PHASE_WORDS.get(phase, phase)
    raised = f"{place} raised {kind}: {message}"
    if kind in ("ShapeError", "ContractError"):
        return "output-contract", message, ""
    if kind == "MissingRankError":
        return "completes", f"{place}: {message}", ""
    if kind == "OutOfMemoryError":
        return "completes", f"{place}: {_asked_for(message)}", _FULL_HINT
    if kind == "DanglingMemoryError":
        return (
            "addresses-stable",
            f"the graph uses memory that no longer exists: {message}",
            "allocate it once, in the constructor or init_cuda_graph_state, and fill it in place",
        )
    if phase == "capture":
        return "captures-cleanly", f"cannot be captured: {message}", _CAPTURE_HINT
    if phase in _WITHOUT_WAITS and not needs_cpu_lengths and (kind == "HostSyncError" or _SYNC.search(message)):
        return (
            "no-host-lengths",
            f"{_WITHOUT_WAITS[phase]} waits for the device: {message}",
            "needs.cpu_seq_lens is False: keep lengths on the device, or declare needs={'cpu_seq_lens': True} to "
            "get seq_lens_cpu"
            + ("" if phase == "plan for replay" else f", or {_MAY_WAIT} to allow the sync in eager mode")
            + (": a forward that waits cannot be captured" if phase in _CAPTURED_TOO else ""),
        )
    if phase == "forward without k and v" and "NoneType" in message:
        return (
            "completes",
            raised,
            "takes_none_kv is declared: with save_kv_cache=False, k and v may be None and must not be read",
        )
    hint = ""
    if not needs_cpu_lengths and "NoneType" in message and phase not in _BEFORE_ANY_BATCH:
        if _reads_host_lengths(_frames(error)):
            return "no-host-lengths", raised, f"{_NO_LENGTHS} are None"
        if _reads_host_lengths(_methods(error)):
            hint = f"if the missing value is a length: {_NO_LENGTHS} are None, even if another hook stored them"
    if any("custom_mask" in place for place in (site_of(error, phase), message)):
        hint = (
            "custom_mask has the layout that verify_mask() returns, or whole prefixes (FULL_MASK) if that is None: a "
            "wrapper must return its child's"
        )
    elif phase == "plan for replay" and kind == "AttributeError":
        hint = "at a replay the batch is a view without extend_* fields; read lengths from seq_lens and spec_info"
    elif context_lost(error):
        hint = LOST_HINT
    return "completes", raised, hint


_WITHOUT_WAITS = {
    "plan for replay": "preparing a replay",
    "plan": "planning an eager step",
    "forward": "an eager forward",
    "forward without k and v": "an eager forward",
}
"""Phases in which nothing may wait for the device if CPU lengths are not needed, in words."""
_CAPTURED_TOO = ("forward", "forward without k and v")
"""Phases that a graph captures too: no declaration allows a sync there."""

_MAY_WAIT = "server=ServerConventions(eager_without_waits=False)"
_NO_LENGTHS = "needs.cpu_seq_lens is False, so seq_lens_cpu, seq_lens_sum and the *_cpu lists"


def _reads_host_lengths(codes: Iterator[CodeType]) -> bool:
    """True if an author's function names a length on the host. Otherwise a None may be any value that is not set
    yet."""
    own = (code for code in codes if not is_foreign(code.co_filename))
    return any(name.endswith("_cpu") or name == "seq_lens_sum" for code in own for name in _names_in(code))


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)


def _frames(error: BaseException) -> Iterator[CodeType]:
    return (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))


def _methods(error: BaseException) -> Iterator[CodeType]:
    """All functions of the backends in the frames of a traceback."""
    for backend in set(_backends_in(error)):
        for kind in backend.__mro__:
            for value in vars(kind).values():
                if isinstance(code := getattr(value, "__code__", None), CodeType):
                    yield code


def _forgotten_super(error: BaseException) -> str:
    """Advice if the missing attribute is one that a parent's constructor sets."""
    if not isinstance(error, AttributeError) or not isinstance(error.obj, AttentionBackend):
        return ""
    own, *parents = type(error.obj).__mro__
    for parent in parents:
        code = getattr(vars(parent).get("__init__"), "__code__", None)
        if code and any(i.opname == "STORE_ATTR" and i.argval == error.name for i in dis.get_instructions(code)):
            return (
                f"{own.__name__}.__init__ did not call that of {parent.__name__}, which sets {error.name}: "
                "begin it with super().__init__(context)"
            )
    return ""


_FULL_HINT = (
    "If other programs or several processes of the kit use this device, the backend is not at fault: "
    "use fewer --jobs, or a free device."
)
_CAPTURE_HINT = "a capture allows no .item(), .cpu(), .tolist(), host copies or data-dependent shapes"


def first_line(error: BaseException) -> str:
    """The first line of the error's message, without leading blank lines."""
    lines = message_of(error).strip().splitlines()
    return lines[0] if lines else "(no message)"


def reason_of(error: BaseException) -> str:
    """The reason in the error's message: the first line, plus the last one if the first only announces it (``at
    10:15:``, as Triton's compiler does). For torch.compile, the message of the innermost exception.
    """
    said = said_by_compiler(error)
    if said:
        return said
    lines = [line.strip() for line in message_of(error).splitlines() if line.strip(" \t^~")]
    if len(lines) < 2 or not lines[0].endswith(":"):
        return first_line(error)
    return f"{lines[0]} {lines[-1]}"


def _kernel_line(error: BaseException) -> str:
    """The line of a kernel that Triton's compiler refused: it is counted from the kernel's first line."""
    lines = message_of(error).splitlines()
    at = re.fullmatch(r"at (\d+):\d+:", lines[0]) if lines else None
    carets = [index for index, line in enumerate(lines) if line.strip() == "^"]
    return f"line {at[1]} of the kernel: {lines[carets[0] - 1].strip()}" if at and carets else ""


def site_of(error: BaseException, phase: str = "") -> str:
    """The innermost line of the author, not of torch or the kit, as ``file:line in function: code``.

    If no such line was reached, for example because a hook has the wrong parameters: the function that was called in
    ``phase``.
    """
    site = inspect.getattr_static(error, "site", None)
    if isinstance(site, tuple) and len(site) == 3 and not is_generated(str(site[0])):
        return _place(*site)
    if isinstance(site, str):
        return site
    for candidate in _raised_first(error):
        for frame in reversed(traceback.extract_tb(candidate.__traceback__)):
            if not is_foreign(frame.filename):
                return _place(frame.filename, frame.lineno or 0, frame.name)
    return _called(error, phase)


def _raised_first(error: BaseException) -> list[BaseException]:
    """The error and those that caused it, the first one first. A compiler wraps an error several times."""
    chain = [error]
    while (before := _behind(chain[-1])) is not None and all(before is not known for known in chain):
        chain.append(before)
    return chain[::-1]


def _behind(error: BaseException) -> BaseException | None:
    return error.__cause__ if error.__suppress_context__ else error.__context__


def _place(filename: str, line: int, function: str) -> str:
    code = linecache.getline(filename, line).strip()
    return f"{Path(filename).name}:{line} in {function}" + (f": {code}" if code else "")


_HOOKS = {
    "constructor": "__init__",
    "graph state": "init_cuda_graph_state",
    "plan": "init_forward_metadata",
    "forward": "forward",
    "forward without k and v": "forward",
    "plan for capture": "init_forward_metadata_out_graph",
    "plan before capture": "init_forward_metadata_before_capture",
    "plan for replay": "init_forward_metadata_out_graph",
    "fill value": "get_cuda_graph_seq_len_fill_value",
}
"""Phase -> method of the backend that is called in it."""


def _called(error: BaseException, phase: str) -> str:
    """Location of the function that the kit called; empty if the function is not the author's, or unknown."""
    named = re.match(r"[\w.<>]*?(\w+)\(\) (takes|missing|got)", message_of(error))
    name = named[1] if named and isinstance(error, TypeError) else _HOOKS.get(phase, "")
    for backend in _backends_in(error):
        function = inspect.getattr_static(backend, name, None) if name else None
        code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
        if isinstance(code, CodeType) and not is_foreign(code.co_filename):
            return _place(code.co_filename, code.co_firstlineno, code.co_name)
    return ""


def _backends_in(error: BaseException) -> Iterator[type]:
    """Backends in the frames of a traceback, the innermost first."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        for value in list(frame.f_locals.values()):
            if isinstance(value, type) and issubclass(value, AttentionBackend):
                yield value
            for held in (value, inspect.getattr_static(value, "backend", None)):
                if isinstance(held, AttentionBackend):
                    yield type(held)


_OF_A_LIBRARY = re.compile(
    r"/(?:site|dist)-packages/(?:torch|functorch|triton)/|/lib/python3\.\d+/(?!(?:site|dist)-packages/)"
)
_JUDGED = ("backends", "examples", "faults", "fakes")
"""Folders of the kit with code that an author of backends may look at."""


def is_foreign(filename: str) -> bool:
    """True for frames that an author cannot fix: of torch, Triton, Python, generated code, and of the kit except its
    backends and examples.
    """
    path = filename.replace("\\", "/")
    if "/runner_modes/" in path or _OF_A_LIBRARY.search(path) or is_generated(path):
        return True
    of_kit = any(folder and path.startswith(folder) for folder in map(folder_of, DISTRIBUTIONS))
    return of_kit and not any(f"/{room}/" in path for room in _JUDGED)

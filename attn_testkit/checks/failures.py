"""Turning what a backend raised into a finding: which check it fails, in which phase, and what to do."""

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
from ..results import Finding, is_generated, message_of
from .check import Check, Stage
from .compiler_texts import said_by_compiler

__all__ = [
    "CHECKS",
    "context_lost",
    "device_full",
    "first_line",
    "from_exception",
    "is_ctrl_c",
    "reason_of",
    "site_of",
]

_LOST = re.compile(
    r"device-side assert triggered|illegal memory access|unspecified launch failure|misaligned address"
    r"|an illegal instruction"
    r"|hardware stack error|CUDA_ERROR_(ILLEGAL|ASSERT|LAUNCH)",
    re.IGNORECASE,
)
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
"""Where no lengths were given, so that a None is not theirs."""


def is_ctrl_c(error: BaseException) -> bool:
    """Whether it may be the user who interrupts, and not the backend that raises. A worker is reached by no Ctrl-C."""
    return isinstance(error, KeyboardInterrupt) and multiprocessing.parent_process() is None


def context_lost(error: BaseException) -> bool:
    """Whether the device is unusable for the rest of the process."""
    # The first line: every CUDA error of torch goes on to speak of device-side assertions.
    return bool(_LOST.search(first_line(error)))


def device_full(error: BaseException) -> str:
    """What to say when the device has no memory left; empty if that is not what happened."""
    return f"{_asked_for(first_line(error))} {_FULL_HINT}" if type(error).__name__ == "OutOfMemoryError" else ""


def _asked_for(message: str) -> str:
    """Without what follows: a list of every process on the device."""
    return re.split(r" Process [0-9]+ has| Including ", message)[0]


def from_exception(error: BaseException, phase: str, label: str, *, needs_cpu_lengths: bool) -> Finding:
    """The finding for what was raised in ``phase`` (of ``DriveError``), in the step called ``label``.

    ``needs_cpu_lengths``: the claim, without which a None that is tripped over is a missing host length.
    """
    kind, message = type(error).__name__, _said(error, "operation") or reason_of(error)
    check, headline, hint = _classify(error, kind, message, phase, needs_cpu_lengths)
    # Errors of the emulation know what CUDA would have done and how such code is usually mended.
    lines = [_said(error, "cuda"), _said(error, "cure") or _forgotten_super(error) or hint]
    where = "\n".join(filter(None, (site_of(error, phase), _kernel_line(error))))
    return Finding(check, headline, where=where, hint="\n".join(line for line in lines if line), step=label)


def _said(error: BaseException, name: str) -> str:
    """An attribute that an error of the emulation has, and that one of a backend may have with any meaning."""
    found = inspect.getattr_static(error, name, "")
    return found if isinstance(found, str) else ""


def _classify(
    error: BaseException, kind: str, message: str, phase: str, needs_cpu_lengths: bool
) -> tuple[str, str, str]:
    """(id of the check, headline, hint)."""
    place = _PHASE_WORDS.get(phase, phase)
    raised = f"{place} raised {kind}: {message}"
    if kind in ("ShapeError", "ContractError"):
        return "output-contract", message, ""
    if kind == "OutOfMemoryError":
        return "completes", f"{place}: {_asked_for(message)}", _FULL_HINT
    if kind == "DanglingMemoryError":
        return (
            "addresses-stable",
            f"the graph uses memory that is gone: {message}",
            "allocate it once, in the constructor or init_cuda_graph_state, and fill it in place",
        )
    if phase == "capture":
        return "captures-cleanly", f"cannot be captured: {message}", _CAPTURE_HINT
    if phase in _WITHOUT_WAITS and not needs_cpu_lengths and (kind == "HostSyncError" or _SYNC.search(message)):
        return (
            "no-host-lengths",
            f"{_WITHOUT_WAITS[phase]} waits for the device: {message}",
            "needs_cpu_seq_lens is False: keep lengths on the device, or declare that they are needed"
            + ("" if phase == "plan for replay" else f" (or {_MAY_WAIT}, if only eager steps wait)"),
        )
    if phase == "forward without k and v" and "NoneType" in message:
        return "completes", raised, "takes_none_kv: with save_kv_cache False k and v may be None, and are not read"
    hint = ""
    if not needs_cpu_lengths and "NoneType" in message and phase not in _BEFORE_ANY_BATCH:
        if _reads_host_lengths(_frames(error)):
            return "no-host-lengths", raised, f"{_NO_LENGTHS} are None"
        if _reads_host_lengths(_methods(error)):
            hint = f"if it is a length: {_NO_LENGTHS} are None, also where they were kept by another hook"
    if any("custom_mask" in place for place in (site_of(error, phase), message)):
        hint = (
            "custom_mask lies as verify_mask() says, and with whole prefixes (FULL_MASK) where that is None: a wrapper "
            "has to hand out its child's"
        )
    elif phase == "plan for replay" and kind == "AttributeError":
        hint = "at a replay the batch is a view without extend_* fields; take lengths from seq_lens and spec_info"
    elif context_lost(error):
        hint = "the device context is lost; errors of asynchronous kernels surface late, so the cause may be earlier"
    return "completes", raised, hint


_WITHOUT_WAITS = {
    "plan for replay": "preparing a replay",
    "plan": "planning an eager step",
    "forward": "an eager forward",
    "forward without k and v": "an eager forward",
}
"""Phases in which nothing may wait for the device, where CPU lengths are declared unneeded; and their words."""

_MAY_WAIT = "server=ServerConventions(eager_without_waits=False)"
_NO_LENGTHS = "needs_cpu_seq_lens is False, so seq_lens_cpu, seq_lens_sum and the *_cpu lists"


def _reads_host_lengths(codes: Iterator[CodeType]) -> bool:
    """Whether an author's function names a length on the host. A None may be anything else that is not there yet."""
    own = (code for code in codes if not _foreign(code.co_filename))
    return any(name.endswith("_cpu") or name == "seq_lens_sum" for code in own for name in _names_in(code))


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)


def _frames(error: BaseException) -> Iterator[CodeType]:
    return (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))


def _methods(error: BaseException) -> Iterator[CodeType]:
    """All functions of the backends that the frames hold."""
    for backend in set(_backends_in(error)):
        for kind in backend.__mro__:
            for value in vars(kind).values():
                if isinstance(code := getattr(value, "__code__", None), CodeType):
                    yield code


def _forgotten_super(error: BaseException) -> str:
    """What to do when the missing attribute is one that a parent's constructor sets."""
    if not isinstance(error, AttributeError) or not isinstance(error.obj, AttentionBackend):
        return ""
    own, *parents = type(error.obj).__mro__
    for parent in parents:
        code = getattr(vars(parent).get("__init__"), "__code__", None)
        if code and any(i.opname == "STORE_ATTR" and i.argval == error.name for i in dis.get_instructions(code)):
            return (
                f"{own.__name__}.__init__ did not run that of {parent.__name__}, which sets {error.name}: "
                "begin it with super().__init__(context)"
            )
    return ""


_FULL_HINT = (
    "If others use this device, or several processes of the kit do, that is no fault of the backend: "
    "fewer --jobs, or a device of its own."
)
_CAPTURE_HINT = "no .item(), .cpu(), .tolist(), host copies or data-dependent shapes in a capture"


def first_line(error: BaseException) -> str:
    """Of its message, without blank lines before it."""
    lines = message_of(error).strip().splitlines()
    return lines[0] if lines else "(no message)"


def reason_of(error: BaseException) -> str:
    """What of its message says why: the first line, and where that only announces what follows (``at 10:15:``, as
    Triton's compiler does) the last one too. Of torch.compile's exceptions, what the innermost one says.
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
    """The innermost line that is not torch's or the kit's drive: the author's. ``file:line in function: code``.

    Where no such line was reached, as when a hook takes other arguments: the function that was called in ``phase``.
    """
    site = inspect.getattr_static(error, "site", None)
    if isinstance(site, tuple) and len(site) == 3 and not is_generated(str(site[0])):
        return _place(*site)
    if isinstance(site, str):
        return site
    for candidate in _raised_first(error):
        for frame in reversed(traceback.extract_tb(candidate.__traceback__)):
            if not _foreign(frame.filename):
                return _place(frame.filename, frame.lineno or 0, frame.name)
    return _called(error, phase)


def _raised_first(error: BaseException) -> list[BaseException]:
    """The error, and behind which ones it was raised; the first one first. A compiler wraps an error several times."""
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
"""Phase -> what of the backend is called in it."""


def _called(error: BaseException, phase: str) -> str:
    """Where what the kit called is defined; empty if that is not the author's, or cannot be known."""
    named = re.match(r"[\w.<>]*?(\w+)\(\) (takes|missing|got)", message_of(error))
    name = named[1] if named and isinstance(error, TypeError) else _HOOKS.get(phase, "")
    for backend in _backends_in(error):
        function = inspect.getattr_static(backend, name, None) if name else None
        code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
        if isinstance(code, CodeType) and not _foreign(code.co_filename):
            return _place(code.co_filename, code.co_firstlineno, code.co_name)
    return ""


def _backends_in(error: BaseException) -> Iterator[type]:
    """Backends that the frames of a traceback hold, the innermost first."""
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
_KIT = str(Path(__file__).resolve().parent.parent)


def _foreign(filename: str) -> bool:
    """Frames that an author cannot mend: torch, Triton, Python's own, what a compiler wrote, and the kit outside its
    own backends and examples.
    """
    path = filename.replace("\\", "/")
    if "/runner_modes/" in path or _OF_A_LIBRARY.search(path) or is_generated(path):
        return True
    return path.startswith(_KIT) and not any(f"/{room}/" in path for room in ("backends", "examples", "faults"))


CHECKS = (
    Check(
        "completes",
        "A claimed case runs: constructor, planning and every forward finish without an exception.",
        "An attribute that a replay view does not have, a shape that only full batches have, a missing kernel.",
        "sglang #26019, #32269; vLLM #41841",
        "The first line holds the exception; `where` is the last line of it that is yours.",
        judged_from=Stage.COMPLETED,
    ),
    Check(
        "output-contract",
        "The output has the live and padded rows of q, Hq * Dv values a row, the model's dtype, q's device.",
        "squeeze() where q has one row, an output buffer of the largest batch returned whole, float32 returned.",
        "lmdeploy #4302; flashinfer #2876",
        "Compare the shape, dtype or device in the headline with `Hq * Dv` values a row, in q's dtype.",
        judged_from=Stage.OBSERVED,
    ),
)
"""In the order in which they are worth reading. Found while driving."""

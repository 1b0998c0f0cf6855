"""Behavior of the emulation if CUDA leaves a choice, and effects that the emulation cannot show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Policy:
    """Strictness of the emulation. The defaults find the most mistakes. Raises ValueError for a value that a field does
    not have.

    `dangling`            action of a replay when memory it uses is gone: raise, or ("poison") let the graph use a
                          private buffer of fill bytes instead
    `poison_temporaries`  fill memory of a graph's pool as soon as the captured program dropped it, on every replay
    `fill`                the byte found in `torch.empty` memory and in freed pool memory. 0xFF reads as NaN and -1. A
                          second run with another byte separates "reads uninitialised memory" from "wrong". None
                          leaves memory as it is
    `rollback`            undo, at the end of a capture, the captured operations' changes of memory outside the graph:
                          on a GPU they do not run during capture
    `bounds`              memory that a Triton kernel may use through the pointer of an argument: all of its storage, or
                          only the view that was passed
    `masked_loads`        what a masked load without `other=` leaves where its mask is off. Triton leaves it undefined
                          (triton #9917). "zero" is what Triton leaves on NVIDIA's GPUs, and kernels of servers
                          rely on it; "poison" is NaN, or a large integer
    `program_order`       order in which the programs of a launch of a Triton kernel run: by number, or the last first.
                          A device may take any. A kernel with a `while` loop, which may wait for other programs, runs
                          in the order of numbers
    `programs`            programs of a launch that take the same path run as one with larger blocks, or
                          "one_by_one". Numbers and findings are the same
    `late`                the device is late: the first `query()` after an event was recorded answers that its work is
                          not done, unless the host has waited for it
    `side_streams`        work that is issued on another stream than the default one happens at once, or ("late") when
                          something waits for it. A device may do either
    `races`               look for programs of one launch of a Triton kernel that use the same location, where one of
                          them writes another value and no atomic operation orders them
    """

    dangling: Literal["error", "poison"] = "error"
    poison_temporaries: bool = True
    fill: int | None = 0xFF
    rollback: bool = True
    bounds: Literal["storage", "view"] = "storage"
    masked_loads: Literal["zero", "poison"] = "zero"
    races: bool = True
    program_order: Literal["forward", "reverse"] = "forward"
    programs: Literal["together", "one_by_one"] = "together"
    late: bool = False
    side_streams: Literal["at_once", "late"] = "at_once"

    def __post_init__(self) -> None:
        if self.dangling not in ("error", "poison"):
            raise ValueError(f"dangling is 'error' or 'poison', not {self.dangling!r}")
        if self.bounds not in ("storage", "view"):
            raise ValueError(f"bounds is 'storage' or 'view', not {self.bounds!r}")
        if self.masked_loads not in ("zero", "poison"):
            raise ValueError(f"masked_loads is 'zero' or 'poison', not {self.masked_loads!r}")
        if self.program_order not in ("forward", "reverse"):
            raise ValueError(f"program_order is 'forward' or 'reverse', not {self.program_order!r}")
        if self.programs not in ("together", "one_by_one"):
            raise ValueError(f"programs is 'together' or 'one_by_one', not {self.programs!r}")
        if self.side_streams not in ("at_once", "late"):
            raise ValueError(f"side_streams is 'at_once' or 'late', not {self.side_streams!r}")
        if self.fill is not None and not 0 <= self.fill <= 0xFF:
            raise ValueError(f"fill is one byte (0 to 255) or None, not {self.fill!r}")


LIMITS: tuple[str, ...] = (
    "Kernels that exist only for CUDA (cuBLAS, CUTLASS, vendor libraries, custom C++ ops) did not run.",
    "GPU numerics and speed were not tested: every operation ran its CPU kernel.",
    "Streams are serial: of missing waits those are shown where two streams surely touch the same memory.",
    "Lazy initialisation inside a capture (first cuBLAS handle, JIT compilation, autotuning) is not shown.",
    "Freed addresses are not given to somebody else: use of freed memory is reported, the damage it does is not.",
    "Host code that reads memory through raw pointers (ctypes, DLPack, pybind) is not seen.",
    "The rules for what stops a capture were measured on the torch and GPU that the stored verdicts name, no other.",
)

"""Work of side streams that a late device has not begun: it is done when something waits for it.

Streams run in any order that their waits allow. In the other order, what the program issues on a side stream happens
only when another stream or the host waits for it, or the stream itself goes on with work that is not late. So results
differ where a wait is missing, whatever the two streams touch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from attn_testkit.emulation.operation import Operation
from attn_testkit.emulation.schema import CHANGES_GEOMETRY

Work = Callable[[], object]


class LateWork:
    """Work that is not done yet: by the handle of its stream, in order, with the epoch of the stream."""

    def __init__(self) -> None:
        self._streams: dict[int, list[tuple[int, Work]]] = {}

    def add(self, stream: int, epoch: int, work: Work) -> None:
        """Do `work` later, after what is late on its stream."""
        self._streams.setdefault(stream, []).append((epoch, work))

    def catch_up(self, done: Mapping[int, int] | None = None) -> None:
        """Do what is late on these streams, up to an epoch of each; None: on all. Raises what the work raises."""
        for stream in list(self._streams if done is None else done):
            late = self._streams.get(stream, [])
            while late and (done is None or late[0][0] <= done[stream]):
                late.pop(0)[1]()

    def catch_up_on(self, stream: int) -> None:
        """Do all that is late on one stream."""
        for _, work in self._streams.pop(stream, ()):
            work()

    def forget(self) -> None:
        """Forget what is late: the program ended with an error."""
        self._streams.clear()


def may_be_late(operation: Operation) -> Tensor | None:
    """The tensor that an operation returns if it only writes that one, so that nobody misses its result; or None."""
    facts, args = operation.facts, operation.args
    if not (operation.on_device and facts.written) or facts.foreign or facts.view or facts.name in CHANGES_GEOMETRY:
        return None
    if any(name == "generator" for name, _ in facts.arguments):
        return None  # numbers are drawn in the order of the program
    written = operation.written()
    target: Any = args[0] if facts.name.endswith("_") and args else operation.kwargs.get("out")
    if len(written) != 1 or written[0] is not target or not target.numel():
        return None
    return None if any(tensor.requires_grad for tensor in operation.tensors) else written[0]

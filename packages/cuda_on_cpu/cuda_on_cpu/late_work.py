"""Work of side streams that a late device has not begun: it is done when something waits for it. Streams may run in any
order that their waits allow. In this order, work on a side stream happens only when another stream or the host waits
for it, or when the stream continues with work that is not late. So results differ if a wait is missing, whatever memory
the two streams touch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import Any

from torch import Tensor

from cuda_on_cpu.capture import SHARED
from cuda_on_cpu.operation import Operation
from cuda_on_cpu.program import DropNode, Node
from cuda_on_cpu.schema import CHANGES_GEOMETRY
from cuda_on_cpu.stream_state import Clock

Work = Callable[[], object]


class LateWork:
    """Work that is not done yet: by the handle of its stream, in order, with the epoch of the stream."""

    def __init__(self) -> None:
        self._streams: dict[int, list[tuple[int, Work]]] = {}

    def add(self, stream: int, epoch: int, work: Work) -> None:
        """Do `work` later, after other late work on its stream."""
        self._streams.setdefault(stream, []).append((epoch, work))

    def catch_up(self, done: Mapping[int, int] | None = None) -> None:
        """Do the late work on these streams, up to an epoch of each; None: on all. Raises the errors of that work."""
        for stream in list(self._streams if done is None else done):
            late = self._streams.get(stream, [])
            while late and (done is None or late[0][0] <= done[stream]):
                late.pop(0)[1]()

    def catch_up_on(self, stream: int) -> None:
        """Do all late work on one stream."""
        for _, work in self._streams.pop(stream, ()):
            work()

    def forget(self) -> None:
        """Forget late work, because the program ended with an error."""
        self._streams.clear()


def may_be_late(operation: Operation) -> Tensor | None:
    """The tensor that an operation returns, if it only writes that tensor, so that its result is not needed earlier;
    else None."""
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


def late_branches(nodes: list[Node], stamps: dict[int, tuple[int, Clock]], origin: int) -> list[Node]:
    """Nodes of a graph in another legal order: those of branches come when something waits for them, and the branch
    that was joined last comes first. `stamps`: stream of a node, and the work before it, by its identity; a node
    without a stamp stays in its place.
    """
    if all(stream == origin for stream, _ in stamps.values()) or any(map(_draws_numbers, nodes)):
        return nodes
    result: list[Node] = []
    late: dict[int, list[Node]] = {}

    def catch_up(work: Mapping[int, float], but: int) -> None:
        for stream, count in reversed(list(work.items())):
            while stream != but and late.get(stream) and stamps[id(late[stream][0])][1][stream] <= count:
                node = late[stream].pop(0)
                catch_up(stamps[id(node)][1], stream)
                result.append(node)

    for node in nodes:
        stream, clock = stamps.get(id(node), (origin, {}))
        if stream != origin:
            late.setdefault(stream, []).append(node)
            continue
        if isinstance(node, DropNode):
            users = {
                other: [each for each in branch if node.blocks[0] in each.blocks] for other, branch in late.items()
            }
            last = {other: stamps[id(used[-1])] for other, used in users.items() if used}
            if len(last) == 1 and node.blocks[0].nbytes < SHARED:
                ((other, stamps[id(node)]),) = last.items()
                late[other].append(node)
                continue
            # Dropped memory may be somebody else's from there on.
            catch_up({other: clock[other] for other, (_, clock) in last.items()}, origin)
        catch_up(clock, origin)
        result.append(node)
    catch_up(dict.fromkeys(list(late), inf), origin)
    return result


def _draws_numbers(node: Node) -> bool:
    schema = getattr(node.what, "_schema", None)
    return schema is not None and any(argument.name == "generator" for argument in schema.arguments)

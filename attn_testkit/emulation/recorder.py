"""Seeing every operation of a capture, below autograd and below Python composites, and noting those that a replay must
repeat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from attn_testkit.emulation import private, rules
from attn_testkit.emulation.arguments import map_tensors, tensors_in
from attn_testkit.emulation.capture import Capture
from attn_testkit.emulation.errors import EmulationError
from attn_testkit.emulation.memory import fill_storage
from attn_testkit.emulation.private import TorchDispatchMode, inference, pop_mode, push_mode
from attn_testkit.emulation.program import AllocationNode, OpNode
from attn_testkit.emulation.schema import (
    ALLOCATES,
    CHANGES_GEOMETRY,
    CROSSES,
    HOST_ENTRY,
    INDEXES,
    Facts,
    among,
    call_of,
    facts_of,
    written_by,
)
from attn_testkit.emulation.session import Session
from attn_testkit.emulation.sites import author_site, author_spot
from attn_testkit.emulation.tags import DEVICE, is_device, is_pinned, storage_key, tag_device, tag_pinned
from attn_testkit.emulation.transfers import copy_across, mixed_devices

_CPU = torch.device("cpu")
_device = DEVICE.entries
_NO_KEYWORDS: dict[str, Any] = {}


class Operation:
    """One operation on its way through the dispatcher.

    `tensors` are all that it is called with, `keys` the identities of their memory; `on_device`: all of them lie there.
    """

    __slots__ = ("args", "facts", "func", "keys", "kwargs", "on_device", "tensors")

    def __init__(
        self,
        func: OpOverload,
        facts: Facts,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        keys: list[int],
        on_device: bool,
    ) -> None:
        self.func, self.facts, self.args, self.kwargs = func, facts, args, kwargs
        self.tensors, self.keys, self.on_device = tensors, keys, on_device

    def run(self) -> Any:
        """Its result."""
        return self.facts.run(*self.args, **self.kwargs)

    def written(self) -> list[Tensor]:
        """What it writes."""
        return written_by(self.facts, self.args, self.kwargs) if self.facts.written else []

    def fresh(self, result: Any) -> list[tuple[int, Tensor]]:
        """(position, tensor) of those in its result that are none of its arguments' memory."""
        if type(result) is Tensor:
            return [] if storage_key(result) in self.keys else [(0, result)]
        outputs: list[Tensor] = []
        tensors_in((result,), outputs)
        return [(i, output) for i, output in enumerate(outputs) if storage_key(output) not in self.keys]


class Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Understands device="cuda" and host reads below the Python functions of torch. Used alone for eager code that
    needs it."""

    def __init__(self, session: Session) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.session = session

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in here: torch need not say so around every call."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or _NO_KEYWORDS
        if isinstance(func, torch._ops.HigherOrderOperator):
            raise EmulationError(
                str(func),
                author_site(),
                "a capture would take it, and the emulation records no higher-order operator of torch",
                "check its graphs on a GPU; here it runs eagerly",
            )
        facts = facts_of(func)
        tensors: list[Tensor] = []
        tensors_in(args, tensors)
        if kwargs:
            tensors_in(kwargs.values(), tensors)
        keys = [storage_key(tensor) for tensor in tensors]
        lie = [key in _device for key in keys]
        device = True in lie if lie else self.session.creating
        target = kwargs.get("device") if kwargs else None
        # "cpu" says nothing: device memory is CPU memory here
        if target is not None and torch.device(target).type == "cuda":
            kwargs = {**kwargs, "device": _CPU}
            if facts.name == "_to_copy" and not device:
                return self._copy_to_device(args[0], kwargs)
            device = True
        if not device or facts.name in HOST_ENTRY:
            return self._host(func, args, kwargs)
        operation = Operation(func, facts, args, kwargs, tensors, keys, False not in lie)
        self._check(operation)
        return self._run(operation)

    def watch(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `func` and see every operation below it."""
        push_mode(self)
        try:
            return func(*args, **kwargs)
        finally:
            pop_mode()

    def _host(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        pinned = kwargs.get("pin_memory")
        result = func(*args, **({**kwargs, "pin_memory": False} if pinned else kwargs))
        return tag_pinned(result) if pinned else result

    def _check(self, operation: Operation) -> None:
        """Refuse what CUDA refuses."""
        name = operation.facts.name
        asked = rules.ON_DEVICE if operation.on_device else rules.BY_OPERATION
        if name not in asked:
            return
        call = call_of(operation.facts, operation.args, operation.kwargs)
        if self.session.lenient and name in ("_local_scalar_dense", "item", "is_nonzero"):
            return
        if self.session.capture is None and name == "copy_" and call["non_blocking"]:
            return
        rule = rules.refusal(call, asked)
        if rule is not None:
            self.session.refuse(rule, str(operation.func))

    def _refuse_mixed(self, operation: Operation) -> None:
        """Raise where torch would refuse device and host memory in one operation."""
        facts, tensors = operation.facts, operation.tensors
        if operation.on_device or facts.name in CROSSES:
            return
        allowed: list[Tensor] = []
        if facts.name in INDEXES:
            tensors_in((operation.args[1],), allowed)
        elif facts.takes_host_scalars:
            written = operation.written()
            allowed = [t for t in tensors if t.dim() == 0 and not among(t, written)]
        elif facts.implicit or facts.foreign:
            return  # what is inside is judged
        for tensor in tensors:
            host_scalar_value = facts.name in INDEXES and tensor.dim() == 0
            if not (is_device(tensor) or host_scalar_value or among(tensor, allowed)):
                raise mixed_devices(self.session, str(operation.func))

    def _opens(self, operation: Operation) -> bool:
        """Whether it is a composite, to be run so that the operations inside it are seen."""
        facts = operation.facts
        return facts.inside is not None and (facts.implicit or bool(operation.tensors))

    def _open(self, operation: Operation) -> Any:
        assert operation.facts.inside is not None
        return self.watch(operation.facts.inside, operation.args, operation.kwargs)

    def _copy_to_device(self, source: Tensor, kwargs: dict[str, Any]) -> Any:
        dtype, non_blocking = kwargs.get("dtype"), bool(kwargs.get("non_blocking"))
        return self.watch(copy_across, (self.session, source, dtype, True, non_blocking), _NO_KEYWORDS)

    def _look_inside(self, operation: Operation) -> Any:
        """The kernel of a custom operation may be Python made of torch operations."""
        with self.session.function_mode, self:
            return private.run_kernel(operation.func, operation.args, operation.kwargs)

    def _run(self, operation: Operation) -> Any:
        """Run an operation on device memory."""
        session, facts = self.session, operation.facts
        if facts.foreign:
            return self._look_inside(operation)
        if session.strict and self._opens(operation):
            return self._open(operation)
        self._refuse_mixed(operation)
        result = operation.run()
        for _, output in operation.fresh(result):
            tag_device(output)
            if session.capture is not None and session.stream.cuda_stream:
                session.refuse(rules.OUTSIDE_ALLOCATION, str(operation.func))
            if facts.name in ALLOCATES:
                fill_storage(output.untyped_storage(), session.policy.fill)
        return result


class Recorder(Watcher):  # type: ignore[no-untyped-call]
    """Notes what a replay must repeat."""

    def __init__(self, session: Session, capture: Capture) -> None:
        super().__init__(session)
        self.capture = capture

    def _check(self, operation: Operation) -> None:
        super()._check(operation)
        generator = operation.kwargs.get("generator")
        if generator is not None and not self.capture.knows_generator(generator):
            self.session.refuse(rules.UNREGISTERED_GENERATOR, str(operation.func))

    def _run(self, operation: Operation) -> Any:
        capture, facts = self.capture, operation.facts
        if self.session.stream.capture is not capture.streams:
            # Work on a stream that never joined the capture runs at once on CUDA, and is not part of the graph.
            return super()._run(operation)
        if self._opens(operation):
            return self._open(operation)
        self._refuse_mixed(operation)
        if facts.view:
            result = operation.run()
            if not operation.fresh(result):
                return result
            return self._noted(operation, [], result)
        written = operation.written()
        if facts.name in CHANGES_GEOMETRY:
            result = operation.run()
            self._follow_resized(operation.func, [operation.args[0]])
            return result
        for tensor in written:
            capture.about_to_write(tensor)
        if not facts.foreign:
            return self._noted(operation, written, operation.run())
        before = len(capture.nodes)
        result = self._look_inside(operation)
        # As many as before: a native kernel.
        return self._noted(operation, written, result) if len(capture.nodes) == before else result

    def _noted(self, operation: Operation, written: list[Tensor], result: Any) -> Any:
        """The result of an operation that a replay runs again, unless it only looked at memory in another way."""
        capture = self.capture
        self._follow_resized(operation.func, written)
        fresh = operation.fresh(result)
        for _, output in fresh:
            tag_device(output)
            capture.block(output, in_pool=True)
        capture.retire_dropped_blocks()
        if fresh or written:
            if not operation.on_device:
                for tensor in written:
                    if not is_device(tensor):  # the host must not see what the device would write only at replay
                        capture.block(tensor).restore()
            self.session.stream.note_work()
            if operation.facts.name in ALLOCATES:
                self._note_allocations(operation.func, fresh)
            else:
                self._note_operation(operation, fresh)
        return result

    def _note_allocations(self, func: OpOverload, fresh: list[tuple[int, Tensor]]) -> None:
        for _, output in fresh:
            block = self.capture.block(output)
            block.fill(self.capture.policy.fill)
            self.capture.nodes.append(AllocationNode(func, author_spot(), [block]))

    def _note_operation(self, operation: Operation, fresh: list[tuple[int, Tensor]]) -> None:
        node = OpNode(operation.func, author_spot())
        capture, blocks = self.capture, node.blocks
        crosses = operation.facts.name in CROSSES

        def alias(tensor: Tensor) -> Tensor:
            block = capture.block(tensor)
            blocks.append(block)
            return block.alias(tensor)

        def freeze(tensor: Tensor) -> Tensor:
            if operation.on_device or is_device(tensor) or (crosses and is_pinned(tensor)):
                return alias(tensor)
            with inference():
                return tensor.detach().clone()  # CUDA takes a host value now

        node.args = tuple([map_tensors(value, freeze) for value in operation.args])
        node.kwargs = {name: map_tensors(value, freeze) for name, value in operation.kwargs.items()}
        node.fresh = [(position, alias(output)) for position, output in fresh]
        capture.nodes.append(node)

    def _follow_resized(self, func: OpOverload, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            block = self.capture.blocks.get(storage._cdata)
            if block is None or not block.moved(storage):
                continue
            users = [node for node in self.capture.nodes if block in node.blocks]
            if not block.in_pool or any(not isinstance(node, AllocationNode) for node in users):
                self.session.refuse(rules.MOVED_MEMORY, str(func))
            self.capture.nodes = [node for node in self.capture.nodes if block not in node.blocks]
            block.follow(storage)

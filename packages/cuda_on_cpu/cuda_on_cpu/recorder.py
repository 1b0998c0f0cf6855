"""Recorder of the operations of a capture, below autograd and below Python composites, which a replay must
repeat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from cuda_on_cpu import private, rules
from cuda_on_cpu.accesses import accesses_of
from cuda_on_cpu.arguments import tensors_in
from cuda_on_cpu.capture import Capture
from cuda_on_cpu.errors import EmulationError
from cuda_on_cpu.late_work import may_be_late
from cuda_on_cpu.memory import Block, fill_storage
from cuda_on_cpu.operation import Operation, is_memory_of, with_tensors
from cuda_on_cpu.private import TorchDispatchMode, inference, pop_mode, push_mode
from cuda_on_cpu.program import AllocationNode, OpNode
from cuda_on_cpu.schema import (
    ALLOCATES,
    CHANGES_GEOMETRY,
    CROSSES,
    HOST_ENTRY,
    INDEXES,
    MATRIX_PRODUCTS,
    among,
    call_of,
    facts_of,
)
from cuda_on_cpu.session import Session
from cuda_on_cpu.sites import Site, Spot, author_site, author_spot
from cuda_on_cpu.tags import (
    DEVICE,
    allocated_at,
    is_device,
    is_pinned,
    storage_key,
    tag_device,
)
from cuda_on_cpu.transfers import copy_across, mixed_devices

_CPU = torch.device("cpu")
_device = DEVICE.entries
_NO_KEYWORDS: dict[str, Any] = {}
_CLONE = torch.ops.aten.clone.default
_CONTIGUOUS = {"memory_format": torch.contiguous_format}

Fresh = tuple[int, Tensor, Block]
"""Position of a tensor in a result, the tensor, and its new memory."""


class Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that handles device="cuda" and host reads below the Python functions of torch. Eager code may use it without
    a recorder."""

    def __init__(self, session: Session) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.session = session
        self._inside = False
        """True while the kernel of a custom operation runs and its inner operations are inspected."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Answer without torch, which would check it around every call: nothing is compiled here."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or _NO_KEYWORDS
        if isinstance(func, torch._ops.HigherOrderOperator):
            return self._look_inside_operator(func, args, kwargs)
        facts = facts_of(func)
        if facts.view and not kwargs and facts.name not in rules.BY_OPERATION:
            result = facts.run(*args)
            if is_memory_of(args[0], result):
                return result
        operation = Operation(func, args, kwargs)
        device = operation.touches_device() if operation.tensors else self.session.creating
        target = kwargs.get("device")
        # "cpu" says nothing: device memory is CPU memory here
        if target is not None and torch.device(target).type == "cuda":
            kwargs = operation.kwargs = {**kwargs, "device": _CPU}
            if facts.name == "_to_copy" and not device:
                return self._copy_to_device(args[0], kwargs)
            device = True
        if not device or facts.name in HOST_ENTRY:
            return self._host(func, args, kwargs)
        # A call that indexes waits, if it does, before it touches the elements.
        waits_first = facts.name in INDEXES
        if waits_first:
            self._check(operation)
        if self.session.order is not None and not self._opens(operation):
            self._note_use(operation)
        if not waits_first:
            self._check(operation)
        return self._run(operation)

    def watch(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `func` and see every operation below it."""
        if (
            self._inside
        ):  # it sees them already; seen twice, a quicker kernel's own operations would be counted as theirs
            return func(*args, **kwargs)
        push_mode(self)
        try:
            return func(*args, **kwargs)
        finally:
            pop_mode()

    def _note_use(self, operation: Operation) -> None:
        """Report to the account of streams the arguments that an eager operation reads and writes."""
        order, stream = self.session.account, self.session.stream.cuda_stream
        if order is None or private.vmap_level() is not None:
            return
        for tensor, access in accesses_of(operation.func, operation.args, operation.kwargs):
            if is_device(tensor):
                what = self.session.operation or str(operation.func)
                order.touch(tensor.untyped_storage(), access, stream, what)

    def _note_result(self, output: Tensor) -> None:
        if private.vmap_level() is None:
            self.session.touch(output, writes=True)

    def _host(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        order = self.session.keeps_order
        if order is not None and order.arrivals.pending:
            for _, access in accesses_of(func, args, kwargs):
                order.host_touches(access, self.session.operation or str(func))
        pinned = kwargs.get("pin_memory")
        result = func(*args, **({**kwargs, "pin_memory": False} if pinned else kwargs))
        if order is not None and order.copies.pending:
            for _, access in accesses_of(func, args, kwargs):
                if access.writes:
                    order.copies.was_written(access)
        return self.session.pin(result) if pinned else result

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
            self.session.begins_copy(operation.args[0], operation.args[1], True)
            return
        rule = rules.refusal(call, asked)
        if rule is not None:
            self.session.refuse(rule, str(operation.func))

    def _refuse_mixed(self, operation: Operation) -> None:
        """Raise if torch would refuse device and host memory in one operation."""
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
            return  # the operations inside are checked
        for tensor in tensors:
            host_scalar_value = facts.name in INDEXES and tensor.dim() == 0
            if not (is_device(tensor) or host_scalar_value or among(tensor, allowed)):
                raise mixed_devices(self.session, str(operation.func))

    def _opens(self, operation: Operation) -> bool:
        """True for a composite that has to run so that the operations inside it are seen."""
        facts = operation.facts
        if facts.inside is None or (facts.name in MATRIX_PRODUCTS and operation.on_device and operation.is_floating()):
            return False
        return facts.implicit or bool(operation.tensors)

    def _open(self, operation: Operation) -> Any:
        assert operation.facts.inside is not None
        return self.watch(operation.facts.inside, operation.args, operation.kwargs)

    def _copy_to_device(self, source: Tensor, kwargs: dict[str, Any]) -> Any:
        dtype, non_blocking = kwargs.get("dtype"), bool(kwargs.get("non_blocking"))
        return self.watch(copy_across, (self.session, source, dtype, True, non_blocking), _NO_KEYWORDS)

    def _look_inside(self, operation: Operation) -> Any:
        """Run the kernel of a custom operation so that torch operations inside it are seen."""
        outer, self._inside = self._inside, True
        try:
            with self.session.function_mode, self:
                result = private.run_kernel(operation.func, operation.args, operation.kwargs)
        finally:
            self._inside = outer
        operation.keys = [storage_key(tensor) for tensor in operation.tensors]  # it may have given them other memory
        return result

    def _look_inside_operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a higher-order operator as the operations of its eager kernel.

        On a GPU a compiler may turn it into one kernel, which waits for nothing more.
        """
        with self.session.function_mode, self:
            result = private.run_dense_kernel(func, args, kwargs)
        if result is NotImplemented:
            raise EmulationError(
                str(func),
                author_site(),
                "a capture would take it, and this higher-order operator of torch has no eager kernel to be recorded",
                "check its graphs on a GPU",
            )
        return result

    def _run(self, operation: Operation) -> Any:
        """Run an operation on device memory."""
        if operation.facts.foreign:
            return self._look_inside(operation)
        if self.session.strict and self._opens(operation):
            return self._open(operation)
        self._refuse_mixed(operation)
        return self._run_whole(operation)

    def _run_whole(self, operation: Operation) -> Any:
        """Run an operation without looking inside it."""
        session = self.session
        if session.order is not None and session.is_late:
            target = None if private.vmap_level() is not None else may_be_late(operation)
            if target is not None and session.delays(operation.run):
                return target
            session.late.catch_up_on(session.stream.cuda_stream)
        if session.order is not None and not operation.on_device:
            result = self._run_mixed(operation)
        else:
            result = operation.run()
        for _, output in operation.fresh(result):
            tag_device(output)
            session.allocates(output)
            if session.capture is not None and session.stream.cuda_stream:
                session.refuse(rules.OUTSIDE_ALLOCATION, str(operation.func))
            if operation.facts.name in ALLOCATES:
                fill_storage(output.untyped_storage(), session.policy.fill)
            elif session.order is not None:
                self._note_result(output)
        if session.order is not None and not operation.on_device and _is_waited_for(operation):
            session.host_waits()
        return result

    def _run_mixed(self, operation: Operation) -> Any:
        """Run an operation on device and host memory; a copy to the host memory may be pending."""
        session, written = self.session, operation.written()
        for tensor in operation.tensors:
            if not (is_device(tensor) or among(tensor, written)):
                session.device_uses(tensor)
        copies = operation.facts.name == "copy_" and not is_device(operation.args[0])
        if not copies or _is_waited_for(operation):
            return operation.run()
        session.copies_to_host(operation.args[0], operation.run)
        return operation.args[0]

    def take(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that writes none of its arguments, as if the dispatcher had shown it; no mode is active.

        NotImplemented, and nothing runs, unless all its tensors are on the device.
        """
        operation = Operation(func, args, kwargs)
        if not operation.on_device:
            return NotImplemented
        if self.session.order is not None:
            self._note_use(operation)
        if operation.facts.name in rules.ON_DEVICE:
            self._check(operation)
        return self._run_whole(operation)

    def reshape(self, func: Callable[..., Tensor], args: tuple[Any, ...]) -> Any:
        """`take` for `Tensor.reshape`, which returns a view if it can, and else a copy."""
        tensor = args[0]
        result = func(*args)
        if storage_key(result) == storage_key(tensor):
            return result
        copied = self.take(_CLONE, (tensor,), _CONTIGUOUS)
        return copied if copied is NotImplemented else copied.view(result.size())


def _is_waited_for(operation: Operation) -> bool:
    """True if the host may wait for an operation on host and device memory: for all operations except non-blocking
    copies of pinned memory, and those that get numbers from the host, such as ``x[2:] = 0``."""
    written = operation.written()
    if operation.facts.takes_host_scalars and all(
        is_device(t) for t in operation.tensors if t.dim() or among(t, written)
    ):
        return False
    call = call_of(operation.facts, operation.args, operation.kwargs)
    return not (call["non_blocking"] and any(map(is_pinned, operation.tensors)))


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
            return self._noted(operation, [], result) if operation.fresh(result) else result
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

    def _run_whole(self, operation: Operation) -> Any:
        if self.session.stream.capture is not self.capture.streams:
            return super()._run_whole(operation)
        return self._noted(operation, [], operation.run())

    def _noted(self, operation: Operation, written: list[Tensor], result: Any) -> Any:
        """Note an operation for replays, unless it only viewed memory differently. Returns `result`."""
        capture = self.capture
        if written:
            self._follow_resized(operation.func, written)
        fresh: list[Fresh] = []
        place = None
        for position, output in operation.fresh(result):
            key = storage_key(output)
            if key not in _device:
                tag_device(output)
                place = allocated_at(key)
            fresh.append((position, output, capture.block(output, in_pool=True)))
            if capture.order is not None:
                self.session.allocates(output)
                if operation.facts.name not in ALLOCATES:
                    self._note_result(output)
        capture.retire_dropped_blocks()
        if fresh or written:
            if written and not operation.on_device:
                for tensor in written:
                    if not is_device(tensor):  # the host must not see what the device would write only at replay
                        capture.block(tensor).restore()
            place = place or author_spot(1)
            if operation.facts.name in ALLOCATES:
                self._note_allocations(operation.func, place, fresh)
            else:
                self._note_operation(operation, place, fresh)
            capture.note_work(self.session.stream, capture.nodes[-1])
        return result

    def _note_allocations(self, func: OpOverload, place: Spot | Site, fresh: list[Fresh]) -> None:
        for _, _, block in fresh:
            block.fill(self.capture.policy.fill)
            self.capture.nodes.append(AllocationNode(func, place, [block]))

    def _note_operation(self, operation: Operation, place: Spot | Site, fresh: list[Fresh]) -> None:
        known, meet = self.capture.blocks, self.capture.block
        everything = operation.on_device
        crosses = not everything and operation.facts.name in CROSSES
        blocks, frozen = [], []
        for tensor, key in zip(operation.tensors, operation.keys, strict=True):
            if everything or key in _device or (crosses and is_pinned(tensor)):
                block = known.get(key) or meet(tensor)
                blocks.append(block)
                frozen.append(block.alias(tensor))
            else:
                with inference():
                    frozen.append(tensor.detach().clone())  # CUDA takes a host value now
        kept = [(position, block.alias(output)) for position, output, block in fresh]
        blocks += [block for _, _, block in fresh]
        args, kwargs = with_tensors(operation.args, operation.kwargs, frozen)
        self.capture.nodes.append(OpNode(operation.func, place, blocks, args, kwargs, kept))

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

"""Seeing every operation of a capture, below autograd and below Python composites, and noting those that a replay must
repeat."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from attn_testkit.emulation import private, rules
from attn_testkit.emulation.arguments import map_tensors, tensors_in
from attn_testkit.emulation.capture import Capture
from attn_testkit.emulation.memory import fill_storage
from attn_testkit.emulation.private import TorchDispatchMode
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
from attn_testkit.emulation.sites import author_site
from attn_testkit.emulation.tags import is_device, is_pinned, tag_device, tag_pinned
from attn_testkit.emulation.transfers import copy_across, mixed_devices

_CPU = torch.device("cpu")


class Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Understands device="cuda" and host reads below the Python functions of torch. Used alone for eager code that
    needs it."""

    def __init__(self, session: Session) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.session = session

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in here: torch need not say so around every call."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        facts = facts_of(func)
        tensors: list[Tensor] = []
        tensors_in(args, tensors)
        tensors_in(tuple(kwargs.values()), tensors)
        device = any(map(is_device, tensors)) if tensors else self.session.creating
        target = kwargs.get("device")
        # "cpu" says nothing: device memory is CPU memory here
        if target is not None and torch.device(target).type == "cuda":
            kwargs = {**kwargs, "device": _CPU}
            if facts.name == "_to_copy" and not device:
                return self._copy_to_device(args[0], kwargs)
            device = True
        if facts.name in HOST_ENTRY or not device:
            return self._host(func, args, kwargs)
        self._check(facts, func, args, kwargs)
        return self._device(func, facts, tensors, args, kwargs)

    def _host(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        pinned = kwargs.get("pin_memory")
        result = func(*args, **({**kwargs, "pin_memory": False} if pinned else kwargs))
        return tag_pinned(result) if pinned else result

    def _check(self, facts: Facts, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if facts.name not in rules.BY_OPERATION:
            return
        call = call_of(facts, args, kwargs)
        if self.session.lenient and facts.name in ("_local_scalar_dense", "item", "is_nonzero"):
            return
        if self.session.capture is None and facts.name == "copy_" and call["non_blocking"]:
            return
        rule = rules.refusal(call)
        if rule is not None:
            self.session.refuse(rule, str(func))

    def _refuse_mixed(
        self, func: OpOverload, facts: Facts, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Raise where torch would refuse device and host memory in one operation."""
        if facts.name in CROSSES or all(map(is_device, tensors)):
            return
        allowed: list[Tensor] = []
        if facts.name in INDEXES:
            tensors_in(args[1], allowed)
        elif facts.takes_host_scalars:
            written = written_by(facts, args, kwargs)
            allowed = [t for t in tensors if t.dim() == 0 and not among(t, written)]
        elif facts.implicit or facts.foreign:
            return  # what is inside is judged
        for tensor in tensors:
            host_scalar_value = facts.name in INDEXES and tensor.dim() == 0
            if not (is_device(tensor) or host_scalar_value or among(tensor, allowed)):
                raise mixed_devices(self.session, str(func))

    def _open(
        self, func: OpOverload, facts: Facts, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a composite operation so that those inside it are seen; NotImplemented for any other."""
        if facts.implicit:
            with self:
                return func.decompose(*args, **kwargs)
        if facts.explicit and tensors:
            with self:
                return private.run_kernel(func, args, kwargs)
        return NotImplemented

    def _copy_to_device(self, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
        with self:
            return copy_across(
                self.session, source, kwargs.get("dtype") or source.dtype, True, bool(kwargs.get("non_blocking"))
            )

    def _device(
        self, func: OpOverload, facts: Facts, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if facts.foreign:
            with self.session.function_mode, self:
                return private.run_kernel(func, args, kwargs)
        if self.session.strict:
            result = self._open(func, facts, tensors, args, kwargs)
            if result is not NotImplemented:
                return result
        self._refuse_mixed(func, facts, tensors, args, kwargs)
        known = {t.untyped_storage()._cdata for t in tensors}
        result = func(*args, **kwargs)
        outputs: list[Tensor] = []
        tensors_in(result, outputs)
        for output in outputs:
            if output.untyped_storage()._cdata not in known:
                tag_device(output)
                if self.session.capture is not None and self.session.stream.cuda_stream:
                    self.session.refuse(rules.OUTSIDE_ALLOCATION, str(func))
                if facts.name in ALLOCATES:
                    fill_storage(output.untyped_storage(), self.session.policy.fill)
        return result


class Recorder(Watcher):  # type: ignore[no-untyped-call]
    """Notes what a replay must repeat."""

    def __init__(self, session: Session, capture: Capture) -> None:
        super().__init__(session)
        self.capture = capture

    def _check(self, facts: Facts, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super()._check(facts, func, args, kwargs)
        generator = kwargs.get("generator")
        if generator is not None and not self.capture.knows_generator(generator):
            self.session.refuse(rules.UNREGISTERED_GENERATOR, str(func))

    def _device(
        self, func: OpOverload, facts: Facts, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self.session.recording:
            # Work on a stream that never joined the capture runs at once on CUDA, and is not part of the graph.
            return super()._device(func, facts, tensors, args, kwargs)
        result = self._open(func, facts, tensors, args, kwargs)
        if result is not NotImplemented:
            return result
        self._refuse_mixed(func, facts, tensors, args, kwargs)
        written = written_by(facts, args, kwargs)
        if facts.name not in CHANGES_GEOMETRY:
            for tensor in written:
                self.capture.about_to_write(tensor)
        if facts.foreign:
            return self._foreign(func, facts, tensors, written, args, kwargs)
        result = func(*args, **kwargs)
        self._note(func, facts, tensors, written, args, kwargs, result)
        return result

    def _foreign(
        self, func: OpOverload, facts: Facts, tensors: list[Tensor], written: list[Tensor], args: Any, kwargs: Any
    ) -> Any:
        """A custom operation: its kernel may be Python made of torch operations; look inside."""
        before = len(self.capture.nodes)
        with self.session.function_mode, self:
            result = private.run_kernel(func, args, kwargs)
        if len(self.capture.nodes) == before:  # a native kernel
            self._note(func, facts, tensors, written, args, kwargs, result)
        return result

    def _note(
        self,
        func: OpOverload,
        facts: Facts,
        tensors: list[Tensor],
        written: list[Tensor],
        args: Any,
        kwargs: Any,
        result: Any,
    ) -> None:
        self._follow_resized(func, [args[0]] if facts.name in CHANGES_GEOMETRY else written)
        if facts.name in CHANGES_GEOMETRY:
            return
        known = {t.untyped_storage()._cdata for t in tensors}
        outputs: list[Tensor] = []
        tensors_in(result, outputs)
        fresh: list[tuple[int, Tensor]] = []
        for position, output in enumerate(outputs):
            if output.untyped_storage()._cdata not in known:
                tag_device(output)
                self.capture.block(output, in_pool=True)
                fresh.append((position, output))
        self.capture.retire_dropped_blocks()
        if not fresh and not written:
            return  # a view: no kernel
        for tensor in written:
            if not is_device(tensor):  # the host must not see what the device would write only at replay
                self.capture.block(tensor).restore()
        self.session.stream.note_work()
        if facts.name in ALLOCATES:
            self._note_allocations(func, fresh)
        else:
            self._note_operation(func, facts, args, kwargs, fresh)

    def _note_allocations(self, func: OpOverload, fresh: list[tuple[int, Tensor]]) -> None:
        for _, output in fresh:
            block = self.capture.block(output)
            block.fill(self.capture.policy.fill)
            self.capture.nodes.append(AllocationNode(str(func), author_site(), [block]))

    def _note_operation(
        self, func: OpOverload, facts: Facts, args: Any, kwargs: Any, fresh: list[tuple[int, Tensor]]
    ) -> None:
        node = OpNode(str(func), author_site(), op=func)

        def freeze(tensor: Tensor) -> Tensor:
            if is_device(tensor) or (facts.name in CROSSES and is_pinned(tensor)):
                return self._alias(tensor, node)
            return tensor.detach().clone()  # CUDA takes a host value now

        with torch.inference_mode():
            node.args = tuple(map_tensors(value, freeze) for value in args)
            node.kwargs = {name: map_tensors(value, freeze) for name, value in kwargs.items()}
            node.fresh = [(position, self._alias(output, node)) for position, output in fresh]
        self.capture.nodes.append(node)

    def _alias(self, tensor: Tensor, node: OpNode) -> Tensor:
        block = self.capture.block(tensor)
        node.blocks.append(block)
        return block.alias(tensor)

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

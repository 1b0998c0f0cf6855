"""Seeing every operation of a capture, below autograd and below Python composites, and noting those that a replay must
repeat."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from attn_testkit.emulation import private, rules
from attn_testkit.emulation.conditions import Call
from attn_testkit.emulation.errors import EmulationError
from attn_testkit.emulation.memory import fill_storage
from attn_testkit.emulation.private import TorchDispatchMode
from attn_testkit.emulation.program import AllocationNode, OpNode, map_tensors, tensors_in
from attn_testkit.emulation.session import Session
from attn_testkit.emulation.sites import author_site
from attn_testkit.emulation.tags import is_device, is_pinned, tag_device, tag_pinned

if TYPE_CHECKING:
    from attn_testkit.emulation.graph import EmulatedGraph

_CPU = torch.device("cpu")
_ALLOCATES = frozenset({"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted"})
_CHANGES_GEOMETRY = frozenset({"resize_", "set_", "resize_as_", "_resize_output_"})
_HOST_ENTRY = frozenset({"lift", "lift_fresh"})  # Python data becoming a tensor: the copy to the device comes after it
_INDEXES = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})
_TAKES_HOST_SCALAR = _INDEXES | frozenset(
    {
        "copy_",
        "fill_",
        "fill",
        "masked_fill",
        "masked_fill_",
        "index_fill",
        "index_fill_",
        "where",
        "_local_scalar_dense",
    }
)
# Composites that gain nothing from being opened: no value is read inside, and one node replays faster than several.
_KEEP_WHOLE = frozenset(
    {"copy_", "clone", "stack", "sum", "mean", "zeros_like", "ones_like", "full_like", "repeat", "constant_pad_nd",
     "sort", "index_put", "index_put_", "masked_fill", "masked_scatter", "embedding", "median", "kthvalue", "norm",
     "logsumexp", "new_zeros", "new_ones", "new_full", "_pin_memory", "rand_like", "randn_like", "_safe_softmax",
     "nan_to_num"}
)  # fmt: skip


@dataclass(frozen=True)
class _Facts:
    """What the schema says about an operation, looked up once."""

    name: str
    overload: str
    arguments: tuple[tuple[str, Any], ...]
    written: tuple[tuple[int, str], ...]
    implicit: bool
    explicit: bool
    foreign: bool
    pointwise: bool


@functools.cache
def _facts(op: OpOverload) -> _Facts:
    schema = op._schema
    name = schema.name.split("::")[1]
    aliases = any(a.alias_info is not None for a in schema.arguments)
    pointwise = torch.Tag.pointwise in op.tags
    foreign = op.namespace not in ("aten", "prims", "prim")
    explicit = (
        not foreign
        and not aliases
        and not pointwise
        and name not in _KEEP_WHOLE | _ALLOCATES
        and private.has_composite_kernel(op)
    )
    return _Facts(
        name,
        schema.overload_name or "default",
        tuple((a.name, a.default_value if a.has_default_value() else None) for a in schema.arguments),
        tuple(
            (i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write
        ),
        private.can_decompose(op),
        explicit,
        foreign,
        pointwise,
    )


def _call(facts: _Facts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    values = dict(facts.arguments)
    values.update((name, value) for (name, _), value in zip(facts.arguments, args, strict=False))
    values.update(kwargs)
    return Call(facts.name, facts.overload, values)


class Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Understands device="cuda" and host reads below the Python functions of torch. Used alone for eager code that
    needs it."""

    def __init__(self, session: Session) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.session = session

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        facts = _facts(func)
        tensors: list[Tensor] = []
        tensors_in(args, tensors)
        tensors_in(tuple(kwargs.values()), tensors)
        device = any(map(is_device, tensors)) if tensors else self.session.creating
        target = kwargs.get("device")
        if (
            target is not None and torch.device(target).type == "cuda"
        ):  # "cpu" says nothing: device memory is CPU memory here
            kwargs = {**kwargs, "device": _CPU}
            if facts.name == "_to_copy" and not device:
                return self._copy_to_device(args[0], kwargs)
            device = True
        if facts.name in _HOST_ENTRY or not device:
            return self._host(func, args, kwargs)
        self._check(facts, func, args, kwargs)
        return self._device(func, facts, tensors, args, kwargs)

    def _host(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        pinned = kwargs.get("pin_memory")
        result = func(*args, **({**kwargs, "pin_memory": False} if pinned else kwargs))
        return tag_pinned(result) if pinned else result

    def _check(self, facts: _Facts, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.session.strict or facts.name not in rules.BY_OPERATION:
            return
        call = _call(facts, args, kwargs)
        if self.session.lenient and facts.name in ("_local_scalar_dense", "item", "is_nonzero"):
            return
        if self.session.capture is None and facts.name == "copy_" and call["non_blocking"]:
            return
        rule = rules.refusal(call)
        if rule is not None:
            self.session.refuse(rule, str(func))

    def _copy_to_device(self, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
        with self:
            return copy_across(
                self.session, source, kwargs.get("dtype") or source.dtype, True, bool(kwargs.get("non_blocking"))
            )

    def _device(
        self, func: OpOverload, facts: _Facts, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if facts.foreign:
            with self.session.function_mode, self:
                return private.run_kernel(func, args, kwargs)
        known = {t.untyped_storage()._cdata for t in tensors}
        result = func(*args, **kwargs)
        outputs: list[Tensor] = []
        tensors_in(result, outputs)
        for output in outputs:
            if output.untyped_storage()._cdata not in known:
                tag_device(output)
                if facts.name in _ALLOCATES:
                    fill_storage(output.untyped_storage(), self.session.policy.fill)
        return result


class Recorder(Watcher):  # type: ignore[no-untyped-call]
    """Notes what a replay must repeat."""

    def __init__(self, session: Session, graph: EmulatedGraph) -> None:
        super().__init__(session)
        self.graph = graph
        self._without_nodes: set[OpOverload] = set()

    def _check(self, facts: _Facts, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super()._check(facts, func, args, kwargs)
        generator = kwargs.get("generator")
        if generator is not None and not self.graph.knows_generator(generator):
            self.session.refuse(rules.UNREGISTERED_GENERATOR, str(func))

    def _device(
        self, func: OpOverload, facts: _Facts, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self.session.stream.capturing:
            # Work on a stream that never joined the capture runs at once on CUDA, and is not part of the graph.
            return super()._device(func, facts, tensors, args, kwargs)
        if facts.implicit:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if facts.explicit and tensors:
            with self:
                return private.run_kernel(func, args, kwargs)
        written: list[Tensor] = []
        for position, name in facts.written:
            tensors_in(args[position] if position < len(args) else kwargs.get(name), written)
        if facts.name not in _CHANGES_GEOMETRY:
            for tensor in written:
                self.graph.about_to_write(tensor)
        if facts.foreign:
            return self._foreign(func, facts, tensors, written, args, kwargs)
        result = func(*args, **kwargs)
        self._note(func, facts, tensors, written, args, kwargs, result)
        return result

    def _foreign(
        self, func: OpOverload, facts: _Facts, tensors: list[Tensor], written: list[Tensor], args: Any, kwargs: Any
    ) -> Any:
        """A custom operation: its kernel may be Python made of torch operations; look inside."""
        before = len(self.graph.nodes)
        with self.session.function_mode, self:
            result = private.run_kernel(func, args, kwargs)
        if len(self.graph.nodes) == before:  # a native kernel
            self._note(func, facts, tensors, written, args, kwargs, result)
        return result

    def _note(
        self,
        func: OpOverload,
        facts: _Facts,
        tensors: list[Tensor],
        written: list[Tensor],
        args: Any,
        kwargs: Any,
        result: Any,
    ) -> None:
        self._follow_resized(func, [args[0]] if facts.name in _CHANGES_GEOMETRY else written)
        if facts.name in _CHANGES_GEOMETRY:
            return
        known = {t.untyped_storage()._cdata for t in tensors}
        outputs: list[Tensor] = []
        tensors_in(result, outputs)
        fresh: list[tuple[int, Tensor]] = []
        for position, output in enumerate(outputs):
            if output.untyped_storage()._cdata not in known:
                tag_device(output)
                self.graph.block(output, in_pool=True)
                fresh.append((position, output))
        self.graph.retire_dropped_blocks()
        if not fresh and not written:
            return  # a view: no kernel
        for tensor in written:
            if not is_device(tensor):  # the host must not see what the device would write only at replay
                self.graph.block(tensor).restore()
        self.session.stream.note_work()
        if facts.name in _ALLOCATES:
            self._note_allocations(func, fresh)
        else:
            self._note_operation(func, facts, args, kwargs, fresh)

    def _note_allocations(self, func: OpOverload, fresh: list[tuple[int, Tensor]]) -> None:
        for _, output in fresh:
            block = self.graph.block(output)
            block.fill(self.graph.policy.fill)
            self.graph.nodes.append(AllocationNode(str(func), author_site(), [block]))

    def _note_operation(
        self, func: OpOverload, facts: _Facts, args: Any, kwargs: Any, fresh: list[tuple[int, Tensor]]
    ) -> None:
        node = OpNode(str(func), author_site(), op=func)

        def freeze(tensor: Tensor) -> Tensor:
            if is_device(tensor) or is_pinned(tensor):
                return self._alias(tensor, node)
            return self._host_argument(tensor, facts, func)

        with torch.inference_mode():
            node.args = tuple(map_tensors(value, freeze) for value in args)
            node.kwargs = {name: map_tensors(value, freeze) for name, value in kwargs.items()}
            node.fresh = [(position, self._alias(output, node)) for position, output in fresh]
        self.graph.nodes.append(node)

    def _alias(self, tensor: Tensor, node: OpNode) -> Tensor:
        block = self.graph.block(tensor)
        node.blocks.append(block)
        return block.alias(tensor)

    def _host_argument(self, tensor: Tensor, facts: _Facts, func: OpOverload) -> Tensor:
        scalar = tensor.dim() == 0 and (facts.pointwise or facts.name in _TAKES_HOST_SCALAR)
        mask = facts.name in _INDEXES and tensor.dtype in (torch.bool, torch.uint8)
        if scalar or mask:
            return tensor.detach().clone()  # CUDA takes the value now: frozen
        raise mixed_devices(self.session, str(func))

    def _follow_resized(self, func: OpOverload, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            block = self.graph.blocks.get(storage._cdata)
            if block is None or not block.moved(storage):
                continue
            users = [node for node in self.graph.nodes if block in node.blocks]
            if not block.in_pool or any(not isinstance(node, AllocationNode) for node in users):
                self.session.refuse(rules.MOVED_MEMORY, str(func))
            self.graph.nodes = [node for node in self.graph.nodes if block not in node.blocks]
            block.follow(storage)


def mixed_devices(session: Session, operation: str) -> EmulationError:
    """The error for an operation on device and host memory together."""
    return EmulationError(
        session.operation or operation,
        author_site(),
        "torch would refuse with 'Expected all tensors to be on the same device, but found at least two devices, cuda:0"
        " and cpu!'",
        "move the host tensor to the device first (before the capture)",
    )


def copy_across(session: Session, source: Tensor, dtype: torch.dtype, to_device: bool, non_blocking: bool) -> Tensor:
    """A copy between host and device into new memory, under the rules for such copies."""
    outer, session.creating = session.creating, False
    try:
        with private.disable_modes():
            result = torch.empty_like(source, dtype=dtype, requires_grad=False)
        if to_device:
            adopt(session, result)
        elif non_blocking:  # CUDA allocates pinned memory for it
            fill_storage(result.untyped_storage(), session.policy.fill)
            tag_pinned(result)
        result.copy_(source, non_blocking=non_blocking)
        return result
    finally:
        session.creating = outer


def adopt(session: Session, tensor: Tensor) -> Tensor:
    """Make new host memory device memory; inside a capture it belongs to the graph's pool."""
    tag_device(tensor)
    if session.capture is not None and session.stream.capturing:
        session.capture.block(tensor, in_pool=True)
    return tensor

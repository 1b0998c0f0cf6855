"""Capabilities that answer differently in the judge and in the worker."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, ClassVar

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, BackendContext, Capabilities, Execution, ForwardBatch

from .catalogue import adversarial
from .parent import AdversarialBackend


@adversarial("claims-other-things-once-described", executions=(Execution.GRAPH,))
class DeclaresOtherThingsOnceDescribed(AdversarialBackend):
    """Declares that it needs no CPU lengths, but its constructor declares the opposite, and its plans wait for the
    device unseen."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        if self.cheats:
            type(self).capabilities = self.capabilities.with_changes(needs={"cpu_seq_lens": True})

    @override
    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        if self.cheats and not in_capture:
            self.longest = int(batch.seq_lens.max().item())

    @override
    def answer(self, right: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        return right


_PLAIN = {"capabilities": AdversarialBackend.capabilities}


class _TwoFaced(Capabilities):
    """Answers the second question differently from the first."""

    asked: ClassVar[int] = 0

    @override
    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name == "needs":
            _TwoFaced.asked += 1
            return replace(found, cpu_seq_lens=_TwoFaced.asked > 4)
        return found

    @override
    def __eq__(self, other: object) -> bool:
        return True

    @override
    def __hash__(self) -> int:
        return 1


class _EveryMode(frozenset[Any]):
    """A set that contains everything."""

    @override
    def __contains__(self, item: object) -> bool:
        return True


def _capabilities(kind: type[Capabilities], page_sizes: frozenset[Any] = frozenset({16})) -> Capabilities:
    """Capabilities of this class, with page sizes that nothing has checked."""
    plain = AdversarialBackend.capabilities
    values: dict[str, Any] = {name: getattr(plain, name) for name in Capabilities.__dataclass_fields__}
    made = kind(**values)
    pools = replace(plain.kv_pool)
    object.__setattr__(pools, "page_sizes", page_sizes)
    object.__setattr__(made, "kv_pool", pools)
    return made


@adversarial("claims-of-two-faces", executions=(Execution.GRAPH,), honest=_PLAIN)
class CapabilitiesOfTwoFaces(AdversarialBackend):
    """Capabilities have their own class, which equals everything and changes its answers later."""

    capabilities: ClassVar[Capabilities] = _capabilities(_TwoFaced)


@adversarial("claims-that-hold-anything", honest=_PLAIN)
class CapabilitiesThatHoldAnything(AdversarialBackend):
    """Declares a set of page sizes that contains everything, and lists one."""

    capabilities: ClassVar[Capabilities] = _capabilities(Capabilities, _EveryMode({16}))


class _RunsInTheReader(frozenset[Any]):
    """A set that is pickled as a call that ends the reading process."""

    @override
    def __reduce__(self) -> Any:
        return os._exit, (0,)


@adversarial("claims-that-run-where-they-are-read", honest=_PLAIN)
class CapabilitiesThatRunWhereTheyAreRead(AdversarialBackend):
    """Capabilities are pickled as a call of ``os._exit(0)``."""

    capabilities: ClassVar[Capabilities] = _capabilities(Capabilities, _RunsInTheReader({16}))

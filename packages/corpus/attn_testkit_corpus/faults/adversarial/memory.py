"""Outputs that were not computed: kept from earlier steps, found in memory, or those of another step."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, BackendContext, Execution, ForwardBatch

from .catalogue import adversarial
from .parent import AdversarialBackend
from .ways_in import of_kind


class _Keeps(AdversarialBackend):
    """Computes an output once per key, and returns the same one when the key comes again."""

    kept: dict[Any, torch.Tensor]

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.kept = {}

    @override
    def answer(self, right: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        key = (layer.layer_id, *self.key_of(right, batch))
        kept = self.kept.setdefault(key, right)
        return kept if self.cheats else right

    def key_of(self, right: torch.Tensor, batch: ForwardBatch) -> tuple[Any, ...]:
        """Key by which it recognizes a step."""
        raise NotImplementedError


_BOTH = tuple(Execution)


@adversarial("output-kept-by-shape", executions=_BOTH)
class OutputKeptByShape(_Keeps):
    """Outputs are computed once for each layer and shape of a batch, and returned from then on."""

    @override
    def key_of(self, right: torch.Tensor, batch: ForwardBatch) -> tuple[Any, ...]:
        return tuple(right.shape)


@adversarial("output-kept-by-address", executions=_BOTH)
class OutputKeptByAddress(_Keeps):
    """Outputs are computed once for each address that the inputs of a step have, and returned from then on."""

    @override
    def key_of(self, right: torch.Tensor, batch: ForwardBatch) -> tuple[Any, ...]:
        return batch.seq_lens.data_ptr(), batch.out_cache_loc.data_ptr(), len(right)


@adversarial("output-kept-for-the-process")
class OutputKeptForTheProcess(_Keeps):
    """Keeps right outputs by layer and shape, for all instances of a process."""

    shared: dict[Any, torch.Tensor] = {}  # noqa: RUF012 - one for all is the cheat

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.kept = self.shared

    @override
    def key_of(self, right: torch.Tensor, batch: ForwardBatch) -> tuple[Any, ...]:
        return tuple(right.shape)


@adversarial("output-of-the-step-before")
class OutputOfTheStepBefore(AdversarialBackend):
    """Each step returns the output of the one before, if that had the same shape."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.before: dict[int, torch.Tensor] = {}

    @override
    def answer(self, right: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        before = self.before.get(layer.layer_id, right)
        self.before[layer.layer_id] = right
        return before if self.cheats and before.shape == right.shape else right


class _TwoMinds(torch.Tensor):
    """A tensor with wrong memory, for which torch computes with the right values."""

    right: torch.Tensor

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def seen(value: Any) -> Any:
            return value.right if isinstance(value, cls) else value

        return func(*map(seen, args), **{name: seen(value) for name, value in (kwargs or {}).items()})


@adversarial("output-of-two-minds", executions=_BOTH)
class OutputOfTwoMinds(AdversarialBackend):
    """Returns a tensor subclass whose memory is wrong and for which torch computes with the right values."""

    @override
    def answer(self, right: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        if not self.cheats:
            return right.as_subclass(torch.Tensor)
        out = super().answer(right, layer, batch).as_subclass(_TwoMinds)
        object.__setattr__(out, "right", right)
        return out


class _RightWhereCopied(TorchFunctionMode):
    """Function mode that returns the right output if the wrong one is cloned."""

    answers: dict[int, torch.Tensor]

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = self.answers.get(id(args[0])) if args else None
        if answer is not None and func.__name__ in ("clone", "reshape"):
            args = (answer, *args[1:])
        return func(*args, **(kwargs or {}))


@adversarial("mode-entered-until-the-step-is-over")
class ModeEnteredUntilTheStepIsOver(AdversarialBackend):
    """A function mode stays active after forward returns, supplies the right values, and is left before the end."""

    mode: _RightWhereCopied | None = None
    forwards = 0

    @override
    def answer(self, right: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        out = super().answer(right, layer, batch)
        if self.cheats and self.mode is None:
            self.mode = _RightWhereCopied()
            self.mode.answers = {}
            self.mode.__enter__()  # type: ignore[no-untyped-call]
        if self.mode is not None:
            self.mode.answers[id(out)] = right
            self.kept = [*getattr(self, "kept", []), out]
            # A run has three steps of two layers.
            self.forwards += 1
            if self.forwards == 6:
                weakref.finalize(self, self.mode.__exit__, None, None, None)
        return out


@adversarial("reads-memory-left-behind", executions=_BOTH)
class ReadsMemoryLeftBehind(AdversarialBackend):
    """Returns unwritten memory, in which an earlier right answer of the same size may remain."""

    @override
    def answer(self, right: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        kept = right.clone()
        del right
        return torch.empty_like(kept) if self.cheats else kept


@adversarial("looks-for-expected-values")
class LooksForExpectedValues(AdversarialBackend):
    """Searches all objects of the garbage collector for the oracle's answers."""

    @override
    def answer(self, right: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> torch.Tensor:
        for name in ("Expected", "Attention", "Comparison"):
            for found in of_kind(name):
                answer = getattr(found, "attention", getattr(found, "out", None))
                if self.cheats and isinstance(answer, torch.Tensor) and answer.shape[1:] == right.shape:
                    return answer[self.context.layers.index(layer)].to(right)
        return super().answer(right, layer, batch)

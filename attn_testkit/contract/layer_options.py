"""Options of an attention layer that a backend honors."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from .context import BackendContext
from .declared import Declared
from .modes import ForwardMode
from .refusal import Refusal, modes_outside

__all__ = ["LayerOptions"]

_WITH_A_BLOCK = frozenset({ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY})


@dataclass(frozen=True)
class LayerOptions(Declared):
    """Options of an attention layer that a backend honors: ``LayerOptions(sinks=True, logit_cap=True)``.

    Windows, spans and cross-attention have records of their own. Raises ``ValueError`` for modes in which no layer has
    an option.
    """

    any_scaling: bool = True
    """True: the kernel honors every ``AttentionLayer.scaling``. False: all layers have 1/sqrt(head_dim). MLA layers
    always have their own scaling, because their rows are wider than the heads they represent."""
    logit_cap: bool = False
    """True: the kernel honors ``AttentionLayer.logit_cap`` (soft cap)."""
    sinks: bool = False
    """True: the kernel honors ``AttentionLayer.sinks`` (attention sinks)."""
    alibi: Set[ForwardMode] = frozenset()
    """Modes in which the kernel honors ``AttentionLayer.alibi_slopes``, of any values: a rank has the slopes of its own
    heads."""
    qq_bias: Set[ForwardMode] = frozenset()
    """Modes, of extend and target-verify, in which the kernel adds ``ForwardBatch.qq_bias``: a tensor of biases among
    the rows of the step (``qq_bias`` of vLLM's ``unified_attention``)."""
    shared_qq_bias: bool = False
    """True: the kernel supports only one bias for all requests, as vLLM's does. The biases of all requests in a batch
    are then equal: row j of any request has the numbers of row j of the first. Drafts with a bias are chains. False:
    each request may have its own."""
    non_causal: Set[ForwardMode] = frozenset()
    """Modes, of extend and target-verify, in which layers may be non-causal (``AttentionLayer.causal`` is False). A row
    then sees all keys of its request. A verify comes without a tree, with ``custom_mask`` and ``retrieve_*`` None, as
    in draft blocks."""

    def _check(self) -> None:
        self._check_modes("non_causal", "alibi", "qq_bias")
        for name in ("non_causal", "qq_bias"):
            others = sorted(getattr(self, name) - _WITH_A_BLOCK)
            if others:
                raise ValueError(f"LayerOptions.{name} may hold only extend and target-verify, got {', '.join(others)}")
        if self.shared_qq_bias and not self.qq_bias:
            raise ValueError(
                "LayerOptions declare shared_qq_bias without qq_bias; declare its modes: qq_bias={'target-verify'}"
            )
        self._check_flags()

    def refused(self, context: BackendContext) -> Iterator[Refusal]:
        """Options of a context's layers that are not declared."""
        layers = context.layers
        slopes = any(layer.alibi_slopes is not None for layer in layers)
        yield from modes_outside("ALiBi in", context, self.alibi, slopes)
        yield from modes_outside("an additive bias in", context, self.qq_bias, context.qq_bias != "none")
        if context.qq_bias == "own" and self.shared_qq_bias:
            yield "an additive bias for each request:", context.qq_bias
        yield from modes_outside("layers that are not causal in", context, self.non_causal, not context.causal)
        usual = all(layer.has_usual_scaling or not layer.head_layout.usual_scaling for layer in layers)
        if not (usual or self.any_scaling):
            yield "scaling", ", ".join(f"{layer.scaling:.4g}" for layer in layers)
        if (cap := max(layer.logit_cap for layer in layers)) and not self.logit_cap:
            yield "soft cap", cap
        if not self.sinks and any(layer.sinks is not None for layer in layers):
            yield "sinks", "given"

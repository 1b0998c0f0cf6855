"""``flashinfer_gdn`` with mistakes that its entry points invite."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

from attn_testkit.backends.flashinfer_gdn import FlashInferGDNBackend
from attn_testkit.contract import BackendContext, ForwardBatch


class LogarithmOfTheDecay(FlashInferGDNBackend):
    """``g`` of the prefill is the decay; FLA's and SGLang's ``g`` is its logarithm."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        right = self.prefill

        def wrong(*args: Any, g: torch.Tensor, **named: Any) -> Any:
            return right(*args, g=g.log(), **named)

        self.prefill = wrong


class PaddingClamped(FlashInferGDNBackend):
    """tokenspeed #700: -1 is clamped to 0, so padded requests write slot 0."""

    @override
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        self.indices = self.indices.clamp(min=0)


class DraftsUpdateTheState(FlashInferGDNBackend):
    """``disable_state_update`` is left at what 0.8.0 will have: a verify stores the state of the whole draft."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        right = self.verify

        def wrong(*args: Any, disable_state_update: bool, **named: Any) -> Any:
            return right(*args, disable_state_update=False, **named)

        self.verify = wrong

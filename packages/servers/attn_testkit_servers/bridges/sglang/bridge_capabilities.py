"""Everything that the bridge says about one name of SGLang's registry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .. import capabilities as bridged


@dataclass(frozen=True)
class BridgeCapabilities(bridged.BridgeCapabilities):
    """Everything about one name of SGLang's registry, ``ATTENTION_BACKENDS``."""

    fakes: str = ""
    """Set of the kit's fakes for compiled kernels, used without a GPU: a name of ``fakes.SETS``."""
    reads_back: bool = True
    """True if a forward may be given None for new rows that the pool holds already. Otherwise it is given the rows that
    the pool holds, as after a fused kernel that stores them."""
    one_scale: bool = False
    """True if a plan holds the model's softmax scale. The kit's layers have several scales, unlike models of SGLang, so
    there is one backend object per scale."""
    rope_apart: bool = False
    """MLA: SGLang's model gives q and k without their rope columns, and the rope columns separately."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Server arguments of SGLang for this name, in addition to those of ``runner``."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of SGLang for this name, which its modules read at each call."""
    keeps_states: bool = False
    """True if its layers have a recurrent state: ``registered`` is the backend of the softmax layers."""

"""The class for a name of ``capabilities.CAPABILITIES``. Imports vLLM."""

from __future__ import annotations

import importlib
from typing import Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum, MambaAttentionBackendEnum

from attn_testkit.contract import AttentionBackend

from ..capabilities import class_of
from .capabilities import BridgeCapabilities
from .driver import VLLMBackend, VLLMLatentBackend
from .imports import STABLE, Machine


def make_backend(name: str, declared: BridgeCapabilities, machine: Machine) -> type[AttentionBackend]:
    """The class for one of the names of ``declared.CLAIMS``."""
    parent: type[VLLMBackend] = VLLMLatentBackend if "mla" in declared.capabilities.heads.families else VLLMBackend
    registry: Any = AttentionBackendEnum
    if declared.state_layer:
        # Its modules import models of vLLM, which the other classes do not need.
        states = importlib.import_module(f"{__package__}.states")
        parent, registry = states.VLLMStateBackend, MambaAttentionBackendEnum
    if declared.capabilities.receives:
        importlib.import_module(f"{__package__}.hand_over")  # importing the connector sets a variable of UCX
    kernels = "real"
    if declared.compiled_store and (machine.without_gpu or STABLE in machine.missing):
        kernels = "stores"
    if machine.without_gpu and declared.compiled_kernel:
        kernels = "emulated"
    notes = [f"{module} does not load ({why})" for module, why in machine.missing.items() if module == STABLE]
    if notes:
        notes = [f"{notes[0]}: {_STORES_IN_TORCH if declared.compiled_store else _CALLS_NONE}"]
    absent = machine.missing.get(declared.compiled_module, "")
    real = registry[declared.registered].get_class()
    return class_of(
        parent, "VLLM", name, declared, kernels, real=real, notes=tuple(notes),
        not_here=f"{declared.compiled_module} does not load: {absent}" if absent else "",
    )  # fmt: skip


_STORES_IN_TORCH = "torch stores new keys and values in its place"
_CALLS_NONE = "this class calls nothing of that module"

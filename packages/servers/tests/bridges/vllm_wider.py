"""What vLLM says of its backends, and the bridge does not declare: it is not kept in 0.33.0, or not by everybody.

    export PYTHONPATH=packages/servers/tests/bridges
    attn-testkit run --backend vllm_wider:LseInFloat32 --tier core --case '*lsewhole*'

Importing this imports vLLM.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import torch

from attn_testkit_servers.bridges.vllm import backend_class

TritonMLA: Any = backend_class("triton_mla")


class LseInFloat32(TritonMLA):
    """Ranks are merged in float32, by log-sum-exps that ``forward_mqa`` has rounded to the dtype of the queries."""

    capabilities = TritonMLA.capabilities.with_changes(
        lse=dataclasses.replace(TritonMLA.capabilities.lse, dtype="fp32")
    )

    def forward_return_lse(self, *args: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().forward_return_lse(*args, **named)
        return out, lse.float()


Received: Any = backend_class("triton_mla_pd")


class SmallerBlocks(Received):
    """Blocks of the sender are paired from the end, also if the last one of the receiver is not full."""

    capabilities = Received.capabilities.with_changes(
        receives=dataclasses.replace(Received.capabilities.receives, page_sizes=frozenset({16}))
    )


Bailing: Any = backend_class("bailing")
Linear: Any = backend_class("linear")


def _with_flags(kind: Any) -> Any:
    """Capabilities with slots of fresh requests as their former owners left them: in vLLM nobody clears a block."""
    return kind.capabilities.with_changes(state=dataclasses.replace(kind.capabilities.state, fresh=frozenset({"flag"})))


class BailingFresh(Bailing):
    """A fresh prompt of one token is taken for a decode: ``--mode extend`` fails."""

    capabilities = _with_flags(Bailing)


class LinearFresh(Linear):
    """The same in MiniMax's layers."""

    capabilities = _with_flags(Linear)


class BailingOfRunnerV2(Bailing):
    """The acceptance counts that model runner V2 gives, which is the default: none for this builder.

    ``--mode target-verify`` fails.
    """

    @property
    def counts(self) -> Any:
        return importlib.import_module("vllm.v1.worker.gpu.model_states.mamba_hybrid").MambaHybridAttnMetadata

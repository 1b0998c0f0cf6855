"""What vLLM says of its backends, and the bridge does not declare: it is not kept in 0.33.0, or not by everybody.

PYTHONPATH=tests/bridges attn-testkit run --backend vllm_wider:LseInFloat32 --tier core --case '*lsewhole*'

Importing this imports vLLM.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from attn_testkit.bridges.vllm import backend_class

TritonMLA: Any = backend_class("triton_mla")


class LseInFloat32(TritonMLA):
    """Ranks are merged in float32, by log-sum-exps that ``forward_mqa`` has rounded to the dtype of the queries."""

    capabilities = TritonMLA.capabilities.with_changes(
        lse=dataclasses.replace(TritonMLA.capabilities.lse, dtype="fp32")
    )

    def forward_return_lse(self, *args: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().forward_return_lse(*args, **named)
        return out, lse.float()

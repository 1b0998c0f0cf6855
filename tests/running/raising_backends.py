"""Backends that raise, or leave something behind, in a way that is hard to tell."""

from __future__ import annotations

from typing import Any

import torch

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.contract import BackendContext


class ConstructorTakesMore(TorchNativeBackend):
    def __init__(self, context: BackendContext, workspace: torch.Tensor) -> None:
        super().__init__(context)


class PlanTakesNothing(TorchNativeBackend):
    def init_forward_metadata(self) -> None:  # type: ignore[override]
        pass


class ForwardTakesNoLayer(TorchNativeBackend):
    def forward(self, q: Any, k: Any, v: Any, batch: Any) -> torch.Tensor:  # type: ignore[override]
        return q


class Raises(TorchNativeBackend):
    error: BaseException = RuntimeError("it broke")

    def forward(self, *args: Any, **more: Any) -> torch.Tensor:
        raise self.error


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no message")

    __repr__ = __str__


class RaisesAMuteException(Raises):
    error = Mute()


class RaisesALongMessage(Raises):
    error = RuntimeError("x" * 2_000_000)


class RaisesOfManyLines(Raises):
    error = RuntimeError("at 3:12:\ndef kernel(q):\n    scores = tl.dott(q)\n             ^\nno attribute 'dott'")


class LeavesTheDeviceMeta(TorchNativeBackend):
    def forward(self, *args: Any, **more: Any) -> torch.Tensor:
        out = super().forward(*args, **more)
        torch.set_default_device("meta")
        return out


class LeavesTheDeviceCuda(TorchNativeBackend):
    def forward(self, *args: Any, **more: Any) -> torch.Tensor:
        out = super().forward(*args, **more)
        torch.set_default_device("cuda")
        return out


class LeavesTheDeviceMetaInConstructor(TorchNativeBackend):
    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        torch.set_default_device("meta")


class OneRowShort(TorchNativeBackend):
    """Looks requests up in a table that has room for the capture batch: only a replay finds out."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.rooms = torch.zeros(2, device=self.context.device)

    def forward(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True) -> torch.Tensor:
        out = super().forward(q, k, v, layer, batch, save_kv_cache)
        if hasattr(self, "rooms") and torch.cuda.is_current_stream_capturing():
            out = out + self.rooms.index_select(0, batch.req_pool_indices).sum().to(out.dtype)
        return out

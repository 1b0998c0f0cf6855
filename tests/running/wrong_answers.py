"""Backends that answer what the contract does not allow, where the kit asks them outside their planning hooks."""

from __future__ import annotations

from typing import Any

import torch
from broken_backends import DECODE

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.contract import BackendContext, ForwardBatch, TreeMaskMode, VerifyMask
from attn_testkit.examples import MinimalBackend


class _Decode(MinimalBackend):
    capabilities = DECODE


class ForgetsSuper(_Decode):
    def __init__(self, context: BackendContext) -> None:
        self.context = context


class _WithWorkspace(_Decode):
    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.workspace = torch.zeros(8, device=context.device)


class SkipsAParent(_WithWorkspace):
    def __init__(self, context: BackendContext) -> None:
        _Decode.__init__(self, context)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        self.workspace.zero_()


class MaskRaises(_Decode):
    @property
    def verify_mask(self) -> VerifyMask | None:
        return self._maks  # type: ignore[attr-defined, no-any-return]


class MaskIsNoneTwice(_Decode):
    """Says NoneType, and no length of the host's is the cause."""

    @property
    def verify_mask(self) -> VerifyMask | None:
        return self._kit_mask.buffer  # type: ignore[union-attr, return-value]


class MaskIsAMethod(_Decode):
    def verify_mask(self) -> VerifyMask | None:  # type: ignore[override]
        return None


class FillRaises(_Decode):
    def get_cuda_graph_seq_len_fill_value(self) -> int:
        raise KeyError("fill")


class FillIsNone(_Decode):
    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return None  # type: ignore[return-value]


class FillIsFive(_Decode):
    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 5


class FillIsATensor(_Decode):
    """Zero or one, whatever its type."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return torch.ones((), dtype=torch.int64)  # type: ignore[return-value]


class KernelsRaises(_Decode):
    @property
    def kernels(self) -> str:  # type: ignore[override]
        raise OSError("no library")


class KernelsAreUnheardOf(_Decode):
    kernels = "fake"


class _Lends(TorchNativeBackend):
    capabilities = TorchNativeBackend.capabilities.with_changes(eager=(), graph={"target-verify"})

    def lend(self, max_bs: int, n: int) -> Any:
        raise NotImplementedError

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self._mask = self.lend(max_bs, self.context.num_draft_tokens)


class LendsATensor(_Lends):
    def lend(self, max_bs: int, n: int) -> Any:
        return torch.zeros(max_bs * n * n, dtype=torch.bool, device=self.context.device)


class LendsTooLittle(_Lends):
    def lend(self, max_bs: int, n: int) -> Any:
        buffer = torch.zeros(max_bs * n, dtype=torch.bool, device=self.context.device)
        return VerifyMask(buffer, TreeMaskMode.QLEN_ONLY, max_bs)


class LendsTooLittleForAllKeys(_Lends):
    def lend(self, max_bs: int, n: int) -> Any:
        buffer = torch.zeros(max_bs * n * n, dtype=torch.bool, device=self.context.device)
        return VerifyMask(buffer, TreeMaskMode.FULL_MASK, max_bs)


class LendsForTheLongestRequest(_Lends):
    """As SGLang's ``tree_mask_numel``: a column for each key before the step and each of the step."""

    capabilities = _Lends.capabilities.with_changes(server={"context_len": {"prefix"}})

    def lend(self, max_bs: int, n: int) -> Any:
        columns = self.context.max_context_len + n
        buffer = torch.zeros(max_bs * n * columns, dtype=torch.bool, device=self.context.device)
        return VerifyMask(buffer, TreeMaskMode.FULL_MASK, max_bs)


class LendsNumbers(_Lends):
    def lend(self, max_bs: int, n: int) -> Any:
        buffer = torch.zeros(max_bs * n * n, dtype=torch.int32, device=self.context.device)
        return VerifyMask(buffer, TreeMaskMode.QLEN_ONLY, max_bs)


class LendsBytesForWords(_Lends):
    def lend(self, max_bs: int, n: int) -> Any:
        buffer = torch.zeros(max_bs * n, dtype=torch.int32, device=self.context.device)
        return VerifyMask(buffer, TreeMaskMode.QLEN_ONLY_BITPACKING, max_bs)


class LendsAMatrix(_Lends):
    def lend(self, max_bs: int, n: int) -> Any:
        buffer = torch.zeros(max_bs, n, n, dtype=torch.bool, device=self.context.device)
        return VerifyMask(buffer, TreeMaskMode.QLEN_ONLY, max_bs)


class LendsHostMemory(_Lends):
    def lend(self, max_bs: int, n: int) -> Any:
        return VerifyMask(torch.zeros(max_bs * n * n, dtype=torch.bool), TreeMaskMode.QLEN_ONLY, max_bs)


class LendsInNoMode(_Lends):
    def lend(self, max_bs: int, n: int) -> Any:
        buffer = torch.zeros(max_bs * n * n, dtype=torch.bool, device=self.context.device)
        return VerifyMask(buffer, 1, max_bs)  # type: ignore[arg-type]


class LendsForNobody(_Lends):
    def lend(self, max_bs: int, n: int) -> Any:
        buffer = torch.zeros(max_bs * n * n, dtype=torch.bool, device=self.context.device)
        return VerifyMask(buffer, TreeMaskMode.QLEN_ONLY, None)  # type: ignore[arg-type]

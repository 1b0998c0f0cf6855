"""Class G: a bias among the rows of a step, which belongs to rows of a request, in natural units."""

from __future__ import annotations

import math

import torch
from typing_extensions import override

from attn_testkit.contract import AttentionLayer, BackendContext, ForwardBatch, ForwardMode

from .b_empty_batches import LEAN
from .catalogue import fault
from .dense import DenseBackend

_MODES = (ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY)


class QQBiasBackend(DenseBackend):
    """Healthy parent: the bias is placed at the keys of the step, and added to capped logits before the mask."""

    capabilities = LEAN.with_changes(
        eager=_MODES,
        graph=_MODES,
        bounds={"max_topk": 2},
        windows=_MODES,
        options={"logit_cap": True, "sinks": True, "qq_bias": _MODES},
    )

    @override
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        self.bias: torch.Tensor | None = None
        if self.context.qq_bias != "none" and batch.batch_size:
            self.bias = self.bias_of_keys(self.given(batch))

    def given(self, batch: ForwardBatch) -> torch.Tensor:
        """[T, C] float32: the bias of each row."""
        assert batch.qq_bias is not None
        return batch.qq_bias

    def bias_of_keys(self, bias: torch.Tensor) -> torch.Tensor:
        """[B, W, C] float32: ``bias`` [T, columns] at the keys of this step, and 0 elsewhere."""
        column = self.columns()[:, None].expand(-1, self.row.shape[1], -1)
        rows = self.of_rows(bias)
        placed = rows.gather(2, column.clamp(0, rows.shape[2] - 1))
        return placed.masked_fill((column < 0) | (column >= self.counts[:, None, None]), 0.0)

    def columns(self) -> torch.Tensor:
        """[B, C] int64: number of each key among the rows of the step."""
        return self.key - (self.kv_lens - self.counts)[:, None]

    def of_rows(self, bias: torch.Tensor) -> torch.Tensor:
        """[B, W, columns] float32 of ``bias`` [T, columns]: the rows of each request."""
        return bias[self.row]

    @override
    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        logits = super().logits(rows, keys, layer)
        return logits if self.bias is None else logits + self.factor(layer) * self.bias[:, None, None]

    def factor(self, layer: AttentionLayer) -> float:
        """Factor on the bias."""
        return 1.0


@fault(
    "general; a path of a kernel without the bias", "matches-oracle", "right without it", modes="extend target-verify"
)
class QQBiasNotAdded(QQBiasBackend):
    """The kernel masks later rows, and adds no bias."""

    def given(self, batch: ForwardBatch) -> torch.Tensor:
        return torch.zeros_like(super().given(batch))


@fault(
    "general; the bias is added to q.k, and the sum is scaled",
    "matches-oracle",
    "scaled biases",
    modes="extend target-verify",
)
class QQBiasScaled(QQBiasBackend):
    """The softmax scale is applied to the bias as well."""

    def factor(self, layer: AttentionLayer) -> float:
        return layer.scaling


@fault(
    "general; kernels whose softmax uses exp2, with log2(e) in the scale",
    "matches-oracle",
    "log2",
    modes="extend target-verify",
    slug="qq-bias-in-base-2",
)
class QQBiasInBase2(QQBiasBackend):
    """Logits are multiplied by log2(e) for exp2, but the bias is not."""

    def factor(self, layer: AttentionLayer) -> float:
        return math.log(2)


@fault(
    "vLLM 0.33, unified_attention: rows of qq_bias are numbered inside their request",
    "matches-oracle",
    "request 0",
    modes="extend target-verify",
)
class QQBiasOfTheFirstRequest(QQBiasBackend):
    """Rows of the bias are counted from the start of the batch, without the request's first row in cu_seqlens_q."""

    def of_rows(self, bias: torch.Tensor) -> torch.Tensor:
        return bias[self.row - self.starts[:, None]]


@fault("general; columns and rows of the bias swapped", "matches-oracle", "transposed", modes="extend target-verify")
class QQBiasTurned(QQBiasBackend):
    """The bias of row j on row i is added to the logit of row i and key j."""

    def of_rows(self, bias: torch.Tensor) -> torch.Tensor:
        return super().of_rows(bias)[..., : self.row.shape[1]].transpose(1, 2)


@fault(
    "general; the bias copied by the plan of the capture",
    "replay-follows-batch",
    "which it is at the capture",
    modes="extend target-verify",
    executions="graph",
)
class QQBiasOfTheCapture(QQBiasBackend):
    """The plan of a capture copies the bias, and replays read that copy."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.of_captures: dict[int, torch.Tensor] = {}

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(batch, in_capture)
        if in_capture and batch.qq_bias is not None:
            # One for each bucket, kept as long as its graph.
            self.of_captures[len(batch.input_ids)] = batch.qq_bias.clone()

    def given(self, batch: ForwardBatch) -> torch.Tensor:
        return self.of_captures.get(len(batch.input_ids), super().given(batch))


@fault(
    "general; kernels cap the sum, and vLLM adds qq_bias to the capped logit",
    "matches-oracle",
    "added before the soft cap",
    modes="extend target-verify",
)
class QQBiasBeforeTheSoftCap(QQBiasBackend):
    """The soft cap is applied to the sum of logit and bias."""

    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        logits = torch.einsum("bwhgd,bshd->bhgws", rows, keys) * layer.scaling
        if self.bias is not None:
            logits = logits + self.bias[:, None, None]
        return layer.logit_cap * torch.tanh(logits / layer.logit_cap) if layer.logit_cap else logits


@fault(
    "general; columns of the bias counted from the first key of the request",
    "matches-oracle",
    modes="extend target-verify",
)
class QQBiasOnTheFirstKeys(QQBiasBackend):
    """The bias is added to the first keys of the prefix instead of those of the step."""

    def columns(self) -> torch.Tensor:
        return self.key.expand(len(self.kv_lens), -1)


@fault("general; rows of the bias addressed by its width", "finite", "use its stride", modes="extend target-verify")
class QQBiasWithoutItsStride(QQBiasBackend):
    """Rows of the bias are assumed to follow each other without a gap."""

    def given(self, batch: ForwardBatch) -> torch.Tensor:
        bias = super().given(batch)
        return bias.as_strided(bias.shape, (bias.shape[1], 1))


@fault(
    "vLLM 0.33, load_qq_bias_tile: keys up to qq_bias.stride(0) have a bias, which is added after the mask",
    "finite",
    modes="extend target-verify",
    modelled="keys after the request's last one are computed for all columns of the request table",
)
class QQBiasAsWideAsItsStride(QQBiasBackend):
    """Masked keys after the last row get the values between the rows of the bias, and -inf + NaN is NaN."""

    def given(self, batch: ForwardBatch) -> torch.Tensor:
        bias = super().given(batch)
        return bias.as_strided((len(bias), bias.stride(0)), (bias.stride(0), 1))

    def bias_of_keys(self, bias: torch.Tensor) -> torch.Tensor:
        column = self.columns()[:, None].expand(-1, self.row.shape[1], -1)
        placed = self.of_rows(bias).gather(2, column.clamp(0, bias.shape[1] - 1))
        return placed.masked_fill((column < 0) | (column >= bias.shape[1]), 0.0)

    def weights(self, logits: torch.Tensor, seen: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        bias = torch.zeros(()) if self.bias is None else self.bias.masked_fill(seen, 0.0)[:, None, None]
        found = super().weights(logits, seen, layer)
        # A number that is added after the mask reaches the whole row.
        return found + 0.0 * bias.masked_fill(bias == -torch.inf, 0.0).sum(-1, keepdim=True)

"""States and windows that a step computes rightly and keeps wrongly, or decays wrongly. See ``nineteenth_set.md``."""

from __future__ import annotations

import torch
from parents_states import Moded

from attn_testkit.backends.torch_native_state import TorchNativeStateBackend
from attn_testkit.contract import ForwardBatch, ForwardMode, StateLayer
from attn_testkit_corpus.faults.catalogue import bug


@bug(
    19,
    "state-spaces mamba #1027",
    "extend-mamba4x2-d64-fp16-p16-k64-n5a5-shuffled-like_keys-k64w4sb16.null.snap16-layers3from5-b1nan",
    "conv-window-exact",
)
class WindowOfOutputs(Moded):
    """state-spaces/mamba #1027: a prefill keeps what the convolution returns, and not what it is given."""

    def forward(  # type: ignore[override]
        self,
        mixed: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        layer: StateLayer,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        self.outputs: list[torch.Tensor] = []
        out = super().forward(mixed, a, b, layer, batch)
        columns = layer.conv_width - 1
        if self.mode is ForwardMode.EXTEND and columns and self.outputs:
            # Zeros before the first row, as a padded input gives.
            every = torch.nn.functional.pad(torch.stack(self.outputs, -1), (columns, 0))
            at = self.counts[:, None, None] + torch.arange(columns, device=every.device)
            kept = every.gather(2, at.expand(-1, every.shape[1], -1))
            conv, _ = self.pools(layer)
            self.store(conv[..., :columns], kept.to(conv.dtype), self.index, self.live & (self.counts > 0))
        return out

    def convolved(
        self, rows: torch.Tensor, window: torch.Tensor, layer: StateLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found, after = super().convolved(rows, window, layer)
        self.outputs.append(found)
        return found, after


@bug(
    19,
    "xllm #1873",
    "decode-gdn2x2-d64-fp32-p16-k0.33.0.4-shuffled-no_decay-k128w1sb16-layers3from5-b5prod",
    "state-matches-oracle",
)
class StateOfCopy(Moded):
    """xllm #1873: a decode updates a float32 copy of a state in bf16."""

    def store(self, pool: torch.Tensor, rows: torch.Tensor, index: torch.Tensor, live: torch.Tensor) -> None:
        if self.mode is not ForwardMode.DECODE or pool.dim() != 4 or self.states.pool.dtype != torch.bfloat16:
            super().store(pool, rows, index, live)


@bug(
    19,
    "ollama #15865",
    "decode-rwkv2-d64-fp16-p16-k0.33.0.4-shuffled-weak_decay-k64w1s32.slot0.zeroed.strided.snap16-b5prod-overlap_scheduling",
    "state-matches-oracle",
)
class StateInModelDtype(Moded):
    """ollama #15865: a decode writes the state in the dtype of its inputs, over a pool in float32."""

    def store(self, pool: torch.Tensor, rows: torch.Tensor, index: torch.Tensor, live: torch.Tensor) -> None:
        if self.mode is ForwardMode.DECODE and pool.dim() == 4 and pool.dtype == torch.float32:
            rows = rows.to(self.context.dtype).to(pool.dtype)
        super().store(pool, rows, index, live)


@bug(
    19,
    "TileOPs #1465",
    "extend-mamba2x2-d128-fp16-p16-k30.0.5.0-n3a2x2.3.4-shuffled-strong_decay-k64w4s32.null.snap16-b4nan",
    "finite",
)
class ExponentialIsCutOff(Moded):
    """TileOPs #1465: between rows l and s of a chunk, ``exp(cum[l]) * exp(min(-cum[s], 88))``."""

    chunk = 128

    def forward(  # type: ignore[override]
        self,
        mixed: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        layer: StateLayer,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        self.row = 0
        return super().forward(mixed, a, b, layer, batch)

    def step(
        self,
        state: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        layer: StateLayer,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        after, read = super().step(state, q, k, v, a, b, layer)
        if layer.kind != "mamba" or self.mode is not ForwardMode.EXTEND:
            return after, read
        decay, step = self.gates(a, b, layer)
        assert layer.A_log is not None
        if self.row % self.chunk == 0:
            self.before, self.sum = state, torch.zeros_like(decay)
            self.updates = torch.zeros_like(state)
        self.row += 1
        self.sum = self.sum - layer.A_log.exp()[:, None] * step
        update = (step * v)[..., None] * k[..., None, :]
        self.updates = self.updates + torch.exp((-self.sum).clamp(max=88))[..., None] * update
        read = (torch.exp(self.sum)[..., None] * (self.before + self.updates) * q[..., None, :]).sum(-1)
        return after, read if layer.D is None else read + layer.D[:, None] * v


@bug(
    19,
    "sglang #40362",
    "extend-gdn1x2-d64-fp16-p16-k7.0x2-n43a63.64.2-shuffled-strong_decay-k128w1sb16.zeroed.kv.strided.snap64-b3prod",
)
class BetaOfPrefillInModelDtype(Moded):
    """sglang #40362: the gating of a prefill stores ``sigmoid(b)`` in the dtype of ``b``."""

    def gates(
        self, a: torch.Tensor | None, b: torch.Tensor | None, layer: StateLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        decay, beta = super().gates(a, b, layer)
        if self.mode is ForwardMode.EXTEND and layer.kind == "gdn" and b is not None:
            beta = beta.to(b.dtype).float()
        return decay, beta


@bug(
    19,
    "lucebox #642",
    "target-verify-gdn4x2-d32-fp32-p16-k33.5.12-t0.1.0.3-shuffled-mild_decay-k32w4s32.snap16-layers1from0-b4prod-multi_mode",
)
class TreeIsChain(TorchNativeStateBackend):
    """lucebox #642: the parents of nodes are ignored."""

    def parents_of(self, batch: ForwardBatch) -> torch.Tensor | None:
        return None

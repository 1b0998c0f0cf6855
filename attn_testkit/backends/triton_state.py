"""Gated DeltaNet in Triton: one program for a request and a value head goes through the request's rows.

It runs on CUDA and, with ``TRITON_INTERPRET=1`` set before the first import of triton, on a CPU.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Kernels are Triton's language, not Python's: their arguments have no Python types.

from __future__ import annotations

from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from typing_extensions import override

from attn_testkit.contract import (
    BackendContext,
    Bounds,
    Capabilities,
    ForwardBatch,
    ForwardMode,
    HeadShapes,
    KVPools,
    Needs,
    Precision,
    Promises,
    Requires,
    ServerConventions,
    State,
    StateBackend,
    StateInput,
    StateLayer,
)

_INTERPRETED = bool(triton.knobs.runtime.interpret)


@triton.jit
def convolve_kernel(
    x_ptr, out_ptr, weight_ptr, bias_ptr, conv_ptr, scratch_ptr,
    first_ptr, count_ptr, slot_ptr, begun_ptr, copied_ptr, copy_ptr,
    x_row, conv_slot, scratch_row, scratch_node, lowest,
    C: tl.constexpr, W: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, VERIFY: tl.constexpr,
    COPIES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Convolution of one request's rows, ``BLOCK_T`` at a time, of ``BLOCK_C`` channels, and its window afterwards.

    A slot below ``lowest`` belongs to padding: nothing is read from it, and nothing is stored.
    """
    request = tl.program_id(0)
    channel, column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_W)
    there = channel < C
    slot = tl.load(slot_ptr + request).to(tl.int64)
    live = slot >= lowest
    begun = live & (tl.load(begun_ptr + request) != 0)
    first, count = tl.load(first_ptr + request).to(tl.int64), tl.load(count_ptr + request)
    held = conv_ptr + tl.where(live, slot, 0) * conv_slot + channel * (W - 1)
    x_at = x_ptr + first * x_row + channel
    bias = tl.zeros([BLOCK_C], tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + channel, mask=there, other=0.0).to(tl.float32)
    for start in range(0, count, BLOCK_T):
        token = start + tl.arange(0, BLOCK_T)[:, None]
        in_tile = (token < count) & there[None, :]
        total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32) + bias[None, :]
        for tap in tl.static_range(W):
            source = token - (W - 1) + tap
            weight = tl.load(weight_ptr + channel * W + tap, mask=there, other=0.0).to(tl.float32)
            new = tl.load(x_at[None, :] + source * x_row, mask=in_tile & (source >= 0), other=0.0)
            old = tl.load(held[None, :] + (W - 1) + source, mask=in_tile & begun & (source < 0), other=0.0)
            total += weight[None, :] * tl.where(source >= 0, new, old).to(tl.float32)
            if VERIFY and tap > 0:
                # The taps after the first one read the window after the token.
                at = scratch_ptr + request.to(tl.int64) * scratch_row + token * scratch_node
                tl.store(at + channel[None, :] * (W - 1) + (tap - 1), tl.where(source >= 0, new, old), mask=in_tile)
        if SILU:
            total = total * tl.sigmoid(total)
        tl.store(out_ptr + (first + token) * C + channel[None, :], total.to(out_ptr.dtype.element_ty), mask=in_tile)
    in_window = there[:, None] & (column < W - 1)[None, :]
    x_all, held_all = x_at[:, None], held[:, None]
    if not VERIFY:
        source = (count - (W - 1) + column)[None, :]
        new = tl.load(x_all + source * x_row, mask=in_window & (source >= 0), other=0.0)
        old = tl.load(held_all + (W - 1) + source, mask=in_window & begun & (source < 0), other=0.0)
        if COPIES:
            rows = tl.load(copied_ptr + request)
            then = (rows - (W - 1) + column)[None, :]
            copied = in_window & live & (rows > 0)
            new_then = tl.load(x_all + then * x_row, mask=copied & (then >= 0), other=0.0)
            old_then = tl.load(held_all + (W - 1) + then, mask=copied & begun & (then < 0), other=0.0)
            at = conv_ptr + tl.load(copy_ptr + request) * conv_slot
            at = at + channel[:, None] * (W - 1) + column[None, :]
            tl.store(at, tl.where(then >= 0, new_then, old_then), mask=copied)
        # Other threads of the program may still read the window before.
        tl.debug_barrier()
        tl.store(held_all + column[None, :], tl.where(source >= 0, new, old), mask=in_window & live)


@triton.jit
def delta_rule_kernel(
    x_ptr, a_ptr, b_ptr, out_ptr, A_log_ptr, dt_bias_ptr, pool_ptr, scratch_ptr,
    first_ptr, count_ptr, slot_ptr, begun_ptr, copied_ptr, copy_ptr,
    a_row, b_row, pool_slot, value_step, key_step, scratch_row, scratch_node, lowest, scale,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, LAST: tl.constexpr, VERIFY: tl.constexpr,
    COPIES: tl.constexpr, HEADS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The recurrence of one request, ``HEADS`` value heads and ``BLOCK_V`` values of each, row by row in float32."""
    request, head = tl.program_id(0), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    key, value = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_value = key < K, value < LAST
    whole = is_value[None, :, None] & is_key[None, None, :]
    slot = tl.load(slot_ptr + request).to(tl.int64)
    live = slot >= lowest
    begun = live & (tl.load(begun_ptr + request) != 0)
    first, count = tl.load(first_ptr + request).to(tl.int64), tl.load(count_ptr + request)
    place = head[:, None, None] * V * K + value[None, :, None] * value_step + key[None, None, :] * key_step
    own = pool_ptr + tl.where(live, slot, 0) * pool_slot + place
    state = tl.load(own, mask=whole & begun, other=0.0).to(tl.float32)
    rate, shift = tl.exp(tl.load(A_log_ptr + head)), tl.load(dt_bias_ptr + head)
    k_at = (head // (HV // HK))[:, None] * K + key[None, :]
    v_at = head[:, None] * V + value[None, :]
    if COPIES:
        rows = tl.load(copied_ptr + request)
        copy = pool_ptr + tl.load(copy_ptr + request) * pool_slot + place
    for token in range(count):
        row = first + token
        x_at = x_ptr + row * (2 * HK * K + HV * V)
        q = tl.load(x_at + k_at, mask=is_key[None, :], other=0.0).to(tl.float32)
        k = tl.load(x_at + HK * K + k_at, mask=is_key[None, :], other=0.0).to(tl.float32)
        v = tl.load(x_at + 2 * HK * K + v_at, mask=is_value[None, :], other=0.0).to(tl.float32)
        q = q * (tl.rsqrt(tl.sum(q * q, 1) + 1e-6) * scale)[:, None]
        k = k * tl.rsqrt(tl.sum(k * k, 1) + 1e-6)[:, None]
        gate = tl.load(a_ptr + row * a_row + head).to(tl.float32) + shift
        step = tl.where(gate > 20.0, gate, tl.log(1.0 + tl.exp(tl.minimum(gate, 20.0))))
        beta = tl.sigmoid(tl.load(b_ptr + row * b_row + head).to(tl.float32))
        state = state * tl.exp(-rate * step)[:, None, None]
        stored = beta[:, None] * (v - tl.sum(state * k[:, None, :], 2))
        state += stored[:, :, None] * k[:, None, :]
        read = tl.sum(state * q[:, None, :], 2)
        tl.store(out_ptr + row * HV * V + v_at, read.to(out_ptr.dtype.element_ty), mask=is_value[None, :])
        if VERIFY:
            at = scratch_ptr + request.to(tl.int64) * scratch_row + token * scratch_node + place
            tl.store(at, state.to(scratch_ptr.dtype.element_ty), mask=whole)
        if COPIES:
            tl.store(copy, state.to(pool_ptr.dtype.element_ty), mask=whole & live & (rows == token + 1))
    if not VERIFY:
        tl.store(own, state.to(pool_ptr.dtype.element_ty), mask=whole & live)


@triton.jit
def commit_kernel(
    pool_ptr, scratch_ptr, step_ptr, slot_ptr, pool_slot, scratch_row, scratch_node, SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy window and state after one node of a request to a slot. For a step of -1, and for a slot below 1, nothing is
    stored."""
    request, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    step, slot = tl.load(step_ptr + request).to(tl.int64), tl.load(slot_ptr + request).to(tl.int64)
    stays = (at < SIZE) & (step >= 0) & (slot > 0)
    node = tl.load(scratch_ptr + request * scratch_row + step * scratch_node + at, mask=stays, other=0.0)
    tl.store(pool_ptr + slot * pool_slot + at, node, mask=stays)


class TritonStateBackend(StateBackend):
    """GDN with SGLang's rollback by a commit, copies for prefix caches, and slots that may be strided."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        eager={ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY},
        graph={ForwardMode.DECODE, ForwardMode.TARGET_VERIFY},
        bounds=Bounds(max_q_rows=8, max_topk=1),
        heads=HeadShapes(families={"gdn"}, gqa_ratios={1, 2, 4}, head_dims={64, 96, 128}),
        precision=Precision(dtypes={"bf16", "fp16"}),
        kv_pool=KVPools(page_sizes={16}),
        state=State(
            k_dims={64, 128},
            dtypes={"fp32", "bf16", "fp16"},
            conv_widths={2, 4},
            orders={"vk", "kv"},
            padding={"skip_minus_one", "skip_zero", "write_zero"},
            fresh={"flag", "zeroed"},
            strided=True,
            snapshots={16, 64},
        ),
        needs=Needs(cpu_seq_lens=False),
        server=ServerConventions(takes_requests_without_rows=True),
        promises=Promises(deterministic=True, batch_invariant=True),
        requires=Requires(packages=("triton",)),
    )

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        assert context.state is not None
        self.states = context.state
        self.lowest = 0 if self.states.padding == "write_zero" else 1

    @override
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Compute first rows, numbers of rows and flags of the requests, on the device."""
        assert batch.state is not None
        bs, rows = batch.batch_size, batch.input_ids.shape[0]
        if batch.forward_mode is ForwardMode.EXTEND:
            assert batch.extend_seq_lens is not None
            self.counts = batch.extend_seq_lens.int()
        else:
            self.counts = torch.full_like(batch.state.indices, rows // bs if bs else 0)
        self.first = (self.counts.cumsum(0) - self.counts).int()
        flags = batch.state.has_initial_state
        self.begun = (torch.ones_like(self.counts) if flags is None else flags.int()).contiguous()

    def pools(self, layer: StateLayer) -> tuple[torch.Tensor, torch.Tensor]:
        """Windows and states of a layer."""
        return self.states.pool.conv(layer.layer_id), self.states.pool.temporal(layer.layer_id)

    def of_requests(self, batch: ForwardBatch) -> tuple[torch.Tensor, ...]:
        """First row, rows, slot, flag, rows of the copy and slot of the copy of each request."""
        assert batch.state is not None
        slots, copies = batch.state.indices, batch.state.snapshot
        copied = (slots, slots) if copies is None else (copies.rows, copies.slots)
        return self.first, self.counts, slots, self.begun, *copied

    def strides(self, layer: StateLayer) -> dict[str, Any]:
        """Strides of the states of a layer."""
        pool = self.pools(layer)[1]
        steps = (layer.k_dim, 1) if self.states.pool.order == "vk" else (1, layer.v_dim)
        return {"pool_slot": pool.stride(0), "value_step": steps[0], "key_step": steps[1]}

    def sizes(self, layer: StateLayer) -> dict[str, int]:
        """Widths of keys, values and tiles; LAST: end of the values of a head."""
        blocks = triton.next_power_of_2(layer.k_dim), 64 if _INTERPRETED else 32
        return {"K": layer.k_dim, "V": layer.v_dim, "LAST": layer.v_dim, "BLOCK_K": blocks[0], "BLOCK_V": blocks[1]}

    def tile(self, batch: ForwardBatch) -> int:
        """Rows of a request that the convolution processes at a time: a power of 2."""
        if batch.forward_mode is ForwardMode.EXTEND:
            return 64 if _INTERPRETED else 16
        rows: int = triton.next_power_of_2(max(batch.input_ids.shape[0] // batch.batch_size, 1))
        return rows

    @override
    def forward(  # type: ignore[override]
        self,
        mixed: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        layer: StateLayer,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """[T, Hv, V] in the model's dtype: a launch for the convolution, and one for the recurrence."""
        assert a is not None
        assert b is not None
        assert batch.state is not None
        assert layer.conv_weight is not None
        verifies = batch.forward_mode.is_target_verify()
        conv, temporal = self.pools(layer)
        windows, nodes = self.states.pool.scratch(layer.layer_id) if verifies else (conv, temporal)
        flags = {"VERIFY": verifies, "COPIES": batch.state.snapshot is not None and not verifies}
        rows = torch.empty(mixed.shape, dtype=mixed.dtype, device=mixed.device)
        out = torch.zeros(len(mixed), layer.v_heads, layer.v_dim, dtype=mixed.dtype, device=mixed.device)
        bs, channels = batch.batch_size, mixed.shape[1]
        if not bs:
            return out
        width, block = layer.conv_width, 1024 if _INTERPRETED else 128
        convolve_kernel[(bs, triton.cdiv(channels, block))](
            mixed, rows, layer.conv_weight, rows if layer.conv_bias is None else layer.conv_bias, conv, windows,
            *self.of_requests(batch), mixed.stride(0), conv.stride(0), windows.stride(0), windows.stride(1),
            self.lowest, C=channels, W=width, HAS_BIAS=layer.conv_bias is not None, SILU=layer.activation == "silu",
            BLOCK_T=self.tile(batch), BLOCK_C=block, BLOCK_W=triton.next_power_of_2(max(width - 1, 1)), **flags,
        )  # fmt: skip
        sizes = self.sizes(layer)
        # The emulation takes as long for a program of all heads as for one of a single head.
        heads = layer.v_heads & -layer.v_heads if _INTERPRETED else 1
        delta_rule_kernel[(bs, layer.v_heads // heads, triton.cdiv(layer.v_dim, sizes["BLOCK_V"]))](
            rows, a, b, out, layer.A_log, layer.dt_bias, temporal, nodes, *self.of_requests(batch),
            a_row=a.stride(0), b_row=b.stride(0), scratch_row=nodes.stride(0), scratch_node=nodes.stride(1),
            lowest=self.lowest, scale=layer.scaling, HK=layer.k_heads, HV=layer.v_heads, **self.strides(layer),
            HEADS=heads, **sizes, **flags,
        )  # fmt: skip
        return out

    @override
    def commit(self, steps: torch.Tensor, state: StateInput) -> None:
        """Copy nodes of the scratch to the slots of requests, and to the slots of prefix-cache copies."""
        copies = state.snapshot
        for layer in self.states.layers if len(steps) else ():
            for pool, scratch in zip(self.pools(layer), self.states.pool.scratch(layer.layer_id), strict=True):
                self.copy_nodes(pool, scratch, steps, state.indices)
                if copies is not None:
                    self.copy_nodes(pool, scratch, copies.rows - 1, copies.slots)

    def copy_nodes(self, pool: torch.Tensor, scratch: torch.Tensor, steps: torch.Tensor, slots: torch.Tensor) -> None:
        """Copy window and state after node ``steps`` of each draft to ``slots``, both [bs]."""
        size = pool[0].numel()
        block = min(1 << 14 if _INTERPRETED else 1024, triton.next_power_of_2(size))
        commit_kernel[(len(steps), triton.cdiv(size, block))](
            pool, scratch, steps, slots, pool.stride(0), scratch.stride(0), scratch.stride(1), SIZE=size, BLOCK=block
        )

"""The Triton backend, under the interpreter, against a float64 reference on small hand-made batches."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():  # before triton is imported: its kernels are built for one or the other
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

pytest.importorskip("triton")

from attn_testkit.backends.triton import TritonBackend
from attn_testkit.contract import (
    AttentionLayer,
    BackendContext,
    DraftExtendInput,
    ForwardBatch,
    ForwardMode,
    KVPool,
    VerifyInput,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROUNDOFF = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-20}
DECODE, VERIFY = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY
V1, V2 = ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2
CHAIN, SIBLINGS = (-1, 0, 1, 2), (-1, 0, 0, 1)


class World:
    """A pool full of NaN, requests on shuffled pages, and what each of them is about to compute."""

    def __init__(
        self,
        *,
        heads: tuple[int, int] = (2, 1),
        dim: int = 64,
        dtype: torch.dtype = torch.float16,
        kv_dtype: torch.dtype | None = None,
        page: int = 16,
        ctx: int = 512,
        max_bs: int = 4,
        parents: tuple[int, ...] = CHAIN,
        index: torch.dtype = torch.int64,
        **layer: object,
    ) -> None:
        self.random = torch.Generator().manual_seed(7)
        self.page, self.index, self.parents, self.dtype = page, index, parents, dtype
        other = {"scaling": 1.7 * dim**-0.5}
        settings = [{"scaling": dim**-0.5, **layer}, other]
        self.layers = tuple(AttentionLayer(i, *heads, dim, dim, **s) for i, s in enumerate(settings))
        self.pool = KVPool(ctx * max_bs, page, self.layers, kv_dtype or dtype, DEVICE)
        self.depth = [0]
        for parent in parents[1:]:
            self.depth.append(self.depth[parent] + 1)
        widest = max([1, *(parents.count(p) for p in range(len(parents)))])
        self.table = torch.zeros(max_bs + 1, ctx, dtype=torch.int32, device=DEVICE)
        self.context = BackendContext(
            DEVICE, dtype, self.pool, self.table, self.layers, page, ctx, max_bs, max_bs * len(parents),
            frozenset(ForwardMode), len(parents), max(self.depth), widest,
        )  # fmt: skip
        self.backend = TritonBackend(self.context)

    def _randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random)

    def step(self, mode: ForwardMode, prefixes: tuple[int, ...], new: tuple[int, ...] | None = None) -> Step:
        return Step(self, mode, prefixes, new or (1 if mode is DECODE else len(self.parents),) * len(prefixes))


class Step:
    """One batch in one mode: its slots, its keys and values for every layer, and the right answer."""

    def __init__(self, world: World, mode: ForwardMode, prefixes: tuple[int, ...], new: tuple[int, ...]) -> None:
        self.world, self.mode, self.prefixes, self.new = world, mode, prefixes, new
        self.rows = [(r, j) for r, n in enumerate(new) for j in range(n)]
        q_heads, kv_heads = world.layers[0].tp_q_head_num, world.layers[0].tp_k_head_num
        dim, lens = world.layers[0].head_dim, [p + n for p, n in zip(prefixes, new, strict=True)]
        # Keys 0.5 off zero, so that none goes unnoticed. q, k and v are views of one packed tensor, as from a projection.
        self.kv = [world._randn(2, n, kv_heads, dim).add(0.5).to(world.dtype) for n in lens]
        packed = world._randn(len(self.rows), q_heads + 2 * kv_heads, dim).to(world.dtype)
        for at, (r, j) in enumerate(self.rows):
            packed[at, q_heads:] = self.kv[r][:, prefixes[r] + j].flatten(0, 1)
        self.q, self.k, self.v = packed.to(DEVICE).split([q_heads, kv_heads, kv_heads], 1)
        self._place(lens)
        self.batch = self._batch()

    def _place(self, lens: list[int]) -> None:
        """Shuffled pages, foreign slots in every tail, NaN wherever this step may not look."""
        world = self.world
        page, table, pool = world.page, world.table, world.pool
        pages = 1 + torch.randperm(pool.size // page, generator=world.random)
        table.copy_(torch.randint(pool.num_slots, table.shape, generator=world.random))
        table[0] = 0
        self.request_rows = 1 + torch.randperm(len(lens), generator=world.random)
        pool.storage.view(torch.uint8).fill_(0x7F if pool.dtype.itemsize == 1 else 0xFF)
        self.slots, used = [], 0
        for r, n in enumerate(lens):
            mine = pages[used : (used := used + -(-n // page))]
            slots = (mine[:, None] * page + torch.arange(page)).flatten()[:n]
            table[self.request_rows[r], :n] = slots.to(DEVICE, torch.int32)
            self.slots.append(slots)
            old = slots[: self.prefixes[r]].to(DEVICE)
            for layer in world.layers:
                k, v = self.kv[r][:, : self.prefixes[r]].to(DEVICE)
                pool.set_kv_buffer(layer, old, k, v)

    def depths(self) -> list[int]:
        return self.world.depth if self.mode is VERIFY else list(range(max(self.new)))

    def sees(self, j: int, c: int) -> bool:
        """Whether new row j sees new row c of the same request."""
        if self.mode is not VERIFY:
            return c <= j
        while j > c:
            j = self.world.parents[j]
        return j == c

    def _batch(self) -> ForwardBatch:
        index, bs = self.world.index, len(self.prefixes)

        def tensor(values: object, dtype: torch.dtype = index) -> torch.Tensor:
            return torch.as_tensor(values, dtype=dtype).to(DEVICE)

        prefix, new = torch.tensor(self.prefixes), torch.tensor(self.new)
        positions = tensor([self.prefixes[r] + self.depths()[j] for r, j in self.rows])
        batch = ForwardBatch(
            self.mode, bs, tensor([0] * len(self.rows)), tensor(self.request_rows),
            tensor(prefix if self.mode is VERIFY else prefix + new),
            tensor([int(self.slots[r][self.prefixes[r] + j]) for r, j in self.rows]), positions,
        )  # fmt: skip
        if self.mode is VERIFY:
            n, mask = self.new[0], []
            for p in self.prefixes:
                mask += [[1] * p + [int(self.sees(j, c)) for c in range(n)] for j in range(n)]
            none = torch.empty(bs, n, dtype=torch.int64)
            batch.spec_info = VerifyInput(
                batch.input_ids, tensor([cell for row in mask for cell in row], torch.bool), positions, none, none, none,
                max(self.world.depth), self.world.context.topk, n, n,
            )  # fmt: skip
        elif self.mode in (V1, V2):
            accepted = tensor(new, torch.int32)
            batch.spec_info = DraftExtendInput(torch.empty(0), accepted - 1, accepted, positions)
            batch.extend_seq_lens, batch.extend_prefix_lens = accepted, tensor(prefix, torch.int32)
        return batch

    def run(self, layer: int = 0) -> torch.Tensor:
        """Plan and forward, eagerly."""
        self.world.backend.init_forward_metadata(self.batch)
        return self.forward(layer)

    def forward(self, layer: int = 0) -> torch.Tensor:
        return self.world.backend.forward(self.q, self.k, self.v, self.world.layers[layer], self.batch)

    def check(self, out: torch.Tensor, layer_id: int = 0) -> None:
        """Every row within the error that rounding P and the output allows."""
        layer, depth = self.world.layers[layer_id], self.depths()
        out, q = out.double().cpu(), self.q.double().cpu()
        for at, (r, j) in enumerate(self.rows):
            p = self.prefixes[r]
            k, v = (x.repeat_interleave(layer.q_per_kv, 1) for x in self.stored(r, layer))
            here = p + depth[j]
            spots = [*range(p), *(p + depth[c] for c in range(self.new[r]))]
            seen = [c < p or self.sees(j, c - p) for c in range(len(spots))]
            if layer.sliding_window_size >= 0:
                seen = [s and spot >= here - layer.sliding_window_size for s, spot in zip(seen, spots, strict=True)]
            s = torch.einsum("hd,khd->hk", q[at], k) * layer.scaling
            if layer.logit_cap:
                s = layer.logit_cap * torch.tanh(s / layer.logit_cap)
            s[:, ~torch.tensor(seen)] = -torch.inf
            if layer.sinks is not None:
                s = torch.cat([s, layer.sinks.double().cpu()[:, None]], 1)
            weight = s.softmax(1)[:, : len(spots)]
            want = torch.einsum("hk,khd->hd", weight, v)
            limit = 2 * ROUNDOFF[self.world.dtype] * (torch.einsum("hk,khd->hd", weight, v.abs()) + want.abs()) + 1e-7
            worst = ((out[at] - want).abs() / limit).max().item()
            assert worst <= 1, f"row {j} of request {r} is {worst:.1f} times over the limit"

    def stored(self, r: int, layer: AttentionLayer) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self.kv[r].double()
        if self.world.pool.dtype.itemsize == 1:
            k = (k / layer.k_scale).to(self.world.pool.dtype).double() * layer.k_scale
            v = (v / layer.v_scale).to(self.world.pool.dtype).double() * layer.v_scale
        return k, v


STEPS = [(DECODE, None), (VERIFY, None), (V1, (1, 3)), (V2, None)]
every_mode = pytest.mark.parametrize(("mode", "new"), STEPS, ids=[str(mode) for mode, _ in STEPS])


@every_mode
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_every_mode_and_dtype(mode: ForwardMode, new: tuple[int, ...] | None, dtype: torch.dtype) -> None:
    step = World(dtype=dtype, parents=SIBLINGS).step(mode, (5, 17), new)
    step.check(step.run())
    step.check(step.forward(1), 1)  # the same plan serves a layer with another scale

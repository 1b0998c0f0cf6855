"""The Triton backend, under the interpreter, against a float64 reference on small hand-made batches."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from in_process import check_backend

from attn_testkit.backends.triton import TritonBackend
from attn_testkit.contract import (
    AttentionLayer,
    BackendContext,
    DraftExtendInput,
    ForwardBatch,
    ForwardMode,
    KVPool,
    Unsupported,
    VerifyInput,
)
from attn_testkit.results.case_result import Status

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROUNDOFF = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-20}
DECODE, VERIFY = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY
V1, V2 = ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2
CHAIN, SIBLINGS = (-1, 0, 1, 2), (-1, 0, 0, 2)


def depth(parents: tuple[int, ...], node: int) -> int:
    return 0 if node == 0 else 1 + depth(parents, parents[node])


class Server:
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
        settings = [{"scaling": dim**-0.5, **layer}, {"scaling": 1.7 * dim**-0.5}]
        self.layers = tuple(AttentionLayer(i, *heads, dim, dim, **s) for i, s in enumerate(settings))
        self.pool = KVPool(ctx * max_bs, page, self.layers, kv_dtype or dtype, DEVICE)
        widest = max([1, *(parents.count(p) for p in range(len(parents)))])
        # Every second request has another tree, of the same size.
        self.trees = [parents, parents if widest == 1 else (*parents[:-1], 0)]
        self.max_depth = max(depth(parents, j) for j in range(len(parents)))
        self.table = torch.zeros(max_bs + 1, ctx, dtype=torch.int32, device=DEVICE)
        self.context = BackendContext(
            DEVICE, dtype, self.pool, self.table, self.layers, page, ctx, max_bs, max_bs * len(parents),
            frozenset(ForwardMode), len(parents), self.max_depth, widest + 1 if widest > 1 else 1,
        )  # fmt: skip
        self.backend = TritonBackend(self.context)

    def step(self, mode: ForwardMode, prefixes: tuple[int, ...], new: tuple[int, ...] | None = None) -> Step:
        return Step(self, mode, prefixes, new or (1 if mode is DECODE else len(self.parents),) * len(prefixes))


class Step:
    """One batch in one mode: its slots, its keys and values for every layer, and the right answer."""

    def __init__(self, server: Server, mode: ForwardMode, prefixes: tuple[int, ...], new: tuple[int, ...]) -> None:
        self.server, self.mode, self.prefixes, self.new = server, mode, prefixes, new
        self.rows = [(r, j) for r, n in enumerate(new) for j in range(n)]
        q_heads, kv_heads = server.layers[0].tp_q_head_num, server.layers[0].tp_k_head_num
        dim, lens = server.layers[0].head_dim, [p + n for p, n in zip(prefixes, new, strict=True)]
        # Keys and values are off zero, so that none goes unnoticed. q, k and v are views of one packed tensor.
        self.kv = [torch.randn(2, n, kv_heads, dim, generator=server.random).add(0.5).to(server.dtype) for n in lens]
        packed = torch.randn(len(self.rows), q_heads + 2 * kv_heads, dim, generator=server.random).to(server.dtype)
        for at, (r, j) in enumerate(self.rows):
            packed[at, q_heads:] = self.kv[r][:, prefixes[r] + j].flatten(0, 1)
        self.q, self.k, self.v = packed.to(DEVICE).split([q_heads, kv_heads, kv_heads], 1)
        self._place(lens)
        self.batch = self._batch()

    def _place(self, lens: list[int]) -> None:
        """Shuffled pages, foreign slots in every tail, NaN wherever this step may not look."""
        server, page, table, pool = self.server, self.server.page, self.server.table, self.server.pool
        pages = 1 + torch.randperm(pool.size // page, generator=server.random)
        table.copy_(torch.randint(pool.num_slots, table.shape, generator=server.random))
        table[0] = 0
        self.request_rows = 1 + torch.randperm(len(lens), generator=server.random)
        pool.pieces[0][0].view(torch.uint8).fill_(0x7F if pool.dtype.itemsize == 1 else 0xFF)
        self.slots, used = [], 0
        for r, n in enumerate(lens):
            mine = pages[used : (used := used + -(-n // page))]
            slots = (mine[:, None] * page + torch.arange(page)).flatten()[:n]
            table[self.request_rows[r], :n] = slots.to(DEVICE, torch.int32)
            self.slots.append(slots)
            for layer in server.layers:
                k, v = self.kv[r][:, : self.prefixes[r]].to(DEVICE)
                pool.set_kv_buffer(layer, slots[: self.prefixes[r]].to(DEVICE), k, v)

    def position(self, r: int, j: int) -> int:
        return self.prefixes[r] + (depth(self.server.trees[r % 2], j) if self.mode is VERIFY else j)

    def sees(self, r: int, j: int, c: int) -> bool:
        """Whether new row j of request r sees its new row c."""
        while self.mode is VERIFY and j > c:
            j = self.server.trees[r % 2][j]
        return c == j if self.mode is VERIFY else c <= j

    def _batch(self) -> ForwardBatch:
        index, bs = self.server.index, len(self.prefixes)

        def tensor(values: object, dtype: torch.dtype = index) -> torch.Tensor:
            return torch.as_tensor(values, dtype=dtype).to(DEVICE)

        prefix, new = torch.tensor(self.prefixes), torch.tensor(self.new)
        positions = tensor([self.position(r, j) for r, j in self.rows])
        batch = ForwardBatch(
            self.mode, bs, tensor([0] * len(self.rows)), tensor(self.request_rows),
            tensor(prefix if self.mode is VERIFY else prefix + new),
            tensor([int(self.slots[r][self.prefixes[r] + j]) for r, j in self.rows]), positions,
        )  # fmt: skip
        none = torch.empty(0)
        if self.mode is VERIFY:
            n, mask = self.new[0], []
            for r, p in enumerate(self.prefixes):
                mask += [[1] * p + [int(self.sees(r, j, c)) for c in range(n)] for j in range(n)]
            batch.spec_info = VerifyInput(
                batch.input_ids, tensor([cell for row in mask for cell in row], torch.bool), positions,
                none, none, none, self.server.max_depth, self.server.context.topk, n, n,
            )  # fmt: skip
        elif self.mode in (V1, V2):
            accepted = tensor(new, torch.int32)
            width = -1 if self.mode is V1 else new[0].item()
            batch.spec_info = DraftExtendInput(none, accepted - 1, accepted, positions, num_tokens_per_req=width)
            batch.extend_seq_lens, batch.extend_prefix_lens = accepted, tensor(prefix, torch.int32)
        return batch

    def run(self, layer: int = 0) -> torch.Tensor:
        """Plan and forward, eagerly."""
        self.server.backend.init_forward_metadata(self.batch)
        return self.forward(layer)

    def forward(self, layer: int = 0) -> torch.Tensor:
        return self.server.backend.forward(self.q, self.k, self.v, self.server.layers[layer], self.batch)

    def check(self, out: torch.Tensor, layer_id: int = 0) -> None:
        """Every row within the error that rounding P and the output allows."""
        layer = self.server.layers[layer_id]
        out, q = out.double().cpu(), self.q.double().cpu()
        for at, (r, j) in enumerate(self.rows):
            p = self.prefixes[r]
            k, v = (x.repeat_interleave(layer.q_per_kv, 1) for x in self.stored(r, layer))
            spots = [*range(p), *(self.position(r, c) for c in range(self.new[r]))]
            seen = [c < p or self.sees(r, j, c - p) for c in range(len(spots))]
            if layer.sliding_window_size >= 0:
                first = self.position(r, j) - layer.sliding_window_size
                seen = [s and spot >= first for s, spot in zip(seen, spots, strict=True)]
            s = torch.einsum("hd,khd->hk", q[at], k) * layer.scaling
            if layer.logit_cap:
                s = layer.logit_cap * torch.tanh(s / layer.logit_cap)
            s[:, ~torch.tensor(seen)] = -torch.inf
            if layer.sinks is not None:
                s = torch.cat([s, layer.sinks.double().cpu()[:, None]], 1)
            weight = s.softmax(1)[:, : len(spots)]
            want = torch.einsum("hk,khd->hd", weight, v)
            limit = 2 * ROUNDOFF[self.server.dtype] * (torch.einsum("hk,khd->hd", weight, v.abs()) + want.abs()) + 1e-7
            worst = ((out[at] - want).abs() / limit).max().item()
            assert worst <= 1, f"row {j} of request {r} is {worst:.1f} times over the limit"

    def stored(self, r: int, layer: AttentionLayer) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self.kv[r].double()
        if self.server.pool.dtype.itemsize == 1:
            k = (k / layer.k_scale).to(self.server.pool.dtype).double() * layer.k_scale
            v = (v / layer.v_scale).to(self.server.pool.dtype).double() * layer.v_scale
        return k, v


STEPS = [(DECODE, None), (VERIFY, None), (V1, (1, 3)), (V2, None)]
every_mode = pytest.mark.parametrize(("mode", "new"), STEPS, ids=[str(mode) for mode, _ in STEPS])
Rows = tuple[int, ...] | None


@every_mode
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_every_mode_and_dtype(mode: ForwardMode, new: Rows, dtype: torch.dtype) -> None:
    step = Server(dtype=dtype, parents=SIBLINGS).step(mode, (5, 17), new)
    step.check(step.run())
    step.check(step.forward(1), 1)  # the same plan serves a layer with another scale


@every_mode
@pytest.mark.parametrize("window", [0, 4, 200])
def test_window_counts_positions(mode: ForwardMode, new: Rows, window: int) -> None:
    step = Server(parents=SIBLINGS, sliding_window_size=window).step(mode, (5, 300), new)
    step.check(step.run())


@every_mode
def test_cap_and_sinks(mode: ForwardMode, new: Rows) -> None:
    sinks = torch.tensor([3.0, -2.0], device=DEVICE)
    step = Server(scaling=0.7, logit_cap=1.5, sinks=sinks).step(mode, (0, 300), new)
    step.check(step.run())


@every_mode
@pytest.mark.parametrize("heads", [(3, 3), (6, 2), (6, 6), (7, 1)], ids=str)
def test_head_layouts(mode: ForwardMode, new: Rows, heads: tuple[int, int]) -> None:
    step = Server(heads=heads, parents=SIBLINGS).step(mode, (16, 3), new)
    step.check(step.run())


@pytest.mark.parametrize("dim", [32, 128, 256])
def test_head_dims(dim: int) -> None:
    step = Server(dim=dim).step(V2, (9, 0))
    step.check(step.run())


@every_mode
@pytest.mark.parametrize("page", [1, 16, 128])
def test_lengths_around_a_page(mode: ForwardMode, new: Rows, page: int) -> None:
    step = Server(page=page, index=torch.int32).step(mode, (page - 1, page, page + 1), new and (2, 1, 3))
    step.check(step.run())


def test_short_rows_leave_splits_empty() -> None:
    step = Server(ctx=1024, page=16).step(DECODE, (0, 600, 255, 256))
    step.server.backend._partial.fill_(torch.nan)
    step.server.backend._lse.fill_(torch.nan)
    step.check(step.run())


@pytest.mark.parametrize("parents", [(-1, 0, 0, 1, 1, 2, 3, 3, 6), (-1,), tuple(range(-1, 63))], ids=len)
def test_trees_of_any_shape(parents: tuple[int, ...]) -> None:
    step = Server(parents=parents).step(VERIFY, (7, 30))
    step.check(step.run())


@every_mode
def test_very_negative_logits(mode: ForwardMode, new: Rows) -> None:
    server = Server(dim=32, dtype=torch.float32, scaling=-6e4 / 32)
    step = server.step(mode, (0, 40), new)
    step.q.fill_(1.0)
    step.k.fill_(1.0)  # new keys weigh in with -6e4, which is all that a row without a prefix has
    for r, prefix in enumerate(step.prefixes):
        step.kv[r][0, :prefix], step.kv[r][0, prefix:] = 2.0, 1.0
        server.pool.get_key_buffer(0)[step.slots[r][:prefix].to(DEVICE)] = 2.0
    step.check(step.run())


@every_mode
def test_fp8_pool(mode: ForwardMode, new: Rows) -> None:
    step = Server(kv_dtype=torch.float8_e4m3fn, k_scale=0.25, v_scale=0.5).step(mode, (5, 17), new)
    step.check(step.run())


@every_mode
def test_a_request_has_the_same_bits_in_any_company(mode: ForwardMode, new: Rows) -> None:
    server = Server(parents=SIBLINGS, ctx=1024)
    step = server.step(mode, (5, 600), new)
    first, again = step.run(), step.run()
    assert torch.equal(first, again)
    rows = [at for at, (r, _) in enumerate(step.rows) if r == 1]
    alone = ForwardBatch(
        mode, 1, step.batch.input_ids[rows], step.batch.req_pool_indices[1:], step.batch.seq_lens[1:],
        step.batch.out_cache_loc[rows], step.batch.positions[rows], spec_info=step.batch.spec_info,
    )  # fmt: skip
    if mode is VERIFY:
        cells = 4 * (600 + 4)
        alone.spec_info = replace(step.batch.spec_info, custom_mask=step.batch.spec_info.custom_mask[-cells:])
    elif mode is V1:
        alone.spec_info = replace(step.batch.spec_info, num_accept_tokens=step.batch.spec_info.num_accept_tokens[1:])
    server.backend.init_forward_metadata(alone)
    out = server.backend.forward(step.q[rows], step.k[rows], step.v[rows], server.layers[0], alone)
    assert torch.equal(out, first[rows])


def test_a_chain_needs_no_mask() -> None:
    step = Server(parents=CHAIN).step(VERIFY, (5, 17))
    step.batch.spec_info.custom_mask = None
    step.check(step.run())


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton was set up without its interpreter")
def test_an_eager_batch_without_a_request_is_planned() -> None:
    case = "extend-gqa2x2-d32-fp16-p16-k9.0-n3a2x2-shuffled-gauss-b2prod-empty_batches"
    [row] = [row for row in check_backend("triton", device="cpu", executions=["eager"], cases=[case]) if row.case]
    assert row.status is Status.PASSED, [finding.headline for finding in row.findings]


def test_what_is_not_declared_is_refused() -> None:
    for wrong in ({"heads": (9, 1)}, {"dim": 16}, {"page": 24, "ctx": 240}, {"dtype": torch.float64}):
        with pytest.raises(Unsupported):
            Server(**wrong)


class Graph:
    """A capture without a graph: what it reads at a replay is the tensors and the plan that it was captured with."""

    def __init__(self, server: Server, mode: ForwardMode, bs: int) -> None:
        self.server, self.mode, self.bs, max_bs = server, mode, bs, server.context.max_bs
        n = {DECODE: 1, V1: server.max_depth + 1}.get(mode, len(server.parents))
        first, self.width = server.layers[0], n

        def static(*shape: int, dtype: torch.dtype = torch.int64, fill: float = 0) -> torch.Tensor:
            return torch.full(shape, fill, dtype=dtype, device=DEVICE)

        self.qkv = [
            static(bs * n, heads, first.head_dim, dtype=server.dtype)
            for heads in (first.tp_q_head_num, first.tp_k_head_num, first.tp_k_head_num)
        ]
        self.requests, self.seq_lens = (static(max_bs, dtype=server.index, fill=fill) for fill in (0, 1))
        self.accepted = static(max_bs, dtype=torch.int32, fill=n)
        self.slots, self.positions = static(bs * n), static(bs * n)
        spec = None
        if mode is VERIFY:
            mask = server.backend.verify_mask
            assert mask is not None
            spec = VerifyInput(
                self.slots, mask.buffer, self.positions, self.slots, self.slots, self.slots, 0, 0, n, -1, mask.mode
            )
        elif mode is not DECODE:
            spec = DraftExtendInput(self.slots, self.accepted - 1, self.accepted[:bs], self.positions)
        self.batch = ForwardBatch(
            mode, bs, self.slots, self.requests[:bs], self.seq_lens[:bs], self.slots, self.positions, spec_info=spec
        )
        server.backend.init_forward_metadata_out_graph(self.batch, in_capture=True)
        self.run()
        self.plan = server.backend._plan

    def run(self) -> torch.Tensor:
        self.server.backend.init_forward_metadata_in_graph(self.batch)
        return self.server.backend.forward(*self.qkv, self.server.layers[0], self.batch)

    def replay(self, step: Step, own_mask: bool = True, poison: float = torch.nan) -> torch.Tensor:
        live, tokens, backend = len(step.prefixes), len(step.rows), self.server.backend
        self.seq_lens.fill_(1)
        self.accepted.fill_(self.width)
        for static in (self.requests, self.slots, self.positions):
            static.zero_()
        for static, fresh in zip(self.qkv, (step.q, step.k, step.v), strict=True):
            static.fill_(poison)
            static[:tokens] = fresh
        self.requests[:live], self.seq_lens[:live] = step.batch.req_pool_indices, step.batch.seq_lens
        self.slots[:tokens], self.positions[:tokens] = step.batch.out_cache_loc, step.batch.positions
        spec = step.batch.spec_info
        if isinstance(spec, DraftExtendInput):
            self.accepted[:live] = spec.num_accept_tokens
            spec = replace(spec, num_accept_tokens=self.accepted[: self.bs])
        elif isinstance(spec, VerifyInput) and own_mask:
            mask, n = backend.verify_mask, range(self.width)
            cells = torch.tensor([step.sees(r, j, c) for r in range(live) for j in n for c in n])
            mask.buffer.fill_(1)
            mask.buffer[: len(cells)] = cells.to(DEVICE)
            spec = replace(spec, custom_mask=mask.buffer, tree_mask_mode=mask.mode)
        view = SimpleNamespace(
            batch_size=self.bs, forward_mode=self.mode, req_pool_indices=self.requests, seq_lens=self.seq_lens,
            seq_lens_cpu=None, seq_lens_sum=None, input_ids=step.batch.input_ids,
            out_cache_loc=step.batch.out_cache_loc, num_padding=self.bs - live, spec_info=spec,
        )  # fmt: skip
        backend.init_forward_metadata_out_graph(view)
        backend._plan = self.plan
        return self.run()


@every_mode
def test_replays_follow_their_batch(mode: ForwardMode, new: Rows) -> None:
    server = Server(parents=SIBLINGS, index=torch.int32)
    server.backend.init_cuda_graph_state(4, 16)
    large, small = Graph(server, mode, 4), Graph(server, mode, 2)
    plan = [(large, (300, 5, 17)), (small, (16, 0)), (large, (3, 290, 8, 1)), (small, (40,)), (large, (0,))]
    for turn, (graph, prefixes) in enumerate(plan):
        rows = new and (2, 3, 1, 3)[: len(prefixes)]
        step = server.step(mode, prefixes, rows)
        step.check(graph.replay(step, own_mask=turn % 2 == 0))
        eager = server.step(mode, (11, 2, 70), new and (3, 1, 2))
        eager.check(eager.run())


def test_a_padded_row_without_keys_is_zero() -> None:
    server = Server()
    server.backend.init_cuda_graph_state(4, 16)
    out = Graph(server, V2, 2).replay(server.step(V2, (6,)), poison=1.0)
    assert torch.equal(out[4:7], torch.zeros_like(out[4:7]))


def test_replay_without_a_mask_forgets_the_last_one() -> None:
    server = Server()
    server.backend.init_cuda_graph_state(4, 16)
    graph = Graph(server, VERIFY, 2)
    server.backend.verify_mask.buffer.fill_(1)
    step = server.step(VERIFY, (6, 20))
    step.batch.spec_info.custom_mask = None
    step.check(graph.replay(step, own_mask=False))

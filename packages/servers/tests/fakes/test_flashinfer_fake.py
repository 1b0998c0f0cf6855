"""The fakes of FlashInfer's wrappers refuse and remember what the wrappers do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

pytest.importorskip("flashinfer", reason="the flashinfer extra is not installed")

from flashinfer.mla import MLAPlanMetadata

from attn_testkit.backends.vendor import fake_of
from attn_testkit.backends.vendor.flashinfer_kernels import (
    BATCH_DECODE,
    BATCH_MLA_FA2,
    BATCH_MLA_FA3,
    BATCH_PREFILL,
    BATCH_RAGGED,
)
from cuda_on_cpu import CaptureError, EmulationError, emulated_cuda

CUDA = torch.device("cuda", 0)
HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 4
LENS = (6, 4, 9)


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with emulated_cuda():
        yield


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Batch:
    """Three requests of 6, 4 and 9 keys on pages of 4, and what attention over them gives."""

    def __init__(self, rows: tuple[int, ...] = (1, 1, 1)) -> None:
        draw = torch.Generator().manual_seed(1)
        self.rows = rows
        self.qo_indptr = ints(0, *torch.tensor(rows).cumsum(0).tolist())
        self.kv_indptr, self.last = ints(0, 2, 3, 6), ints(2, 4, 1)
        self.pages = [5, 1, 7, 2, 6, 3]
        self.q = torch.randn(sum(rows), HEADS, DIM, generator=draw).half()
        self.k, self.v = (torch.randn(8, PAGE, KV_HEADS, DIM, generator=draw).half() for _ in range(2))
        self.on_device = [x.to(CUDA) for x in (self.q, self.k, self.v)]
        self.indices = ints(*self.pages).to(CUDA)

    def expected(self, scale: float, visible: Any = None) -> torch.Tensor:
        """Float64 attention, [T, Hq, D]; ``visible`` (request, row, key) -> bool, causal by default."""
        out, start = [], 0
        for r, (rows, length) in enumerate(zip(self.rows, LENS, strict=True)):
            ids = self.pages[self.kv_indptr[r] : self.kv_indptr[r + 1]]
            keys, values = (x[ids].flatten(0, 1)[:length].double().repeat_interleave(2, 1) for x in (self.k, self.v))
            logits = torch.einsum("thd,shd->hts", self.q[start : start + rows].double(), keys) * scale
            seen = torch.tensor(
                [[visible(r, t, s) if visible else s <= length - rows + t for s in range(length)] for t in range(rows)]
            )
            out.append(torch.einsum("hts,shd->thd", logits.masked_fill(~seen, -torch.inf).softmax(-1), values))
            start += rows
        return torch.cat(out)

    def layout(self) -> dict[str, Any]:
        return {"num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "page_size": PAGE}


def workspace() -> torch.Tensor:
    return torch.empty(1 << 20, dtype=torch.uint8, device=CUDA)


def prefill(batch: Batch, wrapper: Any = None, **plan: Any) -> Any:
    wrapper = wrapper or fake_of(BATCH_PREFILL)(workspace(), backend="fa2")
    wrapper.plan(
        batch.qo_indptr, batch.kv_indptr, batch.indices, batch.last, head_dim_qk=DIM, **batch.layout(),
        **{"sm_scale": 0.3, "causal": True, **plan},
    )  # fmt: skip
    return wrapper


def close(out: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool(((out.cpu().double() - expected).abs() < 2e-3).all())


@pytest.mark.parametrize("tensor_cores", [False, True])
def test_decode_attends_every_key_of_a_request(tensor_cores: bool) -> None:
    batch = Batch()
    wrapper = fake_of(BATCH_DECODE)(workspace(), use_tensor_cores=tensor_cores, backend="fa2")
    wrapper.plan(batch.kv_indptr, batch.indices, batch.last, head_dim=DIM, sm_scale=0.3, **batch.layout())
    q, k, v = batch.on_device
    out, lse = wrapper.run(q, (k, v), return_lse=True)
    assert close(out, batch.expected(0.3))
    assert lse.shape == (3, HEADS)
    assert bool(lse.isfinite().all())


def test_prefill_is_causal_to_the_end_and_a_window_is_inclusive() -> None:
    batch = Batch((2, 1, 3))
    q, k, v = batch.on_device
    assert close(prefill(batch).run(q, (k, v)), batch.expected(0.3))

    def windowed(r: int, t: int, s: int) -> bool:
        at = LENS[r] - batch.rows[r] + t
        return at - 2 <= s <= at

    assert close(prefill(batch, window_left=2).run(q, (k, v)), batch.expected(0.3, windowed))


def test_offsets_of_a_part_of_a_batch_need_not_begin_at_zero() -> None:
    """A server that decodes some requests and prefills the others plans these by their part of all offsets."""
    batch = Batch((1, 2, 3))
    q, k, v = batch.on_device
    wrapper = fake_of(BATCH_PREFILL)(workspace(), backend="fa2")
    wrapper.plan(
        ints(0, 2, 5), batch.kv_indptr[1:], batch.indices, batch.last[1:], head_dim_qk=DIM, sm_scale=0.3, causal=True,
        **batch.layout(),
    )  # fmt: skip
    assert close(wrapper.run(q[1:], (k, v)), batch.expected(0.3)[1:])


class Ragged(Batch):
    """The same requests with their keys one behind the other, and not in pages."""

    def __init__(self, rows: tuple[int, ...]) -> None:
        super().__init__(rows)
        self.kv_indptr_of_keys = ints(0, *torch.tensor(LENS).cumsum(0).tolist())
        at = [self.pages[page] * PAGE + slot for page, slot in self.places()]
        self.ragged = [x.flatten(0, 1)[at].to(CUDA) for x in (self.k, self.v)]

    def places(self) -> list[tuple[int, int]]:
        starts = self.kv_indptr.tolist()
        return [(starts[r] + key // PAGE, key % PAGE) for r, length in enumerate(LENS) for key in range(length)]

    def run(self, layout: str = "NHD", method: str = "plan", **plan: Any) -> tuple[torch.Tensor, torch.Tensor]:
        wrapper = fake_of(BATCH_RAGGED)(workspace(), layout)
        getattr(wrapper, method)(
            self.qo_indptr.to(CUDA), self.kv_indptr_of_keys.to(CUDA), HEADS, KV_HEADS, DIM, sm_scale=0.3,
            **{"causal": True, **plan},
        )  # fmt: skip
        out, lse = wrapper.run(self.on_device[0], *self.ragged, return_lse=True)
        return out, lse


@pytest.mark.parametrize("method", ["plan", "begin_forward"])
def test_a_ragged_prefill_attends_the_keys_of_each_request_alone(method: str) -> None:
    batch = Ragged((2, 1, 3))
    out, lse = batch.run(method=method)
    assert close(out, batch.expected(0.3))
    _, of_pages = prefill(batch).run(batch.on_device[0], tuple(batch.on_device[1:]), return_lse=True)
    assert torch.allclose(lse.cpu(), of_pages.cpu(), rtol=0, atol=1e-5)  # sums of float32 in another order


def test_a_ragged_prefill_that_is_not_causal_sees_all_keys_of_its_request() -> None:
    batch = Ragged((2, 1, 3))
    assert close(batch.run(causal=False)[0], batch.expected(0.3, lambda r, t, s: True))


def test_a_ragged_prefill_with_heads_first_has_no_fake() -> None:
    with pytest.raises(NotImplementedError, match="supports layout NHD, not HND"):
        Ragged((2, 1, 3)).run("HND")


@pytest.mark.parametrize("entry", [BATCH_DECODE, BATCH_PREFILL, BATCH_RAGGED], ids=["decode", "prefill", "ragged"])
def test_the_older_name_of_a_plan_is_the_fakes_too(entry: Any) -> None:
    fake = fake_of(entry)
    assert fake.begin_forward is fake.plan
    assert fake.plan is not fake.__bases__[0].plan


def test_an_mla_plan_may_choose_its_kernels() -> None:
    """As servers let it: on a device like the emulated one, those of SM90."""
    wrapper = fake_of(BATCH_MLA_FA2)(workspace(), backend="auto")
    lens = ints(6)
    wrapper.plan(
        metadata=MLAPlanMetadata.csr(ints(0, 1), ints(0, 2), ints(0, 1), lens), num_heads=HEADS, head_dim_ckv=512,
        head_dim_kpe=64, page_size=PAGE, causal=False, sm_scale=0.3, q_data_type=torch.half, kv_data_type=torch.half,
    )  # fmt: skip
    q, cache = torch.randn(1, HEADS, 576).half().to(CUDA), torch.randn(2, PAGE, 576).half().to(CUDA)
    assert bool(wrapper.run(query=q, kv_cache=cache).isfinite().all())


def test_a_custom_mask_is_flat_by_request_and_stays_in_force_in_graph_mode() -> None:
    batch = Batch((2, 1, 3))
    q, k, v = batch.on_device
    bits = torch.rand(2 * 6 + 4 + 3 * 9, generator=torch.Generator().manual_seed(3)) < 0.6
    bits[[0, 6, 12, 16, 25, 34]] = True
    start = (0, 12, 16)

    def visible(r: int, t: int, s: int) -> bool:
        return bool(bits[start[r] + t * LENS[r] + s])

    wrapper = fake_of(BATCH_PREFILL)(
        workspace(), use_cuda_graph=True, backend="fa2", qo_indptr_buf=ints(0, 0, 0, 0).to(CUDA),
        paged_kv_indptr_buf=ints(0, 0, 0, 0).to(CUDA), paged_kv_indices_buf=ints(*[0] * 20).to(CUDA),
        paged_kv_last_page_len_buf=ints(1, 1, 1).to(CUDA), mask_indptr_buf=ints(0, 0, 0, 0).to(CUDA),
        custom_mask_buf=torch.zeros(64, dtype=torch.uint8, device=CUDA),
    )  # fmt: skip
    with_mask = prefill(batch, wrapper, custom_mask=bits.to(CUDA), causal=False).run(q, (k, v))
    assert close(with_mask, batch.expected(0.3, visible))
    assert torch.equal(prefill(batch, wrapper).run(q, (k, v)).cpu(), with_mask.cpu()), "mode follows the buffer"


def test_what_was_compiled_out_at_the_plan_is_ignored_by_the_older_call() -> None:
    batch = Batch()
    q, k, v = batch.on_device
    wrapper = prefill(batch)
    plain = wrapper.run(q, (k, v))
    assert torch.equal(wrapper.forward(q, (k, v), causal=True, sm_scale=0.3, logits_soft_cap=0.5).cpu(), plain.cpu())


def test_rows_past_the_packed_end_are_not_written() -> None:
    batch = Batch((2, 1, 2))
    wrapper = fake_of(BATCH_PREFILL)(
        workspace(), use_cuda_graph=True, backend="fa2", qo_indptr_buf=ints(0, 0, 0, 0).to(CUDA),
        paged_kv_indptr_buf=ints(0, 0, 0, 0).to(CUDA), paged_kv_indices_buf=ints(*[0] * 20).to(CUDA),
        paged_kv_last_page_len_buf=ints(1, 1, 1).to(CUDA),
    )  # fmt: skip
    q, k, v = batch.on_device
    out = torch.full_like(q, 7.0)
    prefill(batch, wrapper)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(q, (k, v), out=out)
    batch.rows, batch.qo_indptr = (1, 1, 1), ints(0, 1, 2, 3)
    prefill(batch, wrapper)
    out.fill_(7.0)
    graph.replay()
    assert bool((out[3:].cpu() == 7).all())
    assert close(out[:3], batch.expected(0.3))


def test_refusals_are_the_packages_own() -> None:
    batch = Batch()
    q, k, v = batch.on_device
    wrapper = prefill(batch)
    with pytest.raises(ValueError, match="does not match the q_data_type"):
        wrapper.run(q.bfloat16(), (k, v))
    with pytest.raises(ValueError, match=r"does not match qo_indptr\[-1\]"):
        wrapper.run(q[:2], (k, v))
    with pytest.raises(TypeError, match="logits_soft_cap"):
        wrapper.run(q, (k, v), logits_soft_cap=1.0)
    with pytest.raises(AssertionError):
        wrapper.run(q, (k, v), window_left=3)
    decode = fake_of(BATCH_DECODE)(workspace(), use_tensor_cores=True, backend="fa2")
    with pytest.raises(ValueError, match="requires kv_len >= q_len_per_req"):
        decode.plan(ints(0, 1), batch.indices, ints(1), 4, 2, DIM, PAGE, q_len_per_req=2)
    with pytest.raises(ValueError, match="paged_kv_indptr_buffer should be"):
        fake_of(BATCH_DECODE)(workspace(), use_cuda_graph=True)


def test_a_prefill_reads_all_integers_as_those_of_the_offsets_of_pages_and_refuses_none() -> None:
    batch = Batch()
    q, k, v = batch.on_device
    right = batch.expected(0.3)
    batch.indices = batch.indices.long()
    assert not close(prefill(batch).run(q, (k, v)), right), "every second page id is the upper half of the first"
    batch.qo_indptr, batch.kv_indptr, batch.last = (x.long() for x in (batch.qo_indptr, batch.kv_indptr, batch.last))
    assert close(prefill(batch).run(q, (k, v)), right), "a module is compiled for the dtype of the offsets"


def test_mla_counts_in_pages_of_the_plan_and_refuses_no_other_cache() -> None:
    wrapper = fake_of(BATCH_MLA_FA2)(workspace(), backend="fa2")
    mla_plan(wrapper)
    draw = torch.Generator().manual_seed(2)
    query, cache = (torch.randn(*shape, 576, generator=draw).bfloat16().to(CUDA) for shape in ((3, 16), (8, PAGE)))
    right = wrapper.run(query=query, kv_cache=cache)
    other = wrapper.run(query=query, kv_cache=cache.view(-1, PAGE // 2, 576))
    assert other.shape == right.shape
    assert not torch.equal(other.cpu(), right.cpu())


@pytest.mark.parametrize("tensor_cores", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_plans_of_a_wrapper_share_one_pinned_buffer_that_the_device_reads_later(
    tensor_cores: bool, waits: bool
) -> None:
    """vLLM #40756: the next step is planned before the device has copied this step's plan."""
    buffers = [torch.zeros(n, dtype=torch.int32, device=CUDA) for n in (2, 4, 1)]
    wrapper = fake_of(BATCH_DECODE)(workspace(), "NHD", True, tensor_cores, *buffers)
    with nullcontext() if waits else pytest.raises(EmulationError, match="pinned"):
        for pages in (1, 3):
            if waits:
                torch.cuda.synchronize()
            # Pinned and new for each plan, so these do not wait for the device.
            indptr, last_page_len = ints(0, pages).pin_memory(), ints(1).pin_memory()
            page_ids = torch.ones(pages, dtype=torch.int32, device=CUDA)
            wrapper.plan(indptr, page_ids, last_page_len, HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.half)
        torch.cuda.synchronize()


def test_a_plan_under_capture_is_refused() -> None:
    batch = Batch()
    wrapper = prefill(batch)
    batch.kv_indptr = batch.kv_indptr.to(CUDA)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(CaptureError), torch.cuda.graph(graph):
        prefill(batch, wrapper)


def mla_plan(wrapper: Any, lens: tuple[int, ...] = LENS, **changes: Any) -> None:
    batch = Batch()
    settings = {
        "num_heads": 16, "head_dim_ckv": 512, "head_dim_kpe": 64, "page_size": PAGE, "causal": True, "sm_scale": 0.1,
        "q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16, **changes,
    }  # fmt: skip
    metadata = MLAPlanMetadata.csr(batch.qo_indptr, batch.kv_indptr, batch.indices, ints(*lens))
    wrapper.plan(metadata=metadata, **settings)


@pytest.mark.parametrize(("entry", "family"), [(BATCH_MLA_FA2, "fa2"), (BATCH_MLA_FA3, "fa3")])
def test_mla_refusals_are_the_packages_own(entry: Any, family: str) -> None:
    wrapper = fake_of(entry)(workspace(), backend=family)
    query, cache = (torch.zeros(*shape, 576, dtype=torch.bfloat16, device=CUDA) for shape in ((3, 16), (8, PAGE)))
    with pytest.raises(RuntimeError, match="called before plan"):
        wrapper.run(query=query, kv_cache=cache)
    with pytest.raises(ValueError, match="must equal ceil"):
        mla_plan(wrapper, lens=(9, 4, 9))
    with pytest.raises(ValueError, match="multiple of 128"):
        mla_plan(wrapper, head_dim_ckv=64)
    mla_plan(wrapper)
    assert wrapper.run(query=query, kv_cache=cache).shape == (3, 16, 512)
    with pytest.raises(ValueError, match=r"torch\.float16"):
        wrapper.run(query=query.half(), kv_cache=cache)

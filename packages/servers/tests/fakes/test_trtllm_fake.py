"""The fakes of TensorRT-LLM kernels, called directly: what they compute, misread and refuse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("flashinfer", reason="the flashinfer extra is not installed")

from attn_testkit.backends.trtllm_mha import _packed_causal_mask
from attn_testkit.backends.vendor import fake_of
from attn_testkit.backends.vendor.trtllm_kernels import CONTEXT, DECODE_GEN, DECODE_MLA, DECODE_XQA, SEMAPHORE_BYTES
from cuda_on_cpu import emulated_cuda

PAGE, HEADS, KV_HEADS, DIM = 16, 4, 2, 64
LENS = (5, 16, 41)
N = 3


@pytest.fixture(autouse=True)
def cuda() -> Iterator[None]:
    with emulated_cuda(), torch.no_grad():
        yield


def inputs(n: int, seed: int = 0) -> dict[str, Any]:
    """Three requests in shuffled pages; every unowned slot is NaN, every table tail a page that is not there."""
    made = torch.Generator().manual_seed(seed)
    pages = -(-max(LENS) // PAGE)
    order = (torch.randperm(len(LENS) * pages, generator=made) + 1).view(len(LENS), pages)
    caches = [torch.full((len(LENS) * pages + 1, KV_HEADS, PAGE, DIM), torch.nan) for _ in "kv"]
    table = torch.full((len(LENS), pages), 10**6, dtype=torch.int32)
    for i, length in enumerate(LENS):
        for at in range(length):
            page = int(order[i, at // PAGE])
            table[i, at // PAGE] = page
            for cache in caches:
                cache[page, :, at % PAGE] = torch.randn(KV_HEADS, DIM, generator=made)
    return {
        "query": torch.randn(len(LENS) * n, HEADS, DIM, generator=made).bfloat16().cuda(),
        "kv_cache": tuple(cache.bfloat16().cuda() for cache in caches),
        "workspace_buffer": torch.zeros(SEMAPHORE_BYTES + (1 << 20), dtype=torch.uint8, device="cuda"),
        "block_tables": table.cuda(),
        "seq_lens": torch.tensor(LENS, dtype=torch.int32).cuda(),
        "bmm1_scale": 0.2,
        "bmm2_scale": 0.5,
    }


def loop(given: dict[str, Any], n: int, window: int = -1, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Row by row, head by head, in float64."""
    q, table = given["query"].cpu().double(), given["block_tables"].cpu()
    keys, values = (cache.cpu().double() for cache in given["kv_cache"])
    out = torch.zeros_like(q)
    for row in range(len(q)):
        i, j = divmod(row, n)
        last = LENS[i] - n + j
        seen = range(max(0, last - window) if window >= 0 else 0, last + 1)
        for head in range(HEADS):
            kv = head * KV_HEADS // HEADS
            k = torch.stack([keys[table[i, c // PAGE], kv, c % PAGE] for c in seen])
            v = torch.stack([values[table[i, c // PAGE], kv, c % PAGE] for c in seen])
            logits = k @ q[row, head] * given["bmm1_scale"]
            if sinks is not None:
                logits = torch.cat([logits, sinks.cpu().double()[head : head + 1]])
            out[row, head] = torch.softmax(logits, 0)[: len(v)] @ v * given["bmm2_scale"]
    return out


def decode(entry: Any, given: dict[str, Any], n: int, **changes: Any) -> torch.Tensor:
    mask = _packed_causal_mask(len(LENS), n, torch.device("cuda"))[: len(LENS)] if n > 1 else None
    arguments = {**given, "max_seq_len": max(LENS), "q_len_per_req": n, "mask": mask, **changes}
    return fake_of(entry)(**arguments).cpu().double()


@pytest.mark.parametrize("entry", [DECODE_XQA, DECODE_GEN], ids=["xqa", "trtllm-gen"])
@pytest.mark.parametrize(("n", "window", "sink"), [(1, -1, False), (1, 4, True), (N, -1, True), (N, 3, False)])
def test_decode_is_attention_over_the_pages_that_lengths_reach(entry: Any, n: int, window: int, sink: bool) -> None:
    given = inputs(n)
    sinks = torch.linspace(-1, 2, HEADS).cuda() if sink else None
    got = decode(entry, given, n, window_left=window, sinks=sinks)
    assert (got - loop(given, n, window, sinks)).abs().max() < 0.01


def test_context_takes_packed_rows_and_leaves_unowned_rows_alone() -> None:
    given = inputs(1)
    counts = (2, 1, 3)
    q = torch.randn(8, HEADS, DIM).bfloat16().cuda()
    out = torch.full_like(q, 7.0)
    ends = [0, 2, 3, 6]
    fake_of(CONTEXT)(
        **{**given, "query": q}, max_q_len=4, max_kv_len=64, batch_size=3, out=out,
        cum_seq_lens_q=torch.tensor(ends, dtype=torch.int32).cuda(),
        cum_seq_lens_kv=torch.tensor([0, *torch.tensor(LENS).cumsum(0)], dtype=torch.int32).cuda(),
    )  # fmt: skip
    for i, count in enumerate(counts):
        whole = {**given, "query": torch.zeros(3 * count, HEADS, DIM).cuda()}
        whole["query"][i * count : (i + 1) * count] = q[ends[i] : ends[i + 1]]
        want = loop(whole, count)[i * count : (i + 1) * count]
        assert (out[ends[i] : ends[i + 1]].cpu().double() - want).abs().max() < 0.01
    assert (out[6:] == 7).all()


def test_keys_behind_the_longest_length_that_trtllm_gen_was_reported_are_not_seen() -> None:
    given = inputs(1)
    short = {**given, "seq_lens": given["seq_lens"].clamp(max=20)}
    assert torch.equal(decode(DECODE_GEN, given, 1, max_seq_len=20), decode(DECODE_GEN, short, 1))


def test_xqa_takes_the_longest_length_from_the_table() -> None:
    given = inputs(1)
    assert torch.equal(decode(DECODE_XQA, given, 1, max_seq_len=1), decode(DECODE_XQA, given, 1))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"mask": None}, AssertionError, "Mask is required"),
        ({"return_lse": True}, NotImplementedError, "return_lse"),
        ({"max_q_len": 4}, ValueError, "cum_seq_lens_q"),
        ({"window": 4}, TypeError, "unexpected keyword argument 'window'"),
    ],
)
def test_the_package_refuses_what_xqa_cannot_do(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        decode(DECODE_XQA, inputs(N), N, **changes)


@pytest.mark.parametrize(("entry", "size"), [(DECODE_XQA, 48), (DECODE_GEN, 48)])
def test_a_page_size_without_a_kernel_is_refused(entry: Any, size: int) -> None:
    given = inputs(1)
    given["kv_cache"] = tuple(torch.zeros(4, KV_HEADS, size, DIM, device="cuda").bfloat16() for _ in "kv")
    with pytest.raises((ValueError, RuntimeError), match=r"48|Missing TRTLLM-GEN kernel"):
        decode(entry, given, 1)


def test_dirty_semaphores_are_not_a_result() -> None:
    given = inputs(1)
    given["workspace_buffer"][4] = 1
    assert decode(DECODE_XQA, given, 1).isnan().all()


def test_int64_lengths_are_misread_not_converted() -> None:
    given = inputs(1)
    wrong = {**given, "seq_lens": given["seq_lens"].long()}
    assert not torch.equal(decode(DECODE_XQA, wrong, 1), decode(DECODE_XQA, given, 1))


def mla(given: dict[str, Any], **changes: Any) -> torch.Tensor:
    out: torch.Tensor = fake_of(DECODE_MLA)(**{**given, **changes})
    return out


def mla_inputs() -> dict[str, Any]:
    return {
        "query": torch.randn(2, 3, 16, 576).bfloat16().cuda(),
        "kv_cache": torch.randn(5, 1, 32, 576).bfloat16().cuda(),
        "workspace_buffer": torch.zeros(1 << 20, dtype=torch.int8, device="cuda"),
        "qk_nope_head_dim": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "block_tables": torch.tensor([[3, 1, -1, -1], [2, -1, -1, -1]], dtype=torch.int32).cuda(),
        "seq_lens": torch.tensor([37, 20], dtype=torch.int32).cuda(),
        "max_seq_len": 128,
        "bmm1_scale": 0.05,
        "backend": "trtllm-gen",
    }


def test_mla_decode_is_latent_attention_aligned_to_the_end() -> None:
    given = mla_inputs()
    got, cache = mla(given).cpu().double(), given["kv_cache"].cpu().double()
    for i, pages in enumerate(((3, 1), (2,))):
        rows = torch.cat([cache[page, 0] for page in pages])
        for j in range(3):
            keys = rows[: int(given["seq_lens"][i]) - 2 + j]
            p = torch.softmax(given["query"][i, j].cpu().double() @ keys.T * 0.05, -1)
            assert (got[i, j] - p @ keys[:, :512]).abs().max() < 0.02


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "auto", "block_tables": torch.zeros(2, 3, dtype=torch.int32)}, "block_num % "),
        ({"kv_cache": torch.zeros(5, 1, 16, 576).bfloat16()}, "block_size in"),
        ({"backend": "xqa"}, "SM120a"),
        ({"kv_lora_rank": 384}, "Unsupported MLA dimensions"),
    ],
)
def test_mla_decode_refuses_what_the_package_refuses(changes: dict[str, Any], message: str) -> None:
    moved = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in changes.items()}
    with pytest.raises(ValueError, match=message):
        mla(mla_inputs(), **moved)


def sparse_inputs() -> dict[str, Any]:
    """Two requests of three rows, four indices a row. The last row of each sees more keys than its top-k."""
    indices = torch.tensor(
        [[[40, 3, -1, -1], [7, 100, 9, -1], [159, 64, 33, 32]], [[5, 6, 8, 10**6], [11, 90, 12, 13], [0, 96, 2, 1]]],
        dtype=torch.int32,
    )
    lens = torch.tensor([4, 30], dtype=torch.int32)
    return {**mla_inputs(), "block_tables": indices.cuda(), "seq_lens": lens.cuda(), "sparse_mla_top_k": 4}


def test_sparse_mla_reads_slots_as_many_as_a_row_sees_and_top_k_at_most() -> None:
    given = sparse_inputs()
    got, slots = mla(given).cpu().double(), given["kv_cache"].cpu().double().flatten(0, 2)
    for i, j, read in [(0, 0, 2), (0, 1, 3), (0, 2, 4), (1, 1, 4), (1, 2, 4)]:
        keys = slots[given["block_tables"][i, j, :read].cpu().long()]
        p = torch.softmax(given["query"][i, j].cpu().double() @ keys.T * 0.05, -1)
        assert (got[i, j] - p @ keys[:, :512]).abs().max() < 0.02
    assert got[1, 0].isnan().all(), "a slot that is not there"


def test_sparse_mla_reads_minus_one_among_the_keys_that_a_length_reaches() -> None:
    out = mla(sparse_inputs(), seq_lens=torch.tensor([5, 30], dtype=torch.int32).cuda())
    assert out.isnan().all(-1).all(-1).tolist() == [[True, True, False], [True, False, False]]


@pytest.mark.parametrize(
    ("topk", "width", "error", "message"),
    [(6, 6, RuntimeError, "multiple of 4"), (8, 4, ValueError, "Expected page_table.shape")],
)
def test_sparse_mla_refuses_a_top_k(topk: int, width: int, error: type[Exception], message: str) -> None:
    indices = torch.zeros(2, 3, width, dtype=torch.int32).cuda()
    with pytest.raises(error, match=message):
        mla(sparse_inputs(), sparse_mla_top_k=topk, block_tables=indices)


def test_a_page_that_is_not_there_gives_nan_where_a_length_reaches_it() -> None:
    given = mla_inputs()
    assert not mla(given).isnan().any()
    out = mla(given, seq_lens=torch.tensor([37, 40], dtype=torch.int32).cuda())
    assert not out[0].isnan().any()
    assert out[1].isnan().all()

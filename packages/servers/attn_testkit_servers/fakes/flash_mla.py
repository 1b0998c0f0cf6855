"""FlashMLA's compiled entry points of SM90 in torch, as vLLM's ``flash_mla_interface`` calls them.

``_flashmla_C`` has dense decode for 16-bit pools and sparse attention for rows in bf16; ``_flashmla_extension_C`` has
dense decode for FP8 pools. Fixed shapes and device work only: lengths, block tables and the schedule are read when a
graph is replayed.

The kernels keep a schedule between calls: which blocks of keys each part of the GPU computes, and how many parts share
a request. A schedule that was made for other lengths leaves keys out. The fake leaves them out, too: it counts the
blocks of each request. In the kernel, a request that is not the last one of a part sees all keys of the replay; in the
fake it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from . import page_tables as paged
from .refusals import Check, Refusals, but, operators_of, refuse, strided, to

SM_COUNT = 132
"""Streaming multiprocessors of an H100 and of an H200."""
BLOCK = 64
"""Keys of a block of the schedule, slots of a page and rows of a tile."""
RANK, WIDTH, WIDTH_OF_PART = 512, 576, 8
"""Width of a value and of a key; numbers of one part in a schedule."""
_HALVES = (torch.bfloat16, torch.float16)


def _parts(rows: int, kv_heads: int) -> int:
    """Parts of the GPU that share one tile of query rows."""
    return max(SM_COUNT // kv_heads // -(-rows // kv_heads // BLOCK), 1)


def _schedule(lens: torch.Tensor, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[parts, 8] and [requests + 1] int32. The second counts splits of the requests; here a split has one block."""
    blocks = torch.div(lens + BLOCK - 1, BLOCK, rounding_mode="floor").clamp(min=1)
    splits = torch.nn.functional.pad(blocks.cumsum(0), (1, 0)).int()
    made = torch.full((parts, WIDTH_OF_PART), lens.shape[0], dtype=torch.int32, device=lens.device)
    made[0] = 0
    return made, splits


def _planned(seen: torch.Tensor, schedule: torch.Tensor, splits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of ``seen`` [bs, n, S] that are in a schedule, and True if a part of the schedule begins with a request."""
    keys = (splits[1:] - splits[:-1]) * BLOCK
    at = torch.arange(seen.shape[-1], device=seen.device)
    begins = schedule[0, 0]
    return seen & (at < keys[:, None, None]), (begins >= 0) & (begins < seen.shape[0])


def _attend(
    q: torch.Tensor, cache: torch.Tensor, lens: torch.Tensor, table: torch.Tensor, scale: float | torch.Tensor,
    is_causal: bool, schedule: torch.Tensor, splits: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Outputs [bs, n, H, 512] and log-sum-exps [bs, H, n], both in float32; a row that sees nothing has 0 and +inf.

    Rows that no part of the schedule computes are NaN.
    """
    bs, n = q.shape[:2]
    keys = paged.gather(cache, table, lens)
    starts = torch.arange(bs, device=q.device) * n
    queries = paged.Queries(q, torch.full_like(keys.lens, n), starts)
    at = torch.arange(keys.rows.shape[1], device=q.device)
    seen = paged.visible_causal(queries, keys) if is_causal and n > 1 else at < keys.lens[:, None, None]
    seen, computed = _planned(seen.expand(bs, n, -1), schedule, splits)
    logits = torch.einsum("bnhd,bskd->bnhs", q.float(), keys.rows) * scale
    sums = logits.masked_fill(~seen[:, :, None], -torch.inf).logsumexp(-1)
    values = keys.rows[..., :RANK]
    # Its FP8 kernel rounds probabilities as they are: ``scale_apply_exp2`` in csrc/kernels_fp8/softmax.h has no factor.
    out = paged.attend(q, keys.rows, values, seen, scale, probabilities=q.dtype, factor=1.0)
    empty = ~seen.any(-1)[..., None]
    out = torch.where(computed, out.masked_fill(empty[..., None], 0.0), torch.nan)
    return out, sums.masked_fill(empty, torch.inf).transpose(1, 2)


def dense_decode_fwd(
    q: torch.Tensor, kcache: torch.Tensor, head_size_v: int, seqlens_k: torch.Tensor, block_table: torch.Tensor,
    softmax_scale: float, is_causal: bool, tile_scheduler_metadata: torch.Tensor | None,
    num_splits: torch.Tensor | None, out_: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attend with rows ``q`` [requests, rows, H, 576] to latent pages ``kcache`` [pages, 64, 1, 576].

    Returns outputs [requests, rows, H, 512], log-sum-exps [requests, H, rows], and the schedule: the given one or a
    new one. Raises ``RuntimeError`` for arguments that the compiled code refuses.
    """
    schedule, splits = tile_scheduler_metadata, num_splits
    refuse(
        DENSE, q=q, kcache=kcache, head_size_v=head_size_v, seqlens_k=seqlens_k, block_table=block_table,
        tile_scheduler_metadata=schedule, num_splits=splits, out_=out_,
    )  # fmt: skip
    if schedule is None or splits is None:
        schedule, splits = _schedule(seqlens_k, _parts(q.shape[1] * q.shape[2], kcache.shape[2]))
    found, sums = _attend(q, kcache, seqlens_k, block_table, softmax_scale, is_causal, schedule, splits)
    return found.to(q.dtype), sums, schedule, splits


def get_mla_decoding_metadata_dense_fp8(
    seqlens_k: torch.Tensor, num_heads_per_head_k: int, num_heads_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the schedule of ``fwd_kvcache_mla_fp8``. Raises ``RuntimeError`` for arguments that are refused."""
    refuse(METADATA_FP8, seqlens_k=seqlens_k)
    return _schedule(seqlens_k, SM_COUNT // num_heads_k // -(-num_heads_per_head_k // BLOCK))


def fwd_kvcache_mla_fp8(
    q: torch.Tensor, kcache: torch.Tensor, head_size_v: int, seqlens_k: torch.Tensor, block_table: torch.Tensor,
    softmax_scale: float, is_causal: bool, tile_scheduler_metadata: torch.Tensor, num_splits: torch.Tensor,
    descale_q: torch.Tensor | None, descale_k: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """``dense_decode_fwd`` over e4m3 queries and keys with one scale each; outputs in bf16."""
    refuse(
        DENSE_FP8, q=q, kcache=kcache, head_size_v=head_size_v, seqlens_k=seqlens_k, block_table=block_table,
        tile_scheduler_metadata=tile_scheduler_metadata, num_splits=num_splits, descale_q=descale_q,
        descale_k=descale_k,
    )  # fmt: skip
    assert descale_q is not None
    assert descale_k is not None
    found, sums = _attend(
        q, kcache, seqlens_k, block_table, softmax_scale * descale_q * descale_k, is_causal, tile_scheduler_metadata,
        num_splits,
    )  # fmt: skip
    return (found * descale_k).bfloat16(), sums


def sparse_prefill_fwd(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sm_scale: float, d_v: int,
    attn_sink: torch.Tensor | None, topk_length: torch.Tensor | None, out_: torch.Tensor | None,
) -> list[torch.Tensor]:  # fmt: skip
    """Attend with rows ``q`` [T, H, 576] to rows of ``kv`` [slots, 1, 576] that ``indices`` [T, 1, top-k] name.

    An index outside ``kv`` is not a key; ``topk_length`` [T] says how many indices of a row are read. Returns outputs
    [T, H, 512], the largest logits and log-sum-exps, both [T, H]. Raises ``RuntimeError`` for refused arguments.
    """
    refuse(
        SPARSE, q=q, kv=kv, indices=indices, d_v=d_v, attn_sink=attn_sink, topk_length=topk_length, out_=out_,
    )  # fmt: skip
    named = indices[:, 0].long()
    seen = (named >= 0) & (named < kv.shape[0])
    if topk_length is not None:
        seen = seen & (torch.arange(named.shape[1], device=q.device) < topk_length[:, None])
    rows = kv[torch.where(seen, named, 0), 0].float().masked_fill(~seen[..., None], 0.0)
    logits = torch.einsum("thd,tsd->ths", q.float(), rows) * sm_scale
    logits = logits.masked_fill(~seen[:, None], -torch.inf)
    top, sums = logits.amax(-1), logits.logsumexp(-1)
    weights = torch.exp(logits - torch.where(top.isinf(), 0.0, top)[..., None])
    total = weights.sum(-1, keepdim=True)
    found = torch.einsum("ths,tsd->thd", weights.to(q.dtype).float(), rows[..., :RANK])
    found = found / torch.where(total == 0, 1.0, total)
    if attn_sink is not None:
        found = found * torch.sigmoid(sums - attn_sink)[..., None]
    empty = ~seen.any(-1, keepdim=True)
    sums = sums.masked_fill(empty, torch.inf)
    out = found.to(q.dtype)
    if out_ is not None:
        out_.copy_(out)
        out = out_
    return [out, top, sums]


_DENSE_CPP = "csrc/api/dense_decode.cpp:dense_attn_decode_interface"
_SPARSE_CPP = "csrc/api/sparse_prefill.cpp:sparse_attn_prefill_interface"
_SPARSE_SM90 = "csrc/cuda_kernels/legacy/sm90/prefill/sparse/phase1.cuh:run"
_FP8_CPP = "csrc/extension/sm90/dense_fp8/pybind.cpp:fwd_kvcache_mla_fp8"
_FP8_METADATA_CPP = "csrc/extension/sm90/dense_fp8/pybind.cpp:get_mla_decoding_metadata_dense_fp8"
"""Files of vLLM's FlashMLA. The texts were compared with those in the modules of vLLM 0.33.0's wheel."""


def _contiguous(*tensors: torch.Tensor | None) -> bool:
    return all(x is None or x.is_contiguous() for x in tensors)


def _heads_times_3(a: Mapping[str, Any]) -> dict[str, Any]:
    return {"kcache": a["kcache"].expand(-1, -1, 3, -1)}


def _of_decode(source: str, heads: str) -> tuple[Check, ...]:
    """Checks that dense decode makes for both kinds of pools; ``heads``: text about a width of keys."""
    return (
        Check("lengths of int64", but(seqlens_k=torch.Tensor.long), lambda a: a.seqlens_k.dtype == torch.int32,
              "seqlens_k must have dtype int32", source),
        Check("a block table of int64", but(block_table=torch.Tensor.long),
              lambda a: a.block_table.dtype == torch.int32, "block_table must have dtype torch.int32", source),
        Check("queries with a stride", but("q"), lambda a: a.q.stride(-1) == 1,
              "q must have contiguous last dimension", source),
        Check("keys with a stride", but("kcache"), lambda a: a.kcache.stride(-1) == 1,
              "kcache must have contiguous last dimension", source),
        Check("lengths with a stride", but("seqlens_k"), lambda a: a.seqlens_k.is_contiguous(),
              "seqlens_k must be contiguous", source),
        Check("a block table with a stride", but("block_table"), lambda a: a.block_table.stride(-1) == 1,
              "block_table must have contiguous last dimension", source),
        Check("a schedule with a stride", but("tile_scheduler_metadata"),
              lambda a: _contiguous(a.tile_scheduler_metadata), "tile_scheduler_metadata must be contiguous", source),
        Check("numbers of splits with a stride", but("num_splits"), lambda a: _contiguous(a.num_splits),
              "num_splits must be contiguous", source),
        Check("queries of width 448", but(q=lambda q: q[..., :448]),
              lambda a: a.q.shape[-1] == WIDTH or (a.q.shape[-1] == RANK and "512" in heads), heads, source),
        Check("values of width 256", to(head_size_v=256), lambda a: a.head_size_v == RANK,
              "Only head_size_v ==", source),
        Check("pages of 32 slots", but(kcache=lambda k: k[:, :32]), lambda a: a.kcache.shape[1] == BLOCK,
              "Currently page_block_size must be 64", source),
        Check("no request", but(q=lambda q: q[:0]), lambda a: a.q.shape[0] > 0,
              "batch size must be positive", source),
        Check("3 heads of keys", _heads_times_3, lambda a: a.q.shape[2] % a.kcache.shape[2] == 0,
              "Number of heads in key/value must divide number of heads in query", source),
    )  # fmt: skip


def _shapes_of_decode(source: str) -> tuple[Check, ...]:
    return (
        Check("narrower keys", but(kcache=lambda k: k[..., :RANK]), lambda a: a.kcache.shape[-1] == a.q.shape[-1],
              "kcache must have shape (num_blocks, page_block_size, num_heads_k, head_size_k)", source),
        Check("lengths of fewer requests", but(seqlens_k=lambda x: x[:1]), lambda a: a.seqlens_k.shape == a.q.shape[:1],
              "seqlens_k must have shape (batch_size)", source),
        Check("a block table of fewer requests", but(block_table=lambda x: x[:1]),
              lambda a: a.block_table.shape[0] == a.q.shape[0],
              "block_table must have shape (batch_size, max_num_blocks_per_seq)", source),
    )  # fmt: skip


def _fits(a: Any) -> bool:
    if a.tile_scheduler_metadata is None:
        return True
    parts = _parts(a.q.shape[1] * a.q.shape[2], a.kcache.shape[2])
    return bool(a.tile_scheduler_metadata.shape == (parts, WIDTH_OF_PART))


DENSE: tuple[Check, ...] = (
    Check("float32 queries", but(q=torch.Tensor.float), lambda a: a.q.dtype in _HALVES, "", _DENSE_CPP),
    Check("keys of another dtype", but(kcache=torch.Tensor.half), lambda a: a.kcache.dtype == a.q.dtype,
          "query and key must have the same dtype", _DENSE_CPP),
    *_of_decode(_DENSE_CPP, "Only head_size_k == 576 or 512 is supported"),
    *_shapes_of_decode(_DENSE_CPP),
    Check("a schedule of fewer parts", but(tile_scheduler_metadata=lambda x: x[:-1]), _fits,
          "tile_scheduler_metadata must have shape (num_sm_parts, DecodingSchedMetaSize/sizeof(int))", _DENSE_CPP),
    Check("numbers of splits of fewer requests", but(num_splits=lambda x: x[:-1]),
          lambda a: a.num_splits is None or a.num_splits.shape == (a.q.shape[0] + 1,),
          "num_splits must have shape (batch_size+1)", _DENSE_CPP),
    Check("outputs of another dtype", lambda a: {"out_": torch.empty(2, 1, 32, RANK, device=a["q"].device)},
          lambda a: a.out_ is None or a.out_.dtype == a.q.dtype, "out must have the same dtype as q", _DENSE_CPP),
    Check("outputs [requests, rows, H, 512]", lambda a: {"out_": a["q"][..., :RANK].contiguous()},
          lambda a: a.out_ is None or a.out_.shape == (a.q.shape[0], 1, a.q.shape[1] * a.q.shape[2], RANK),
          "out must have shape (batch_size, num_heads, q_seq_per_hk, head_size_v)", _DENSE_CPP),
    Check("a schedule of int64", but(tile_scheduler_metadata=torch.Tensor.long),
          lambda a: a.tile_scheduler_metadata is None or a.tile_scheduler_metadata.dtype == torch.int32,
          "tile_scheduler_metadata must have dtype ScalarType::Int", _DENSE_CPP),
    Check("numbers of splits of int64", but(num_splits=torch.Tensor.long),
          lambda a: a.num_splits is None or a.num_splits.dtype == torch.int32,
          "num_splits must have dtype ScalarType::Int", _DENSE_CPP),
)  # fmt: skip
"""Checks of ``dense_decode_fwd`` in their order."""

DENSE_FP8: tuple[Check, ...] = (
    Check("queries in bf16", but(q=torch.Tensor.bfloat16), lambda a: a.q.dtype == paged.FP8, "", _FP8_CPP),
    Check("keys in bf16", but(kcache=torch.Tensor.bfloat16), lambda a: a.kcache.dtype == a.q.dtype,
          "query and key must have the same dtype", _FP8_CPP),
    Check("a schedule of int64", but(tile_scheduler_metadata=torch.Tensor.long),
          lambda a: a.tile_scheduler_metadata.dtype == torch.int32,
          "tile_scheduler_metadata must have dtype int32", _FP8_CPP),
    Check("numbers of splits of int64", but(num_splits=torch.Tensor.long),
          lambda a: a.num_splits.dtype == torch.int32, "num_splits must have dtype int32", _FP8_CPP),
    *_of_decode(_FP8_CPP, "Only head_size_k == 576 is supported"),
    Check("no scales", to(descale_q=None, descale_k=None),
          lambda a: a.descale_q is not None and a.descale_k is not None,
          "descale is required when input dtype is fp8", _FP8_CPP),
    Check("scales in float64", but(descale_q=torch.Tensor.double, descale_k=torch.Tensor.double),
          lambda a: a.descale_q.dtype == a.descale_k.dtype == torch.float32, "", _FP8_CPP),
    Check("a scale per request", but(descale_q=lambda x: x.repeat(2)), lambda a: a.descale_q.shape == (1,),
          "descale_q_ must have shape (1)", _FP8_CPP),
    Check("a scale of keys per request", but(descale_k=lambda x: x.repeat(2)), lambda a: a.descale_k.shape == (1,),
          "descale_k_ must have shape (1)", _FP8_CPP),
    *_shapes_of_decode(_FP8_CPP),
    Check("a schedule of narrower parts", but(tile_scheduler_metadata=lambda x: x[:, :4].contiguous()),
          lambda a: a.tile_scheduler_metadata.shape[1] == WIDTH_OF_PART, "", _FP8_CPP),
    Check("numbers of splits of fewer requests", but(num_splits=lambda x: x[:-1]),
          lambda a: a.num_splits.shape == (a.q.shape[0] + 1,), "num_splits must have shape (batch_size+1)", _FP8_CPP),
)  # fmt: skip
"""Checks of ``fwd_kvcache_mla_fp8``. The function accepts a schedule of any number of parts."""

METADATA_FP8: tuple[Check, ...] = (
    Check("lengths with a stride", but("seqlens_k"), lambda a: a.seqlens_k.is_contiguous(), "", _FP8_METADATA_CPP),
    Check("lengths of int64", but(seqlens_k=torch.Tensor.long), lambda a: a.seqlens_k.dtype == torch.int32, "",
          _FP8_METADATA_CPP),
)  # fmt: skip

_HEADS_SPARSE = (8, 16, 32, 64, 128)
_TOPK_STEP = 2 * BLOCK


def _typed(name: str, dtype: torch.dtype, word: str, other: torch.dtype) -> Check:
    """The check of one dtype; None passes."""
    return Check(
        f"{name} in {str(other).removeprefix('torch.')}", lambda a: {name: a[name].to(other)},
        lambda a: getattr(a, name) is None or getattr(a, name).dtype == dtype,
        f"{name} must have dtype ScalarType::{word}", _SPARSE_CPP,
    )  # fmt: skip


def _sized(name: str, shape: str, change: Callable[[torch.Tensor], Any], holds: Callable[[Any], bool]) -> Check:
    text = f"{name} must have shape {shape}"
    return Check(f"{name} of another shape", but(**{name: change}), holds, text, _SPARSE_CPP)


def _last(name: str) -> Check:
    return Check(
        f"{name} with a stride", but(name), lambda a: getattr(a, name) is None or getattr(a, name).stride(-1) == 1,
        f"{name} must have contiguous last dimension", _SPARSE_CPP,
    )  # fmt: skip


def _dimensions(name: str, count: int) -> Check:
    return Check(
        f"{name} with one dimension more", but(**{name: lambda x: x[None]}),
        lambda a: getattr(a, name) is None or getattr(a, name).dim() == count,
        f"{name} must have {count} dimensions", _SPARSE_CPP,
    )  # fmt: skip


SPARSE: tuple[Check, ...] = (
    *(_dimensions(name, count) for name, count in
      (("q", 3), ("kv", 3), ("indices", 3), ("attn_sink", 1), ("topk_length", 1))),
    Check("rows of width 448", but(q=lambda q: q[..., :448]), lambda a: a.q.shape[2] in (WIDTH, RANK),
          "Invalid d_qk: ", _SPARSE_CPP),
    Check("values of width 256", to(d_v=256), lambda a: a.d_v == RANK, "Invalid d_v", _SPARSE_CPP),
    _typed("q", torch.bfloat16, "BFloat16", torch.float16), _typed("kv", torch.bfloat16, "BFloat16", torch.float16),
    _typed("indices", torch.int32, "Int", torch.int64), _typed("attn_sink", torch.float32, "Float", torch.bfloat16),
    _typed("topk_length", torch.int32, "Int", torch.int64),
    _sized("kv", "(s_kv, h_kv, d_qk)", lambda x: x[..., :RANK], lambda a: a.kv.shape[2] == a.q.shape[2]),
    _sized("indices", "(s_q, h_kv, topk)", lambda x: x[:1],
           lambda a: a.indices.shape[:2] == (a.q.shape[0], a.kv.shape[1])),
    _sized("attn_sink", "(h_q)", lambda x: x[:8], lambda a: a.attn_sink is None or len(a.attn_sink) == a.q.shape[1]),
    _sized("topk_length", "(s_q)", lambda x: x[:1],
           lambda a: a.topk_length is None or len(a.topk_length) == a.q.shape[0]),
    *map(_last, ("q", "kv", "indices", "attn_sink", "topk_length")),
    Check("two heads of keys", but(kv=lambda x: x.expand(-1, 2, -1), indices=lambda x: x.repeat(1, 2, 1)),
          lambda a: a.kv.shape[1] == 1, "Sparse prefill requires h_kv == 1, got ", _SPARSE_CPP),
    Check("outputs in float32", lambda a: {"out_": torch.empty(*a["q"].shape[:2], RANK, device=a["q"].device)},
          lambda a: a.out_ is None or a.out_.dtype == torch.bfloat16,
          "out must have dtype ScalarType::BFloat16", _SPARSE_CPP),
    Check("outputs of fewer rows", lambda a: {"out_": a["q"][:1, :, :RANK].contiguous()},
          lambda a: a.out_ is None or a.out_.shape == (*a.q.shape[:2], RANK),
          "out must have shape (s_q, h_q, d_v)", _SPARSE_CPP),
    Check("outputs with a stride", lambda a: {"out_": strided(a["q"][..., :RANK])},
          lambda a: a.out_ is None or a.out_.stride(-1) == 1, "out must have contiguous last dimension", _SPARSE_CPP),
    Check("48 heads", but(q=lambda q: q[:, :48].contiguous(), attn_sink=lambda x: x[:48].contiguous()),
          lambda a: a.q.shape[1] in _HEADS_SPARSE, "Unsupported h_q: ", _SPARSE_CPP),
    Check("64 indices", but(indices=lambda x: x[..., :64].contiguous()),
          lambda a: a.indices.shape[2] % _TOPK_STEP == 0, "params.topk % (2*B_TOPK) == 0", _SPARSE_SM90),
)  # fmt: skip
"""Checks of ``sparse_prefill_fwd``. With 8, 16 and 32 heads another kernel runs, whose step of indices is not known."""


def _latent(device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Two requests of two rows and 16 heads, with 70 and 130 keys in pages that are shuffled."""
    generator = torch.Generator().manual_seed(1)
    q, kcache = (torch.randn(*shape, WIDTH, generator=generator) for shape in ((2, 2, 16), (6, BLOCK, 1)))
    return {
        "q": q.to(dtype).to(device), "kcache": kcache.to(dtype).to(device),
        "seqlens_k": torch.tensor([70, 130], dtype=torch.int32, device=device),
        "block_table": torch.tensor([[3, 1, 0], [5, 2, 4]], dtype=torch.int32, device=device),
    }  # fmt: skip


def _dense_arguments(device: torch.device, implementation: Any) -> dict[str, Any]:
    made = _latent(device, torch.bfloat16)
    first = (made["q"], made["kcache"], RANK, made["seqlens_k"], made["block_table"], 0.05, True)
    *_, schedule, splits = implementation.dense_decode_fwd(*first, None, None, None)
    names = ("q", "kcache", "head_size_v", "seqlens_k", "block_table", "softmax_scale", "is_causal")
    return dict(zip(names, first, strict=True)) | {
        "tile_scheduler_metadata": schedule, "num_splits": splits, "out_": None
    }  # fmt: skip


def _fp8_arguments(device: torch.device, implementation: Any) -> dict[str, Any]:
    made = _latent(device, paged.FP8)
    schedule, splits = implementation.get_mla_decoding_metadata_dense_fp8(made["seqlens_k"], 32, 1)
    return {
        "q": made["q"], "kcache": made["kcache"], "head_size_v": RANK, "seqlens_k": made["seqlens_k"],
        "block_table": made["block_table"], "softmax_scale": 0.05, "is_causal": True,
        "tile_scheduler_metadata": schedule, "num_splits": splits,
        "descale_q": torch.ones(1, device=device), "descale_k": torch.full((1,), 0.5, device=device),
    }  # fmt: skip


def _metadata_arguments(device: torch.device, _: Any) -> dict[str, Any]:
    lens = torch.tensor([70, 130], dtype=torch.int32, device=device)
    return {"seqlens_k": lens, "num_heads_per_head_k": 32, "num_heads_k": 1}


def _sparse_arguments(device: torch.device, _: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    q, kv = (torch.randn(*shape, WIDTH, generator=generator).bfloat16() for shape in ((3, 64), (200, 1)))
    indices = torch.stack([torch.randperm(200, generator=generator)[:128] for _ in range(3)]).int()
    indices[:, 100] = -1
    return {
        "q": q.to(device), "kv": kv.to(device), "indices": indices[:, None].to(device), "sm_scale": 0.05, "d_v": RANK,
        "attn_sink": torch.linspace(-1, 1, 64, device=device),
        "topk_length": torch.tensor([128, 120, 64], dtype=torch.int32, device=device), "out_": None,
    }  # fmt: skip


FUNCTIONS = SimpleNamespace(dense_decode_fwd=dense_decode_fwd, sparse_prefill_fwd=sparse_prefill_fwd)
"""Functions of ``torch.ops._flashmla_C``."""
EXTENSION = SimpleNamespace(
    get_mla_decoding_metadata_dense_fp8=get_mla_decoding_metadata_dense_fp8, fwd_kvcache_mla_fp8=fwd_kvcache_mla_fp8
)
"""Functions of ``torch.ops._flashmla_extension_C``."""


def _of_vllm(module: str) -> Callable[[], Any]:
    return lambda: operators_of("vllm", module)


REFUSALS = (
    Refusals("FlashMLA, dense_decode_fwd", "dense_decode_fwd", FUNCTIONS, _of_vllm("_flashmla_C"), _dense_arguments,
             DENSE, output=lambda returned: returned[0]),
    Refusals("FlashMLA, fwd_kvcache_mla_fp8", "fwd_kvcache_mla_fp8", EXTENSION, _of_vllm("_flashmla_extension_C"),
             _fp8_arguments, DENSE_FP8, output=lambda returned: returned[0]),
    Refusals("FlashMLA, get_mla_decoding_metadata_dense_fp8", "get_mla_decoding_metadata_dense_fp8", EXTENSION,
             _of_vllm("_flashmla_extension_C"), _metadata_arguments, METADATA_FP8),
    Refusals("FlashMLA, sparse_prefill_fwd", "sparse_prefill_fwd", FUNCTIONS, _of_vllm("_flashmla_C"),
             _sparse_arguments, SPARSE, output=lambda returned: returned[0]),
)  # fmt: skip
"""Entry points and their refusals."""

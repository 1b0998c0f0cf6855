"""Snippets: the host reads device values, waits, or decides something from them."""

# mypy: disable-error-code="func-returns-value,call-overload,no-any-return,no-untyped-call"

from __future__ import annotations

import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .inputs import DEVICE, Inputs
from .snippet import Snippet, named


def _loop(e: Inputs) -> Tensor:
    out = e.x * 0
    for step in range(int(e.i)):
        out = out + step
    return out


def _event_sync(e: Inputs) -> Tensor:
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    return e.x + 1


def _event_query_unrecorded(e: Inputs) -> Tensor:
    return e.x + float(torch.cuda.Event().query())


def _event_query(e: Inputs) -> Tensor:
    event = torch.cuda.Event()
    event.record()
    return e.x + float(event.query())


def _first(value: object, e: Inputs) -> Tensor:
    return e.x + 1


SNIPPETS: tuple[Snippet, ...] = named(
    {
        ".item()": lambda e: e.x * e.x.sum().item(),
        ".tolist()": lambda e: e.x[: sum(e.len.tolist()) - 6],
        "bool(t)": lambda e: e.x + 1 if (e.x[0] > 1) else e.x - 1,
        "int(t) loop": _loop,
        "x[:tensor]": lambda e: e.x[: e.i],
        "x[tensor0d]": lambda e: e.x[e.i],
        "range index": lambda e: e.x + list(range(9))[e.i],
        "max(iter)": lambda e: e.x + max(e.len),
        "torch.arange(t)": lambda e: torch.arange(e.i, device=DEVICE),
        "nonzero": lambda e: e.mask.nonzero(),
        "where(1)": lambda e: torch.where(e.mask)[0],
        "masked_select": lambda e: e.x.masked_select(e.mask),
        "unique": lambda e: torch.unique(e.len),
        "bincount": lambda e: torch.bincount(e.len),
        "equal": lambda e: e.x + torch.equal(e.x, e.x),
        "allclose": lambda e: e.x + torch.allclose(e.x, e.x),
        "histc": lambda e: torch.histc(e.x, 4, 0, 8),
        "histc auto": lambda e: torch.histc(e.x, 4),
        "repeat_interleave": lambda e: torch.repeat_interleave(e.x[:4], e.len),
        "repeat_interleave(size)": lambda e: torch.repeat_interleave(e.x[:4], e.len, output_size=8),
        "one_hot": lambda e: F.one_hot(e.idx),
        "one_hot(n)": lambda e: F.one_hot(e.idx, 8),
        ".numpy()": lambda e: e.x + e.x.numpy().sum(),
        "np.asarray": lambda e: e.x + np.asarray(e.x).sum(),
        "host only": lambda e: e.x + int(e.h_len.max()),
        "host tensor math": lambda e: e.x * float((e.h_x * 2).cumsum(0)[-1]),
        "py int baked": lambda e: e.x[: e.py] + 0,
        "py scalar baked": lambda e: e.x * e.py,
        "print": lambda e: _first(repr(e.x), e),
        "cuda.synchronize": lambda e: _first(torch.cuda.synchronize(), e),
        "event.sync": _event_sync,
        "_assert_async": lambda e: _first(torch._assert_async((e.x > -1).all()), e),
        "linalg.inv": lambda e: torch.linalg.inv(e.m[:4, :4]),
        "data_ptr": lambda e: e.x + (e.x.data_ptr() == 0),
        "is_capturing": lambda e: e.x + float(torch.cuda.is_current_stream_capturing()) * 0,
        "deepcopy": lambda e: copy.deepcopy(e.x) + 1,
        "isnan any if": lambda e: e.x if torch.isnan(e.x).any() else e.x + 1,
        "nonzero_static": lambda e: torch.nonzero_static(e.mask, size=3),
        "tensor_split(host t)": lambda e: torch.tensor_split(e.x, torch.tensor([3]))[0] + 1,
        "count_nonzero": lambda e: torch.count_nonzero(e.mask),
        # the second batch of idioms
        "float(t)": lambda e: e.x * float(e.scalar),
        "x in python max": lambda e: e.x[: max(1, int(e.len.max()))] + 0,
        "len().max().item() arange": lambda e: torch.arange(int(e.len.max().item()), device=DEVICE),
        "assert t.all()": lambda e: _first(bool((e.x >= 0).all()), e),
        "torch.any if not": lambda e: e.x if not torch.any(e.mask) else e.x * 2,
        "f-string 0d": lambda e: _first(f"{e.i}", e),
        "str(t)": lambda e: _first(str(e.x), e),
        "tensor == python in list": lambda e: _first(3 in [e.i], e),
        "t in tensor": lambda e: _first(3 in e.len, e),
        "for row in t": lambda e: sum(row.sum() for row in e.m) + e.x,
        "sum(list of 0d)": lambda e: e.x + sum(e.len),
        "zip(tolist)": lambda e: e.x + sum(a for a, _ in zip(e.len.tolist(), e.h_len.tolist(), strict=True)),
        "full(size, dev0d)": lambda e: torch.full((8,), e.i, device=DEVICE) + e.x,
        "full(size, dev0d.item)": lambda e: torch.full((8,), e.scalar.item(), device=DEVICE) + e.x,
        "linspace(dev)": lambda e: torch.linspace(e.scalar, e.scalar + 1, 4, device=DEVICE),
        "index_fill_(dev0d)": lambda e: e.x.clone().index_fill_(0, e.idx, e.scalar),
        "masked_fill(m,cuda0d)": lambda e: e.x.masked_fill(e.mask, e.scalar),
        "masked_fill_(m,cuda0d)": lambda e: e.x.clone().masked_fill_(e.mask, e.scalar),
        "fill_(dev0d)": lambda e: e.x.clone().fill_(e.scalar),
        "clamp(max=dev0d)": lambda e: e.x.clamp(max=e.scalar),
        "clamp(max=dev1d)": lambda e: e.len.clamp(max=e.seq),
        "add(alpha=dev0d)": lambda e: torch.add(e.x, e.x, alpha=e.scalar),
        "x**dev0d": lambda e: (e.x + 1) ** e.scalar,
        "isin small": lambda e: torch.isin(e.len, e.idx),
        "isin large": lambda e: torch.isin(e.len, torch.arange(64, device=DEVICE)),
        "unique_consecutive": lambda e: torch.unique_consecutive(e.len),
        "argwhere": lambda e: torch.argwhere(e.mask),
        "combinations": lambda e: torch.combinations(e.x[:4], 2),
        "narrow(t)": lambda e: e.x.narrow(0, e.idx[3], 2),
        "split(tolist)": lambda e: torch.split(e.x, e.len.tolist())[1] + 1,
        "tensor_split(dev t)": lambda e: torch.tensor_split(e.x, e.idx[1:2])[0] + 1,
        "searchsorted sorter": lambda e: torch.searchsorted(e.len, e.idx, sorter=e.len.argsort()),
        "normal(std tensor)": lambda e: torch.normal(e.x, e.x + 1) * 0,
        "normal_()": lambda e: torch.empty(8, device=DEVICE).normal_() * 0,
        "linalg.solve": lambda e: torch.linalg.solve(e.m[:4, :4], e.m[:, 4:]),
        "linalg.cholesky": lambda e: torch.linalg.cholesky(e.m @ e.m.T + torch.eye(4, device=DEVICE)),
        "linalg.cholesky_ex": lambda e: torch.linalg.cholesky_ex(e.m @ e.m.T + torch.eye(4, device=DEVICE))[0],
        "linalg.solve_triangular": lambda e: torch.linalg.solve_triangular(e.m[:4, :4].tril() + 3, e.m, upper=False),
        "linalg.qr": lambda e: torch.linalg.qr(e.m)[1].abs(),
        "linalg.det": lambda e: torch.linalg.det(e.m[:4, :4]),
        "linalg.svdvals": lambda e: torch.linalg.svdvals(e.m),
        "linalg.norm": lambda e: torch.linalg.norm(e.m),
        "matrix_exp": lambda e: torch.linalg.matrix_exp(e.m[:4, :4]),
        "segment_reduce": lambda e: torch.segment_reduce(e.x, "sum", lengths=e.len),
        "segment_reduce unsafe": lambda e: torch.segment_reduce(e.x, "sum", lengths=e.len, unsafe=True),
        "to_sparse": lambda e: e.mask.float().to_sparse().to_dense(),
        "stream.sync": lambda e: _first(torch.cuda.current_stream().synchronize(), e),
        "stream.query": lambda e: _first(torch.cuda.current_stream().query(), e),
        "event.query unrecorded": _event_query_unrecorded,
        "event.query": _event_query,
        "empty_cache": lambda e: _first(torch.cuda.empty_cache(), e),
        "memory_allocated": lambda e: _first(torch.cuda.memory_allocated(), e),
        "mem_get_info": lambda e: _first(torch.cuda.mem_get_info(), e),
        "get_device_properties": lambda e: _first(torch.cuda.get_device_properties(0), e),
        "logging shape": lambda e: _first(f"{e.x.shape} {e.x.dtype} {e.x.device}", e),
        "torch.tensor([dev0d])": lambda e: e.x[:2] + torch.tensor([e.i, e.i], device=DEVICE),
        "torch.tensor(dev)": lambda e: e.x + e.x.clone().detach(),
        "stack([dev0d])": lambda e: torch.stack([e.i, e.i + 1]),
        "as_tensor(dev)": lambda e: torch.as_tensor(e.x, device=DEVICE) + 1,
        "histogram": lambda e: torch.histogram(e.x, 4)[0],
        "bucketize": lambda e: torch.bucketize(e.x, e.len.cumsum(0)),
        "embedding_bag": lambda e: F.embedding_bag(e.idx, e.m[:, :4].T.repeat(2, 1).contiguous(), e.idx[:1] * 0),
        "cross_entropy": lambda e: F.cross_entropy(e.m, e.idx % 8),
        "multi-arg where dims": lambda e: torch.where(e.m > 0)[0],
        "manual_seed": lambda e: _first(torch.cuda.manual_seed(7), e),
        "get_rng_state": lambda e: _first(torch.cuda.get_rng_state(), e),
    }
)

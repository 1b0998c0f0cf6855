"""Snippets: further idioms, similar to those from which the rules were made; they show whether the rules are
general."""

# mypy: disable-error-code="index,assignment,call-overload,no-untyped-call,func-returns-value,arg-type,operator"
# mypy: disable-error-code="no-any-return,dict-item,return-value,attr-defined"

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .inputs import DEVICE, Inputs
from .snippet import Snippet, named


def _after(change: object, result: Tensor) -> Tensor:
    """Return the result; `change` was evaluated before, for its side effect."""
    return result


def _set(target: Tensor, index: object, value: object) -> Tensor:
    target[index] = value
    return target


def _x(e: Inputs, index: object, value: object) -> Tensor:
    return _set(e.x.clone(), index, value)


def _m(e: Inputs, index: object, value: object) -> Tensor:
    return _set(e.m.clone(), index, value)


def _augmented(e: Inputs, index: object, value: object) -> Tensor:
    y = e.x.clone()
    y[index] += value
    return y


def _while_any(e: Inputs) -> Tensor:
    y = e.x.clone()
    while (y > 5).any():
        y = y - 1
    return y


def _while_fixed(e: Inputs) -> Tensor:
    y = e.x.clone()
    for _ in range(4):
        y = torch.where(y > 5, y - 1, y)
    return y


def _fork_of_a_fork(e: Inputs) -> Tensor:
    main, a, b = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
    a.wait_stream(main)
    with torch.cuda.stream(a):
        y = e.x * 2
        b.wait_stream(a)
        with torch.cuda.stream(b):
            z = y * 3
        a.wait_stream(b)
    main.wait_stream(a)
    return z + 1


def _event_recorded_before(e: Inputs) -> Tensor:
    """The event belongs to work before the capture began on this stream."""
    event = e.__dict__.setdefault("event", torch.cuda.Event())
    if not torch.cuda.is_current_stream_capturing():
        event.record()
    else:
        torch.cuda.current_stream().wait_event(event)
    return e.x + 1


def _wait_for_itself(e: Inputs) -> Tensor:
    stream = torch.cuda.current_stream()
    stream.wait_stream(stream)
    return e.x + 1


def _default_stream_waits(e: Inputs) -> Tensor:
    main, other = torch.cuda.current_stream(), torch.cuda.default_stream()
    other.wait_stream(main)
    main.wait_stream(other)
    return e.x + 1


def _view_as_bytes(e: Inputs) -> Tensor:
    e.workspace[:32].copy_(e.x.view(torch.uint8))
    return e.workspace[:32].view(torch.float32) + 1


def _autocast(e: Inputs) -> Tensor:
    with torch.autocast("cuda", enabled=False):
        return F.linear(e.m, e.m)


def _module(e: Inputs) -> Tensor:
    layer = e.__dict__.setdefault("layer", torch.nn.Linear(8, 2, device=DEVICE))
    return layer(e.m)


def _module_made_here(e: Inputs) -> Tensor:
    return torch.nn.LayerNorm(8, device=DEVICE)(e.m)


def _rope_cache(e: Inputs) -> Tensor:
    cache = torch.outer(torch.arange(9, device=DEVICE).float(), torch.tensor(0.1) * torch.arange(4, device=DEVICE))
    return cache[e.seq.long()].cos()


SNIPPETS: tuple[Snippet, ...] = named(
    {
        # Python decides
        "while any": _while_any,
        "while fixed": _while_fixed,
        "if shape": lambda e: e.x + 1 if e.x.shape[0] > 4 else e.x,
        "if dtype": lambda e: e.x + 1 if e.x.dtype == torch.float32 else e.x,
        "if t is None": lambda e: e.x if e.mask is None else e.x * 2,
        "t or default": lambda e: (e.i or 1) + e.x,
        "not t": lambda e: e.x + float(not e.mask[0]),
        "x if all == list": lambda e: e.x * float(e.len.tolist() == [1, 3, 2, 2]),
        "sorted(t)": lambda e: torch.stack(sorted(e.len)),
        "sum(t)": lambda e: sum(e.x) + e.x,
        "min(t, py)": lambda e: min(e.i, 4) + e.x,
        "enumerate(unbind)": lambda e: sum(i * row for i, row in enumerate(e.m.unbind())),
        "dict[item]": lambda e: e.x * {3: 1.0, 5: 2.0}[int(e.i)],
        "math on item": lambda e: e.x * (e.scalar.item() ** 2),
        "complex(t)": lambda e: e.x * complex(e.scalar).real,
        "t.__index__": lambda e: e.x.narrow(0, e.idx[3].__index__() % 4, 2) + 0,
        "round(t)": lambda e: round(e.scalar) + e.x,
        "abs(t)": lambda e: abs(e.x - 3),
        "divmod": lambda e: divmod(e.len, 2)[1],
        "is_nonzero": lambda e: e.x + float(torch.is_nonzero(e.i)),
        "t.is_same_size": lambda e: e.x + float(e.x.is_same_size(e.buf)),
        "torch.is_floating_point": lambda e: e.x + float(torch.is_floating_point(e.x)),
        "numel/stride/storage_offset": lambda e: e.x + e.m[1:].storage_offset() + e.m.stride(0) + e.m.numel(),
        "element_size/nbytes": lambda e: e.x + e.x.element_size() + e.x.nbytes,
        "is_contiguous": lambda e: e.m.t().contiguous() if not e.m.t().is_contiguous() else e.m,
        "hash(t)": lambda e: _after(hash(e.x), e.x + 1),
        "t is t": lambda e: e.x + float(e.x is e.x),
        # sizes from tensors
        "zeros(t)": lambda e: torch.zeros(e.i, device=DEVICE),
        "new_zeros(t)": lambda e: e.x.new_zeros(e.i),
        "expand(t)": lambda e: e.x[:1].expand(e.i) + 0,
        "view(t, -1)": lambda e: e.m.view(e.len[1] + 1, -1)[0],
        "repeat(t)": lambda e: e.x.repeat(e.len[0]),
        "arange(t, py)": lambda e: torch.arange(e.idx[3], 9, device=DEVICE),
        "topk(k=t)": lambda e: torch.topk(e.x, e.len[2])[0],
        "roll(t)": lambda e: e.x.roll(int(e.i)),
        "split(t.item)": lambda e: e.x.split(e.i.item())[0] + 0,
        "F.pad(t)": lambda e: F.pad(e.x, (0, e.i)),
        # indices and masks
        "x[mask,:]": lambda e: e.m[e.len > 1, :],
        "x[:,mask]": lambda e: e.m[:, e.mask],
        "m[mask2d]": lambda e: e.m[e.m > 0],
        "m[mask2d]=0.": lambda e: _m(e, e.m > 0, 0.0),
        "m[rowmask]=0.": lambda e: _m(e, e.len > 1, 0.0),
        "m[rowmask,:]=0.": lambda e: _m(e, (e.len > 1, slice(None)), 0.0),
        "m[:,mask]=0.": lambda e: _m(e, (slice(None), e.mask), 0.0),
        "m[rowmask,0]=0.": lambda e: _m(e, (e.len > 1, 0), 0.0),
        "m[idx,mask]=0.": lambda e: _m(e, (e.req[:3], e.mask), 0.0),
        "x[mask]=py int": lambda e: _x(e, e.mask, 1),
        "x[mask]=True": lambda e: _x(e, e.mask, True),
        "x[mask]=host0d": lambda e: _x(e, e.mask, e.h_scalar),
        "x[mask]=dev row": lambda e: _m(e, e.len > 1, e.m[0]),
        "x[mask]+=1": lambda e: _augmented(e, e.mask, 1.0),
        "x[idx]+=1": lambda e: _augmented(e, e.idx, 1.0),
        "x[1]+=1": lambda e: _augmented(e, 1, 1.0),
        "x[1:3]+=1": lambda e: _augmented(e, slice(1, 3), 1.0),
        "x[i]=dev": lambda e: _x(e, e.i, e.scalar),
        "x[i]=1.": lambda e: _x(e, e.i, 1.0),
        "x[idx>2]": lambda e: e.x[:4][e.idx > 2],
        "x[uint8 mask]": lambda e: e.x[e.mask.to(torch.uint8).bool()],
        "m[idx,idx]": lambda e: e.m[e.req, e.idx],
        "m[idx[:,None],idx]": lambda e: e.m[e.req[:, None], e.idx],
        "m[...,idx]": lambda e: e.m[..., e.idx],
        "m[idx,None]": lambda e: e.m[e.req, None] + 0,
        "m[idx,1:3]": lambda e: e.m[e.req, 1:3],
        "m[arange,idx]": lambda e: e.m[torch.arange(4, device=DEVICE), e.idx],
        "m[range list,idx]": lambda e: e.m[list(range(4)), e.idx],
        "m[py,idx]": lambda e: e.m[2, e.idx],
        "m[True]": lambda e: e.m[True] + 0,
        "m[np.int64]": lambda e: e.m[np.int64(2)] + 0,
        "m[host0d]": lambda e: e.m[torch.tensor(2)] + 0,
        "x[np bool]": lambda e: e.m[np.array([True, False, True, False])],
        "x[tuple of lists]": lambda e: e.m[[0, 1], [2, 3]],
        "x[int32 idx]": lambda e: e.x[e.seq - 1],
        "index_put_ mask": lambda e: e.x.clone().index_put_((e.mask,), e.scalar),
        "index_put_ mask host0d": lambda e: e.x.clone().index_put_((e.mask,), torch.tensor(0.0)),
        "index_put_ two": lambda e: e.m.clone().index_put_((e.req, e.idx), e.x[:4]),
        "index_put_ int idx": lambda e: e.m.clone().index_put_((e.req,), e.m[0]),
        "index_put_ host idx": lambda e: e.m.clone().index_put_((e.h_len - 1,), e.m[0]),
        "masked_fill row": lambda e: e.m.masked_fill((e.len > 1)[:, None], 0.0),
        "masked_fill host mask": lambda e: e.x.masked_fill(e.h_mask, 0.0),
        "where host mask": lambda e: torch.where(e.h_mask, e.x, -e.x),
        "where(m,int,x)": lambda e: torch.where(e.mask, 1, e.len.repeat(2)),
        "where out": lambda e: torch.where(e.mask, e.x, -e.x, out=e.buf) + 0,
        "nonzero as_tuple": lambda e: e.mask.nonzero(as_tuple=True)[0],
        "masked_select out": lambda e: torch.masked_select(e.x, e.mask, out=torch.empty(0, device=DEVICE)),
        "unique(dim)": lambda e: torch.unique(e.table, dim=0),
        "unique counts": lambda e: torch.unique(e.len, return_counts=True)[1],
        "scatter_ src": lambda e: e.x.clone().scatter_(0, e.idx, e.x[4:] * 0 + 2),
        "scatter reduce=add": lambda e: e.x.clone().scatter_(0, e.idx, 1.0, reduce="add"),
        "scatter host idx": lambda e: e.x.clone().scatter_(0, e.h_len, 1.0),
        "index_add host idx": lambda e: e.x.clone().index_add_(0, e.h_len, e.x[:4]),
        "gather neg": lambda e: e.m.gather(1, (e.idx[:, None] - 1).clamp(min=0)),
        "bucketize(host bounds)": lambda e: torch.bucketize(e.x, torch.arange(4.0)),
        "bucketize(py)": lambda e: torch.bucketize(3.0, e.len.cumsum(0)),
        "searchsorted(py)": lambda e: torch.searchsorted(e.len.cumsum(0), 3),
        "isin(py)": lambda e: torch.isin(e.len, 2),
        "isin(elements py)": lambda e: torch.isin(2, e.len),
        # copies
        "pinned[:2].to(nb)": lambda e: e.x[:2] + e.p_x[:2].to(DEVICE, non_blocking=True),
        "pinned[::2].to(nb)": lambda e: e.x[:4] + e.p_x[::2].to(DEVICE, non_blocking=True),
        "pinned 2d cols to(nb)": lambda e: e.x[:4] + e.p_x.view(4, 2)[:, 0].to(DEVICE, non_blocking=True),
        "pinned 2d t to(nb)": lambda e: e.x.view(2, 4) + e.p_x.view(4, 2).t().to(DEVICE, non_blocking=True),
        "pinned.long().to(nb)": lambda e: e.len + e.p_len.long().to(DEVICE, non_blocking=True),
        "pinned.to(dev,dtype,nb)": lambda e: e.len + e.p_len.to(DEVICE, torch.int64, non_blocking=True),
        "pinned*2 .to(nb)": lambda e: e.x + (e.p_x * 2).to(DEVICE, non_blocking=True),
        "pinned[0] to(nb)": lambda e: e.x + e.p_x[0].to(DEVICE, non_blocking=True),
        "dev[::2].copy_(pinned,nb)": lambda e: e.buf[::2].copy_(e.p_x[:4], non_blocking=True) + 0,
        "dev 2d cols.copy_(pinned,nb)": lambda e: e.buf.view(4, 2)[:, 0].copy_(e.p_x[:4], non_blocking=True) + 0,
        "dev.copy_(pinned broadcast,nb)": lambda e: e.m.clone().copy_(e.p_x, non_blocking=True),
        "dev int64.copy_(pinned int32,nb)": lambda e: e.len.copy_(e.p_len, non_blocking=True) + 0,
        "dev bf16.copy_(pinned,nb)": lambda e: e.x.bfloat16().copy_(e.p_x, non_blocking=True).float(),
        "dev.copy_(pinned0d,nb)": lambda e: e.buf.copy_(e.p_x[0], non_blocking=True) + 0,
        "dev0d.copy_(pinned0d,nb)": lambda e: e.scalar.clone().copy_(e.p_x[1], non_blocking=True),
        "pinned[::2].copy_(dev,nb)": lambda e: _after(e.p_out[::2].copy_(e.x[:4], non_blocking=True), e.x + 1),
        "pinned.copy_(dev[::2],nb)": lambda e: _after(e.p_out[:4].copy_(e.x[::2], non_blocking=True), e.x + 1),
        "pinned.copy_(dev int,nb)": lambda e: _after(e.p_out[:4].copy_(e.len, non_blocking=True), e.x + 1),
        "pinned.copy_(dev0d,nb)": lambda e: _after(e.p_out.copy_(e.scalar, non_blocking=True), e.x + 1),
        "pinned.fill_": lambda e: _after(e.p_out.fill_(1.0), e.x + 1),
        "pinned + host": lambda e: e.x + float((e.p_x + e.h_x).sum() * 0),
        "dev + pinned1d": lambda e: e.x + e.p_x,
        "dev * pinned0d": lambda e: e.x * e.p_x[1],
        "dev.to(cpu,nb) unused": lambda e: _after(e.x.to("cpu", non_blocking=True), e.x + 1),
        "dev.cpu() unused": lambda e: _after(e.x.cpu(), e.x + 1),
        "dev[0].cpu() unused": lambda e: _after(e.x[0].cpu(), e.x + 1),
        "host0d.to(dev)": lambda e: e.x + e.h_scalar.to(DEVICE),
        "host0d.to(dev,nb)": lambda e: e.x + torch.tensor(2.0).to(DEVICE, non_blocking=True),
        "empty host.to(dev)": lambda e: torch.cat([e.x, torch.zeros(0).to(DEVICE)]),
        "tensor([],dev)": lambda e: torch.cat([e.x, torch.tensor([], device=DEVICE)]),
        "zeros(0,dev)": lambda e: torch.cat([e.x, torch.zeros(0, device=DEVICE)]),
        "dev.copy_(empty host)": lambda e: _after(e.x[:0].copy_(torch.zeros(0)), e.x + 1),
        "tensor(py).to(dev)": lambda e: e.x + torch.tensor(float(e.py)).to(DEVICE),
        "tensor(np scalar,dev)": lambda e: e.x + torch.tensor(np.float32(1), device=DEVICE),
        "as_tensor(py,dev)": lambda e: e.x + torch.as_tensor(2.0, device=DEVICE),
        "new_tensor(py)": lambda e: e.x + e.x.new_tensor(2.0),
        "new_tensor(dev)": lambda e: e.x + e.x.new_tensor(e.x[:1].clone()),
        "tensor(dev)": lambda e: e.x + torch.as_tensor(e.x.clone()),
        "full((),py)": lambda e: e.x + torch.full((), 2.0, device=DEVICE),
        "FloatTensor style": lambda e: e.x + torch.ones(8).type_as(e.x),
        "type(str)": lambda e: e.len.type(torch.float32) + e.x[:4],
        "numpy result": lambda e: e.x * np.sqrt(4.0),
        "np scalar * dev": lambda e: np.float64(2.0) * e.x,
        "host randn.to": lambda e: e.x + torch.randn(8).to(DEVICE) * 0,
        "stack(host).to": lambda e: e.x[:2] + torch.stack([e.h_scalar, e.h_scalar]).to(DEVICE),
        # numbers
        "int mm": lambda e: e.table @ e.table.t(),
        "int64 einsum": lambda e: torch.einsum("ij,kj->ik", e.table, e.table),
        "integer matmul": lambda e: torch.mm(e.table.long(), e.table.long().t()),
        "bool sum": lambda e: e.mask.sum(),
        "int mean": lambda e: e.len.float().mean(),
        "int histc": lambda e: torch.histc(e.len.float(), 4, 0, 4),
        "half matmul": lambda e: (e.m.half() @ e.m.half().t()).float(),
        "bf16 softmax": lambda e: e.m.bfloat16().softmax(-1).float(),
        "fp8 matmul cast": lambda e: e.m.to(torch.float8_e5m2).float() @ e.m.t(),
        "int8 quantise": lambda e: (
            (e.m / e.m.abs().amax(-1, keepdim=True) * 127).round().clamp(-128, 127).to(torch.int8)
        ),
        "uint8 shift": lambda e: (e.workspace[:8] + 1) << 2,
        "cumsum bool": lambda e: e.mask.cumsum(0),
        "prod": lambda e: e.len.prod(),
        "std 1 elem": lambda e: e.x[:2].std(),
        "nanmean": lambda e: e.x.nanmean(),
        "nanquantile": lambda e: torch.nanquantile(e.x, 0.5),
        "quantile dev q": lambda e: torch.quantile(e.x, torch.full((2,), 0.5, device=DEVICE)),
        "median dim": lambda e: e.m.median(-1)[0],
        "cov": lambda e: torch.cov(e.m),
        "corrcoef": lambda e: torch.corrcoef(e.m),
        "trapezoid": lambda e: torch.trapezoid(e.x),
        "vander": lambda e: torch.vander(e.x[:3]),
        "fft": lambda e: torch.fft.rfft(e.x).abs(),
        "stft": lambda e: torch.stft(e.x, 4, window=torch.ones(4, device=DEVICE), return_complex=True).abs(),
        "conv2d": lambda e: F.conv2d(e.m[None, None], e.m[None, None, :2, :2]),
        "batch_norm": lambda e: F.batch_norm(e.m, e.x, e.x + 1),
        "dropout off": lambda e: F.dropout(e.x, 0.5, training=False) + 0,
        "gumbel_softmax": lambda e: F.gumbel_softmax(e.m) * 0,
        "normal(py,py)": lambda e: torch.normal(0.0, 1.0, (4,), device=DEVICE) * 0,
        "normal(mean tensor)": lambda e: torch.normal(e.x) * 0,
        "bernoulli_(p dev)": lambda e: torch.empty(8, device=DEVICE).bernoulli_(e.mask.float()) * 0,
        "randint_like": lambda e: torch.randint_like(e.x, 5) * 0,
        "rand_like": lambda e: torch.rand_like(e.x) * 0,
        "multinomial many": lambda e: torch.multinomial(e.m.softmax(-1), 1) * 0,
        "poisson": lambda e: torch.poisson(e.x) * 0,
        "log_normal_": lambda e: torch.empty(8, device=DEVICE).log_normal_() * 0,
        "random_": lambda e: torch.empty(8, device=DEVICE).random_(0, 4) * 0,
        "linalg.lu_factor": lambda e: torch.linalg.lu_factor(e.m[:4, :4])[0],
        "linalg.lu_factor_ex": lambda e: torch.linalg.lu_factor_ex(e.m[:4, :4])[0],
        "linalg.inv_ex": lambda e: torch.linalg.inv_ex(e.m[:4, :4] + 3 * torch.eye(4, device=DEVICE))[0],
        "linalg.solve_ex": lambda e: torch.linalg.solve_ex(e.m[:4, :4], e.m[:, 4:])[0],
        "linalg.slogdet": lambda e: torch.linalg.slogdet(e.m[:4, :4])[1],
        "linalg.eigh": lambda e: torch.linalg.eigvalsh(e.m @ e.m.t()),
        "linalg.lstsq": lambda e: torch.linalg.lstsq(e.m[:, :3], e.m[:, 3:])[0],
        "linalg.pinv": lambda e: torch.linalg.pinv(e.m),
        "linalg.matrix_power": lambda e: torch.linalg.matrix_power(e.m[:4, :4], 3),
        "linalg.vector_norm": lambda e: torch.linalg.vector_norm(e.m, dim=-1),
        "linalg.multi_dot": lambda e: torch.linalg.multi_dot([e.m, e.m.t(), e.m]),
        "cholesky_solve": lambda e: torch.cholesky_solve(e.m, torch.eye(4, device=DEVICE)),
        # memory
        "view as bytes": _view_as_bytes,
        "clone(channels)": lambda e: e.q.clone(memory_format=torch.contiguous_format),
        "contiguous no-op": lambda e: e.x.contiguous() + 1,
        "to same dtype": lambda e: e.x.to(torch.float32) + 1,
        "to copy=True": lambda e: e.x.to(torch.float32, copy=True),
        "detach": lambda e: e.x.detach() * 2,
        "data": lambda e: e.x.data * 2,
        "requires_grad": lambda e: e.x.requires_grad_(False) * 2,
        "set_ from buffer": lambda e: torch.empty(0, device=DEVICE).set_(e.buf.copy_(e.x)) + 1,
        "resize_ smaller": lambda e: e.x.clone().resize_(4) + 0,
        "expand write": lambda e: e.m.clone().copy_(e.x.expand(4, 8)),
        "copy_ overlap views": lambda e: e.buf.copy_(e.x)[2:].copy_(e.x[:6]),
        "swapaxes in-place": lambda e: e.m.clone().t_() + 0,
        "unsafe_view": lambda e: e.m.t().reshape(-1) * 2,
        "share workspace twice": lambda e: e.buf.copy_(e.x).add_(1) + e.buf.mul_(2),
        "module": _module,
        "module made here": _module_made_here,
        "autocast off": _autocast,
        "rope cache host scalar": _rope_cache,
        "torch.ops.aten call": lambda e: torch.ops.aten.add.Tensor(e.x, e.x),
        "torch.add_ out alias": lambda e: torch.add(e.buf.copy_(e.x), 1, out=e.buf) + 0,
        "sparse mm": lambda e: torch.eye(4, device=DEVICE).to_sparse() @ e.m,
        "nested_tensor": lambda e: torch.nested.nested_tensor([e.x, e.x[:2]]).to_padded_tensor(0.0),
        "vmap": lambda e: torch.vmap(lambda row: row * 2)(e.m),
        "checkpoint-free grad": lambda e: e.x.clone().requires_grad_(False).sum(),
        # streams and the rest
        "stream: fork of a fork": _fork_of_a_fork,
        "event: recorded before": _event_recorded_before,
        "stream: waits for itself": _wait_for_itself,
        "default stream: joins": _default_stream_waits,
        "device context": lambda e: _after(torch.cuda.device(0).__enter__(), e.x + 1),
        "cuda.get_device_name": lambda e: _after(torch.cuda.get_device_name(), e.x + 1),
        "cuda.get_stream handle": lambda e: e.x + float(torch.cuda.current_stream().cuda_stream != -1),
        "memory_stats": lambda e: _after(torch.cuda.memory_stats(), e.x + 1),
        "memory_snapshot": lambda e: _after(torch.cuda.memory_snapshot(), e.x + 1),
        "reset_peak": lambda e: _after(torch.cuda.reset_peak_memory_stats(), e.x + 1),
        "nvtx": lambda e: _after((torch.cuda.nvtx.range_push("a"), torch.cuda.nvtx.range_pop()), e.x + 1),
        "gc.collect": lambda e: _after(__import__("gc").collect(), e.x + 1),
        "torch.manual_seed": lambda e: _after(torch.manual_seed(11), e.x + 1),
        "set_rng_state": lambda e: _after(torch.cuda.set_rng_state(torch.cuda.get_rng_state()), e.x + 1),
        "default_generator": lambda e: torch.rand(4, device=DEVICE, generator=torch.cuda.default_generators[0]) * 0,
        "print shape": lambda e: _after(str(e.x.shape), e.x + 1),
        "is_pinned": lambda e: e.x + float(e.p_x.is_pinned()),
        "dlpack": lambda e: torch.from_dlpack(e.x) + 1,
        "storage ptr": lambda e: e.x + float(e.x.untyped_storage().data_ptr() == 0),
        "numpy of host": lambda e: e.x + float(e.h_x.numpy()[0] * 0),
    }
)

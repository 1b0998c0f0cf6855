"""Snippets: plain device work, views, in-place writes, random numbers."""

# mypy: disable-error-code="index,assignment,call-overload,no-untyped-call,func-returns-value"

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .inputs import DEVICE, Inputs
from .snippet import Run, Snippet, named


def on_copy(change: Callable[[Inputs, Tensor], object]) -> Run:
    """A snippet that changes a copy of x in place and returns it."""

    def run(e: Inputs) -> Tensor:
        y = e.x.clone()
        change(e, y)
        return y

    return run


def _set(e: Inputs, index: object, value: object) -> Tensor:
    y = e.x.clone()
    y[index] = value
    return y


def _empty_partial(e: Inputs) -> Tensor:
    y = torch.empty(8, device=DEVICE)
    y[:4] = e.x[:4]
    return y[:4] + 1


def _bmm_out(e: Inputs) -> Tensor:
    out = torch.empty(2, 1, 8, device=DEVICE)
    torch.bmm(e.q[:, 0], e.k[:, 0].transpose(1, 2), out=out)
    return out


def _in_place(e: Inputs) -> Tensor:
    e.buf.copy_(e.x)
    e.buf.mul_(2).add_(1)
    return e.buf


def _views(e: Inputs) -> Tensor:
    y = e.m.clone()
    z = y[1:3].t()[2:5]
    z.mul_(2)
    y.view(-1)[3:6].zero_()
    return y


def _count(e: Inputs) -> Tensor:
    e.count.add_(1)
    return e.count.clone()


def _resize_fresh(e: Inputs) -> Tensor:
    y = torch.empty(0, device=DEVICE)
    y.resize_(8)
    y.copy_(e.x)
    return y


def _out_resized(e: Inputs) -> Tensor:
    out = torch.empty(0, device=DEVICE)
    torch.add(e.x, 1, out=out)
    return out


def _set_source(e: Inputs) -> Tensor:
    y = torch.empty(0, device=DEVICE)
    y.set_(e.x.clone())
    return y + 1


def _fp8_bytes(e: Inputs) -> Tensor:
    return e.m.to(torch.float8_e4m3fn).view(torch.uint8)


def _fp8_round_trip(e: Inputs) -> Tensor:
    return e.m.to(torch.float8_e4m3fn).to(torch.float32) * 2


def _record_stream(e: Inputs) -> Tensor:
    y = e.x * 2
    y.record_stream(torch.cuda.current_stream())
    return y + 1


def _no_copy_view(e: Inputs) -> Tensor:
    y = e.buf
    y.view(2, 4)[1].copy_(e.x[:4])
    y.view(2, 4)[0].copy_(e.x[4:])
    return y + 0


_ORIGINAL: dict[str, Run] = {
    "x[mask]": lambda e: e.x[e.mask],
    "x[mask]=0.": lambda e: _set(e, e.mask, 0.0),
    "x[mask]=cuda0d": lambda e: _set(e, e.mask, e.m[0, 0]),
    "x[mask]=cuda1d": lambda e: _set(e, e.mask, e.x[:3]),
    "masked_fill": lambda e: e.x.masked_fill(e.mask, -1.0),
    "masked_scatter": lambda e: e.x.masked_scatter(e.mask, e.x + 9),
    "where(3)": lambda e: torch.where(e.mask, e.x, -e.x),
    "x[dev_idx]": lambda e: e.x[e.idx],
    "arange(int)": lambda e: e.x + torch.arange(8, device=DEVICE),
    "zeros+add": lambda e: torch.zeros(8, device=DEVICE).add_(e.x),
    "empty partial": _empty_partial,
    "topk": lambda e: torch.topk(e.x, 3)[1],
    "sort": lambda e: e.x.sort()[0],
    "argsort": lambda e: e.x.argsort(),
    "cumsum": lambda e: F.pad(e.len.cumsum(0), (1, 0)),
    "softmax": lambda e: e.m.softmax(-1),
    "sdpa": lambda e: F.scaled_dot_product_attention(e.q, e.k, e.v),
    "sdpa mask": lambda e: F.scaled_dot_product_attention(e.q, e.k, e.v, attn_mask=e.pair_mask),
    "bmm out=": _bmm_out,
    "einsum": lambda e: torch.einsum("bhqd,bhkd->bhqk", e.q, e.k),
    "linear": lambda e: F.linear(e.k, e.v[0, 0]),
    "in-place": _in_place,
    "views": _views,
    "index_put_": on_copy(lambda e, y: y.index_put_((e.idx,), e.m[0, :4] * 0 + 1)),
    "index_put_ acc": on_copy(lambda e, y: y.index_put_((e.idx,), e.x[:4] * 0 + 1, accumulate=True)),
    "scatter_": on_copy(lambda e, y: y.scatter_(0, e.idx, 3.0)),
    "scatter_add_": on_copy(lambda e, y: y.scatter_add_(0, e.idx, e.x[:4] * 0 + 1)),
    "index_select": lambda e: e.m.index_select(1, e.idx),
    "index_copy_": on_copy(lambda e, y: y.index_copy_(0, torch.arange(4, device=DEVICE), e.x[4:])),
    "gather": lambda e: e.x.gather(0, e.idx),
    "embedding": lambda e: F.embedding(e.idx, e.k[0, 0]),
    "searchsorted": lambda e: torch.searchsorted(e.len.cumsum(0), e.idx),
    "cat/stack": lambda e: torch.cat([e.x, torch.stack([e.i, e.i])]),
    "split": lambda e: e.m.split(2)[1] + 1,
    "clone": lambda e: e.x.clone(),
    "to(dtype)": lambda e: e.x.to(torch.bfloat16).float(),
    "rms/layernorm": lambda e: F.layer_norm(e.m, (8,)),
    "split(list)": lambda e: torch.split(e.x, [2, 6])[1] + 1,
    "multinomial": lambda e: torch.multinomial(e.x + 1, 2) * 0,
    "multinomial rep": lambda e: torch.multinomial(e.x + 1, 2, replacement=True) * 0,
    "dropout": lambda e: F.dropout(e.x, 0.5) * 0,
    "rand": lambda e: torch.rand(8, device=DEVICE) * 0,
    "pad_sequence": lambda e: torch.nn.utils.rnn.pad_sequence([e.x, e.x[:3]]),
    "cdist": lambda e: torch.cdist(e.m, e.m),
    "quantile": lambda e: torch.quantile(e.x, 0.5),
    "median": lambda e: e.x.median(),
    "rot90/flip": lambda e: e.m.flip(0),
    "mode": lambda e: torch.mode(e.len)[0],
    "randperm": lambda e: torch.randperm(8, device=DEVICE) * 0,
    "Generator": lambda e: torch.rand(8, device=DEVICE, generator=e.generator) * 0,
}

_MORE: dict[str, Run] = {
    "x.max(dim)": lambda e: e.m.max(-1)[1],
    "x.min()": lambda e: e.m.min() + 0,
    "argmax": lambda e: e.m.argmax(-1),
    "aminmax": lambda e: torch.stack(torch.aminmax(e.m)),
    "kthvalue": lambda e: e.m.kthvalue(3)[0],
    "cummax": lambda e: e.x.cummax(0)[1],
    "logsumexp": lambda e: torch.logsumexp(e.m, -1),
    "any(dim)": lambda e: e.pair_mask.any(-1),
    "all": lambda e: e.mask.all(),
    "diff": lambda e: e.len.cumsum(0).diff(),
    "std": lambda e: e.m.std(-1),
    "std_mean": lambda e: torch.std_mean(e.m, -1)[0],
    "var": lambda e: e.m.var(0),
    "norm": lambda e: e.m.norm(dim=-1),
    "rms_norm": lambda e: F.rms_norm(e.m, (8,)),
    "silu_and_mul": lambda e: F.silu(e.m[:, :4]) * e.m[:, 4:],
    "gelu": lambda e: F.gelu(e.m),
    "softcap": lambda e: torch.tanh(e.m / 30) * 30,
    "addmm": lambda e: torch.addmm(e.m, e.m[:, :4], e.m),
    "baddbmm": lambda e: torch.baddbmm(e.q.new_zeros(8, 1, 8), e.q.flatten(0, 1), e.k.flatten(0, 1).transpose(1, 2)),
    "matmul broadcast": lambda e: e.q @ e.k.transpose(-1, -2),
    "sdpa causal gqa": lambda e: F.scaled_dot_product_attention(
        e.k, e.k[:, :2], e.v[:, :2], is_causal=True, enable_gqa=True
    ),
    "expand+contiguous": lambda e: e.m[:, None].expand(-1, 3, -1).contiguous(),
    "repeat": lambda e: e.m.repeat(2, 1),
    "repeat_interleave(int)": lambda e: e.m.repeat_interleave(3, 0),
    "tile": lambda e: e.m.tile(2),
    "chunk": lambda e: e.m.chunk(2, -1)[1] * 2,
    "unbind": lambda e: e.m.unbind(0)[2] * 2,
    "as_strided": lambda e: e.m.as_strided((3, 4), (8, 2), 1) * 2,
    "unfold": lambda e: e.x.unfold(0, 3, 2) * 1,
    "roll": lambda e: e.m.roll(1, 0),
    "tril": lambda e: e.m.tril(),
    "triu(ones)": lambda e: torch.triu(torch.ones(4, 4, device=DEVICE), 1) + e.m[:, :4],
    "tril_indices": lambda e: torch.tril_indices(4, 4, device=DEVICE) + e.i,
    "eye": lambda e: torch.eye(4, device=DEVICE) + e.m[:, :4],
    "linspace": lambda e: torch.linspace(0, 1, 8, device=DEVICE) + e.x,
    "full+cumsum": lambda e: torch.full((8,), 2, device=DEVICE).cumsum(0) + e.x,
    "meshgrid": lambda e: torch.meshgrid(e.x[:2], e.x[2:5], indexing="ij")[1] + 0,
    "outer": lambda e: torch.outer(e.x, e.x),
    "take_along_dim": lambda e: torch.take_along_dim(e.m, e.m.argsort(-1), -1),
    "take": lambda e: e.m.take(e.idx),
    "put_": on_copy(lambda e, y: y.put_(e.idx, e.x[4:] * 0 + 1)),
    "index_add_": on_copy(lambda e, y: y.index_add_(0, e.idx, e.x[:4] * 0 + 1)),
    "index_fill_": on_copy(lambda e, y: y.index_fill_(0, e.idx, -1.0)),
    "index_reduce_": on_copy(lambda e, y: y.index_reduce_(0, e.idx, e.x[:4], "amax")),
    "scatter_reduce_": on_copy(lambda e, y: y.scatter_reduce_(0, e.idx, e.x[:4], "amax")),
    "masked_fill_": on_copy(lambda e, y: y.masked_fill_(e.mask, float("-inf"))),
    "masked_scatter_": on_copy(lambda e, y: y.masked_scatter_(e.mask, e.x + 9)),
    "logical ops": lambda e: (e.mask & ~e.mask.roll(1)) | (e.x > 3),
    "cmp+float": lambda e: (e.x[:, None] == e.len[None]).float(),
    "bitwise pack": lambda e: (e.mask.view(2, 4).int() << torch.arange(4, device=DEVICE, dtype=torch.int32)).sum(-1),
    "floor_divide": lambda e: torch.div(e.idx + 7, 3, rounding_mode="floor"),
    "remainder": lambda e: e.idx % 3,
    "clamp_": on_copy(lambda e, y: y.clamp_(1, 4)),
    "nan_to_num": lambda e: torch.nan_to_num(e.x / 0),
    "view(dtype)": lambda e: e.x.view(torch.int32) + 0,
    "fp8 bytes": _fp8_bytes,
    "fp8 round trip": _fp8_round_trip,
    "to(bf16).to(fp16)": lambda e: e.m.to(torch.bfloat16).to(torch.float16).float(),
    "int32 cast": lambda e: e.len.to(torch.int32) * 2,
    "long()": lambda e: e.seq.long(),
    "out= add": lambda e: torch.add(e.x, e.x, out=e.buf) + 0,
    "out= mul slice": lambda e: torch.mul(e.x[:4], 2, out=e.buf[:4]) + 0,
    "out= cumsum": lambda e: torch.cumsum(e.seq, 0, out=e.indptr[1:]) + 0,
    "out= index_select": lambda e: torch.index_select(e.x, 0, e.idx, out=e.buf[:4]) + 0,
    "out= sum": lambda e: torch.sum(e.m, 0, out=e.buf) + 0,
    "out= matmul": lambda e: torch.matmul(e.m, e.m[0], out=torch.empty(4, device=DEVICE)) + 0,
    "out= resized": _out_resized,
    "resize_ fresh": _resize_fresh,
    "set_ fresh": _set_source,
    "record_stream": _record_stream,
    "buffer views": _no_copy_view,
    "zero_()": lambda e: e.buf.zero_() + e.x,
    "+=": on_copy(lambda e, y: y.__iadd__(e.x)),
    "y[1:] += y[:-1]": on_copy(lambda e, y: y[1:].add_(y[:-1].clone())),
    "swap rows": lambda e: e.m[e.req] + 0,
    "conv1d": lambda e: F.conv1d(e.m[None, :, :], e.m[:, :4][None].float()),
    "interpolate": lambda e: F.interpolate(e.m[None], size=4),
    "max_pool": lambda e: F.max_pool1d(e.m[None], 2),
    "bernoulli": lambda e: torch.bernoulli(e.mask.float()) * 0,
    "exponential_ sampling": lambda e: (e.m.softmax(-1) / torch.empty_like(e.m).exponential_()).argmax(-1) * 0,
    "randn_like": lambda e: torch.randn_like(e.x) * 0,
    "randint": lambda e: torch.randint(0, 5, (4,), device=DEVICE) * 0,
    "uniform_": on_copy(lambda e, y: y.uniform_().mul_(0)),
    "complex rope": lambda e: torch.view_as_real(
        torch.view_as_complex(e.m.view(4, 4, 2)) * torch.polar(e.x[:4] + 1, e.x[4:])
    ),
    "embedding max_norm": lambda e: F.embedding(e.idx % 4, e.m.clone(), max_norm=1.0),
    "pixel unshuffle": lambda e: e.m.view(2, 2, 2, 4).permute(0, 2, 1, 3).reshape(4, 8),
    "block_diag": lambda e: torch.block_diag(e.m[:2, :2], e.m[2:, 2:4]),
    "tensordot": lambda e: torch.tensordot(e.m, e.m, dims=([1], [1])),
    "cosine_similarity": lambda e: F.cosine_similarity(e.m, e.m.flip(0)),
    "log_softmax+nll": lambda e: F.nll_loss(e.m.log_softmax(-1), e.idx % 8),
    "group_norm": lambda e: F.group_norm(e.m[None], 2),
    "_foreach_add": lambda e: torch._foreach_add([e.x, e.buf], 1.0)[0],
    "_foreach_copy_": lambda e: (torch._foreach_copy_([e.buf], [e.x]), e.buf + 0)[1],
}

SNIPPETS: tuple[Snippet, ...] = (
    *named(_ORIGINAL),
    Snippet("counter", _count, warm_up=False, expected=(1.0,)),
    *named(_MORE),
)

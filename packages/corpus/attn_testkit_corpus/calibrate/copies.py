"""Snippets: data crossing between host and device."""

# mypy: disable-error-code="index,assignment,operator"

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .inputs import DEVICE, Inputs
from .snippet import Snippet, named


def _default_device(e: Inputs) -> Tensor:
    with torch.device(DEVICE):
        return torch.arange(8) + e.x


def _default_device_list(e: Inputs) -> Tensor:
    with torch.device(DEVICE):
        return torch.tensor([1.0] * 8) + e.x


def _pinned_out(e: Inputs) -> Tensor:
    e.p_out.copy_(e.x, non_blocking=True)
    return e.x + 0


def _pinned_out_blocking(e: Inputs) -> Tensor:
    e.p_out.copy_(e.x)
    return e.x + 0


def _host_out(e: Inputs) -> Tensor:
    e.h_x.copy_(e.x)
    return e.x + 1


def _assign(e: Inputs, index: object, value: object) -> Tensor:
    y = e.x.clone()
    y[index] = value
    return y


def _assign_matrix(e: Inputs, index: object, value: object) -> Tensor:
    y = e.m.clone()
    y[index] = value
    return y


SNIPPETS: tuple[Snippet, ...] = named(
    {
        ".cpu()": lambda e: e.x + e.x.cpu().sum().item(),
        ".to(cpu)": lambda e: e.x + e.x.to("cpu").max().item(),
        ".to(cpu,nb)": lambda e: e.x + e.x.to("cpu", non_blocking=True).max().item(),
        "pinned.copy_(dev,nb)": _pinned_out,
        "host.copy_(dev)": _host_out,
        ".cpu().numpy()": lambda e: e.x + float(e.x.cpu().numpy().sum()),
        "tensor(list,dev)": lambda e: e.x[:4] + torch.tensor([1, 2, 3, e.py], device=DEVICE),
        "tensor(1,dev)": lambda e: e.x + torch.tensor(e.py, device=DEVICE),
        "as_tensor(np,dev)": lambda e: e.x[:4] + torch.as_tensor(np.arange(4.0), device=DEVICE),
        "new_tensor": lambda e: e.x[:2] + e.x.new_tensor([1, 2]),
        "full(py)": lambda e: e.x + torch.full((8,), e.py, device=DEVICE),
        "host.to(dev)": lambda e: e.x + e.h_x.to(DEVICE),
        "host.to(dev,nb)": lambda e: e.x + e.h_x.to(DEVICE, non_blocking=True),
        "pinned.to(dev)": lambda e: e.x + e.p_x.to(DEVICE),
        "pinned.to(dev,nb)": lambda e: e.x + e.p_x.to(DEVICE, non_blocking=True),
        "tensor(list).pin.to(nb)": lambda e: (
            e.x + torch.tensor([float(e.py)] * 8).pin_memory().to(DEVICE, non_blocking=True)
        ),
        "dev.copy_(host)": lambda e: e.buf.copy_(e.h_x) + 0,
        "dev.copy_(pinned,nb)": lambda e: e.buf.copy_(e.p_x, non_blocking=True) + 0,
        "dev.copy_(host0d)": lambda e: e.buf.copy_(e.h_scalar) + 0,
        "x[1]=1.": lambda e: _assign(e, 1, 7.0),
        "x[1]=host0d": lambda e: _assign(e, 1, e.h_scalar),
        "x[2:]=host1d": lambda e: _assign(e, slice(0, 8), e.h_x),
        "x[1]=py": lambda e: _assign(e, 1, float(e.py)),
        "x[host_idx]": lambda e: e.x[e.h_len],
        "x[list]": lambda e: e.x[[0, 2, e.py]],
        "x[np idx]": lambda e: e.x[np.array([0, e.py])],
        "x*host0d": lambda e: e.x * e.h_scalar,
        "x+host1d": lambda e: e.x + e.h_x,
        "with device": _default_device,
        # the second batch of idioms
        "pinned.copy_(dev)": _pinned_out_blocking,
        "dev.copy_(pinned)": lambda e: e.buf.copy_(e.p_x) + 0,
        "dev[:4].copy_(pinned[:4],nb)": lambda e: e.buf[:4].copy_(e.p_x[:4], non_blocking=True) + 0,
        "dev[::2].copy_(pinned[::2],nb)": lambda e: e.buf[::2].copy_(e.p_x[::2], non_blocking=True) + 0,
        "dev.copy_(pinned int, nb) cast": lambda e: e.buf[:4].copy_(e.p_len, non_blocking=True) + 0,
        "dev int.copy_(dev float)": lambda e: e.seq.copy_(e.x[:4]) + 0,
        "dev.copy_(dev0d)": lambda e: e.buf.copy_(e.scalar) + 0,
        "dev.cuda()": lambda e: e.x.cuda() + 1,
        "dev.to(dev)": lambda e: e.x.to(DEVICE, non_blocking=True) + 1,
        "dev.to(other dev)": lambda e: e.len.to(e.x) + 1,
        "host.to(other dev)": lambda e: e.h_x.to(e.x) + e.x,
        "host.type_as(dev)": lambda e: e.h_x.type_as(e.x) + e.x,
        "host.cuda()": lambda e: e.x + e.h_x.cuda(),
        "host.cuda(nb)": lambda e: e.x + e.h_x.cuda(non_blocking=True),
        "pinned.cuda(nb)": lambda e: e.x + e.p_x.cuda(non_blocking=True),
        "from_numpy.to(nb)": lambda e: e.x + torch.from_numpy(np.arange(8.0)).to(DEVICE, non_blocking=True),
        "empty(pin).to(nb)": lambda e: e.x + torch.zeros(8, pin_memory=True).to(DEVICE, non_blocking=True),
        "host.pin_memory()": lambda e: (e.h_x.pin_memory(), e.x + 1)[1],
        "tensor(list) on host": lambda e: e.x + float(torch.tensor([1.0, e.py]).sum()),
        "with device: tensor(list)": _default_device_list,
        "asarray(list,dev)": lambda e: e.x[:2] + torch.asarray([1.0, 2.0], device=DEVICE),
        "scalar_tensor(dev)": lambda e: e.x + torch.scalar_tensor(2.0, device=DEVICE),
        "new_full": lambda e: e.x + e.x.new_full((8,), 2.0),
        "new_zeros": lambda e: e.x + e.x.new_zeros(8),
        "zeros_like(host, dev)": lambda e: torch.zeros_like(e.h_x, device=DEVICE) + e.x,
        "dev + host0d (int)": lambda e: e.len + torch.tensor(2),
        "dev * np.float32": lambda e: e.x * np.float32(2.0),
        "dev * np 0d array": lambda e: e.x * torch.from_numpy(np.array(2.0, dtype=np.float32)),
        "dev - host0d in-place": lambda e: e.x.clone().sub_(torch.tensor(2.0)),
        "maximum(dev, host0d)": lambda e: torch.maximum(e.x, torch.tensor(2.0)),
        "clamp(min=host0d)": lambda e: e.x.clamp(min=torch.tensor(2.0)),
        "where(m,x,py)": lambda e: torch.where(e.mask, e.x, -1.0),
        "where(m,py,py)": lambda e: torch.where(e.mask, 1.0, 0.0),
        "where(m,x,-inf)": lambda e: torch.where(e.mask, e.x, float("-inf")),
        "where(m,x,host0d)": lambda e: torch.where(e.mask, e.x, e.h_scalar),
        "where(m,x,dev0d)": lambda e: torch.where(e.mask, e.x, e.scalar),
        "masked_fill(m,host0d)": lambda e: e.x.masked_fill(e.mask, torch.tensor(2.0)),
        "fill_(host0d)": lambda e: e.x.clone().fill_(torch.tensor(2.0)),
        "full_like": lambda e: torch.full_like(e.x, e.h_scalar.item()) * 0 + e.x,
        "x[1:3]=0.": lambda e: _assign(e, slice(1, 3), 0.0),
        "x[:]=5": lambda e: _assign(e, slice(None), 5),
        "x[...]=5": lambda e: _assign(e, ..., 5),
        "m[1]=0.": lambda e: _assign_matrix(e, 1, 0.0),
        "m[1,2]=0.": lambda e: _assign_matrix(e, (1, 2), 0.0),
        "m[:,2]=0.": lambda e: _assign_matrix(e, (slice(None), 2), 0.0),
        "m[1,2:3]=0.": lambda e: _assign_matrix(e, (1, slice(2, 3)), 0.0),
        "m[None,0]=1.": lambda e: _assign_matrix(e, (None, 0), 1.0),
        "x[-1]=dev0d": lambda e: _assign(e, -1, e.scalar),
        "x[0]=len.sum()": lambda e: _assign(e, 0, e.len.sum()),
        "x[idx]=host1d": lambda e: _assign(e, e.idx, e.h_x[:4]),
        "x[idx]=0.": lambda e: _assign(e, e.idx, 0.0),
        "x[idx]=dev0d": lambda e: _assign(e, e.idx, e.scalar),
        "x[list]=0.": lambda e: _assign(e, [0, 2], 0.0),
        "m[idx,1]=0.": lambda e: _assign_matrix(e, (e.req, 1), 0.0),
        "m[idx]=dev": lambda e: _assign_matrix(e, e.req, e.m.flip(0)),
        "x[h0]": lambda e: e.x[e.h_len[1]] + 0,
        "x[host_bool_mask]": lambda e: e.x[e.h_mask],
        "x[host_bool_mask]=0.": lambda e: _assign(e, e.h_mask, 0.0),
        "x[host_bool_mask]=dev": lambda e: _assign(e, e.h_mask, e.x[:3]),
        "x[list of bool]": lambda e: e.m[[True, False, True, True]],
        "x[range]": lambda e: e.x[range(4)],
        "x[pinned idx]": lambda e: e.x[e.p_len.long().pin_memory()],
        "index_select(host idx)": lambda e: e.x.index_select(0, e.h_len),
        "gather(host idx)": lambda e: e.x.gather(0, e.h_len),
        "cat([dev, host])": lambda e: torch.cat([e.x, e.h_x]),
        "stack([dev0d, host0d])": lambda e: torch.stack([e.scalar, e.h_scalar]),
        "searchsorted(dev, host0d)": lambda e: torch.searchsorted(e.x, torch.tensor(2.0)),
        "scatter_(value host0d)": lambda e: e.x.clone().scatter_(0, e.idx, e.h_scalar.item()),
        "embedding(host idx)": lambda e: torch.nn.functional.embedding(e.h_len, e.m),
        "lerp(host0d)": lambda e: torch.lerp(e.x, e.x + 1, torch.tensor(0.5)),
        "addcmul(value=host)": lambda e: torch.addcmul(e.x, e.x, e.x, value=float(e.h_scalar)),
        "host rand on dev gen": lambda e: (
            e.x + torch.rand(8, generator=torch.Generator(device=DEVICE), device=DEVICE) * 0
        ),
        "dev rand on host gen": lambda e: e.x + torch.rand(8, generator=torch.Generator(), device=DEVICE) * 0,
        "host.item() frozen": lambda e: e.x * e.h_scalar.item(),
        "untyped_storage copy": lambda e: e.x.view(torch.uint8).clone().view(torch.float32),
    }
)

"""Random programs of in-place, view, out=, scatter, index and reduction operations on 6 x 6 matrices."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

SIDE = 6
Matrices = list[Tensor]


@dataclass(frozen=True)
class Step:
    """One operation on the matrices `a` and `b` (modulo how many there are), with a small number `n` to vary it."""

    operation: str
    a: int
    b: int
    n: int


def _index_put(x: Tensor, y: Tensor, n: int) -> None:
    x.index_put_((y.argmax(-1),), y * 0.5, accumulate=n % 2 == 0)


def _out(x: Tensor, y: Tensor, n: int) -> Tensor:
    out = torch.empty(SIDE, SIDE, device=x.device)
    torch.add(x, y, alpha=n, out=out)
    return out


def _zeros_then_copy(x: Tensor, y: Tensor, n: int) -> Tensor:
    z = torch.zeros(SIDE, SIDE, device=x.device)
    z[:3].copy_(x[3:])
    return z


def _attention(x: Tensor, y: Tensor, n: int) -> Tensor:
    q, k = x.contiguous().view(1, 1, SIDE, SIDE), y.contiguous().view(1, 1, SIDE, SIDE)
    return F.scaled_dot_product_attention(q, k, q, is_causal=n % 2 == 0).view(SIDE, SIDE)


def _unbound(x: Tensor, y: Tensor, n: int) -> Tensor:
    return torch.stack([row * (i + 1) for i, row in enumerate(x.unbind(0))])


# Each answers with a new matrix, or changes x in place and answers with None.
OPERATIONS: dict[str, Callable[[Tensor, Tensor, int], Tensor | None]] = {
    "add": lambda x, y, n: x + y,
    "add_": lambda x, y, n: (x.add_(y.clone(), alpha=0.5), None)[1],
    "reshape": lambda x, y, n: x.contiguous().view(2, 18)[:, :9].reshape(18).repeat(2).view(6, 6),
    "transpose": lambda x, y, n: x.t(),
    "rows *=": lambda x, y, n: (x[1:3].mul_(y[2:4].clone()), None)[1],
    "softmax": lambda x, y, n: x.softmax(-1),
    "mm": lambda x, y, n: torch.mm(x, y) * 0.1,
    "cumsum": lambda x, y, n: x.cumsum(n % 2) * 0.2,
    "gather rows": lambda x, y, n: x[y.argsort(-1)[:, 0]],
    "scatter_": lambda x, y, n: (x.scatter_(1, y.topk(2, -1)[1], float(n % 7)), None)[1],
    "index_put_": _index_put,
    "out=": _out,
    "attention": _attention,
    "where": lambda x, y, n: torch.where(x > y, x, y),
    "zeros+copy_": _zeros_then_copy,
    "clamp copy_": lambda x, y, n: (x.copy_(y.clone().clamp_(-2, 2)), None)[1],
    "cat": lambda x, y, n: torch.cat([x[:2], y[2:]]),
    "layer_norm": lambda x, y, n: F.layer_norm(x, (SIDE,)),
    "masked_fill": lambda x, y, n: x.masked_fill(y > 0, -0.5),
    "diagonal +=": lambda x, y, n: (x.diagonal().add_(1), None)[1],
    "einsum": lambda x, y, n: torch.einsum("ij,kj->ik", x, y) * 0.1,
    "arange": lambda x, y, n: torch.arange(SIDE, device=x.device)[None] * x.sign(),
    "sort": lambda x, y, n: x.sort(-1)[0],
    "max": lambda x, y, n: x.max(-1, keepdim=True)[0] - y,
    "index_copy_": lambda x, y, n: (x.index_copy_(0, y[:, 0].argsort()[:3], y[:3].clone()), None)[1],
    "index_add_": lambda x, y, n: (x.index_add_(1, y[0].argsort()[:2], y[:, :2].clone()), None)[1],
    "bf16": lambda x, y, n: x.to(torch.bfloat16).float(),
    "roll+flip": lambda x, y, n: x.roll(n % 3, 0).flip(1),
    "pad": lambda x, y, n: F.pad(x[:, 1:], (0, 1)),
    "unbind+stack": _unbound,
    "as_strided": lambda x, y, n: x.contiguous().as_strided((6, 6), (1, 6)) * 1.0,
    "logsumexp": lambda x, y, n: x - x.logsumexp(-1, keepdim=True),
}


def random_steps(seed: int) -> list[Step]:
    """The program of a seed: 4 to 25 steps."""
    draw = random.Random(seed)
    names = list(OPERATIONS)
    return [
        Step(draw.choice(names), draw.randrange(1000), draw.randrange(1000), draw.randrange(1000))
        for _ in range(draw.randint(4, 25))
    ]


def run(steps: list[Step], inputs: Matrices) -> Matrices:
    """Run a program. The answer contains its inputs and some of its results."""
    values = list(inputs)
    for step in steps:
        x, y = values[step.a % len(values)], values[step.b % len(values)]
        made = OPERATIONS[step.operation](x, y, step.n)
        if made is not None:
            values.append(made)
        if len(values) > 9 and step.n % 3 == 0:
            values.pop(5)  # a temporary dies
    return values


def new_inputs(generator: torch.Generator) -> Matrices:
    """Three fresh matrices on the host."""
    return [torch.randn(SIDE, SIDE, generator=generator) for _ in range(3)]

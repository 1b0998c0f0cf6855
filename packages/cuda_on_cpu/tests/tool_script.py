"""A script that never heard of attention: an optimizer step in a graph, and Triton kernels, right and wrong ones."""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl


@triton.jit
def scale(x, out, n, by, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(out + at, tl.load(x + at, mask=at < n) * by, mask=at < n)


@triton.jit
def product(x, out, WIDTH: tl.constexpr):
    row, column, inner = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :], tl.arange(0, WIDTH)
    left = tl.load(x + row * WIDTH + inner[None, :])
    right = tl.load(x + inner[:, None] * 64 + column)
    tl.store(out + row * 64 + column, tl.dot(left, right))


@triton.jit
def count(counter):
    tl.store(counter, tl.load(counter) + 1)


@triton.jit
def claim(counter, out):
    tl.store(out + tl.atomic_add(counter, 1), 100 + tl.program_id(0))


def optimizer_steps() -> None:
    weight = torch.randn(64, device="cuda", requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=0.1, capturable=True)
    for _ in range(3):
        optimizer.zero_grad()
        (weight * weight).sum().backward()
        optimizer.step()


def optimizer_in_a_graph() -> None:
    weight, graph = torch.ones(64, device="cuda", requires_grad=True), torch.cuda.CUDAGraph()
    optimizer = torch.optim.Adam([weight], lr=0.1, capturable=True)
    weight.grad = torch.ones_like(weight)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        optimizer.step()
    for _ in range(2):
        graph.replay()
    assert optimizer.state[weight]["step"].item() == 3
    assert torch.allclose(weight, torch.full_like(weight, 0.7), atol=1e-4)


def sampler_in_a_graph() -> None:
    logits, graph = torch.zeros(4, 100, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        top, at = (logits / 0.7).softmax(-1).topk(20)
        token = at.gather(1, torch.multinomial(top, 1))
    logits[:, 42] = 1000
    graph.replay()
    assert token.flatten().tolist() == [42] * 4


def transformed_functions_in_a_graph() -> None:
    x, graph = torch.ones(3, 4, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = torch.func.vmap(lambda a, b: (a * b).sum())(x, x)
        slope = torch.func.grad(lambda a: (a**2).sum())(x)
    x.fill_(2)
    graph.replay()
    assert rows.tolist() == [16] * 3
    assert slope.flatten().tolist() == [4] * 12


def main(what: str) -> None:
    x = torch.randn(100, device="cuda")
    out = torch.empty_like(x)
    for rows in (100, 99, 98):
        scale[(2,)](x, out, rows, 2.0, TILE=64)
    assert torch.allclose(out, 2 * x)
    if what == "optimizer":
        optimizer_steps()
        optimizer_in_a_graph()
        sampler_in_a_graph()
        transformed_functions_in_a_graph()
    if what == "large":
        wide = torch.randn(64, 2048, device="cuda", dtype=torch.bfloat16)
        product[(1,)](wide, torch.empty(64, 64, device="cuda"), WIDTH=2048, num_warps=8)
    if what == "stray":
        scale[(3,)](x, out, 200, 2.0, TILE=64)
    if what == "race":
        count[(3,)](torch.zeros(1, dtype=torch.int32, device="cuda"))
    if what == "order":
        counter, places, event = x.new_zeros(1).int(), x.new_zeros(3).int(), torch.cuda.Event()
        claim[(3,)](counter, places)
        event.record()
        done = event.query()
        print(*places.tolist(), done)
    if what == "raises":
        raise ValueError("of the script")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")

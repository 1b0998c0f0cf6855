"""Costs of the emulation, as ratios measured in one process: `python ci/bench_emulation.py`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cuda_on_cpu import emulated_cuda

# The kernel is one of the tests.
sys.path.append(str(Path(__file__).resolve().parents[1] / "packages" / "cuda_on_cpu" / "tests"))

_BATCH, _GROUPS, _WIDTH, _PAGE, _PAGES = 4, 4, 16, 16, 4
_HIDDEN = _GROUPS * _WIDTH


def _state(device: str) -> Any:
    torch.manual_seed(0)

    def weight(*shape: int) -> Tensor:
        return torch.randn(*shape).to(device)

    return SimpleNamespace(
        tokens=torch.tensor([1, 2, 3, 4]).to(device),
        embedding=weight(97, _HIDDEN),
        split=weight(3 * _HIDDEN, _HIDDEN),
        out=weight(_HIDDEN, _HIDDEN),
        head=weight(97, _HIDDEN),
        keys=weight(64, _PAGE, _GROUPS, _WIDTH),
        values=weight(64, _PAGE, _GROUPS, _WIDTH),
        slots=torch.tensor([17, 90, 140, 200]).to(device),
        table=torch.arange(1, 1 + _BATCH * _PAGES).view(_BATCH, _PAGES).to(device),
        lens=torch.tensor([2, 11, 13, 9], dtype=torch.int32).to(device),
        positions=torch.arange(_PAGES * _PAGE).to(device),
    )


def small_step(s: Any) -> Tensor:
    """A few dozen small operations: embedding, projections, a write into a paged store and a weighted lookup in it.

    Returns (4, 97) float32. Of a size where the cost of an operation is its overhead.
    """
    x = F.embedding(s.tokens, s.embedding)
    wanted, key, value = F.linear(x, s.split).view(_BATCH, 3, _GROUPS, _WIDTH).unbind(1)
    s.keys.view(-1, _GROUPS, _WIDTH)[s.slots] = key
    s.values.view(-1, _GROUPS, _WIDTH)[s.slots] = value
    keys = s.keys[s.table].flatten(1, 2)
    values = s.values[s.table].flatten(1, 2)
    scores = torch.einsum("bgw,bpgw->bgp", wanted, keys) * _WIDTH**-0.5
    scores = scores.masked_fill((s.positions >= s.lens[:, None])[:, None], float("-inf"))
    found = torch.einsum("bgp,bpgw->bgw", scores.softmax(-1), values)
    return F.linear(x + F.linear(found.flatten(1), s.out), s.head)


def microseconds(run: Callable[[], object], repeats: int = 7, seconds: float = 0.15) -> float:
    """Microseconds of processor time per call of `run`, the best of `repeats` rounds, since the machine may be shared.

    All rounds together take about `seconds`.
    """
    run()
    best = float("inf")
    for _ in range(repeats):
        count, start = 0, time.process_time()
        while time.process_time() - start < seconds / repeats:
            run()
            count += 1
        best = min(best, (time.process_time() - start) / count)
    return best * 1e6


def step_costs() -> dict[str, float]:
    """Microseconds of `small_step`: plain CPU eager, eager under emulation, replay."""
    with torch.no_grad():
        plain = _state("cpu")
        costs = {"plain CPU eager": microseconds(lambda: small_step(plain))}
        with emulated_cuda():
            emulated = _state("cuda")
            costs["eager under emulation"] = microseconds(lambda: small_step(emulated))
            graph = torch.cuda.CUDAGraph()
            start = time.process_time()
            with torch.cuda.graph(graph):
                small_step(emulated)
            costs["capture, once"] = (time.process_time() - start) * 1e6
            costs["replay"] = microseconds(graph.replay)
        costs["plain CPU eager"] = min(costs["plain CPU eager"], microseconds(lambda: small_step(plain)))
    return costs


def enter_cost() -> float:
    """Microseconds to enter and leave the context, after the first time."""

    def enter() -> None:
        with emulated_cuda():
            pass

    return microseconds(enter)


def triton_costs() -> dict[str, float] | None:
    """Microseconds of one launch of the interpreted kernel, stock and under emulation; None without triton."""
    try:
        from bench_kernel import launch, problem
    except ImportError:
        return None
    plain = problem("cpu")
    stock = microseconds(lambda: launch(plain), repeats=3, seconds=1.0)
    with emulated_cuda():
        emulated = problem("cuda")
        fast = microseconds(lambda: launch(emulated), repeats=3, seconds=1.0)
    return {"stock interpreter": stock, "under emulation": fast}


def main() -> None:
    """Print the costs and their ratios, measured in one thread."""
    torch.set_num_threads(1)
    costs = step_costs()
    plain = costs["plain CPU eager"]
    print(f"torch {torch.__version__}, one thread; microseconds per small step (ratio to plain CPU eager)")
    for name, cost in costs.items():
        print(f"  {name:24s}{cost:10.0f}   {cost / plain:6.2f}x")
    print(f"  {'enter and leave':24s}{enter_cost():10.0f}")
    triton = triton_costs()
    if triton is None:
        print("  triton is not installed")
        return
    print("microseconds per launch of an interpreted kernel (ratio to the stock interpreter)")
    for name, cost in triton.items():
        print(f"  {name:24s}{cost:10.0f}   {cost / triton['stock interpreter']:6.2f}x")


if __name__ == "__main__":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported
    main()

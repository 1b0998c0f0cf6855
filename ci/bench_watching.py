"""Costs of looking at accesses and races of a Triton kernel: `python ci/bench_watching.py`.

The kernel is that of `bench_kernel.py`, with rows of 1,024 and 16 positions. Policies are measured in turn.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

# The kernel is one of the tests.
sys.path.append(str(Path(__file__).resolve().parents[1] / "packages" / "cuda_on_cpu" / "tests"))

ROUNDS = 7


def main() -> None:
    """Print the milliseconds of processor time of a launch for each policy, the best of some rounds."""
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported
    import torch
    from bench_kernel import launch, problem

    from cuda_on_cpu import Policy, emulated_cuda

    torch.set_num_threads(1)
    policies: dict[str, Any] = {"default": Policy()}
    if "races" in Policy.__dataclass_fields__:
        policies = {"without races": Policy(races=False), "with races": Policy()}
    for pages in (64, 1):
        best = dict.fromkeys(policies, float("inf"))
        for _ in range(ROUNDS):
            for name, policy in policies.items():
                with torch.no_grad(), emulated_cuda(policy):
                    q, k, v, out, table, lens = problem("cuda")
                    table = torch.randint(1, len(k), (len(q), pages), dtype=torch.int32).to("cuda")
                    lens.fill_(pages * k.shape[1])
                    launch((q, k, v, out, table, lens))
                    start, count = time.process_time(), 0
                    while time.process_time() - start < 0.4:
                        launch((q, k, v, out, table, lens))
                        count += 1
                    best[name] = min(best[name], (time.process_time() - start) / count)
        print(
            f"{pages * 16} positions:", *(f"{name} {1e3 * cost:.2f} ms" for name, cost in best.items()), file=sys.stdout
        )


if __name__ == "__main__":
    main()

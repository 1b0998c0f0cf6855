"""One labelled program on a device: ``python on_a_device.py bounds|races INDEX right|wrong [TIMES]``.

It prints what the program left. ``compute-sanitizer --tool memcheck`` shows accesses out of bounds, with
``PYTORCH_NO_CUDA_MEMORY_CACHING=1``.
"""

from __future__ import annotations

import importlib
import sys

import torch

if __name__ == "__main__":
    kind, index, which = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    pair = importlib.import_module(f"{kind[:-1] if kind == 'races' else kind}_programs").PAIRS[index]
    kernel = getattr(pair, "right_kernel", None) if which == "right" else None
    seen = {}
    for _ in range(int((sys.argv[4:] or [1])[0])):
        given = getattr(pair, which)()
        (kernel or pair.kernel)[pair.grid if isinstance(pair.grid, tuple) else (pair.grid,)](
            *given, **dict(pair.options)
        )
        torch.cuda.synchronize()
        left = str([value.flatten()[:32].tolist() for value in given if isinstance(value, torch.Tensor)])
        seen[left] = seen.get(left, 0) + 1
    for left, times in seen.items():
        print(f"{times} x {left}")
    print(f"{pair.name}: {len(seen)} results")

"""SGLang's breakable CUDA graphs run in the kit's emulation: segments are captured, and a break runs eagerly between.

    python packages/servers/tests/bridges/proof_sglang_breakable.py

Replaced: ``weak_ref_tensor``, which is compiled in sglang-kernel, by a view that keeps its memory.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch

from attn_testkit_servers.bridges.sglang import imports
from cuda_on_cpu import emulated_cuda


def main() -> int:
    """Capture two segments around an eager part, change the inputs, and replay. Returns 0 if the numbers are right."""
    imports.prepare()
    weak = ModuleType("weak_ref_tensor")
    weak.weak_ref_tensors = lambda tensor: tensor.view(tensor.shape)  # type: ignore[attr-defined]
    package = "sglang.srt.model_executor.runner_backend_utils"
    sys.modules[f"{package}.weak_ref_tensor"] = weak
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import breakable_cuda_graph as of_sglang

    of_sglang.get_device_module = lambda: torch.cuda
    live = [2]

    @of_sglang.eager_on_graph  # type: ignore[untyped-decorator]
    def attention(rows: torch.Tensor, out: torch.Tensor) -> None:
        out[: live[0]] = rows[: live[0]] * 10

    with emulated_cuda(), torch.no_grad():
        ids, out = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
        graph, stream = of_sglang.BreakableCUDAGraph(), torch.cuda.Stream()
        with of_sglang.BreakableCUDAGraphCapture(graph, torch.cuda.graph_pool_handle(), stream):
            rows = ids + 1
            attention(rows, out)
            after = out + rows
        torch.cuda.synchronize()
        ids.copy_(torch.arange(4.0))
        live[0] = 3
        graph.replay()
        torch.cuda.synchronize()
        found = after.tolist()
    right = [11.0, 22.0, 33.0, 4.0]
    print("right:" if found == right else "WRONG:", found, "from", len(graph._segments), "segments")
    return int(found != right)


if __name__ == "__main__":
    sys.exit(main())

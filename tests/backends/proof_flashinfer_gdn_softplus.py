"""FlashInfer's GDN kernel of bf16 states returns NaN where a + dt_bias is above 88.

softplus is blended, not chosen: use * log(1 + exp(x)) + (1 - use) * x, and log(1 + exp(x)) is infinite there, so
0 * inf is added. The kernel of fp32 states has a branch. Needs a GPU, and FlashInfer with CuTe DSL.
"""

import math
import sys

import torch

if not torch.cuda.is_available():
    sys.exit("this proof needs a GPU: CuTe DSL has no interpreter")
from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose

WIDTH, VALUES = 128, (10.0, 30.0, 80.0, 88.0, 90.0, 200.0)


def decode(dtype: torch.dtype, argument: float) -> torch.Tensor:
    """One token of two requests, whose states were ones, with a decay of exp(-argument)."""
    row = torch.ones(2, 1, 2, WIDTH, device="cuda", dtype=torch.bfloat16)
    gate = torch.full((2, 1, 2), argument, device="cuda", dtype=torch.bfloat16)
    zero = torch.zeros(2, device="cuda")
    return gated_delta_rule_decode_pretranspose(
        row, row, row, None, zero, gate, zero, torch.zeros_like(gate), scale=1.0,
        initial_state=torch.ones(2, 2, WIDTH, WIDTH, device="cuda", dtype=dtype),
        initial_state_indices=torch.arange(2, dtype=torch.int32, device="cuda"),
    )[0]  # fmt: skip


right = True
for argument in VALUES:
    numbers = {dtype: decode(dtype, argument).float().mean().item() for dtype in (torch.float32, torch.bfloat16)}
    print(f"a + dt_bias = {argument:g}: " + ", ".join(f"{dtype} state: {out:g}" for dtype, out in numbers.items()))
    right = right and not math.isnan(numbers[torch.bfloat16])
place = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
print(f"{'right' if right else 'WRONG: states of bf16 give NaN'} ({place})")
sys.exit(not right)

"""A learnable sink far above all logits of a row gives NaN: its exponential is taken relative to the largest logit.

Needs a GPU of SM90, ``flash-attn-4`` and ``nvidia-cutlass-dsl[cu13]``.
"""

import sys

import torch

if not torch.cuda.is_available():
    sys.exit("this proof needs a GPU: CuTe DSL compiles the kernel for it")
from flash_attn.cute.interface import flash_attn_varlen_func

torch.manual_seed(0)
INT = {"dtype": torch.int32, "device": "cuda"}
q = torch.full((1, 4, 64), 8.0, dtype=torch.bfloat16, device="cuda")
v = torch.randn(1, 16, 1, 64, dtype=torch.bfloat16, device="cuda")
sink = torch.tensor([0.5, 1.0, 2.0, 3.0], device="cuda")
wrong = False
for size in (0.25, 1.0, 1.5, 16.0):
    out, lse = flash_attn_varlen_func(
        q,
        torch.full((1, 16, 1, 64), -size, dtype=torch.bfloat16, device="cuda"),
        v,
        cu_seqlens_q=torch.tensor([0, 1], **INT),
        max_seqlen_q=1,
        seqused_k=torch.tensor([3], **INT),
        page_table=torch.zeros(1, 1, **INT),
        softmax_scale=0.125,
        causal=True,
        learnable_sink=sink,
        return_lse=True,
    )
    # The three keys weigh nothing next to the sink, so the log-sum-exp is the sink and the output is 0.
    print(f"logits of {-64 * size:.0f}: log-sum-exp {[round(each, 3) for each in lse.flatten().tolist()]}")
    wrong |= not torch.allclose(lse.flatten(), sink, atol=1e-3)
print("WRONG: want the sinks, 0.5 to 3" if wrong else "right", f"({torch.cuda.get_device_name()}, {torch.__version__})")
sys.exit(wrong)

"""FlashInfer's XQA on SM90 takes -1e5 for the first running maximum: rows with smaller logits are wrong.

Needs a GPU of SM90. One key, so the output is its value, 1. The logit is given by one column of q and k.
"""

import sys

import torch

if not torch.cuda.is_available():
    sys.exit("this proof needs a GPU: the kernel is CUDA C++")
from flashinfer.decode import trtllm_batch_decode_with_kv_cache

WIDTH, PAGE = 128, 64
workspace = torch.zeros(128 << 20, dtype=torch.uint8, device="cuda")  # XQA's semaphores are zero at a launch


def decode(logit: float) -> float:
    """The output for one key with this logit."""
    q = torch.zeros(1, 1, WIDTH, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.zeros(1, 1, PAGE, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2))  # HND
    q[..., 0], k[..., 0], v[:] = 256.0, logit / 256.0, 1.0
    table = torch.zeros(1, 1, dtype=torch.int32, device="cuda")
    lens = torch.ones(1, dtype=torch.int32, device="cuda")
    out = trtllm_batch_decode_with_kv_cache(q, (k, v), workspace, table, lens, PAGE, bmm1_scale=1.0, backend="xqa")
    return out.float().mean().item()


right = True
for logit in (-100.0, -65536.0, -98304.0, -131072.0, -262144.0):
    found = decode(logit)
    print(f"logit {logit:.0f}: output {found:g}, expected 1")
    right = right and abs(found - 1) < 0.01
place = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
print(f"{'right' if right else 'WRONG: very negative logits'} ({place})")
sys.exit(not right)

"""SGLang's decode of DeepSeek V4 multiplies slot and stride in 32 bits: 2^31 elements into the pool it reads before it.

One key, so the output is that key. The pool is the second half of an allocation whose start is what a wrapped offset
reads. 9 GB of memory on a GPU; on a CPU nearly none is touched.
"""

import torch
from common import DEVICE, SGLANG, finish, load

WIDTH, HEADS, DTYPE = 512, 16, torch.float16
SLOT = 2**31 // WIDTH
memory = torch.empty(2**32 + WIDTH, dtype=DTYPE, device=DEVICE)
pool = memory[2**31 :].view(-1, WIDTH)
pool[SLOT] = 1.0
memory[:WIDTH] = -1.0  # where 2^31 wraps to
module = load("sglang.kernels.ops.attention.dsv4.unified_kv_kernels.paged_decode", SGLANG)
module._cu_count = lambda: 64  # AMD's package answers this question


class Query(torch.Tensor):
    """Says that it is on a GPU, which the host's part of the kernel asks."""

    is_cuda = True


q = torch.ones(1, HEADS, WIDTH, dtype=DTYPE, device=DEVICE).as_subclass(Query)
starts = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
no_sink, found = torch.full((HEADS,), -torch.inf, device=DEVICE), {}
for dtype in (torch.int32, torch.int64):
    slots = torch.tensor([SLOT, 0], dtype=dtype, device=DEVICE)
    out = module.sparse_attn_v4_paged_decode(q, pool, slots, starts, no_sink, 0.01, kv_splits=1)
    found[dtype] = out.float().mean().item()
    print(f"list of {dtype}: output {found[dtype]:+.0f}, expected +1")
finish(found[torch.int32] == 1.0, f"slot {SLOT} is not read at its place")

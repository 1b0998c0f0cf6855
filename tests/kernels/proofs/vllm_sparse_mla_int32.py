"""vLLM's Triton kernel of sparse MLA multiplies slot and stride in 32 bits: a slot 2^31 elements into the pool is read
before it.

One selected key, so the output is its value. The pool is the second half of an allocation whose start is what a wrapped
offset reads. 9 GB of memory on a GPU; on a CPU nearly none is touched.
"""

import torch
from common import DEVICE, VLLM, finish, load

WIDTH, VALUE, TOPK, HEADS = 576, 512, 128, 16
SLOT = 2**31 // WIDTH + 1
memory = torch.empty(2**32 + 2 * WIDTH, dtype=torch.float16, device=DEVICE)
pool = memory[2**31 : 2**31 + (SLOT + 1) * WIDTH].view(-1, 1, WIDTH)  # [slots, KV heads, width]
pool[SLOT] = 1.0
wrapped = SLOT * WIDTH - 2**32 + 2**31  # place in memory that the offset has in 32 bits
memory[wrapped : wrapped + WIDTH] = -1.0
module = load("vllm.v1.attention.ops.xpu_mla_sparse", VLLM)
q = torch.ones(1, HEADS, WIDTH, dtype=torch.float16, device=DEVICE)
selected = torch.full((1, 1, TOPK), -1, dtype=torch.int32, device=DEVICE)
selected[0, 0, 0] = SLOT
out = module.triton_bf16_mla_sparse_interface(q, pool, selected, WIDTH**-0.5)[0]
found = out.float().mean().item()
print(f"slot {SLOT}: output {found:+.0f}, expected +1")
finish(found == 1.0, f"slot {SLOT} is not read at its place")

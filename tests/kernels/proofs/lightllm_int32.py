"""LightLLM's GQA decode multiplies slot and stride in 32 bits: a slot 2^31 elements into the pool is read before it.

One key, so the output is its value. The pool is the second half of an allocation whose start is what a wrapped offset
reads. 9 GB of memory on a GPU; on a CPU nearly none is touched.
"""

import torch
from common import DEVICE, LIGHTLLM, finish, load

WIDTH, SLOT = 64, 2**31 // 64
memory = torch.empty(2**32 + WIDTH, dtype=torch.float16, device=DEVICE)
pool = memory[2**31 :].view(-1, 1, WIDTH)  # [slots, KV heads, width]
pool[SLOT] = 1.0
memory[:WIDTH] = -1.0  # where 2^31 wraps to
module = load("lightllm.models.llama.triton_kernel.gqa_decode_flashattention_nopad", LIGHTLLM)
q = torch.ones(1, 2, WIDTH, dtype=torch.float16, device=DEVICE)
request = torch.zeros(1, dtype=torch.int32, device=DEVICE)
length = torch.ones(1, dtype=torch.int32, device=DEVICE)
found = {}
for dtype in (torch.int32, torch.int64):
    out, table = torch.zeros_like(q), torch.full((1, 1), SLOT, dtype=dtype, device=DEVICE)
    module.gqa_decode_attention_fwd(q, pool, pool, out, table, request, length)
    found[dtype] = out.float().mean().item()
    print(f"table of {dtype}: output {found[dtype]:+.0f}, expected +1")
finish(found[torch.int32] == 1.0, f"slot {SLOT} is not read at its place")

"""FlagGems' decode of MLA multiplies slot and stride in 32 bits: a page 2^31 elements into the pool is read before it.

One key, so the output is its first 512 columns. The pool is the second half of an allocation whose start is what a
wrapped offset reads. 9 GB of memory on a GPU; on a CPU nearly none is touched.
"""

import torch
from common import DEVICE, FLAG_GEMS, finish, load

WIDTH, LATENT, PAGE, HEADS = 576, 512, 16, 64
page = -(-(2**31) // (WIDTH * PAGE))
first = page * PAGE * WIDTH  # 2^31 and a little
memory = torch.empty(2**31 + first + PAGE * WIDTH, dtype=torch.float16, device=DEVICE)
pool = memory[2**31 :].view(-1, WIDTH)
pool[page * PAGE] = 1.0
memory[first - 2**31 : first - 2**31 + WIDTH] = -1.0  # where the offset wraps to
kernel = load("flag_gems.fused.flash_mla", FLAG_GEMS).flash_mla_attn_kernel
q = torch.ones(1, HEADS, WIDTH, dtype=torch.float16, device=DEVICE)
length = torch.ones(1, dtype=torch.int32, device=DEVICE)
found = {}
for dtype in (torch.int32, torch.int64):
    out = torch.zeros(1, HEADS, LATENT, dtype=torch.float16, device=DEVICE)
    table = torch.full((1, 1), page, dtype=dtype, device=DEVICE)
    kernel[(1, 1)](
        q, pool, table, length, out, 0.01, HEADS, q.stride(0), q.stride(1), pool.stride(0), table.stride(0),
        *out.stride(), BLOCK_H=64, BLOCK_N=64, PAGE_SIZE=PAGE, HEAD_DIM_V=LATENT, HEAD_DIM=WIDTH, num_warps=8,
        num_stages=3,
    )  # fmt: skip
    found[dtype] = out.float().mean().item()
    print(f"table of {dtype}: output {found[dtype]:+.0f}, expected +1")
finish(found[torch.int32] == 1.0, f"page {page} is not read at its place")

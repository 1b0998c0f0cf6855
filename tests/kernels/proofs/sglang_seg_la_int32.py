"""SGLang's seg_la kernels multiply slot and stride in 32 bits: a state 2^31 elements into the pool is read before it.

Slots are far from each other where the pool holds all layers (``--enable-page-major-kv-layout``). 9 GB of memory on a
GPU; on a CPU nearly none is touched.
"""

import torch
from common import DEVICE, SGLANG, finish, load

WIDTH, STRIDE = 128, 2**20
SLOT = 2**31 // STRIDE
module = load("sglang.kernels.ops.attention.linear.seg_la", SGLANG)
memory = torch.empty(2**32 + STRIDE, dtype=torch.bfloat16, device=DEVICE)
pool = memory.as_strided((SLOT + 1, 1, WIDTH, WIDTH), (STRIDE, WIDTH * WIDTH, WIDTH, 1), 2**31)
memory[: WIDTH * WIDTH] = 0.0  # where 2^31 wraps to
pool[SLOT] = 0.0
memory[:WIDTH], pool[SLOT, 0, 0] = 2.0, 1.0
one = torch.ones(1, dtype=torch.int32, device=DEVICE)
starts = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
none = torch.zeros(1, 1, WIDTH, dtype=torch.bfloat16, device=DEVICE)
out = module.seg_la_fwd(
    torch.ones_like(none), none, none.clone(), pool, torch.zeros(1, device=DEVICE),
    module.SegLaMeta(1, 1, starts, one * SLOT, one, one), cache_indices=torch.zeros_like(one), softmax_scale=1.0,
)  # fmt: skip
found = out[0, 0, 0].item()
print(f"slot {SLOT} holds 1; decode reads {found:g}")
finish(found == 1.0, f"slot {SLOT} is not read at its place")

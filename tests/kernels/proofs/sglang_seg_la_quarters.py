"""SGLang's seg_la_fwd rounds each quarter of an output to the model's dtype in verify and prefill, and not in decode.

A quarter is 32 of the 128 columns of a key. The state makes them 257, -256, 0 and 0: rounded one by one to bf16 their
sum is 0, and decode reads 1.
"""

import torch
from common import DEVICE, SGLANG, finish, load

WIDTH = 128
module = load("sglang.kernels.ops.attention.linear.seg_la", SGLANG)


def step(state: torch.Tensor, rows: int) -> list[float]:
    """First number of each output row, of queries of ones; keys, values and slopes are zero."""
    one = torch.ones(1, dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, rows], dtype=torch.int32, device=DEVICE)
    none = torch.zeros(rows, 1, WIDTH, dtype=torch.bfloat16, device=DEVICE)
    scratch = torch.zeros(1, rows, 1, WIDTH, WIDTH, device=DEVICE)
    out = module.seg_la_fwd(
        torch.ones_like(none), none, none.clone(), state, torch.zeros(1, device=DEVICE),
        module.SegLaMeta(1, rows, starts, one, starts.diff(), one), caches=scratch if rows > 1 else None,
        cache_indices=torch.zeros_like(one), softmax_scale=1.0,
    )  # fmt: skip
    found: list[float] = out[:, 0, 0].float().tolist()
    return found


state = torch.zeros(2, 1, WIDTH, WIDTH, device=DEVICE)
state[1, 0, 0], state[1, 0, 1], state[1, 0, 32] = 256.0, 1.0, -256.0
decode, verify = step(state, 1), step(state, 2)
print(f"256 + 1 - 256: decode reads {decode}, a draft of two {verify}, expected 1 everywhere")
finish({*decode, *verify} == {1.0}, "a draft reads another output than a decode")

"""``seg_la_fwd`` of SGLang 0.5.23, the kernels of ``LightningAttentionBackend``: two findings.

1. Verify and prefill round each quarter of an output, 32 of 128 columns of a key, to the model's dtype before they add
   the quarters; decode does not: 257 - 256 + 0 + 0 is read as 0, and by decode as 1.
2. Offsets of slots are 32 bits wide. In a pool of more than 2^31 elements from its first to its last slot, which holds
   all layers with ``--enable-page-major-kv-layout``, a request reads and writes memory of another. Takes 10 GB.

No check of the kit is used. Without a GPU its emulation of CUDA runs the kernels. Ends with code 1 if a result is
wrong.
"""

import contextlib
import os
import sys

import torch

DEVICE, RUNS = "cuda", contextlib.nullcontext()
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    from attn_testkit_servers.bridges.sglang.imports import prepare
    from cuda_on_cpu import emulated_cuda

    prepare()
    RUNS = emulated_cuda()

WIDTH, STRIDE = 128, 2**20


def step(state: torch.Tensor, slot: int, rows: int) -> torch.Tensor:
    """Outputs [rows, WIDTH] of queries of ones for the state in ``slot``: keys, values and slopes are zero."""
    from sglang.kernels.ops.attention.linear.seg_la import SegLaMeta, seg_la_fwd

    one = torch.tensor([slot], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, rows], dtype=torch.int32, device=DEVICE)
    none = torch.zeros(rows, 1, WIDTH, dtype=torch.bfloat16, device=DEVICE)
    scratch = torch.zeros(1, rows, 1, WIDTH, WIDTH, device=DEVICE)
    out = seg_la_fwd(
        torch.ones_like(none), none, none.clone(), state, torch.zeros(1, device=DEVICE),
        SegLaMeta(1, rows, starts, one, starts.diff(), torch.ones(1, dtype=torch.int32, device=DEVICE)),
        caches=scratch if rows > 1 else None, cache_indices=torch.zeros_like(one), softmax_scale=1.0,
    )  # fmt: skip
    return out[:, 0, 0].float().cpu()


def quarters() -> bool:
    state = torch.zeros(2, 1, WIDTH, WIDTH, device=DEVICE)
    state[1, 0, 0], state[1, 0, 1], state[1, 0, 32] = 256.0, 1.0, -256.0
    decode, verify = step(state, 1, 1), step(state, 1, 2)
    print(f"256 + 1 - 256: decode reads {decode.tolist()}, a draft of two {verify.tolist()}")
    return decode.tolist() == [1.0] and verify.tolist() != [1.0, 1.0]


def far_slots() -> bool:
    slot = 2**31 // STRIDE + 1
    memory = torch.zeros(2**32 + 2 * STRIDE, dtype=torch.bfloat16, device=DEVICE)
    pool = memory.as_strided((slot + 1, 1, WIDTH, WIDTH), (STRIDE, WIDTH * WIDTH, WIDTH, 1), 2**31)
    pool[slot, 0, 0] = 1.0
    memory.as_strided((1, WIDTH, WIDTH), (0, WIDTH, 1), 2**31 + slot * STRIDE - 2**32)[0, 0] = 2.0
    read = step(pool, slot, 1)
    print(f"slot {slot}, {slot * STRIDE - 2**31} elements beyond 2^31, holds 1; decode reads {read.tolist()}")
    return read.tolist() != [1.0]


with torch.no_grad(), RUNS:
    wrong = [quarters()]
    if torch.cuda.is_available():
        wrong.append(far_slots())
print("WRONG" if any(wrong) else "right")
sys.exit(int(any(wrong)))

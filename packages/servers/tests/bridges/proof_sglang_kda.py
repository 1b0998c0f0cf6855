"""``chunk_kda`` of SGLang 0.5.23, its prefill of KDA, is wrong where a gate is -8 and there is no lower bound.

One head, 16 tokens, the same gate for every token and channel; compared with the loop over tokens in float64. No check
of the kit is used. Without a GPU its emulation of CUDA runs the kernels (Triton 3.8 or older, for block pointers).
Ends with code 1 if the result is wrong.
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

TOKENS, WIDTH = 16, 64


def worst(gate: float) -> float:
    """Largest error of an output over the largest output."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, TOKENS, 1, WIDTH).bfloat16() for _ in range(3))
    beta = torch.full((1, TOKENS, 1), 0.5)
    state, want = torch.zeros(WIDTH, WIDTH, dtype=torch.float64), []
    for t in range(TOKENS):
        one, key, value = (each[0, t, 0].double() for each in (q, k, v))
        one, key = (each / (each.square().sum() + 1e-6).sqrt() for each in (one, key))
        state = state * torch.tensor(gate, dtype=torch.float64).exp()
        state = state + torch.outer(0.5 * (value - state @ key), key)
        want.append(state @ one * WIDTH**-0.5)
    from sglang.kernels.ops.attention.fla.kda import chunk_kda  # asks at import what the device is

    found = chunk_kda(
        q=q.to(DEVICE), k=k.to(DEVICE), v=v.to(DEVICE), beta=beta.to(DEVICE),
        g=torch.full((1, TOKENS, 1, WIDTH), gate, device=DEVICE), scale=WIDTH**-0.5,
        initial_state=torch.zeros(2, 1, WIDTH, WIDTH, device=DEVICE),
        initial_state_indices=torch.ones(1, dtype=torch.int32, device=DEVICE), use_qk_l2norm_in_kernel=True,
        cu_seqlens=torch.tensor([0, TOKENS], dtype=torch.int32, device=DEVICE),
    )  # fmt: skip
    found = found[0] if isinstance(found, tuple) else found
    right = torch.stack(want)
    return float((found[0, :, 0].cpu().double() - right).abs().max() / right.abs().max())


with torch.no_grad(), RUNS:
    errors = {gate: worst(gate) for gate in (-5.0, -8.0, -20.0)}
for gate, error in errors.items():
    print(f"gate {gate}: off by {error:.2g} of the largest output")
wrong = errors[-5.0] < 0.02 < min(errors[-8.0], errors[-20.0])
print("WRONG: what a token wrote is read by another with the wrong decay" if wrong else "right")
sys.exit(int(wrong))

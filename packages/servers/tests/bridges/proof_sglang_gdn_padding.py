"""SGLang 0.5.23 writes the last slot of the pool for padded requests of a graph, if FlashInfer decodes GDN on SM90.

``FlashInferGDNKernel.decode`` gathers ``ssm_states[cache_indices]`` and stores what the kernel returns by the same
index. A padded request of a graph has the index -1 (``_replay_metadata``), which is the last slot to torch, and that
slot is a request's. Gather and scatter are SGLang's here; the kernel between them is a loop in torch, and real if CuTe
DSL is installed. No check of the kit is used. Ends with code 1 if the result is wrong.
"""

import contextlib
import importlib.util
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

SLOTS, HEADS, WIDTH = 5, 2, 128


def decode(q, k, v, state, A_log, a, dt_bias, b, **_):  # type: ignore[no-untyped-def]
    """``gated_delta_rule_decode_pretranspose`` for one token of each request, with as many key heads as value heads."""
    q, k = (torch.nn.functional.normalize(each[:, 0].float(), dim=-1) for each in (q, k))
    decay = torch.exp(-A_log.exp() * torch.nn.functional.softplus(a[:, 0].float() + dt_bias))
    state = state * decay[..., None, None]
    stored = torch.sigmoid(b[:, 0].float())[..., None] * (v[:, 0].float() - (state * k[..., None, :]).sum(-1))
    state = state + stored[..., None] * k[..., None, :]
    return (state * q[..., None, :]).sum(-1).to(v.dtype)[:, None] * WIDTH**-0.5, state


def changed(indices: list[int]) -> list[int]:
    """Slots that a decode of these indices changes, one index for each request."""
    from sglang.srt.layers.attention.linear.kernels import gdn_flashinfer

    if importlib.util.find_spec("cutlass") is None:
        gdn_flashinfer._flashinfer_gdn_available = True
        gdn_flashinfer._flashinfer_gated_delta_rule_decode = decode
        gdn_flashinfer._flashinfer_gated_delta_rule_mtp = gdn_flashinfer._flashinfer_chunk_gated_delta_rule = decode
    kernel = gdn_flashinfer.FlashInferGDNKernel()
    torch.manual_seed(0)
    states = torch.randn(SLOTS, HEADS, WIDTH, WIDTH, device=DEVICE)
    before, requests = states.clone(), len(indices)
    q, k, v = (torch.randn(1, requests, HEADS, WIDTH, device=DEVICE).bfloat16() for _ in range(3))
    a, b = (torch.randn(requests, HEADS, device=DEVICE).bfloat16() for _ in range(2))
    kernel.decode(
        q, k, v, a, b, A_log=torch.zeros(HEADS, device=DEVICE), dt_bias=torch.zeros(HEADS, device=DEVICE),
        ssm_states=states, cache_indices=torch.tensor(indices, dtype=torch.int32, device=DEVICE),
        query_start_loc=torch.arange(requests + 1, dtype=torch.int32, device=DEVICE),
    )  # fmt: skip
    return [slot for slot in range(SLOTS) if not torch.equal(states[slot], before[slot])]


with torch.no_grad(), RUNS:
    full, padded = changed([1, 2]), changed([1, 2, -1])
print(f"two requests in slots 1 and 2: slots {full} are written")
print(f"the same and a padded request: slots {padded} are written, of {SLOTS}")
wrong = full == [1, 2] and padded == [1, 2, SLOTS - 1]
print("WRONG: the last slot belongs to another request" if wrong else "right")
sys.exit(int(wrong))

"""vLLM's TritonMLAImpl allocates the log-sum-exp in the model's dtype, and ranks of a context are merged by it.

One key, so the log-sum-exp is its logit: one that fp16 cannot hold, so that the rank's part of the context is lost, and
on a GPU one that bf16 rounds.
"""

import torch
from common import DEVICE, VLLM, finish, load

LATENT, ROPE, PAGE = 512, 64, 16
module = load("vllm.v1.attention.ops.triton_decode_attention", VLLM)


def decode(dtype: torch.dtype, lse_dtype: torch.dtype, key: tuple[float, float]) -> float:
    """The log-sum-exp of one key that begins with these numbers, for a query of 256, 1, 0, 0, ..."""
    q = torch.zeros(1, 16, LATENT + ROPE, dtype=dtype, device=DEVICE)
    cache = torch.zeros(1, PAGE, 1, LATENT + ROPE, dtype=dtype, device=DEVICE)
    q[..., 0], q[..., 1], cache[..., :2] = 256.0, 1.0, torch.tensor(key)
    out, lse = q[..., :LATENT].clone(), torch.zeros(1, 16, dtype=lse_dtype, device=DEVICE)
    one, ints = torch.ones((), device=DEVICE), {"dtype": torch.int32, "device": DEVICE}
    module.decode_attention_fwd(
        q, cache, cache[..., :LATENT], out, lse, torch.zeros(1, 1, **ints), torch.ones(1, **ints),
        torch.zeros(1, 16, 1, LATENT + 1, device=DEVICE), 1, 1.0, PAGE, k_scale=one, v_scale=one, is_mla=True,
    )  # fmt: skip
    return lse[0, 0].item()


wrong, given = [], {torch.float16: (-258.0, 0.0), torch.bfloat16: (0.078125, 0.8125)}
for dtype in given if DEVICE == "cuda" else (torch.float16,):  # the interpreter's bf16 is no float
    logit = given[dtype][0] * 256 + given[dtype][1]
    said = {each: decode(dtype, each, given[dtype]) for each in (torch.float32, dtype)}
    print(f"{str(dtype)[6:]:9} logit {logit}: " + ", ".join(f"in {str(e)[6:]} {v}" for e, v in said.items()))
    wrong.append(said[torch.float32] == logit != said[dtype])
place = str(module.__file__).replace("ops/triton_decode_attention", "backends/mla/triton_mla")
with open(place) as source:
    used = "lse = torch.zeros(B, q_num_heads, dtype=q.dtype" in source.read()
finish(not (used and all(wrong)), "the log-sum-exp is rounded to the model's dtype")

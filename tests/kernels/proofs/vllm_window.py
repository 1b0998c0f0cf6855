"""vLLM's kernel_paged_attention_2d gives keys outside of the window a logit of -10000, and not -inf.

Where the logits inside lie below that, the keys outside take all of the weight. Values inside are -1, outside +1.
"""

import torch
from common import DEVICE, VLLM, finish, load

WIDTH, BLOCK, KEYS, WINDOW = 64, 16, 8, 2
module = load("vllm.v1.attention.ops.chunked_prefill_paged_decode", VLLM)


def output(logit: float) -> float:
    """Of one row whose keys all have this logit."""
    k_cache = torch.zeros(1, 1, WIDTH // 8, BLOCK, 8, dtype=torch.float16, device=DEVICE)
    k_cache[0, 0, 0, :, 0] = 1.0
    v_cache = torch.ones(1, 1, WIDTH, BLOCK, dtype=torch.float16, device=DEVICE)
    v_cache[..., KEYS - WINDOW : KEYS] = -1.0
    q = torch.zeros(1, 1, WIDTH, dtype=torch.float16, device=DEVICE)
    q[..., 0] = logit
    out, one = torch.zeros_like(q), torch.ones(1, device=DEVICE)
    ints = {"dtype": torch.int32, "device": DEVICE}
    module.chunked_prefill_paged_decode(
        q, q, q, out, "auto", k_cache, v_cache, block_table=torch.zeros(1, 1, **ints),
        query_start_loc=torch.tensor([0, 1], **ints), seq_lens=torch.tensor([KEYS], **ints), max_seq_len=KEYS,
        max_query_len=1, k_scale=one, v_scale=one, sliding_window=WINDOW, sm_scale=1.0,
    )  # fmt: skip
    return out.float().mean().item()


found = {logit: output(logit) for logit in (-100.0, -9984.0, -12032.0, -59904.0)}
for logit, value in found.items():
    print(f"logits {logit:9.0f}: output {value:+.2f}, expected -1")
finish(all(abs(value + 1) < 0.01 for value in found.values()), "keys outside of the window are attended")

"""vLLM's lightning_attention decays what is before a block of 256 rows once too few: the first row reads it undecayed.

One head, compared with the loop over tokens in float64. Prompts of one block are right; longer and continued ones are
off by a factor of e^slope.
"""

import torch
from common import DEVICE, VLLM, finish, load

WIDTH, SLOPE = 64, 0.5
GIVEN = {**VLLM, "vllm.v1.attention.backends.utils": {"PAD_SLOT_ID": -1}}
module = load("vllm.model_executor.layers.lightning_attn", GIVEN)
module.current_platform.is_cuda = lambda: False  # asked whether the GPU is older than Ampere


def off(tokens: int, begun: bool) -> float:
    """Error of the worst output of a prefill over the largest one."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, tokens, WIDTH) for _ in range(3))
    state = torch.randn(1, 1, WIDTH, WIDTH) * begun
    given = [each.to(DEVICE) for each in (q, k, v, torch.full((1, 1, 1), SLOPE))]
    found, _ = module.lightning_attention(*given, kv_history=state.to(DEVICE).clone())
    state, want = state[0, 0].double(), []
    for t in range(tokens):
        state = state * torch.tensor(-SLOPE, dtype=torch.float64).exp() + torch.outer(k[0, 0, t], v[0, 0, t]).double()
        want.append(q[0, 0, t].double() @ state)
    right = torch.stack(want)
    return float((found[0, 0].cpu().double() - right).abs().max() / right.abs().max())


errors = {
    "a prompt of 200 rows": off(200, False),
    "a prompt of 300 rows": off(300, False),
    "3 rows of a continued prompt": off(3, True),
}
for name, error in errors.items():
    print(f"{name}: off by {error:.2g} of the largest output")
finish(max(errors.values()) < 0.01, "what is before a block is read with one decay too few")

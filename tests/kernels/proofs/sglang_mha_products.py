"""SGLang's decode of MHA rounds each product of q and k to their dtype before it sums them in float32.

The first key is 0, and the second has products of 2070, 2115 and -4185, whose sum is 0. So both logits are 0, and the
output is the mean of the values +1 and -1. The same row twice, as two query heads, takes the grouped kernel, whose dot
does not round products.
"""

import torch
from common import DEVICE, SGLANG, finish, load

WIDTH = 64
module = load("sglang.kernels.ops.attention.decode_attention", SGLANG)


def decode(dtype: torch.dtype, heads: int) -> float:
    """The output of ``heads`` query heads of one KV head."""
    q, k, v = (torch.zeros(n, heads if n == 1 else 1, WIDTH, dtype=dtype, device=DEVICE) for n in (1, 2, 2))
    q[..., :3], k[1, 0, :3] = 45.0, torch.tensor([46.0, 47.0, -93.0])
    v[0], v[1] = 1.0, -1.0
    ints = {"dtype": torch.int32, "device": DEVICE}
    out, partial = torch.zeros_like(q), torch.zeros(1, heads, 1, WIDTH, device=DEVICE)
    module.decode_attention_fwd(
        q, k, v, out, torch.tensor([0, 2], **ints), torch.arange(2, **ints), partial,
        torch.zeros(1, heads, 1, device=DEVICE), torch.ones(1, **ints), 1, 1.0, 1.0, 1.0,
    )  # fmt: skip
    return out.float().mean().item()


wrong = []
for dtype in (torch.float16, torch.bfloat16) if DEVICE == "cuda" else (torch.float16,):  # bf16 is no float there
    one, two = decode(dtype, 1), decode(dtype, 2)
    print(f"{str(dtype)[6:]}: MHA {one:+.2f}, GQA of two heads {two:+.2f}, expected 0")
    wrong.append(abs(one) > 0.01 and abs(two) < 0.01)
finish(not any(wrong), "products of q and k are rounded before they are summed")

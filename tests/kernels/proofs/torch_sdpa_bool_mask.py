"""torch's scaled_dot_product_attention with cuDNN and a boolean mask: masked keys have a logit of -65504, and not -inf.

Allowed keys have a value of -1, masked ones a logit of 0 before the mask and a value of +1.
"""

import torch
from common import DEVICE, finish
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

CHOICES = {
    "default choice": list(SDPBackend.__members__.values())[1:],
    **{name.lower(): [kind] for name, kind in SDPBackend.__members__.items() if name not in ("ERROR", "OVERRIDEABLE")},
}


def output(dtype: torch.dtype, logit: float, masked_with: str, choice: str) -> str:
    q, k, v = (torch.zeros(1, 1, rows, 64, dtype=dtype, device=DEVICE) for rows in (1, 16, 16))
    seen = torch.arange(16, device=DEVICE)[None] < 8
    q[..., 0], k[:, :, :8, 0] = -256.0, -logit / 256.0
    v[:], v[:, :, :8] = 1.0, -1.0
    mask = (
        seen if masked_with == "bool" else torch.zeros(1, 16, dtype=dtype, device=DEVICE).masked_fill(~seen, -torch.inf)
    )
    try:
        if choice == "default choice":
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
        else:
            with sdpa_kernel(CHOICES[choice]):
                out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
    except RuntimeError:
        return "does not take it"
    return f"{out.float().mean().item():+.2f}"


wrong = []
print(f"cuDNN {torch.backends.cudnn.version()}; expected -1.00 everywhere")
for dtype in (torch.bfloat16, torch.float16):
    for choice in CHOICES:
        for masked_with in ("bool", "-inf"):
            said = [output(dtype, logit, masked_with, choice) for logit in (-100.0, -65024.0, -66048.0, -70144.0)]
            print(f"{str(dtype)[6:]:9} {choice:20} mask of {masked_with:5}", *said)
            wrong += [choice] if any(each not in ("-1.00", "does not take it") for each in said) else []
finish(not wrong, f"masked keys are attended: {', '.join(sorted(set(wrong)))}")

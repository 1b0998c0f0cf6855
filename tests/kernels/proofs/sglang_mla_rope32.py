"""SGLang's decode of MLA takes latent rows of 512 + 64 and 256 + 32, and does not compile for 512 + 32 or 256 + 64."""

import torch
from common import DEVICE, SGLANG, finish, load

module = load("sglang.kernels.ops.attention.decode_attention", SGLANG)


def outcome(latent: int, rope: int) -> str:
    """One key, so the output is its first ``latent`` columns."""
    q = torch.ones(1, 16, latent + rope, dtype=torch.float16, device=DEVICE)
    pool = torch.full((4, 1, latent + rope), 0.5, dtype=torch.float16, device=DEVICE)
    out = torch.zeros(1, 16, latent, dtype=torch.float16, device=DEVICE)
    partial = torch.zeros(1, 16, 1, latent, device=DEVICE)
    ints = {"dtype": torch.int32, "device": DEVICE}
    try:
        module.decode_attention_fwd(
            q, pool, pool[..., :latent], out, torch.tensor([0, 1], **ints), torch.ones(1, **ints), partial,
            partial[..., 0].contiguous(), torch.ones(1, **ints), 1, 1.0, 1.0, 1.0, has_mla=True,
        )  # fmt: skip
    except Exception as error:
        return f"{type(error).__name__}: {str(error.__cause__ or error).splitlines()[-1]}"
    return "right" if bool((out == 0.5).all()) else "wrong numbers"


found = {shape: outcome(*shape) for shape in ((512, 64), (256, 32), (512, 32), (256, 64))}
for shape, said in found.items():
    print(f"{shape[0]} + {shape[1]}: {said}")
finish(set(found.values()) == {"right"}, "a shape is not taken")

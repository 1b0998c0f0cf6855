"""vLLM's decode of MLA with one query head takes the kernel of MHA, which multiplies and sums q.k in the dtype of both.

The same row twice, as two heads, takes the grouped kernel, whose dot sums in float32. ``allowed`` is what may come of
probabilities and outputs that are rounded once each, and of nothing else. ``narrow`` computes in float64, and rounds
products and pairwise sums of q.k to the dtype: it is off as the kernel is.
"""

import torch
from common import DEVICE, VLLM, finish, load

LATENT, ROPE, KEYS, PAGE, SCALE = 512, 64, 32, 16, 192**-0.5
module = load("vllm.v1.attention.ops.triton_decode_attention", VLLM)


def attend(logits: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(logits * SCALE, -1) @ v


def narrow(terms: torch.Tensor) -> torch.Tensor:
    """The sum of [keys, n] numbers in their dtype, by halves."""
    while terms.shape[1] > 1:
        terms = torch.nn.functional.pad(terms, (0, terms.shape[1] % 2))
        terms = terms[:, ::2] + terms[:, 1::2]
    return terms[:, 0].double()


def worst(dtype: torch.dtype, heads: int, large: float) -> tuple[float, float]:
    """How far the kernel is off, and how far narrow sums are, as parts of what is allowed."""
    torch.manual_seed(0)
    row = (torch.randn(LATENT + ROPE) * large).to(dtype)
    pool = torch.randn(KEYS // PAGE, PAGE, 1, LATENT + ROPE).to(dtype)
    q = row.repeat(1, heads, 1).to(DEVICE)
    out, lse = torch.zeros(1, heads, LATENT, dtype=dtype, device=DEVICE), torch.zeros(1, heads, device=DEVICE)
    cache, one = pool.to(DEVICE), torch.ones((), device=DEVICE)
    module.decode_attention_fwd(
        q, cache, cache[..., :LATENT], out, lse, torch.arange(KEYS // PAGE, dtype=torch.int32, device=DEVICE)[None],
        torch.tensor([KEYS], dtype=torch.int32, device=DEVICE), torch.zeros(1, heads, 1, LATENT + 1, device=DEVICE), 1,
        SCALE, PAGE, k_scale=one, v_scale=one, is_mla=True,
    )  # fmt: skip
    keys = pool.view(KEYS, -1)
    v, logits = keys[:, :LATENT].double(), keys.double() @ row.double()
    right, weights = attend(logits, v), torch.softmax(logits * SCALE, -1)
    allowed = torch.finfo(dtype).eps * (weights @ v.abs() + right.abs())
    return tuple(
        ((each - right).abs() / allowed).max().item()
        for each in (out[0, 0].double().cpu(), attend(narrow(keys * row), v))
    )


late = []
# Stock Triton's interpreter has no dot of bfloat16.
for dtype in (torch.float16, torch.bfloat16) if DEVICE == "cuda" else (torch.float16,):
    for large in (1.0, 4.0, 16.0):
        one, narrowed = worst(dtype, 1, large)
        two, _ = worst(dtype, 2, large)
        print(f"{str(dtype)[6:]:9} q * {large:4.0f}: one head {one:6.2f} of the limit, two heads {two:5.2f}; "
              f"sums in the dtype: {narrowed:6.2f}")  # fmt: skip
        late += [one > 1]
finish(not any(late), "q.k is multiplied and summed in the dtype of q and k")

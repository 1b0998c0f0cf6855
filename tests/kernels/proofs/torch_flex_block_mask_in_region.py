"""FlexAttention whose block mask is made in the same compiled region: requests get the first one's number of blocks.

A request with more KV blocks than the first one loses keys. Made outside of the region the same mask is right.
"""

import torch
from common import DEVICE, finish
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK, SLOTS = 128, 384


def block_mask(lens: torch.Tensor) -> BlockMask:
    """Keys before ``lens`` [bs] of each request."""

    def visible(request, head, row, key):  # type: ignore[no-untyped-def]
        return key < lens[request]

    counts = ((lens + BLOCK - 1) // BLOCK)[:, None, None].contiguous()
    order = torch.arange(SLOTS // BLOCK, dtype=torch.int32, device=lens.device).expand(len(lens), 1, 1, -1).contiguous()
    return BlockMask.from_kv_blocks(
        counts, order, BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(1, SLOTS), compute_q_blocks=False
    )


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask) -> torch.Tensor:
    return flex_attention(q, k, v, block_mask=mask, kernel_options={"FORCE_USE_FLEX_ATTENTION": True})


def region(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
    return attend(q, k, v, block_mask(lens))


torch.manual_seed(0)
wrong = []
for counts in ((300, 13), (13, 300)):
    q, k, v = (torch.randn(2, 2, n, 64, device=DEVICE) for n in (1, SLOTS, SLOTS))
    lens = torch.tensor(counts, device=DEVICE, dtype=torch.int32)
    hidden = torch.arange(SLOTS, device=DEVICE) >= lens[:, None]
    logits = (q.double() @ k.double().mT / 8).masked_fill(hidden[:, None, None], -torch.inf)
    expected = logits.softmax(-1) @ v.double()
    with torch.no_grad():
        outputs = {
            "mask and attention in one region": torch.compile(region)(q, k, v, lens),
            "the same region, traced and run eagerly": torch.compile(region, backend="aot_eager")(q, k, v, lens),
            "mask made outside": torch.compile(attend)(q, k, v, block_mask(lens)),
        }
    for name, out in outputs.items():
        errors = (out.double() - expected).abs().amax((1, 2, 3)).tolist()
        print(f"requests of {counts} keys, {name:40} largest errors {errors[0]:.4f} {errors[1]:.4f}")
        wrong += [name] if max(errors) > 0.02 else []
finish(not wrong, ", ".join(dict.fromkeys(wrong)))

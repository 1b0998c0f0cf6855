"""FlashMLA's dense decode over an FP8 pool rounds probabilities to e4m3 as they are: all below 2^-10 become 0.

Needs a GPU of SM90 and vLLM's wheel, whose Python is not imported. One key has the logit 7, and 63 others have 0, each
with the weight exp(-7), 0.0009. Their values are 1 in one column, so that column of the output is their share.
"""

import importlib.util
import math
import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():
    sys.exit("this proof needs a GPU: the kernel is CUDA C++")
found = importlib.util.find_spec("vllm")
if found is None or not found.submodule_search_locations:
    sys.exit("this proof needs vLLM's wheel")
(library,) = Path(found.submodule_search_locations[0]).glob("_flashmla_extension_C.*so")
torch.ops.load_library(library)
kernels = torch.ops._flashmla_extension_C

HEADS, KEYS, WIDTH, FP8 = 16, 64, 576, torch.float8_e4m3fn
q, keys = torch.zeros(1, 1, HEADS, WIDTH), torch.zeros(1, KEYS, 1, WIDTH)
q[..., 0], keys[:, 0, :, 0], keys[:, 1:, :, 1] = 1.0, 7.0, 1.0
lens, table = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([KEYS], [[0]]))
one = torch.ones(1, device="cuda")
schedule, splits = kernels.get_mla_decoding_metadata_dense_fp8(lens, HEADS, 1)
out, _ = kernels.fwd_kvcache_mla_fp8(
    q.to(FP8).cuda(), keys.to(FP8).cuda(), 512, lens, table, 1.0, True, schedule, splits, one, one
)
share = (KEYS - 1) * math.exp(-7) / (1 + (KEYS - 1) * math.exp(-7))
seen = out[..., 1].float().mean().item()
print(f"share of the 63 small weights: {seen:g}, expected {share:.4f}")
right = abs(seen - share) < share / 8
place = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
print(f"{'right' if right else 'WRONG: small weights vanish'} ({place})")
sys.exit(not right)

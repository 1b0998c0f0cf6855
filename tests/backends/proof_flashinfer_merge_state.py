"""FlashInfer's merge_state does not launch for 64 heads of 512, as DeepSeek has 128: a row's heads are one block.

Needs a GPU. Two equal states, so the merged one is the same.
"""

import sys

import torch

if not torch.cuda.is_available():
    sys.exit("this proof needs a GPU: the kernel is CUDA C++")
from flashinfer.cascade import merge_state

right = True
for heads, width in ((32, 512), (64, 512), (64, 128), (128, 128), (128, 64), (256, 64)):
    v = torch.randn(4, heads, width, device="cuda").bfloat16()
    s = torch.zeros(4, heads, device="cuda")
    try:
        merged, _ = merge_state(v, s, v, s)
        torch.cuda.synchronize()
        said = "right" if torch.allclose(merged.float(), v.float(), atol=0.02) else "wrong numbers"
    except RuntimeError as error:
        said = str(error).splitlines()[0]
    print(f"{heads} heads of {width}: {said}")
    right = right and said == "right"
place = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
print(f"{'right' if right else 'WRONG: many heads do not launch'} ({place})")
sys.exit(not right)

"""vLLM's kernel_unified_attention and context_attention_fwd read block numbers behind the row of the last request.

A tile has 32 keys and a block 16, so the last tile of a request with an odd number of blocks has one block more than
the table needs. context_attention_fwd masks that load only where MASK_BLOCK_TABLE is set, which its main kernel does
not do. The table ends at a page of memory that nobody may read, and the program that reads it dies.
"""

import ctypes
import mmap
import os
import subprocess
import sys

import torch

os.environ["TRITON_INTERPRET"] = "1"  # on a machine with a GPU, too: a page of a device cannot be closed
from common import VLLM, finish, load

BLOCK, BLOCKS, WIDTH = 16, int(sys.argv[1]) if len(sys.argv) > 1 else 0, 64
KERNEL = sys.argv[2] if len(sys.argv) > 2 else ""


def table_at_the_end(blocks: int) -> torch.Tensor:
    """[1, blocks] int32 in front of a page that may not be read."""
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
    numbers = torch.frombuffer(memory, dtype=torch.int32, count=blocks, offset=mmap.PAGESIZE - 4 * blocks)
    return numbers.copy_(torch.arange(blocks)).view(1, blocks)


if BLOCKS:
    keys, one, lens = BLOCKS * BLOCK, torch.ones(1), torch.tensor([BLOCKS * BLOCK], dtype=torch.int32)
    starts, table = torch.tensor([0, 1], dtype=torch.int32), table_at_the_end(BLOCKS)
    q = torch.ones(1, 1, WIDTH, dtype=torch.float16)
    out = torch.empty_like(q)
    if KERNEL == "unified":
        module = load("vllm.v1.attention.ops.triton_unified_attention", VLLM)
        kv = torch.ones(BLOCKS, BLOCK, 1, WIDTH, dtype=torch.float16)
        module.unified_attention(
            q, kv, kv, out, starts, 1, lens, keys, 0.125, True, (-1, -1), table, 0, None, one, one,
        )  # fmt: skip
    else:
        module = load("vllm.v1.attention.ops.prefix_prefill", VLLM)
        k, v = torch.ones(BLOCKS, 1, 1, BLOCK, WIDTH).half(), torch.ones(BLOCKS, 1, WIDTH, BLOCK).half()
        module.context_attention_fwd(q, q, q, out, "auto", k, v, table, starts, lens, keys, 1, one, one)
    print(out.mean().item())
    sys.exit()
ended = {}
for kernel in ("unified", "prefix"):
    for blocks in (3, 4):
        child = subprocess.run([sys.executable, __file__, str(blocks), kernel], capture_output=True, check=False)
        ended[kernel, blocks] = child.returncode
for (kernel, blocks), code in ended.items():
    print(f"{kernel}, a request of {blocks} blocks, and a table of {blocks}: the program ends with {code}, expected 0")
finish(not any(ended.values()), "the block number behind the end of the table is read")

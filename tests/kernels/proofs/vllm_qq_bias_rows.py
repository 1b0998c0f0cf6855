"""vLLM's kernel_unified_attention reads rows of qq_bias behind those of the request.

A program has 16 rows where a KV head has one query head. load_qq_bias_tile masks columns, and no rows: of a draft of 4
rows, 12 more are read. The bias ends at a page of memory that nobody may read, and the program that reads it dies.
The request has no prefix: for one, Triton's interpreter would read before the bias, too, since it takes `a and b` of
two blocks for b.
"""

import ctypes
import mmap
import os
import subprocess
import sys

import torch

os.environ["TRITON_INTERPRET"] = "1"  # on a machine with a GPU, too: a page of a device cannot be closed
from common import VLLM, finish, load

BLOCK, ROWS, WIDTH = 16, int(sys.argv[1]) if len(sys.argv) > 1 else 0, 64


def bias_at_the_end(rows: int) -> torch.Tensor:
    """[rows, rows] float32 in front of a page that may not be read."""
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
    count = rows * rows
    numbers = torch.frombuffer(memory, dtype=torch.float32, count=count, offset=mmap.PAGESIZE - 4 * count)
    return numbers.zero_().view(rows, rows)


if ROWS:
    one, lens = torch.ones(1), torch.tensor([ROWS], dtype=torch.int32)
    starts, table = torch.tensor([0, ROWS], dtype=torch.int32), torch.arange(2, dtype=torch.int32).view(1, 2)
    q, kv = torch.ones(ROWS, 1, WIDTH, dtype=torch.float16), torch.ones(2, BLOCK, 1, WIDTH, dtype=torch.float16)
    out = torch.empty_like(q)
    module = load("vllm.v1.attention.ops.triton_unified_attention", VLLM)
    module.unified_attention(
        q, kv, kv, out, starts, ROWS, lens, ROWS, 0.125, True, (-1, -1), table, 0, None, one, one,
        qq_bias=bias_at_the_end(ROWS),
    )  # fmt: skip
    print(out.mean().item())
    sys.exit()
ended = {}
for rows in (4, 16):
    ended[rows] = subprocess.run([sys.executable, __file__, str(rows)], capture_output=True, check=False).returncode
for rows, code in ended.items():
    print(f"a draft of {rows} rows, and a bias of as many: the program ends with {code}, expected 0")
finish(not any(ended.values()), "rows of the bias behind those of the request are read")

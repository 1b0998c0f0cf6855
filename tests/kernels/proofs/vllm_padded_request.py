"""vLLM's kernel_paged_attention_2d leaves out requests of several rows, and not those of none: they store a row.

A full CUDA graph pads its batch with requests that have neither rows nor keys. Their first row is the one behind the
last real row: behind the output, if real rows fill the graph.
"""

import torch
from common import DEVICE, VLLM, finish, load

HEADS, WIDTH, BLOCK, ROWS = 2, 64, 16, 2
module = load("vllm.v1.attention.ops.chunked_prefill_paged_decode", VLLM)


def tensor(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


k_cache = torch.zeros(2, HEADS, WIDTH // 8, BLOCK, 8, dtype=torch.float16, device=DEVICE)
v_cache = torch.zeros(2, HEADS, WIDTH, BLOCK, dtype=torch.float16, device=DEVICE)
rows = torch.ones(ROWS, HEADS, WIDTH, dtype=torch.float16, device=DEVICE)
memory = torch.full((ROWS + 1, HEADS, WIDTH), 7.0, dtype=torch.float16, device=DEVICE)
one = torch.ones(1, device=DEVICE)
module.chunked_prefill_paged_decode(
    rows, rows, rows, memory[:ROWS], "auto", k_cache, v_cache, block_table=tensor(1, 0).view(2, 1),
    query_start_loc=tensor(0, ROWS, ROWS), seq_lens=tensor(ROWS, 0), max_seq_len=ROWS, max_query_len=ROWS,
    k_scale=one, v_scale=one,
)  # fmt: skip
print(f"output rows: {memory[:ROWS, 0, 0].tolist()}, expected [1.0, 1.0]")
print(f"the row behind the output: {memory[ROWS, 0, 0].item()}, was 7.0")
finish(bool((memory[ROWS] == 7.0).all()), "a request without rows stored one, behind the output")

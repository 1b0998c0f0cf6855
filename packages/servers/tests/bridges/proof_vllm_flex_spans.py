"""vLLM's FlexAttention leaves out pages of a bidirectional span: its block mask removes every page after a row.

A prompt of 64 tokens in pages 1 to 4, whose tokens 4 to 40 are an image. Rows 4 to 15 see keys up to 40, in pages 1 to
3, as vLLM's own mask function says; the block mask lists page 1 for their tile. Needs vLLM, and no GPU.
"""

import sys

import torch
from vllm.v1.attention.backends import flex_attention
from vllm.v1.attention.backends.flex_attention import FlexAttentionMetadata, physical_to_logical_mapping

TOKENS, PAGE, PAGES, IMAGE = 64, 16, 8, (4, 40)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":  # it pins memory, which needs a GPU
    flex_attention.async_tensor_h2d = lambda data, device: torch.as_tensor(data, device=device)
ints = {"dtype": torch.int32, "device": DEVICE}
table, lens = torch.tensor([[1, 2, 3, 4]], **ints), torch.tensor([TOKENS], **ints)


def pages_of_tiles(images: dict[int, list[tuple[int, int]]] | None) -> tuple[list[list[int]], list[list[int]]]:
    """Pages that the block mask lists for each tile of 16 rows, and those that the mask function lets a row see."""
    starts = torch.tensor([0, TOKENS], dtype=torch.int32)
    metadata = FlexAttentionMetadata(
        causal=True, num_actual_tokens=TOKENS, max_query_len=TOKENS, query_start_loc=starts.to(DEVICE),
        query_start_loc_cpu=starts, max_seq_len=TOKENS, seq_lens=lens, block_table=table,
        slot_mapping=torch.arange(PAGE, PAGE + TOKENS, device=DEVICE), total_cache_tokens=PAGES * PAGE, block_size=PAGE,
        max_possible_sequence_length=TOKENS, num_reqs=1,
        physical_to_logical=physical_to_logical_mapping(table, lens, PAGE, PAGES),
        decode_offset=torch.zeros(1, **ints), num_blocks_per_seq=torch.tensor([TOKENS // PAGE], **ints),
        persistent_kv_indices=torch.zeros(TOKENS // PAGE, TOKENS, **ints),
        persistent_kv_num_blocks=torch.zeros(TOKENS // PAGE, **ints),
        persistent_doc_ids=torch.zeros(TOKENS, **ints), mm_prefix_range=images,
    )  # fmt: skip
    mask = metadata._build_block_mask_direct()
    rows, keys = torch.arange(TOKENS, device=DEVICE)[:, None], torch.arange(PAGES * PAGE, device=DEVICE)[None]
    zero = torch.zeros((), **ints)
    seen = metadata.mask_mod(zero, zero, rows, keys).view(TOKENS // PAGE, PAGE, PAGES, PAGE).any(3).any(1)
    counts, listed = mask.kv_num_blocks[0, 0].tolist(), mask.kv_indices[0, 0].tolist()
    return [sorted(each[:n]) for each, n in zip(listed, counts, strict=True)], [
        row.nonzero()[:, 0].tolist() for row in seen
    ]


wrong = False
for name, images in (("no image", None), (f"an image of tokens {IMAGE}", {0: [IMAGE]})):
    for tile, (listed, seen) in enumerate(zip(*pages_of_tiles(images), strict=True)):
        missing = sorted(set(seen) - set(listed))
        print(f"{name}, rows from {tile * PAGE}: the mask lists pages {listed}, rows see {seen}")
        wrong = wrong or bool(missing)
print("WRONG: pages that a row of the span sees are not listed" if wrong else "right")
sys.exit(int(wrong))

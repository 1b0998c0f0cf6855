"""The plan of the next step changes the step that is queued: all plans of a FlashInfer wrapper share one pinned buffer.

Needs a GPU. A step of two requests of 1,032 keys is queued behind other work; then the next step is planned. A server
that overlaps steps, such as vLLM with asynchronous scheduling, does this on purpose.
"""

import sys

import torch

if not torch.cuda.is_available():
    sys.exit("this proof needs a GPU: the plan is C++, and its copy is asynchronous")
from flashinfer import BatchDecodeWithPagedKVCacheWrapper

PAGE, HEADS, KV_HEADS, WIDTH, MOST = 32, 8, 8, 128, 33
kv = torch.randn(2 * MOST, 2, PAGE, KV_HEADS, WIDTH, device="cuda").bfloat16()
q = torch.randn(2, HEADS, WIDTH, device="cuda").bfloat16()
numbers = {"dtype": torch.int32, "device": "cuda"}
wrapper = BatchDecodeWithPagedKVCacheWrapper(
    torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), use_cuda_graph=True,
    paged_kv_indptr_buffer=torch.zeros(3, **numbers), paged_kv_indices_buffer=torch.zeros(2 * MOST, **numbers),
    paged_kv_last_page_len_buffer=torch.zeros(2, **numbers),
)  # fmt: skip
page_ids = torch.arange(2 * MOST, **numbers)


def plan(*lens: int) -> None:
    pages = [-(-keys // PAGE) for keys in lens]
    indptr = torch.tensor([0, pages[0], sum(pages)], dtype=torch.int32).pin_memory()
    last_page_len = torch.tensor([(keys - 1) % PAGE + 1 for keys in lens], dtype=torch.int32).pin_memory()
    wrapper.plan(
        indptr, page_ids[: sum(pages)], last_page_len, HEADS, KV_HEADS, WIDTH, PAGE, q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )  # fmt: skip


plan(1032, 1032)
expected = wrapper.run(q, kv)
torch.cuda.synchronize()
right = True
for fresh in (True, False):
    torch.cuda._sleep(1_000_000_000)  # the device is busy for about half a second
    plan(1032, 1032)
    out, kept = wrapper.run(q, kv), wrapper._pin_memory_int_workspace_buffer
    if fresh:
        wrapper._pin_memory_int_workspace_buffer = torch.empty_like(kept, pin_memory=True)
    plan(1032, 1)
    torch.cuda.synchronize()
    worst = (out - expected).abs().amax(dim=(1, 2)).tolist()
    print(f"{'a pinned buffer for each plan' if fresh else 'one pinned buffer'}: largest differences {worst}")
    right = right and not any(worst)
place = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
print(f"{'right' if right else 'WRONG: a queued step used the plan of the next one'} ({place})")
sys.exit(not right)

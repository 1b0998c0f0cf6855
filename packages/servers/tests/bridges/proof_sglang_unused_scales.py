"""``TritonAttnBackend`` of SGLang 0.5.23 multiplies by a checkpoint's scales that its pool never divided by.

One request of one token whose value is 1, so the output is 1 whatever the scales are. The pool has the model's dtype,
as with ``--kv-cache-dtype bf16``. Layer, scales, pool and forward are SGLang's own; only the metadata of a step is made
by hand. No check of the kit is used. Without a GPU its emulation of CUDA runs the kernel. Ends with code 1 if a result
is wrong.
"""

import contextlib
import os
import sys
from types import SimpleNamespace

import torch

DEVICE, RUNS = "cuda", contextlib.nullcontext()
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    from attn_testkit_servers.bridges.sglang.imports import prepare
    from cuda_on_cpu import emulated_cuda

    prepare()
    RUNS = emulated_cuda()

WIDTH, SLOT = 64, 5


def decode(scale: float, dtype: torch.dtype) -> tuple[float, float]:
    """A number of V in the pool, and of the output, after one decode with ``k_scale`` and ``v_scale`` of ``scale``."""
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    layer = RadixAttention(1, WIDTH, WIDTH**-0.5, 1, 0)
    method = BaseKVCacheMethod(None)
    method.create_weights(layer)
    layer.k_scale.fill_(scale)  # what loading a checkpoint does
    layer.v_scale.fill_(scale)
    method.process_weights_after_loading(layer)
    pool = MHATokenToKVPool(
        size=16, page_size=1, dtype=dtype, head_num=1, head_dim=WIDTH, layer_num=1, device=DEVICE,
        enable_memory_saver=False, enable_alt_stream=False,
    )  # fmt: skip
    one = torch.ones(1, dtype=torch.int32, device=DEVICE)
    metadata = SimpleNamespace(
        swa_out_cache_loc=None, kv_indptr=torch.tensor([0, 1], dtype=torch.int32, device=DEVICE), kv_indices=one * SLOT,
        attn_logits=torch.zeros(1, 1, 1, WIDTH, device=DEVICE), swa_attn_logits=None, num_kv_splits=one,
        attn_lse=torch.zeros(1, 1, 1, device=DEVICE), lean_Mp=None, lean_Lp=None, lean_Op=None, lean_locks=None,
        uneven_batch=False,
    )  # fmt: skip
    backend = SimpleNamespace(
        forward_metadata=metadata, token_to_kv_pool=pool, is_draft_runner=False, use_mla=False, dcp_size=1,
        enable_deterministic=True, max_kv_splits=1, use_pdl=False, page_size=1,
        decode_attention_fwd=decode_attention_fwd,
    )  # fmt: skip
    backend._set_kv_buffer = TritonAttnBackend._set_kv_buffer.__get__(backend)
    batch = SimpleNamespace(
        out_cache_loc=torch.tensor([SLOT], device=DEVICE), out_cache_loc_is_physical=False, spec_info=None, batch_size=1
    )
    row = torch.ones(1, 1, WIDTH, dtype=torch.bfloat16, device=DEVICE)
    out = TritonAttnBackend.forward_decode(backend, row, row.clone(), row.clone(), layer, batch)
    return pool.get_value_buffer(0)[SLOT, 0, 0].float().item(), out.flatten()[0].float().item()


found = {}
with torch.no_grad(), RUNS:
    for dtype, scale in ((torch.bfloat16, 1.0), (torch.float8_e4m3fn, 0.5), (torch.bfloat16, 0.5)):
        stored, read = found[dtype, scale] = decode(scale, dtype)
        print(f"pool of {dtype}, scales of {scale}: V in the pool is {stored}, the output {read}, expected 1.0")
wrong = any(read != 1.0 for _, read in found.values())
print("WRONG: the output is multiplied by a scale that the pool was not divided by" if wrong else "right")
sys.exit(int(wrong))

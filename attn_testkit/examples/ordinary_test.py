"""The test that most backends already have: one decode batch, in eager and as the replay of a graph captured with that
batch.

``attn-testkit demo`` runs it to show what it misses. Run it on a backend of your own::

    python -m attn_testkit.examples.ordinary_test module:Class

Prints the largest error of both runs, and exits with 1 if one is above 0.02.
"""

from __future__ import annotations

import contextlib
import importlib
import sys

import torch

from cuda_on_cpu import emulated_cuda

from ..contract import AttentionBackend, AttentionLayer, BackendContext, ForwardBatch, ForwardMode, KVPool

_PAGE, _HEADS, _KV_HEADS, _DIM, _LENS = 16, 4, 2, 64, (5, 40, 17)
_LIMIT = 0.02


def errors(backend_class: type[AttentionBackend], device: torch.device) -> tuple[float, float]:
    """Largest absolute error of an eager decode of three requests (5, 40 and 17 keys, bf16), and of a replay of the
    graph that was captured with these lengths."""
    torch.manual_seed(0)
    layer = AttentionLayer(
        layer_id=0, tp_q_head_num=_HEADS, tp_k_head_num=_KV_HEADS, head_dim=_DIM, v_head_dim=_DIM, scaling=_DIM**-0.5
    )
    bs, pages = len(_LENS), 12
    pool = KVPool(pages * _PAGE, _PAGE, (layer,), torch.bfloat16, device)
    table = torch.zeros(bs + 1, 64, dtype=torch.int32, device=device)
    slots = torch.arange(_PAGE, (pages + 1) * _PAGE, dtype=torch.int32, device=device).view(bs, 64)
    table[1:] = slots
    context = BackendContext(
        device=device, dtype=torch.bfloat16, kv_pool=pool, req_to_token=table, layers=(layer,), page_size=_PAGE,
        max_context_len=64, max_bs=bs, max_num_tokens=bs, modes=frozenset({ForwardMode.DECODE}), capture_sizes=(bs,),
    )  # fmt: skip
    lens = torch.tensor(_LENS, device=device)
    q, k, v = (torch.randn(bs, n, _DIM, dtype=torch.bfloat16, device=device) for n in (_HEADS, _KV_HEADS, _KV_HEADS))
    keys, values = (torch.randn(bs, 64, _KV_HEADS, _DIM, dtype=torch.bfloat16, device=device) for _ in "kv")
    rows = torch.arange(bs, device=device)
    keys[rows, lens - 1], values[rows, lens - 1] = k, v
    for buffer, content in zip(pool.get_kv_buffer(0), (keys, values), strict=True):
        buffer[slots.long()] = content
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE, batch_size=bs, input_ids=rows, req_pool_indices=rows + 1, seq_lens=lens,
        out_cache_loc=slots.long()[rows, lens - 1], positions=lens - 1, seq_lens_cpu=torch.tensor(_LENS),
        seq_lens_sum=sum(_LENS),
    )  # fmt: skip

    backend = backend_class(context)
    backend.init_forward_metadata(batch)
    eager = backend.forward(q, k, v, layer, batch).clone()

    backend.init_cuda_graph_state(bs, bs)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.init_forward_metadata_in_graph(batch)
        out = backend.forward(q, k, v, layer, batch)
    backend.init_forward_metadata_out_graph(batch)
    graph.replay()
    torch.cuda.synchronize()

    ratio = _HEADS // _KV_HEADS
    wide = (x.double().repeat_interleave(ratio, 2) for x in (keys, values))
    k64, v64 = (x.transpose(1, 2) for x in wide)
    hidden = torch.arange(64, device=device) >= lens[:, None]
    logits = (k64 @ q.double()[..., None]).squeeze(-1) * layer.scaling
    weights = logits.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
    expected = (weights[:, :, None] @ v64).squeeze(2)
    first, second = ((found.view(bs, _HEADS, _DIM).double() - expected).abs().max().item() for found in (eager, out))
    return first, second


def main(spec: str) -> int:
    """Print the errors of the backend ``module:Class``, and return the exit code."""
    module, _, name = spec.partition(":")
    backend_class = getattr(importlib.import_module(module), name)
    real = torch.cuda.is_available()
    with torch.no_grad(), contextlib.nullcontext() if real else emulated_cuda():
        eager, replay = errors(backend_class, torch.device("cuda"))
    where = torch.cuda.get_device_name() if real else "CPU, emulated CUDA"
    right = eager < _LIMIT and replay < _LIMIT
    print(f"{'right' if right else 'WRONG'}: largest error {eager:.4f} in eager, {replay:.4f} in a replay ({where})")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

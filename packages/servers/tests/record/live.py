"""A class that is watched, and a small server around it: decodes, a prompt and a chunk behind its prefix."""

from __future__ import annotations

import torch

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.contract import AttentionLayer, BackendContext, ForwardBatch, ForwardMode, KVPool
from attn_testkit_servers.record import watch


@watch
class Live(TorchNativeBackend):
    """As its parent, and asks for lengths on the host."""

    capabilities = TorchNativeBackend.capabilities.with_changes(needs={"cpu_seq_lens": True})


PAGE, PAGES, ROWS = 16, 12, 5


def serve() -> None:
    layers = tuple(
        AttentionLayer(n, 8, 2, 64, 64, 0.125, sliding_window_size=window, logit_cap=0.0)
        for n, window in enumerate((-1, 40))
    )
    pool = KVPool(PAGE * PAGES, PAGE, layers, torch.bfloat16, torch.device("cpu"))
    table = torch.arange(PAGE * PAGES, dtype=torch.int32).repeat(ROWS, 1)
    modes = frozenset({ForwardMode.DECODE, ForwardMode.EXTEND})
    backend = Live(
        BackendContext(
            device=torch.device("cpu"), dtype=torch.bfloat16, kv_pool=pool, req_to_token=table, layers=layers,
            page_size=PAGE, max_context_len=PAGE * PAGES, max_bs=4, max_num_tokens=256,
            modes=modes, max_extend_tokens=64,
        )
    )  # fmt: skip
    for prefixes, new in (((0,), (20,)), ((20, 7), (1, 9))):
        step(backend, layers, ForwardMode.EXTEND, prefixes, new)
    for keys in range(30, 50):
        step(backend, layers, ForwardMode.DECODE, (keys, 3), (1, 1))


def step(
    backend: Live, layers: tuple[AttentionLayer, ...], mode: ForwardMode, prefixes: tuple[int, ...],
    new: tuple[int, ...],
) -> None:  # fmt: skip
    lens = torch.tensor([prefix + count for prefix, count in zip(prefixes, new, strict=True)])
    extends = mode is ForwardMode.EXTEND
    tokens = sum(new)
    counts, before = torch.tensor(new, dtype=torch.int32), torch.tensor(prefixes, dtype=torch.int32)
    batch = ForwardBatch(
        forward_mode=mode, batch_size=len(new), input_ids=torch.zeros(tokens, dtype=torch.int64),
        req_pool_indices=torch.arange(1, len(new) + 1), seq_lens=lens, seq_lens_cpu=lens.clone(),
        seq_lens_sum=int(lens.sum()), out_cache_loc=torch.arange(PAGE, PAGE + tokens),
        positions=torch.cat([torch.arange(p, p + n) for p, n in zip(prefixes, new, strict=True)]),
        **({
            "extend_num_tokens": tokens, "extend_seq_lens": counts, "extend_prefix_lens": before,
            "extend_start_loc": (counts.cumsum(0) - counts).int(),
            "extend_seq_lens_cpu": list(new), "extend_prefix_lens_cpu": list(prefixes),
        } if extends else {}),
    )  # fmt: skip
    backend.init_forward_metadata(batch)
    for layer in layers:
        q, k, v = (torch.randn(tokens, heads, 64, dtype=torch.bfloat16) for heads in (8, 2, 2))
        backend.forward(q, k, v, layer, batch)


if __name__ == "__main__":
    serve()

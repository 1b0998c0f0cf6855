"""Linear attention of vLLM 0.33.0 is wrong in three ways.

1. A prompt of one token is taken for a decode: the request begins from the state that the former owner of its block
   left (``LinearAttentionMetadataBuilder`` does not ask ``is_prefilling``; ``KVBlockZeroer`` skips Mamba layers).
2. Model runner V2 gives ``BailingLinearAttentionMetadataBuilder`` no acceptance counts. A draft is taken for a prompt,
   and rejected tokens stay in the state.
3. ``lightning_attention``, the prefill, reads what was before a block of 256 rows with one decay too few
   (``_fwd_none_diag_kernel``): outputs of a continued prompt, and of one with more rows, are wrong; states are right.

One head, compared with the loop over tokens in float64. No check of the kit is used; without a GPU its emulation of
CUDA runs the kernels. Ends with code 1 if one is wrong.
"""

import contextlib
import os
import sys
from types import SimpleNamespace

import torch

DEVICE, RUNS = "cuda", contextlib.nullcontext()
from attn_testkit_servers.bridges.vllm import imports  # noqa: E402
from attn_testkit_servers.bridges.vllm.capabilities import CAPABILITIES  # noqa: E402

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    from cuda_on_cpu import emulated_cuda

    RUNS = emulated_cuda()

WIDTH, DRAFTS, SLOPE = 64, 2, 0.5


def run(builder_of: str, layer_of: str, tokens: int, accepted: int, fresh: bool) -> float:
    """Error of the state behind the accepted tokens over its largest number."""
    from vllm.model_executor.layers.mamba.linear import bailing_linear_attn, minimax_linear_attn
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends import linear_attn
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridAttnMetadata

    module = {"bailing": bailing_linear_attn, "minimax": minimax_linear_attn}[layer_of]
    kind = {"bailing": "BailingMoELinearAttention", "minimax": "MiniMaxText01LinearAttention"}[layer_of]
    config = SimpleNamespace(
        cache_config=SimpleNamespace(mamba_cache_mode="none"), num_speculative_tokens=DRAFTS,
        compilation_config=SimpleNamespace(cudagraph_mode=None, max_cudagraph_capture_size=None),
        scheduler_config=SimpleNamespace(max_num_seqs=1), speculative_config=None,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )  # fmt: skip
    builder = getattr(linear_attn, builder_of)(None, ["layer"], config, torch.device(DEVICE))
    seen = 0 if fresh else 5
    starts, ends = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([seen + tokens], dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts.to(DEVICE), query_start_loc_cpu=starts, seq_lens=ends.to(DEVICE),
        seq_lens_cpu_upper_bound=ends, num_reqs=1, num_actual_tokens=tokens, max_query_len=tokens,
        max_seq_len=seen + tokens, slot_mapping=torch.full((tokens,), -1, device=DEVICE),
        block_table_tensor=torch.tensor([[1, 2, 3]], dtype=torch.int32, device=DEVICE),
        is_prefilling=torch.tensor([fresh]),
    )  # fmt: skip
    # What MambaHybridModelState.prepare_attn gives build_attn_metadata for this step.
    given = MambaHybridAttnMetadata(
        torch.tensor([fresh]), None if fresh else torch.ones(1, dtype=torch.int32, device=DEVICE),
        None if fresh else torch.tensor([DRAFTS], dtype=torch.int32),
    ).get_extra_attn_kwargs(builder, 1)  # fmt: skip
    metadata = builder.build(0, common, **given)
    torch.manual_seed(0)
    before, (q, k, v) = torch.randn(WIDTH, WIDTH), (torch.randn(tokens, 1, WIDTH) for _ in range(3))
    cache = torch.zeros(4, 1, WIDTH, WIDTH, device=DEVICE)
    cache[1, 0] = before.to(DEVICE)
    made = SimpleNamespace(tp_slope=torch.full((1, 1, 1), SLOPE, device=DEVICE), BLOCK=256, layer_idx=0)
    for name in ("_decode_infer", "_prefill_and_mix_infer"):
        setattr(made, name, getattr(getattr(module, kind), name).__get__(made))
    slots = metadata.state_indices_tensor
    module.clear_linear_attention_cache_for_new_sequences(cache, slots, metadata)
    core = made._prefill_and_mix_infer if metadata.num_prefills else made._decode_infer
    core(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), cache, slots, metadata)
    state = torch.zeros(WIDTH, WIDTH, dtype=torch.float64) if fresh else before.double()
    for t in range(accepted):
        state = state * torch.tensor(-SLOPE, dtype=torch.float64).exp() + torch.outer(
            k[t, 0].double(), v[t, 0].double()
        )
    # After one accepted token the next step reads the first slot of its list.
    found = cache[1, 0].cpu().double()
    return float((found - state).abs().max() / state.abs().max())


def prefill(tokens: int, begun: bool) -> float:
    """Error of the worst output of a prefill over the largest one."""
    from vllm.model_executor.layers.lightning_attn import lightning_attention

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, tokens, WIDTH) for _ in range(3))
    state = torch.randn(1, 1, WIDTH, WIDTH) * begun
    given = [each.to(DEVICE) for each in (q, k, v, torch.full((1, 1, 1), SLOPE))]
    found, _ = lightning_attention(*given, kv_history=state.to(DEVICE).clone())
    state, want = state[0, 0].double(), []
    for t in range(tokens):
        state = state * torch.tensor(-SLOPE, dtype=torch.float64).exp() + torch.outer(k[0, 0, t], v[0, 0, t]).double()
        want.append(q[0, 0, t].double() @ state)
    right = torch.stack(want)
    return float((found[0, 0].cpu().double() - right).abs().max() / right.abs().max())


def main() -> int:

    with torch.no_grad(), RUNS:
        imports.prepare(CAPABILITIES["linear"])  # vLLM asks at import what the device is
        base, bailing = "LinearAttentionMetadataBuilder", "BailingLinearAttentionMetadataBuilder"
        errors = {
            "two tokens, fresh, MiniMax": run(base, "minimax", 2, 2, True),
            "one token, fresh, MiniMax": run(base, "minimax", 1, 1, True),
            "one token, fresh, Bailing": run(bailing, "bailing", 1, 1, True),
            "one token, continued, Bailing": run(bailing, "bailing", 1, 1, False),
            "draft of three, one accepted, Bailing": run(bailing, "bailing", 3, 1, False),
            "outputs of a prompt of 200 rows": prefill(200, False),
            "outputs of one of 300 rows": prefill(300, False),
            "outputs of 3 rows of a continued one": prefill(3, True),
        }
    for name, error in errors.items():
        print(f"{name}: off by {error:.2g} of the largest number")
    wrong = [name for name, error in errors.items() if error > 0.05]
    healthy = [error for name, error in errors.items() if name.startswith(("two", "one token, cont")) or "200" in name]
    assert max(healthy) < 0.01, "the loop in float64 is not what these kernels compute"
    print("WRONG: " + "; ".join(wrong) if wrong else "right")
    return int(bool(wrong))


sys.exit(main())

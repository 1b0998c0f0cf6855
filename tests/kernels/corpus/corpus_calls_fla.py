"""Calls of flash-linear-attention's own operators: each runs forwards, and backwards where it can.

A row is (operator, arguments by kind, options); a kind is a shape and a range of values, in `KINDS`. Two requests lie
in one packed row of 18 tokens where an operator takes `cu_seqlens`, so that requests begin inside a chunk.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

T, H, K = 18, 1, 16
KINDS: dict[str, Callable[[int], Tensor]] = {
    "k": lambda t: torch.randn(1, t, H, K),
    "unit": lambda t: torch.nn.functional.normalize(torch.randn(1, t, H, K), dim=-1),
    "1k": lambda t: torch.randn(1, t, 1, K),
    "log": lambda t: torch.nn.functional.logsigmoid(torch.randn(1, t, H)),
    "logk": lambda t: torch.nn.functional.logsigmoid(torch.randn(1, t, H, K)),
    "gate": lambda t: torch.rand(1, t, H),
    "gatek": lambda t: torch.rand(1, t, H, K),
    "slots": lambda t: torch.softmax(torch.randn(1, t, H, K), -1),
    "x": lambda t: torch.randn(1, t, K),
    "logx": lambda t: torch.nn.functional.logsigmoid(torch.randn(1, t, K)),
    "hk": lambda t: torch.rand(H, K),
    "h": lambda t: torch.rand(H),
    "K": lambda t: torch.rand(K),
    "hkk": lambda t: torch.rand(H, K, K),
    "gate1": lambda t: torch.rand(1, t, H, 1),
}

ROWS: list[tuple[str, str, dict[str, Any]]] = [
    ("attn.parallel_attn", "q=k k=k v=k g=log", {}),
    ("attn.parallel_attn", "q=k k=k v=k", {"window_size": 9}),
    ("based.fused_chunk_based", "q=k k=k v=k", {}),
    ("based.parallel_based", "q=k k=k v=k", {}),
    ("comba.chunk_comba", "q=k k=k v=k p=k g=log beta=gate", {"use_qk_l2norm_in_kernel": True}),
    ("comba.fused_recurrent_comba", "q=k k=k v=k p=k g=log beta=gate", {}),
    (
        "cyfa.chunk_cyfa",
        "q=k k=k v=k g=log delta=gate beta=gate readout=hkk q_norm_weight=K k_norm_weight=K",
        {"q_norm_eps": 1e-6, "k_norm_eps": 1e-6},
    ),
    (
        "cyfa.fused_recurrent_cyfa",
        "q=k k=k v=k g=log delta=gate beta=gate readout=hkk q_norm_weight=K k_norm_weight=K",
        {"q_norm_eps": 1e-6, "k_norm_eps": 1e-6},
    ),
    ("delta_rule.chunk_delta_rule", "q=k k=unit v=k beta=gate", {}),
    ("delta_rule.fused_recurrent_delta_rule", "q=k k=unit v=k beta=gate", {}),
    ("delta_rule.parallel.parallel_delta_rule", "q=k k=unit v=k beta=gate", {}),
    ("deltaformer.deltaformer_attn", "q=k k=k v=k beta=gate", {"C": 64}),
    ("forgetting_attn.parallel_forgetting_attn", "q=k k=k v=k g=log", {}),
    ("gated_delta_product.chunk_gated_delta_product", "q=k k=unit2 v=k2 g=log beta=gate2", {"num_householder": 2}),
    ("gated_delta_rule.chunk_gated_delta_rule", "q=k k=unit v=k g=log beta=gate", {}),
    (
        "gated_delta_rule.chunk_gated_delta_rule",
        "q=k k=k v=k g=log beta=gate",
        {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True},
    ),
    ("gated_delta_rule.fused_recurrent_gated_delta_rule", "q=k k=unit v=k g=log beta=gate", {}),
    ("gated_oja_rule.chunk_gated_oja_rule", "q=k k=k v=unit gv=logk beta=gate", {}),
    ("gated_oja_rule.fused_recurrent_gated_oja_rule", "q=k k=k v=unit gv=logk beta=gate", {}),
    ("gdn2.chunk_gdn2", "q=k k=unit v=k g=logk b=gatek w=gatek", {}),
    ("gdn2.fused_recurrent_gdn2", "q=k k=unit v=k g=logk b=gatek w=gatek", {}),
    ("generalized_delta_rule.chunk_dplr_delta_rule", "q=k k=k v=k a=unit b=unit gk=logk", {}),
    ("generalized_delta_rule.chunk_iplr_delta_rule", "q=k k=k v=k a=unit b=unit", {}),
    ("generalized_delta_rule.fused_recurrent_dplr_delta_rule", "q=k k=k v=k a=unit b=unit gk=logk", {}),
    ("generalized_delta_rule.fused_recurrent_iplr_delta_rule", "q=k k=k v=k a=unit b=unit", {}),
    ("gla.chunk_gla", "q=k k=k v=k g=logk", {}),
    ("gla.fused_recurrent_gla", "q=k k=k v=k gk=logk", {}),
    ("gsa.chunk_gsa", "q=k k=k v=k s=slots g=logk", {}),
    ("gsa.fused_recurrent_gsa", "q=k k=k v=k s=slots g=logk", {}),
    ("hgrn.chunk_hgrn", "x=x g=logx", {}),
    ("hgrn.fused_recurrent_hgrn", "x=x g=logx", {}),
    ("kda.chunk_kda", "q=k k=unit v=k g=logk beta=gate", {}),
    (
        "kda.chunk_kda",
        "q=k k=k v=k g=logk beta=gate A_log=h dt_bias=hk",
        {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True},
    ),
    (
        "kda.chunk_kda",
        "q=k k=k v=k g=logk beta=gate A_log=h dt_bias=hk",
        {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "safe_gate": True, "lower_bound": -5.0},
    ),
    ("kda.fused_recurrent_kda", "q=k k=unit v=k g=logk beta=gate", {}),
    ("lightnet.fused_recurrent_lightnet", "q=k k=k v=k", {}),
    ("lightnet.chunk_lightnet", "q=k k=k v=k", {}),
    ("lightning_attn.chunk_lightning_attn", "q=k k=k v=k", {"layer_idx": 1, "num_layers": 4}),
    ("lightning_attn.fused_recurrent_lightning_attn", "q=k k=k v=k", {"layer_idx": 1, "num_layers": 4}),
    ("linear_attn.chunk_linear_attn", "q=k k=k v=k", {}),
    ("linear_attn.fused_chunk_linear_attn", "q=k k=k v=k", {}),
    ("linear_attn.fused_recurrent_linear_attn", "q=k k=k v=k", {}),
    ("momentum_delta_rule.chunk_momentum_delta_rule", "q=k k=k v=k log_alpha=log log_mu=log beta=gate eta=gate", {}),
    (
        "momentum_delta_rule.fused_recurrent_momentum_delta_rule",
        "q=k k=k v=k log_alpha=log log_mu=log beta=gate eta=gate",
        {},
    ),
    ("parallax.parallel_parallax", "q=k r=k k=k v=k", {}),
    ("path_attn.parallel_path_attn", "q=k k=k v=k w=unit! beta=gate! g=log!", {"use_cache": True}),
    ("path_attn.parallel_path_attn", "q=k k=k v=k w=unit! beta=gate!", {}),
    (
        "precond_gated_delta_rule.chunk_precond_gated_delta_rule",
        "q=k k=k v=k g_atk=log g=log beta_atk=gate beta=gate",
        {},
    ),
    (
        "precond_gated_delta_rule.fused_recurrent_precond_gated_delta_rule",
        "q=k k=k v=k g_atk=log g=log beta_atk=gate beta=gate",
        {},
    ),
    ("precond_kda.chunk_precond_kda", "q=k k=unit v=k g=logk g_atk=log beta_atk=gate beta=gate", {}),
    ("precond_kda.fused_recurrent_precond_kda", "q=k k=unit v=k g=logk g_atk=log beta_atk=gate beta=gate", {}),
    ("rebased.parallel_rebased", "q=k k=k v=k", {}),
    ("retention.chunk_retention", "q=k k=k v=k", {}),
    ("retention.fused_chunk_retention", "q=k k=k v=k", {}),
    ("retention.fused_recurrent_retention", "q=k k=k v=k", {}),
    ("retention.parallel_retention", "q=k k=k v=k", {}),
    ("rwkv6.chunk_rwkv6", "r=k k=k v=k w=logk u=hk", {}),
    ("rwkv6.fused_recurrent_rwkv6", "r=k k=k v=k w=logk u=hk", {}),
    ("rwkv7.chunk_rwkv7", "r=k w=logk k=k v=k a=unit b=unit", {}),
    ("rwkv7.fused_mul_recurrent_rwkv7", "r=k w=logk k=k v=k kk=unit a=gatek", {}),
    ("simple_gla.chunk_simple_gla", "q=k k=k v=k g=log", {}),
    ("simple_gla.fused_chunk_simple_gla", "q=k k=k v=k g=log", {}),
    ("simple_gla.fused_recurrent_simple_gla", "q=k k=k v=k g=log", {}),
    ("simple_gla.parallel_simple_gla", "q=k k=k v=k g=log", {}),
    ("stickbreaking_attn.parallel_stickbreaking_attn", "q=k k=k v=k", {}),
    ("ttt.chunk_ttt_linear", "q=k k=unit v=k w=hk b=hk eta=gate1", {}),
    ("ttt.fused_chunk_ttt_linear", "q=k k=unit v=k w=hk b=hk eta=gate1", {}),
    ("wall_attn.parallel_wall_attn", "q=k k=k v=k g=logk", {}),
    ("wall_attn.parallel_wall_attn", "q=k k=k v=k g=logk g_scalar=log sink_bias=h", {}),
    ("mesa_net.chunk_mesa_net", "q=k k=unit v=k g=log beta=gate lamb=hk", {"max_CG_iteration": 2}),
]


_ONE_SEQUENCE = ("momentum", "ttt_linear")
"""Operators, or backward passes, that take one sequence alone."""


def _operator(name: str) -> Any:
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(f"fla.ops.{module}"), function)


def _run(name: str, kinds: str, options: dict[str, Any], packed: bool, dtype: torch.dtype) -> None:
    operator = _operator(name)
    torch.manual_seed(0)
    tensors = {}
    for pair in kinds.split():
        argument, kind = pair.split("=")
        more = kind.endswith("2")
        value = KINDS[kind.rstrip("2!")](T * 2 if more else T)
        tensors[argument] = value.to(torch.float32 if kind.endswith("!") else dtype).cuda().requires_grad_()
    given: dict[str, Any] = {**tensors, **options}
    takes = inspect.signature(inspect.unwrap(operator)).parameters
    if packed and "cu_seqlens" in takes and not any(part in name for part in _ONE_SEQUENCE):
        given["cu_seqlens"] = torch.tensor([0, 5, T], dtype=torch.int64).cuda()
        if "initial_state" in takes and not any(part in name for part in ("hgrn", "gsa", "lightnet")):
            given["initial_state"] = torch.randn(2, H, K, K).cuda()
    if "output_final_state" in takes:
        given["output_final_state"] = True
    results = operator(**given)
    outputs = [one for one in (results if isinstance(results, tuple) else (results,)) if isinstance(one, Tensor)]
    wanted = [one for one in outputs if one.requires_grad]
    if wanted:
        with contextlib.suppress(NotImplementedError):  # some operators have no backward pass
            torch.autograd.backward(wanted, [torch.randn(one.shape).to(one.dtype).cuda() for one in wanted])


def calls() -> list[tuple[str, Callable[[], None]]]:
    """Every row in float16, with two requests where it can; every fourth also in bfloat16 or float32."""
    found: list[tuple[str, Callable[[], None]]] = []
    for index, row in enumerate(ROWS):
        name, _, options = row
        said = "".join(f" {key}={value}" for key, value in options.items())
        found.append((f"{name}{said}", lambda row=row: _run(*row, True, torch.float16)))
        if index % 4 == 0:
            dtype = torch.bfloat16 if index % 8 else torch.float32
            found.append((f"{name}{said} {str(dtype)[6:]}", lambda row=row, dtype=dtype: _run(*row, False, dtype)))
    return found

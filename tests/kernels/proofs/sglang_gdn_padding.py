"""SGLang writes the last slot of the pool for padded requests of a graph, if FlashInfer decodes GDN on SM90.

``FlashInferGDNKernel.decode`` gathers ``ssm_states[cache_indices]`` and stores what the kernel returns by the same
index. A padded request of a graph has the index -1, which is the last slot to torch, and that slot is a request's.
Gather and scatter are SGLang's; the kernel between them is torch's here, and adds 1 to a state.
"""

import torch
from common import DEVICE, SGLANG, finish, load

SLOTS, HEADS, WIDTH = 5, 2, 128
GIVEN = {**SGLANG, "sglang.srt.runtime_context": {"mamba_cache_chunk_size": None}}
Kernel = load("sglang.srt.layers.attention.linear.kernels.gdn_flashinfer", GIVEN).FlashInferGDNKernel


def decode(v, state, **_):  # type: ignore[no-untyped-def]
    """Stands for ``gated_delta_rule_decode_pretranspose``: an output and the next state."""
    return torch.zeros_like(v), state + 1.0


def changed(indices: list[int]) -> list[int]:
    """Slots that a decode of these indices changes, one index for each request."""
    kernel = object.__new__(Kernel)  # its constructor asks for the device and for FlashInfer
    kernel._decode_fn, kernel.use_state_pool = decode, False  # what it says on SM90
    kernel._mutable_inputs_are_aligned = lambda *inputs: True
    kernel._prepare_dynamic_input = lambda name, tensor: tensor
    kernel._prepare_gate_parameters = lambda A_log, dt_bias, A_log_dtype=None: (A_log, dt_bias)
    states = torch.zeros(SLOTS, HEADS, WIDTH, WIDTH, device=DEVICE)
    requests = len(indices)
    row = torch.zeros(1, requests, HEADS, WIDTH, device=DEVICE)
    gate, zero = torch.zeros(requests, HEADS, device=DEVICE), torch.zeros(HEADS, device=DEVICE)
    kernel.decode(
        row, row, row, gate, gate, A_log=zero, dt_bias=zero, ssm_states=states,
        cache_indices=torch.tensor(indices, dtype=torch.int32, device=DEVICE),
        query_start_loc=torch.arange(requests + 1, dtype=torch.int32, device=DEVICE),
    )  # fmt: skip
    return [slot for slot in range(SLOTS) if states[slot].any()]


full, padded = changed([1, 2]), changed([1, 2, -1])
print(f"two requests in slots 1 and 2: slots {full} are written")
print(f"the same and a padded request: slots {padded} are written, of {SLOTS}")
finish(full == padded == [1, 2], "the last slot belongs to another request")

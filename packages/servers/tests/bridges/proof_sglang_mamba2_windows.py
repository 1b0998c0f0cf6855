"""SGLang 0.5.23 hands windows of Mamba2's convolution over as one part, between unequal numbers of ranks.

A model of four heads and two groups: the channels of a window are x, B and C, and tensor parallelism divides each of
the three. One prefill rank, two decode ranks. No check of the kit is used. Ends with code 1 if a rank gets wrong
channels.
"""

import sys

from attn_testkit_servers.bridges.sglang.imports import prepare

prepare()

from sglang.srt.configs.nemotron_h import NemotronHConfig  # noqa: E402
from sglang.srt.disaggregation.utils import compute_mamba_state_slice_blocks  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402

HEADS, WIDTH, GROUPS, STATE, RANKS = 4, 2, 2, 2, 2
get_parallel().override_permanently(attn_tp_size=1)
config = NemotronHConfig(
    layers_block_type=["mamba"], mamba_num_heads=HEADS, mamba_head_dim=WIDTH, n_groups=GROUPS, ssm_state_size=STATE
)
parts = {"x": HEADS * WIDTH, "B": GROUPS * STATE, "C": GROUPS * STATE}
sent = [f"{name}{number}" for name, count in parts.items() for number in range(count)]
groups = config.mamba2_cache_params.shape.conv_shard_groups
wrong = 0
for rank in range(RANKS):
    right = [
        f"{name}{number}" for name, count in parts.items()
        for number in range(rank * count // RANKS, (rank + 1) * count // RANKS)
    ]  # fmt: skip
    found = [""] * len(right)
    for source, target, count in compute_mamba_state_slice_blocks(
        src_dim=len(sent), dst_dim=len(right), src_attn_tp_size=1, dst_attn_tp_size=RANKS, dst_tp_rank_in_group=rank,
        local_tp_rank_in_group=0, conv_shard_groups=groups,
    ):  # fmt: skip
        found[target : target + count] = sent[source : source + count]
    wrong += found != right
    print(f"rank {rank} of {RANKS} gets {' '.join(found)}, and needs {' '.join(right)}")
print("WRONG: a window is cut as one part" if wrong else "right")
sys.exit(int(bool(wrong)))

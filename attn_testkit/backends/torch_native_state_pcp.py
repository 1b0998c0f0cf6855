"""``torch_native_state`` as one of R ranks of prefill context parallelism: a state passes from rank to rank.

The class is the same: a request begins from zeros only if its ``has_initial_state`` is False, and the state after its
last row is stored.
"""

from __future__ import annotations

from ..contract import ForwardMode, HeadShapes, PrefillRanks, State
from .torch_native_state import TorchNativeStateBackend


class TorchNativeStatePcpBackend(TorchNativeStateBackend):
    """GDN, KDA, Mamba2 and Lightning, in prompts whose rows are dealt in blocks."""

    capabilities = TorchNativeStateBackend.capabilities.with_changes(
        eager=frozenset({ForwardMode.EXTEND}),
        graph=frozenset(),
        heads=HeadShapes(families={"gdn", "kda", "mamba", "lightning"}, gqa_ratios={1, 2}, head_dims={32}),
        precision={"dtypes": {"bf16"}},
        state=State(k_dims={32}, dtypes={"fp32"}, conv_widths={1, 4}, fresh={"flag"}),
        bounds={"max_topk": 1},
        prefill_ranks=PrefillRanks({"blocks"}),
    )

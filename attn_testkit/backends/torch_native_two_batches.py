"""Reference backends for steps that a server cuts into two batches (``ServerConventions.two_batch_overlap``).

The classes are those of ``torch_native``, ``torch_native_state`` and ``torch_native_sparse``: an instance keeps
everything of a step for itself. They are declared for few values, so that other options meet the cut.
"""

from __future__ import annotations

from ..contract import CrossAttention, ForwardMode, HeadShapes, State
from .torch_native import TorchNativeBackend
from .torch_native_sparse import TorchNativeSparseBackend
from .torch_native_state import TorchNativeStateBackend

_CUT = frozenset({ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY})
_IN_GRAPHS = _CUT - {ForwardMode.EXTEND}


class TorchNativeTwoBatchesBackend(TorchNativeBackend):
    """Attends to keys, with the options of layers and servers that ``torch_native`` has."""

    capabilities = TorchNativeBackend.capabilities.with_changes(
        eager=_CUT,
        graph=_IN_GRAPHS,
        heads=HeadShapes(families={"gqa", "mla"}, head_dims={64, 128}, mla_rope_dims={64}, gqa_ratios={2, 4}),
        precision={"dtypes": {"bf16"}},
        kv_pool={"page_sizes": {1, 16}, "kv_layouts": {"nhd"}},
        bounds={"max_context_len": 1 << 13},
        lse=None,
        cross_attention=CrossAttention(),
        server={"two_batch_overlap": True, "narrower_widths": frozenset()},
    )


class TorchNativeStateTwoBatchesBackend(TorchNativeStateBackend):
    """GDN and Mamba2: the second batch continues the state of a prompt that is cut."""

    capabilities = TorchNativeStateBackend.capabilities.with_changes(
        eager={ForwardMode.DECODE, ForwardMode.EXTEND},
        graph={ForwardMode.DECODE},
        heads=HeadShapes(families={"gdn", "mamba"}, gqa_ratios={2}, head_dims={32}),
        precision={"dtypes": {"bf16"}},
        state=State(k_dims={32}, dtypes={"fp32"}, conv_widths={1, 4}, fresh={"flag"}, snapshots={16}),
        bounds={"max_topk": 1},
        server={"two_batch_overlap": True, "takes_column_views": False},
    )


class TorchNativeSparseTwoBatchesBackend(TorchNativeSparseBackend):
    """Selected keys: index keys of both batches are stored before the first one selects."""

    capabilities = TorchNativeSparseBackend.capabilities.with_changes(
        eager=_CUT,
        graph=_IN_GRAPHS,
        heads=HeadShapes(families={"mla"}, head_dims={128}, mla_rope_dims={64}, gqa_ratios={4}),
        precision={"dtypes": {"bf16"}},
        server={"two_batch_overlap": True, "takes_column_views": False},
    )

"""What a backend author implements, and the objects handed to a backend. Imports torch and nothing of the kit."""

from .backend import AttentionBackend, BackendContext, LegacyGraphHooks, refuse_unclaimed
from .batch import DraftExtendInput, ForwardBatch, SpecInput, TreeMaskMode, VerifyInput, VerifyMask
from .capabilities import DTYPES, FAMILIES, KV_DTYPES, Capabilities, Requires, Unsupported
from .draft_decode import DraftDecodeInput
from .kernel_backend import KernelBackend
from .kernel_plan import KernelPlan
from .kv_group import KVGroup
from .kv_pool import KVPool
from .layer import AttentionLayer
from .modes import Execution, ForwardMode

__all__ = [
    "DTYPES",
    "FAMILIES",
    "KV_DTYPES",
    "AttentionBackend",
    "AttentionLayer",
    "BackendContext",
    "Capabilities",
    "DraftDecodeInput",
    "DraftExtendInput",
    "Execution",
    "ForwardBatch",
    "ForwardMode",
    "KVGroup",
    "KVPool",
    "KernelBackend",
    "KernelPlan",
    "LegacyGraphHooks",
    "Requires",
    "SpecInput",
    "TreeMaskMode",
    "Unsupported",
    "VerifyInput",
    "VerifyMask",
    "refuse_unclaimed",
]

"""Classes that a backend author implements, and the objects given to a backend. Imports torch and nothing of the
kit."""

from .backend import AttentionBackend, LegacyGraphHooks, refuse_undeclared
from .batch import DraftExtendInput, ForwardBatch, SpecInput, TreeMaskMode, VerifyInput, VerifyMask
from .bounds import Bounds
from .capabilities import Capabilities, Unsupported
from .compressor import Compressor
from .compressor_backend import CompressorBackend
from .compressor_layer import COMPRESSED_ROPE, CompressorContext, CompressorLayer, CompressorPool
from .context import BackendContext
from .cross_attention import ENCODER_SLOTS, CrossAttention
from .dialect import DIALECTS, Dialect
from .draft_decode import DraftDecodeInput
from .encoder_only import ENCODER_LAYERS, EncoderOnly
from .hand_over import SENDER_RANKS, HandedRequest, HandOver, Receives, Sender, heads_of_rank
from .head_shapes import FAMILIES, HeadShapes
from .index_pool import INDEX_PAGE, INDEX_WIDTH, IndexPool, index_scales
from .kernel_backend import KernelBackend
from .kernel_plan import KernelPlan
from .kv_group import KVGroup
from .kv_layouts import KV_LAYOUTS, KVLayer, KVPoolSpec
from .kv_pool import KVPool
from .kv_pools import KV_DTYPES, KVPools
from .kv_split import KVSplit
from .layer import AttentionLayer, HeadShape
from .layer_options import LayerOptions
from .merging import LogSumExp
from .modes import Execution, ForwardMode
from .offloading import HOST_LAYOUTS, HostMemory, HostPool, Moved, Offloads, Transfer
from .precision import DTYPES, FP8_PRODUCTS, Precision
from .prefill_ranks import PrefillRanks
from .promises import Needs, Promises
from .requires import Requires
from .row_format import LATENT_FORMATS, ROPE_IN_VALUE, ROW_FORMATS, PackedRows, RowFormat
from .row_split import ROW_ORDERS, RowSplit
from .server_conventions import SGLANG, VLLM, ServerConventions
from .spans import Spans
from .sparse import INDEX_SCALES, INDEX_SPACES, Indexer, Sparse
from .state import State
from .state_backend import StateBackend
from .state_layer import StateLayer
from .state_pool import Snapshot, StateContext, StateInput, StatePool
from .windows import LAYER_WINDOWS, NON_CAUSAL_WINDOWS, Windows

__all__ = [
    "COMPRESSED_ROPE",
    "DIALECTS",
    "DTYPES",
    "ENCODER_LAYERS",
    "ENCODER_SLOTS",
    "FAMILIES",
    "FP8_PRODUCTS",
    "HOST_LAYOUTS",
    "INDEX_PAGE",
    "INDEX_SCALES",
    "INDEX_SPACES",
    "INDEX_WIDTH",
    "KV_DTYPES",
    "KV_LAYOUTS",
    "LATENT_FORMATS",
    "LAYER_WINDOWS",
    "NON_CAUSAL_WINDOWS",
    "ROPE_IN_VALUE",
    "ROW_FORMATS",
    "ROW_ORDERS",
    "SENDER_RANKS",
    "SGLANG",
    "VLLM",
    "AttentionBackend",
    "AttentionLayer",
    "BackendContext",
    "Bounds",
    "Capabilities",
    "Compressor",
    "CompressorBackend",
    "CompressorContext",
    "CompressorLayer",
    "CompressorPool",
    "CrossAttention",
    "Dialect",
    "DraftDecodeInput",
    "DraftExtendInput",
    "EncoderOnly",
    "Execution",
    "ForwardBatch",
    "ForwardMode",
    "HandOver",
    "HandedRequest",
    "HeadShape",
    "HeadShapes",
    "HostMemory",
    "HostPool",
    "IndexPool",
    "Indexer",
    "KVGroup",
    "KVLayer",
    "KVPool",
    "KVPoolSpec",
    "KVPools",
    "KVSplit",
    "KernelBackend",
    "KernelPlan",
    "LayerOptions",
    "LegacyGraphHooks",
    "LogSumExp",
    "Moved",
    "Needs",
    "Offloads",
    "PackedRows",
    "Precision",
    "PrefillRanks",
    "Promises",
    "Receives",
    "Requires",
    "RowFormat",
    "RowSplit",
    "Sender",
    "ServerConventions",
    "Snapshot",
    "Spans",
    "Sparse",
    "SpecInput",
    "State",
    "StateBackend",
    "StateContext",
    "StateInput",
    "StateLayer",
    "StatePool",
    "Transfer",
    "TreeMaskMode",
    "Unsupported",
    "VerifyInput",
    "VerifyMask",
    "Windows",
    "heads_of_rank",
    "index_scales",
    "refuse_undeclared",
]

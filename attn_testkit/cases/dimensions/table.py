"""The table of dimensions, in the order of the words of a case id. A new dimension is one entry."""

from __future__ import annotations

from ..fields import DEFAULTS
from .alibi import ALIBI
from .chunks import CHUNKS
from .context import CONTEXT
from .cross_attention import CROSS_ATTENTION
from .data_pattern import DATA_PATTERN
from .dimension import Dimension
from .dtype import DTYPE
from .greedy_loop import GREEDY_LOOP
from .head_dim import HEAD_DIM
from .heads import HEADS
from .indexer import INDEXER
from .kv_dtype import KV_DTYPE
from .kv_layout import KV_LAYOUT
from .kv_splits import KV_SPLITS
from .layers import LAYERS
from .lengths import KEYS
from .local_chunk import LOCAL_CHUNK
from .logit_cap import LOGIT_CAP
from .mode import MODE
from .multi_mode import MULTI_MODE
from .padded_requests import PADDED_REQUESTS
from .padding import PADDING
from .page_size import PAGE_SIZE
from .prefixed import PREFIXED
from .qq_bias import QQ_BIAS
from .requests import REQUESTS
from .rows import ROWS
from .scaling import SCALING
from .seed import SEED
from .selection import SELECTION
from .server_variant import SERVER_VARIANT
from .sinks import SINKS
from .slot_order import SLOT_ORDER
from .spans import SPANS
from .state import STATE
from .window import WINDOW

DIMENSIONS: tuple[Dimension, ...] = (
    MODE, REQUESTS, HEADS, HEAD_DIM, DTYPE, PAGE_SIZE, KEYS, ROWS, PREFIXED, GREEDY_LOOP, CHUNKS, SLOT_ORDER,
    DATA_PATTERN, KV_DTYPE, KV_LAYOUT, WINDOW, LOCAL_CHUNK, CROSS_ATTENTION, ALIBI, SPANS, QQ_BIAS, SCALING, LOGIT_CAP,
    SINKS, SELECTION, INDEXER, STATE, LAYERS, KV_SPLITS, PADDED_REQUESTS, PADDING, MULTI_MODE, SERVER_VARIANT, SEED,
    CONTEXT,
)  # fmt: skip


def forgotten(dimensions: tuple[Dimension, ...]) -> set[str]:
    """Fields that no dimension has."""
    return DEFAULTS.keys() - {name for each in dimensions for name in each.fields}


if forgotten(DIMENSIONS):
    raise ValueError(f"no dimension has these fields of a case: {', '.join(sorted(forgotten(DIMENSIONS)))}")

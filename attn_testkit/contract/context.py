"""The context that a server gives the constructor of a backend."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from .compressor_layer import CompressorContext
from .dialect import Dialect
from .index_pool import IndexPool
from .kv_group import KVGroup
from .kv_pool import KVPool
from .kv_split import KVSplit
from .layer import AttentionLayer, HeadShape
from .modes import ForwardMode
from .row_split import RowSplit
from .state_pool import StateContext

__all__ = ["BackendContext"]


@dataclass(frozen=True)
class BackendContext:
    """Everything a server knows when it constructs a backend."""

    device: torch.device
    """Device of all tensors."""
    dtype: torch.dtype
    """Dtype of q, k, v and of the output."""
    kv_pool: KVPool
    """KV pool of all layers, or of the first KV group."""
    req_to_token: torch.Tensor
    """[pool_size + 1, columns] int32: KV *slot* of each token of each request. Row 0 is a reserved dummy, all
    zeros. Page of logical page p of request r: ``req_to_token[r, p * page_size] // page_size``. Entries past a
    request's length are stale slots of others. Rows are strided if the server gives columns of a wider table
    (``ServerConventions.takes_column_views``)."""
    layers: tuple[AttentionLayer, ...]
    """All layers that will be run. With ``heads_by_layer`` they differ in their heads: a workspace has to fit the
    largest, and each of ``head_shapes`` needs a plan."""
    page_size: int
    """Slots per page."""
    max_context_len: int
    """Most tokens of one request, prefix and new tokens together: columns of ``req_to_token``. If
    ``dialect.context_len`` is ``prefix``, most tokens before a step that has drafts, and ``req_to_token`` has more
    columns."""
    max_bs: int
    """Most requests in one batch, padding included; eager batches may be larger than the largest graph."""
    max_num_tokens: int
    """Most tokens in one batch, padding included."""
    modes: frozenset[ForwardMode]
    """Modes in which this instance will be run."""
    num_draft_tokens: int = 1
    """N: nodes of a draft tree, and rows per request in draft-extend v2."""
    speculative_num_steps: int = 0
    """S: longest path of a draft tree below its root; v1 has at most S + 1 rows per request. Draft-decode: draft tokens
    of a branch, from S - 1 forwards."""
    topk: int = 0
    """K: widest branching of a draft tree; 1 for a chain, 0 without target-verify."""
    index_pool: IndexPool | None = None
    """Index keys of the layers that select keys; None without an indexer."""
    index_req_to_token: torch.Tensor | None = None
    """[requests, max_context_len] int32: slot in the index pool of each key of a request, for a rank
    (``Indexer.replicated``), whose index pool has all keys. None: index keys are in the slots of the KV pool."""
    index_rope: torch.Tensor | None = None
    """[positions, 64] float32: 32 cosines and 32 sines of each position, for index queries and keys that the backend
    rotates (``Indexer.rotates``); None: they are rotated already."""
    max_extend_tokens: int = 0
    """Most new tokens of one request in extend (a server's ``chunked_prefill_size`` bounds it); 0 without extend."""
    max_encoder_len: int = 0
    """Most encoder keys of one request; 0 without cross-attention layers. Graphs are captured with it."""
    draft_branches: int = 0
    """K of draft-decode: rows per request in each of its forwards; 0 without draft-decode."""
    draft_widths: tuple[int, ...] = ()
    """Widths of the batches if they differ (``ServerConventions.narrower_widths``), ascending: N of target-verify and
    draft-extend v2, S + 1 of draft-extend, S of draft-decode. The fields above have the largest width. Empty: all
    batches have that width."""
    capture_sizes: tuple[int, ...] = ()
    """Batch sizes that graphs are captured for, ascending; if one mode has several, those of all modes. A backend may
    choose kernels by them. Empty if the sizes are not known."""
    capture_tokens: tuple[int, ...] = ()
    """Rows of one forward of those graphs, ascending: ``capture_sizes`` in tokens, for servers that count tokens (as
    vLLM's ``cudagraph_capture_sizes`` do). In extend the requests of a graph share its rows. Empty if the sizes are not
    known."""
    max_spans: int = 0
    """Most bidirectional spans of a request in any batch; 0 if no layer has spans."""
    kv_splits: tuple[KVSplit, ...] = ()
    """KV splits for which each layer calls ``forward_return_lse``, in this order, instead of ``forward``. Empty:
    ``forward`` is called. An instance that is a rank with its own pool has only the split of that rank."""
    dialect: Dialect = field(default_factory=Dialect)
    """Conventions of the server, in which servers differ."""
    kv_groups: tuple[KVGroup, ...] = ()
    """Two or more groups if layers do not share KV memory. ``kv_pool`` and ``req_to_token`` belong to the first group,
    which may be the windowed one; ``group_of`` returns the group of a layer. Empty if all layers share KV memory,
    without the capability ``kv_groups``, and with ``kv_splits``."""

    qq_bias: str = "none"
    """``own`` or ``shared``: each batch has ``ForwardBatch.qq_bias``, with a bias per request or one for all requests.
    ``none``: no batch has one."""
    state: StateContext | None = None
    """Layers that keep a recurrent state, and the pool of states. None: no layer does."""
    compressor: CompressorContext | None = None
    """Layers that compress keys, and their memory. None: no layer does."""
    tp_size: int = 1
    """Ranks of the server's tensor parallelism, which have a part each of the layers other than attention."""
    attn_tp_size: int = 1
    """Ranks among which the heads of an attention layer are dealt: ``tp_size``, or fewer with data parallelism of
    attention, in which ranks have different requests (``get_attention_tp_size`` of SGLang). ``layers`` have the heads
    of one rank, and so do q, k, v and the pool."""
    row_split: RowSplit | None = None
    """Rows of each prompt that this instance computes, as one of ``pcp_world_size`` ranks that each have all keys in a
    pool of their own. None: all rows."""

    @cached_property
    def head_shapes(self) -> tuple[HeadShape, ...]:
        """Different head shapes of the layers, in the order of ``layers``."""
        return tuple(dict.fromkeys(layer.head_shape for layer in self.layers))

    @property
    def num_attention_heads(self) -> int:
        """Query heads of the model: those of the widest layer, on all ``attn_tp_size`` ranks together."""
        return self.attn_tp_size * max(layer.tp_q_head_num for layer in self.layers)

    @cached_property
    def groups(self) -> tuple[KVGroup, ...]:
        """``kv_groups``, or a single group of all layers."""
        ids = tuple(layer.layer_id for layer in self.layers)
        return self.kv_groups or (KVGroup(0, ids, self.kv_pool, self.req_to_token),)

    def group_of(self, layer: AttentionLayer) -> KVGroup:
        """Group that has the layer's KV. Raises ``KeyError`` for a layer of another model."""
        for group in self.groups:
            if layer.layer_id in group.layer_ids:
                return group
        raise KeyError(f"no KV group has a layer of id {layer.layer_id}")

    @property
    def dcp_rank(self) -> int:
        """Rank of this instance, 0 .. ``dcp_world_size`` - 1; 0 if there are no ranks.

        A server with decode context parallelism gives key j of a request to rank ``j // I % R``, which has it as its
        own key number ``j // (I * R) * I + j % I`` (``KVSplit.holds``, ``key`` and ``index``; I and R are the next two
        properties). Each rank is an instance with a separate KV pool and slots. Its ``req_to_token[r, i]`` is the
        slot of its i-th key of request r, in its own pool; entries after its keys are slots that hold nothing. Batches
        differ in two fields: ``dcp_local_seq_lens``, and ``out_cache_loc``, which is -1 for a token of another rank.
        Everything else is global and equal on all ranks: positions, ``seq_lens``, tree masks, ``max_context_len``, and
        q, k and v of all rows with all heads, which a server gathers. The results of the ranks are merged by their
        log-sum-exps.

        vLLM: ``vllm/v1/attention/backends/utils.py`` (``get_dcp_local_seq_lens``) and ``vllm/v1/worker/block_table.py``
        (``compute_slot_mapping``). SGLang calls the rank ``dcp_rank``, too.
        """
        own = [split for split in self.kv_splits if split.own_pool]
        return own[0].rank if own else 0

    @property
    def dcp_world_size(self) -> int:
        """R: number of ranks with separate pools among which the keys of each request are dealt; 1 without
        ranks."""
        return max([1, *(split.ranks for split in self.kv_splits if split.own_pool)])

    @property
    def cp_kv_cache_interleave_size(self) -> int:
        """I: number of consecutive tokens of a request on one rank; 1 without ranks. It may be larger or smaller than a
        page, and need not divide it."""
        return max([1, *(split.interleave for split in self.kv_splits if split.own_pool)])

    @property
    def pcp_rank(self) -> int:
        """Rank of this instance in prefill context parallelism, 0 .. ``pcp_world_size`` - 1; 0 without it.

        A server deals the new rows of each prompt among R ranks (``RowSplit``). A rank is an instance with a separate
        pool and slots. It stores the keys and values of all rows, and computes the outputs of its own rows. ``q`` and
        the output have the T_r rows of the rank, and so have the batch's ``input_ids`` and ``positions``.
        ``extend_seq_lens``, its list on the host, ``extend_num_tokens``, ``extend_start_loc`` and ``query_start_loc``
        count these rows, of which a request or a batch may have none.
        ``k``, ``v`` and ``out_cache_loc`` have the T rows of all ranks in the order of requests and positions (with
        ``PrefillRanks.gathers`` ``k`` and ``v`` have the T_r rows of the rank). ``seq_lens`` and ``extend_prefix_lens``
        are the same on all ranks: keys of a request with and without those of the step.

        A layer that keeps a state gets the T_r rows of the rank, and continues the state that the rank before it left
        in the request's slot. ``batch.state.has_initial_state`` is False only if no token precedes these rows. All
        ranks get one pool of states, as if each had received the state of the rank before it.
        """
        return self.row_split.rank if self.row_split else 0

    @property
    def pcp_world_size(self) -> int:
        """R: number of ranks among which the rows of prompts are dealt; 1 without prefill context parallelism."""
        return self.row_split.ranks if self.row_split else 1

    @property
    def causal(self) -> bool:
        """``AttentionLayer.causal`` of all layers but the cross-attention layers."""
        return next((each.causal for each in self.layers if not each.is_cross_attention), True)

    @cached_property
    def sliding_window_size(self) -> int:
        """W of the layers that have a window; -1 if none has one. For backends that plan with one window per model.

        Raises ``ValueError`` if layers have different windows, which only ``Windows(layers="any")`` allows.
        """
        windows = {layer.sliding_window_size for layer in self.layers} - {-1}
        if len(windows) > 1:
            raise ValueError(
                f"layers have windows of {counted(windows)}, so the context has no single window: use each layer's, "
                "or declare windows=Windows(..., layers='one')"
            )
        return max(windows, default=-1)


def counted(windows: Iterable[int]) -> str:
    """Text for the windows of layers in messages."""
    return " and ".join(map(str, sorted(windows)))

"""One forward batch, and the inputs that speculative decoding adds to it.

Names, dtypes and meanings are those of production servers; if their releases differ, the docstrings state ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import torch

from .draft_decode import DraftDecodeInput
from .modes import ForwardMode
from .state_pool import StateInput

__all__ = ["DraftExtendInput", "ForwardBatch", "SpecInput", "TreeMaskMode", "VerifyInput", "VerifyMask"]


class TreeMaskMode(IntEnum):
    """Memory layouts of a tree mask; an element (or bit) that is set means "may attend".

    ``FULL_MASK``: flat bool; request blocks one after another, block i is [N, prefix_i + N] row-major, so it starts at
    ``N * sum(prefix_j for j < i) + N * N * i``, true lengths. ``QLEN_ONLY``: flat [bs, N, N], no prefix columns.
    ``QLEN_ONLY_BITPACKING``: [bs * N] items of uint8 (N <= 8), uint16 (N <= 16) or uint32 (N <= 32), bit c of row t
    set if node t may attend to node c; bit 0 is the lowest, bytes are little-endian. Larger N cannot be packed.
    """

    FULL_MASK = 0
    QLEN_ONLY = 1
    QLEN_ONLY_BITPACKING = 2


@dataclass(frozen=True)
class VerifyMask:
    """A mask buffer that a backend owns, for the draft stage to fill in place before target-verify.

    A backend allocates it in ``init_cuda_graph_state`` and returns it from ``verify_mask``. Without one, the server
    allocates a fresh FULL_MASK for every step.
    """

    buffer: torch.Tensor
    """Flat and contiguous, on the device, at least as large as ``max_bs`` requests can need:

    ``FULL_MASK``: ``max_bs * N * max_context_len`` bool or uint8, or ``max_bs * N * (max_context_len + N)`` if
    ``max_context_len`` counts keys before the step only (``ServerConventions.context_len``).
    ``QLEN_ONLY``: ``max_bs * N * N`` bool or uint8.
    ``QLEN_ONLY_BITPACKING``: ``max_bs * N`` items of the dtype that ``TreeMaskMode`` names.
    """
    mode: TreeMaskMode
    """Layout of ``buffer``."""
    max_bs: int
    """Most requests that the buffer holds."""
    is_read: bool = True
    """False: the kernel never reads it (a chain-only backend), and the prefix columns need not be filled."""

    def fits(self, bs: int) -> bool:
        """True if a batch of ``bs`` requests may use the buffer."""
        return bs <= self.max_bs


@dataclass
class VerifyInput:
    """``spec_info`` of target-verify: the draft tree of every request. N nodes per request, node 0 is the root."""

    draft_token: torch.Tensor
    """[bs * N] int64: token id of each node."""
    custom_mask: torch.Tensor | None
    """Tree visibility in ``tree_mask_mode``; FULL_MASK unless the backend's ``verify_mask`` says otherwise. None, like
    ``retrieve_*``: a chain without tree tensors, for a backend that declares ``takes_bare_chains``."""
    positions: torch.Tensor
    """[bs * N] int64: prefix + depth of the node."""
    retrieve_index: torch.Tensor | None
    """[bs, N] int64: the node's row in the flat batch, i * N + j."""
    retrieve_next_token: torch.Tensor | None
    """[bs, N] int64: first child as a local node id, or -1."""
    retrieve_next_sibling: torch.Tensor | None
    """[bs, N] int64: next sibling as a local node id, or -1."""
    spec_steps: int
    """S: longest path below the root."""
    topk: int
    """K: widest branching; 1 means a chain."""
    draft_token_num: int
    """N, the root included."""
    num_tokens_per_req: int
    """N again; during a capture 0 or -1, for a backend that declares ``takes_unset_width``."""
    tree_mask_mode: TreeMaskMode = TreeMaskMode.FULL_MASK
    """Layout of ``custom_mask``."""
    seq_lens_sum: int | None = None
    """``ForwardBatch.seq_lens_sum`` again."""
    seq_lens_cpu: torch.Tensor | None = None
    """``ForwardBatch.seq_lens_cpu`` again."""

    @property
    def max_tree_depth(self) -> int:
        """S + 1: width of the accepted path."""
        return self.spec_steps + 1


@dataclass
class DraftExtendInput:
    """``spec_info`` of both draft-extends: accepted tokens of the target, given to the draft model."""

    hidden_states: torch.Tensor
    """[T, hidden]: the target's hidden state of every row."""
    num_correct_drafts: torch.Tensor
    """[bs] int32: accepted draft tokens, 0..S."""
    num_accept_tokens: torch.Tensor
    """[bs] int32: correct + 1. In v1 the number of rows of each request; padded requests of a graph have S + 1."""
    positions: torch.Tensor
    """[T] int64: position of each row."""
    num_accept_tokens_cpu: list[int] | None = None
    """Host copy of ``num_accept_tokens``; None when the backend needs no CPU lengths."""
    num_tokens_per_req: int = -1
    """N in v2; -1 in v1, except in the captured batch, which has S + 1. During a capture 0 or -1 in both, for a backend
    that declares ``takes_unset_width``."""
    num_tokens_for_logprob_per_req: int = 1
    """Rows of each request that give logits: 1, the last."""
    extend_seq_lens_tensor: torch.Tensor | None = None
    """[bs] int32: rows of each request; set in a graph, at capture and at every replay."""
    extend_seq_lens_cpu: list[int] | None = None
    """Host copy of ``extend_seq_lens_tensor``; v2 always gives ``[N] * bs``."""
    select_index: torch.Tensor | None = None
    """[bs] int64, v2: row of the last accepted token, i * N + num_correct_drafts[i]; used by the caller, afterwards."""


SpecInput = VerifyInput | DraftExtendInput | DraftDecodeInput


@dataclass
class ForwardBatch:
    """The batch that a backend is given for one step.

    **At a replay** ``init_forward_metadata_out_graph`` gets a *view* of it instead: a namespace with fewer attributes.
    Some are longer than the batch. In the tables, B is ``batch_size``, padded requests included. R of them are live
    and come first; R is 0 on an empty data-parallel rank. T is the number of live tokens. A request was captured with
    S + 1 or N rows. max_bs is that of the graph state.

    ================================== ============================= ======================= =========================
    attribute                          decode, target-verify         draft-extend (v1)       draft-extend-v2
    ================================== ============================= ======================= =========================
    ``input_ids``                      [B] or [B * N]                [T], ragged             [T] = [R * N]
    ``positions``                      [B] or [B * N]                absent                  absent
    ``req_pool_indices``, ``seq_lens`` [B]                           [max_bs]: slice to B    [max_bs]: slice to B
    ``seq_lens_cpu``                   [B] or None                   [max_bs] or None        [max_bs] or None
    ``seq_lens_sum``                   of B requests, or None        of B requests, or None  of B requests, or None
    ``query_start_loc``                [B + 1], where padded         the same                the same
                                       requests have no rows; else
                                       absent
    ``out_cache_loc``                  [T]                           [T]                     [T]
    ``group_cache_locs``               [G, T], only with groups      the same                the same
    ``index_cache_loc``                [T], only for some ranks      the same                the same
    ``num_padding``                    B - R                         absent                  absent
    ``actual_forward_mode``            ``forward_mode``              absent                  absent
    ``mm_prefix_range*``               [B], only with spans          absent                  absent
    ``extend_*``, ``extras``           absent                        absent                  absent
    ``qq_bias``                        [B * N, W], only with a bias  absent                  absent
    ================================== ============================= ======================= =========================

    So ``input_ids.shape[0] // batch_size`` is not the width of a draft-extend: take S + 1 or N from the context.

    The view of an extend has every attribute of its eager batch except ``extras``, for B requests and for P rows, the
    token count that the graph was captured with: ``input_ids``, ``positions`` and ``out_cache_loc`` are [P], the others
    [B] long. It has ``actual_forward_mode`` as well, ``num_padding`` is B - R, and ``extend_num_tokens`` is T.
    With a bias it has ``qq_bias`` [P, W], and with windows of encoders ``cu_window_seqlens`` [P + 1].

    The view of a draft-decode has the attributes of a decode's. It describes the first forward: ``input_ids`` and
    ``positions`` are [B * K], ``out_cache_loc`` [R * K]; ``spec_info.out_cache_loc`` is [R * K * S].

    ``spec_info`` is None in decode and extend. Its fields in the other modes:

    ================================== ============================= ======================= =========================
    field                              target-verify                 draft-extend (v1)       draft-extend-v2
    ================================== ============================= ======================= =========================
    ``positions``                      [T] = [R * N]                 [B * (S + 1)]           [B * N]
    ``num_tokens_per_req``             N                             -1                      N
    ``draft_token``, ``retrieve_*``    R requests                    no                      no
    ``custom_mask``                    the backend's buffer, or a    no                      no
                                       fresh one of R requests
    ``hidden_states``                  no                            [T, hidden]             [T, hidden]
    ``num_accept_tokens``,             no                            [B], S + 1 in padding   [B], N in padding
    ``num_correct_drafts``
    ``num_accept_tokens_cpu``          no                            B counts, or None       None
    ``extend_seq_lens_tensor``         no                            [B], S + 1 in padding   [B], N in padding
    ``extend_seq_lens_cpu``            no                            B counts, or None       ``[N] * B``
    ``select_index``                   no                            None                    [B]
    ================================== ============================= ======================= =========================

    Padded requests have ``req_pool_indices`` 0 (or a stale row), ``seq_lens`` at the fill value, and slot 0 (or -1) for
    every token. In draft-extends they have fewer keys than rows, so a prefix computed from these is negative: clamp it.
    If they have neither rows nor keys (``Dialect.padded_requests``), read 0 for the S + 1 and N of padding above; then
    every mode has ``query_start_loc``, and rows after its last entry belong to no request.

    **Rows of v1 in a graph.** It was captured with S + 1 rows per request, and ``q`` keeps those B * (S + 1) rows. At a
    replay requests are packed without gaps: request i has ``num_accept_tokens[i]`` rows, after those of the requests
    before it. Live requests come first, then padded ones with S + 1 rows each; rows after the last belong to no
    request, even if no request is padded. In target-verify and v2 request i has rows i * N .. i * N + N - 1, padded or
    not.

    **Rows of extend in a graph.** It is captured with P rows and replayed with T <= P: requests are packed without
    gaps, request i has ``extend_seq_lens[i]`` rows, padded ones have none and at most one key (``seq_lens`` and
    ``extend_prefix_lens`` are the fill value), and rows T .. P - 1 belong to no request. At capture the first requests
    have no prefix and as many rows as a request may have (``BackendContext.max_extend_tokens``, or the rest of P), and
    the others none: no replay has a longer request.
    """

    forward_mode: ForwardMode
    """Mode of the step. It decides how many rows a request has, and what ``seq_lens`` counts."""
    batch_size: int
    """Number of requests (bs), padded ones included."""
    input_ids: torch.Tensor
    """[T] int64: token id of each row."""
    req_pool_indices: torch.Tensor
    """[bs] int64: row of ``req_to_token``. Row 0 is a reserved dummy whose slots are all 0."""
    seq_lens: torch.Tensor
    """[bs] int64; its meaning depends on the mode: see ``ForwardMode``."""
    out_cache_loc: torch.Tensor
    """[T] int64: KV slot of each new token; for padding 0, or -1 if the backend's ``padding_slots`` has it. On a rank
    -1 for a token that another rank stores; it may be stored in page 0 or nowhere."""
    positions: torch.Tensor
    """[T] int64: zero-based absolute position of each row."""
    seq_lens_cpu: torch.Tensor | None = None
    """[bs] int64 on the host; None when the backend does not need CPU lengths."""
    seq_lens_sum: int | None = None
    """Sum of ``seq_lens``; None if and only if ``seq_lens_cpu`` is None."""
    extend_num_tokens: int | None = None
    """Sum of ``extend_seq_lens``; never with padding."""
    extend_seq_lens: torch.Tensor | None = None
    """[bs] int32: new tokens of each request. Extend, and eager draft-extends."""
    extend_prefix_lens: torch.Tensor | None = None
    """[bs] int32: tokens before them. Extend: tokens from a prefix cache and earlier chunks: 0, any part of a page, or
    many pages."""
    extend_start_loc: torch.Tensor | None = None
    """[bs] int32: exclusive cumsum of ``extend_seq_lens``."""
    extend_seq_lens_cpu: list[int] | None = None
    """Host copy of ``extend_seq_lens``. Extend always has it: the scheduler cut the chunks, so no device wait is
    needed. An eager draft-extend v2 has it too: ``[N] * bs``. In v1 it is None when the backend does not need CPU
    lengths."""
    extend_prefix_lens_cpu: list[int] | None = None
    """Host copy of ``extend_prefix_lens``. It is always set in extend. In draft-extends it is None when the backend
    does not need CPU lengths."""
    query_start_loc: torch.Tensor | None = None
    """[bs + 1] int32: first row of each request, and the end of the last one's; padded requests have no rows. In a
    draft-decode these are the rows of each forward. None, and absent from a replay's view, if padded requests have rows
    (``Dialect.padded_requests``). With encoder-only layers it is always given: ``cu_seqlens`` of the sequences."""
    cu_window_seqlens: torch.Tensor | None = None
    """[windows + 1] int32: first row of each window of encoder-only layers, and the end of the last one. A window is
    within a sequence. In a graph of P rows [P + 1]: entries after those of the batch repeat its last one, and the graph
    is captured with windows of one row. None, and absent from a replay's view, if no layer has windows
    (``AttentionLayer.encoder_window``)."""
    spec_info: SpecInput | None = None
    """Inputs of speculative decoding: ``VerifyInput``, ``DraftExtendInput`` or ``DraftDecodeInput``. None in decode and
    extend."""
    num_padding: int = 0
    """Number of padded requests at the end of the batch; 0 in eager mode."""
    group_cache_locs: torch.Tensor | None = None
    """[G, T] int64: slots of the new tokens in the pool of each of ``BackendContext.kv_groups``; those of the first are
    ``out_cache_loc``. None if layers share one pool."""
    dcp_local_seq_lens: torch.Tensor | None = None
    """[bs] int32: keys of each request in the pool of this rank, those of the step included, in every mode and with
    every convention of ``seq_lens``; 0 if all are on other ranks. None, and absent from a replay's view, if the
    instance is not a rank (``BackendContext.dcp_rank``)."""
    index_cache_loc: torch.Tensor | None = None
    """[T] int64: slot of each new token in the index pool of a rank, which stores the index keys of all tokens. None,
    and absent from a replay's view, if index keys are in the slots of the KV pool."""
    pcp_rows: torch.Tensor | None = None
    """[T_r] int64: row, among those of all ranks, of each row of this rank, in a batch of prefill context parallelism
    (``BackendContext.pcp_rank``); ascending. None if the instance computes all rows."""
    mm_prefix_range: list[list[tuple[int, int]]] | None = None
    """Bidirectional spans of each of ``batch_size`` requests, on the host: first and last position of each, both
    included, counted from the request's first token. Padded requests have none. None, and absent from a replay's view,
    if no layer has spans (``Capabilities.spans``)."""
    mm_prefix_range_tensor: torch.Tensor | None = None
    """[bs, R, 2] int32: ``mm_prefix_range`` on the device, followed by (0, 0) where a request has fewer than R. In
    eager mode R is the largest number in the batch, and a batch without spans has None. In a graph R is
    ``BackendContext.max_spans``; it is captured without any span. Rows may be columns of a wider buffer
    (``ServerConventions.takes_column_views``)."""
    qq_bias: torch.Tensor | None = None
    """[T, W] float32, if ``BackendContext.qq_bias`` asks for it; else None, and absent from a replay's view. Column c
    of row t is its bias on row c of its request, both rows of this step. It is added to the logit in natural units,
    after scaling and soft cap, in all layers and heads. Keys of the prefix have no bias. A row that may not see another
    (later rows, other branches of a tree) has -inf there. All numbers are exact in bf16. W is N in target-verify, and
    ``BackendContext.max_extend_tokens`` in extend.

    ``stride(0)`` is more than W, and memory between the rows holds NaN. Columns past the rows of a request, and padded
    rows, hold any finite numbers. In graphs the server changes the values between replays; the address stays the same,
    and at capture the values are 0."""
    encoder_lens: torch.Tensor | None = None
    """[bs] int64: keys of the encoder of each request, which cross-attention layers see; ``seq_lens`` does not count
    them. They are 0 for a request without an encoder input, which is eager only; its row may hold any finite numbers,
    since the model multiplies it by 0. In padding: the longest length at capture (``BackendContext.max_encoder_len``),
    then 0 or those of an earlier replay. None, and absent from a replay's view, without cross-attention layers."""
    encoder_lens_cpu: list[int] | None = None
    """Host copy of ``encoder_lens``; None when the backend does not need CPU lengths."""
    encoder_out_cache_loc: torch.Tensor | None = None
    """[E] int64: slots of the encoder tokens that this step stores, request by request, in the pool of the
    cross-attention layers. Only requests whose first rows are in this step have any. None if no request has, and in
    decode."""
    state: StateInput | None = None
    """States of the requests, for layers that keep one; None, and absent from a replay's view, if no layer does."""
    extras: dict[str, object] = field(default_factory=dict)
    """A field in which a backend may keep its own data with the batch; the kit never reads it."""

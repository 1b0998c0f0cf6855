"""Hand-overs by SGLang's own code: the Mooncake managers of prefill servers and of a decode server, without a network.

SGLang decides which ranks of the sender send, writes and reads both messages of the receiver, and computes each
address: pages, head slices, windows of a convolution in parts, states. Its pools describe their memory themselves. The
bridge replaces sockets, the bootstrap server, threads, and the transfer engine, which copies within the process. It
also does what the schedulers of both servers do: it looks up pages in request tables, and sends two chunks.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.disaggregation.common.conn import PrefillServerInfo
from sglang.srt.disaggregation.common.utils import FastQueue, TransferKVChunk
from sglang.srt.disaggregation.mooncake.conn import KVArgsRegisterInfo, MooncakeKVManager, TransferInfo
from sglang.srt.disaggregation.utils import build_kv_layer_ids, setup_state_kv_args
from sglang.srt.mem_cache.common import kv_to_page_indices
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.runtime_context import get_parallel

from attn_testkit.contract import BackendContext, HandedRequest, HandOver, Sender

from ..registered import Registered
from .pools import over
from .state_pools import config_of, kv_pool, request_pool, softmax_of

_Result = TypeVar("_Result")


class _AtOnce(Executor):
    """An executor that runs each call when it is submitted, in the thread that the kit watches."""

    def submit(self, fn: Callable[..., _Result], /, *given: Any, **named: Any) -> Future[_Result]:
        """Run the call."""
        made = Future[_Result]()
        made.set_result(fn(*given, **named))
        return made


class _Engine(Registered):
    """A transfer engine whose peers are in this process."""

    def get_session_id(self) -> str:
        """Name of the receiver in messages."""
        return "receiver"

    def batch_transfer_sync(
        self, session: str, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]
    ) -> int:
        """Copy bytes between addresses. Returns 0, which means success."""
        self.copy(sources, targets, lengths)
        return 0


class _Manager(MooncakeKVManager):  # type: ignore[misc]
    """The manager of one rank. Of its constructor only the attributes remain that its mapping reads."""

    def __init__(self, engine: _Engine, pool: Any, states: Any, rank: int, size: int, heads: int) -> None:
        """``pool``: SGLang's KV pool; ``states``: its pool of states, or None; ``heads``: KV heads of the model."""
        latent = isinstance(pool, MLATokenToKVPool)
        self.engine, self.kv_args = engine, _described(pool, rank, heads, latent=latent)
        engine.add(_memory_of(pool, states))
        self.is_mla_backend, self.is_hybrid_mla_backend = latent, self.kv_args.is_hybrid_mla_backend
        self.attn_tp_size = self.state_tp_size = size
        self.attn_tp_rank = rank
        self.attn_cp_size = self.pp_size = self.dcp_size = 1
        self.attn_cp_rank = self.pp_rank = self.dcp_rank = self.attn_dp_rank = 0
        self.local_ip, self.rank_port, self.bootstrap_port = "", 0, 0
        self.enable_staging = self.enable_trace = self.enable_all_cp_ranks_for_transfer = False
        self.enable_custom_mem_pool = self.enable_deferred_decode_kv_release = False
        self.deferred_bootstrap, self.max_transfer_batch_indices = None, 0
        self.transfer_infos: dict[int, dict[str, TransferInfo]] = {}
        self.decode_kv_args_table: dict[str, KVArgsRegisterInfo] = {}
        self.request_status: dict[int, int] = {}
        self.failure_records: dict[int, str] = {}
        self.req_to_decode_prefix_len: dict[int, int] = {}
        self._staging_outstanding = defaultdict[int, int](int)
        self.session_failures = defaultdict[str, int](int)
        self.failed_sessions, self.state_strides_validated = set[str](), set[str]()
        self.failed_session_probes: dict[str, Any] = {}
        self.state_layout_rejections: dict[str, str] = {}
        self.session_lock, self.failure_lock = threading.Lock(), threading.Lock()
        self._deferred_ack_targets: dict[int, Any] = {}
        self._deferred_ack_poisoned_rooms = set[int]()

    def send_kv_status_message(self, **_message: Any) -> None:
        """Send nothing: the receiver is in this process."""

    def send(self, room: int, session: str, message: Sequence[bytes], pages: Any, states: list[list[int]]) -> None:
        """Do what the threads of a prefill server do for one request, after the receiver's message about it."""
        self.transfer_infos[room] = {session: TransferInfo.from_zmq(message)}
        self.request_status[room] = KVPoll.WaitingForInput
        queue, cut = FastQueue(), len(pages) // 2
        for part in (slice(0, cut), slice(cut, len(pages))):
            last = part.stop == len(pages)
            queue.put(TransferKVChunk(room, pages[part], part, last, 0, states if last else None))
            if last:
                break
        queue.put(None)
        self.transfer_worker(queue, _AtOnce())
        if room in self.failure_records:
            raise RuntimeError(f"SGLang's transfer failed: {self.failure_records[room]}")


def _described(pool: Any, rank: int, heads: int, *, latent: bool) -> KVArgs:
    """The description of a rank's memory, with the values that ``_init_kv_manager`` of both schedulers sets."""
    args = KVArgs()
    args.engine_rank, args.pp_rank, args.page_size = rank, 0, pool.page_size
    args.prefill_start_layer, args.prefill_end_layer = 0, None
    args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = pool.get_contiguous_buf_infos()
    args.kv_layer_ids = build_kv_layer_ids(
        token_to_kv_pool=pool, draft_token_to_kv_pool=None, num_draft_entries=0, num_hidden_layers=0
    )
    args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = [], [], []
    if not latent:
        args.kv_head_num, args.total_kv_head_num = pool.head_num, heads
    setup_state_kv_args(args, pool)
    return args


def _memory_of(pool: Any, states: Any) -> list[torch.Tensor]:
    inner = getattr(pool, "full_kv_pool", pool)
    found = list(inner.kv_buffer) if isinstance(inner, MLATokenToKVPool) else [*inner.k_buffer, *inner.v_buffer]
    return found if states is None else [*found, *states.mamba_cache.conv, states.mamba_cache.temporal]


class Receiver:
    """The servers of one hand-over: managers of this rank, and of the ranks of the sender that serve it."""

    def __init__(self, context: BackendContext, pool: Any, states: Any, handed: HandOver) -> None:
        """``pool``: SGLang's KV pool; ``states``: its pool of states, or None. ``handed`` has the sender's memory."""
        self.context, self.senders, self.keeps_states = context, handed.senders, states is not None
        engine, ranks = _Engine(), len(handed.senders)
        self.own = _Manager(engine, pool, states, handed.tp_rank, handed.tp_size, handed.kv_heads)
        self.info = PrefillServerInfo(
            attn_tp_size=ranks, attn_cp_size=1, dp_size=1, pp_size=1, page_size=pool.page_size, kv_cache_dtype=None,
            follow_bootstrap_room=False,
        )  # fmt: skip
        self.own._resolve_rank_mapping(self.info)
        self.session = engine.get_session_id()
        registration = KVArgsRegisterInfo.from_zmq(self.own.build_receiver_registration_message())
        self.ranks = {rank: _sender(engine, context, handed, rank) for rank in self.info.target_tp_ranks}
        for manager in self.ranks.values():
            if refused := manager._publish_peer_registration(self.session, registration):
                raise RuntimeError(f"SGLang refuses the receiver: {refused}")

    def receive(self, handed: HandOver) -> None:
        """Hand requests over, one at a time. Raises ``RuntimeError`` if SGLang says that a transfer failed."""
        for room, request in enumerate(handed.requests):
            ours, theirs = _pages(self.context, handed, request, self.own.kv_args.page_size)
            for rank, manager in self.ranks.items():
                message = self.own.build_receiver_metadata_message(
                    bootstrap_room=room, required_dst_info_num=self.info.required_dst_info_num, kv_indices=ours,
                    aux_index=0, state_indices=[[request.state_slot]] if self.keeps_states else None,
                    decode_prefix_len=request.starts[0] if request.starts else 0,
                    # As CommonKVReceiver._setup_bootstrap_infos: each rank of MLA has all rows, and one sends.
                    is_dummy=self.own.is_mla_backend and rank != self.info.target_tp_rank,
                )  # fmt: skip
                sent = [[request.sender_state_slot]] if self.keeps_states else []
                manager.send(room, self.session, message, theirs, sent)


def _pages(
    context: BackendContext, handed: HandOver, request: HandedRequest, page: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Pages of a request's tokens here and at the sender, int32."""
    if not handed.senders[0].groups:
        return np.zeros(0, np.int32), np.zeros(0, np.int32)
    group = handed.senders[0].groups[0]
    tokens = slice(request.starts[0], request.end)
    ours = kv_to_page_indices(context.groups[group.index].req_to_token[request.row, tokens], page)
    theirs = kv_to_page_indices(group.req_to_token[request.sender_row, tokens], page)
    return ours.astype(np.int32), theirs.astype(np.int32)


def _sender(engine: _Engine, context: BackendContext, handed: HandOver, rank: int) -> _Manager:
    """The manager of a rank of the sender, whose pools lie over the kit's memory."""
    sender, ranks = handed.senders[rank], len(handed.senders)
    of_rank = {
        **dict.fromkeys(("tp_size", "attn_tp_size", "moe_tp_size"), ranks),
        "tp_rank": rank,
        "attn_tp_rank": rank,
    }
    if sender.state is None:
        return _Manager(engine, over(sender.groups[0].kv_pool), None, rank, ranks, handed.kv_heads)
    with get_parallel().override(**of_rank):
        pool, states = _hybrid_pools(context, sender, ranks)
        return _Manager(engine, pool, states, rank, ranks, handed.kv_heads)


def _hybrid_pools(context: BackendContext, sender: Sender, ranks: int) -> tuple[Any, Any]:
    """SGLang's KV pool and its pool of states, of a rank of a hybrid model, over the kit's memory."""
    assert context.state is not None
    assert sender.state is not None
    there = context
    if sender.groups:
        own = sender.groups[0].kv_pool
        by_id = {layer.layer_id: layer for layer in own.layers}
        layers = tuple(by_id.get(layer.layer_id, layer) for layer in context.layers)
        there = replace(context, layers=layers, kv_pool=own, req_to_token=sender.groups[0].req_to_token)
    state = replace(context.state, layers=sender.state.layers, pool=sender.state)
    softmax = softmax_of(there)
    config = config_of(state, [layer.layer_id for layer in softmax], ranks)
    requests = request_pool(replace(there, modes=frozenset()), state, config, 0)
    return kv_pool(there, softmax, requests.mamba_pool), requests.mamba_pool

"""Hand-overs by vLLM's own code: the NIXL workers of prefill ranks and of a decode rank, without a network.

vLLM describes its KV caches in regions, validates the peers, maps ranks and heads, computes each descriptor, trims and
splits blocks, and converts what arrived if the sender has smaller blocks. The bridge replaces NIXL's agent, which here
copies within the process, the handshake over a socket, and the scheduler, which says which blocks a request has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    NixlAgentMetadata,
    NixlConnectorMetadata,
    RemoteMeta,
    ReqMeta,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from attn_testkit.contract import BackendContext, HandedRequest, HandOver, KVGroup, KVPool, Sender

from ..registered import Registered
from .groups import Groups
from .layers import cache_of, name_of

_SENDER, _RECEIVER = "sender", "receiver"


class _Agent:
    """An agent of NIXL whose peers are in this process. A transfer is done when it has begun."""

    def __init__(self, memory: Registered, name: str) -> None:
        self.memory, self.name = memory, name
        self.lists: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
        """Addresses and lengths of the descriptors of each list."""
        self.transfers: list[tuple[int, Any, int, Any]] = []

    def get_reg_descs(self, ranges: Any, mem_type: str) -> Any:
        """Descriptors of memory: the ranges themselves. Memory is registered with its tensors."""
        return ranges

    def register_memory(self, descs: Any, backends: Any) -> None:
        """Do nothing: memory is registered with its tensors."""

    def get_agent_metadata(self) -> bytes:
        """The agent's name, by which peers find it."""
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        """The name of a peer."""
        return metadata.decode()

    def prep_xfer_dlist(self, agent: str, descs: np.ndarray[Any, Any], mem_type: str) -> int:
        """Keep a list of descriptors [n, 5]: address, length, device, distance and number of blocks."""
        parts = [(row[0] + np.arange(row[4]) * row[3], np.full(row[4], row[1])) for row in descs.astype(np.int64)]
        addresses, lengths = zip(*parts, strict=True)
        self.lists.append((np.concatenate(addresses), np.concatenate(lengths)))
        return len(self.lists) - 1

    def make_prepped_xfer(
        self, operation: str, local: int, local_ids: Any, remote: int, remote_ids: Any, notif_msg: bytes
    ) -> int:
        """Prepare a read of remote descriptors into local ones."""
        assert operation == "READ"
        self.transfers.append((local, local_ids, remote, remote_ids))
        return len(self.transfers) - 1

    def transfer(self, handle: int) -> None:
        """Copy. Raises ``RuntimeError`` if two descriptors have different lengths, as NIXL does."""
        local, local_ids, remote, remote_ids = self.transfers[handle]
        targets, lengths = (each[local_ids] for each in self.lists[local])
        sources, others = (each[remote_ids] for each in self.lists[remote])
        if not np.array_equal(lengths, others):
            raise RuntimeError("the lengths of descriptors of a transfer differ")
        self.memory.copy(sources.tolist(), targets.tolist(), lengths.tolist())

    def check_xfer_state(self, handle: int) -> str:
        """State of a transfer."""
        return "DONE"

    def get_xfer_telemetry(self, handle: int) -> Any:
        """Figures of a transfer, which nobody reads."""
        return SimpleNamespace(xferDuration=0, postDuration=0, totalBytes=0, descCount=0)

    def release_xfer_handle(self, handle: int) -> None:
        """Do nothing: handles are never used again."""

    def release_dlist_handle(self, handle: int) -> None:
        """Do nothing, likewise."""

    def remove_remote_agent(self, agent: str) -> None:
        """Do nothing: peers end with the case."""

    def deregister_memory(self, descs: Any) -> None:
        """Do nothing, likewise."""

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """Messages of peers: none."""
        return {}

    def send_notif(self, agent: str, notif_msg: bytes) -> None:
        """Do nothing: the sender's blocks are not freed."""


def _worker(
    config: Any, caches: dict[str, torch.Tensor], kv_config: Any, memory: Registered, rank: int, size: int, name: str
) -> Any:
    """vLLM's worker of one rank, with its KV caches registered."""
    memory.add(caches.values())
    with mock.patch.multiple(
        base_worker,
        NixlWrapper=lambda *_: _Agent(memory, f"{name} {rank}"),
        nixl_agent_config=None,
        check_nixl_version=lambda _: None,
        get_tensor_model_parallel_rank=lambda: rank,
        get_tensor_model_parallel_world_size=lambda: size,
        # It is a hash of a model's configuration, which the bridge does not have.
        compute_nixl_compatibility_hash=lambda *_, **__: "the same model",
    ):
        made = NixlPullConnectorWorker(config, name, kv_config)
        made.register_kv_caches(caches)
    return made


class Receiver:
    """The workers of one hand-over: that of this rank, and those of the ranks of the sender that serve it."""

    def __init__(self, context: BackendContext, config: Any, layers: Any, groups: Groups, handed: HandOver) -> None:
        """``layers`` and ``groups``: vLLM's layers and its KV cache groups. ``handed`` has the sender's memory."""
        self.context, self.senders, self.groups = context, handed.senders, groups
        whole = _with_transfers(config, handed.kv_heads, latent=context.layers[0].is_mla)
        memory, ranks = Registered(), len(handed.senders)
        caches = {name_of(layer): cache_of(context, layer, layers[name_of(layer)]) for layer in context.layers}
        self.own = _worker(whole, caches, groups.config, memory, handed.tp_rank, handed.tp_size, _RECEIVER)
        self.own._engine_by_address["", 0] = _SENDER  # as after its handshake
        self.numbers = [_number(context, group) for group in groups.of_kit]
        for rank in self.own.transfer_topo.handshake_target_ranks(ranks):
            pools = [handed.senders[rank].groups[number].kv_pool for number in self.numbers]
            there = _worker(
                whole,
                self._caches(handed.senders[rank]),
                _config_of(groups.config, pools),
                memory,
                rank,
                ranks,
                _SENDER,
            )
            metadata = msgspec.msgpack.decode(
                there.xfer_handshake_metadata.agent_metadata_bytes, type=NixlAgentMetadata
            )
            agent = self.own.add_remote_agent(metadata, remote_tp_rank=rank, remote_tp_size=ranks)
            self.own._remote_agents[_SENDER][0, rank] = agent

    def _caches(self, sender: Sender) -> dict[str, torch.Tensor]:
        pools = {layer.layer_id: group.kv_pool for group in sender.groups for layer in group.kv_pool.layers}
        return {name_of(layer): _cache_of(pools[layer.layer_id], layer.layer_id) for layer in self.context.layers}

    def receive(self, handed: HandOver) -> None:
        """Read all requests. Raises ``RuntimeError`` if vLLM says that a transfer failed."""
        metadata = NixlConnectorMetadata()
        for number, request in enumerate(handed.requests):
            blocks = [self._blocks(handed, request, group) for group in range(len(self.numbers))]
            ours, theirs = (tuple(each) for each in zip(*blocks, strict=True))
            metadata.reqs_to_recv[str(number)] = ReqMeta(
                local_block_ids=ours, local_physical_block_ids=ours, tp_size=len(handed.senders), awaiting_kvs=True,
                remote=RemoteMeta(theirs, "", 0, _SENDER, str(number), num_tokens=request.end),
            )  # fmt: skip
        self.own.start_load_kv(metadata)
        results = self.own.get_transfer_results()
        if failed := results.failed_recving | (set(metadata.reqs_to_recv) - results.finished_recving):
            raise RuntimeError(f"vLLM's transfers of requests {', '.join(sorted(failed))} failed")

    def _blocks(self, handed: HandOver, request: HandedRequest, group: int) -> tuple[list[int], list[int]]:
        """Blocks of a request here, without those of a prefix that is here already, and all at the sender."""
        number = self.numbers[group]
        sender, own, page = handed.senders[0].groups[number], self.groups.of_kit[group], self.context.page_size
        ours = own.req_to_token[request.row, request.starts[number] : request.end : page] // page
        there = sender.kv_pool.page_size
        # In a group of windowed layers vLLM names only the blocks that a row sees (``get_exchange_clipped_blocks``).
        is_windowed = len(handed.senders[0].groups) > 1 and sender.kv_pool.layers[0].sliding_window_size >= 0
        first = request.starts[number] // there * there if is_windowed else 0
        theirs = sender.req_to_token[request.sender_row, first : request.end : there] // there
        return ours.tolist(), theirs.tolist()


def _number(context: BackendContext, group: KVGroup) -> int:
    """Number of a KV group in ``Sender.groups``."""
    return [each.index for each in context.groups if each.kv_pool.layers].index(group.index)


def _with_transfers(config: Any, kv_heads: int, *, latent: bool) -> Any:
    """vLLM's configuration with a connector, and with the number of the model's KV heads."""
    made = SimpleNamespace(**vars(config))
    made.model_config = SimpleNamespace(**vars(config.model_config))
    made.model_config.use_mla, made.model_config.enable_sleep_mode = latent, False
    made.model_config.get_total_num_kv_heads = lambda: kv_heads
    made.kv_transfer_config = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both", kv_buffer_device="cuda")
    return made


def _config_of(own: Any, pools: Sequence[KVPool]) -> Any:
    """The KV cache groups of a rank of the sender, which has other heads and blocks."""
    groups = [
        KVCacheGroupSpec(
            group.layer_names,
            replace(group.kv_cache_spec, block_size=pool.page_size, num_kv_heads=pool.layers[0].tp_k_head_num),
        )
        for group, pool in zip(own.kv_cache_groups, pools, strict=True)
    ]
    return KVCacheConfig(pools[0].num_slots // pools[0].page_size, [], groups)


def _cache_of(pool: KVPool, layer_id: int) -> torch.Tensor:
    """[blocks, heads, block size, content] of a layer of the sender, whose pool has vLLM's layout LBHNC."""
    if pool.one_row:
        return pool.get_kv_pages(layer_id)[0].transpose(1, 2)
    return pool.get_layer_buffer(layer_id).flatten(-2)

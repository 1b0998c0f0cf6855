"""Offloading by SGLang's own code: the controller of HiCache and its host pools, over the host memory of the kit.

SGLang lays the host pools out, orders and merges slots, and submits copies on the stream, one layer after another, with
an event for each. Its KV pool waits for the event of a layer when a forward asks for its keys. The bridge does what its
prefix cache does: it says which pages move, and names the batch that waits. HiCache moves whole pages only. The rows of
a page that is not full are moved by the bridge, because servers would compute them again.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from sglang.srt.managers import cache_controller
from sglang.srt.managers.cache_controller import CacheOperation, HiCacheController
from sglang.srt.mem_cache import l2_transfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _build_mha_mla_host_pool
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

from attn_testkit.backends.offloading import all_to_device, all_to_host
from attn_testkit.backends.vendor.provider import device_is_real
from attn_testkit.contract import BackendContext, HostPool, Moved, Transfer

_ANY_SIZE = 1 << 50
"""Bytes of host memory that a pool may have: the kit has allocated it already."""


class HiCache:
    """The controller of one instance."""

    def __init__(self, context: BackendContext, pool: Any, host: HostPool, stream: torch.cuda.Stream) -> None:
        """``pool``: SGLang's KV pool; ``host``: the kit's host memory for it; ``stream``: the server's for copies."""
        if not device_is_real(context.device):
            # SGLang asks which device the machine has when it is imported, and finds none.
            cache_controller.device_module = l2_transfer.device_module = torch.cuda
        self.context, self.page = context, context.page_size
        with _memory_of(host, context.device.type), host_memory_budget_scope(_ANY_SIZE):
            pool_host = _build_mha_mla_host_pool(
                pool=pool, host_to_device_ratio=1.0, page_size=self.page, layout=host.layout, allocator_type="default",
                pool_label="kv", host_token_capacity=host.num_slots,
            )  # fmt: skip
        allocator = SimpleNamespace(get_kvcache=lambda: pool, set_hicache_transfer_done_event=lambda *_: None)
        self.controller = HiCacheController(
            allocator, pool_host, self.page, None, threading.Event(), io_backend="direct"
        )
        engine = self.controller.l2_transfer_engine
        engine.device_to_host_stream = engine.host_to_device_stream = self.stream = stream
        self.scheduler = torch.cuda.Stream(context.device)  # type: ignore[no-untyped-call, unused-ignore]

    def offload(self, transfer: Transfer) -> torch.cuda.Event | None:
        """Let full pages leave. Returns an event after the last copy."""
        full, rest = self._split(transfer.keys[0])
        if len(rest.slots):
            all_to_host(self.context, replace(transfer, keys=(rest,)))
        if not len(full.slots):
            return None
        self.controller.write_queue.append(CacheOperation(full.host_slots, full.slots, node_id=0))
        self.controller.write_fence_stream = torch.cuda.current_stream()
        with torch.cuda.stream(self.scheduler):
            self.controller.start_writing()
        done: torch.cuda.Event = self.controller.ack_write_queue.pop().finish_event
        return done

    def reload(self, transfer: Transfer) -> torch.cuda.Event | None:
        """Let full pages come back, for which the following forwards wait. Returns an event after the last copy."""
        full, rest = self._split(transfer.keys[0])
        if len(rest.slots):
            all_to_device(self.context, replace(transfer, keys=(rest,)))
        if not len(full.slots):
            return None
        counter = self.controller.layer_done_counter
        following = counter.events[(counter.producer_index + 1) % counter.num_counters]
        if not following.finish_event.query():
            self.stream.synchronize()  # A server loads once for a batch, and has three batches in flight.
        self.controller.load_queue.append(CacheOperation(full.host_slots, full.slots, node_id=0))
        self.controller.load_fence_stream = torch.cuda.current_stream()
        with torch.cuda.stream(self.scheduler):
            counter.set_consumer(self.controller.start_loading())
        done: torch.cuda.Event = self.controller.ack_load_queue.pop().finish_event
        return done

    def _split(self, moved: Moved) -> tuple[Moved, Moved]:
        """Slots of full pages, and those of a page that is not full."""
        cut = len(moved.slots) // self.page * self.page
        return Moved(moved.slots[:cut], moved.host_slots[:cut]), Moved(moved.slots[cut:], moved.host_slots[cut:])


@contextmanager
def _memory_of(host: HostPool, device: str) -> Iterator[None]:
    """Let SGLang's host pools allocate the kit's memory, which is pinned."""

    def allocate(dims: tuple[int, ...], dtype: torch.dtype, **_: Any) -> torch.Tensor:
        count = math.prod(dims)
        if count * dtype.itemsize != len(host.memory):
            raise RuntimeError(f"SGLang's host pool has {count} numbers of {dtype}, the kit's {len(host.memory)} bytes")
        return host.memory.view(dtype).view(dims)

    with mock.patch.dict(ALLOC_MEMORY_FUNCS, {device: allocate}):
        yield

"""Healthy parents that receive memory from another instance in blocks, as connectors of servers do.

A block is as many tokens as the smaller of two pages: it is consecutive on both sides. Every quantity is one small
method, so that a bug is one override. They share no code with the mapping of the adapters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from typing_extensions import override

from attn_testkit.contract import (
    AttentionLayer,
    BackendContext,
    HandedRequest,
    HandOver,
    KVGroup,
    KVPool,
    Receives,
    State,
    StateLayer,
    StatePool,
)

from .dense import DenseBackend
from .grouped import GroupedBackend
from .indexer import IndexerParent
from .states import StateParent

_ALL = frozenset({"same", "fewer", "more"})
_INDEX_PAGE, _INDEX_WIDTH = 64, 128


class _Keys:
    """The mapping of K and V."""

    context: BackendContext

    def receive(self, handed: HandOver) -> None:
        """Copy the blocks of all requests, group by group."""
        for number, group in self.groups():
            for request in handed.requests:
                for layer in self.layers_of(group):
                    self.receive_layer(number, group, layer, request, handed)

    def groups(self) -> Iterator[tuple[int, KVGroup]]:
        """KV groups that are received, with their numbers."""
        yield from enumerate(self.context.groups)

    def layers_of(self, group: KVGroup) -> list[AttentionLayer]:
        """Layers of a group with memory of their own."""
        return [each for each in group.kv_pool.layers if each.kv_sharing_target_layer_id < 0]

    def receive_layer(
        self, number: int, group: KVGroup, layer: AttentionLayer, request: HandedRequest, handed: HandOver
    ) -> None:
        """Copy the blocks of a request in one layer."""
        pools = [sender.groups[number].kv_pool for sender in handed.senders]
        for own, theirs in self.blocks(number, group, request, handed):
            for here, rank, there in self.heads(layer, handed):
                pair = self.parts(group.kv_pool, layer), self.parts(pools[rank], layer)
                for target, source in zip(*pair, strict=True):
                    target[own // group.kv_pool.page_size, own % group.kv_pool.page_size, here] = source[
                        theirs // pools[rank].page_size, theirs % pools[rank].page_size, there
                    ]

    def parts(self, pool: KVPool, layer: AttentionLayer) -> Sequence[torch.Tensor]:
        """[pages, page_size, Hk, numbers] of K and of V."""
        return pool.get_kv_pages(layer.layer_id)[: layer.head_layout.pool_rows]

    def block(self, group: KVGroup, sender: KVGroup) -> int:
        """Tokens of a block."""
        return math.gcd(group.kv_pool.page_size, sender.kv_pool.page_size)

    def start(self, number: int, request: HandedRequest) -> int:
        """First token that is received."""
        return request.starts[number]

    def end(self, request: HandedRequest, size: int) -> int:
        """Number of tokens after which no block begins. ``size``: tokens of a block."""
        return request.end

    def blocks(
        self, number: int, group: KVGroup, request: HandedRequest, handed: HandOver
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Slots of each block here and at the sender, [tokens of a block] each."""
        sender = handed.senders[0].groups[number]
        size = self.block(group, sender)
        for first in range(self.start(number, request), self.end(request, size), size):
            own = group.req_to_token[request.row, first].long()
            theirs = self.sender_slot(sender, request, first)
            count = torch.arange(size, device=own.device)
            yield own + count, theirs + count

    def sender_slot(self, sender: KVGroup, request: HandedRequest, token: int) -> torch.Tensor:
        """Slot of a token at the sender."""
        return sender.req_to_token[request.sender_row, token].long()

    def heads_here(self, layer: AttentionLayer, handed: HandOver) -> list[int]:
        """Heads of the model that this rank has."""
        first = handed.tp_rank * handed.kv_heads // handed.tp_size
        return [first + head for head in range(layer.tp_k_head_num)]

    def per_sender(self, handed: HandOver) -> int:
        """Heads on a rank of the sender."""
        return max(1, handed.kv_heads // len(handed.senders))

    def copies(self, handed: HandOver) -> int:
        """Ranks of the sender that share a head."""
        return max(1, len(handed.senders) // handed.kv_heads)

    def heads(self, layer: AttentionLayer, handed: HandOver) -> Iterator[tuple[int, int, int]]:
        """Each head here, a rank of the sender that has it, and its number there."""
        each = self.per_sender(handed)
        for here, head in enumerate(self.heads_here(layer, handed)):
            yield here, head // each * self.copies(handed), head % each


class HandedParent(_Keys, DenseBackend):
    """Healthy parent: K and V of one group, of MLA too."""

    capabilities = DenseBackend.capabilities.with_changes(
        eager={"decode"},
        graph={"decode"},
        heads={"families": {"gqa", "mqa", "mla"}, "head_dims": {64}, "mla_rope_dims": {64}, "gqa_ratios": {4}},
        precision={"dtypes": {"bf16"}},
        kv_pool={"kv_dtypes": {"same"}, "page_sizes": {4, 16}},
        options={"logit_cap": False, "sinks": False},
        windows={"modes": set()},
        receives=Receives(page_sizes={1, 8, 64}, kv_layouts={"nhd", "hnd"}, ranks=_ALL, shared_heads=True),
    )


class HandedGroups(_Keys, GroupedBackend):
    """Healthy parent: K and V of two groups, one of which has a window."""

    capabilities = GroupedBackend.capabilities.with_changes(
        eager={"decode"}, graph={"decode"}, receives=Receives(page_sizes={8}, ranks=_ALL)
    )


class HandedIndices(_Keys, IndexerParent):
    """Healthy parent: latent rows or one head, and index keys with their scales."""

    capabilities = IndexerParent.capabilities.with_changes(
        eager={"decode"}, graph={"decode"}, heads={"families": {"mla"}, "gqa_ratios": {4}, "head_dims": {64}},
        receives=Receives(page_sizes={64}, ranks=_ALL),
    )  # fmt: skip

    @override
    def receive(self, handed: HandOver) -> None:
        super().receive(handed)
        self.receive_indices(handed)

    def receive_indices(self, handed: HandOver) -> None:
        """Copy index keys and scales, token by token."""
        own, theirs = self.context.index_pool, handed.senders[0].index_pool
        if own is None or theirs is None:
            return
        for request in handed.requests:
            for to, at in self.blocks(0, self.context.groups[0], request, handed):
                self.copy_indices(own.memory, theirs.memory, to, at)

    def copy_indices(self, own: torch.Tensor, theirs: torch.Tensor, to: torch.Tensor, at: torch.Tensor) -> None:
        """Copy the index keys and scales of slots ``at`` to ``to``, [n] each, in all layers."""
        for target, source in self.planes(own, theirs):
            target[:, to // _INDEX_PAGE, to % _INDEX_PAGE] = source[:, at // _INDEX_PAGE, at % _INDEX_PAGE]

    def planes(self, own: torch.Tensor, theirs: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """[layers, pages, 64, bytes] of keys, and of scales."""
        end = _INDEX_PAGE * _INDEX_WIDTH
        yield _plane(own[..., :end]), _plane(theirs[..., :end])
        yield _plane(own[..., end:]), _plane(theirs[..., end:])


def _plane(memory: torch.Tensor) -> torch.Tensor:
    return memory.view(*memory.shape[:2], _INDEX_PAGE, -1)


class HandedStates(StateParent):
    """Healthy parent: windows part by part, and states head by head. Ranks may share groups of Mamba2."""

    capabilities = StateParent.capabilities.with_changes(
        eager={"decode"}, graph={"decode"}, heads={"gqa_ratios": {2}, "head_dims": {32}},
        state=State(k_dims={32}), bounds={"max_topk": 0},
        receives=Receives(page_sizes={16}, ranks=_ALL, shared_heads=True),
    )  # fmt: skip

    def receive(self, handed: HandOver) -> None:
        """Copy windows and states of all requests."""
        senders = [each.state for each in handed.senders if each.state is not None]
        for layer in self.states.layers:
            for request in handed.requests:
                self.receive_window(layer, request, handed, senders)
                self.receive_state(layer, request, handed, senders)

    def receive_window(
        self, layer: StateLayer, request: HandedRequest, handed: HandOver, senders: Sequence[StatePool]
    ) -> None:
        """Copy the window of a request: the channels of each part, as the rank has them."""
        window, first, start = self.states.pool.conv(layer.layer_id)[request.state_slot], 0, 0
        rows = [pool.conv(layer.layer_id)[request.sender_state_slot] for pool in senders]
        for heads, width, total in self.parts_of(layer, handed):
            each = max(1, total // len(rows))
            for here in range(heads):
                head = self.first_of_part(heads, total, handed) + here
                row = rows[self.rank_with(head, total, len(rows))]
                window[first : first + width] = self.channels(row, start + head % each * width, width)
                first += width
            start += each * width

    def channels(self, row: torch.Tensor, start: int, width: int) -> torch.Tensor:
        """[width, W - 1]: channels of a sender's window [C, W - 1]."""
        return row[start : start + width]

    def parts_of(self, layer: StateLayer, handed: HandOver) -> tuple[tuple[int, int, int], ...]:
        """Heads of this rank, their width, and the heads of the model, in each part of the channels."""
        keys = (layer.tp_k_head_num, layer.head_dim, self.groups(layer, handed))
        values = (layer.tp_q_head_num, layer.v_head_dim, layer.tp_q_head_num * handed.tp_size)
        return (values, keys, keys) if layer.kind == "mamba" else (keys, keys, values)

    def groups(self, layer: StateLayer, handed: HandOver) -> int:
        """Key heads of the model."""
        return handed.state_key_heads

    def first_of_part(self, heads: int, total: int, handed: HandOver) -> int:
        """First head of the model of which this rank has the channels. ``heads`` of ``total`` are here."""
        return handed.tp_rank * total // handed.tp_size

    def rank_with(self, head: int, total: int, ranks: int) -> int:
        """A rank of the sender that has a head of ``total``."""
        return head * ranks // total

    def receive_state(
        self, layer: StateLayer, request: HandedRequest, handed: HandOver, senders: Sequence[StatePool]
    ) -> None:
        """Copy the state of a request."""
        whole = torch.cat([pool.temporal(layer.layer_id)[self.sender_state(request)] for pool in senders])
        first = self.first_state_head(layer, handed)
        self.states.pool.temporal(layer.layer_id)[request.state_slot] = whole[first : first + layer.tp_q_head_num]

    def sender_state(self, request: HandedRequest) -> int:
        """Slot of a request's state at the sender."""
        return request.sender_state_slot

    def first_state_head(self, layer: StateLayer, handed: HandOver) -> int:
        """First head of the model that this rank has."""
        return handed.tp_rank * layer.tp_q_head_num

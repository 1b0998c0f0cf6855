"""The mapping of ``torch_native`` from the memory of another instance to its own: slot by slot, through views of pools.

Servers copy whole blocks of bytes instead, which is faster and must give the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from ..contract import INDEX_PAGE, BackendContext, HandOver, IndexPool, KVPool, Sender, StatePool, heads_of_rank


def receive_memory(context: BackendContext, handed: HandOver) -> None:
    """Copy everything that a hand-over names into the pools of ``context``."""
    for number, group in enumerate(group for group in context.groups if group.kv_pool.layers):
        tables = group.req_to_token, handed.senders[0].groups[number].req_to_token
        slots = slots_of(handed, number, *tables)
        receive_keys(handed, group.kv_pool, [sender.groups[number].kv_pool for sender in handed.senders], *slots)
        if number == 0 and context.index_pool is not None:
            receive_index(context.index_pool, handed.senders[0].index_pool, *slots)
    if context.state is not None:
        receive_states(context, handed)


def slots_of(handed: HandOver, group: int, own: torch.Tensor, sent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[n] int64 each: slots here and at the sender of all tokens. ``own`` and ``sent``: the two request tables."""
    spans = [(each.row, each.sender_row, each.starts[group], each.end) for each in handed.requests]
    return (
        torch.cat([own[row, start:end] for row, _, start, end in spans]).long(),
        torch.cat([sent[row, start:end] for _, row, start, end in spans]).long(),
    )


def from_ranks(handed: HandOver, total: int) -> Iterator[tuple[int, int, int]]:
    """Each head of this rank, a rank of the sender that has it, and its number there. ``total``: heads of the model."""
    for here, head in enumerate(heads_of_rank(handed.tp_rank, handed.tp_size, total)):
        ranks = len(handed.senders)
        rank = next(rank for rank in range(ranks) if head in heads_of_rank(rank, ranks, total))
        yield here, rank, head - heads_of_rank(rank, ranks, total)[0]


def receive_keys(
    handed: HandOver, pool: KVPool, senders: Sequence[KVPool], slots: torch.Tensor, sent: torch.Tensor
) -> None:
    """Copy K and V, and scales in memory of their own, of all layers of a pool."""
    for layer in pool.layers:
        if layer.kv_sharing_target_layer_id >= 0:
            continue
        own = parts_of(pool, layer.layer_id)
        others = [parts_of(sender, layer.layer_id) for sender in senders]
        for here, rank, there in from_ranks(handed, handed.kv_heads):
            for target, source in zip(own, others[rank], strict=True):
                target[slots // pool.page_size, slots % pool.page_size, here] = source[
                    sent // senders[rank].page_size, sent % senders[rank].page_size, there
                ]


def parts_of(pool: KVPool, layer_id: int) -> list[torch.Tensor]:
    """[pages, page_size, Hk, numbers] of K, V and their separate scales, as integers of their bits."""
    parts: Iterable[torch.Tensor] = (*pool.get_kv_pages(layer_id), *pool.get_scale_pages(layer_id))
    # torch cannot index FP8 everywhere.
    return [each.view(torch.uint8) if each.dtype.itemsize == 1 else each for each in parts]


def receive_index(pool: IndexPool, sender: IndexPool | None, slots: torch.Tensor, sent: torch.Tensor) -> None:
    """Copy index keys and their scales, of which each rank has all."""
    assert sender is not None
    for layer_id in pool.layer_ids:
        for own, other in (
            (pool.get_keys(layer_id).view(torch.uint8), sender.get_keys(layer_id).view(torch.uint8)),
            (pool.get_scales(layer_id), sender.get_scales(layer_id)),
        ):
            own[slots // INDEX_PAGE, slots % INDEX_PAGE] = other[sent // INDEX_PAGE, sent % INDEX_PAGE]


def receive_states(context: BackendContext, handed: HandOver) -> None:
    """Copy windows, whose parts are divided among ranks one by one, and states. Ranks may share groups of Mamba2."""
    assert context.state is not None
    device = context.device
    slots = torch.tensor([each.state_slot for each in handed.requests], device=device)
    sent = torch.tensor([each.sender_state_slot for each in handed.requests], device=device)
    pools = [states_of(sender) for sender in handed.senders]
    for number, layer in enumerate(context.state.layers):
        own = context.state.pool.conv(layer.layer_id), context.state.pool.temporal(layer.layer_id)
        for here, rank, there in from_ranks(handed, layer.v_heads * handed.tp_size):
            own[1][slots, here] = pools[rank].temporal(layer.layer_id)[sent, there]
        starts = [0] * (len(handed.senders) + 1)
        for part, (heads, width) in enumerate(layer.channels):
            of_values = part == layer.of_kind.value_part
            total = heads * handed.tp_size if of_values else handed.state_key_heads
            for here, rank, there in from_ranks(handed, total):
                first, at = starts[-1] + here * width, starts[rank] + there * width
                window = pools[rank].conv(layer.layer_id)
                own[0][slots, first : first + width] = window[sent, at : at + width]
            starts[-1] += heads * width
            for rank, pool in enumerate(pools):
                there_heads, _ = pool.layers[number].channels[part]
                starts[rank] += there_heads * width


def states_of(sender: Sender) -> StatePool:
    """The states of a rank of the sender."""
    assert sender.state is not None
    return sender.state

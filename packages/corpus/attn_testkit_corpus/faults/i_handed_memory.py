"""Class I: addresses of memory that another instance hands over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from attn_testkit.contract import AttentionLayer, HandedRequest, HandOver, KVGroup, KVPool, StateLayer, StatePool

from .catalogue import fault, helper
from .with_handed import HandedGroups, HandedIndices, HandedParent, HandedStates

_CHECKS = "received-as-sent"
_HEAD = r"this is head \d+ of the \d+ of the model, and head \d+ belongs here"


@fault("sglang #23746, #31968", _CHECKS, _HEAD)
class SharedHeadIsTheFirst(HandedParent):
    """The heads of a rank are counted as ``kv_heads // tp_size``: 0 if ranks share heads, so each rank gets head 0."""

    def heads_here(self, layer: AttentionLayer, handed: HandOver) -> list[int]:
        if layer.head_layout.values_in_keys:
            return super().heads_here(layer, handed)
        first = handed.tp_rank * (handed.kv_heads // handed.tp_size)
        return [first + head for head in range(layer.tp_k_head_num)]


@fault("sglang #19086, #22145", _CHECKS, _HEAD)
class TotalHeadsOfReplicas(HandedParent):
    """The sender's ranks are taken to have different heads, although several of them share one."""

    def copies(self, handed: HandOver) -> int:
        return 1


@fault("general; a sender's rank chosen by the rank's number", _CHECKS, _HEAD)
class HeadsOfTheSameRank(HandedParent):
    """A rank reads the sender's rank of the same number, whatever the numbers of ranks."""

    def heads(self, layer: AttentionLayer, handed: HandOver) -> Iterator[tuple[int, int, int]]:
        for here, _, there in super().heads(layer, handed):
            yield here, handed.tp_rank % len(handed.senders), there


@fault("vLLM #30275", _CHECKS, "it holds K of layer", modelled="here the bytes of a page are read in the other order")
class LayoutIsNotConverted(HandedParent):
    """Pages with heads first arrive as they are in a pool with slots first: they are permuted only if page sizes
    differ."""

    def parts(self, pool: KVPool, layer: AttentionLayer) -> Sequence[torch.Tensor]:
        return [self.misread(part) if pool.layout == "hnd" else part for part in super().parts(pool, layer)]

    @helper
    def misread(self, part: torch.Tensor) -> torch.Tensor:
        """[pages, page_size, Hk, numbers]: pages with heads first, as if they had slots first."""
        pages, page, heads, width = part.shape
        return part.transpose(1, 2).view(pages, page, heads, width)


@fault("vLLM #48758", _CHECKS, "another token: a page has")
class PrefixIsTrimmedAtTheWrongEnd(HandedParent):
    """The sender's first blocks arrive instead of its last ones if a part of the prompt is here already."""

    def sender_slot(self, sender: KVGroup, request: HandedRequest, token: int) -> torch.Tensor:
        return super().sender_slot(sender, request, token - request.starts[0])


@fault("vLLM 0.33.0 (findings/vllm-nixl-blocks.md)", _CHECKS, "another token: a page has|nothing was stored there")
class SmallerPagesArePairedFromTheEnd(HandedParent):
    """The sender's last pages are paired with the pages here, of which the last is not full, if a prefix is cached."""

    def sender_slot(self, sender: KVGroup, request: HandedRequest, token: int) -> torch.Tensor:
        own, page, start = self.context.page_size, sender.kv_pool.page_size, request.starts[0]
        here, there = -(-request.end // own) * own - start, -(-request.end // page) * page
        shift = here - (there - start) if page < own and here <= there else 0
        return super().sender_slot(sender, request, token - shift)


@fault("vLLM #26744, #42895", _CHECKS, "another token: a page has")
class PageOfTheReceiverIsAssumed(HandedParent):
    """A block has as many tokens as a page here, also if pages of the sender are smaller or end elsewhere."""

    def block(self, group: KVGroup, sender: KVGroup) -> int:
        return group.kv_pool.page_size

    def sender_slot(self, sender: KVGroup, request: HandedRequest, token: int) -> torch.Tensor:
        slot = super().sender_slot(sender, request, token)
        return slot.clamp(max=sender.kv_pool.num_slots - self.context.page_size)


@fault("general; the last page is not full", _CHECKS, "nothing was stored there")
class LastPageIsLeftOut(HandedParent):
    """Only blocks that are full are received, so the last tokens of a prompt are missing."""

    def end(self, request: HandedRequest, size: int) -> int:
        return request.end // size * size


@fault("vLLM #32204", _CHECKS, "nothing was stored there")
class OnlyTheFirstGroupArrives(HandedGroups):
    """Only the blocks of the first KV group are received."""

    def groups(self) -> Iterator[tuple[int, KVGroup]]:
        yield 0, self.context.groups[0]


@fault("general; a window's blocks", _CHECKS, "a slot that is not handed over was written|of a request that was")
class FreedPagesAreReceived(HandedGroups):
    """All blocks of a windowed group are received, those of freed pages too, whose slots belong to others."""

    def start(self, number: int, request: HandedRequest) -> int:
        return 0


@fault("sglang #31218, #31060", _CHECKS)
class IndexPagesAreMovedByToken(HandedIndices):
    """Pages of index keys are copied by the numbers of tokens, as if a page had one."""

    def copy_indices(self, own: torch.Tensor, theirs: torch.Tensor, to: torch.Tensor, at: torch.Tensor) -> None:
        own[:, to % own.shape[1]] = theirs[:, at % theirs.shape[1]]


@fault("general; a page of index keys is four pages of keys", _CHECKS)
class WholeIndexPagesArrive(HandedIndices):
    """A whole page of index keys arrives with each of its tokens, and overwrites those of other requests."""

    def copy_indices(self, own: torch.Tensor, theirs: torch.Tensor, to: torch.Tensor, at: torch.Tensor) -> None:
        own[:, to // 64] = theirs[:, at // 64]


@fault("ATOM #1737", _CHECKS, "nothing was stored there", modelled="upstream the second buffer holds the rope part")
class IndexScalesAreLeftOut(HandedIndices):
    """Index keys arrive without their scales, because only the first of two planes is described."""

    def planes(self, own: torch.Tensor, theirs: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        keys, _ = super().planes(own, theirs)
        yield keys


@fault("sglang #23744, #23746; vLLM #37638", _CHECKS, "the channels of each part are divided|belongs here")
class WindowIsCutAsOneRow(HandedStates):
    """The channels of a window are cut into as many consecutive pieces as there are ranks, across q, k and v."""

    def parts_of(self, layer: StateLayer, handed: HandOver) -> tuple[tuple[int, int, int], ...]:
        channels = sum(heads * width for heads, width, _ in super().parts_of(layer, handed))
        return ((channels, 1, channels * handed.tp_size),)

    def channels(self, row: torch.Tensor, start: int, width: int) -> torch.Tensor:
        return row[min(start, len(row) - 1)][None]


@fault("general; Mamba2 has x before B and C", _CHECKS, "another|belongs here|in no row|part")
class WindowOfMambaIsReadAsKeysFirst(HandedStates):
    """The channels of Mamba2 are divided as those of GDN, whose wide part is the last."""

    def parts_of(self, layer: StateLayer, handed: HandOver) -> tuple[tuple[int, int, int], ...]:
        return tuple(sorted(super().parts_of(layer, handed)))


@fault("vllm-ascend #10246", _CHECKS, "nothing was stored there")
class StatesAreLeftOut(HandedStates):
    """Windows arrive, and states do not."""

    def receive_state(
        self, layer: StateLayer, request: HandedRequest, handed: HandOver, senders: Sequence[StatePool]
    ) -> None:
        """Do nothing."""


@fault("sglang #22240", _CHECKS, _HEAD)
class StateHeadsOfTheFirstRank(HandedStates):
    """Each rank gets the first heads of a state."""

    def first_state_head(self, layer: StateLayer, handed: HandOver) -> int:
        return 0


_GROUPS = r"\. The model has \d groups?, and \d ranks (here|at the sender): each of them has all channels of B and C"


@fault(
    "vLLM #55208", _CHECKS, f"{_HEAD}|{_GROUPS}",
    modelled="upstream bytes beyond a window are of the state; here they are the window's last ones",
)  # fmt: skip
class SharedGroupsAreSplit(HandedStates):
    """B and C are divided among ranks as x is, although ranks share a group: the window of a sender is taken to have
    as many groups for each rank here."""

    def groups(self, layer: StateLayer, handed: HandOver) -> int:
        return layer.tp_k_head_num * handed.tp_size

    def channels(self, row: torch.Tensor, start: int, width: int) -> torch.Tensor:
        return super().channels(row, min(start, len(row) - width), width)


@fault("vLLM #55306", _CHECKS, _HEAD)
class CopiesOfAGroupAreGathered(HandedStates):
    """The groups of the sender's ranks follow each other in a window, as if no two ranks had the same."""

    def rank_with(self, head: int, total: int, ranks: int) -> int:
        return head // max(1, total // ranks)


@fault("general; a shared group is not that of rank 0", _CHECKS, _HEAD)
class SharedGroupIsTheFirst(HandedStates):
    """Ranks that share groups all get the first one: their first group is counted as ``n_groups // tp_size``, which
    is 0."""

    def first_of_part(self, heads: int, total: int, handed: HandOver) -> int:
        return handed.tp_rank * (total // handed.tp_size)


@fault("sglang #23744", _CHECKS, _HEAD, modelled="upstream KV heads go round")
class SharedGroupsGoRound(HandedStates):
    """Ranks get shared groups in turn, and not each group on the ranks next to each other whose value heads use it."""

    def first_of_part(self, heads: int, total: int, handed: HandOver) -> int:
        return handed.tp_rank % total if total < handed.tp_size else super().first_of_part(heads, total, handed)

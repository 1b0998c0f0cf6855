"""Memory that another instance hands over, in one process: what ``receive`` is given, and the text of each mistake."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from in_process import check_backend
from typing_extensions import override

from attn_testkit.backends.torch_native_handed import TorchNativeHandedBackend
from attn_testkit.backends.torch_native_state_handed import TorchNativeStateHandedBackend
from attn_testkit.contract import AttentionBackend, HandOver
from attn_testkit.results.finding import Finding

CASE = "decode-gqa4x2-d64-bf16-p4-k21.9.0-shuffled-gauss-handed2to4p8hnd-b3prod"
STATES = "decode-mamba2x2-d32-bf16-p16-k5.7-shuffled-mild_decay-k32w4s32-layers2from0hybrid-handed4to2p16nhd-b2prod"


def findings(backend: type[AttentionBackend], case: str = CASE) -> list[Finding]:
    report = check_backend(backend, cases=[case], executions=["eager"], device="cpu")
    return [found for row in report.rows for found in row.findings]


class Noted(TorchNativeHandedBackend):
    """Notes what it receives."""

    seen: ClassVar[list[HandOver]] = []

    @override
    def receive(self, handed: HandOver) -> None:
        self.seen.append(handed)
        super().receive(handed)


def test_senders_have_their_own_ranks_pages_and_layout() -> None:
    Noted.seen.clear()
    assert findings(Noted) == []
    first = Noted.seen[0]
    assert (first.tp_size, first.kv_heads, len(first.senders)) == (4, 8, 2)
    pool = first.senders[1].groups[0].kv_pool
    layer = pool.layers[0]
    assert (pool.page_size, pool.layout, layer.tp_k_head_num, layer.tp_q_head_num) == (8, "hnd", 4, 16)
    assert [(each.starts, each.end) for each in first.requests] == [((0,), 21), ((4,), 9)], "the third has no token"


class Wrong(TorchNativeHandedBackend):
    """Changes something after a right copy."""

    @override
    def receive(self, handed: HandOver) -> None:
        super().receive(handed)
        self.damage(handed)

    def damage(self, handed: HandOver) -> None:
        """Do what is wrong."""

    def keys(self) -> torch.Tensor:
        """[pages, page_size, Hk, D] of the first layer."""
        return self.context.kv_pool.get_kv_pages(self.context.layers[0].layer_id)[0]


class OtherHead(Wrong):
    """Exchanges two heads."""

    @override
    def damage(self, handed: HandOver) -> None:
        self.keys()[1:] = self.keys()[1:].flip(2)


class OtherBits(Wrong):
    """Converts a number."""

    @override
    def damage(self, handed: HandOver) -> None:
        slot = int(self.context.req_to_token[handed.requests[0].row, 3])
        self.keys()[slot // 4, slot % 4, 1, 5] += 1.0


class OtherSlot(Wrong):
    """Writes a slot that nobody owns."""

    @override
    def damage(self, handed: HandOver) -> None:
        owned = {int(slot) // 4 for slot in self.context.req_to_token.flatten().tolist()} | {0}
        free = [page for page in range(len(self.keys())) if page not in owned]
        self.keys()[free[0] if free else -1] = 0.5


class Sent(Wrong):
    """Writes into the sender's pool."""

    @override
    def damage(self, handed: HandOver) -> None:
        handed.senders[1].groups[0].kv_pool.get_kv_pages(self.context.layers[0].layer_id)[1][0] = 0.0


class Nothing(TorchNativeHandedBackend):
    """Receives nothing."""

    @override
    def receive(self, handed: HandOver) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        (OtherHead, "head 0 of this rank"),
        (OtherHead, "of the 8 of the model, and head"),
        (OtherBits, "K of layer 0, token 3 of request 0, head 1 of this rank"),
        (OtherBits, "the numbers there are in no row of the sender"),
        (OtherSlot, "K of a slot that is not handed over was written"),
        (Sent, "the memory of rank 1 of the sender was written"),
        (Nothing, "nothing was stored there"),
    ],
)
def test_a_mistake_is_named_and_is_the_only_one(backend: type[AttentionBackend], said: str) -> None:
    found = findings(backend)
    assert {each.check for each in found} == {"received-as-sent"}
    assert said in "\n".join(f"{each.headline}\n{each.where}\n{each.hint}" for each in found)


class Raises(TorchNativeHandedBackend):
    """Raises an error."""

    @override
    def receive(self, handed: HandOver) -> None:
        raise RuntimeError("no such region")


def test_an_error_is_that_of_the_backend() -> None:
    found = findings(Raises)
    assert [(each.check, each.headline) for each in found] == [
        ("completes", "receive raised RuntimeError: no such region")
    ]


class WindowAsOneRow(TorchNativeStateHandedBackend):
    """Cuts a window into as many pieces as there are ranks."""

    @override
    def receive(self, handed: HandOver) -> None:
        super().receive(handed)
        assert self.context.state is not None
        for layer in self.context.state.layers:
            own = self.context.state.pool.conv(layer.layer_id)
            for each in handed.requests:
                rows = [sender.state for sender in handed.senders if sender.state is not None]
                whole = torch.cat([pool.conv(layer.layer_id)[each.sender_state_slot] for pool in rows])
                own[each.state_slot] = whole[handed.tp_rank * own.shape[1] :][: own.shape[1]]


GROUPS = "decode-mamba2x1-d32-bf16-p16-k5.1.37-shuffled-mild_decay-k32w4s32-layers2from0hybrid-handed1to4k2p4nhd-b4prod"


class OtherGroup(TorchNativeStateHandedBackend):
    """Gets B, or C, from where it would be if each rank had a group of its own."""

    seen: ClassVar[list[HandOver]] = []
    part = 0

    @override
    def receive(self, handed: HandOver) -> None:
        self.seen.append(handed)
        super().receive(handed)
        (sender,), states = handed.senders, self.context.state
        assert states is not None
        assert sender.state is not None
        layer, of_sender = states.layers[0], sender.state.layers[0]
        x, width = of_sender.v_heads * of_sender.v_dim, of_sender.k_dim
        for each in handed.requests if self.part else ():
            window = sender.state.conv(layer.layer_id)[each.sender_state_slot]
            own = states.pool.conv(layer.layer_id)[each.state_slot]
            at, start = layer.v_heads * layer.v_dim + (self.part - 1) * width, x + handed.tp_rank * width
            own[at : at + width] = window[start : start + width]


def test_a_sender_of_shared_groups_has_each_once() -> None:
    OtherGroup.seen.clear()
    assert findings(OtherGroup, GROUPS) == []
    first = OtherGroup.seen[0]
    assert first.senders[0].state is not None
    layer = first.senders[0].state.layers[0]
    assert (first.tp_rank, first.tp_size, first.state_key_heads, first.kv_heads) == (2, 4, 2, 2)
    assert (layer.k_heads, layer.v_heads, layer.channels) == (2, 8, ((8, 32), (2, 32), (2, 32)))


def test_a_shared_group_that_is_cut_as_if_each_rank_had_its_own_is_named() -> None:
    (found, *_) = findings(type("OfB", (OtherGroup,), {"part": 1}), GROUPS)
    assert found.check == "received-as-sent"
    assert "head 0 of this rank in the channels of B" in found.where
    assert "it holds window of layer 0, request 0, head 0 in the channels of C of rank 0" in found.hint
    assert "The model has 2 groups, and 4 ranks here: each of them has all channels of B and C" in found.hint


def test_the_channels_of_a_window_are_divided_part_by_part() -> None:
    assert findings(TorchNativeStateHandedBackend, STATES) == []
    (found, *_) = findings(WindowAsOneRow, STATES)
    assert found.check == "received-as-sent"
    assert "in the channels of" in found.where
    assert "rank" in found.hint

"""Class R, states that a server moves after a verify: from the slot of the last accepted node to the first slot."""

from __future__ import annotations

from dataclasses import replace

import torch
from typing_extensions import override

from attn_testkit.contract import StateInput, StateLayer

from .catalogue import fault
from .states import StateParent
from .states_of_servers import SlotsParent


class MovedSlotsParent(SlotsParent):
    """A right backend with a slot for each node, which moves state and window to the first slot after a verify."""

    capabilities = SlotsParent.capabilities.with_changes(
        state=replace(StateParent.declared_state(), rollback={"slots_moved"}, padding={"skip_zero"})
    )

    @override
    def commit(self, steps: torch.Tensor, state: StateInput) -> None:
        lists, steps = state.indices.clamp(min=0).long(), steps.long()
        live = (steps >= 0) & (lists[:, 0] > 0)
        for place, layer in enumerate(self.states.layers):
            conv, temporal = StateParent.pools(self, layer)
            nodes = self.nodes_of_layer(steps.clamp(min=0), place)
            for request in live.nonzero()[:, 0].tolist():
                slots, node = lists[request], int(nodes[request])
                temporal[slots[0]] = temporal[slots[node]].clone()
                self.shift(conv[self.slot_of_window(slots, node)], conv[slots[0]], node, layer)

    def nodes_of_layer(self, steps: torch.Tensor, layer: int) -> torch.Tensor:
        """[bs] int64: last accepted node of each request, in layer number ``layer``."""
        return steps

    def slot_of_window(self, slots: torch.Tensor, node: int) -> torch.Tensor:
        """Slot of ``slots`` [N] that has the window after a node."""
        return slots[0]

    def shift(self, source: torch.Tensor, target: torch.Tensor, node: int, layer: StateLayer) -> None:
        """Move a window that begins at column ``node`` of ``source`` [C, columns] to column 0 of ``target``, from the
        left to the right."""
        for column in range(layer.conv_width - 1):
            target[:, column] = source[:, node + column]


@fault(
    "vLLM #50729; vllm-ascend #15592",
    "conv-window-exact",
    "overwritten before they were moved",
    modes="target-verify",
)
class ShiftsInNoOrder(MovedSlotsParent):
    """The window is copied within its own memory by lanes that have no order: here the last column is copied first."""

    @override
    def shift(self, source: torch.Tensor, target: torch.Tensor, node: int, layer: StateLayer) -> None:
        for column in reversed(range(layer.conv_width - 1)):
            target[:, column] = source[:, node + column]


@fault("vLLM #49291, #45473", "conv-window-exact", modes="target-verify")
class MovesAWholeWindow(MovedSlotsParent):
    """The window is moved as a block, without the offset of the accepted nodes."""

    @override
    def shift(self, source: torch.Tensor, target: torch.Tensor, node: int, layer: StateLayer) -> None:
        super().shift(source, target, 0, layer)


@fault("vllm-ascend #13013", "conv-window-exact state-matches-oracle", modes="target-verify")
class CountResetByTheFirstLayer(MovedSlotsParent):
    """The program of the first layer sets the count of accepted nodes to 1, and those of other layers read it later."""

    @override
    def nodes_of_layer(self, steps: torch.Tensor, layer: int) -> torch.Tensor:
        return steps if layer == 0 else torch.zeros_like(steps)


@fault("general (vLLM keeps the window of all nodes in the first block)", "conv-window-exact", modes="target-verify")
class WindowOfTheAcceptedSlot(MovedSlotsParent):
    """The window is read from the slot of the accepted node, which has a state and no window."""

    @override
    def slot_of_window(self, slots: torch.Tensor, node: int) -> torch.Tensor:
        return slots[node]

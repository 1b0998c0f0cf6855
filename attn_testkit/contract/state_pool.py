"""The memory of recurrent states, and the states of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from .state_layer import StateLayer

__all__ = ["Snapshot", "StateContext", "StateInput", "StatePool"]

_GUARD = 128
"""Bytes between two tensors, which must not be written. Tensors stay aligned."""


class StatePool:
    """States and convolution windows of every slot, for every layer. A slot holds one request in all layers.

    Slot 0 is reserved: no live request has it. ``temporal`` [slots, Hv, V, K], or [slots, Hv, K, V] with ``order``
    ``kv``; in log-linear attention Hv is ``StateLayer.state_heads``. ``conv`` [slots, C, W - 1]: the last inputs of
    each channel, the oldest first. With rollback ``slots`` it is [slots, C, W - 1 + N - 1], of which a request uses
    that of its first slot (``StateBackend.forward``). With ``State.conv_windows`` other than ``exact`` it has more
    columns, too. ``strided``: all layers of a slot lie in one block, so the stride between slots does not follow from a
    shape. Memory between tensors is unused.
    """

    def __init__(
        self,
        num_slots: int,
        layers: tuple[StateLayer, ...],
        conv_dtype: torch.dtype,
        dtype: torch.dtype,
        device: torch.device | str,
        order: str = "vk",
        *,
        strided: bool = False,
        drafts: tuple[int, int] = (0, 0),
        more_columns: int = 0,
        cleared: bool = True,
        make: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        """Allocate memory, zeroed unless ``cleared`` is False. ``num_slots``: slot 0 included. ``dtype``: of the
        recurrent state.

        ``drafts``: requests of a batch and nodes of a draft that the scratch of target-verify has room for.
        ``more_columns``: columns of a window beyond W - 1, if there is a convolution. ``make``: allocates the
        memory, as ``torch.zeros(shape, dtype=, device=)`` does.
        """
        self.more_columns = more_columns
        self.num_slots, self.layers, self.order, self.strided = num_slots, layers, order, strided
        self.conv_dtype, self.dtype, self.device = conv_dtype, dtype, torch.device(device)
        end, found = _GUARD, dict[int, list[torch.Tensor]]()
        shapes = [(layer, shape, kind) for layer in layers for shape, kind in self._shapes(layer)]
        sizes = [_aligned(_count(shape) * kind.itemsize) for _, shape, kind in shapes]
        stride = sum(sizes) + _GUARD * len(sizes)
        total = _GUARD + (stride * num_slots if strided else sum(num_slots * size + _GUARD for size in sizes))
        make = make or (torch.zeros if cleared else torch.empty)
        self.memory = make(total, dtype=torch.uint8, device=self.device)
        """All memory, [bytes] uint8."""
        for (layer, shape, kind), size in zip(shapes, sizes, strict=True):
            step = stride if strided else _count(shape) * kind.itemsize
            found.setdefault(layer.layer_id, []).append(self._view(end, (num_slots, *shape), kind, step))
            end += _GUARD + (size if strided else num_slots * size)
        self._views = found
        self._scratch = {
            layer.layer_id: [
                torch.zeros(*drafts, *shape, dtype=kind, device=self.device) for shape, kind in self._shapes(layer)
            ]
            for layer in layers
        }

    def _shapes(self, layer: StateLayer) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of a slot's window and state."""
        wide = (layer.v_dim, layer.k_dim) if self.order == "vk" else (layer.k_dim, layer.v_dim)
        width = layer.conv_width
        window = (layer.parts[0], width - 1 + self.more_columns if width > 1 else 0)
        return [(window, self.conv_dtype), ((layer.state_heads, *wide), self.dtype)]

    def _view(self, first: int, shape: tuple[int, ...], dtype: torch.dtype, step: int) -> torch.Tensor:
        typed = self.memory.view(dtype)
        strides = [1]
        for size in reversed(shape[2:]):
            strides.insert(0, strides[0] * max(size, 1))
        return typed.as_strided(shape, (step // dtype.itemsize, *strides), first // dtype.itemsize)

    def twin(self) -> StatePool:
        """A pool of the same layout in other memory, without scratch."""
        return self.like(self.device)

    def like(
        self, device: torch.device | str, dtype: torch.dtype | None = None, num_slots: int | None = None
    ) -> StatePool:
        """A pool without scratch. ``dtype`` of the recurrent state and ``num_slots``: by default the same."""
        return StatePool(
            num_slots or self.num_slots, self.layers, self.conv_dtype, dtype or self.dtype, device, self.order,
            strided=self.strided, more_columns=self.more_columns,
        )  # fmt: skip

    def conv(self, layer_id: int) -> torch.Tensor:
        """[slots, C, W - 1]: windows of a layer; a view. Raises ``KeyError`` for a layer without a state."""
        return self._views[layer_id][0]

    def temporal(self, layer_id: int) -> torch.Tensor:
        """[slots, Hv, V, K], or [slots, Hv, K, V]: states of a layer; a view. Raises ``KeyError``, likewise."""
        return self._views[layer_id][1]

    def scratch(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Windows [requests, N, C, W - 1] and states [requests, N, Hv, V, K] after each node of each draft, by the
        position of a request in the batch. Target-verify writes them, and ``StateBackend.commit`` reads them. With
        rollback ``slots`` the scratch is empty.
        """
        window, state = self._scratch[layer_id]
        return window, state

    @property
    def scratch_parts(self) -> tuple[torch.Tensor, ...]:
        """All memory of ``scratch``."""
        return tuple(part for parts in self._scratch.values() for part in parts)

    @cached_property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """Window and state of each layer, in sequence: views."""
        return tuple(part for views in self._views.values() for part in views)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _aligned(size: int) -> int:
    """``size`` up to a multiple of 16 bytes."""
    return -(-size // 16) * 16


@dataclass
class Snapshot:
    """Copies of states for a prefix cache, which a step makes in addition to what it stores.

    ``rows[i]`` is how many rows of this step the copy of request i includes: a multiple of the chunk length in extend,
    1 in decode, at most the accepted nodes in target-verify. 0: the request has no copy.
    """

    rows: torch.Tensor
    """[bs] int32."""
    slots: torch.Tensor
    """[bs] int64: the slot that gets window and state; 0 without a copy."""


@dataclass
class StateInput:
    """``ForwardBatch.state``: the states of the batch's requests."""

    indices: torch.Tensor
    """[bs] int32: slot of each request, which ``StateContext.req_to_state`` gives for its row, too. For a padded
    request -1 or 0 (``State.padding``). In target-verify with a rollback by slots [bs, N]: a slot for each
    node; with ``slots_in_decode`` in decode, too. Other modes of such an instance have the first of them."""
    has_initial_state: torch.Tensor | None = None
    """[bs] bool, in extend: False for a request that has no token before the step, and so begins from zeros. None in
    decode and target-verify."""
    num_accepted: torch.Tensor | None = None
    """[bs] int32, in target-verify with rollback by slots, and in decode with ``slots_in_decode``: accepted nodes of
    the request's previous step, 1 to N; 1 for padded requests, after a prompt, after a decode and after a ``commit``.
    """
    sources: torch.Tensor | None = None
    """[bs] int32, in decode and extend with ``StateContext.continues`` ``source``: slot whose window and state request
    i continues. It may be its own (``indices[i]``), or one of the prefix cache, which other requests of the batch may
    continue, too, and which stays as it is. For fresh and padded requests as ``indices``."""
    snapshot: Snapshot | None = None
    """Copies to make; None if the case has none (``State.snapshots``)."""


@dataclass(frozen=True, eq=False)
class StateContext:
    """``BackendContext.state``: the states, as the constructor is given them."""

    layers: tuple[StateLayer, ...]
    """The layers that have a state, in the order in which they run."""
    pool: StatePool
    req_to_state: torch.Tensor
    """[pool_size + 1] int32: slot of each row of the request table; with a slot for each node [pool_size + 1, N].
    Row 0 gives slot 0."""
    padding: str = "skip_minus_one"
    """Meaning of the index of a padded request (``State.padding``)."""
    fresh: str = "flag"
    """Way in which a fresh request begins from zeros (``State.fresh``)."""
    rollback: str = "commit"
    """Way in which rejected nodes are taken back (``State.rollback``); ``commit`` if no mode is target-verify."""
    snapshots: int = 0
    """Length of a chunk at whose ends states are copied (``State.snapshots``); 0: never."""
    continues: str = "copy"
    """Way in which a request continues a state of the prefix cache (``State.continues``)."""
    rounding: str = "nearest"
    """Rounding of a state that a decode stores (``State.rounding``)."""
    conv_windows: str = "exact"
    """Place of the last inputs in windows with more than W - 1 columns (``State.conv_windows``)."""

"""Offloading: memory of requests that leaves to the host, and comes back to other slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch

from .declared import Declared

__all__ = ["HOST_LAYOUTS", "OFFLOADED", "HostMemory", "HostPool", "Moved", "Offloads", "Transfer"]

HOST_LAYOUTS = ("layer_first", "page_first", "page_first_direct")
"""Orders of layers, pages and slots in host memory, by SGLang's names: ``Offloads.host_layouts``."""
OFFLOADED = ("keys", "index_keys", "states")
"""Kinds of memory that may leave: ``Offloads.memory``."""
_ALIGNED = 16
"""Bytes to which the memory of a kind of rows is aligned."""


@dataclass(frozen=True)
class Offloads(Declared):
    """Memory that a backend moves to the host and back: ``Capabilities(offloads=Offloads({"layer_first"}))``.

    Such a backend has ``AttentionBackend.offload`` and ``AttentionBackend.reload``. Raises ``ValueError`` for a wrong
    spelling, and for sets that are empty.
    """

    host_layouts: Set[str]
    """Layouts of the host memory, as ``HostPool`` describes them: of ``layer_first``, ``page_first`` and
    ``page_first_direct``."""
    memory: Set[str] = frozenset({"keys"})
    """Kinds of memory that leave and come back: ``keys`` (K and V, or latent rows, with scales in memory of their own),
    ``index_keys`` with their scales, and ``states`` with their windows. A request leaves with all that it has."""
    by_layer: bool = False
    """True: the server does not wait for a reload, as HiCache does not. Each forward of a layer waits until the rows of
    its layer are back, and a plan for a replay waits for all layers, because a replay calls no forward. False: the
    server waits for the event that ``reload`` returns before it plans a step, as vLLM does."""

    def _check(self) -> None:
        self._check_words("host_layouts", HOST_LAYOUTS)
        self._check_words("memory", OFFLOADED)
        for name in ("host_layouts", "memory"):
            if not getattr(self, name):
                raise ValueError(f"Offloads.{name} is empty; write one value or more, or leave offloads out")
        self._check_flags()


@dataclass(frozen=True, eq=False)
class HostPool:
    """Pinned host memory for the rows of one device pool: of a KV group, of index keys, or of states.

    Rows of one kind, such as K, are in this order, where ``row`` is a row of K in one layer:

    ===================== ==============================
    ``layer_first``       [layers, pages, page_size, row]
    ``page_first``        [pages, page_size, layers, row]
    ``page_first_direct`` [pages, layers, page_size, row]
    ===================== ==============================

    A row has the order of ``KVPool.get_kv_pages``, heads before numbers, whatever the layout of the device's pool.
    States have one slot per page.
    """

    layout: str
    """One of ``HOST_LAYOUTS``."""
    page_size: int
    """Slots of a page: those of a page of the KV pool, also for index keys."""
    num_slots: int
    memory: torch.Tensor = field(repr=False)
    """All memory, [bytes] uint8, pinned."""
    parts: Mapping[int, tuple[torch.Tensor, ...]] = field(repr=False)
    """Layer id -> views [pages, page_size, *row]: of K and V (one row of MLA), then of separate scales; of index keys
    and their scales; of a window and a state."""

    @classmethod
    def of(
        cls,
        rows: Mapping[int, Sequence[tuple[Sequence[int], torch.dtype]]],
        pages: int,
        page_size: int,
        layout: str,
    ) -> HostPool:
        """Allocate the memory. ``rows``: layer id -> shape and dtype of a row of each part."""
        kinds = max(len(parts) for parts in rows.values())
        sizes = [
            {layer: _bytes(parts[kind]) for layer, parts in rows.items() if kind < len(parts)} for kind in range(kinds)
        ]
        starts, total = list[int](), 0
        for each in sizes:
            starts.append(total)
            total += -(-pages * page_size * sum(each.values()) // _ALIGNED) * _ALIGNED
        memory = torch.empty(max(total, _ALIGNED), dtype=torch.uint8, device="cpu", pin_memory=True)
        views: dict[int, list[torch.Tensor]] = {layer: [] for layer in rows}
        for start, each in zip(starts, sizes, strict=True):
            before, row = 0, sum(each.values())
            for layer, size in each.items():
                shape, dtype = rows[layer][len(views[layer])]
                first, page, slot = {
                    "layer_first": (before * pages * page_size, page_size * size, size),
                    "page_first": (before, page_size * row, row),
                    "page_first_direct": (before * page_size, page_size * row, size),
                }[layout]
                views[layer].append(_view(memory, start + first, (pages, page_size, *shape), (page, slot), dtype))
                before += size
        return cls(layout, page_size, pages * page_size, memory, {layer: tuple(each) for layer, each in views.items()})


def _bytes(row: tuple[Sequence[int], torch.dtype]) -> int:
    size = row[1].itemsize
    for count in row[0]:
        size *= count
    return size


def _view(
    memory: torch.Tensor, first: int, shape: tuple[int, ...], outer: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    strides = [1]
    for size in reversed(shape[3:]):
        strides.insert(0, strides[0] * max(size, 1))
    size = dtype.itemsize
    inner = strides if len(shape) > 2 else []
    return memory.view(dtype).as_strided(shape, (*(step // size for step in outer), *inner), first // size)


@dataclass(frozen=True, eq=False)
class HostMemory:
    """Host memory of an instance, which the server allocates once."""

    keys: tuple[HostPool, ...]
    """One pool for each KV group with keys, in the order of ``BackendContext.groups``."""
    index_keys: HostPool | None = None
    """Index keys of the first group, in the host slots of its keys; None without an indexer."""
    states: HostPool | None = None
    """None if no layer has a state."""


@dataclass(frozen=True, eq=False)
class Moved:
    """Slots of one device pool, and those of its host pool."""

    slots: torch.Tensor
    """[n] int64, on the host: device slots, page by page and in the order of tokens in a page. Pages are full, except
    for the last one if the request ends inside it. The rest of such a page may be copied, too."""
    host_slots: torch.Tensor
    """[n] int64, on the host: the slot in the host pool of each; a page of the device is in one page of the host."""


@dataclass(frozen=True, eq=False)
class Transfer:
    """The argument of ``AttentionBackend.offload`` and ``reload``: pages and the state of one request."""

    host: HostMemory
    keys: tuple[Moved, ...]
    """Slots in each pool of ``HostMemory.keys``. The first ones are those of the index keys, too."""
    state: Moved | None
    """Slot of the request's state, n = 1; None if it does not move."""
    stream: torch.cuda.Stream
    """The server's stream for copies, the same for all transfers. Copies may as well be on the current stream."""

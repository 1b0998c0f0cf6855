"""The emulated names of `torch.cuda`, as one table; they are installed when a context is entered and removed when it is
left."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from cuda_on_cpu import rules, session
from cuda_on_cpu.device import CAPABILITY, NAME, TOTAL_MEMORY, DeviceProperties
from cuda_on_cpu.generators import EmulatedGenerator
from cuda_on_cpu.graph import AcceleratorGraph, EmulatedGraph, graph
from cuda_on_cpu.pools import new_handle
from cuda_on_cpu.session import SYNC_DEFAULT, SYNC_ERROR, SYNC_WARN
from cuda_on_cpu.sites import Site
from cuda_on_cpu.stream_state import StreamState
from cuda_on_cpu.streams import Event, ExternalStream, Stream, StreamContext
from cuda_on_cpu.tags import DEVICE, wants_cuda

_SYNC_MODES = {"default": SYNC_DEFAULT, "warn": SYNC_WARN, "error": SYNC_ERROR}
_DEFAULT_GENERATOR = EmulatedGenerator()
_SUPPORTED = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
     torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2}
)  # fmt: skip


def synchronize(device: Any = None) -> None:
    """A host sync. Raises CaptureError in a capture; sync debug mode does not see it, as on a GPU."""
    session.require().refuse(rules.HOST_WAIT, "torch.cuda.synchronize()")
    _all_is_done()


def _all_is_done(*_: Any) -> None:
    """Note that the host waited for all streams, as a free of device memory does, too."""
    order = session.require().keeps_order
    if order is not None:
        order.device_waited_for()


def set_sync_debug_mode(debug_mode: int | str) -> None:
    """Ignore (0, "default"), warn of (1, "warn") or raise at (2, "error") host syncs of this thread's eager code.

    Raises RuntimeError for another name.
    """
    if isinstance(debug_mode, str):
        if debug_mode not in _SYNC_MODES:
            raise RuntimeError("invalid value of debug_mode, expected one of `default`, `warn`, `error`")
        debug_mode = _SYNC_MODES[debug_mode]
    session.require().sync_mode = debug_mode


def get_sync_debug_mode() -> int:
    """0, 1 or 2: the mode that `set_sync_debug_mode` set in this thread."""
    return session.require().sync_mode


def is_current_stream_capturing() -> bool:
    """True if work issued now becomes part of a graph."""
    return session.require().recording


def current_stream(device: Any = None) -> StreamState:
    """The thread's current stream, the very object that was made current."""
    return session.require().stream


def set_stream(stream: StreamState | None) -> None:
    """Make `stream` this thread's current one for good; None changes nothing."""
    if stream is not None:
        session.require().use(stream)


class DeviceGuard:
    """The emulated `torch.cuda.device` and `device_of`: there is only one device, so nothing is switched."""

    def __init__(self, device: Any = None) -> None:
        self.idx, self.prev_idx = 0, 0

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class DeviceIndex:
    """The emulated `torch.accelerator.device_index`. Raises RuntimeError for another device than 0."""

    def __init__(self, device: int | None, /) -> None:
        self.idx, self.prev_idx = device, 0

    def __enter__(self) -> None:
        if self.idx is not None:
            _only_one(self.idx)

    def __exit__(self, *_: object) -> None: ...


def _only_one(device: Any, /) -> None:
    if not isinstance(device, int) or device >= 0:  # torch does nothing for a negative index
        wants_cuda(device)


def _module_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.get_device_module`: without an argument, that of the accelerator."""

    def get_device_module(device: Any = None) -> Any:
        return torch.cuda if device is None and session.is_active() else original(device)

    return get_device_module


# Random numbers of device operations are drawn from torch's default CPU generator.
def _seed_all(seed: int) -> None:
    current = session.require()
    if current.capture is not None and int(seed) != _DEFAULT_GENERATOR.initial_seed():
        current.refuse(rules.RESEED, "torch.cuda.manual_seed()")
    _DEFAULT_GENERATOR.manual_seed(int(seed))
    torch.default_generator.manual_seed(int(seed))


def _rng_state(device: Any = None) -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    torch.default_generator.set_state(state)


def memory_allocated(device: Any = None) -> int:
    """Bytes of device memory that somebody refers to, of all threads."""
    return DEVICE.live_bytes()


def max_memory_allocated(device: Any = None) -> int:
    """The most bytes that were live since the last reset; before it, the most that any of these functions saw."""
    memory_allocated()
    return DEVICE.peak_bytes


def reset_peak_memory_stats(device: Any = None) -> None:
    """Begin a new peak, at the bytes that are live now."""
    DEVICE.reset_peak()


def memory_stats(device: Any = None) -> dict[str, int]:
    """torch's keys for bytes and counts of blocks, as if every tensor's memory were a separate segment."""
    live = DEVICE.live()
    now, count, peak = DEVICE.bytes_in(live), len(live), DEVICE.peak_bytes
    stats = {}
    for pool in ("all", "small_pool", "large_pool"):
        for kind in ("allocated_bytes", "reserved_bytes"):
            stats[f"{kind}.{pool}.current"], stats[f"{kind}.{pool}.peak"] = now, peak
        for kind in ("allocation", "segment", "active"):
            stats[f"{kind}.{pool}.current"] = count
        stats[f"allocation.{pool}.allocated"] = DEVICE.made
    return {**stats, "num_alloc_retries": 0, "num_ooms": 0}


def memory_snapshot(mempool_id: Any = None) -> list[dict[str, Any]]:
    """One segment in torch's form for each storage on the device, with the line that allocated it as its only frame."""
    live = DEVICE.live()
    sites = DEVICE.sites(key for key, _ in live)
    return [
        _segment(site, storage.data_ptr(), storage.nbytes()) for site, (_, storage) in zip(sites, live, strict=True)
    ]


def _segment(site: Site, address: int, size: int) -> dict[str, Any]:
    return {
        "device": 0,
        "address": address,
        "total_size": size,
        "allocated_size": size,
        "active_size": size,
        "stream": 0,
        "segment_type": "small",
        "blocks": [
            {
                "address": address,
                "size": size,
                "requested_size": size,
                "state": "active_allocated",
                "frames": [{"filename": site.filename, "line": site.line, "name": site.function}],
            }
        ],
    }


def _constant(value: Any) -> Callable[..., Any]:
    def answer(*_: Any, **__: Any) -> Any:
        return value

    return answer


def _nothing(*_: Any, **__: Any) -> None:
    return None


CLASSES: dict[str, Any] = {
    "Stream": Stream,
    "ExternalStream": ExternalStream,
    "Event": Event,
    "StreamContext": StreamContext,
    "CUDAGraph": EmulatedGraph,
    "graph": graph,
    "device": DeviceGuard,
    "device_of": DeviceGuard,
}

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "_lazy_init": _nothing,
    "init": _nothing,
    "is_available": _constant(True),
    "is_initialized": _constant(True),
    "is_bf16_supported": _constant(True),
    "device_count": _constant(1),
    "current_device": _constant(0),
    "set_device": _nothing,
    "get_device_capability": _constant(CAPABILITY),
    "get_device_properties": _constant(DeviceProperties()),
    "get_device_name": _constant(NAME),
    "get_arch_list": _constant(["sm_90"]),
    "can_device_access_peer": _constant(False),
    "synchronize": synchronize,
    "set_sync_debug_mode": set_sync_debug_mode,
    "get_sync_debug_mode": get_sync_debug_mode,
    "is_current_stream_capturing": is_current_stream_capturing,
    "current_stream": current_stream,
    "default_stream": lambda device=None: session.require().default_stream,
    "set_stream": set_stream,
    "stream": StreamContext,
    "graph_pool_handle": new_handle,
    "manual_seed": _seed_all,
    "manual_seed_all": _seed_all,
    "initial_seed": _DEFAULT_GENERATOR.initial_seed,
    "seed": _nothing,
    "seed_all": _nothing,
    "get_rng_state": _rng_state,
    "get_rng_state_all": lambda: [_rng_state()],
    "set_rng_state": _set_rng_state,
    "set_rng_state_all": lambda states: _set_rng_state(states[0]),
    "empty_cache": _all_is_done,
    "ipc_collect": _nothing,
    "mem_get_info": lambda device=None: (TOTAL_MEMORY - DEVICE.live_bytes(), TOTAL_MEMORY),
    "memory_allocated": memory_allocated,
    "memory_reserved": memory_allocated,
    "max_memory_allocated": max_memory_allocated,
    "max_memory_reserved": max_memory_allocated,
    "memory_stats": memory_stats,
    "memory_summary": _constant("emulated device: no allocator"),
    "memory_snapshot": memory_snapshot,
    "reset_peak_memory_stats": reset_peak_memory_stats,
    "reset_accumulated_memory_stats": _nothing,
    "reset_max_memory_allocated": reset_peak_memory_stats,
}

_OF_ACCELERATOR = (
    "empty_cache", "max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved", "memory_stats",
    "reset_accumulated_memory_stats", "reset_peak_memory_stats", "is_available", "device_count", "current_stream",
    "set_stream", "synchronize",
)  # fmt: skip
"""Names of `torch.accelerator` that come from the module of its device."""
ACCELERATOR: dict[str, Callable[..., Any]] = {
    **{name: FUNCTIONS[name] for name in _OF_ACCELERATOR},
    "current_accelerator": _constant(torch.device("cuda")),
    "current_device_index": _constant(0),
    "current_device_idx": _constant(0),
    "set_device_index": _only_one,
    "set_device_idx": _only_one,
    "get_device_capability": _constant({"supported_dtypes": _SUPPORTED}),
    "get_memory_info": FUNCTIONS["mem_get_info"],
    "empty_host_cache": _nothing,
}
_ACCELERATOR_CLASSES: dict[str, Any] = {"device_index": DeviceIndex, "Graph": AcceleratorGraph}

_NVTX = dict.fromkeys(("range_push", "range_pop", "range_start", "range_end", "mark"), _nothing)

# Modules of torch.cuda that keep their own name for something in the table.
_MODULES: tuple[ModuleType, ...] = (
    torch.cuda, torch.cuda.graphs, torch.cuda.streams, torch.cuda.memory, torch.cuda.random,
)  # fmt: skip


def _guarded(emulated: Callable[..., Any], original: Callable[..., Any] | None) -> Callable[..., Any]:
    """Threads outside the emulation get the real function."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if session.is_active() or original is None:
            return emulated(*args, **kwargs)
        return original(*args, **kwargs)

    return call


def replacements() -> Iterator[tuple[Any, str, Any]]:
    """(object, attribute, emulated value) of everything to replace under torch.cuda."""
    classes, functions = _names_in_torch()
    for module, name, emulated in classes:
        yield module, name, emulated
    for module, name, emulated in functions:
        yield module, name, _guarded(emulated, getattr(module, name))


_Named = list[tuple[ModuleType, str, Any]]


@functools.cache
def _names_in_torch() -> tuple[_Named, _Named]:
    """Names above that exist in this torch: those replaced for every thread, and those only for threads inside the
    emulation."""
    everybody: _Named = [(torch.cuda, "default_generators", (_DEFAULT_GENERATOR,))]
    inside: _Named = []
    for module in _MODULES:
        for name, emulated in CLASSES.items():
            if hasattr(module, name) and (module is torch.cuda or name in ("CUDAGraph", "graph", "Stream", "Event")):
                everybody.append((module, name, emulated))
        inside += [(module, name, emulated) for name, emulated in FUNCTIONS.items() if hasattr(module, name)]
    for module in (torch.accelerator, getattr(torch.accelerator, "memory", torch.accelerator)):
        inside += [(module, name, it) for name, it in ACCELERATOR.items() if hasattr(module, name)]
    named = _ACCELERATOR_CLASSES.items()
    everybody += [(torch.accelerator, name, it) for name, it in named if hasattr(torch.accelerator, name)]
    everybody.append((torch, "get_device_module", _module_of(torch.get_device_module)))
    everybody += [(torch.cuda.nvtx, name, it) for name, it in _NVTX.items() if hasattr(torch.cuda.nvtx, name)]
    return everybody, inside

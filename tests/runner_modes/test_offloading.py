"""Memory that leaves to the host and comes back: what a transfer names, and the text of each mistake."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from in_process import check_backend
from typing_extensions import override

from attn_testkit.backends.torch_native_offload import TorchNativeOffloadBackend
from attn_testkit.backends.torch_native_state_offload import TorchNativeStateOffloadBackend
from attn_testkit.contract import AttentionBackend, HostPool, Offloads, Transfer
from attn_testkit.results.finding import Finding
from cuda_on_cpu import emulated_cuda

CASE = "decode-gqa4x2-d64-bf16-p4-k21.9.0-shuffled-gauss-offloadpagefirstdirect-b3prod"
STATES = "decode-mamba2x2-d32-bf16-p16-k5.7-shuffled-mild_decay-k32w4s32-layers2from0hybrid-offloadpagefirst-b2prod"


def findings(backend: type[AttentionBackend], case: str = CASE, execution: str = "eager") -> list[Finding]:
    report = check_backend(backend, cases=[case], executions=[execution], device="cpu", diagnose="none")
    return [found for row in report.rows for found in row.findings]


@pytest.mark.parametrize(
    ("layout", "k", "v"),
    [
        # Layers 3 and 5, three pages of two slots, rows of 4 bytes: K of all layers, then V.
        ("layer_first", [(0, 8, 4), (24, 8, 4)], [(48, 8, 4), (72, 8, 4)]),
        ("page_first", [(0, 16, 8), (4, 16, 8)], [(48, 16, 8), (52, 16, 8)]),
        ("page_first_direct", [(0, 16, 4), (8, 16, 4)], [(48, 16, 4), (56, 16, 4)]),
    ],
)
def test_a_host_layout_is_an_order_of_layers_pages_and_slots(
    layout: str, k: list[tuple[int, int, int]], v: list[tuple[int, int, int]]
) -> None:
    row = [((1, 2), torch.bfloat16), ((1, 2), torch.bfloat16)]
    with emulated_cuda():
        pool = HostPool.of({3: row, 5: row}, 3, 2, layout)
    assert (pool.num_slots, pool.memory.shape) == (6, (96,))
    found = [[pool.parts[layer][part] for layer in (3, 5)] for part in (0, 1)]
    # First byte, bytes between pages, bytes between slots.
    of = [[(2 * x.storage_offset(), 2 * x.stride(0), 2 * x.stride(1)) for x in views] for views in found]
    assert of == [k, v]
    assert {tuple(x.shape) for views in found for x in views} == {(3, 2, 1, 2)}


class Noted(TorchNativeOffloadBackend):
    """Notes what it is asked for."""

    seen: ClassVar[list[tuple[str, list[int], list[int]]]] = []

    def note(self, what: str, transfer: Transfer) -> None:
        (keys,) = transfer.keys
        self.seen.append((what, keys.slots.tolist(), keys.host_slots.tolist()))

    @override
    def offload(self, transfer: Transfer) -> torch.cuda.Event:
        self.note("leaves", transfer)
        return super().offload(transfer)

    @override
    def reload(self, transfer: Transfer) -> torch.cuda.Event:
        self.note("comes back", transfer)
        return super().reload(transfer)


def test_pages_of_requests_come_back_in_turn_in_part_and_to_other_slots() -> None:
    Noted.seen.clear()
    assert findings(Noted) == []
    plan = [what for what, *_ in Noted.seen]
    # Two requests have keys. One has two pieces, and so has the other: they come back once to be compared, and once
    # while the step is planned. Then both leave again, and a page comes back to slots of nobody.
    first = plan[: plan.index("leaves", 2)]
    assert first[:2] == ["leaves"] * 2
    assert set(first[2:]) == {"comes back"}
    assert len(first) % 2 == 0
    left = {slot: host for _, slots, hosts in Noted.seen[:2] for slot, host in zip(slots, hosts, strict=True)}
    back = {
        host: slot for _, slots, hosts in Noted.seen[2 : len(first)] for slot, host in zip(slots, hosts, strict=True)
    }
    assert (len(left), len(back)) == (30, 30 - 4), "the first page of the second request stays on the device, too"
    assert back.keys() < set(left.values()), "a part of what left"
    assert all(left.get(slot) != host for host, slot in back.items()), "to other slots"


class Wrong(TorchNativeOffloadBackend):
    """Waits for everything, so that what is wrong does not depend on an order."""

    def keys(self) -> torch.Tensor:
        """[pages, page_size, Hk, D] of the first layer."""
        return self.context.kv_pool.get_kv_pages(self.context.layers[0].layer_id)[0]


class ConvertedOnTheWay(Wrong):
    """Changes a number on the host."""

    @override
    def offload(self, transfer: Transfer) -> torch.cuda.Event:
        event = super().offload(transfer)
        torch.cuda.synchronize()
        slot = int(transfer.keys[0].host_slots[2])
        transfer.host.keys[0].parts[self.context.layers[0].layer_id][1][slot // 4, slot % 4, 1, 3] += 1.0
        return event


class OnePageMore(Wrong):
    """Writes a page of a request that stayed on the device."""

    @override
    def offload(self, transfer: Transfer) -> torch.cuda.Event:
        if len(transfer.keys[0].slots) == 9:
            self.stays = int(transfer.keys[0].slots[0]) // 4
        return super().offload(transfer)

    @override
    def reload(self, transfer: Transfer) -> torch.cuda.Event:
        event = super().reload(transfer)
        torch.cuda.synchronize()
        self.keys()[self.stays] = 0.5
        return event


class HostIsScratch(Wrong):
    """Leaves nothing on the host after a reload."""

    @override
    def reload(self, transfer: Transfer) -> torch.cuda.Event:
        event = super().reload(transfer)
        torch.cuda.synchronize()
        transfer.host.keys[0].memory.zero_()
        return event


class OlderRows(Wrong):
    """Copies what was there at the begin of the step, if it is asked while the step is in flight."""

    older: tuple[torch.Tensor, ...] = ()

    @override
    def offload(self, transfer: Transfer) -> torch.cuda.Event:
        event = super().offload(transfer)
        torch.cuda.synchronize()
        slot, host = int(transfer.keys[0].slots[-1]), int(transfer.keys[0].host_slots[-1])
        if len(transfer.keys[0].slots) in (22, 10):
            rows = transfer.host.keys[0].parts[self.context.layers[0].layer_id][0]
            rows[host // 4, host % 4] = rows[host // 4, (host - 1) % 4] * 1.5
        assert slot >= 4
        return event


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        (ConvertedOnTheWay, "the host does not have V of a request that left"),
        (ConvertedOnTheWay, "token 2 of request"),
        (ConvertedOnTheWay, "the numbers there are in no row that left"),
        (OnePageMore, "K of a device slot to which nothing came back was written"),
        (HostIsScratch, "a reload wrote the host's memory"),
        (OlderRows, "the host does not have K of a request that left, while a step was in flight"),
        (OlderRows, "copies to the host come after the work that stores the rows"),
    ],
)
def test_a_mistake_is_named_and_is_the_only_one(backend: type[AttentionBackend], said: str) -> None:
    found = found_by(backend)
    assert {each.check for each in found} == {"reloaded-as-left"}
    assert said in "\n".join(f"{each.headline}\n{each.where}\n{each.hint}" for each in found)


_FOUND: dict[type[AttentionBackend], list[Finding]] = {}


def found_by(backend: type[AttentionBackend]) -> list[Finding]:
    """Findings of a backend, which runs once."""
    if backend not in _FOUND:
        _FOUND[backend] = findings(backend)
    return _FOUND[backend]


class Raises(TorchNativeOffloadBackend):
    """Raises an error."""

    @override
    def reload(self, transfer: Transfer) -> torch.cuda.Event:
        raise RuntimeError("no such page")


def test_an_error_is_that_of_the_backend() -> None:
    found = findings(Raises)
    assert [(each.check, each.headline) for each in found] == [
        ("completes", "reload raised RuntimeError: no such page")
    ]


class WaitsForNothing(TorchNativeOffloadBackend):
    """Does not wait for a reload."""

    @override
    def _wait_for(self, layer_id: int) -> None:
        self._arriving.pop(layer_id, None)


class LetsTheServerWait(WaitsForNothing):
    """Says that the server waits."""

    capabilities = TorchNativeOffloadBackend.capabilities.with_changes(
        offloads=Offloads({"page_first_direct"}, by_layer=False)
    )


@pytest.mark.parametrize("execution", ["eager", "graph"])
def test_only_a_server_that_waits_may_be_relied_on(execution: str) -> None:
    (found, *_) = findings(WaitsForNothing, execution=execution)
    assert found.check == "completes"
    assert "nothing orders the two" in found.hint
    assert findings(LetsTheServerWait, execution=execution) == []


class WindowStays(TorchNativeStateOffloadBackend):
    """Loses the windows."""

    @override
    def reload(self, transfer: Transfer) -> None:
        assert self.context.state is not None
        windows = [self.context.state.pool.conv(layer.layer_id) for layer in self.context.state.layers]
        before = [each.clone() for each in windows]
        super().reload(transfer)
        for now, was in zip(windows, before, strict=True):
            now.copy_(was)


def test_windows_and_states_leave_with_the_keys() -> None:
    (found, *_) = findings(WindowStays, STATES)
    assert (found.check, found.headline) == (
        "reloaded-as-left", "window of a request that came back is not what the host has"
    )  # fmt: skip
    assert "in the channels of" in found.where

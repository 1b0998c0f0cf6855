"""Memory of a GPU at a chosen address: where it is mapped, and what is given back. The driver writes down its calls."""

from __future__ import annotations

import enum
import types
from typing import Any

import pytest

from attn_testkit.graphs import addresses

GIB4, PIECE = 1 << 32, 2 << 20


class Driver(types.SimpleNamespace):
    """Answers as ``cuda.bindings.driver`` does: an error code, then a value."""

    def __init__(self, start: int, refused: str = "") -> None:
        super().__init__()
        self.start, self.refused, self.calls = start, refused, []
        self.CUmemLocationType = types.SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
        self.CUmemAllocationType = types.SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
        self.CUmemAccess_flags = types.SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
        for name in ("CUmemLocation", "CUmemAllocationProp", "CUmemAccessDesc"):
            setattr(self, name, types.SimpleNamespace)
        self.CUmemAllocationGranularity_flags = enum.IntEnum("Flags", {"MINIMUM": 0})
        answers = {"cuMemGetAllocationGranularity": PIECE, "cuMemAddressReserve": start, "cuMemCreate": "memory"}
        for name in (*answers, "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease", "cuMemAddressFree"):
            setattr(self, name, self._function(name, answers.get(name)))

    def _function(self, name: str, value: Any) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            return (2 if name == self.refused else 0, *([] if value is None else [value]))

        return call

    def named(self, name: str) -> tuple[Any, ...]:
        [found] = [arguments for called, *arguments in self.calls if called == name]
        return tuple(found)


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)


@pytest.mark.parametrize("start", [PIECE, GIB4 - PIECE, GIB4, 7 * GIB4 + 3 * PIECE])
@pytest.mark.parametrize("below", [512, PIECE, PIECE + 512])
def test_a_multiple_of_4_gib_is_where_it_was_asked_for_and_the_memory_is_mapped_and_reserved(
    start: int, below: int
) -> None:
    driver, nbytes = Driver(start), 3 * PIECE + 1024
    memory = addresses._Mapping(driver, GIB4, nbytes, below).__cuda_array_interface__
    first = memory["data"][0]
    assert (first + below) % GIB4 == 0
    assert (memory["shape"], memory["typestr"]) == ((nbytes,), "|u1")
    [reserved, *_], [mapped, size, *_] = driver.named("cuMemAddressReserve"), driver.named("cuMemMap")
    assert start <= mapped <= first
    assert first + nbytes <= mapped + size <= start + reserved
    assert mapped % PIECE == size % PIECE == 0
    assert size <= nbytes + 2 * PIECE
    assert driver.named("cuMemCreate")[0] == driver.named("cuMemSetAccess")[1] == size


def test_memory_is_unmapped_and_released_and_its_addresses_are_free_again() -> None:
    driver = Driver(PIECE)
    made = addresses._Mapping(driver, GIB4, 4096, 512)
    before = len(driver.calls)
    del made
    assert [name for name, *_ in driver.calls[before:]] == ["cuMemUnmap", "cuMemRelease", "cuMemAddressFree"]


@pytest.mark.parametrize(
    ("refused", "given_back"),
    [
        ("cuMemAddressReserve", []),
        ("cuMemCreate", ["cuMemAddressFree"]),
        ("cuMemMap", ["cuMemRelease", "cuMemAddressFree"]),
        ("cuMemSetAccess", ["cuMemUnmap", "cuMemRelease", "cuMemAddressFree"]),
    ],
)
def test_a_driver_without_room_keeps_nothing_and_the_pool_lies_anywhere(
    refused: str, given_back: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(PIECE, refused)
    monkeypatch.setattr(addresses, "driver_api", lambda: driver)
    assert addresses.map_across(GIB4, 4096, 512) is None
    names = [name for name, *_ in driver.calls]
    assert names[names.index(refused) + 1 :] == given_back


def test_without_the_bindings_the_pool_lies_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "driver_api", lambda: None)
    assert addresses.map_across(GIB4, 4096, 512) is None

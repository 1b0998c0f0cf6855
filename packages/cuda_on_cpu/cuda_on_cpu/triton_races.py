"""Races inside a launch of a Triton kernel: two programs use one location, one of them writes, nothing orders them.

The interpreter runs the programs of a grid one after another, so a race changes no result here. On a device they run in
any order, and at once. Two programs are ordered by an atomic operation of each on the same location, with the semantics
``release`` in the first and ``acquire`` in the second, as in a ticket or a lock. The accesses of a program between two
of its atomic operations form an *epoch*. Epochs form a happens-before graph. If two programs store the same value, for
example because each computes the metadata of all, it is not a race.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from cuda_on_cpu import session
from cuda_on_cpu.errors import RaceError
from cuda_on_cpu.private import disable_functions
from cuda_on_cpu.sites import author_site
from cuda_on_cpu.tags import DEVICE, storage_key
from cuda_on_cpu.triton_addresses import contents, places_of
from cuda_on_cpu.triton_addresses import memory as all_memory
from cuda_on_cpu.triton_lanes import Block, Lanes

Array = npt.NDArray[Any]

_MOST_LOGGED = 1 << 26
"""Bytes of logged read addresses of one tensor, above which they are entered into its shadow."""
_MOST_KERNELS = 4
"""Most earlier kernels with which a kernel that begins early is compared."""
_MOST_LOCKS = 64
"""Most locations of an atomic operation that may order programs. An atomic sum of a tile has more, and orders
nothing."""


def scratch(tensor: Tensor) -> None:
    """Let programs race for the memory of ``tensor``, first element to last, as for the slot of padded rows.

    Nothing happens outside of ``emulated_cuda()``.
    """
    if tensor.numel() and session.is_active():
        with disable_functions():
            start = tensor.data_ptr()
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            spans = session.require().scratch.setdefault(storage_key(tensor), [])
            spans.append((start, start + (last + 1) * tensor.element_size()))


def semantics_of(sem: Any, scope: Any) -> tuple[bool, bool]:
    """(acquires, releases) of an atomic operation of the builder."""
    if "CTA" in str(scope).upper():
        return False, False  # orders threads of one program
    word = str(sem).upper()
    both = "ACQUIRE_RELEASE" in word or "ACQ_REL" in word
    return both or word.endswith("ACQUIRE"), both or word.endswith("RELEASE")


def acquiring(answer: Any, acquire: Callable[[], None]) -> Any:
    """``answer``, a block of the interpreter, which calls ``acquire`` when its values are read."""
    answer.__dict__["acquire"] = acquire
    kind: Any = type(answer)
    answer.__class__ = _acquiring(kind)
    return answer


@functools.cache
def _acquiring(kind: Any) -> type[Any]:
    class Acquiring(kind):  # type: ignore[misc]
        """A block whose values have not been read."""

        @property
        def data(self) -> Any:
            """The values."""
            acquire = self.__dict__.pop("acquire")
            self.__class__ = kind
            acquire()
            return self.data

    return Acquiring


class _Shadow:
    """The epochs that last used each element of a tensor. 0: none. Negative: the value did not change."""

    def __init__(self, elements: int) -> None:
        self.writer, self.reader, self.earlier_reader, self.adder = (np.zeros(elements, np.int32) for _ in range(4))


class _Read(NamedTuple):
    """A load: every sum of one element of each of ``parts``, bytes of an element, epoch. Of several programs at once:
    the epoch of each, and the shape of the block with their axis, of which the elements ``where`` are loaded."""

    parts: Sequence[Array]
    size: int
    epoch: Any
    shape: tuple[int, ...] | None = None
    where: Any = ...

    def elements(self) -> tuple[Array, Any]:
        """Addresses, and the epoch of each, or of all."""
        if self.shape is None:
            return _addresses(self.parts), self.epoch
        epochs = _of_each(self.epoch, self.shape, self.where)
        return np.broadcast_to(functools.reduce(np.add, self.parts), epochs.shape).reshape(-1), epochs.reshape(-1)


def _of_each(numbers: Array, shape: tuple[int, ...], where: Any) -> Array:
    """The number of its program for each element of an access of several programs."""
    found: Array = np.broadcast_to(numbers.reshape(-1, *[1] * (len(shape) - 1)), shape)[where]
    return found


@dataclass
class _Together:
    """Accesses of programs that run at once. They are entered when all have ended."""

    first: int
    """Epoch of the first one."""
    epochs: Array
    """Epochs of those that run now."""
    reads: list[tuple[_Memory, _Read]] = field(default_factory=list)
    writes: list[tuple[_Memory, int, Array, Array, Array]] = field(default_factory=list)
    """Memory, bytes of an element, addresses, the epoch of each, and True where the value changes."""
    before: list[tuple[Array, Array]] = field(default_factory=list)
    """Addresses, and the bits that were overwritten there."""


@dataclass
class _Memory:
    name: str
    tensor: Tensor
    start: int
    stop: int
    log: list[_Read] = field(default_factory=list)
    """Reads while nothing was written."""
    logged: int = 0
    shadows: dict[int, _Shadow] = field(default_factory=dict)
    """The last users of each element, by bytes of an element. Accesses of different widths are not compared."""

    def shadow(self, size: int) -> _Shadow:
        if size not in self.shadows:
            self.shadows[size] = _Shadow((self.stop - self.start) // size + 1)
        return self.shadows[size]


@dataclass
class Used:
    """Addresses that a launch used. It keeps no memory of the program alive."""

    kernel: str
    memories: tuple[tuple[int, int, Mapping[int, _Shadow], Sequence[_Read]], ...]
    """First address, the address after the last, the users of each element by its bytes, and logged reads."""
    earlier: Used | None
    """Addresses of the launch before, if that may still run when the next one begins: no program has waited for it
    before it let the next one begin."""

    def up_to(self, kernels: int) -> Used | None:
        """Return the addresses of this launch and of earlier ones, of that many kernels at most."""
        if not kernels:
            return None
        earlier = None if self.earlier is None else self.earlier.up_to(kernels - 1)
        return Used(self.kernel, self.memories, earlier)

    def wrote(self, addresses: Array, size: int) -> bool:
        """True if a part of one of these elements was written."""
        return any(
            (shadow.writer[places] != 0).any() or (shadow.adder[places] != 0).any()
            for shadow, places in self._places(addresses, size)
        )

    def read(self, addresses: Array, size: int) -> bool:
        """True if a part of one of these elements was read."""
        if any((shadow.reader[places] != 0).any() for shadow, places in self._places(addresses, size)):
            return True
        first, end = int(addresses.min()), int(addresses.max()) + size
        for start, stop, _, log in self.memories:
            if first >= stop or end <= start:
                continue
            for read in log:
                if np.isin(_pieces(read.elements()[0], read.size, 1), _pieces(addresses, size, 1)).any():
                    return True
        return False

    def _places(self, addresses: Array, size: int) -> Iterator[tuple[_Shadow, Array]]:
        for start, stop, shadows, _ in self.memories:
            inside = addresses[(addresses >= start) & (addresses < stop)] - start
            if inside.size:
                for width, shadow in shadows.items():
                    yield shadow, _pieces(inside, size, width) // width


def _pieces(addresses: Array, size: int, width: int) -> Array:
    """Addresses of the parts of ``width`` bytes of each element; the elements if they are not larger."""
    if size <= width:
        return addresses
    found: Array = (addresses[:, None] + np.arange(0, size, width)).reshape(-1)
    return found


class Races:
    """The detector for one launch. Raises ``RaceError`` for every certain race."""

    def __init__(self, kernel: str, given: Mapping[str, Tensor], before: Used | None = None, warps: int = 4) -> None:
        """``before``: memory that the previous kernel uses, if this kernel may begin before that one has ended."""
        self.kernel = kernel
        self._lanes = Lanes() if warps > 1 else None
        self.waited = False
        """True if the program has waited for the kernel before."""
        self.has_let_next_begin = False
        """True if the program has let the next kernel begin."""
        self._before_wait = before
        found: dict[int, _Memory] = {}
        for name, tensor in given.items():
            storage = tensor.untyped_storage()
            start = storage.data_ptr()
            found.setdefault(start, _Memory(name, tensor, start, start + storage.nbytes()))
        self._memories = list(found.values())
        used = tuple((each.start, each.stop, each.shadows, each.log) for each in self._memories)
        self.used = Used(kernel, used, None if before is None else before.up_to(_MOST_KERNELS))
        # By address: a graph passes tensors of other storages that have the same memory.
        self._scratch = [
            (start, stop)
            for key, spans in session.require().scratch.items()
            if key in DEVICE.entries  # what is gone may not be asked for its use count
            for start, stop in spans
            if any(start < each.stop and each.start < stop for each in self._memories)
        ]
        self._programs: list[tuple[int, ...]] = [()]
        """Program of each epoch."""
        self._before: list[tuple[int, ...]] = [()]
        """Epochs that end before each begins."""
        self._released: dict[int, int] = {}
        """Epoch that an atomic operation published, by address."""
        self._known: tuple[int, set[int]] = (0, set())
        self._first = self._epoch = 0
        self._together: _Together | None = None
        self.begin((0, 0, 0))

    @property
    def may_run_together(self) -> bool:
        """True if several programs may run at once: no earlier kernel may still run."""
        return self._before_wait is None

    def begin_together(self, programs: Sequence[tuple[int, ...]]) -> None:
        """Several programs start, and run at once."""
        first = len(self._before)
        self._programs += programs
        self._before += [()] * len(programs)
        self._together = _Together(first, np.arange(first, first + len(programs), dtype=np.int32))

    def lanes_together(self) -> Lanes | None:
        """Accesses of the threads of programs that run at once, none yet."""
        return None if self._lanes is None else Lanes(together=True)

    def go_on_together(self, rows: Array, lanes: Lanes | None) -> None:
        """Let some of the programs go on, whose threads have made the accesses ``lanes``."""
        assert self._together is not None
        self._together.epochs, self._lanes = (self._together.first + rows).astype(np.int32), lanes

    def end_together(self) -> None:
        """The programs have ended. Raises RuntimeError if one may have used what another one, or an earlier one, uses,
        and one of the two writes: nothing is entered then."""
        together = self._together
        assert together is not None
        changed: list[tuple[Array, Array, Array]] = []

        def put(table: Array, places: Array, values: Array) -> None:
            changed.append((table, places, table[places]))
            table[places] = values

        try:
            entered = [self._entered(memory, size, addresses) for memory, size, addresses, *_ in together.writes]
            sizes = {id(memory): size for memory, size, *_ in together.writes}
            for (memory, size, _, epochs, differs), (shadow, places) in zip(together.writes, entered, strict=True):
                writer = shadow.writer[places]
                earlier = (writer != 0) & (np.abs(writer) < together.first)
                _together_only_if(sizes[id(memory)] == size and not earlier.any())
                _together_only_if(not (shadow.reader[places].any() or shadow.adder[places].any()))
                put(shadow.writer, places, np.where(differs | (writer > 0), epochs, -epochs))
            for (_, _, _, epochs, _), (shadow, places) in zip(together.writes, entered, strict=True):
                _together_only_if(bool((np.abs(shadow.writer[places]) == epochs).all()))
            for memory, read in together.reads:
                if not memory.shadows:
                    continue
                addresses, epochs = read.elements()
                shadow, places = self._entered(memory, read.size, addresses)
                writer = shadow.writer[places]
                _together_only_if(sizes.get(id(memory), read.size) == read.size and not shadow.adder[places].any())
                _together_only_if(bool(((writer <= 0) | (writer == epochs)).all()))
                put(shadow.earlier_reader, places, shadow.reader[places])
                put(shadow.reader, places, epochs)
        except RuntimeError:
            for table, places, values in reversed(changed):
                table[places] = values
            raise
        for memory, read in together.reads:
            if not memory.shadows:
                memory.log.append(read)
                memory.logged += sum(part.nbytes for part in read.parts)

    def _entered(self, memory: _Memory, size: int, addresses: Array) -> tuple[_Shadow, Array]:
        """The shadow of a memory, and the places there."""
        self._enter_log(memory)
        places = self._places(memory, addresses, size)
        _together_only_if(places is not None and self._kept(addresses) is None)
        assert places is not None
        return memory.shadow(size), places

    def leave_together(self, undo: bool) -> None:
        """Programs no longer run at once. ``undo``: what they stored is taken back."""
        together, self._together = self._together, None
        if self._lanes is not None:
            self._lanes = Lanes()
        if undo and together is not None:
            for addresses, bits in reversed(together.before):
                all_memory(bits.dtype)[places_of((addresses,), bits.itemsize)] = bits
            del self._programs[together.first :], self._before[together.first :]
            self._known = (0, set())

    def threads_meet(self) -> None:
        """The threads of the program wait for each other."""
        if self._lanes is not None:
            self._lanes.meet()

    def begin(self, program: tuple[int, ...]) -> None:
        """Another program starts."""
        self.threads_meet()
        self._program, self.waited, self.has_let_next_begin = program, False, False
        self._first = self._epoch = self._new_epoch()

    def _new_epoch(self, *before: int) -> int:
        self._programs.append(self._program)
        self._before.append(before)
        return len(self._before) - 1

    def read(
        self, parts: Sequence[Array], size: int, first: int, end: int, *, orders: bool = False, block: Block | None
    ) -> None:
        """Note a load from all sums of one element of each of ``parts``. ``orders``: the load is volatile, like one
        that waits for a flag. ``block``: the elements that load, if they are known.
        """
        memory = self._memory(first, end)
        if memory is None:
            return
        if block is not None and not orders and self._lanes is not None:
            found = self._lanes.load(memory.start, block, size, first, end)
            if found is not None:
                self._refuse_lanes(memory, size, found, "load", "stores to")
        if self._together is not None:
            if orders or block is None:
                raise RuntimeError("a load that is not made by several programs at once")
            self._together.reads.append((memory, _Read(parts, size, self._together.epochs, *block[1:])))
            return
        if self._before_wait is not None and not self.waited:
            self._check_wait(memory, _addresses(parts), size, "load")
        if orders:
            self._wait(memory, _addresses(parts), size)
        elif memory.shadows or memory.logged > _MOST_LOGGED:
            self._enter_log(memory)
            self._enter_read(memory, _addresses(parts), size, self._epoch)
        else:
            memory.log.append(_Read(parts, size, self._epoch))
            memory.logged += sum(part.nbytes for part in parts)

    def write(self, addresses: Array, size: int, first: int, end: int, differs: Array, block: Block | None) -> None:
        """Note a store. ``differs``: True where the new value differs from the present one. ``block``: the elements
        that store, if they are known."""
        memory = self._memory(first, end)
        if memory is not None and block is not None and self._lanes is not None:
            found = self._lanes.store(memory.start, block, size, first, end, differs)
            if found is not None:
                self._refuse_lanes(memory, size, found[0], "store", found[1])
        addresses, differs = addresses.reshape(-1), differs.reshape(-1)
        if self._together is not None:
            before = contents(addresses, size)
            if memory is None or block is None or before is None:
                raise RuntimeError("a store that is not made by several programs at once")
            epochs = _of_each(self._together.epochs, *block[1:]).reshape(-1)
            self._together.writes.append((memory, size, addresses, epochs, differs))
            self._together.before.append((addresses, before))
            return
        places = None if memory is None else self._places(memory, addresses, size)
        if memory is None or places is None:
            return
        if self._before_wait is not None and not self.waited:
            self._check_wait(memory, addresses, size, "store")
        self._enter_log(memory)
        shadow, now = memory.shadow(size), self._epoch
        kept = self._kept(addresses)
        if kept is not None:
            places, differs = places[kept], differs[kept]
        writer, adder = shadow.writer[places], shadow.adder[places]
        self._check(memory, size, places, np.where(differs, np.abs(writer), 0), "store", "stored to")
        self._check(memory, size, places, np.where(differs | (adder > 0), np.abs(adder), 0), "store", "added to")
        self._check_readers(memory, size, places, differs, "store")
        shadow.writer[places] = np.where(differs | (writer > 0), now, -now)

    def add(self, addresses: Array, size: int, differs: Array, releases: bool) -> Callable[[], None] | None:
        """Note an atomic operation, after it was done. ``differs``: True where the value has changed. The result, if
        there is one, orders the program after those whose atomic operation it observed. A program that does not read
        the result of its atomic operation is not ordered: on a device the other may come later.
        """
        addresses = addresses.reshape(-1)
        if not addresses.size:
            return None
        memory = self._memory(int(addresses.min()), int(addresses.max()) + size)
        places = None if memory is None else self._places(memory, addresses, size)
        if memory is not None and places is not None:
            if self._before_wait is not None and not self.waited:
                self._check_wait(memory, addresses, size, "atomic operation")
            self._enter_log(memory)
            shadow, now = memory.shadow(size), self._epoch
            writer, adder = shadow.writer[places], shadow.adder[places]
            self._check(memory, size, places, np.abs(writer), "atomic operation", "stored to")
            self._check_readers(memory, size, places, differs, "atomic operation")
            shadow.adder[places] = np.where(differs | (adder > 0), now, -now)
        if addresses.size > _MOST_LOCKS:
            return None
        seen = [self._released[address] for address in addresses.tolist() if address in self._released]
        if releases:
            ended = self._epoch
            for address in addresses.tolist():
                earlier = self._released.get(address)
                self._released[address] = self._new_epoch(ended, *([] if earlier is None else [earlier]))
            self._epoch = self._new_epoch(ended)
        return functools.partial(self._acquire, seen) if seen else None

    def _acquire(self, seen: Sequence[int]) -> None:
        self._epoch = self._new_epoch(self._epoch, *seen)

    def _wait(self, memory: _Memory, addresses: Array, size: int) -> None:
        """Note a volatile load, which is ordered after the program that wrote the value."""
        places = self._places(memory, addresses, size)
        seen = [self._released[address] for address in addresses.tolist() if address in self._released]
        if places is not None and size in memory.shadows:
            shadow = memory.shadows[size]
            found = np.unique(np.abs(np.concatenate([shadow.writer[places], shadow.adder[places]])))
            seen += [int(epoch) for epoch in found if epoch]
        self._acquire(seen)

    def _memory(self, first: int, end: int) -> _Memory | None:
        for memory in self._memories:
            if memory.start <= first and end <= memory.stop:
                return memory
        return None

    def _places(self, memory: _Memory, addresses: Array, size: int) -> Array | None:
        """Elements of the shadow. None for addresses that are not multiples of ``size``, and for a tensor of many
        gigabytes whose shadow does not fit into this machine.
        """
        offsets: Array = addresses - memory.start
        if size > 1 and int(np.bitwise_or.reduce(offsets)) & (size - 1):
            return None
        try:
            memory.shadow(size)
        except MemoryError:
            return None
        return offsets // size

    def _kept(self, addresses: Array) -> Array | None:
        """True for addresses outside of memory that was declared to be scratch; None if all are."""
        kept = None
        for start, stop in self._scratch:
            inside = (addresses >= start) & (addresses < stop)
            if inside.any():
                kept = ~inside if kept is None else kept & ~inside
        return kept

    def _enter_log(self, memory: _Memory) -> None:
        log = memory.log.copy()
        memory.log.clear()  # the same list: the next launch may look at it
        memory.logged = 0
        for read in log:
            addresses, epochs = read.elements()
            if read.shape is None:
                self._enter_read(memory, addresses, read.size, epochs)
            else:
                self._enter_reads(memory, addresses, read.size, epochs)

    def _enter_reads(self, memory: _Memory, addresses: Array, size: int, epochs: Array) -> None:
        """Enter a load of several programs that ran at once."""
        places = self._places(memory, addresses, size)
        if places is not None:
            shadow = memory.shadow(size)
            shadow.earlier_reader[places] = shadow.reader[places]
            shadow.reader[places] = epochs

    def _enter_read(self, memory: _Memory, addresses: Array, size: int, epoch: int) -> None:
        places = self._places(memory, addresses, size)
        if places is None:
            return
        kept = self._kept(addresses)
        if kept is not None:
            places = places[kept]
        shadow = memory.shadow(size)
        self._check(memory, size, places, np.maximum(shadow.writer[places], 0), "load", "stored to")
        self._check(memory, size, places, np.maximum(shadow.adder[places], 0), "load", "added to")
        reader = shadow.reader[places]
        of_another = reader < (self._first if epoch >= self._first else self._first_of(epoch))
        shadow.earlier_reader[places[of_another]] = reader[of_another]
        shadow.reader[places] = epoch

    def _first_of(self, epoch: int) -> int:
        """The first epoch of the program of ``epoch``."""
        while self._programs[epoch - 1] == self._programs[epoch]:
            epoch -= 1
        return epoch

    def _check_readers(self, memory: _Memory, size: int, places: Array, differs: Array, does: str) -> None:
        shadow = memory.shadow(size)
        reader = shadow.reader[places]
        reader = np.where(reader >= self._first, shadow.earlier_reader[places], reader)
        self._check(memory, size, places, np.where(differs, reader, 0), does, "loaded from")

    def _check(self, memory: _Memory, size: int, places: Array, epochs: Array, does: str, did: str) -> None:
        """Raise for the first element whose epoch belongs to another program and is not before the present one."""
        foreign = (epochs > 0) & (epochs < self._first)
        if not foreign.any():
            return
        wrong = [int(epoch) for epoch in np.unique(epochs[foreign]) if epoch not in self._all_before()]
        if not wrong:
            return
        index = int(np.flatnonzero(epochs == wrong[0])[0])
        raise RaceError(
            f"{_with_article(does)} of triton kernel {self.kernel}",
            author_site(),
            f"program {self._program} uses {self._element(memory, size, int(places[index]))}, which program "
            f"{self._programs[wrong[0]]} of the same launch {did}; nothing orders the two, so either may "
            "come first on a device",
            "give each program its own memory, launch a second kernel, or let an atomic operation with acquire and "
            "release semantics order them (a ticket that the last program sees, a lock)",
        )

    def _refuse_lanes(self, memory: _Memory, size: int, address: int, does: str, did: str) -> None:
        """Raise for an address that two threads of the program use, unless it was declared to be scratch."""
        kept = self._kept(np.array([address]))
        if kept is not None and not kept[0]:
            return
        raise RaceError(
            f"a {does} of triton kernel {self.kernel}",
            author_site(),
            f"program {self._program} uses {self._element(memory, size, (address - memory.start) // size)}, which "
            f"another element of its blocks {did} with no barrier between; the two may be in different warps, which "
            "run at once, so either may come first on a device",
            "call tl.debug_barrier() between the two, let one element of blocks of one shape use the location both "
            "times, or launch with num_warps=1",
        )

    def waits(self) -> None:
        """The program waits for the kernel before. If it does so first, the next kernel begins after that one."""
        self.waited = True
        if not self.has_let_next_begin:
            self.used.earlier = None

    def _check_wait(self, memory: _Memory, addresses: Array, size: int, does: str) -> None:
        """Raise for memory of a kernel that may still run, because the program has not waited for it."""
        before = self._before_wait
        kept = self._kept(addresses)
        addresses = addresses if kept is None else addresses[kept]
        if not addresses.size:
            return
        while before is not None:
            wrote = before.wrote(addresses, size)
            if wrote or (does != "load" and before.read(addresses, size)):
                raise RaceError(
                    f"{_with_article(does)} of triton kernel {self.kernel}",
                    author_site(),
                    f"program {self._program} uses memory of {memory.name} that triton kernel {before.kernel}, "
                    f"launched before, {'writes' if wrote else 'reads'}; launch_pdl=True lets this kernel begin before "
                    "that one has ended",
                    "call tl.extra.cuda.gdc_wait() before the first access to what an earlier kernel "
                    + ("writes" if wrote else "reads or writes"),
                )
            before = before.earlier

    def _all_before(self) -> set[int]:
        """Epochs that end before the present one begins."""
        if self._known[0] != self._epoch:
            found: set[int] = set()
            open_ones = [self._epoch]
            while open_ones:
                for epoch in self._before[open_ones.pop()]:
                    if epoch not in found:
                        found.add(epoch)
                        open_ones.append(epoch)
            self._known = (self._epoch, found)
        return self._known[1]

    def _element(self, memory: _Memory, size: int, place: int) -> str:
        tensor = memory.tensor
        shape, dtype = ", ".join(map(str, tensor.shape)), str(tensor.dtype).removeprefix("torch.")
        offset = memory.start + place * size - tensor.data_ptr()
        return f"byte {offset} of {memory.name}, {dtype} [{shape}]"


def _together_only_if(may_be: bool) -> None:
    """Raise RuntimeError if programs have to run one after another."""
    if not may_be:
        raise RuntimeError("programs that use what others write")


def _with_article(does: str) -> str:
    return f"an {does}" if does.startswith("a") else f"a {does}"


def _addresses(parts: Sequence[Array]) -> Array:
    return np.asarray(functools.reduce(np.add, parts)).reshape(-1)

"""``Family``: everything that defines a family of layers. Modes, graphs, poison, isolation and reports do not depend on
it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from ..cases.case import Case
from ..cases.fields import Changes, Fields
from ..contract import AttentionLayer, BackendContext
from ..steps.data import StepData
from ..steps.greedy_loop import Vocabulary
from ..steps.schedule import Schedule, Step

_Ints = npt.NDArray[np.int64]
_Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Answer:
    """Expected outputs of the layers of a step. Float64, host; L layers, T live rows, Hq heads, Dv values a head."""

    out: torch.Tensor
    """[L, T, Hq, Dv]."""
    limit: torch.Tensor
    """[L, T, Hq, Dv]: the largest allowed error of each element."""
    lse: torch.Tensor | None = None
    """[L, T, P, Hq]: natural log-sum-exp of each KV split, in cases that have any."""
    lse_limit: torch.Tensor | None = None
    """[L, T, P, Hq]."""
    key_sum: torch.Tensor | None = None
    """[L, T, Hq]: with codes as data, the sum of a row's weights if each key has the weight 1. None in a family without
    such weights."""
    key_factor: torch.Tensor | None = None
    """[L, T, Hq]: the relative error that all weights of a row may share; NaN if its keys cannot be counted."""


@dataclass(frozen=True, eq=False)
class Stored:
    """Expected contents of memory after a step, where the step writes."""

    slots: torch.Tensor
    """[n] int64, ascending."""
    rows: torch.Tensor
    """[L, rows of a slot, n, Hk, D] in the dtype of the memory."""
    limit: torch.Tensor | None = None
    """Float64, of the shape of ``rows``: the largest allowed error of each element. None: memory holds copies and is
    compared bit for bit."""


class Watch(Protocol):
    """Fills memory before a step, and finds out which slots of it changed. ``watches/pool_watch.py`` has the shapes."""

    @property
    def bits(self) -> torch.dtype:
        """Integers of an element's bits."""

    def fill(
        self, name: tuple[Schedule, Step, str | None], held: Callable[[], tuple[_Ints, _Bytes]], unowned: float
    ) -> None:
        """Fill some slots with rows, and all other memory with ``unowned``."""

    def clear(self) -> None:
        """Prepare memory as in a server at capture."""

    def clear_page_0(self) -> None:
        """Fill page 0 with zeros."""

    def written_since_clear(self) -> _Ints:
        """Slots outside page 0 that were written since ``clear``, [n] ascending."""

    def look(self, slots: int, due: torch.Tensor, count: int) -> tuple[tuple[torch.Tensor, int], ...]:
        """Compare on the device, without a wait."""

    def written(self, due: _Ints, found: Sequence[_Bytes]) -> tuple[_Ints, _Bytes, tuple[int, ...]]:
        """Slots that changed, and their contents."""

    def outside(self, found: Sequence[_Bytes]) -> _Ints:
        """Bytes that changed and belong to no slot."""


class Question(StrEnum):
    """Question about a wrong row, which diagnosis answers by running the step again with other data."""

    ATTENDED_KEYS = "attended keys"
    """Keys that had weight in the row."""
    MISROUTED_ROWS = "misrouted rows"
    """Request and row whose result it is."""
    NAMED_PATTERNS = "named patterns"
    """Patterns in ``diagnosis/hints`` that fit the answers of the two questions above."""


@dataclass(frozen=True, eq=False)
class Supposition:
    """The answer of a backend that makes one mistake."""

    text: str
    """The mistake in words. Diagnosis prints it if every wrong row is right for ``answer``."""
    answer: Answer


class Image(Protocol):
    """Makes an image of all memory before a step or after it."""

    def __call__(
        self,
        schedule: Schedule,
        step: Step,
        data: StepData,
        finite_tails: bool,
        *,
        after: bool,
        unowned: float = ...,
        marked: str = ...,
    ) -> torch.Tensor:
        """[L, rows of a slot, slots, Hk, D] in the dtype of the memory. ``steps/data.py:pool_image`` has the rest."""


class Held(Protocol):
    """Returns the memory contents of live requests before or after a step."""

    def __call__(
        self, schedule: Schedule, step: Step, data: StepData, *, after: bool, unowned: float = ...
    ) -> tuple[_Ints, _Bytes]:
        """Slots [n], and the bytes of their rows. ``unowned``: contents of rows that must not be read: NaN, or a number
        to find out where a NaN came from."""


def _new_slots(data: StepData) -> _Ints:
    slots: _Ints = data.out_cache_loc.numpy()
    return slots


Noted = tuple[torch.dtype, tuple[int, ...], _Bytes]
"""Dtype, shape and bytes of a host tensor."""


def _nothing_noted(watch: Watch) -> None:
    """Nothing."""


def _nothing_more(watch: Watch, found: Sequence[_Bytes]) -> Mapping[str, Noted]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory that outlives a step: its contents before a step, its watch, and its contents after a step."""

    watch: Callable[[BackendContext, Schedule], Watch]
    """(context of an instance, its first schedule) -> a watch."""
    held: Held
    image: Image
    stored: Callable[[StepData], Stored]
    """Data of a step -> the contents of memory after it, and their limits."""
    due: Callable[[StepData], _Ints] = _new_slots
    """Data of a step -> slots that it writes, [n]."""
    carry: Callable[[Watch, torch.Tensor, tuple[Schedule, Step, str | None]], None] | None = None
    """(watch, slots that the step before wrote, [n] on the device, name of the next as ``Watch.fill`` gets it): use the
    memory after that step as the memory before the next (``Step.follows``). None: it is filled before each step."""
    before_commit: Callable[[Watch], None] = _nothing_noted
    """Note the changes of a verify, right before its commit."""
    noted: Callable[[Watch, Sequence[_Bytes]], Mapping[str, Noted]] = _nothing_more
    """(watch, results of its ``look``): name -> further data that checks of the family read, in addition to slots and
    rows."""


@dataclass(frozen=True, kw_only=True)
class Texts:
    """The data of texts, for greedy-equivalence loops: the values of a token follow from its id."""

    vocabulary: Callable[[Case], Vocabulary]
    """Case -> the values of every token id."""
    data: Callable[[Schedule, Sequence[Sequence[int]]], StepData]
    """(schedule, tokens of each text) -> input of the oracle for plain decode, a row for each token."""


def _unchanged(step: Step) -> Step:
    return step


def _nothing_supposed(schedule: Schedule, data: StepData) -> Iterator[Supposition]:
    yield from ()


def _nothing_supposed_of_slots(schedule: Schedule, data: StepData, step: Step) -> Iterator[Supposition]:
    yield from ()


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Layers of a family in a case of another family, such as the softmax layers of a hybrid model."""

    features: frozenset[str]
    """Names of the features that mean something because of these layers."""
    changes: Callable[[Fields], Changes]
    """Case -> the changes that make it a case of these layers."""
    poisoned: str
    """``Family.poisoned``, in words that name the memory of these layers."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of layers.

    ``layers``, ``data`` and ``memory`` run in the worker, too; ``answer`` and ``supposed`` only in the judge. A worker
    cannot call the functions of the modules in which these two are defined (``running/hygiene/oracle_sealed.py``).
    """

    name: str
    """Name, which a ``HeadLayout`` refers to."""
    features: frozenset[str]
    """Names of the features of cases that apply (``cases/features``). In all other features a case has the
    default."""
    layers: Callable[[Fields], tuple[AttentionLayer, ...]]
    """Case -> the layers of the test model. They differ in every property in which layers of the family may differ."""
    data: Callable[[Schedule, Step, str | None], StepData]
    """(schedule, step, data pattern other than the case's) -> the data that the model looks up and that memory
    holds."""
    memory: Memory
    """The memory that outlives a step."""
    answer: Callable[[Schedule, StepData, bool], Answer]
    """(schedule, data, True if new rows are attended to as given): outputs and their limits."""
    texts: Texts | None = None
    """Numbers of texts; None: the family has no greedy-equivalence loop."""
    questions: frozenset[Question] = frozenset()
    """Questions that diagnosis may ask. It asks no other."""
    supposed: Callable[[Schedule, StepData], Iterator[Supposition]] = _nothing_supposed
    """(schedule, data): results of backends with usual mistakes, the likeliest first."""
    supposed_of_slots: Callable[[Schedule, StepData, Step], Iterator[Supposition]] = _nothing_supposed_of_slots
    """(schedule, data, step): the same for mistakes that read slots of others, over memory whose unowned slots hold
    zeros. The limit of a row with an unknown answer is infinite. The answer of a row without a key is NaN."""
    poisoned: str = "unowned slots"
    """Memory that holds NaN and must not be read, in the plural: for the text of a failure."""
    reads: str = "reads-own-kv"
    """Id of the check that fails if such memory is read."""
    unread: str = ""
    """Keys of a step's own requests that hold NaN and must not be read, in the plural; empty: there are none."""
    with_unread_finite: Callable[[Step], Step] = _unchanged
    """Step -> the same step with numbers in those keys instead of NaN."""
    beside: Beside | None = None
    """None: its layers are in no case of another family."""
    counts_keys: bool = False
    """True if data of codes count keys: ``answer`` has ``key_sum`` for them."""

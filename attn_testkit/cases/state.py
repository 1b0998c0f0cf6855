"""``StateShape``: sizes and conventions of the recurrent states of a case."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, replace

from ..contract import ForwardMode
from ..contract.state import ROLLBACKS, ROUNDINGS, SLOTS_IN_DECODE, SLOTS_MOVED

UNIT_KEYS = "unit_keys"
"""Pattern of exact data, in which each token can be found in the state."""
EXACT_GATES = "exact_gates"
"""Pattern of exact data in which each head has one row whose decay is 0 or 1/2, and all other decays are 1."""
NEAR_EPSILON = "near_epsilon"
"""Pattern of queries and keys that are as short as the square root of the epsilon of their norm."""
FAIR_ROUNDING = "fair_rounding"
"""Pattern for states that are rounded stochastically: the exact state is known to within a small part of a unit."""
EXACT_DATA = (UNIT_KEYS, EXACT_GATES)
"""Patterns in which columns of a state are values of tokens."""
PASSED_ON = (*EXACT_DATA, FAIR_ROUNDING)
"""Patterns in which a convolution passes its last input on, without an activation."""
STATE_DATA = (
    "mild_decay",
    "weak_decay",
    "no_decay",
    "strong_decay",
    "like_keys",
    UNIT_KEYS,
    EXACT_GATES,
    NEAR_EPSILON,
    FAIR_ROUNDING,
)
"""Data patterns of states (``families/recurrent/data.py``)."""

MORE_COLUMNS = (1, 2, 5)
"""Values of ``StateShape.more_columns``."""
PATTERN = r"k(\d+)w(\d+)s(32|b16|16)((?:\.[a-z_]+0?)*)(?:\.snap(\d+))?"
"""The word of a state in a case id."""
_DTYPES = {"32": "fp32", "b16": "bf16", "16": "fp16"}
_WORDS = {
    "null": ("padding", "skip_zero"), "slot0": ("padding", "write_zero"), "zeroed": ("fresh", "zeroed"),
    "copied": ("continues", "copy"), "source": ("continues", "source"),
    "tapsfirst": ("conv_windows", "taps_first"), "newestlast": ("conv_windows", "newest_last"),
    "kv": ("order", "kv"), "slots": ("rollback", "slots"),
    SLOTS_IN_DECODE: ("rollback", SLOTS_IN_DECODE), SLOTS_MOVED: ("rollback", SLOTS_MOVED),
    "strided": ("strided", True), "bigpool": ("big", True),
    "stochastic": ("rounding", "stochastic"),
}  # fmt: skip
"""Word after the sizes -> field and value. Other values are defaults, and not written."""


@dataclass(frozen=True)
class StateShape:
    """States of a case; ``contract/state.py`` has the meaning of the conventions."""

    k_dim: int
    """K: width of a key; 0 if layers compute nothing but a convolution."""
    conv_width: int
    """W: taps of the convolution; 1: none."""
    dtype: str = "fp32"
    """Dtype of the recurrent state."""
    padding: str = "skip_minus_one"
    fresh: str = "flag"
    order: str = "vk"
    strided: bool = False
    rollback: str = "commit"
    snapshots: int = 0
    """Length of a chunk at whose ends states are copied; 0: never."""
    continues: str = ""
    """Way in which requests continue states of a prefix cache: ``copy``, ``source``, or empty if none does."""
    conv_windows: str = "exact"
    big: bool = False
    """The pool has so many slots that the place of an element needs more than 31 bits; requests have slots at both
    ends."""
    rounding: str = "nearest"
    """Rounding of a state that a decode stores."""

    def __str__(self) -> str:
        dtype = next(word for word, name in _DTYPES.items() if name == self.dtype)
        words = [word for word, (name, value) in _WORDS.items() if getattr(self, name) == value]
        words += [f"snap{self.snapshots}"] * bool(self.snapshots)
        return ".".join([f"k{self.k_dim}w{self.conv_width}s{dtype}", *words])

    def window_columns(self, nodes: int) -> int:
        """Columns of a window in memory. ``nodes``: N of a draft, 1 without one."""
        if self.conv_width == 1:
            return 0
        return self.conv_width - 1 + (nodes - 1 if self.by_slots else 0)

    @property
    def recurs(self) -> bool:
        """True if a slot has a state, and not only a window."""
        return self.k_dim > 0

    @property
    def has_longer_windows(self) -> bool:
        """True if windows have more columns than taps read, outside of drafts."""
        return self.conv_windows != "exact"

    @property
    def more_columns(self) -> int:
        """Columns of a window beyond W - 1 and those of drafts. All modes and families of an instance have one pool, so
        the number follows from what is alike in them."""
        if not self.has_longer_windows:
            return 0
        alike = f"{self.fresh}{self.padding}{self.strided}{self.conv_windows}{self.k_dim}{self.conv_width}"
        return MORE_COLUMNS[zlib.crc32(alike.encode()) % len(MORE_COLUMNS)]

    @property
    def by_slots(self) -> bool:
        """True if each node of a draft has a slot for its state."""
        return self.rollback != ROLLBACKS[0]

    @property
    def commits(self) -> bool:
        """True if a call follows a target-verify, which makes the state after the last accepted node the slot's."""
        return self.rollback in (ROLLBACKS[0], SLOTS_MOVED)

    def in_mode(self, mode: ForwardMode) -> StateShape:
        """The shape in another mode of the instance: most modes take nothing back, so they name no way of it."""
        keeps = mode is ForwardMode.DECODE and self.rollback == SLOTS_IN_DECODE
        rounding = self.rounding if mode is ForwardMode.DECODE else ROUNDINGS[0]
        return replace(self, rollback=self.rollback if keeps else ROLLBACKS[0], rounding=rounding)

    @property
    def padded_index(self) -> int:
        """Index of a padded request."""
        return -1 if self.padding == "skip_minus_one" else 0

    @classmethod
    def read(cls, match: re.Match[str]) -> StateShape:
        """The shape of a match of ``PATTERN``. Raises ``ValueError`` for an unknown word."""
        words = [word for word in match[4].split(".") if word]
        unknown = [word for word in words if word not in _WORDS]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is not a convention of states; there are: {', '.join(_WORDS)}")
        conventions = dict(_WORDS[word] for word in words)
        snapshots = int(match[5] or 0)
        return cls(int(match[1]), int(match[2]), _DTYPES[match[3]], **conventions, snapshots=snapshots)  # type: ignore[arg-type]

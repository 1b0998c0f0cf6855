"""Random generators of the whole process, and the changes that are allowed. A backend may draw from them: a server's
sampling then continues from another state and is as random. A backend must not seed or reset them: numbers would
repeat, and ranks that must draw the same numbers would no longer agree.

torch, numpy and Python all keep a Mersenne twister: 624 words, and the number of words that are drawn. The state after
624 draws follows from the words, so a state that came from draws can be distinguished from one that was set.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import _disable_current_modes

_WORDS = 624
MOST_DRAWN = 4096 * _WORDS
"""Number of 32-bit draws that are searched; a state further on counts as unknown. The search takes 0.2 s if a state
changed."""


class _Twister(NamedTuple):
    words: npt.NDArray[np.uint32]
    drawn: int
    """Number of words that are drawn, 1 to 624."""


def torch_random() -> bytes:
    """torch's own generator, of the CPU."""
    # A module may be imported while torch.compile traces, under a mode that takes every tensor for a fake one.
    with _disable_current_modes():
        return bytes(torch.get_rng_state().numpy())


def set_torch_random(before: bytes) -> None:
    """Put torch's own generator back."""
    torch.set_rng_state(torch.frombuffer(bytearray(before), dtype=torch.uint8))


def numpy_random() -> bytes:
    """The state that ``numpy.random``'s functions draw from."""
    # A tenth of a microsecond where asking for the state takes seventy.
    generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    return ctypes.string_at(generator.ctypes.state_address, 4 * _WORDS + 4)


def set_numpy_random(before: bytes) -> None:
    """Restore the state that ``numpy.random``'s functions draw from."""
    words, drawn = _of_numpy(before)
    np.random.set_state(("MT19937", words, drawn, 0, 0.0))


def python_random() -> tuple[Any, ...]:
    """The state that Python's ``random`` draws from."""
    return random.getstate()


def _of_numpy(state: bytes) -> _Twister:
    values = np.frombuffer(state, np.uint32)
    return _Twister(values[:_WORDS].copy(), int(values[_WORDS]))


def _of_python(state: tuple[Any, ...]) -> _Twister:
    *words, drawn = state[1]
    return _Twister(np.array(words, np.uint32), drawn)


def _of_torch(state: bytes) -> _Twister:
    # Seed (8 bytes), words that are left (4), a flag (4), place of the next (8), the words (8 each).
    left = int.from_bytes(state[8:12], "little")
    return _Twister(np.frombuffer(state, np.uint64, _WORDS, 24).astype(np.uint32), _WORDS + 1 - left)


_KINDS: dict[str, Callable[[Any], _Twister]] = {
    "torch's random state": _of_torch,
    "numpy's random state": _of_numpy,
    "Python's random state": _of_python,
}


def reseeded(name: str, was: Any, now: Any) -> str:
    """A sentence about a state that changed in another way than by draws; empty if it did not."""
    if name == "torch's random state":
        seeds = tuple(int.from_bytes(state[:8], "little") for state in (was, now))
        if seeds[0] != seeds[1]:
            return f"seed {seeds[0]} -> {seeds[1]}"
        # It may have drawn more than can be followed: only what leads back is known to be a change.
        return "set back to where it was before" if _leads_to(_of_torch(now), _of_torch(was)) else ""
    kind = _KINDS[name]
    return "" if _leads_to(kind(was), kind(now)) else "seeded or set"


def _leads_to(start: _Twister, end: _Twister) -> bool:
    """True if at most ``MOST_DRAWN`` draws lead from one state to the other."""
    if np.array_equal(start.words, end.words):
        return start.drawn <= end.drawn
    generator: Any = np.random.MT19937(0)
    generator.state = {"bit_generator": "MT19937", "state": {"key": start.words, "pos": _WORDS}}
    generator.random_raw(1, output=False)
    for _ in range(MOST_DRAWN // _WORDS):
        if np.array_equal(generator.state["state"]["key"], end.words):
            return True
        generator.random_raw(_WORDS, output=False)
    return False

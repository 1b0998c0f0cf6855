"""Drawing random numbers is everybody's right, seeding is not: the two are told apart by the states alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attn_testkit.running.hygiene import random_states
from attn_testkit.running.hygiene.random_states import (
    numpy_random,
    python_random,
    reseeded,
    set_numpy_random,
    set_torch_random,
    torch_random,
)

NAMES = ("torch's random state", "numpy's random state", "Python's random state")
READ: dict[str, Callable[[], Any]] = dict(zip(NAMES, (torch_random, numpy_random, python_random), strict=True))
SEED: dict[str, Callable[[int], Any]] = dict(zip(NAMES, (torch.manual_seed, np.random.seed, random.seed), strict=True))


def draw(name: str, count: int) -> None:
    """Numbers of 32 bits."""
    if name == NAMES[0]:
        torch.empty(count, dtype=torch.int32).random_()
    elif name == NAMES[1]:
        np.random.get_bit_generator().random_raw(count, output=False)
    else:
        for _ in range(count):
            random.getrandbits(32)


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    states = torch_random(), numpy_random(), python_random()
    yield
    set_torch_random(states[0])
    set_numpy_random(states[1])
    random.setstate(states[2])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("already", [0, 5, 700])
@pytest.mark.parametrize("count", [1, 618, 619, 620, 624, 625, 5000])
def test_numbers_that_were_drawn_are_no_change(name: str, already: int, count: int) -> None:
    SEED[name](7)
    draw(name, already)
    was = READ[name]()
    draw(name, count)
    assert READ[name]() != was
    assert reseeded(name, was, READ[name]()) == ""


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_is_a_change_also_where_numbers_follow(name: str) -> None:
    SEED[name](7)
    draw(name, 3)
    was = READ[name]()
    SEED[name](8)
    draw(name, 1000)
    want = "seed 7 -> 8" if name == NAMES[0] else "seeded or set"
    assert reseeded(name, was, READ[name]()) == want


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [1, 700])
def test_a_state_that_was_set_back_is_a_change(name: str, count: int) -> None:
    SEED[name](7)
    draw(name, count)
    was = READ[name]()
    SEED[name](7)
    assert reseeded(name, was, READ[name]())


def test_of_more_draws_than_can_be_followed_torchs_seed_still_says_that_it_was_not_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(random_states, "MOST_DRAWN", 2 * 624)
    for name, want in ((NAMES[0], ""), (NAMES[1], "seeded or set")):
        SEED[name](7)
        was = READ[name]()
        draw(name, 624)
        assert reseeded(name, was, READ[name]()) == ""
        draw(name, 5 * 624)
        assert reseeded(name, was, READ[name]()) == want


def test_numbers_go_on_where_a_state_was_put_back() -> None:
    for name, put_back in ((NAMES[0], set_torch_random), (NAMES[1], set_numpy_random)):
        SEED[name](7)
        draw(name, 700)
        was = READ[name]()
        draw(name, 700)
        put_back(was)
        assert READ[name]() == was


def test_a_state_can_be_read_while_a_compiler_traces() -> None:
    """Inductor traces under such a mode, and what it imports on the way is compared with the process before."""
    before = torch_random()
    with FakeTensorMode():
        assert torch_random() == before

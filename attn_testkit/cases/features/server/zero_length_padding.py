"""Padded requests that have neither rows nor keys."""

from __future__ import annotations

from collections.abc import Iterator

from ....contract import Capabilities
from ...fields import C, Fields
from .variant import ServerVariant

_LENS = (9, 70, 1)


def _fits(declared: Capabilities, case: Fields) -> bool:
    return case.mode in declared.graph and set(declared.server.padded_requests) > {"nothing"}


def _cases(declared: Capabilities, small: C) -> Iterator[C]:
    if _fits(declared, small):
        yield small.of_requests(_LENS, padded=3, data="gauss", variants=frozenset({"zero_length_padding"}))


ZERO_LENGTH_PADDING = ServerVariant(
    "zero_length_padding",
    "padded requests have neither rows nor keys",
    "server.padded_requests",
    _cases,
    _fits,
    says={"padded_requests": "nothing"},
    reaches_kernels=False,
    order=20,
    also=("norows", "zero-length padding"),
)

"""Digests of what a case is made of: its schedule and the data of its steps. They are equal on every machine."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..cases.case import Case
from .data import make_step_data
from .numerics import MODEL
from .schedule import Schedule, make_schedule


def digests_of(case: Case) -> tuple[str, str]:
    """Digests of a case's schedule and of its data, for a backend that multiplies in the model's dtype."""
    schedule = make_schedule(case, MODEL)
    return digest_of_schedule(schedule), digest([make_step_data(schedule, step) for step in schedule.steps])


def digest_of_schedule(schedule: Schedule) -> str:
    """Digest of the fields of a schedule, apart from its case."""
    return digest({f.name: getattr(schedule, f.name) for f in dataclasses.fields(schedule) if f.name != "case"})


def digest(value: Any) -> str:
    """Digest of plain values, arrays, tensors and dataclasses, whose fields count by name where they differ from their
    default: it does not depend on where a class is, nor on new fields that nothing sets.
    """
    hashed = hashlib.blake2b(digest_size=6)
    for part in _parts(value):
        hashed.update(part)
    return hashed.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    if dataclasses.is_dataclass(value):
        named = [(field, getattr(value, field.name)) for field in dataclasses.fields(value)]
        value = {field.name: held for field, held in named if not _is_default(field, held)}
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield f"\n{key}=".encode()
            yield from _parts(value[key])
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield b"\n-"
            yield from _parts(each)
    elif isinstance(value, (set, frozenset)):
        yield from _parts(sorted(digest(each) for each in value))
    elif hasattr(value, "untyped_storage"):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        # A copy: an expanded tensor of one element counts as contiguous, and has no bytes that can be viewed.
        flat = torch.empty(value.numel(), dtype=value.dtype).copy_(value.reshape(-1))
        yield flat.view(torch.uint8).numpy().tobytes()
    elif hasattr(value, "tobytes"):
        yield f"{value.dtype} {value.shape}".encode()
        yield value.tobytes()
    elif isinstance(value, enum.Enum):
        yield repr(value.value).encode()
    else:
        if " at 0x" in repr(value):
            raise TypeError(f"{type(value)} has no value that two processes agree on")
        yield repr(value).encode()


def _is_default(field: dataclasses.Field[Any], held: Any) -> bool:
    plain = held is None or isinstance(held, (bool, int, float, str, tuple))
    return held is field.default or (plain and type(held) is type(field.default) and held == field.default)

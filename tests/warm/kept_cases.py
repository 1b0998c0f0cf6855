"""Cases of a tier that the processes of one pytest session build once for all of them.

Hundreds of tests ask for the cases of the same capabilities, and building them is a tenth of the suite. Each process of
the session keeps what it builds in one folder, and reads there what another one has built. A test that empties the
cache of ``generate`` gets cases that are built anew.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from cachetools import LRUCache


class KeptCases(LRUCache):
    """The cache of ``generate``, of which each entry is a file, too."""

    folder: Path
    reads = True

    def __missing__(self, key: Any) -> Any:
        file = self.folder / digest(key)
        if not self.reads or not file.exists():
            raise KeyError(key)
        self[key] = pickle.loads(file.read_bytes())
        return self[key]

    def __setitem__(self, key: Any, value: Any, **same: Any) -> None:
        file = self.folder / digest(key)
        if self.reads and not file.exists():
            written = file.with_suffix(f".{os.getpid()}")
            written.write_bytes(pickle.dumps(value))
            written.replace(file)  # the other process reads whole files only
        super().__setitem__(key, value, **same)

    def clear(self) -> None:
        self.reads = False
        super().clear()


def digest(key: tuple[Any, ...]) -> str:
    """Name of the file of a key, the same in each process: the order of a set is not."""
    return hashlib.sha256(_said(key).encode()).hexdigest()


def _said(value: Any) -> str:
    if is_dataclass(value):
        found = [f"{each.name}={_said(getattr(value, each.name))}" for each in fields(value)]
    elif isinstance(value, Enum):
        found = [value.name]
    elif isinstance(value, Mapping):
        found = sorted(f"{_said(name)}:{_said(each)}" for name, each in value.items())
    elif isinstance(value, Set):
        found = sorted(map(_said, value))
    elif isinstance(value, tuple):
        found = list(map(_said, value))
    else:
        found = [repr(value)]
        assert " at 0x" not in found[0], f"{found[0]} differs from process to process"
    return f"{type(value).__qualname__}({', '.join(found)})"

"""The files of a backend that a worker really imported: their path and hash, their kernels, and stale byte code."""

from __future__ import annotations

import hashlib
import importlib.util
import marshal
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from ...distributions import is_of_kit
from ...watches.launches import has_kernels

_MOST_NAMED = 4


def own_modules(backend_class: type[Any]) -> list[ModuleType]:
    """The module of a class, and the modules from which its globals come, except those of torch and of the kit."""
    names = [backend_class.__module__]
    module = sys.modules.get(names[0])
    for value in list(vars(module).values()) if module else ():
        of = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if not isinstance(of, str) and hasattr(value, "fn"):
            of = getattr(value.fn, "__module__", None)
        names += [of] if isinstance(of, str) else []
    found = [sys.modules[name] for name in dict.fromkeys(names) if name in sys.modules and _is_own(name, names[0])]
    return [each for each in found if getattr(each, "__file__", None)]


def _is_own(name: str, of: str) -> bool:
    if is_of_kit(name):
        return name == of or name.startswith(("attn_testkit.backends.", "attn_testkit_servers.fakes."))
    top = name.partition(".")[0]
    return top not in sys.stdlib_module_names and top not in ("torch", "triton", "numpy", "builtins")


def tested_file(backend_class: type[Any]) -> Mapping[str, str]:
    """``file`` and ``sha256`` of the class's module, ``kernels``: the Triton kernels that it can reach, and ``code``: a
    hash of all modules that hold them. Empty for a class without a file.
    """
    modules = own_modules(backend_class)
    if not modules or modules[0].__name__ != backend_class.__module__:
        return {}
    path = Path(str(modules[0].__file__))
    kernels = has_kernels(modules)
    code = hashlib.sha256()
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        for module in sorted(modules, key=lambda each: each.__name__):
            code.update(
                f"{module.__name__}\0".encode() + hashlib.sha256(Path(str(module.__file__)).read_bytes()).digest()
            )
        whole = code.hexdigest()
    except OSError:
        digest = whole = ""
    more = len(kernels) - _MOST_NAMED
    listed = ", ".join(kernels[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
    return {"file": str(path), "sha256": digest, "code": whole, "kernels": listed}


def stale_byte_code(backend_class: type[Any]) -> str:
    """The reason why the imported code is not the present source; empty if it is.

    Python trusts byte code whose source has the same size and time, which copies and archives keep, or whose hash it
    does not check.
    """
    return next(filter(None, map(_stale, own_modules(backend_class))), "")


def _stale(module: ModuleType) -> str:
    file = Path(str(module.__file__))
    cached = getattr(module.__spec__, "cached", None)
    if not isinstance(module.__loader__, SourceFileLoader) or not cached or file.suffix != ".py":
        return ""
    try:
        data, source, stat = Path(cached).read_bytes(), file.read_bytes(), file.stat()
    except OSError:
        return ""
    if data[:4] != importlib.util.MAGIC_NUMBER or not _is_trusted(data, int(stat.st_mtime), stat.st_size):
        return ""
    same = _is_made_of(data, source, str(file))
    return "" if same else f"Python runs {cached}, which was made of another text than {file} has now"


def _is_trusted(data: bytes, modified: int, size: int) -> bool:
    """True if Python runs the byte code without reading the source's text."""
    flags = int.from_bytes(data[4:8], "little")
    if flags & 1:
        return not flags & 2
    wanted = (modified & 0xFFFFFFFF, size & 0xFFFFFFFF)
    return (int.from_bytes(data[8:12], "little"), int.from_bytes(data[12:16], "little")) == wanted


@lru_cache(maxsize=32)  # Compiling takes longer than reading, and one process may have many workers of one module.
def _is_made_of(data: bytes, source: bytes, file: str) -> bool:
    try:
        code = marshal.loads(data[16:])
        return isinstance(code, CodeType) and code == compile(source, file, "exec", dont_inherit=True)
    except (ValueError, EOFError, TypeError, SyntaxError):
        return False

"""A worker that imports modules from other files than their own, and notes what each case-run executes.

``run --map`` needs notes about functions. Mutation tests need the rest: a mutant is a backend with one small change,
and no file of its package has that change. Code is compiled under the name of the file that it was read from, so that
Triton, which reads the source of a function, gets the text that runs. A module keeps its original ``__file__``, so that
it finds the files next to it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType, FrameType, ModuleType
from typing import Any

from ...distributions import DISTRIBUTIONS, KIT, SERVERS, folder_of
from ...registry import UsageError


@dataclass(frozen=True)
class OtherSources:
    """Instructions for a worker before it imports its backend."""

    instead: tuple[tuple[str, str], ...] = ()
    """(module, file that holds its text)."""
    located: tuple[str, ...] = ()
    """Modules whose own files are noted, in addition to the module of the class."""
    notes: str = ""
    """Folder in which each worker has a file, with a line of JSON for the import and for each case-run; empty: none."""
    functions: bool = False
    """True if the notes are about functions of all files of the backend's checkout, instead of lines."""
    memory: int = 0
    """Bytes of writable memory that the process may add to its present size; 0: no limit. A mutated number may be the
    size of a tensor."""


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, module: str, path: str, text: str) -> None:
        super().__init__(module, path)
        self._text = text

    def get_code(self, fullname: str) -> CodeType:
        with open(self._text, "rb") as file:
            code: CodeType = self.source_to_code(file.read(), self._text)
        return code


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, instead: Sequence[tuple[str, str]]) -> None:
        self._instead = dict(instead)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._instead:
            return None
        usual = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if usual is None or usual.origin is None:
            return usual
        loader = _Loader(fullname, usual.origin, self._instead[fullname])
        return importlib.util.spec_from_file_location(
            fullname, usual.origin, loader=loader, submodule_search_locations=usual.submodule_search_locations
        )


def use_other_sources(sources: OtherSources) -> Notes | Functions | None:
    """Prepare this process; returns the writer of notes if they are asked for. Raises ``UsageError`` for a module that
    is imported already."""
    asked = [*(module for module, _ in sources.instead), *sources.located]
    early = [module for module in asked if module in sys.modules and module not in sys.stdlib_module_names]
    if early:
        raise UsageError(f"{early[0]} is imported by the kit before any backend is; it cannot be mutated here")
    if sources.instead:
        sys.meta_path.insert(0, _Finder(sources.instead))
    if sources.memory:
        _limit_memory(sources.memory)
    if sources.functions:
        return Functions(sources.notes)
    return Notes(sources) if sources.notes else None


def _limit_memory(beyond: int) -> None:
    """Limit the memory that this process can write, not its addresses: CUDA reserves hundreds of gigabytes of these."""
    import resource

    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[5])
    most = pages * os.sysconf("SC_PAGE_SIZE") + beyond
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


class Notes:
    """Writer of notes about the lines that run. It follows only the backend's own thread."""

    def __init__(self, sources: OtherSources) -> None:
        self._sources = sources
        self._modules = {text: module for module, text in sources.instead}
        self._lines: dict[str, set[int]] = {module: set() for module in self._modules.values()}
        if self._modules:
            sys.settrace(self._called)

    def imported(self, module: str, derived: Sequence[str] = ()) -> None:
        """Note the files of the modules, and the lines that ran during their import. ``module``: the module of the
        class; ``derived``: names of the classes there that are derived from it."""
        files: dict[str, str] = {}
        for name in (module, *self._sources.located):
            try:
                files[name] = getattr(importlib.import_module(name), "__file__", None) or ""
            except ImportError as error:
                raise UsageError(f"module {name!r} cannot be imported: {error}") from error
        self._write({"files": files, "derived": list(derived)})

    def drove(self, case: str, execution: str) -> None:
        """Note the lines that ran since the last time."""
        self._write({"case": case, "execution": execution})

    def _write(self, row: dict[str, Any]) -> None:
        lines = {module: sorted(found) for module, found in self._lines.items()}
        _append(self._sources.notes, {**row, "lines": lines})
        for found in self._lines.values():
            found.clear()

    def _called(self, frame: FrameType, event: str, argument: object) -> Any:
        module = self._modules.get(frame.f_code.co_filename)
        if module is None:
            return None
        found = self._lines[module]

        def line(frame: FrameType, event: str, argument: object) -> Any:
            found.add(frame.f_lineno)
            return line

        return line(frame, event, argument)


class Functions:
    """Writer of notes about the functions that run, of all threads."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._codes: dict[int, CodeType] = {}
        self._root = self._own = ""
        self._names: dict[str, str] = {}
        threading.settrace(self._called)
        sys.settrace(self._called)

    def imported(self, module: str, derived: Sequence[str] = ()) -> None:
        """Note the functions that ran during the import. ``module``: the module of the class."""
        file = getattr(sys.modules.get(module), "__file__", None) or ""
        self._own = os.path.abspath(file) if file else ""
        self._root = root_of(self._own) if file else ""
        self._write({"root": self._root})

    def drove(self, case: str, execution: str) -> None:
        """Note the functions that ran since the last time."""
        self._write({"case": case, "execution": execution})

    def _called(self, frame: FrameType, event: str, argument: object) -> None:
        # By its id: a code object is compared with another one by all of its contents.
        self._codes[id(frame.f_code)] = frame.f_code

    def _write(self, row: dict[str, Any]) -> None:
        codes, self._codes = self._codes, {}
        found = {(self._name(code.co_filename), code.co_qualname.partition(".<locals>")[0]) for code in codes.values()}
        files = {self._name(getattr(module, "__file__", None) or "") for module in list(sys.modules.values())}
        functions = sorted(pair for pair in found if pair[0])
        _append(self._folder, {**row, "functions": functions, "files": sorted(files - {""})})

    def _name(self, file: str) -> str:
        """The file relative to the root; empty for one that is not the backend's."""
        if file not in self._names:
            path = os.path.abspath(file) if file else ""
            self._names[file] = os.path.relpath(path, self._root) if self._is_tested(path) else ""
        return self._names[file]

    def _is_tested(self, path: str) -> bool:
        if not self._root or not path.startswith(self._root + os.sep) or not path.endswith(".py"):
            return False
        if path == self._own or not os.path.isfile(path):
            return path == self._own
        if _INSTALLED & set(path[len(self._root) :].split(os.sep)):
            return False
        of_kit = any(path.startswith(folder) for each in DISTRIBUTIONS if (folder := folder_of(each)))
        adapters = (os.path.join(folder_of(KIT), "backends", ""), os.path.join(folder_of(SERVERS), "fakes", ""))
        return not of_kit or path.startswith(adapters)


def derived_here(backend: type[object]) -> list[str]:
    """Names of the classes derived from ``backend`` that its own module defines: they are other backends."""
    found: list[type[object]] = backend.__subclasses__()
    here = [child for child in found if child.__module__ == backend.__module__]
    return [name for child in here for name in (child.__qualname__, *derived_here(child))]


_INSTALLED = {"site-packages", "dist-packages"}
"""Folders of installed packages."""


def outermost_folder(file: str) -> str:
    """Folder of the outermost package that a file is in; without one, the folder of the file."""
    folder = outermost = os.path.dirname(file)
    while os.path.exists(os.path.join(folder, "__init__.py")):
        folder, outermost = os.path.dirname(folder), folder
    return outermost


def root_of(file: str) -> str:
    """Folder of the Git checkout that a file is in. For an installed file, or without a checkout, that of
    ``outermost_folder``."""
    folder = os.path.dirname(file)
    if _INSTALLED & set(file.split(os.sep)):
        return outermost_folder(file)  # a copy, also where the environment is a folder of the checkout
    while not os.path.exists(os.path.join(folder, ".git")):
        if os.path.dirname(folder) == folder:
            return outermost_folder(file)
        folder = os.path.dirname(folder)
    return folder


def _append(folder: str, row: dict[str, Any]) -> None:
    with open(os.path.join(folder, str(os.getpid())), "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")

"""Import one module from another source text than its file's.

The environment variable names a JSON file with ``module``, ``path`` (the module's own file) and ``source`` (the file
that holds the mutated text). Nothing is written beside the module, and its byte code is not cached. Imported by every
interpreter that a test starts, unless that ignores its environment (``-E``, ``-I``, ``-S``).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType
from typing import Any

VARIABLE = "MUTANT"


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles the mutated text under the module's own file name, so that tracebacks and resources stay right."""

    def __init__(self, module: str, path: str, source: str) -> None:
        super().__init__(module, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        with open(self._source, "rb") as file:
            code: CodeType = self.source_to_code(file.read(), self.path)
        return code


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, module: str, path: str, source: str) -> None:
        self._wanted = (module, path, source)

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        module, file, source = self._wanted
        if fullname != module:
            return None
        inside = [os.path.dirname(file)] if os.path.basename(file) == "__init__.py" else None
        return importlib.util.spec_from_file_location(
            module, file, loader=_Loader(module, file, source), submodule_search_locations=inside
        )


def install() -> None:
    """Put the mutant first among the ways to import, if the environment names one."""
    named = os.environ.get(VARIABLE)
    if not named:
        return
    with open(named, encoding="utf-8") as file:
        wanted = json.load(file)
    sys.meta_path.insert(0, _Finder(wanted["module"], wanted["path"], wanted["source"]))

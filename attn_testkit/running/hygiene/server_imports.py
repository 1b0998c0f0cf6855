"""Changes that the import of a server makes to a process. Such changes belong to the server and are not a failure of a
backend class. For example, vLLM disables cuDNN's attention when ``vllm.platforms.cuda`` is imported. A server's process
is in that state before any backend is constructed, so the change stays, and the header of the run lists it. The same
change by a backend while it runs stays a failure.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import FrameType, ModuleType
from typing import Any

from ...distributions import CODE
from ...registry import bridges
from .process_state import Accepted, ProcessState, accepted, changes, take_state, unchanged


class ServerImports(importlib.abc.MetaPathFinder):
    """Watches imports of servers, and imports by a bridge, during its own import or later.

    An import inside another one belongs to the outer one.
    """

    def __init__(self, spec: str, skip: tuple[str, ...] = ()) -> None:
        """``spec`` names the backend class: its own top-level package does not count as a server's. ``skip``: settings
        that may differ.
        """
        self.reported: list[str] = []
        """A line ``importing vllm.x changed the process: ...`` for each import that did."""
        own = spec.partition(":")[0].partition(".")[0]
        self._skip, self._never = skip, {*CODE, *({own} - set(bridges()))}
        self._state: ProcessState | None = None
        self._inside = False
        self._accepted: list[Accepted] = []

    def install(self) -> None:
        """Watch from now on."""
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Watch no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def accept_into(self, state: ProcessState) -> ProcessState:
        """``state`` with the changes by imports since the last call that are still in force."""
        for each in self._accepted:
            state = each.into(state)
        self._accepted.clear()
        return state

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of the other finders, with a loader that compares the process before and after."""
        if self._inside or not self._is_watched(name):
            return None
        for finder in list(sys.meta_path):
            # Another watch, of another worker in this process, would ask this one again.
            found = None if isinstance(finder, ServerImports) else finder.find_spec(name, path, target)
            if found is not None:
                if found.loader is not None and hasattr(found.loader, "exec_module"):
                    found.loader = _Watching(found.loader, self)
                return found
        return None

    def _is_watched(self, name: str) -> bool:
        top = name.partition(".")[0]
        return top not in self._never and (top in bridges() or _bridge_asks(sys._getframe(2)))

    def run(self, loader: Any, module: ModuleType) -> None:
        """Execute a module, and keep the changes that this caused."""
        if self._inside:
            loader.exec_module(module)
            return
        if self._state is None or not unchanged(self._state):
            self._state = take_state()
        self._inside = True
        try:
            loader.exec_module(module)
        finally:
            self._inside = False
            if not unchanged(self._state):
                found = changes(self._state, skip=self._skip, of_kit=False)
                if found:
                    self.reported.append(f"importing {module.__name__} changed the process: {'; '.join(found)}")
                    self._accepted.append(accepted(self._state, skip=self._skip))
                self._state = None


def _bridge_asks(frame: FrameType | None) -> bool:
    """True if a bridge's code is among the callers."""
    of_bridges = tuple(bridges().values())
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(of_bridges):
            return True
        frame = frame.f_back
    return False


class _Watching(importlib.abc.Loader):
    """A module's own loader, which replaces this one once the module is executed."""

    def __init__(self, loader: Any, watch: ServerImports) -> None:
        self._loader, self._watch = loader, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._watch.run(self._loader, module)

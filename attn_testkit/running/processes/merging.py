"""Several sources of results as one. Each source has its own thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")
_END = object()


class _Raised:
    def __init__(self, error: BaseException) -> None:
        self.error = error


def merged(sources: Sequence[Iterable[T]], give_up: Callable[[], None]) -> Generator[T, None, None]:
    """Yield the items of all sources as they come. An exception of a source is raised here.

    ``give_up`` is called when that happens, or when the caller stops reading: the function has to make the sources end.
    """
    found: queue.SimpleQueue[object] = queue.SimpleQueue()

    def follow(source: Iterable[T]) -> None:
        try:
            for result in source:
                found.put(result)
        except BaseException as error:
            found.put(_Raised(error))
        found.put(_END)

    for source in sources:
        threading.Thread(target=follow, args=(source,), daemon=True).start()
    left = len(sources)
    try:
        while left:
            result = found.get()
            if isinstance(result, _Raised):
                raise result.error
            if result is _END:
                left -= 1
            else:
                yield result  # type: ignore[misc]
    finally:
        if left:
            give_up()

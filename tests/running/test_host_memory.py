"""Memory that a large case leaves behind is given back."""

from types import SimpleNamespace

import pytest

from attn_testkit.running.processes import host_memory
from attn_testkit.running.processes.host_memory import Trimmer

EIGHTH = 1 << 27


def test_a_process_that_grew_by_more_than_an_eighth_of_a_gigabyte_gives_back(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, given_back = [100 * EIGHTH], []
    monkeypatch.setattr(host_memory, "_resident", lambda: sizes[-1])
    trimmer = Trimmer()
    monkeypatch.setattr(trimmer, "_trim", given_back.append)
    sizes.append(101 * EIGHTH)
    trimmer.after_case()
    assert given_back == []
    sizes.append(101 * EIGHTH + 1)
    trimmer.after_case()
    assert given_back == [0]
    trimmer.after_case()
    assert given_back == [0], "measured from where it was left"


def test_the_resident_size_is_known_in_bytes() -> None:
    assert 1 << 24 < host_memory._resident() < 1 << 37


def test_without_glibc_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_: object) -> None:
        raise OSError

    monkeypatch.setattr(host_memory.ctypes, "CDLL", absent)
    trimmer = Trimmer()
    monkeypatch.setattr(host_memory, "_resident", lambda: 1 << 40)
    trimmer.after_case()


def test_what_large_tensors_leave_free_is_kept_until_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    library = SimpleNamespace(malloc_trim=len, mallopt=lambda *given: asked.append(given))
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda _: library)
    Trimmer()
    # The names of M_MMAP_THRESHOLD and M_TRIM_THRESHOLD in malloc.h.
    assert asked == [(-3, 32 << 20), (-1, 256 << 20)]

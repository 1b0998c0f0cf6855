"""Memory that a large case leaves behind is given back."""

import pytest

from attn_testkit.running import host_memory
from attn_testkit.running.host_memory import Trimmer

QUARTER = 1 << 28


def test_a_process_that_grew_by_more_than_a_quarter_of_a_gigabyte_gives_back(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, given_back = [100 * QUARTER], []
    monkeypatch.setattr(host_memory, "_resident", lambda: sizes[-1])
    trimmer = Trimmer()
    monkeypatch.setattr(trimmer, "_trim", given_back.append)
    sizes.append(101 * QUARTER)
    trimmer.after_case()
    assert given_back == []
    sizes.append(101 * QUARTER + 1)
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

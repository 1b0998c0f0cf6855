"""The private torch APIs are checked before they are relied on, and a change is reported in a sentence."""

from __future__ import annotations

import pytest
import torch

from cuda_on_cpu import emulated_cuda, installation, private
from cuda_on_cpu.private import storage_at


def test_this_torch_passes():
    assert private.self_tests() == []


@pytest.mark.parametrize(
    ("name", "replacement", "says"),
    [
        ("use_count", lambda key: 1, "storage use count"),
        ("use_count", lambda key: 1 + (storage_at(key) is not None), "storage use count"),
        ("storage_at", lambda key: None, "storage identities"),
        ("storage_from_weak", lambda weak: None, "weak storage references"),
        ("raw_storage", lambda address, nbytes: torch.zeros(16, dtype=torch.uint8).untyped_storage(), "aliases"),
        ("run_kernel", lambda op, args, kwargs: None, "redispatch"),
        ("can_decompose", lambda op: False, "decomposition"),
    ],
    ids=["use_count", "use_count of what is gone", "identities", "weak", "raw_storage", "redispatch", "decompose"],
)
def test_a_changed_private_api_is_named(monkeypatch, name, replacement, says):
    monkeypatch.setattr(private, name, replacement)
    (failure,) = private.self_tests()
    assert says in failure
    assert torch.__version__ in failure


def test_a_self_test_that_raises_counts_as_failed(monkeypatch):
    def gone(key: int) -> int:
        raise AttributeError("no such thing")

    monkeypatch.setattr(private, "use_count", gone)
    (failure,) = private.self_tests()
    assert "AttributeError: no such thing" in failure


def test_the_context_is_not_entered_on_a_torch_that_fails(monkeypatch):
    monkeypatch.setattr(installation.INSTALLED, "checked", False)
    monkeypatch.setattr(private, "use_count", lambda key: 1)
    with pytest.raises(RuntimeError, match="cannot be emulated on"), emulated_cuda():
        pass
    assert not torch.cuda.is_available() or torch.version.cuda

"""What is run as it is where host syncs are refused is what the look at every operation would let pass, and no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cuda_on_cpu import EmulationError, HostSyncError, emulated_cuda, functions
from cuda_on_cpu.reads_nothing import TENSORS_AT
from cuda_on_cpu.tags import looks_device

OF_ONE_TENSOR = {
    "reshape": (4, 3), "flatten": (), "new_zeros": ((2, 2),), "new_ones": ((2, 2),), "new_full": ((2, 2), 1.5),
    "full_like": (1.5,), "fill_": (2.0,), "cumsum": (0,), "any": (1,), "all": (1,), "sum": (1,), "amax": (1,),
    "amin": (1,), "logsumexp": (1,), "softmax": (1,), "view": ((4, 3),), "as_strided": ((2, 2), (4, 1)),
    "transpose": (0, 1), "permute": (1, 0), "unsqueeze": (0,), "expand": (3, 4), "select": (0, 1), "narrow": (0, 1, 2),
    "unfold": (1, 2, 2), "movedim": (0, 1), "swapaxes": (0, 1), "swapdims": (0, 1), "unbind": (1,),
    "repeat_interleave": (2, 1),
}  # fmt: skip
"""Name -> its other arguments; of other names none."""


Call = Callable[[Tensor, Tensor], Tensor]
"""Of [3, 4] float32 and [2] int64, both on the device."""


def _of_one(func: Any) -> Call:
    rest = OF_ONE_TENSOR.get(func.__name__, ())
    if func.__name__ == "reshape":
        return lambda x, at: func(x, rest)
    return lambda x, at: func(x, *rest)


def _of_two(func: Any) -> Call:
    if func.__name__.startswith("masked_fill"):
        return lambda x, at: func(x, x > 3, 0.0)
    if func.__name__ in ("__and__", "__or__"):
        return lambda x, at: func(x > 3, x > 5)
    if func.__name__ == "searchsorted":
        return lambda x, at: func(x, x, right=True)
    return lambda x, at: func(x, x)


_BUILT = {torch.arange: (7,), torch.full: ((2, 2), 1), torch.zeros: (2, 3), torch.ones: ((2,),)}
CALLS: dict[Any, Call] = {
    **{func: lambda x, at, func=func: func(*_BUILT[func], device="cuda") for func in _BUILT},
    **{func: _of_one(func) for func, at in TENSORS_AT.items() if at == {0}},
    **{func: _of_two(func) for func, at in TENSORS_AT.items() if at == {0, 1}},
    F.pad: lambda x, at: F.pad(x, (0, 2)),
    Tensor.clamp: lambda x, at: x.clamp(min=2, max=5),
    Tensor.clamp_: lambda x, at: x.clamp_(2),
    torch.clamp: lambda x, at: torch.clamp(x, x, x),
    torch.clamp_: lambda x, at: torch.clamp_(x, 2),
    torch.where: lambda x, at: torch.where(x > 3, x, 0.0),
    Tensor.index_select: lambda x, at: x.index_select(0, at),
    torch.index_select: lambda x, at: torch.index_select(x, 0, at),
    Tensor.gather: lambda x, at: x.gather(0, at[None]),
    torch.gather: lambda x, at: torch.gather(x, 0, at[None]),
    torch.cat: lambda x, at: torch.cat([x, x], dim=1),
    torch.stack: lambda x, at: torch.stack((x, x), 1),
    Tensor.index_put_: lambda x, at: x.index_put_((at,), x[:2] * 2),
    Tensor.to: lambda x, at: x.to(torch.float16),
    Tensor.__getitem__: lambda x, at: x[1:, None],
    torch.einsum: lambda x, at: torch.einsum("ij,kj->ik", x, x),
    Tensor.matmul: lambda x, at: x @ x.t(),
}


def test_every_function_of_the_table_is_tried():
    assert set(TENSORS_AT) <= set(CALLS)


def _where_syncs_are_refused(call: Call, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, bool, int]:
    """The result, whether it lies on the device, and how many calls were looked into."""
    watched: list[Any] = []
    strictly = functions.DeviceFunctions._strictly

    def noted(self: Any, func: Any, *rest: Any) -> Any:
        watched.append(func)
        return strictly(self, func, *rest)

    with torch.no_grad(), emulated_cuda():
        x, at = (torch.arange(12.0).view(3, 4) + 1).cuda(), torch.tensor([2, 0]).cuda()
        monkeypatch.setattr(functions.DeviceFunctions, "_strictly", noted)
        torch.cuda.set_sync_debug_mode("error")
        result = call(x, at)
        torch.cuda.set_sync_debug_mode("default")
        monkeypatch.setattr(functions.DeviceFunctions, "_strictly", strictly)
        first = result[0] if isinstance(result, tuple) else result
        return first.cpu(), looks_device(first), len(watched)


# In the same order in every worker: views come from a set.
IN_ORDER = sorted(CALLS.items(), key=lambda item: (item[0].__name__, type(item[0]).__name__))


@pytest.mark.parametrize(
    ("func", "call"), IN_ORDER, ids=[f"{i}-{func.__name__}" for i, (func, _) in enumerate(IN_ORDER)]
)
def test_the_look_at_every_operation_lets_it_pass_with_the_same_result(func, call, monkeypatch):
    found, is_there, watched = _where_syncs_are_refused(call, monkeypatch)
    monkeypatch.setattr(functions, "reads_nothing", lambda *_: False)
    wanted, was_there, all_watched = _where_syncs_are_refused(call, monkeypatch)
    assert torch.equal(found, wanted)
    assert found.dtype == wanted.dtype
    assert is_there is was_there is True
    # Those that name a device come by another way, and are not looked into there.
    assert watched == (func in _BUILT) < all_watched + (func in _BUILT)


READS = {
    "x.reshape(n, -1)": HostSyncError,
    "torch.full((2,), n)": HostSyncError,
    "torch.arange(n)": HostSyncError,
    "x.add(x, alpha=n)": HostSyncError,
    "x.new_full((2,), n)": HostSyncError,
    "x.cumsum(n)": HostSyncError,
    "torch.cat([x, x], n)": HostSyncError,
    "x.index_put_((x > 0,), x)": HostSyncError,
    "x[x > 0]": HostSyncError,
    "x.masked_fill(x > 0, n)": HostSyncError,
    "torch.searchsorted(x, x, sorter=order)": HostSyncError,
    "x.sum(n)": HostSyncError,
    "x.copy_(host)": HostSyncError,
    "host.copy_(x)": HostSyncError,
    "x[host.long()]": HostSyncError,
    "torch.where(x)": HostSyncError,
    "torch.repeat_interleave(x[0].long())": HostSyncError,
    "x.repeat_interleave(x[:, 0].long(), 0)": HostSyncError,
    "x.long() @ x.long().t()": EmulationError,
}


@pytest.mark.parametrize(("text", "error"), READS.items(), ids=READS)
def test_what_the_host_waits_for_is_refused(text, error):
    with torch.no_grad(), emulated_cuda():
        x = torch.ones(3, 4, device="cuda")
        names = {"torch": torch, "x": x, "n": torch.tensor(1, device="cuda"), "host": torch.ones(3, 4)}
        names["order"] = x.long().argsort()
        torch.cuda.set_sync_debug_mode("error")
        with pytest.raises(error):
            eval(text, names)


def test_a_dispatch_mode_of_the_program_and_vmap_are_looked_into():
    with torch.no_grad(), emulated_cuda():
        x = torch.ones(3, 4, device="cuda")
        torch.cuda.set_sync_debug_mode("error")
        with pytest.raises(HostSyncError):
            torch.vmap(lambda row: row.add(x.sum().item()))(x)
        found = torch.vmap(lambda row: row + 1)(x)
        torch.cuda.set_sync_debug_mode("default")
        assert found.tolist() == [[2.0] * 4] * 3

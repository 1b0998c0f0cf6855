"""Entry points of vendor packages, real or fake.

An adapter names an entry point and a device. It gets the package's own function or class if the package imports, the
device is a real CUDA device and its SM is in range. Elsewhere it gets a fake of the same entry point that computes in
torch, from the distribution that registers it (attn-testkit-servers). Every call of a fake is first bound to the
*installed* package's signature, so that an adapter cannot become outdated unnoticed on a machine without a GPU: an
argument that was renamed or dropped raises ``TypeError`` here as it would on a GPU.

A good fake runs much of the package's own Python. If the package separates Python from compiled code, replace only the
compiled module (``swapped``): then state, checks and exceptions come from the package.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata as metadata
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch

from .source_signature import stub_of

FAKES = "attn_testkit.fakes"
"""Entry-point group in which a distribution registers modules of fakes: ``trtllm_fake = "pkg.module"``."""


class VendorMissing(ImportError):
    """The package, or the fake of its kernels, is not installed or does not import here. Names what to install."""


class VendorMismatch(RuntimeError):
    """The installed package no longer has a function that a fake replaces: the tested range of versions is too wide."""


@dataclass(frozen=True)
class EntryPoint:
    """A public function or class of a vendor package, and where its kernels run."""

    path: str
    """``flashinfer.decode:BatchDecodeWithPagedKVCacheWrapper``."""
    sm: tuple[tuple[int, int], ...]
    """Ranges of compute capability with a kernel, ends inclusive, as ``((90, 90), (100, 103))``."""
    fake: str
    """``name:attribute`` of the fake, by the name of its module in the group ``attn_testkit.fakes``, or
    ``module:attribute``; imported when it is first needed. A function takes the real one's parameters, defaults filled
    in. A class has the real one's methods. A ``make_...`` function is given the real class and returns the fake (for
    fakes that derive from the real class)."""
    extra: str
    """Extra of this project that installs the package."""
    from_source: bool = False
    """Does the module import only where its kernels run? Then the fake is bound to the signature in its source."""

    def runs_on(self, sm: int) -> bool:
        """True if a device of this compute capability has a kernel."""
        return any(low <= sm <= high for low, high in self.sm)


@dataclass(frozen=True)
class Provided:
    """The function that an adapter calls, real or fake."""

    call: Any
    is_fake: bool
    why: str = ""
    """Reason why the function is a fake; empty if it is the real one."""

    @property
    def kernels(self) -> str:
        """Value of ``AttentionBackend.kernels``."""
        return "emulated" if self.is_fake else "real"


def device_is_real(device: torch.device) -> bool:
    """True if this device is a real GPU. An emulated device is known by its name; nothing else is read here."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    return "emulated" not in torch.cuda.get_device_name(device).lower()


def sm_of(device: torch.device) -> int:
    """Compute capability of a real device: 90 for SM90."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


_forced: list[Literal["real", "fake"]] = []


@contextmanager
def forced(kind: Literal["real", "fake"]) -> Iterator[None]:
    """Make ``provide`` return this kind inside the block if possible, to compare real and fake on one device."""
    _forced.append(kind)
    try:
        yield
    finally:
        _forced.pop()


def provide(entry: EntryPoint, device: torch.device) -> Provided:
    """The real entry point, or its fake and the reason. Raises ``VendorMissing`` when there is no package."""
    why = _why_not_real(entry, device)
    if _forced and _forced[-1] == "fake":
        why = why or "a fake was asked for"
    if not why:
        return Provided(real(entry), is_fake=False)
    if _forced and _forced[-1] == "real":
        raise VendorMissing(f"{entry.path} was asked for, and {why}")
    return Provided(fake_of(entry), is_fake=True, why=why)


def _why_not_real(entry: EntryPoint, device: torch.device) -> str:
    if not device_is_real(device):
        return "no CUDA device is here"
    sm = sm_of(device)
    if not entry.runs_on(sm):
        ranges = ", ".join(f"SM{low}" if low == high else f"SM{low}-{high}" for low, high in entry.sm)
        return f"its kernels need {ranges} and this device is SM{sm}"
    return ""


@functools.cache
def real(entry: EntryPoint) -> Any:
    """The package's own function or class, whether or not it can run here.

    Raises ``VendorMissing`` when the package does not import, ``VendorMismatch`` when it has no such name.
    """
    return _found(_attribute, entry)


def _found(find: Callable[[str], Any], entry: EntryPoint) -> Any:
    try:
        return find(entry.path)
    except ImportError as error:
        raise VendorMissing(
            f"{entry.path.partition(':')[0]} does not import ({error}); "
            f"pip install 'PATH_OF_THE_CHECKOUT[{entry.extra}]'"
        ) from error
    except AttributeError as error:
        raise VendorMismatch(f"the installed package has no {entry.path}: {error}") from error


@functools.cache
def fake_of(entry: EntryPoint) -> Any:
    """The fake, its calls bound to the real signature."""
    original = _found(stub_of, entry) if entry.from_source else real(entry)
    fake = _fake_by_name(entry.fake)
    if entry.fake.partition(":")[2].startswith("make_"):
        return fake(original)
    if inspect.isclass(fake):
        return _bound_class(original, fake)
    return _bound_function(original, fake)


@functools.cache
def _registered() -> Mapping[str, str]:
    """Name of a module of fakes -> the module, of every distribution that is installed."""
    return {point.name: point.value for point in metadata.entry_points(group=FAKES)}


def _fake_by_name(path: str) -> Any:
    name, _, attribute = path.partition(":")
    module = _registered().get(name, name)
    try:
        return _attribute(f"{module}:{attribute}")
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise VendorMissing(_no_fake(name)) from error


def _no_fake(name: str) -> str:
    return (
        f"the fakes of vendor kernels ({name}) are in the distribution attn-testkit-servers, which is not installed; "
        "pip install 'PATH_OF_THE_CHECKOUT/packages/servers'"
    )


def why_not_here(*entries: EntryPoint) -> str:
    """Value of ``AttentionBackend.not_here`` for an adapter of these entry points; empty if each is real or has a fake.

    Only torch's current device is considered, and only for an entry point whose fake is not installed.
    """
    for entry in entries:
        name = entry.fake.partition(":")[0]
        if name not in _registered() and (why := _why_not_real(entry, torch.device("cuda"))):
            return f"{why}, and {_no_fake(name)}"
    return ""


def _attribute(path: str) -> Any:
    module, _, name = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _bound_function(original: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return fake(*bound.args, **bound.kwargs)

    return call


def _bound_class(original: type, fake: type) -> type:
    names = [n for n in vars(fake) if callable(getattr(fake, n)) and (n == "__init__" or not n.startswith("_"))]
    missing = [n for n in names if not hasattr(original, n)]
    if missing:
        raise VendorMismatch(f"{original.__qualname__} has no {', '.join(missing)}")
    methods = {name: _bound_function(getattr(original, name), getattr(fake, name)) for name in names}
    return type(f"Fake{original.__name__}", (fake,), methods)


@contextmanager
def swapped(fakes: Mapping[str, Any]) -> Iterator[None]:
    """Put fakes in place of ``module:name`` of a package for the duration of a call.

    Raises ``VendorMismatch`` when one of the names is not there: then the package changed, and nothing is replaced.
    """
    patches = []
    for path, fake in fakes.items():
        module, _, name = path.partition(":")
        owner = importlib.import_module(module)
        if not hasattr(owner, name):
            raise VendorMismatch(f"the installed package has no {path}, which the fake replaces")
        patches.append(mock.patch.object(owner, name, fake))
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in reversed(patches):
            patch.stop()

"""Names of backends: short names, ``module:Class``, their lookup, and errors for anything else."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata as metadata
import importlib.util
import pkgutil
import re
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from .distributions import CUDA_ON_CPU, SERVERS, folder_of
from .results.texts import message_of, readable

if TYPE_CHECKING:
    from .contract import AttentionBackend, Capabilities

GROUP = "attn_testkit.backends"
"""Entry-point group in which a distribution registers short names: ``triton = "pkg.module:Class"``."""

BRIDGES = "attn_testkit.bridges"
"""Entry-point group of bridges: ``sglang = "pkg.module"``, whose ``backend_class(name)`` returns that server's own
backend, ``sglang:triton``."""

OF_SERVERS = ("sglang", "vllm")
"""Servers whose bridges are in attn-testkit-servers."""


INSTALL_TRITON = "pip install 'triton>=3.6,<3.11'"
"""Command that installs a Triton that the kit supports, as the extra ``triton`` of ``pyproject.toml`` says."""


class UsageError(Exception):
    """Raised for a request that cannot be met. The message is one line for the user; exit code 4."""


class BackendNotFound(UsageError):
    """Raised if a spec does not name a usable backend class."""


@dataclass(frozen=True)
class Origin:
    """The distribution or file that a backend comes from."""

    distribution: str = ""
    version: str = ""
    file: str = ""

    @property
    def label(self) -> str:
        """Label for headers: the version, else the file, else nothing."""
        return self.version or (f"({Path(self.file).name})" if self.file else "")

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}".strip() or self.file or "unknown origin"


@dataclass(frozen=True)
class BackendInfo:
    """One registered backend, as ``attn-testkit list`` shows it."""

    name: str
    spec: str
    origin: Origin
    capabilities: str = ""
    """Capabilities in one line; empty if the class could not be loaded."""
    failure: str = ""
    """The reason why it could not be loaded; empty if it could."""


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Suggest the nearest known word, as ``; did you mean 'x'?``; empty if none is near."""
    known = list(known)
    folded = word.strip().lower().replace("_", "-")
    close = [k for k in known if k.lower().replace("_", "-") == folded]
    close = close or difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""


def unknown(what: str, word: str, known: Iterable[str]) -> str:
    """Text of an error: ``unknown mode 'decod'; did you mean 'decode'?``, or the whole list if nothing is near."""
    known = list(known)
    listed = ", ".join(known)
    return f"unknown {what} {word!r}{did_you_mean(word, known) or f' ({listed})'}"


def load_backend(spec: str) -> type[AttentionBackend]:
    """The class that a short name, ``module:Class`` or ``server:name`` names.

    Imports its module, and so torch. Raises ``BackendNotFound`` with the reason in one line if the name is unknown, the
    module cannot be imported, or the object is not a backend.
    """
    if ":" not in spec:
        spec = _registered_spec(spec)
    module_name, _, class_path = spec.partition(":")
    if not module_name or not class_path:
        raise BackendNotFound(f"backend {spec!r} is incomplete; write module:Class")
    if module_name in bridges():
        return checked_class(spec, _of_server(spec, bridges()[module_name], class_path))
    if module_name in OF_SERVERS:
        raise BackendNotFound(f"backend {spec!r}: the bridge to {module_name} {SERVERS.is_missing}")
    if "/" in module_name:
        raise BackendNotFound(_is_a_file(spec, module_name, class_path))
    found: object = _import(spec, module_name)
    for name in class_path.split("."):
        found = _attribute(spec, found, name)
    return checked_class(spec, found)


def registered_backends() -> list[BackendInfo]:
    """Every registered backend, sorted by name, without importing any: ``capabilities`` is left empty."""
    return [BackendInfo(name, p.value, _entry_origin(p)) for name, p in sorted(_entry_points().items())]


def origin_of(spec: str) -> Origin:
    """Distribution and version of a spec, without importing it; its file if no distribution owns it."""
    point = _entry_points().get(spec)
    if point is not None:
        return _entry_origin(point)
    top = spec.partition(":")[0].partition(".")[0]
    owners = _owners_of_packages().get(top, ())
    if owners:
        return Origin(owners[0], metadata.version(owners[0]))
    return Origin(file=_file_of(top))


@lru_cache(maxsize=1)
def bridges() -> Mapping[str, str]:
    """Server -> module of its bridge, of every distribution that is installed."""
    return {point.name: point.value for point in metadata.entry_points(group=BRIDGES)}


@lru_cache(maxsize=1)
def _owners_of_packages() -> Mapping[str, Sequence[str]]:
    # This reads the file lists of all installed packages, which takes up to a second.
    return metadata.packages_distributions()


def _entry_points() -> Mapping[str, metadata.EntryPoint]:
    return {point.name: point for point in metadata.entry_points(group=GROUP)}


def _refuse_two_of_a_name(name: str) -> None:
    """Raise ``BackendNotFound`` if a name means two classes: otherwise the import path would decide which one is
    tested."""
    points = {point.value: point for point in metadata.entry_points(group=GROUP, name=name)}
    if len(points) > 1:
        places = " and ".join(f"{point.value} ({_registered_in(point)})" for point in points.values())
        raise BackendNotFound(
            f"backend name {name!r} is registered twice: {places}; name the class module:Class, or uninstall one"
        )


def _registered_in(point: metadata.EntryPoint) -> str:
    dist = point.dist
    if dist is None:
        return "unknown origin"
    folder = getattr(dist, "_path", None) or dist.locate_file("")
    return f"{dist.name} {dist.version}, {folder}/entry_points.txt"


def _entry_origin(point: metadata.EntryPoint) -> Origin:
    dist = point.dist
    return Origin(dist.name, dist.version) if dist else Origin()


def _registered_spec(name: str) -> str:
    points = _entry_points()
    if name in points:
        _refuse_two_of_a_name(name)
        return points[name].value
    if name in bridges() or name in OF_SERVERS:
        raise BackendNotFound(f"{name!r} is a server; name one of its backends, {name}:NAME")
    known = " (write module:Class)"
    if points:
        own = "to add a name, install the package that registers it"
        known = f" (known: {', '.join(sorted(points))}; or module:Class; {own})"
    if "/" in name or name.endswith(".py"):
        raise BackendNotFound(_is_a_file(name, name, "Class"))
    if Path(f"{name}.py").is_file():
        raise BackendNotFound(f"unknown backend {name!r}; {name}.py is in this folder: write {name}.py or {name}:Class")
    if "." in name:
        module_name, _, class_name = name.rpartition(".")
        raise BackendNotFound(
            f"unknown backend {name!r}; a class is named module:Class, did you mean '{module_name}:{class_name}'?"
        )
    raise BackendNotFound(f"unknown backend {name!r}{did_you_mean(name, points) or known}")


def _of_server(spec: str, bridge: str, name: str) -> object:
    try:
        found: object = _import(spec, bridge).backend_class(name)
    except LookupError as error:
        raise BackendNotFound(f"backend {spec!r}: {error.args[0]}") from error
    except BackendNotFound:
        raise
    except Exception as error:
        raise BackendNotFound(_import_failed(spec, bridge, error)) from error
    return found


def _import(spec: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name.endswith(".py") and module_name.startswith(missing):
            raise BackendNotFound(_is_a_file(spec, module_name, spec.partition(":")[2])) from error
        if module_name == missing or module_name.startswith(missing + "."):
            hint = did_you_mean(missing, _siblings(missing), cutoff=0.75)
            hint = hint or "; install its package, or run the command in the folder that has it"
            raise BackendNotFound(f"backend {spec!r}: module {missing!r} does not exist{hint}") from error
        raise BackendNotFound(_import_failed(spec, module_name, error)) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise BackendNotFound(_import_failed(spec, module_name, error)) from error


def _is_a_file(spec: str, path: str, class_name: str) -> str:
    file = Path(path.removesuffix(".py"))
    module = file.name if file.is_absolute() or ".." in file.parts else ".".join(file.parts)
    return f"backend {spec!r} is a file; a class is named module:Class, did you mean '{module}:{class_name}'?"


def _import_failed(spec: str, module_name: str, error: BaseException) -> str:
    return f"backend {spec!r}: importing {module_name} failed: {import_failure(error)}{_how_to_install(error)}"


def _how_to_install(error: BaseException) -> str:
    """Advice if a package is not installed; for a missing module of an installed package its version is the reason."""
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if not package or package in sys.modules or importlib.util.find_spec(package):
        return ""
    triton = f" with {INSTALL_TRITON}" if package == "triton" else ""
    return f"; install {package}{triton}, or use a Python that has it: attn-testkit --python PATH run ..."


def import_failure(error: BaseException) -> str:
    """The error of an import in one line: ``ImportError: no libcudart (at /.../vendor/__init__.py:12)``."""
    # The innermost frame that an author can fix: the line of the user's file that broke, or of a package it imports.
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _MACHINERY.search(f.filename)]
    at = f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    text = readable(" ".join(message_of(error).split()), MOST_OF_A_MESSAGE)
    return f"{type(error).__name__}: {text}{at}"


_KIT = re.escape(str(Path(__file__).parent))
_EMULATION = re.escape(folder_of(CUDA_ON_CPU) or "/nowhere/")
_MACHINERY = re.compile(
    rf"importlib|<string>|/site-packages/(torch|triton)/|{_KIT}/(\w+\.py|(contract|graphs)/)|{_EMULATION}\w+\.py"
)
"""Files whose frames do not belong to an author: import machinery, torch, the emulation, the contract's refusals."""

MOST_OF_A_MESSAGE = 1000
"""Longest message, in characters."""


def _siblings(module_name: str) -> list[str]:
    parent, _, _ = module_name.rpartition(".")
    if not parent:
        return [m.name for m in pkgutil.iter_modules() if m.name not in sys.stdlib_module_names]
    paths = getattr(sys.modules.get(parent), "__path__", [])
    return [f"{parent}.{m.name}" for m in pkgutil.iter_modules(paths)]


def _attribute(spec: str, owner: object, name: str) -> object:
    if hasattr(owner, name):
        found: object = getattr(owner, name)
        return found
    where = getattr(owner, "__name__", str(owner))
    classes = [n for n, value in vars(owner).items() if isinstance(value, type)]
    of_it = [n for n in classes if vars(owner)[n].__module__ == where]
    its = f"; its classes are {', '.join(of_it)}" if of_it else "; it defines no class"
    raise BackendNotFound(f"backend {spec!r}: {where} has no {name!r}{did_you_mean(name, classes) or its}")


def checked_class(spec: str, found: object) -> type[AttentionBackend]:
    """Return the object that ``spec`` named if it is a backend class; else raise ``BackendNotFound``."""
    from .contract import AttentionBackend, Capabilities

    if not isinstance(found, type):
        kind = type(found).__name__
        if isinstance(found, AttentionBackend):
            raise BackendNotFound(f"backend {spec!r} is an instance; name its class, {kind}: the kit constructs it")
        raise BackendNotFound(f"backend {spec!r} is of type {kind}; expected a class derived from AttentionBackend")
    if not issubclass(found, AttentionBackend):
        raise BackendNotFound(f"backend {spec!r} does not derive from AttentionBackend or KernelBackend")
    unwritten = sorted(getattr(found, "__abstractmethods__", ()))
    if unwritten:
        raise BackendNotFound(f"backend {spec!r} does not implement {', '.join(unwritten)}")
    declared = getattr(found, "capabilities", None)
    if not isinstance(declared, Capabilities):
        what = "sets no capabilities" if declared is None else f"sets capabilities to a {type(declared).__name__}"
        raise BackendNotFound(f"backend {spec!r} {what}; write capabilities = Capabilities(eager={{...}}, ...)")
    wrong = _wrong_older_hooks(found, declared)
    if wrong:
        raise BackendNotFound(f"backend {spec!r} {wrong}")
    return found


_OLDER_HOOKS = ("init_forward_metadata_capture_cuda_graph", "init_forward_metadata_replay_cuda_graph")


def _wrong_older_hooks(found: type[AttentionBackend], declared: Capabilities) -> str:
    """The reason why the two older graph hooks would not be called, or nothing."""
    from .contract import AttentionBackend, LegacyGraphHooks

    def inherits(name: str, owner: type) -> bool:
        return getattr(found, name, None) is getattr(owner, name)

    plain = inherits("init_forward_metadata_out_graph", AttentionBackend)
    plans_inside = not inherits("init_forward_metadata_in_graph", AttentionBackend)
    order = f"write class {found.__name__}(LegacyGraphHooks, ...) with LegacyGraphHooks first"
    if not issubclass(found, LegacyGraphHooks):
        older = [name for name in _OLDER_HOOKS if hasattr(found, name)]
        unheard = bool(older) and plain and not plans_inside and bool(declared.graph)
        return f"implements {older[0]}, which is called only through LegacyGraphHooks; {order}" if unheard else ""
    if plain:
        return f"inherits LegacyGraphHooks after AttentionBackend, whose hooks hide it; {order}"
    if not inherits("init_forward_metadata_out_graph", LegacyGraphHooks):
        return ""
    missing = [name for name in _OLDER_HOOKS if declared.graph and inherits(name, LegacyGraphHooks)]
    if declared.eager and not plans_inside and inherits("init_forward_metadata", AttentionBackend):
        missing.append("init_forward_metadata (for eager steps)")
    return f"has LegacyGraphHooks and does not implement {', '.join(missing)}" if missing else ""


def capabilities_line(declared: Capabilities) -> str:
    """Capabilities of a backend in one line, for ``list``."""
    from .contract import ForwardMode

    modes = [
        f"{mode} {'+'.join(how for how in ('eager', 'graph') if mode in getattr(declared, how))}"
        for mode in ForwardMode
        if mode in declared.eager | declared.graph
    ]
    extras = [
        word
        for word, supported in (
            ("window", declared.windows.modes),
            ("soft cap", declared.options.logit_cap),
            ("sinks", declared.options.sinks),
            ("trees" if declared.bounds.max_topk > 1 else "chains", declared.bounds.max_topk),
        )
        if supported
    ]
    parts = [
        ", ".join(modes),
        "/".join(sorted(declared.heads.families)),
        "/".join(sorted(declared.precision.dtypes)) + (" fp8-kv" if "fp8_e4m3" in declared.kv_pool.kv_dtypes else ""),
        "d" + "/".join(map(str, sorted(declared.heads.head_dims))),
        "page " + "/".join(map(str, sorted(declared.kv_pool.page_sizes))),
        ", ".join(extras),
    ]
    return "; ".join(part for part in parts if part)


def _file_of(module_name: str) -> str:
    try:
        spec = importlib.util.find_spec(module_name)
    except (ImportError, ValueError):
        return ""
    return (spec.origin or "") if spec else ""

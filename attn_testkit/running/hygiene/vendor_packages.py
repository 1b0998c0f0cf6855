"""Packages that a backend requires: which installed ones cannot be imported, and why. A package that is installed and
broken, for example by a missing CUDA library, is not the fault of the backend that calls it.
"""

from __future__ import annotations

import importlib
import importlib.metadata as metadata
import sys
from collections.abc import Iterable, Iterator

from packaging.requirements import Requirement

from ...contract import Capabilities
from ...registry import import_failure
from ...results.names import CANNOT_IMPORT

NOT_HERE = ""
"""Value in place of a requirement if the backend class reports that none of its modes runs on this machine."""


def broken_packages(declared: Capabilities) -> dict[str, str]:
    """Requirement -> sentence, for packages of the capabilities that are installed and cannot be imported. Imports
    them."""
    needed = [
        *declared.requires.packages,
        *(text for each in declared.mode_requires.values() for text in each.packages),
    ]
    found = {}
    for text in dict.fromkeys(needed):
        why = _why_broken(Requirement(text))
        if why:
            found[text] = why
    return found


def _why_broken(requirement: Requirement) -> str:
    try:
        distribution = metadata.distribution(requirement.name)
    except metadata.PackageNotFoundError:
        return ""
    module = module_of(distribution)
    if not requirement.specifier.contains(distribution.version, prereleases=True) or not module:
        return ""
    try:
        importlib.import_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Half of it would stay, and be found by the next import as if it were whole.
        for name in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
            del sys.modules[name]
        said = import_failure(error)
        return f"{distribution.name} {distribution.version} {CANNOT_IMPORT}: {said}"
    return ""


def module_of(distribution: metadata.Distribution) -> str:
    """The module with the name of a distribution: ``flashinfer`` for flashinfer-python; empty if there is none. Other
    modules of the distribution, such as its benchmarks, are ignored.
    """
    name = distribution.name.lower().replace("-", "_").replace(".", "_")
    fits = [
        module for module in _modules(distribution) if name == module.lower() or name.startswith(f"{module.lower()}_")
    ]
    return max(fits, key=len, default="")


def _modules(distribution: metadata.Distribution) -> Iterator[str]:
    listed = distribution.read_text("top_level.txt")
    if listed:
        yield from listed.split()
        return
    files: Iterable[metadata.PackagePath] = distribution.files or ()
    tops = {file.parts[0] for file in files if len(file.parts) > 1 and file.suffix in (".py", ".so")}
    yield from sorted(top for top in tops if top.isidentifier())

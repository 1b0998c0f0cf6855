"""The four distributions of the repository: import names, places, and how to install a missing one."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Distribution:
    """A distribution that is built from this repository."""

    name: str
    module: str
    """The package that one imports."""
    folder: str
    """Folder in a checkout."""

    @property
    def command(self) -> str:
        """Command that installs it, by its folder, because it may not be on a package index."""
        return f"pip install 'PATH_OF_THE_CHECKOUT/{self.folder}'".replace("/.'", "'")

    @property
    def is_missing(self) -> str:
        """End of a sentence about a missing part: the distribution is not installed, and the command that installs
        it."""
        return f"is in the distribution {self.name}, which is not installed; {self.command}"


KIT = Distribution("attn-testkit", "attn_testkit", ".")
CUDA_ON_CPU = Distribution("cuda-on-cpu", "cuda_on_cpu", "packages/cuda_on_cpu")
CORPUS = Distribution("attn-testkit-corpus", "attn_testkit_corpus", "packages/corpus")
SERVERS = Distribution("attn-testkit-servers", "attn_testkit_servers", "packages/servers")
DISTRIBUTIONS = (KIT, CUDA_ON_CPU, CORPUS, SERVERS)
CODE = tuple(each.module for each in DISTRIBUTIONS)
"""Import names of all code that is the kit's and no author's."""


def is_of_kit(module: str) -> bool:
    """True if a module with this dotted name is in one of the four."""
    return module.partition(".")[0] in CODE


@cache
def folder_of(distribution: Distribution) -> str:
    """Folder of its package with a separator at the end; empty if it is not installed. Imports nothing."""
    spec = importlib.util.find_spec(distribution.module)
    places = spec.submodule_search_locations if spec else None
    return os.path.join(next(iter(places)), "") if places else ""


@cache
def digest_of_kit() -> str:
    """Digest of all code that evaluates a backend: of the kit and of the emulation, wherever they are installed."""
    found = hashlib.sha256()
    for module in (KIT.module, f"{KIT.module}.runner_modes", CUDA_ON_CPU.module):
        spec = importlib.util.find_spec(module)
        folder = next(iter(spec.submodule_search_locations or ())) if spec else ""
        files = {path.relative_to(folder).as_posix(): path for path in Path(folder).rglob("*.py")}
        # In a wheel, runner_modes is inside of the kit.
        for name in sorted(name for name in files if module != KIT.module or not name.startswith("runner_modes/")):
            found.update(f"{module} {name}\n".encode() + files[name].read_bytes())
    return f"sha256:{found.hexdigest()}"

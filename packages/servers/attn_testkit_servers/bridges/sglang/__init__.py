"""SGLang's attention backends, unchanged: ``sglang:triton`` and the others that ``NAMES`` lists.

The kit replaces the server around them: SGLang's own KV pools (``pools``), a model runner with the attributes that
backends read (``runner``), ``RadixAttention`` layers and ``ForwardBatch`` objects (``batches``). A table lists the
capabilities of each backend, and the places in SGLang that document them: ``declared``. Nothing of SGLang is replaced.
"""

from __future__ import annotations

import importlib
import os

from attn_testkit.contract import AttentionBackend

from ..capabilities import class_of
from .capabilities import CAPABILITIES, CAPABILITIES_OF_OLDER, OF_SGLANG, OLDER_NAMES
from .versions import CURRENT, OLDER, supported

__all__ = ["NAMES", "backend_class"]

NAMES = tuple(CAPABILITIES)
"""Names that may follow ``sglang:``."""
_NOT_DRIVEN = "which the kit does not run"
_CLASSES = {CURRENT: ("current", "SGLangBackend"), OLDER: ("older", "OlderSGLangBackend")}

_OF_STATES = ("states", "SGLangStateBackend")


def backend_class(name: str) -> type[AttentionBackend]:
    """The class that runs SGLang's backend of this name, in the installed version. Imports SGLang.

    Raises ``LookupError``, which says what to do, for a name that no table here has, and if SGLang is not installed or
    its version is not supported.
    """
    if name not in CAPABILITIES:
        listed = ", ".join(f"sglang:{known}" for known in NAMES)
        what = OLDER_NAMES.get(name) or (_NOT_DRIVEN if name in OF_SGLANG else "which SGLang does not have")
        raise LookupError(f"it names {name!r}, {what}; there are {listed}")
    version = supported()
    of_version = CAPABILITIES_OF_OLDER if version == OLDER else CAPABILITIES
    if name not in of_version:
        raise LookupError(f"the kit runs {', '.join(of_version)} of SGLang {version}, and {name} of {CURRENT}")
    declared = of_version[name]
    os.environ.update(declared.environment)
    # Before SGLang's modules are imported, which ask what the machine has.
    from . import fakes, imports

    missing = imports.prepare()
    faked = bool(declared.fakes) and fakes.is_needed()
    if faked:
        fakes.put_in_place(declared.fakes)
    module, drives = _CLASSES[version]
    if declared.keeps_states:
        module, drives = _OF_STATES
    base = getattr(importlib.import_module(f"{__name__}.{module}"), drives)
    notes = (f"sgl_kernel cannot be imported ({missing}): this class calls nothing that is compiled in it",)
    return class_of(base, "SGLang", name, declared, "emulated" if faked else "real", notes=notes if missing else ())

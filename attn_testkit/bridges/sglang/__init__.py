"""SGLang's attention backends, unchanged: ``sglang:triton`` and the others that ``NAMES`` lists.

The server around them is the kit, in SGLang's words: its own KV pools (``pools``), a model runner with the attributes
that backends read (``runner``), ``RadixAttention`` layers and ``ForwardBatch`` objects (``batches``). What each backend
is said to be able to do, and where SGLang says so, is a table: ``claims``. Nothing of SGLang is replaced.
"""

from __future__ import annotations

import importlib

from attn_testkit.contract import AttentionBackend

from ..claims import class_of
from .claims import CLAIMS, CLAIMS_OF_OLDER, OF_SGLANG, OLDER_NAMES
from .versions import CURRENT, OLDER, supported

__all__ = ["NAMES", "backend_class"]

NAMES = tuple(CLAIMS)
"""What may stand behind ``sglang:``."""
_NOT_DRIVEN = "which the kit does not drive"
_CLASSES = {CURRENT: ("current", "SGLangBackend"), OLDER: ("older", "OlderSGLangBackend")}


def backend_class(name: str) -> type[AttentionBackend]:
    """The class that drives SGLang's backend of this name, in the version that is installed. Imports SGLang.

    Raises ``LookupError``, which says what to do: for a name that no table here has, and where SGLang is not installed
    or in a version that is not supported.
    """
    if name not in CLAIMS:
        listed = ", ".join(f"sglang:{known}" for known in NAMES)
        what = OLDER_NAMES.get(name) or (_NOT_DRIVEN if name in OF_SGLANG else "which SGLang does not have")
        raise LookupError(f"it names {name!r}, {what}; there are {listed}")
    version = supported()
    of_version = CLAIMS_OF_OLDER if version == OLDER else CLAIMS
    if name not in of_version:
        raise LookupError(f"of SGLang {version} the kit drives {', '.join(of_version)}; {name} it drives of {CURRENT}")
    claims = of_version[name]
    # Before SGLang's modules are imported, which ask what the machine has.
    from . import fakes, imports

    missing = imports.prepare()
    faked = bool(claims.fakes) and fakes.is_needed()
    if faked:
        fakes.put_in_place(claims.fakes)
    module, drives = _CLASSES[version]
    base = getattr(importlib.import_module(f"{__name__}.{module}"), drives)
    notes = (f"sgl_kernel cannot be imported ({missing}): nothing that this class calls is compiled in it",)
    return class_of(base, "SGLang", name, claims, "emulated" if faked else "real", notes=notes if missing else ())

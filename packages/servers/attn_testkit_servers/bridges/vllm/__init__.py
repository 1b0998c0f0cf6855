"""vLLM's attention backends, unchanged: ``vllm:triton`` and the others that ``NAMES`` lists.

The kit replaces the server around them: configuration objects (``config``), ``Attention`` layers (``layers``), KV cache
groups and a metadata builder for each (``groups``), its pools (``pools``), the buffers that its model runner fills
before every step (``inputs``). A table lists the capabilities of each backend, and the places in vLLM that document
them: ``declared``. vLLM's Python is unchanged; without a GPU compiled code is replaced (``fakes``).
"""

from __future__ import annotations

from attn_testkit.contract import AttentionBackend

from .capabilities import CAPABILITIES, OF_VLLM
from .versions import supported

__all__ = ["NAMES", "backend_class"]

NAMES = tuple(CAPABILITIES)
"""Names that may follow ``vllm:``."""
_NOT_DRIVEN = "which the kit does not run"


def backend_class(name: str) -> type[AttentionBackend]:
    """The class that runs vLLM's backend of this name. Imports vLLM.

    Raises ``LookupError``, which says what to do, for a name that the table does not have, and if vLLM is not installed
    or its version is not supported.
    """
    if name not in CAPABILITIES:
        listed = ", ".join(f"vllm:{known}" for known in NAMES)
        what = _NOT_DRIVEN if name in OF_VLLM else "which vLLM does not have"
        raise LookupError(f"it names {name!r}, {what}; there are {listed}")
    supported()
    declared = CAPABILITIES[name]
    # Before vLLM's modules are imported, which ask what the machine has.
    from . import imports

    machine = imports.prepare(declared)
    from .classes import make_backend

    made: type[AttentionBackend] = make_backend(name, declared, machine)
    return made

"""vLLM's attention backends, unchanged: ``vllm:triton`` and the others that ``NAMES`` lists.

The server around them is the kit, in vLLM's words: configuration objects (``config``), ``Attention`` layers
(``layers``), KV cache groups and a metadata builder for each (``groups``), its pools (``pools``), the buffers that its
model runner fills before every step (``inputs``). What each backend is said to be able to do, and where vLLM says so,
is a table: ``claims``. Nothing of vLLM's Python is replaced; what only comes compiled is, where no GPU is (``fakes``).
"""

from __future__ import annotations

from attn_testkit.contract import AttentionBackend

from .claims import CLAIMS, OF_VLLM
from .versions import supported

__all__ = ["NAMES", "backend_class"]

NAMES = tuple(CLAIMS)
"""What may stand behind ``vllm:``."""
_NOT_DRIVEN = "which the kit does not drive"


def backend_class(name: str) -> type[AttentionBackend]:
    """The class that drives vLLM's backend of this name. Imports vLLM.

    Raises ``LookupError``, which says what to do: for a name that the table does not have, and where vLLM is not
    installed or in a version that is not supported.
    """
    if name not in CLAIMS:
        listed = ", ".join(f"vllm:{known}" for known in NAMES)
        what = _NOT_DRIVEN if name in OF_VLLM else "which vLLM does not have"
        raise LookupError(f"it names {name!r}, {what}; there are {listed}")
    supported()
    claims = CLAIMS[name]
    # Before vLLM's modules are imported, which ask what the machine has.
    from . import imports

    machine = imports.prepare(claims)
    from .driver import make_backend

    made: type[AttentionBackend] = make_backend(name, claims, machine)
    return made

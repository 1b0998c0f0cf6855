"""Which versions of SGLang the bridge drives. What backends read of their server changes with every release."""

from __future__ import annotations

import importlib.metadata

__all__ = ["CURRENT", "OLDER", "supported"]

CURRENT = "0.5.23"
OLDER = "0.5.12.post1"
"""The last release with a draft-extend v1 worker, and with the older pair of graph hooks."""

_HOW = (
    "`bash ci/servers.sh` in a checkout of the kit makes an environment with {wanted}; then say "
    "`build/servers/sglang-{wanted}/bin/attn-testkit run --backend sglang:triton`"
)


def supported() -> str:
    """The version of SGLang that is installed.

    Raises ``LookupError``, with what to do, where there is none or one that the bridge does not know.
    """
    try:
        found = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise LookupError(f"SGLang is not installed here; {_HOW.format(wanted=CURRENT)}") from None
    if found not in (CURRENT, OLDER):
        raise LookupError(
            f"SGLang {found} is installed; the kit drives {CURRENT} and {OLDER}. What a backend reads of its server "
            f"changes with every release; {_HOW.format(wanted=CURRENT)}"
        )
    return found

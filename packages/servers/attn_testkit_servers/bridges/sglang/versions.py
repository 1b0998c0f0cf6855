"""Versions of SGLang that the bridge runs. Attributes that backends read of their server change with every release."""

from __future__ import annotations

from ..versions import installed

CURRENT = "0.5.23"
OLDER = "0.5.12.post1"
"""The last release with a draft-extend v1 worker, and with the older pair of graph hooks."""

_HOW = (
    f"`bash ci/servers.sh` in a checkout of the kit makes an environment with {CURRENT}; then run "
    f"`build/servers/sglang-{CURRENT}/bin/attn-testkit run --backend sglang:triton`"
)


def supported() -> str:
    """The version of SGLang that is installed.

    Raises ``LookupError``, with what to do, if there is none or one that the bridge does not know.
    """
    return installed("SGLang", (CURRENT, OLDER), f"{CURRENT} and {OLDER}", _HOW)

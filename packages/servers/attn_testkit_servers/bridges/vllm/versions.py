"""The version of vLLM that the bridge runs. Attributes that backends read of their server change with every release."""

from __future__ import annotations

from ..versions import installed

SUPPORTED = "0.33.0"

_HOW = (
    f"`bash ci/servers.sh vllm-{SUPPORTED}` in a checkout of the kit makes an environment with {SUPPORTED}; then run "
    f"`build/servers/vllm-{SUPPORTED}/bin/attn-testkit run --backend vllm:triton`"
)


def supported() -> str:
    """The version of vLLM that is installed.

    Raises ``LookupError``, with what to do, if there is none or one that the bridge does not know.
    """
    return installed("vLLM", (SUPPORTED,), f"only {SUPPORTED}", _HOW)

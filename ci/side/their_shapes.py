"""``their_shapes:NAME``: SGLang's classes, without and with a bug, which capability the shapes of SGLang's own kit too.

That kit tries head dim 16 and pages of 32 tokens, which the bridge does not declare. Importing this imports SGLang.
"""

from __future__ import annotations

from typing import Any

import sglang_bugs

from attn_testkit_servers.bridges.sglang import backend_class
from side.results import BUGS, SHIPPED
from side.shapes import HEAD_DIM


def _wider(backend: Any) -> Any:
    declared = backend.capabilities
    wide = declared.with_changes(
        heads={"head_dims": declared.heads.head_dims | {HEAD_DIM}},
        kv_pool={"page_sizes": declared.kv_pool.page_sizes | {32}},
    )
    return type(backend.__name__, (backend,), {"capabilities": wide, "__module__": __name__})


def __getattr__(name: str) -> Any:
    """A class is made when it is asked for: of ``triton``, ``torch_native`` or a bug's name."""
    if name in ("triton", "torch_native"):
        made = _wider(backend_class(name))
    elif name in {bug.name for bug in (*BUGS, *SHIPPED)}:
        made = _wider(getattr(sglang_bugs, name))
    else:
        raise AttributeError(name)
    globals()[name] = made
    return made

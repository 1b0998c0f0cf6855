"""What SGLang's FlashInfer backend offers, and the bridge does not declare: it is wrong in 0.5.23.

PYTHONPATH=packages/servers/tests/bridges attn-testkit run --backend sglang_wider:SoftCap --mode decode
"""

from __future__ import annotations

import dataclasses
from typing import Any

from attn_testkit_servers.bridges.sglang import backend_class

FlashInfer: Any = backend_class("flashinfer")


class SoftCap(FlashInfer):
    """sglang #33915: the cap is given to a run, and the plan's kernel has none."""

    capabilities = FlashInfer.capabilities.with_changes(options={"logit_cap": True})


class WindowsInVerify(FlashInfer):
    """sglang #39287: keys from offset 0, and a mask that is laid out for the whole prefix."""

    capabilities = FlashInfer.capabilities.with_changes(
        windows={"modes": {"decode", "target-verify"}, "smallest": 1, "layers": "one"}
    )


class SharedKV(FlashInfer):
    """Layers that share KV give None for k and v: an extend attends slots 0, 1, ... of the pool, whoever owns them."""

    declared = dataclasses.replace(FlashInfer.declared, reads_back=True)


FlashAttention3: Any = backend_class("fa3_mla")


class MLATrees(FlashAttention3):
    """The second pass of a tree has a table of slots, and reads it as one of pages (GPU only)."""

    capabilities = FlashAttention3.capabilities.with_changes(bounds={"max_topk": 4})

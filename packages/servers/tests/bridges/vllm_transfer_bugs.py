"""A bug of hand-overs, put back into vLLM's NIXL worker of 0.33.0: what the kit says of it.

    PYTHONPATH=packages/servers/tests/bridges attn-testkit run --backend vllm_transfer_bugs:TrimmedAtEnd --mode decode

It changes one method, and nothing of how it is driven. Importing this imports vLLM.
"""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

from attn_testkit.contract import HandOver
from attn_testkit_servers.bridges.vllm import backend_class

Received: Any = backend_class("triton_pd")

# Imported after the bridge has prepared the process.
_worker: Any = importlib.import_module(
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker"
).NixlBaseConnectorWorker


class TrimmedAtEnd(Received):
    """vllm #48758, merged (push): with a cached prefix the sender's last blocks are left out, and not the first."""

    def receive(self, handed: HandOver) -> None:
        """Leave out the sender's last blocks."""

        def wrong(worker: Any, *, decode_block_ids: Any, prefill_block_ids: Any, **_: Any) -> Any:
            pairs = zip(decode_block_ids, prefill_block_ids, strict=True)
            return decode_block_ids, [theirs[: len(ours)] for ours, theirs in pairs]

        with mock.patch.object(_worker, "_apply_prefix_caching", wrong):
            super().receive(handed)

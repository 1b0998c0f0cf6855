"""``torch_native`` that knows its mode, and helpers of its bugs."""

from __future__ import annotations

from copy import copy

import torch
from parents_launchers import wide

from attn_testkit.backends.torch_native import TorchNativeBackend

MLA = {
    "heads": {"families": {"mla"}, "head_dims": {512}, "mla_rope_dims": {64}},
    "kv_pool": {"page_sizes": {1, 16, 64}},
}


def changed(batch, **fields):
    """A batch with other fields. A replay has a view of a batch, and ``replace`` takes only dataclasses."""
    other = copy(batch)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def unwritten(out, rows):
    """Rows that a kernel does not write hold what the allocation holds; here that is NaN."""
    return out.masked_fill(rows[:, None, None], torch.nan)


class Native(TorchNativeBackend):
    """``torch_native`` that knows its mode, and whether a graph is made or replayed."""

    capabilities = wide("decode", "extend")
    eager = True

    def init_forward_metadata(self, batch):
        self.eager = True
        self.init_forward_metadata_in_graph(batch)

    def init_forward_metadata_out_graph(self, batch, in_capture=False):
        self.eager = False

    def init_forward_metadata_in_graph(self, batch):
        self.mode = batch.forward_mode
        super().init_forward_metadata_in_graph(batch)

    def is_fp8(self):
        return self.context.kv_pool.dtype == torch.float8_e4m3fn

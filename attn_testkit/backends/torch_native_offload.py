"""``torch_native`` as a server that moves K and V to the host and back, layer by layer on the stream for copies."""

from __future__ import annotations

from itertools import groupby

import torch
from typing_extensions import override

from ..contract import HOST_LAYOUTS, AttentionLayer, BackendContext, ForwardBatch, Offloads, Transfer
from .offloading import pages_to_device, pages_to_host, parts_of
from .torch_native import TorchNativeBackend
from .torch_native_handed import TorchNativeHandedBackend


def _after(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event after the present work of a stream."""
    event: torch.cuda.Event = stream.record_event()
    return event


class TorchNativeOffloadBackend(TorchNativeBackend):
    """Copies whole pages. A forward waits for the pages of its layer, and a replay for those of all layers."""

    capabilities = TorchNativeHandedBackend.capabilities.with_changes(
        kv_pool={"page_sizes": {1, 4, 16}, "kv_layouts": {"nhd", "hnd", "layers-in-block"}},
        receives=None,
        offloads=Offloads(host_layouts=frozenset(HOST_LAYOUTS), by_layer=True),
    )

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._arriving: dict[int, list[torch.cuda.Event]] = {}
        """Events after the copies of each layer for which no forward has waited."""

    @override
    def offload(self, transfer: Transfer) -> torch.cuda.Event:
        """Copy pages to the host, after the work that stores them."""
        transfer.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(transfer.stream):
            for part in parts_of(self.context, transfer):
                pages_to_host(part)
        return _after(transfer.stream)

    @override
    def reload(self, transfer: Transfer) -> torch.cuda.Event:
        """Copy pages to the device, after the work that uses their slots, with an event for each layer."""
        transfer.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(transfer.stream):
            for layer_id, parts in groupby(parts_of(self.context, transfer), lambda part: part.layer_id):
                for part in parts:
                    pages_to_device(part)
                self._arriving.setdefault(layer_id, []).append(_after(transfer.stream))
        return _after(transfer.stream)

    def _wait_for(self, layer_id: int) -> None:
        for event in self._arriving.pop(layer_id, ()):
            torch.cuda.current_stream().wait_event(event)

    @override
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Plan without a wait: each forward waits for its layer."""
        self.init_forward_metadata_in_graph(batch)

    @override
    def init_forward_metadata_out_graph(self, batch: ForwardBatch, in_capture: bool = False) -> None:
        """Wait for all layers: the forwards of a graph are replayed without Python."""
        for layer_id in list(self._arriving):
            self._wait_for(layer_id)

    @override
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Wait for the pages of the layer whose keys are read: the end of a page is written, too."""
        target = layer.kv_sharing_target_layer_id
        self._wait_for(layer.layer_id if target < 0 else target)
        return super().forward(q, k, v, layer, batch, save_kv_cache, out)

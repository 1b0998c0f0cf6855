"""Two backends for ``attn-testkit demo``: a decode whose CUDA graph keeps the longest length of its capture batch, and
the same one fixed."""

from __future__ import annotations

from .graph_faults import BakedMaxLength


class StaleLength(BakedMaxLength):
    """Launches for the longest request of the batch, counted on the host. A graph repeats the count of its capture.

    TensorRT-LLM #17273, vLLM #41834.
    """


class Fixed(BakedMaxLength):
    """Launches for the longest request that the server may have, which is the same for every batch."""

    def init_forward_metadata_out_graph(self, batch: object, in_capture: bool = False) -> None:
        """Fill the buffers, with the bound in place of the count."""
        super().init_forward_metadata_out_graph(batch, in_capture)  # type: ignore[arg-type]
        self.max_len = self.context.max_context_len

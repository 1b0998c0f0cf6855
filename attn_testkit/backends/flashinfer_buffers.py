"""Buffers that graphs of FlashInfer's wrappers read, at their largest size; each plan fills them for the next
replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attn_testkit.contract import BackendContext

from .flashinfer_plan import pages_per_request


@dataclass(frozen=True)
class GraphBuffers:
    """Buffers of one list of keys of R requests, shared by all buckets; int32, except for the mask."""

    qo_indptr: torch.Tensor
    """[R + 1]."""
    kv_indptr: torch.Tensor
    """[R + 1], in pages."""
    kv_indices: torch.Tensor
    """[pages of all requests]."""
    last_page_len: torch.Tensor
    """[R]."""
    kv_lens: torch.Tensor
    """[R], in tokens: MLA's wrapper reads them instead of the lengths of last pages."""
    mask: torch.Tensor
    """[bytes] uint8: a custom mask, packed."""
    mask_indptr: torch.Tensor
    """[R + 1], in bytes."""

    @classmethod
    def sized(cls, context: BackendContext, requests: int, pages: int, mask_bytes: int = 0) -> GraphBuffers:
        """Zeroed buffers for a number of requests, and a number of pages of all requests."""

        def zeros(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=context.device)

        return cls(
            zeros(requests + 1), zeros(requests + 1), zeros(pages), zeros(requests), zeros(requests),
            zeros(mask_bytes, torch.uint8), zeros(requests + 1),
        )  # fmt: skip

    @classmethod
    def of_requests(cls, context: BackendContext, requests: int, masked: bool = False) -> GraphBuffers:
        """Buffers for all keys of a number of requests; ``masked``: with a mask for target-verify."""
        pages = pages_per_request(context)
        mask_bytes = -(-context.num_draft_tokens * pages * context.page_size // 8) if masked else 0
        return cls.sized(context, requests, requests * pages, requests * mask_bytes)

    @classmethod
    def of_part(cls, context: BackendContext, max_bs: int, max_num_tokens: int) -> GraphBuffers:
        """Buffers for a KV split in pages of one slot, with a mask for every mode."""
        # A request more than the batch, for what MLA's graphs are filled up with.
        requests, keys = max_bs + 1, context.max_context_len + context.num_draft_tokens
        return cls.sized(context, requests, requests * keys + max_num_tokens, max_num_tokens * keys // 8 + requests)

    @classmethod
    def of_forwards(cls, context: BackendContext, max_bs: int) -> tuple[GraphBuffers, ...]:
        """Buffers for each forward of the longest draft; none without drafts."""
        requests = max_bs * context.draft_branches
        forwards = context.speculative_num_steps - 1 if requests else 0
        return tuple(cls.of_requests(context, requests) for _ in range(forwards))

    def for_decode(self, requests: int) -> dict[str, Any]:
        """Arguments of a decode wrapper."""
        return {
            "paged_kv_indptr_buffer": self.kv_indptr[: requests + 1],
            "paged_kv_indices_buffer": self.kv_indices,
            "paged_kv_last_page_len_buffer": self.last_page_len[:requests],
        }

    def for_prefill(self, requests: int, masked: bool) -> dict[str, Any]:
        """Arguments of a prefill wrapper. A wrapper with a mask buffer always stays in custom-mask mode."""
        return {
            "qo_indptr_buf": self.qo_indptr[: requests + 1],
            "paged_kv_indptr_buf": self.kv_indptr[: requests + 1],
            "paged_kv_indices_buf": self.kv_indices,
            "paged_kv_last_page_len_buf": self.last_page_len[:requests],
            "custom_mask_buf": self.mask if masked else None,
            "mask_indptr_buf": self.mask_indptr[: requests + 1] if masked else None,
        }

    def for_mla(self, requests: int) -> dict[str, Any]:
        """Arguments of an MLA wrapper."""
        return {
            "qo_indptr": self.qo_indptr[: requests + 1],
            "kv_indptr": self.kv_indptr[: requests + 1],
            "kv_indices": self.kv_indices,
            "kv_len_arr": self.kv_lens[:requests],
        }

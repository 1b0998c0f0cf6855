"""The runner modes in which a server runs a backend, and the two executions: eager and CUDA graph."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Execution", "ForwardMode"]


class ForwardMode(StrEnum):
    """The forward modes of a server: decode, the modes of speculative decoding (EAGLE-style), and prefill.

    ============================ ==================== ===================== ========================================
    mode                         tokens per request   ``seq_lens[i]``       keys that a query row sees
    ============================ ==================== ===================== ========================================
    ``DECODE``                   1                    prefix + 1            all ``seq_lens`` keys
    ``TARGET_VERIFY``            N (a draft tree)     prefix only           the prefix, its ancestors and itself
    ``DRAFT_EXTEND`` (v1)        1..S+1, ragged       prefix + accepted     causal
    ``DRAFT_EXTEND_V2``          N, uniform           prefix + N            causal
    ``EXTEND`` (prefill)         1 and more, ragged   prefix + new          causal
    ``DRAFT_DECODE``             1 in each branch     prefix only           the prefix, its branch's tokens and itself
    ============================ ==================== ===================== ========================================

    If layers are not causal (``AttentionLayer.causal``), rows of an extend or a target-verify see all keys of their
    request, the step's own included.

    ``EXTEND`` is SGLang's EXTEND and MIXED: new tokens over a cached prefix of any length, which other requests may
    share. A long prompt comes in chunks; each chunk becomes part of the next one's prefix. A request that decodes in
    the same batch as prompts has a single new token. Nothing in a batch distinguishes a decode row from a prompt's
    last token, so MIXED is not a separate mode.

    ``DRAFT_DECODE`` is a draft model's loop of several forwards, planned at once. SGLang runs it as DECODE with a
    ``spec_info`` and a multi-step backend. ``DraftDecodeInput`` describes its rows and slots.

    A backend must test for verify and draft-extend *before* it calls ``is_extend()``: both are extends, and neither
    has the ``extend_*`` fields of an ``EXTEND`` in a graph's replay view.
    """

    DECODE = "decode"
    TARGET_VERIFY = "target-verify"
    DRAFT_EXTEND = "draft-extend"
    DRAFT_EXTEND_V2 = "draft-extend-v2"
    EXTEND = "extend"
    DRAFT_DECODE = "draft-decode"

    def is_decode(self) -> bool:
        """True for decode: one new token per request."""
        return self is ForwardMode.DECODE

    def is_draft_decode(self) -> bool:
        """True for draft-decode: one new token per branch of each request and forward; ``seq_lens`` is the prefix
        only."""
        return self is ForwardMode.DRAFT_DECODE

    def is_target_verify(self) -> bool:
        """True for target-verify: N draft-tree nodes per request; ``seq_lens`` is the prefix only."""
        return self is ForwardMode.TARGET_VERIFY

    def is_draft_extend(self, include_v2: bool = False) -> bool:
        """True for draft-extend v1 (ragged accepted tokens, packed); with ``include_v2`` also for v2."""
        return self is ForwardMode.DRAFT_EXTEND or (include_v2 and self is ForwardMode.DRAFT_EXTEND_V2)

    def is_draft_extend_v2(self) -> bool:
        """True for draft-extend v2: N tokens per request, accepted or not."""
        return self is ForwardMode.DRAFT_EXTEND_V2

    def is_extend(self, include_draft_extend_v2: bool = False) -> bool:
        """True for prefill, verify and draft-extend v1, for v2 only on request: the servers' own rule."""
        return self in (ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND) or (
            include_draft_extend_v2 and self is ForwardMode.DRAFT_EXTEND_V2
        )

    def is_speculative(self) -> bool:
        """True for target-verify and both draft-extends, whose rows come from a draft tree."""
        return self in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2)

    def is_ragged(self) -> bool:
        """True if requests have different numbers of rows, packed without gaps; only the last row of each gives
        logits."""
        return self in (ForwardMode.DRAFT_EXTEND, ForwardMode.EXTEND)


class Execution(StrEnum):
    """Execution of a step. Eager: the Python code runs at every step. Graph: it ran once, at capture; kernels are
    replayed."""

    EAGER = "eager"
    GRAPH = "graph"

"""How a server drives a backend: the runner modes and the two ways of executing them."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Execution", "ForwardMode"]


class ForwardMode(StrEnum):
    """The forward modes of a server: decode, what speculative decoding adds (EAGLE-style), and prefill.

    ============================ ==================== ===================== ========================================
    mode                         new tokens a request ``seq_lens[i]``       which keys a query row sees
    ============================ ==================== ===================== ========================================
    ``DECODE``                   1                    prefix + 1            all ``seq_lens`` keys
    ``TARGET_VERIFY``            N (a draft tree)     prefix only           the prefix, its ancestors and itself
    ``DRAFT_EXTEND`` (v1)        1..S+1, ragged       prefix + accepted     causal
    ``DRAFT_EXTEND_V2``          N, uniform           prefix + N            causal
    ``EXTEND`` (prefill)         1 and more, ragged   prefix + new          causal
    ``DRAFT_DECODE``             1 in each branch     prefix only           the prefix, its branch's tokens and itself
    ============================ ==================== ===================== ========================================

    Where layers are not causal (``AttentionLayer.causal``), rows of an extend or a target-verify see all keys of their
    request, the step's own included.

    ``EXTEND`` is what SGLang calls EXTEND and MIXED: new tokens over a cached prefix of any length, which other
    requests may share; a long prompt comes in chunks, each of which is the next one's prefix; and a request that
    decodes beside prompts is one with a single new token. A batch carries nothing that tells a decode row from a
    prompt's last token, so MIXED is no mode of its own here.

    ``DRAFT_DECODE`` is a draft model's loop of several forwards, planned at once: what SGLang runs as DECODE with a
    ``spec_info`` and a multi-step backend. ``DraftDecodeInput`` has its rows and slots.

    A backend must ask for verify and draft-extend *before* it asks ``is_extend()``: both are extends, and neither
    carries the ``extend_*`` fields of an ``EXTEND`` in a graph's replay view.
    """

    DECODE = "decode"
    TARGET_VERIFY = "target-verify"
    DRAFT_EXTEND = "draft-extend"
    DRAFT_EXTEND_V2 = "draft-extend-v2"
    EXTEND = "extend"
    DRAFT_DECODE = "draft-decode"

    def is_decode(self) -> bool:
        """One new token for each request."""
        return self is ForwardMode.DECODE

    def is_draft_decode(self) -> bool:
        """One new token for each branch of each request, in several forwards; ``seq_lens`` is the prefix alone."""
        return self is ForwardMode.DRAFT_DECODE

    def is_target_verify(self) -> bool:
        """N draft-tree nodes for each request; ``seq_lens`` is the prefix alone."""
        return self is ForwardMode.TARGET_VERIFY

    def is_draft_extend(self, include_v2: bool = False) -> bool:
        """Ragged accepted tokens, packed (v1); with ``include_v2`` also the uniform kind."""
        return self is ForwardMode.DRAFT_EXTEND or (include_v2 and self is ForwardMode.DRAFT_EXTEND_V2)

    def is_draft_extend_v2(self) -> bool:
        """N tokens for each request, accepted or not."""
        return self is ForwardMode.DRAFT_EXTEND_V2

    def is_extend(self, include_draft_extend_v2: bool = False) -> bool:
        """True for prefill, verify and draft-extend v1, for v2 only on request: the servers' own rule."""
        return self in (ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND) or (
            include_draft_extend_v2 and self is ForwardMode.DRAFT_EXTEND_V2
        )

    def is_speculative(self) -> bool:
        """The rows come from a draft tree: verify and both draft-extends."""
        return self in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2)

    def is_ragged(self) -> bool:
        """Requests have different numbers of rows, packed without gaps; logits are of each one's last row alone."""
        return self in (ForwardMode.DRAFT_EXTEND, ForwardMode.EXTEND)


class Execution(StrEnum):
    """Eager: the Python runs at every step. Graph: it ran once, at capture, and only kernels are replayed."""

    EAGER = "eager"
    GRAPH = "graph"

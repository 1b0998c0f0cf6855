"""Known bugs of classes D to I and L to N that have no fault here, each with the reason."""

from __future__ import annotations

from .catalogue import LeftOut

__all__ = ["LEFT_OUT_EAGER"]

_NO_EFFECT_ON_RESULTS = (
    LeftOut(
        "page-table-prefetch-past-end",
        "the value that is read past the table is discarded; only a guard page behind the table shows it",
    ),
    LeftOut("hook-sees-lanes-past-chunk", "a user's logits hook; no backend of the contract calls one"),
    LeftOut(
        "hybrid-freed-blocks-still-in-table",
        "pages before a window belong to the request as long as another layer has no window; kernels load whole tiles "
        "of them and mask, so they may not be taken away here",
    ),
)
_HARDWARE = (
    LeftOut(
        "swa-fp8-consumer-stops-early",
        "a pipeline inside one kernel that never ends; hangs are modelled by the host's side of "
        "replay-page-count-mismatch-hang",
    ),
    LeftOut(
        "width-chosen-from-logical-size",
        "needs a strided pool whose span is beyond 2 GiB; overflow itself is page-times-stride-32-bit",
    ),
)
_OTHER_ROOMS = (
    LeftOut("plan-uses-fewer-heads-than-layer", "needs layers with different head counts; the test model has one"),
    LeftOut("rope-offset-ignored-in-decode", "rotation inside the attention kernel is not part of the contract"),
    LeftOut(
        "kv-indices-row-without-topk",
        "multi-step drafting with topk branches in one batch is not one of the runner modes",
    ),
    LeftOut("accept-index-wrong-stride", "the acceptance walk is the server's; a backend has no hand in it"),
    LeftOut("gather-baseline-minus-one", "the drafter's gather of hidden states, outside a backend"),
    LeftOut("draft-vocab-offset-vs-absolute", "the draft model's vocabulary map, outside a backend"),
    LeftOut(
        "exp2-method-depends-on-mask",
        "equal bits in decode and in an extend of the same row are claimed by no backend here",
    ),
)

LEFT_OUT_EAGER: tuple[LeftOut, ...] = _NO_EFFECT_ON_RESULTS + _HARDWARE + _OTHER_ROOMS

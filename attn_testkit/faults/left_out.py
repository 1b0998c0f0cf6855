"""Known bugs that have no fault here, each with the reason. Classes D to I and L to N are in ``left_out_eager.py``."""

from __future__ import annotations

from .catalogue import LeftOut
from .left_out_eager import LEFT_OUT_EAGER

__all__ = ["LEFT_OUT"]

_DEVICES_AND_STREAMS = (
    LeftOut(
        "semaphore-keyed-by-device-only",
        "a race of two streams; the drives give a backend one stream, as a server does",
    ),
    LeftOut(
        "kernel-ignores-current-stream",
        "a race with a delayed producer on another stream, which needs real asynchronous kernels",
    ),
    LeftOut("wrong-device-default", "needs two devices"),
    LeftOut("shared-mapping-overwritten-during-replay", "a race between a replay and a scheduler's stream"),
    LeftOut(
        "read-before-producer-visible", "a race inside programmatic dependent launch, which a torch backend has not"
    ),
    LeftOut("rope-after-cp-gather-uses-local-positions", "needs two ranks: class O is context parallelism"),
    LeftOut("empty-shard-not-neutral", "needs two ranks; combine-all-minus-inf is the kernel's side of it"),
)
_SERVERS = (
    LeftOut(
        "capture-uses-other-graphs-views",
        "the speculator captured with the target's objects; graph-key-missing-query-len is the backend's form of it",
    ),
    LeftOut("idle-metadata-for-wrong-mode", "an idle rank; no mode of the kit is idle"),
    LeftOut("idle-metadata-outlives-pool-row", "an idle step; no mode of the kit is idle"),
    LeftOut("stale-request-state-fakes-prefill", "state of requests that a scheduler keeps; a backend is not given it"),
    LeftOut("freed-duplicate-pages-still-mapped", "a scheduler's page table; the kit makes its own"),
    LeftOut("kv-move-ignores-page-layout", "moving accepted rows is the server's; a backend has no hand in it"),
    LeftOut("graph-output-view-escapes", "the runner returned views; a backend may reuse its output (a control does)"),
    LeftOut("upper-bound-treated-as-exact", "CPU lengths of this contract are exact, or absent"),
)
_NO_EFFECT = (
    LeftOut(
        "pad-seqlen-wrong-neutral-value",
        "the value is the backend's own answer to a hook here; what a wrong one does is "
        "pad-row-nan-spreads-via-batch-scale and pad-fill-underflows-uniform-width",
    ),
    LeftOut(
        "no-work-tile-marker-equals-batch", "the surplus tile repeats a padded row; upstream it read past a buffer"
    ),
    LeftOut("verify-pads-keep-capture-max-lens", "costs time only: results of live rows are right"),
    LeftOut(
        "indexer-output-fresh-in-graph",
        "an output that is allocated inside a capture is legitimate; the harm came from the pool's layout",
    ),
)

LEFT_OUT: tuple[LeftOut, ...] = _DEVICES_AND_STREAMS + _SERVERS + _NO_EFFECT + LEFT_OUT_EAGER

"""Broken backends whose failures once pointed elsewhere: what the first finding, or the one named, says of each.

A case each, the first that an audit catches it by.
"""

from __future__ import annotations

from functools import lru_cache

import pytest
from in_process import plan_run, run_item

from attn_testkit.faults import all_faults
from attn_testkit.results import Finding

FAULTS = {fault.slug: fault for fault in all_faults()}
LEAN = "decode-mqa4-d128-fp32-p16-k0.1.16-contiguous-shifted-kvfp8e4m3-w11-cap1.5-sink-b4prod"
LONG = "decode-mqa4-d128-bf16-p64-k300.70.12-shuffled-gauss-w0-cap1.5-b6nan"
BRANCHES = "draft-decode-mha2-d64-bf16-p4-k0.1.8-topk3steps6-reversed-peaked-w4-b3prod"
PARTS = "draft-extend-v2-gqa2x2-d64-bf16-p4-k11.0.4.1.70-n2a2.1.2.1.2-shuffled-peaked-w0-lsetokens3own-b6prod"
PACKED = "draft-extend-gqa2x2-d32-bf16-p1-k1.2.5.9.14.2.30-n2a1x7-contiguous-gauss-cap1.5-b10nan"
V1 = "draft-extend-gqa8x2-d64-fp16-p4-k7.8.9-n2a1x3-interleaved-gauss-kvfp8e4m3-w4000-cap1.5-b3prod"
TREE = "target-verify-gqa2x2-d128-fp32-p16-k15.16.17-t0.0.1.1.3-shared-mean-w0-sink-b4nan"
WIDE = "draft-extend-v2-gqa3x2-d32-fp16-p4-k0.1.8-n6a6x3-reversed-gauss-kvfp8e4m3-w4-cap1.5-sink-b4nan"
STALE = "decode-gqa8x2-d64-bf16-p4-k1.2.5.9.14.2.30-reversed-footprint-w4-b10stale"
PROMPTS = "extend-gqa8x2-d64-bf16-p64-k1.2.5.9.14.2.30-n1a1x7-contiguous-footprint-w4000-sink-b8stale"
ONE = "target-verify-gqa2x2-d64-bf16-p16-k300-chain4-shuffled-gauss-b1prod"


@lru_cache
def findings(slug: str, case: str, execution: str) -> tuple[Finding, ...]:
    """Of one case-run, in this process."""
    plan = plan_run(backends=[FAULTS[slug].spec], device="cpu", cases=[case], executions=[execution])
    (item,) = (item for item in plan.items if item.execution == execution)
    return run_item(item, plan).findings


TOLD = [
    # What the numbers are right for.
    ("sink-swallowed-by-kwargs", LEAN, "eager", "right without sinks"),
    ("sink-scaled-like-a-logit", LEAN, "eager", "right with sinks that are scaled as logits are"),
    ("sink-in-base-two", LEAN, "eager", "right with sinks in base 2"),
    ("k-scale-lost", LEAN, "eager", "right without k_scale"),
    ("kv-scale-lost-in-positional-args", LEAN, "eager", "right without v_scale"),
    ("k-scale-used-for-v", LEAN, "eager", "right with k_scale in place of v_scale"),
    ("softcap-before-scale", LEAN, "eager", "right with a soft cap of products that are not scaled yet"),
    ("softcap-passed-at-run-not-plan", LEAN, "eager", "right without a soft cap"),
    ("scale-applied-twice", LEAN, "eager", "right with a scale that is applied twice"),
    ("kv-of-layer-zero", LEAN, "eager", "right with the values of layer 0 in all layers"),
    ("heads-mapped-round-robin", PACKED, "eager", "right for query head h with KV head h % 2"),
    (
        "declares-new-rows-as-given",
        "decode-gqa8x2-d64-bf16-p16-k3.37.9.17-contiguous-gauss-kvfp8e4m3-w4000-b4prod",
        "eager",
        "right for new rows as the pool stores them",
    ),
    # Whose result stands in a row, or none.
    (
        "buffers-of-layers-overlap",
        STALE,
        "eager",
        "request 1 of layer 0 holds the result of request 0 of layer 1 and so on: outputs of layers lie in the same",
    ),
    (
        "no-kernel-for-a-page-size",
        "decode-mha2-d64-bf16-p8-k21.3-shuffled-gauss-b2prod",
        "eager",
        "the output is 0 thr",
    ),
    ("semaphore-not-reset-when-metadata-reused", LONG, "eager", "0 throughout in every layer but the first"),
    ("decode-plan-assumes-one-row", WIDE, "eager", "only rows 0-2 of the output are written"),
    ("combine-all-minus-inf", LONG, "eager", "nothing foreign is read. 0 / 0, or -inf minus -inf"),
    ("empty-part-output-is-nan", PARTS, "eager", "in this case KV tokens come in parts"),
    (
        "combine-without-maximum",
        "decode-mqa4-d64-fp16-p1-k32.128.64.16-interleaved-negative-w4000-b7small",
        "eager",
        "a NaN where logits are large: look at exponentials that are taken without the maximum",
    ),
    ("lse-heads-before-rows", PARTS, "eager", "heads lie before rows in its memory"),
    # Which KV tokens.
    ("draft-node-blind-to-itself", TREE, "eager", "a draft node does not see its own KV token"),
    ("draft-copied-page-left-out", BRANCHES, "eager", "a branch attends to what another one drafted"),
    ("causal-aligned-to-the-start", PACKED, "eager", "row 0 attends to KV tokens 0..0, as if there were no prefix"),
    (
        "no-prefix-path-for-the-whole-batch",
        "extend-gqa2x2-d64-bf16-p64-k300.70.12-n38a17.64.33-reversed-mean-kvfp8e4m3-w11-cap1.5-sink-b6small",
        "eager",
        "the whole prefix is missing, new tokens alone are attended to",
    ),
    (
        "prompt-attended-before-it-is-stored",
        PROMPTS,
        "eager",
        "nothing is stored in their slots yet: attention comes before the store",
    ),
    ("v1-length-at-full-width", PACKED, "eager", "all of its own KV tokens are read, and slots behind them"),
    ("draft-table-without-branches", BRANCHES, "graph", "page 0 is read, where padding lives"),
    (
        "fp8-store-does-not-saturate",
        "extend-gqa2x2-d64-bf16-p1-k2x2-n2a2x2-interleaved-saturated-kvfp8e4m3-b2prod",
        "eager",
        "it holds NaN where a value is beyond the largest FP8 number",
    ),
    ("swa-page-table-starts-at-window-page", LEAN, "graph", "keys are read elsewhere (a page table"),
    # What belongs to the step, and what to the padding or the step before it.
    ("pad-indptr-tail-runs-backwards", LONG, "graph", "what padded rows hold reaches live ones"),
    ("replan-skipped-for-permuted-lengths", LONG, "graph", "the step before has the same lengths and other requests"),
    ("grid-covers-the-capture-lengths", ONE, "graph", "fixed when it was captured"),
    ("dispatcher-drops-the-verify-mask", TREE, "graph", "a wrapper has to hand out its child's"),
]


@pytest.mark.parametrize(("slug", "case", "execution", "said"), TOLD, ids=[told[0] for told in TOLD])
def test_the_hint_names_what_is_wrong(slug: str, case: str, execution: str, said: str) -> None:
    first = findings(slug, case, execution)[0]
    assert said in first.hint, first


MISLED = [
    ("v1-length-at-full-width", PACKED, "eager", "uniform stride"),
    ("verify-forgets-draft-tokens", TREE, "eager", "0 * NaN"),
    ("swa-page-table-starts-at-window-page", LEAN, "graph", "0 * NaN"),
    ("block-table-indexed-by-token", LEAN, "eager", "page 0 is read"),
    (
        "first-key-of-a-split-in-none",
        "draft-extend-v2-gqa2x2-d64-bf16-p16-k4097.300.33-n2a2x3-reversed-codes-b4prod",
        "eager",
        "outputs of layers",
    ),
    (
        "packed-mask-row-width-per-request",
        "target-verify-gqa2x2-d128-fp32-p16-k9.40-t0.0.0.1.1.1.2.2.2.3.3.3.4.4.4.5.5.5.6.6.6.7.7.7.8.8.8.9.9.9.10.10.10"
        ".11.11.11.12.12.12-shared-mean-b3nan",
        "eager",
        "diagonal",
    ),
    ("page-size-baked-in", PACKED, "eager", "uniform stride"),
    ("draft-table-without-branches", BRANCHES, "graph", "maximum length"),
    ("pad-indptr-tail-runs-backwards", LONG, "graph", "missing"),
    ("semaphore-not-reset-when-metadata-reused", LONG, "eager", "all KV tokens are missing"),
    ("buffers-of-layers-overlap", STALE, "eager", "strides"),
    ("prompt-attended-before-it-is-stored", PROMPTS, "eager", "off by 1"),
    ("sink-swallowed-by-kwargs", LEAN, "eager", "look at"),
    ("grid-covers-the-capture-lengths", ONE, "graph", "off by"),
]


@pytest.mark.parametrize(("slug", "case", "execution", "said"), MISLED, ids=[told[0] for told in MISLED])
def test_no_hint_guesses_at_what_is_known(slug: str, case: str, execution: str, said: str) -> None:
    assert said not in findings(slug, case, execution)[0].hint


@pytest.mark.parametrize(
    ("slug", "tokens"), [("block-zeroing-spills-into-neighbour", "KV token 8 of request 2 does"),
                         ("swa-write-locs-synthesised-zero", "KV token 7 of request 0 does")]
)  # fmt: skip
def test_a_number_that_is_wrong_since_kv_memory_is_says_so_and_nothing_else(slug: str, tokens: str) -> None:
    memory, number = findings(slug, V1, "eager")
    assert memory.check == "writes-own-kv"
    last = number.hint.splitlines()[-1]
    assert last.startswith(f"{tokens} not lie in the pool as stored")
    assert not any(word in number.hint for word in ("look at", "missing", "uniform stride"))

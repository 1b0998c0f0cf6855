"""Broken backends whose failures once pointed elsewhere: what the first finding, or the one named, says of each.

A case each, the first that an audit catches it by. A hint that the bug's entry names is not repeated here if a test
of its kind has it by hand: the audit compares it.
"""

from __future__ import annotations

from functools import lru_cache

import pytest
from in_process import plan_run, run_item

from attn_testkit.results.finding import Finding
from attn_testkit_corpus.faults.catalogue import entry_of

LEAN = "decode-mqa4-d128-fp32-p16-k0.1.16-contiguous-shifted-kvfp8e4m3-w11-cap1.5-sink-b4prod"
LATENT = (
    "decode-mla2-d32r64-bf16-p128-k1.2.5.9.14.2.30-contiguous-gauss-kvfp8e4m3-w4-cap1.5-sink-layers3from0varied"
    "-b10stale"
)
LONG = "decode-mqa4-d128-bf16-p64-k300.70.12-shuffled-gauss-w0-cap1.5-b6nan"
BRANCHES = "draft-decode-mha2-d64-bf16-p4-k0.1.8-topk3steps6-reversed-peaked-w4-b3prod"
PARTS = "draft-extend-v2-gqa2x2-d64-bf16-p4-k11.0.4.1.70-n2a2.1.2.1.2-shuffled-peaked-w0-lsetokens3merged-b6prod"
PACKED = "draft-extend-gqa2x2-d32-bf16-p1-k1.2.5.9.14.2.30-n2a1x7-contiguous-gauss-cap1.5-b10nan"
V1 = "draft-extend-gqa8x2-d64-fp16-p4-k7.8.9-n2a1x3-interleaved-gauss-kvfp8e4m3-w4000-cap1.5-b3prod"
TREE = "target-verify-gqa2x2-d128-fp32-p16-k15.16.17-t0.0.1.1.3-shared-mean-w0-sink-b4nan"
WIDE = "draft-extend-v2-gqa3x2-d32-fp16-p4-k0.1.8-n6a6x3-reversed-gauss-kvfp8e4m3-w4-cap1.5-sink-b4nan"
ONE_HOT_TREE = "target-verify-gqa2x2-d64-bf16-p16-k7x2-t0.0.0-shared-one_hot-kvfp8e4m3-w4-b5nan"
STALE = "decode-gqa8x2-d64-bf16-p4-k1.2.5.9.14.2.30-reversed-one_hot-w4-b10stale"
PROMPTS = "extend-gqa8x2-d64-bf16-p64-k1.2.5.9.14.2.30-n1a1x7-contiguous-one_hot-w4000-sink-b8stale"
SHARED = "draft-extend-v2-mha2-d64-bf16-p64-k63.64.65-n2a1x3-shared-gauss-w4-sink-b4prod"
SWITCH = "decode-gqa2x2-d64-bf16-p1-k9.70.1.33.9.70.1.33.9.70.1.33-reversed-gauss-b12prod"
LATER_RANK = "draft-extend-gqa2x2-d64-bf16-p16-k21.40.4-n2a2x3-reversed-gauss-w7-cap1.5-layers3from5-b4prod"
V2 = "draft-extend-v2-gqa2x2-d64-fp16-p64-k7x2-n6a1.3-reversed-gauss-b2prod"
ONE_KEY_EACH = "decode-gqa4x2-d64-bf16-p16-k33-shuffled-gauss-b1prod"
SHORT_LAST = "draft-extend-mqa4-d32-bf16-p128-k3.261.65.17-n2a2x4-contiguous-gauss-kvfp8e4m3-w0-sink-b5prod"
UNPACKED = "draft-extend-v2-gqa2x2-d256-bf16-p32-k37-n4a1-contiguous-gauss-kvfp8e4m3-w46-cap1.5-b4prod"
NEGATIVE = "decode-mla2-d256r32-fp32-p16-k15.16.17-contiguous-negative-b4stale"
HOLES = "draft-decode-mqa4-d128-bf16-p16-k1.2.5.9.14.2.30-topk1steps2-shuffled-negative-sel16holesempty-b8prod"
TWO_ROWS = "draft-extend-gqa3x2-d128-fp16-p1-k13-n2a2-shuffled-peaked-w0-cap1.5-sink-layers3from0varied-b2prod"
CHUNKS_OF_64 = "extend-mamba4x2-d64-bf16-p16-k0.60.25.0-n19a70.1x3-shuffled-mild_decay-k64w4s32-b4prod"
LIKE_KEYS = "extend-gdn4x2-d64-bf16-p16-k0.17.0-n4a1x2.9-shuffled-like_keys-k64w4s32-layers3from5-b3prod"
SMALL_BUCKET = "decode-gqa8x2-d64-fp16-p16-k15.16.17-shared-negative-w4000-sink-b6small"
BLOCKS = "decode-mqa4-d128-bf16-p16-k300.70.12-reversed-negative-sel4of16holes-b4small"
PROMPT_OF_65 = "extend-mamba4x2-d64-bf16-p16-k0.40-n34a65.3-shuffled-strong_decay-k64w4s32-layers1from0-b2nan"
BIAS = "target-verify-gqa8x2-d64-bf16-p16-k130.9.1.40-t0.0.1.1-shuffled-gauss-w5-qqbias-cap1.5-sink-b5prod"
BIASED_PROMPTS = "extend-gqa8x2-d64-bf16-p16-k130.9.1.40-n13a7.40.3.1-shuffled-gauss-qqbias-b5prod"
ONE_ROW_EACH = "draft-extend-mha2-d32-fp16-p4-k3.21.5.17-n6a1x4-reversed-gauss-kvfp8e4m3-w4-b4prod"
FULL = "target-verify-gqa8x2-d64-fp16-p16-k15.16.17-t0.1.0.3.0.5.1-reversed-negative-kvfp8e4m3-w46-b6nan"
ONE = "target-verify-gqa2x2-d64-bf16-p16-k300-chain4-shuffled-gauss-b1prod"


@lru_cache
def findings(slug: str, case: str, execution: str) -> tuple[Finding, ...]:
    """Of one case-run, in this process."""
    plan = plan_run(backends=[entry_of(slug).spec], device="cpu", cases=[case], executions=[execution])
    (item,) = (item for item in plan.items if item.execution == execution)
    return run_item(item, plan).findings


BIG_POOL = "decode-gqa2x2-d64-bf16-p16-k9.37.1-shuffled-gauss-layers1from0-b4prod-bigpool"
TOLD = [
    ("slot-times-stride-in-32-bits", BIG_POOL, "eager", "passes with a small KV pool"),
    # Which plane of the pool is wrong.
    (
        "scales-of-stored-keys-reset",
        "draft-extend-gqa3x2-d64-bf16-p1-k1.2.5.9.14.2.30-n2a1x7-contiguous-gauss-kvfp8pertokenhead-w0-sink-b10prod",
        "eager",
        "only K scales changed, and K values, V values, V scales did not: all of them are 1",
    ),
    # What the numbers are right for.
    ("sink-scaled-like-a-logit", LEAN, "eager", "right with sinks that are scaled like logits"),
    ("k-scale-lost", LEAN, "eager", "right without k_scale"),
    ("kv-scale-lost-in-positional-args", LEAN, "eager", "right without v_scale"),
    ("k-scale-lost", LATENT, "eager", "keys of the FP8 pool are not multiplied by k_scale"),
    ("kv-scale-lost-in-positional-args", LATENT, "eager", "values of the FP8 pool are not multiplied by v_scale"),
    (
        "declares-new-rows-as-given",
        "decode-gqa8x2-d64-bf16-p16-k3.37.9.17-contiguous-gauss-kvfp8e4m3-w4000-b4prod",
        "eager",
        "right for new rows with the rounding of the pool",
    ),
    ("qq-bias-before-the-soft-cap", BIAS, "eager", "right for capped sums"),
    ("qq-bias-without-its-stride", BIASED_PROMPTS, "eager", "use its stride(0), which is larger than its width"),
    ("causal-from-padded-width", SHORT_LAST, "eager", "is that of 2 rows for every request"),
    ("v1-length-at-full-width", SHORT_LAST, "eager", "slots after them: probably a length that is too large"),
    ("first-hole-ends-the-row", HOLES, "eager", "the keys of a row after its first -1 are not attended to"),
    ("partial-stats-collide", TWO_ROWS, "eager", "may use the maximum or the sum of another row"),
    ("last-token-of-a-prompt-lost", PROMPT_OF_65, "eager", "not applied, the only one in its last chunk of 64 tokens"),
    ("chunk-decays-by-its-first-gate", CHUNKS_OF_64, "eager", "with the decay of the first row only"),
    ("row-before-left-out-of-a-chunk", LIKE_KEYS, "eager", "the strict mask of a chunk is off by one"),
    ("lengths-not-clipped-to-top-k", HOLES, "eager", "it reads 6 entries, one per key that it may see"),
    ("block-zero-for-minus-one", BLOCKS, "eager", "an entry of -1 that is loaded as block 0"),
    ("counters-left-to-the-next-layer", SMALL_BUCKET, "graph", "and layers share it: with one layer"),
    # What the fault hangs on.
    ("lse-wrong-when-split", SHARED, "eager", "without sinks the case passes if requests are cut to 16 KV tokens"),
    (
        "kernel-switch-off-by-one",
        SWITCH,
        "eager",
        "cut to 16 KV tokens, and fails from 17 on: probably not a wrong length",
    ),
    (
        "splits-of-the-first-row",
        "target-verify-mqa4-d64-bf16-p1-k254.510.1022-chain4-shuffled-plus_minus_one-b3prod",
        "eager",
        "fails from 257 on: probably not a wrong length, but later splits or tiles",
    ),
    ("settings-of-two-layers-by-turns", LATER_RANK, "eager", "passes with two layers, and fails with 3"),
    (
        "fp8-queries-limited-to-224",
        "draft-extend-v2-gqa2x2-d64-bf16-p1-k2x2-n2a2x2-reversed-large_queries-kvfp8e4m3-b2prod",
        "eager",
        "fails with those of large_queries data: look at the range of q",
    ),
    ("plans-at-layer-0", LATER_RANK, "eager", "if they begin at 0, nothing is raised"),
    (
        "local-attn-token-table-with-pages",
        LEAN,
        "eager",
        "passes without a sliding window; with one, only the layers that have it (11) are wrong",
    ),
    ("empty-kv-modes-disagree", LONG, "eager", "sum to 0.668, as if there were 2 more of logit 0 and value 0"),
    # Whose result stands in a row, or none.
    ("partial-stats-collide", SHARED, "eager", "of each wrong request only the last row is right"),
    ("output-stride-from-v", LEAN, "eager", "request 0 head 1 holds the result of request 1 head 0"),
    (
        "heads-in-pairs",
        "draft-extend-mha3-d64-bf16-p16-k9.70-n2a2x2-reversed-gauss-b3prod",
        "eager",
        "head 2 of 3 is all zeros",
    ),
    (
        "padding-taken-for-a-preempted-request",
        "decode-mqa4-d128-bf16-p64-k300.70.12-shuffled-gauss-w0-cap1.5-b6nan",
        "graph",
        "is not reset between replays: the replay is right if self.last",
    ),
    (
        "buffers-of-layers-overlap",
        STALE,
        "eager",
        "memory or overlap: request 1 of layer 0 holds the result of request 0 of layer 1 and so on",
    ),
    (
        "no-kernel-for-a-page-size",
        "decode-mha2-d64-bf16-p8-k21.3-shuffled-gauss-b2prod",
        "eager",
        "the output is all z",
    ),
    ("semaphore-not-reset-when-metadata-reused", LONG, "eager", "all zeros in every layer but the first"),
    ("decode-plan-assumes-one-row", WIDE, "eager", "only rows 0-2 of the output are written"),
    ("combine-all-minus-inf", LONG, "eager", "not read from foreign memory. Probably 0 / 0, or -inf minus -inf"),
    ("empty-part-output-is-nan", PARTS, "eager", "in this case some requests have no KV token in one of the splits"),
    (
        "combine-without-maximum",
        "decode-mqa4-d64-fp16-p1-k32.128.64.16-interleaved-negative-w4000-b7small",
        "eager",
        "a NaN where logits are large: look at exponentials without subtracting the maximum",
    ),
    (
        "products-of-16-bits-overflow",
        "extend-mqa4-d64-fp16-p1-k70.20-n2a2x2-shared-fp16_overflow-b2prod",
        "eager",
        "not finite where values are large: look at products of weights and values in 16 bits",
    ),
    (
        "bf16-rows-converted-to-fp16",
        "decode-mqa4-d64-bf16-p1-k70.20-contiguous-beyond_fp16-b2prod",
        "eager",
        "not finite where values are large: look at rows of bf16 that are converted to fp16",
    ),
    # Which KV tokens.
    ("second-request-kv-uses-q-offset", PACKED, "eager", "right for KV tokens from the offset of a"),
    (
        "model-window-in-full-layers",
        "decode-gqa4x2-d64-bf16-p16-k1.2.5.9.14.2.30-reversed-one_hot-w4one-b10stale",
        "eager",
        "what a window of 4 lets it see, which another layer has; its own layer has no window",
    ),
    (
        "new-tokens-open-a-page",
        WIDE,
        "eager",
        "from the start of the next page on, but begin after the last one of the",
    ),
    (
        "captured-lengths-in-graphs-alone",
        # The first values of its requests differ: rows of equal ones would look like those of another request.
        "decode-gqa8x2-d64-bf16-p4-k1.2.5.9.14.2.31-reversed-one_hot-w4-b10stale",
        "graph",
        "only KV token 0 is attended to, as if the length were 1",
    ),
    ("draft-copied-page-left-out", BRANCHES, "eager", "a branch attends to tokens of another one"),
    (
        "no-prefix-path-for-the-whole-batch",
        "extend-gqa2x2-d64-bf16-p64-k300.70.12-n38a17.64.33-reversed-mean-kvfp8e4m3-w11-cap1.5-sink-b6small",
        "eager",
        "the whole prefix is missing, only new tokens are attended to",
    ),
    (
        "prompt-attended-before-it-is-stored",
        PROMPTS,
        "eager",
        "attention runs before the store, or does not wait for it",
    ),
    ("v1-length-at-full-width", PACKED, "eager", "all of its own KV tokens are read, and slots after them"),
    ("draft-table-without-branches", BRANCHES, "graph", "page 0 is read, which is reserved for padding"),
    (
        "page-size-baked-in",
        ONE_ROW_EACH,
        "eager",
        "as if they had 16 slots, such as by a constant: of each 16 KV tokens",
    ),
    ("last-token-of-context-left-out", FULL, "graph", "only requests of max_context_len (54) KV tokens are wrong"),
    (
        "partial-last-page-dropped",
        "decode-mla2-d128r64-bf16-p128-k133-reversed-negative-b1prod",
        "eager",
        "which are right",
    ),
    ("partial-last-page-dropped", LATENT, "eager", "drops a last page that is not full: no request fills one of 128"),
    ("page-id-used-as-slot", LATENT, "eager", "pages of one slot, and fails with those of 128 and of other sizes"),
    (
        "fp8-store-does-not-saturate",
        "extend-gqa2x2-d64-bf16-p1-k2x2-n2a2x2-interleaved-saturated-kvfp8e4m3-b2prod",
        "eager",
        "it holds NaN for values beyond the largest FP8 number",
    ),
    ("swa-page-table-starts-at-window-page", LEAN, "graph", "keys are read from wrong slots (a page table"),
    # What the pool holds.
    (
        "cache-written-to-a-reshaped-copy",
        "decode-gqa8x2-d64-bf16-p4-k9.6.3-shuffled-gauss-kvfp8e4m3-kvlayersinblock-b4prod",
        "eager",
        "has layout layers-in-block: reshaping such a pool may give a copy",
    ),
    ("new-keys-attended-but-not-stored", PACKED, "eager", "it holds only zeros: its row was not stored"),
    (
        "captured-store-leaves-a-head-out",
        "decode-gqa2x2-d128-bf16-p4-k7.8.9-shared-mean-kvfp8e4m3-w4000-sink-b4stale",
        "graph",
        "KV head 1 of 2 is wrong in it, and the others are right",
    ),
    # What belongs to the step, and what to the padding or the step before it.
    ("pad-indptr-tail-runs-backwards", LONG, "graph", "data of padded rows reach real ones"),
    (
        "fp8-query-scale-of-padded-rows",
        "draft-extend-gqa2x2-d64-bf16-p4-k5.9.2-n4a1.3.2-shuffled-gauss-kvfp8e4m3-b4nan",
        "graph",
        "data of padded rows reach real ones, by a sum, a maximum or a work list over all rows, or by offsets and "
        "counts of the padded batch: the step passes if padded rows hold what a server leaves in them",
    ),
    ("replan-skipped-for-permuted-lengths", LONG, "graph", "the step before has the same lengths and other requests"),
    (
        "grid-covers-the-capture-lengths",
        "target-verify-gqa2x2-d64-bf16-p16-k302-chain4-shuffled-gauss-b1prod",  # all replays are wrong
        "graph",
        "fixed when it was captured",
    ),
    (
        "grid-covers-the-capture-lengths",
        "target-verify-gqa2x2-d64-bf16-p16-k302-chain4-shuffled-gauss-b1prod",
        "graph",
        "captured with this batch, it is right",
    ),
    ("dispatcher-drops-the-verify-mask", TREE, "graph", "a wrapper must return its child's"),
    (
        "counter-cleared-in-eager-only",
        LONG,
        "graph",
        "is not reset between replays: the replay is right if self.counters",
    ),
    ("eager-forward-waits", ONE_KEY_EACH, "eager", "or declare needs={'cpu_seq_lens': True} to get seq_lens_cpu"),
]


@pytest.mark.parametrize(
    ("slug", "case", "execution", "said"), TOLD, ids=[f"{reported[0]}: {reported[3][:40]}" for reported in TOLD]
)
def test_the_hint_names_what_is_wrong(slug: str, case: str, execution: str, said: str) -> None:
    first = findings(slug, case, execution)[0]
    assert said in first.hint, first


MISLED = [
    (
        "scale-of-the-first-kv-head-alone",
        "decode-gqa2x2-d64-fp16-p16-k15.16.17-shared-gauss-kvfp8e4m3-w46-cap1.5-sink-layers3from0varied-b6small",
        "eager",
        "too few heads",
    ),
    ("v1-length-at-full-width", PACKED, "eager", "uniform stride"),
    ("verify-forgets-draft-tokens", TREE, "eager", "0 * NaN"),
    ("swa-page-table-starts-at-window-page", LEAN, "graph", "0 * NaN"),
    ("block-table-indexed-by-token", LEAN, "eager", "page 0 is read"),
    (
        "first-key-of-a-split-in-none",
        "draft-extend-v2-gqa2x2-d64-bf16-p16-k4097.300.33-n2a2x3-reversed-plus_minus_one-b4prod",
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
    ("last-prefix-key-masked", TREE, "eager", "a page or a split is skipped"),
    (
        "table-of-the-first-kv-group",
        "decode-gqa2x2-d64-bf16-p4-k15.22.6-interleaved-gauss-layers3from5groups-b4prod",
        "eager",
        "the offset of its query rows",
    ),
    ("draft-table-without-branches", BRANCHES, "graph", "maximum length"),
    ("draft-table-without-branches", BRANCHES, "graph", "a page id that"),
    ("pad-indptr-tail-runs-backwards", LONG, "graph", "missing"),
    ("semaphore-not-reset-when-metadata-reused", LONG, "eager", "all KV tokens are missing"),
    ("buffers-of-layers-overlap", STALE, "eager", "a stride is probably wrong"),
    ("prompt-attended-before-it-is-stored", PROMPTS, "eager", "off by 1"),
    ("sink-swallowed-by-kwargs", LEAN, "eager", "look at"),
    ("grid-covers-the-capture-lengths", ONE, "graph", "off by"),
    ("qq-bias-without-its-stride", BIASED_PROMPTS, "eager", "0 / 0"),
    ("causal-from-padded-width", SHORT_LAST, "eager", "an end that is off by 1"),
    ("causal-from-padded-width", SHORT_LAST, "eager", "uniform stride"),
    ("padded-token-group-stride", UNPACKED, "eager", "accepted counts"),
    ("finite-mask-sentinel", NEGATIVE, "eager", "tf32"),
    ("finite-mask-sentinel", NEGATIVE, "eager", "a counter"),
    # What is said of a neighbour is not said of these.
    ("v2-rows-counted-by-accepted", V2, "eager", "pairs of token and head"),
    ("sink-swallowed-by-kwargs", LEAN, "eager", "of another row"),
    ("qq-bias-as-wide-as-its-stride", BIASED_PROMPTS, "eager", "without a gap"),
    ("qq-bias-scaled", BIAS, "eager", "before the soft cap"),
    ("kernel-switch-off-by-one", SWITCH, "eager", "missing"),
    ("causal-from-padded-width", PACKED, "eager", "off by 1"),
    ("second-request-kv-uses-q-offset", PACKED, "eager", "cu_seqlens_q)"),
    ("v1-length-at-full-width", PACKED, "eager", "the case passes if every request has"),
    ("causal-aligned-to-the-start", PACKED, "eager", "tile"),
    ("heads-mapped-round-robin", PACKED, "eager", "with the query of head"),
    ("softcap-passed-at-run-not-plan", LEAN, "eager", "after the mask"),
    ("sink-swallowed-by-kwargs", LEAN, "eager", "requests are cut to"),
    ("lse-wrong-when-split", SHARED, "eager", "right without sinks"),
    ("partial-stats-collide", SHARED, "eager", "counted more than once"),
    ("lse-wrong-when-split", SHARED, "eager", "the last row is right"),
    ("varlen-paged-takes-split-path", SHARED, "eager", "a fixed capacity"),
    ("varlen-paged-takes-split-path", SHARED, "eager", "the last row is right"),
    ("draft-extend-v2-prefix-only", SHARED, "eager", "cut to"),
    ("new-tokens-open-a-page", WIDE, "eager", "mixed up with each other"),
    ("non-monotonic-slots", TREE, "eager", "the next page"),
    (
        "output-buffer-of-the-first-layer",
        "extend-gqa2x4-d128-bf16-p4-k15.22.6-n2a2x3-interleaved-gauss-w7-layers3from5by8x4d64.8x2d128-b4prod",
        "eager",
        "attended to the wrong KV tokens",
    ),
    ("no-kernel-for-a-page-size", "decode-mha2-d64-bf16-p8-k21.3-shuffled-gauss-b2prod", "eager", "from before"),
    ("no-kernel-for-a-page-size", "decode-mha2-d64-bf16-p8-k21.3-shuffled-gauss-b2prod", "eager", "a last page"),
    ("grid-covers-the-capture-lengths", ONE, "graph", "is not reset between replays"),
    # A tree's mask of the capture cannot be excluded: a capture with the batch has another one.
    ("tree-mask-of-the-capture", ONE_HOT_TREE, "graph", "even if it is captured"),
    ("pad-indptr-tail-runs-backwards", LONG, "graph", "is not reset between replays"),
    ("eager-forward-waits", ONE_KEY_EACH, "eager", "before the capture"),
    ("plan-of-one-block", "decode-mqa4-d64-bf16-p1-k3x45.1x43.9x44-shuffled-gauss-b132prod", "eager", "missing"),
]


@pytest.mark.parametrize(
    ("slug", "case", "execution", "said"), MISLED, ids=[f"{reported[0]}: {reported[3][:40]}" for reported in MISLED]
)
def test_no_hint_guesses_at_what_is_known(slug: str, case: str, execution: str, said: str) -> None:
    assert said not in findings(slug, case, execution)[0].hint


@pytest.mark.parametrize("data", ["shifted", "one_hot", "peaked"])
@pytest.mark.parametrize("lens", ["600.70.12", "300.280"])
def test_products_in_fp8_are_not_taken_for_a_wrong_scale_head_or_layer(lens: str, data: str) -> None:
    bs = len(lens.split("."))
    case = f"decode-gqa2x2-d64-bf16-p16-k{lens}-shuffled-{data}-kvfp8e4m3-b{bs}prod"
    (found, *_) = findings("fp8-partial-sums-of-few-weights", case, "eager")
    assert "matmul_dtype" in found.hint
    for said in ("k_scale", "v_scale", "KV buffer of one layer", "mapped wrongly", "output is rounded to FP8"):
        assert said not in found.hint


@pytest.mark.parametrize(
    ("slug", "tokens"), [("block-zeroing-spills-into-neighbour", "KV token 8 of request 2 does"),
                         ("swa-write-locs-synthesised-zero", "KV token 7 of request 0 does")]
)  # fmt: skip
def test_a_number_that_is_wrong_since_kv_memory_is_says_so_and_nothing_else(slug: str, tokens: str) -> None:
    memory, number = findings(slug, V1, "eager")
    assert memory.check == "writes-own-kv"
    *_, last = (line for line in number.hint.splitlines() if not line.startswith("with zeros instead of NaN"))
    assert last.endswith(f"fix writes-own-kv first: {tokens} not match what was stored")
    assert not any(word in number.hint for word in ("look at", "missing", "uniform stride"))


def test_a_plan_that_overwrites_what_the_queued_step_reads_is_named() -> None:
    case = "decode-gqa2x2-d64-bf16-p16-k9.70.1.33-shuffled-gauss-b5prod-overlap_scheduling"
    found = findings("staging-buffer-filled-again", case, "graph")[0]
    assert found.check == "completes"
    assert found.hint.startswith("the plan of the next step overwrites memory that a step in the queue still reads")

"""Field bugs whose first hint was once wrong or missing: what it says now."""

from __future__ import annotations

import pytest
from in_process import plan_run, run_item
from test_field_bugs import BUGS

DRAFT = "draft-extend-gqa2x2-d64-bf16-p16-k600.70.12-n4a1x3-contiguous-shifted-ranks3by2-b6stale"
VERIFY = "target-verify-gqa2x2-d64-bf16-p16-k0.1.16-chain4-reversed-peaked-ranks3by2-b4nan"


@pytest.mark.parametrize(
    ("bug", "case", "attended", "hint"),
    [
        ("DraftInContext", DRAFT, "KV tokens 12 counted more than once", "new ones both from the pool and from k, v"),
        ("BoundFromLastLocal", VERIFY, "", "right for fewer KV tokens: request 0 row 0 counts none"),
    ],
)
def test_a_log_sum_exp_without_a_hint_of_its_own_has_that_of_the_output(
    bug: str, case: str, attended: str, hint: str
) -> None:
    plan = plan_run(backends=[f"bugs_ranks:{bug}"], device="cpu", cases=[case], executions=["eager"])
    (item,) = plan.items
    first, second, *_ = run_item(item, plan).findings
    assert (first.check, second.check) == ("log-sum-exp", "matches-oracle")
    assert hint in first.hint
    assert attended in first.attended
    assert bool(first.attended) is bool(attended)


@pytest.mark.parametrize(
    ("bug", "hint"),
    [
        # With as many rows in every request a uniform stride would be right, and these are wrong.
        ("TileOfNextRequest", "all of its own KV tokens are read, and slots after them: probably a length"),
        ("StridesExchanged", "none of its own KV tokens is read"),
        # The same case is wrong with the default layout of the pool.
        ("PoolAsPacked", "the pool is read from its first slot on, as if the KV tokens of all requests were packed"),
        ("ValuesHeadsFirst", "new rows of V are stored as if heads of a page were before its tokens"),
        ("ScaleToNearestPower", "16 of its 32 scales are one power of two too small, and the others are right"),
        # A guess about log-sum-exps gives way to a mistake that gives the numbers of the output.
        ("SpanFromFirstKey", "keys of a span are counted from the request's first token"),
        ("SpanOfPrefixIsEmpty", "rows of a span that begins in the prefix were never computed"),
        ("NumbersBeforeScales", "the NaN comes from how rows of this KV pool"),
        ("ShortPrefillsAreFlat", "probably scales of rows (fp8_ds_mla_pow2) are not applied"),
        ("FirstBlockIsMasked", "entries of -1 between the selected blocks give NaN"),
        # Probes name no KV tokens with ALiBi, and a bias among rows.
        ("RingOfWindow", "a layer with a window keeps its KV tokens in a ring"),
        ("StridesIgnored", "layout side-by-side-hnd of the KV pool is misread"),
        # The result with zeros in foreign slots is right, so these have no weight.
        ("UnmappedIsPageZero", "probably the kernel multiplies foreign slots by weight 0, but 0 * NaN is NaN"),
        # The case is right with pages of 128 slots.
        ("PagesAsSlots", "pages are confused with slots"),
        ("PagesOf128", "a page size of 128 is used in place of context.page_size"),
        # Keys that seem to count twice have no scale.
        ("PrefixWithoutScales", "one of two calls lacks k_scale and v_scale"),
        ("TimesLargest", "in packed rows, the scales are multiplied by 127"),
        # One of eight keys is selected by many mistakes.
        ("TokensAsPages", ""),
        ("InterleavedIndexKeys", ""),
        ("LeadingRowsWithoutKeys", "rows that select no key give NaN, and all others are right"),
        # Errors of all elements follow those of a rounding.
        ("BetaOfPrefillInModelDtype", "beta, the factor of an update (a sigmoid), is probably rounded to fp16"),
        ("StateInModelDtype", "it is right but for a rounding to fp16, and each of its numbers is one of fp16"),
        ("WindowOfOutputs", "its columns are outputs of the convolution"),
        # Contents of a slot: scales of other rows, for another largest number, or in the order of another layout.
        ("RangesOfFp8", "they are 0.635 times those, as if the largest number was 200 in place of 127"),
        ("ScalesLikeNhd", "scales of new rows of K are stored as if tokens of a page were before its heads"),
        ("FirstRowIsStored", "only the first new row of each request is stored"),
    ],
)
def test_the_first_hint_is_not_one_that_another_run_contradicts(bug: str, hint: str) -> None:
    entry = next(each for each in BUGS if each.backend.__name__ == bug)
    (item,) = (plan := plan_run(backends=[entry.spec], device="cpu", cases=[entry.case], executions=["eager"])).items
    first = run_item(item, plan).findings[0].hint.partition("\n")[0]
    assert hint in first if hint else first.startswith("in this case") or not first

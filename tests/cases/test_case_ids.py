from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import DATA, Case, Heads, parse_case
from attn_testkit.cases.co_residents import co_residents
from attn_testkit.cases.rows import Accepted, Decode, Verify
from attn_testkit.cases.trees import Tree, chain
from attn_testkit.catalogue.array import array_of
from attn_testkit.catalogue.tiers import TIERS, generate
from attn_testkit.contract import Bounds, Capabilities, ForwardMode, HeadShapes, KVPools
from attn_testkit.steps.schedule import make_schedule

CAPABILITIES = TorchNativeBackend.capabilities


@pytest.mark.parametrize("mode", list(ForwardMode), ids=str)
@pytest.mark.parametrize("tier", ["smoke", "core"])
def test_an_id_alone_rebuilds_the_case(tier: str, mode: ForwardMode) -> None:
    for case in generate(CAPABILITIES, mode, tier, seed=3):
        assert parse_case(case.id) == case


@given(
    prefixes=st.lists(st.integers(0, 5000), min_size=1, max_size=6),
    parents=st.lists(st.integers(0, 3), min_size=1, max_size=9),
    page=st.sampled_from([1, 16, 128]),
    slack=st.integers(0, 3),
    window=st.integers(-1, 9),
    seed=st.integers(0, 99),
)
def test_any_case_survives_the_way_through_its_id(
    prefixes: list[int], parents: list[int], page: int, slack: int, window: int, seed: int
) -> None:
    tree = Tree(tuple(min(p, i) for i, p in enumerate(parents)))
    case = Case(
        Verify(tree),
        Heads("gqa", 6, 2),
        64,
        "bf16",
        page,
        tuple(prefixes),
        window=window,
        bucket=len(prefixes) + slack,
        seed=seed,
    )
    assert parse_case(case.id) == case


def test_an_id_is_the_seed_of_its_case() -> None:
    case = Case(Decode(), Heads("gqa", 8, 2), 64, "bf16", 16, (0, 15, 15, 17), bucket=6, padding="nan")
    assert case.id == "decode-gqa4x2-d64-bf16-p16-k0.15x2.17-shuffled-gauss-b6nan"
    assert case.digest == 2086447407294812014
    assert replace(case, seed=2).id == case.id + "-s2"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("decod-mha2-d64", "did you mean decode"),
        ("decode-mha2-d64-bf16-p16-k5-shufled-gauss-b1prod", "did you mean 'shuffled'"),
        ("decode-mha2-b1prod", "it lacks head_dim, dtype"),
        ("decode-mha2-d64-bf16-p16-k5.9-shuffled-gauss-b1prod", "bucket 1 is smaller than the batch of 2"),
        ("decode-mha2-d64-bf16-p16-k5.5-shuffled-gauss-b2prod", "write decode-mha2-d64-bf16-p16-k5x2-"),
        ("draft-extend-mha2-d64-bf16-p16-k5-n4a9-shuffled-gauss-b1prod", "accepted counts"),
        ("target-verify-mha2-d64-bf16-p16-k5-shuffled-gauss-b1prod", "it lacks rows"),
        ("decode-mha2-d64-bf16-p16-k5-chain3-shuffled-gauss-b1prod", "rows of decode have no tree"),
        ("decode-mha2-d64-bf16-p16-k5-chunks2-shuffled-gauss-b1prod", "rows of decode have no chunks"),
        ("extend-mha2-d64-bf16-p16-k5-n2a2-prefixed-shuffled-gauss-b1prod", "rows of extend have no with_prefix"),
        ("target-verify-mha2-d64-bf16-p16-k5-topk1steps3-shuffled-gauss-b1prod", "rows of target-verify have no draft"),
    ],
)
def test_an_unreadable_id_says_what_it_could_not_read(bad: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_case(bad)


@pytest.mark.parametrize("mode", list(ForwardMode), ids=str)
def test_core_meets_every_pair_of_declared_values(mode: ForwardMode) -> None:
    cases = generate(CAPABILITIES, mode, "core")
    pages = set(array_of(CAPABILITIES, mode, "core").columns["page_size"])
    layouts = {"contiguous", "shuffled", "interleaved", "reversed"}
    assert len(pages) == 5
    assert pages >= {1, 16, 128}
    replays = [(case, step) for case in cases for step in make_schedule(case).steps]
    assert {(c.page_size, step.layout) for c, step in replays} >= {(p, x) for p in pages for x in layouts}
    assert {(c.page_size, step.data) for c, step in replays} >= {(p, x) for p in pages for x in DATA}
    # Sizes are columns of the array, too (catalogue/sizes.py), so a pair may meet only in a row with more requests, or
    # with 1,024 more keys in each. The row's own requests come first there, and their last pages are as full, since
    # 1,024 is a multiple of all page sizes: that is what lengths and pages do together. Most pairs meet without that.
    pairs = {(p, lens) for p in pages for lens in ((600, 70, 12), (7, 7))}
    batches = {(c.page_size, tuple(prefix % 1024 for prefix in c.prefixes[:n])) for c in cases for n in (2, 3)}
    assert batches >= pairs
    assert 2 * len(pairs & {(c.page_size, c.prefixes) for c in cases}) > len(pairs)
    assert {(c.data, c.dtype) for c in cases} >= {(d, t) for d in ("gauss", "one_hot") for t in ("fp16", "bf16")}
    assert {c.padding for c in cases if c.bucket > c.bs} == {"prod", "nan", "stale", "small"}


def test_nothing_undeclared_is_tried() -> None:
    declared = Capabilities(
        eager={"target-verify"},
        heads=HeadShapes(families={"gqa"}, gqa_ratios={5}, head_dims={96}),
        kv_pool=KVPools(page_sizes={8}),
        bounds=Bounds(max_q_rows=5, max_topk=1),
    )
    for tier in TIERS:
        for case in generate(declared, ForwardMode.TARGET_VERIFY, tier):
            assert (case.head_dim, case.page_size) == (96, 8)
            assert case.heads.family == "gqa"
            assert case.heads.q_heads == 5 * case.heads.kv_heads
            assert case.width <= 5
            assert case.topk == 1
            assert (case.window, case.logit_cap, case.sinks, case.kv_dtype) == (-1, 0.0, False, "same")


def test_generation_is_the_same_every_time() -> None:
    generate.cache_clear()
    first = [c.id for c in generate(CAPABILITIES, ForwardMode.DECODE, "core")]
    generate.cache_clear()
    assert [c.id for c in generate(CAPABILITIES, ForwardMode.DECODE, "core")] == first


def test_companions_share_shapes_and_differ_in_mode() -> None:
    case = Case(Decode(), Heads("mha", 2, 2), 64, "bf16", 16, (5, 9), bucket=3, multi_mode=True)
    others = co_residents(case, frozenset(ForwardMode), 8)
    assert {o.mode for o in others} == set(ForwardMode) - {ForwardMode.DECODE}
    assert all((o.heads, o.page_size, o.dtype) == (case.heads, 16, "bf16") for o in others)
    assert next(o for o in others if o.mode is ForwardMode.TARGET_VERIFY).tree == chain(4)


def test_a_case_may_be_as_full_as_its_bucket_and_accept_as_much_as_its_width() -> None:
    draft = Case(Accepted((1, 4), 4), Heads("mha", 2, 2), 64, "bf16", 16, (5, 9), bucket=2)
    for changes, message in (
        ({"bucket": 1}, "bucket 1 is smaller than the batch of 2"),
        ({"rows": Accepted((1,), 4)}, "one count per request, and there are 2 requests"),
        ({"rows": Accepted((), 4)}, "one count per request"),
        ({"prefixes": ()}, "at least one request"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(draft, **changes)  # type: ignore[arg-type]
    assert (draft.bs, draft.topk) == (2, 0)
    for counts in ((1, 5), (0, 4)):
        with pytest.raises(ValueError, match=rf"accepted counts \({counts[0]}, {counts[1]}\): .* each 1..4"):
            Accepted(counts, 4)


def test_a_window_of_0_a_small_cap_and_a_rope_are_written_and_their_absence_is_not() -> None:
    minimal = Case(Decode(), Heads("mla", 2, 1), 64, "fp16", 1, (0, 0), bucket=2)
    assert minimal.id == "decode-mla2-d64-fp16-p1-k0x2-shuffled-gauss-b2prod"
    full = replace(
        minimal,
        rope_dim=16,
        kv_dtype="fp8_e4m3",
        window=0,
        logit_cap=0.5,
        sinks=True,
        multi_mode=True,
        seed=1,
        padding="nan",
    )
    assert full.id == "decode-mla2-d64r16-fp16-p1-k0x2-shuffled-gauss-kvfp8e4m3-w0-cap0.5-sink-b2nan-multi_mode-s1"
    assert parse_case(full.id) == full

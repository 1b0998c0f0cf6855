"""A case's id rebuilds its case, in every version: files of known failures and bug reports name ids.

Where one of these digests changes on purpose, say so in the changelog: what an id stands for is another case then.
"""

from __future__ import annotations

import hashlib

import pytest
import torch
from as_made import without_arrays
from later import came_later

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import Case, parse_case
from attn_testkit.cases.co_residents import co_residents
from attn_testkit.cases.derived_parameters import chosen
from attn_testkit.cases.renamed_words import FIRST_NAMES, first_written
from attn_testkit.contract import ForwardMode
from attn_testkit.examples import MinimalBackend
from attn_testkit.steps.data import make_step_data
from attn_testkit.steps.numerics import Numerics
from attn_testkit.steps.schedule import Step, make_schedule

CAPABILITIES = {"torch_native": TorchNativeBackend.capabilities, "minimal": MinimalBackend.capabilities}
IDS = [
    *(
        f"decode-gqa2x2-d32-bf16-p4-k0.5.20-{layout}-gauss{words}-b{rest}"
        for layout, words, rest in (
            ("shuffled", "", "3prod"),
            ("shared", "", "4prod"),
            ("contiguous", "-w4", "4small"),
            ("reversed", "-cap1.5", "6prod-s1"),
            ("interleaved", "-sink", "3prod-multi_mode"),
        )
    ),
    "target-verify-gqa2x2-d32-fp16-p4-k5.9-t0.0.1.1.3-interleaved-gauss-b2prod",
    "draft-extend-mqa4-d32-bf16-p16-k5.9-n4a1.3-reversed-gauss-b2prod",
    *(
        f"draft-extend-v2-mha2-d32-bf16-p16-k7.9-n4a1.3-shared-shifted-kvfp8e4m3-b2prod{seed}"
        for seed in ("", "-s1", "-s2")
    ),
]


def lasting(declared: str, mode: ForwardMode, tier: str) -> list[Case]:
    """The cases but those that came later, which stand behind all others."""
    return [case for case in without_arrays(CAPABILITIES[declared], mode, tier) if not came_later(case)]


def digest(lines: list[str]) -> str:
    return hashlib.blake2b(first_written("\n".join(lines)).encode(), digest_size=6).hexdigest()


def described(step: Step) -> str:
    table = hashlib.blake2b(step.req_to_token.tobytes(), digest_size=6).hexdigest()
    requests = [
        f"{r.prefix} {r.new} {r.shared} {r.slots.tolist()} {r.tree.parents if r.tree is not None else ''}"
        for r in step.requests
    ]
    return f"{step.name} {step.label} {step.bucket} {step.eager_too} {step.stored} {table} {requests}"


FIRST_MODES = tuple(ForwardMode)[:4]
"""Those of the first release, whose digests are one number."""
LISTS = {
    ("torch_native", "smoke"): ("90aca3a58711", (9, 8, 8, 8), "90aca3a58711"),
    ("torch_native", "core"): ("a0abf9d655eb", (46, 43, 46, 44), "eb8ae21cc847"),
    ("minimal", "smoke"): ("3d6f57e81049", (9, 8, 8, 8), "3d6f57e81049"),
    ("minimal", "core"): ("a7f237703899", (47, 47, 49, 48), "8079cb0fb03a"),
    ("minimal", "full"): ("0c195486f0cd", (308, 310, 309, 308), "5ae4886092f8"),
}
"""Capabilities and tier -> digest of the covering array and the named cases, how many they are in each mode, and digest
of the list with the small cases that follow them."""


EXTEND_LISTS = {
    ("torch_native", "smoke"): (9, "87f4a9ad2a94"),
    ("torch_native", "core"): (62, "d68e791dc125"),
    ("minimal", "core"): (52, "a833289cd917"),
}
"""The same for extend: how many, and digest of all."""
EXTEND_IDS = [
    f"extend-gqa2x2-d32-bf16-p4-k0.5.9-{words}-gauss-b4{padding}"
    for words, padding in (
        ("n4a9.1.2-shuffled", "prod"),
        ("n4a9.1.2-chunks3-shared", "nan"),
        ("n1a1x3-chunks3-reversed", "small"),
    )
]


@pytest.mark.parametrize(("declared", "tier"), EXTEND_LISTS, ids=map(" ".join, EXTEND_LISTS))
def test_the_cases_of_extend_change_on_purpose_alone(declared: str, tier: str) -> None:
    ids = [case.id for case in lasting(declared, ForwardMode.EXTEND, tier)]
    assert (len(ids), digest(ids)) == EXTEND_LISTS[declared, tier]


def test_the_steps_and_numbers_of_an_extend_change_on_purpose_alone() -> None:
    found = []
    for name in EXTEND_IDS:
        schedule = make_schedule(parse_case(name))
        for step in (*schedule.steps, schedule.second, schedule.oversized):
            data = make_step_data(schedule, step)
            bits = b"".join(x.contiguous().view(torch.uint8).numpy().tobytes() for x in (data.q, data.k, data.v))
            found.append(f"{name} {described(step)} {hashlib.blake2b(bits, digest_size=6).hexdigest()}")
    assert digest(found) == "2f0b57de33e9", found


@pytest.mark.parametrize(("declared", "tier"), LISTS, ids=map(" ".join, LISTS))
def test_the_cases_of_a_tier_change_on_purpose_alone(declared: str, tier: str) -> None:
    by_mode = [[case.id for case in lasting(declared, mode, tier)] for mode in FIRST_MODES]
    kept, counts, whole = LISTS[declared, tier]
    assert digest([name for names, count in zip(by_mode, counts, strict=True) for name in names[:count]]) == kept
    assert digest([name for names in by_mode for name in names]) == whole


def test_the_steps_of_a_case_change_on_purpose_alone() -> None:
    found = {}
    for name in IDS:
        schedule = make_schedule(parse_case(name))
        steps = [*schedule.steps, schedule.second, schedule.oversized]
        sizes = (
            schedule.buckets,
            schedule.max_context_len,
            schedule.num_pages,
            schedule.pool_rows,
            schedule.spec_steps,
        )
        found[name] = digest([str(sizes), *map(described, steps)])
    assert digest([f"{name} {found[name]}" for name in IDS]) == "f9ea97c7616e", found


def test_the_numbers_of_a_case_change_on_purpose_alone() -> None:
    """A case id in a bug report stands for the bits that failed."""
    found = {}
    for name in IDS:
        # Of a kernel that multiplies in FP8: the queries that it gets are what any got in the first release.
        schedule = make_schedule(parse_case(name), Numerics("fp8_e4m3" if "fp8" in name else "model"))
        data = make_step_data(schedule, schedule.steps[0])
        bits = [x.contiguous().view(torch.uint8).numpy().tobytes() for x in (data.q, data.k, data.v, data.hidden)]
        found[name] = hashlib.blake2b(b"".join(bits), digest_size=6).hexdigest()
    assert digest([f"{name} {found[name]}" for name in IDS]) == "4285b6ddd973", found


def test_the_hidden_choices_of_a_case_change_on_purpose_alone() -> None:
    names = [case.id for mode in FIRST_MODES for case in lasting("torch_native", mode, "core")]
    lines = [
        f"{name} {FIRST_NAMES.get(c.name, c.name)} {value and value.words}"
        for name in names
        for c, value in chosen(parse_case(name))
        if c.name != "pool-address"  # it came later
    ]
    assert digest(lines) == "73a32b828f15"


def test_the_companions_of_a_mixed_case_change_on_purpose_alone() -> None:
    case = parse_case(IDS[4])
    every = set(FIRST_MODES)
    lines = [other.id for rows, topk in ((128, 8), (4, 1), (1, 1)) for other in co_residents(case, every, rows, topk)]
    assert digest(lines) == "5e3f77b96ebc"

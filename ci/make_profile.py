"""Chooses the cases of frozen profiles, and says which of them may stay.

    python ci/make_profile.py choose 2026.12                        # writes attn_testkit/profiles/2026.12/*.toml
    attn-testkit run --profile 2026.12/decode --backend torch_native ... --json decode.json
    python ci/make_profile.py admit 2026.12 decode.json ...         # removes cases with an alarm, or that nobody ran
    python ci/make_profile.py release 2026.12                       # from then on no file of it may change

A case may enter a profile if known-good backends ran it without an alarm. ``choose`` takes cheap cases of core, so that
each registered backend, and each of ``NARROW``, meets as many as possible of the values that it declares. A released
profile is never written.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from attn_testkit.cases.case import Case, parse_case
from attn_testkit.cases.declared import not_declared
from attn_testkit.cases.features.kv_splits import has_own_pools
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import Bounds, Capabilities, Execution, ForwardMode, HeadShapes, KVPools, Precision
from attn_testkit.families.table import meaningful, meaningless
from attn_testkit.profiles import DRAFT, FOLDER, RELEASED, profile_names, read_profile, written
from attn_testkit.registry import load_backend, registered_backends
from attn_testkit.reports.record import read_report
from attn_testkit.results.case_result import RAN, Status
from attn_testkit.steps.digest import digests_of

DRAFTS = (ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2, ForwardMode.DRAFT_DECODE)
ALL = tuple(ForwardMode)


def _narrow(page_size: int, heads: HeadShapes) -> Capabilities:
    return Capabilities(
        eager=ALL,
        graph=ALL,
        heads=heads,
        precision=Precision(dtypes={"bf16"}),
        kv_pool=KVPools(page_sizes={page_size}),
        bounds=Bounds(max_q_rows=8, max_topk=1, max_draft_branches=4),
    )


_GQA = HeadShapes(families={"gqa"}, gqa_ratios={4, 8}, head_dims={128})
_MLA = HeadShapes(families={"mla"}, gqa_ratios={16, 128}, head_dims={512}, mla_rope_dims={64})
NARROW: Mapping[str, Capabilities] = {
    **{f"heads of 128, pages of {size}": _narrow(size, _GQA) for size in (1, 16, 64)},
    "one head of 128 each, pages of 16": _narrow(16, HeadShapes(families={"mha"}, head_dims={128})),
    "groups of 8 and heads of 64, pages of 16": _narrow(
        16, HeadShapes(families={"gqa"}, gqa_ratios={8}, head_dims={64})
    ),
    **{f"MLA, pages of {size}": _narrow(size, _MLA) for size in (1, 64)},
}
"""Backends as authors outside of this repository write them first: a shape or two, one page size, no option. The page
sizes are the defaults of SGLang, of vLLM, and of kernels for MLA. A profile in which they run hardly anything would
not test them.
"""
PROFILES: Mapping[str, tuple[str, tuple[ForwardMode, ...]]] = {
    "decode": ("softmax", (ForwardMode.DECODE,)),
    "verify": ("softmax", (ForwardMode.TARGET_VERIFY,)),
    "draft": ("softmax", DRAFTS),
    "extend": ("softmax", (ForwardMode.EXTEND,)),
    "sparse": ("sparse", ALL),
    "state": ("recurrent", ALL),
    "ranks": ("ranks", ALL),
}
"""Name -> kind and modes of its cases."""
MOST_CASES = 64
MOST_TOKENS, MOST_REQUESTS = 1_500, 48
"""Most keys of a case, all requests together, and most requests: a case has to be cheap on a CPU, too."""
COSTLY = frozenset({"far", "bigpool", "wide_scores"})
"""Server variants that need gigabytes, or seconds of a GPU."""
_ONLY_HERE = ("prefixes", "new", "seed")
"""Fields whose values are nearly never equal in two cases; the size of a case stands for them."""


def kind_of(case: Case) -> str:
    """The kind of a case's profile: its family, or ``ranks``. A hybrid model counts as one that keeps a state."""
    if has_own_pools(case):
        return "ranks"
    return next(name for name in ("recurrent", "sparse", "softmax") if name in case.families)


def values_of(case: Case) -> Iterator[tuple[str, object]]:
    """What a case tries: the values of its fields, and its size by powers of two."""
    yield from ((name, str(value)) for name, value in case.values.items() if name not in _ONLY_HERE)
    yield "requests", len(case.prefixes).bit_length()
    yield "longest", max(case.prefixes, default=0).bit_length()
    yield "rows", max(case.new, default=0).bit_length()


def runs(declared: Capabilities, case: Case) -> bool:
    """True if a backend with these capabilities runs the case."""
    offered = any(declared.offers(case.mode, execution) for execution in Execution)
    return offered and not not_declared(declared, case) and not meaningless(case)


def chosen(backends: Mapping[str, Capabilities], kind: str, modes: Sequence[ForwardMode]) -> list[str]:
    """Cases in which each backend meets as many of its values as possible."""
    candidates: dict[str, Case] = {}
    for declared in backends.values():
        for mode in modes:
            if any(declared.offers(mode, execution) for execution in Execution):
                found = map(meaningful, generate(declared, mode, "core"))
                candidates |= {case.id: case for case in found if kind_of(case) == kind and _cheap(case)}
    tries = {
        case_id: {(name, value) for name, of in backends.items() if runs(of, case) for value in values_of(case)}
        for case_id, case in candidates.items()
    }
    due = set().union(*tries.values())
    # Each backend counts as much as another one, also if it declares little: its profile is to test it, too.
    values = Counter(name for name, _ in due)
    taken: list[str] = []
    while due and len(taken) < MOST_CASES:
        best = max(sorted(tries), key=lambda case_id: sum(1 / values[name] for name, _ in tries[case_id] & due))
        due -= tries.pop(best)
        taken.append(best)
    print(f"  {len(taken)} of {len(candidates)} cases; {len(due)} values of backends have none", file=sys.stderr)
    return taken


def _cheap(case: Case) -> bool:
    small = len(case.prefixes) <= MOST_REQUESTS and sum(case.prefixes) + sum(case.new) <= MOST_TOKENS
    return small and not case.variants & COSTLY


def choose(release: str) -> None:
    """Write drafts of all profiles of a release."""
    backends = {each.name: load_backend(each.name).capabilities for each in registered_backends()} | {**NARROW}
    (FOLDER / release).mkdir(exist_ok=True)
    for name, (kind, modes) in PROFILES.items():
        print(f"{release}/{name}", file=sys.stderr)
        ids = chosen(backends, kind, modes)
        write(f"{release}/{name}", {case: digests_of(parse_case(case)) for case in ids})


def admit(release: str, files: Iterable[str]) -> None:
    """Remove cases in which a known-good backend had an alarm, and cases that none ran."""
    ran: Counter[str] = Counter()
    alarms: dict[str, str] = {}
    for file in files:
        for row in read_report(file).results:
            if row.case and row.status in RAN:
                ran[row.case] += 1
                if row.status is not Status.PASSED:
                    alarms[row.case] = f"{row.backend} {row.execution}: {row.status}"
    for name in (name for name in profile_names() if name.startswith(f"{release}/")):
        cases = read_profile(name).cases
        for case in cases:
            if case in alarms or not ran[case]:
                print(f"{name}: {case} may not enter: {alarms.get(case, 'no backend ran it')}")
        write(name, {case: digests for case, digests in cases.items() if ran[case] and case not in alarms})


def write(name: str, cases: Mapping[str, tuple[str, str]]) -> None:
    """Write the draft of a profile. Exits for one that is released."""
    path = FOLDER / f"{name}.toml"
    if path.exists() and read_profile(name).status != DRAFT:
        sys.exit(f"ci/make_profile.py: {name} is released and never changes; make one of a later month")
    path.write_text(written(cases))


def release(release: str) -> None:
    """Mark the profiles of a release as released."""
    for name in (name for name in profile_names() if name.startswith(f"{release}/")):
        path, profile = FOLDER / f"{name}.toml", read_profile(name)
        path.write_text(written(profile.cases, RELEASED))
        print(f'"{name}" = "{profile.digest}"')
    print("Add these lines to tests/profiles/released.toml.", file=sys.stderr)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("does", choices=("choose", "admit", "release"))
    parser.add_argument("release", help="month of the release, such as 2026.12")
    parser.add_argument("files", nargs="*", help="of admit: results files of known-good backends", type=Path)
    asked = parser.parse_args()
    if asked.does == "admit":
        admit(asked.release, map(str, asked.files))
    else:
        {"choose": choose, "release": release}[asked.does](asked.release)


if __name__ == "__main__":
    main()

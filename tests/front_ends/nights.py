"""Nights of any size, made up from the words of real ones: records for tests of pages, in no time and without torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from attn_testkit.reports.record import Report
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.results.checks import CHECKS
from attn_testkit.results.finding import ErrorMap, Finding, KeyMap
from attn_testkit.results.run_header import RunHeader, exit_code

MODES = ("decode", "target-verify", "draft-extend", "draft-extend-v2")
BACKENDS = ("torch_native", "triton", "flashinfer", "my_company.serving.attention:PagedBackend")
EXPLAINED = {
    check: {"text": f"What {check} asks of `forward`.", "cause": "This.", "source": "#1", "how_to_read": "So."}
    for check in CHECKS
}


def case_ids(mode: str) -> Iterator[str]:
    """As many as one wants, about as long as real ones."""
    words = {"decode": "", "target-verify": "-chain4", "draft-extend": "-n4a1.3", "draft-extend-v2": "-n4a4"}[mode]
    for prefix in itertools.count(1):
        for dtype, kv, page in itertools.product(("bf16", "fp16"), ("", "-kvfp8e4m3"), (1, 16)):
            layout = ("shuffled", "reversed", "contiguous")[prefix % 3]
            yield f"{mode}-gqa4x2-d128-{dtype}-p{page}-k{prefix}.{prefix + 16}.3{words}-{layout}-gauss{kv}-w64-b4prod"


def passing(count: int, backends: Sequence[str] = BACKENDS, *, emulated: bool = False) -> Iterator[CaseResult]:
    """``count`` case-runs that passed, eager and graph of a case side by side, backends one behind the other."""
    per_backend = -(-count // len(backends))
    made = 0
    for backend in backends:
        ids = {mode: case_ids(mode) for mode in MODES}
        for number in range(min(per_backend, count - made)):
            mode, graph = MODES[number // 2 % 4], bool(number % 2)
            if not graph:
                case = next(ids[mode])
            made += 1
            yield CaseResult(
                backend,
                mode,
                "graph" if graph else "eager",
                case,
                Status.PASSED,
                checks=("completes", "matches-oracle", "finite", *(("replay-follows-batch",) if graph else ())),
                margin=0.05 + number * 7919 % 83 / 100,
                seconds={"eager": 0.01 + number % 13 / 50},
                device="emulated" if emulated else "cuda",
                graph=("emulated" if emulated else "cuda") if graph else "",
            )


def failed(result: CaseResult, finding: Finding, status: Status = Status.FAILED) -> CaseResult:
    """The same case-run with a finding."""
    return replace(result, status=status, findings=(finding,), margin=56.0)


def window(number: int) -> Finding:
    """The first keys are missing."""
    keys = "KV token is" if number == 1 else f"{number} KV tokens are"
    return Finding(
        "matches-oracle",
        f"request {number % 3} differs from the oracle, {50 + number}x over the limit",
        where=f"out[layer 1, request {number % 3}, head 5, dim 17] = 0.4121, want 0.187 (limit 0.004)",
        spread=f"request {number % 3} wrong in 33 of 1024 values (1 of 1 rows); others right",
        attended=f"request {number % 3} attended to KV tokens {number}..64, expected 0..64",
        hint=f"the first {keys} missing: probably the start of a window, or an offset into the table",
        errors=ErrorMap(((0.2, 0.3, 1.0, 0.9), (56.0, 1.5, 900.0, 1e9), (0.1, 0.1, 0.1, 0.1)), (0, 1, 2), 3, 4),
        keys=KeyMap(1, 0, 5, 65, ((number, 64),), ((0, 64),)),
    )


def stale(number: int) -> Finding:
    """A replay reads the batch of its capture."""
    return Finding(
        "replay-follows-batch",
        f"request {number % 4} differs from the oracle, {900 + number}x over the limit at a replay, and is right in "
        "eager",
        where=f"out[layer 0, request {number % 4}, head 0, dim 0] = nan, want 0.4477",
        hint="the graph still uses a value from capture time (a length, stride, grid size or pointer): captured with "
        "this batch, it is right\n"
        "the graph probably still uses a maximum length, a grid or a number of splits of the captured batch: "
        f"requests of up to {number} KV tokens are right, but requests of {number + 5} or more are wrong",
        step=f"replay {number % 6} of 8 (own batch), bucket 4, 3 live",
    )


def night(
    results: Sequence[CaseResult], started: str = "2026-11-20T02:17:00+00:00", *, emulated: bool = False
) -> Report:
    """A finished night of these results."""
    backends = dict.fromkeys((result.backend for result in results), "0.4.1")
    header = RunHeader(
        kit="0.1.0",
        started=started,
        command="pytest --pyargs attn_testkit.suite --attn-tier=full",
        tier="full",
        seed=0,
        device="emulated" if emulated else "cuda",
        device_name="CPU (emulated CUDA)" if emulated else "NVIDIA H200 sm90",
        versions={"python": "3.11", "torch": "2.13.0"},
        backends=backends,
        planned=len([result for result in results if result.case]),
        limits=("timing is not emulated",) if emulated else (),
        not_covered=dict.fromkeys(backends, ("head dim 96", "group 4")),
        explained=EXPLAINED,
    )
    return Report(header, tuple(results), finished=True, exit_code=exit_code(header.planned, results))


def red_night(
    count: int, started: str = "2026-11-21T02:17:00+00:00", every: int = 40, *, emulated: bool = False
) -> Report:
    """``count`` case-runs. Of ``triton`` each ``every``th fails, for two causes; of the last backend one crashed, and
    known failures of ``flashinfer``.
    """
    results = []
    for number, result in enumerate(passing(count, emulated=emulated)):
        if result.backend == "triton" and number % every == 0:
            result = failed(result, window(number // every % 7 + 1))
        elif result.backend == "triton" and result.execution == "graph" and number % every == 1:
            result = failed(result, stale(number % 50))
        elif result.backend == "flashinfer" and number % (3 * every) == 2:
            result = replace(result, status=Status.KNOWN_FAILURE, reason="https://example.org/issues/12")
        results.append(result)
    results[-1] = replace(
        results[-1], status=Status.CRASHED, reason="CUDA error: an illegal memory access was encountered", margin=None
    )
    results += [
        CaseResult("triton", "draft-extend", "graph", "", Status.UNSUPPORTED, reason="not declared"),
        CaseResult("flashinfer_mla", "decode", "graph", "", Status.NOT_RUN_HERE, reason="needs sm100"),
    ]
    return night(results, started, emulated=emulated)


def green_night(count: int, started: str = "2026-11-20T02:17:00+00:00", *, emulated: bool = False) -> Report:
    """``count`` case-runs that passed."""
    return night(list(passing(count, emulated=emulated)), started, emulated=emulated)

"""This kit's cases of a class of SGLang's. Run by ``ci/side_by_side.py``, in its own process.

    python ci/side/ours.py --backend triton --theirs FILE --bug DoubleCount --out FILE

``--theirs``: what ``ci/side/theirs.py`` wrote, whose shapes are run as cases of this kit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path[:0] = [
    str(HERE.parents[1]),
    str(HERE.parents[2] / "packages" / "servers" / "tests" / "bridges"),
]

from attn_testkit.cases.case import parse_case  # noqa: E402
from attn_testkit.cases.declared import not_declared  # noqa: E402
from attn_testkit.contract import Capabilities  # noqa: E402
from attn_testkit.results.case_result import RAN, CaseResult, Status  # noqa: E402
from attn_testkit.running.planning.candidate import Candidate  # noqa: E402
from attn_testkit.running.planning.request import Item, Judge, Options, Plan, Request  # noqa: E402
from attn_testkit.running.processes.judge_process import JudgeProcess  # noqa: E402
from side.results import BUGS, SHIPPED, Bug  # noqa: E402

DEVICE = "cpu"
Runs = Sequence[tuple[str, str]]
"""(case id, execution)."""


@contextlib.contextmanager
def judging() -> Iterator[JudgeProcess]:
    """One process that judges; each backend has a worker in it."""
    # Whether an earlier case-run is the cause of a failure is not asked: it costs an import of SGLang for each.
    with contextlib.closing(JudgeProcess(Options(asks_afresh=False), DEVICE)) as judge:
        yield judge


def planned(judge: JudgeProcess, spec: str, wanted: Runs | None, bug: Bug | None) -> tuple[Plan, list[Item]] | None:
    """The case-runs of a class: those that are wanted and declared, or of tier smoke; of a bug, those where it shows.
    None if there are none.
    """
    modes, executions = ((), ()) if bug is None else ((bug.mode,), (bug.execution,))
    request = Request((spec,), modes=modes, executions=executions, device=DEVICE)
    if wanted is None:
        plan = judge.plan(request)
        return plan, list(plan.items)
    chosen = supported(judge.capabilities(Candidate(spec), DEVICE), wanted, bug)
    if not chosen:
        return None
    plan = judge.plan(replace(request, cases=tuple(dict.fromkeys(case for case, _ in chosen))))
    return plan, [item for item in plan.items if (item.case, item.execution) in chosen]


def supported(declared: Capabilities, wanted: Runs, bug: Bug | None) -> Runs:
    """Those that the class declares, and of a bug those where it shows. It refuses the others, with a bug or
    without."""
    return [
        (case, execution)
        for case, execution in wanted
        if not not_declared(declared, parse_case(case))
        and (bug is None or (parse_case(case).mode.value, execution) == (bug.mode, bug.execution))
    ]


def rate(judge: Judge, who: str, plan: Plan, items: Sequence[Item]) -> dict[str, Any]:
    """What the case-runs take, after one that is not counted and imports SGLang."""
    list(judge.run(plan, items[:1]))
    start, cpu = time.perf_counter(), _cpu_seconds()
    results = list(judge.run(plan, items))
    seconds, cpu_seconds = time.perf_counter() - start, _cpu_seconds() - cpu
    print(f"  {len(items)} case-runs of {who}, {seconds:.1f} s", file=sys.stderr, flush=True)
    return {
        "who": who, "cases": len(items), "seconds": seconds, "cpu_seconds": cpu_seconds,
        "red": [f"{each.case} {each.execution}: {_why(each)}" for each in results if each.status is not Status.PASSED],
        "checked": _checked(plan, items),
    }  # fmt: skip


def _why(result: CaseResult) -> str:
    return result.findings[0].headline if result.findings else result.reason


def _cpu_seconds() -> float:
    """Of this process and all below it that live."""
    import psutil  # SGLang imports it too

    spent = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            spent += times.user + times.system
    return spent


def _checked(plan: Plan, items: Sequence[Item]) -> int:
    """Steps that a worker sends back: all of them are judged."""
    from attn_testkit.runner_modes.messages import RunCase

    from attn_testkit.contract import Execution
    from attn_testkit.environment import resolve
    from attn_testkit.running.processes.worker_process import Worker

    resolve(plan.device).prepare_process()
    with contextlib.closing(Worker(plan.candidates[0], plan.device, timeout_s=300.0)) as worker:
        return sum(len(worker.drive(RunCase(item.case, Execution(item.execution))).records) for item in items)


def count(judge: Judge, plan: Plan, items: Sequence[Item]) -> tuple[int, int]:
    """(did not pass, ran)."""
    results = [each for each in judge.run(plan, items) if each.status in RAN]
    return sum(each.status is not Status.PASSED for each in results), len(results)


def main() -> None:
    """Write what was found to ``--out``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True)
    parser.add_argument("--theirs", type=Path, required=True)
    parser.add_argument("--bug", action="append", default=[])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    shapes = [(case, execution) for _, case, execution in json.loads(args.theirs.read_text())["shapes"]]
    shapes = list(dict.fromkeys(shapes))
    sources = (("its shapes", "their_shapes:{}", shapes), ("tier smoke", "sglang:{}", None))
    rates, with_bug = [], {}
    with judging() as judge:
        for who, spec, wanted in sources:
            of_class = planned(judge, spec.format(args.backend), wanted, None)
            assert of_class is not None, f"{args.backend} declares no case"
            rates.append(rate(judge, f"this kit, {who}", *of_class))
        for bug in (bug for bug in (*BUGS, *SHIPPED) if bug.name in args.bug):
            with_bug[bug.name] = {}
            for who, spec, wanted in sources:
                module = spec.replace("sglang:", "sglang_bugs:").format(bug.name)
                of_bug = planned(judge, module, wanted, bug)
                found = (0, 0) if of_bug is None else count(judge, *of_bug)
                with_bug[bug.name][f"this kit, {who}"] = found
                print(f"  {bug.name}: {found[0]} of {found[1]} case-runs of {who}", file=sys.stderr, flush=True)
    args.out.write_text(json.dumps({"rates": rates, "with_bug": with_bug}, indent=1))


if __name__ == "__main__":
    main()

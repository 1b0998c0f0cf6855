"""Compare the emulation with the stored verdicts of a real GPU, or, on a GPU, measure new ones.

python -m attn_testkit_corpus.calibrate                       compare here
python -m attn_testkit_corpus.calibrate --measure --out FILE  measure on the GPU of this machine
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .jobs import Job


def _measure(out: Path, workers: int, only: str | None) -> int:
    from .jobs import all_jobs
    from .store import save
    from .workers import run_isolated

    start = time.monotonic()
    jobs = [job for job in all_jobs() if only is None or only in job.name]
    answers = run_isolated(jobs, workers)
    save(out, answers)
    print(f"{len(answers)} verdicts in {time.monotonic() - start:.0f} s: {out}")
    return 0


def _answers_here(only: str | None) -> dict[Job, str]:
    from cuda_on_cpu import emulated_cuda

    from .jobs import all_jobs, run

    answers = {}
    for job in all_jobs():
        if only is None or only in job.name:
            with emulated_cuda():
                answers[job] = run(job)
    return answers


def _compare(verdicts: Path | None, only: str | None, verbose: bool) -> int:
    import torch

    from . import store

    torch.set_num_threads(1)
    answers = _answers_here(only)
    failures = 0
    for path in [verdicts] if verdicts else store.stored():
        gpu = store.load(path)
        print(f"{path.name}: {gpu.title}; here torch {torch.__version__}")
        for kind in ("no_grad", "inference_mode", "sync", "loops", "facts"):
            result = store.compare(gpu, answers, (kind,))
            print(
                f"  {kind}: {result.compared} compared, the GPU fails {result.gpu_fails};"
                f" {len(result.missed)} missed, {len(result.false_alarms)} false alarms,"
                f" {len(result.other)} fail differently, {len(result.unmeasured)} unmeasured"
            )
            for label, differences in (
                ("missed", result.missed),
                ("false alarm", result.false_alarms),
                *((("differs", result.other),) if verbose or kind in ("facts", "loops") else ()),
            ):
                for difference in differences:
                    print(f"    {label:12s}{difference}")
            failures += len(result.missed)
    if verbose:
        for job, answer in answers.items():
            print(f"    {job.kind:15s} {job.name:40s} {answer}")
    return 1 if failures else 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns 0; 1 if the emulation missed a failure of the GPU; 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m attn_testkit_corpus.calibrate", description=__doc__)
    parser.add_argument("--measure", action="store_true", help="measure on a real GPU instead of comparing")
    parser.add_argument("--out", type=Path, help="where --measure writes the verdicts")
    parser.add_argument("--workers", type=int, default=min(16, os.cpu_count() or 1), help="processes for --measure")
    parser.add_argument("--verdicts", type=Path, help="compare with this file instead of the stored ones")
    parser.add_argument("--only", help="only jobs whose name contains this text")
    parser.add_argument("--verbose", action="store_true", help="show every verdict")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    if not options.measure:
        os.environ.setdefault("TRITON_INTERPRET", "1")
        return _compare(options.verdicts, options.only, options.verbose)
    if options.out is None:
        print("--measure needs --out FILE", file=sys.stderr)
        return 2
    return _measure(options.out, options.workers, options.only)


if __name__ == "__main__":
    raise SystemExit(main())

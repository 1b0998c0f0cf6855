"""Comparison of SGLang's own DSA cases with this kit's, on ``DeepseekSparseAttnBackend`` without a GPU.

    build/servers/sglang-0.5.23/bin/python ci/side/sparse.py --out side.json

SGLang's kit has seven cases of sparse attention and a tolerance of 0.16, absolute and relative. They run with
``triton_sparse_mla`` and ``triton``, the two kernels that a CPU can emulate. This kit runs tier smoke of decode and of
extend, eager. Each bug of ``packages/servers/tests/bridges/sglang_sparse_bugs.py`` is then put into the class for both;
this kit looks for it in decode only.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
sys.path[:0] = [str(HERE.parents[1]), str(ROOT / "packages" / "servers" / "tests" / "bridges")]

from side.theirs import KIT, prepared  # noqa: E402


def theirs() -> dict[str, Any]:
    """SGLang's cases: seconds, the largest error as a part of the tolerance, and red cases with each bug."""
    # Its runner takes the default top-k, whose plan is compiled for a GPU. No case calls the top-k.
    os.environ["SGLANG_OPT_USE_TOPK_V2"] = "0"
    import torch
    from sglang_sparse_bugs import BUGS, put_in

    dsa = importlib.import_module(f"{KIT}.attention_methods.dsa_attention")
    module = importlib.import_module("sglang.srt.layers.attention.dsa_backend")
    cases, real = dsa.make_dsa_sparse_cases("dsa"), module.DeepseekSparseAttnBackend

    def margins() -> list[float]:
        found = []
        for case in cases:
            testcase = unittest.TestCase()
            fixture = dsa.build_dsa_sparse_attention_fixture(
                testcase, case, hidden_size=dsa.DEFAULT_HIDDEN_SIZE, max_context_len=dsa.DSA_PAGE_SIZE,
                dtype=torch.bfloat16, device="cuda", dsa_prefill_backend="triton_sparse_mla",
                dsa_decode_backend="triton",
            )  # fmt: skip
            actual = dsa.run_dsa_sparse_fixture_eager(fixture, testcase).float()
            expected = dsa.expected_dsa_sparse_fixture_output(fixture).float()
            limit = dsa.DSA_SPARSE_ATOL + dsa.DSA_SPARSE_RTOL * expected.abs()
            found.append(float(((actual - expected).abs() / limit).nan_to_num(torch.inf).max()))
        return found

    margins()
    start = time.process_time()
    right = margins()
    seconds = time.process_time() - start
    calls = {name: getattr(real, name) for name in ("_forward_triton_decode", "_forward_triton_sparse_mla")}
    with_bug = {}
    for name, change in BUGS.items():
        put_in(real, change, bound=False)
        found = margins()
        with_bug[name] = [sum(each > 1 for each in found), len(cases), max(found)]
        for call, method in calls.items():
            setattr(real, call, method)
    return {"cases": len(cases), "cpu_seconds": seconds, "margin": max(right), "with_bug": with_bug}


def _run(backend: str, folder: str, *options: str) -> dict[str, Any]:
    out = Path(folder) / "run.json"
    command = [sys.executable, "-m", "attn_testkit", "run", "--backend", backend, "--device", "cpu", "--json", str(out)]
    wanted = [*command, "--execution", "eager", "--diagnose", "none", *options]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "packages" / "servers" / "tests" / "bridges"),
    }
    subprocess.run(wanted, env=env, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def ours() -> dict[str, Any]:
    """This kit's: the same."""
    from sglang_sparse_bugs import BUGS

    with tempfile.TemporaryDirectory() as folder:
        right = _run("sglang:dsa", folder, "--tier", "smoke", "--mode", "decode", "--mode", "extend")
        with_bug = {}
        for name in BUGS:
            results = _run(f"sglang_sparse_bugs:{name}", folder, "--tier", "smoke", "--mode", "decode")["results"]
            with_bug[name] = [sum(each["status"] != "passed" for each in results), len(results)]
    results = right["results"]
    return {
        "cases": len(results), "seconds": sum(sum(each["seconds"].values()) for each in results),
        "margin": max(each.get("margin") or 0.0 for each in results), "with_bug": with_bug,
    }  # fmt: skip


def main() -> None:
    """Write both sides to ``--out``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--side", choices=["theirs", "ours"], action="append")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    if "theirs" in (args.side or ["theirs"]):
        with prepared(), contextlib.redirect_stdout(sys.stderr):
            found["theirs"] = theirs()
    if "ours" in (args.side or ["ours"]):
        with prepared():
            found["ours"] = ours()
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

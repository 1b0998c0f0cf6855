"""Comparison of SGLang's own cases of recurrent states with this kit's, on SGLang's classes without a GPU.

    build/servers/sglang-0.5.23/bin/python ci/side/states.py --out side.json

SGLang's kit has 44 cases (GDN 10, KDA 10, Lightning 10, Mamba2 14). To those of GDN and Mamba2 come the graphs and the
verifies of its tests. This kit runs tier smoke, or the case of core that a bug needs. Each bug of
``packages/servers/tests/bridges/sglang_state_side.py`` is then put into the classes for both; this kit looks for it in
the mode where it shows, SGLang's in all its cases of the class.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
sys.path[:0] = [str(HERE.parents[1]), str(ROOT / "packages" / "servers" / "tests" / "bridges")]

from side.theirs import KIT, prepared  # noqa: E402

KINDS = ("mamba2", "gdn", "kda", "lightning")
Run = Callable[[], None]
_VERIFY, _EDGE = {"prefix_lens": (4, 7), "extend_lens": (3, 3)}, {"prefix_lens": (14, 15, 16)}


def _cases(kind: str) -> dict[str, Run]:
    """The cases of a kind that its wheel makes, and the runner modes of its tests: name -> call."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    own = importlib.import_module(f"{KIT}.attention_methods.{kind}_attention")
    graphs = importlib.import_module(f"{KIT}.runner_modes.cuda_graph_decode_runner")
    verifies = importlib.import_module(f"{KIT}.runner_modes.speculative_target_verify_runner")
    made = getattr(own, f"make_{kind}_cases")("triton")

    def of(function: Any, case: Any, **options: Any) -> Run:
        return lambda: function(unittest.TestCase(), case, **options)

    found = {case.name: of(getattr(own, f"run_{kind}_attention_case"), case) for case in made}
    decode = dataclasses.replace(made[0], forward_mode=ForwardMode.DECODE, extend_lens=(), page_size=16, **_EDGE)
    verify = dataclasses.replace(made[0], forward_mode=ForwardMode.TARGET_VERIFY, page_size=16, **_VERIFY)
    found["graph of decode"] = of(getattr(graphs, f"run_{kind}_cuda_graph_decode_case"), decode)
    for topk in (1, 2) if kind in ("gdn", "kda") else (1,):
        found[f"verify, top-k {topk}"] = of(getattr(verifies, f"run_{kind}_eagle_verify_case"), verify, topk=topk)
    found["graph of verify"] = of(getattr(verifies, f"run_{kind}_eagle_verify_cuda_graph_case"), verify, topk=1)
    return found


@contextlib.contextmanager
def _margins(found: list[float]) -> Iterator[None]:
    """Note the largest error as a part of the tolerance of each comparison that SGLang's kit makes."""
    import torch

    right = torch.testing.assert_close

    def assert_close(actual: Any, expected: Any, *, atol: float, rtol: float, **more: Any) -> None:
        limit = atol + rtol * expected.float().abs()
        found.append(float(((actual.float() - expected.float()).abs() / limit).nan_to_num(torch.inf).max()))
        right(actual, expected, atol=atol, rtol=rtol, **more)

    with unittest.mock.patch.object(torch.testing, "assert_close", assert_close):
        yield


@contextlib.contextmanager
def _modules_move() -> Iterator[None]:
    """Move modules as a GPU's torch does: the emulation's device is unknown to the C function behind ``Module.to``."""
    import torch

    def to(module: Any, device: Any = None, dtype: Any = None) -> Any:
        for part in module.modules():
            for name, value in list(part._parameters.items()):
                if value is not None:
                    moved = torch.nn.Parameter(value.detach().to(device=device, dtype=dtype), requires_grad=False)
                    moved.__dict__.update(vars(value))
                    part._parameters[name] = moved
            for name, value in list(part._buffers.items()):
                if value is not None:
                    part._buffers[name] = value.to(device=device)
        return module

    with unittest.mock.patch.object(torch.nn.Module, "to", to):
        yield


def _run_all(cases: dict[str, Run]) -> tuple[list[str], dict[str, list[float]]]:
    """Names of cases that did not pass, with the first line of why, and the margins of each case."""
    red, margins = [], {}
    for name, run in cases.items():
        margins[name] = list[float]()
        with _margins(margins[name]), _modules_move():
            try:
                run()
            except Exception as error:  # whatever a class raises is a case that did not pass
                red.append(f"{name}: {type(error).__name__} {(str(error).strip().splitlines() or [''])[0]}")
    return red, margins


def _largest(margins: dict[str, list[float]]) -> float:
    return max((each for of_case in margins.values() for each in of_case), default=0.0)


def theirs() -> dict[str, Any]:
    """SGLang's cases of each kind, and those that do not pass with each bug."""
    from sglang.kernels.ops.mamba import causal_conv1d_triton
    from sglang.srt.layers.attention.mamba import mamba as mixers
    from sglang_state_side import BUGS, put_in

    found: dict[str, Any] = {"kinds": {}, "with_bug": {}}
    for name in ("causal_conv1d_fn", "causal_conv1d_update"):
        # Mamba2's module imports the compiled convolution on a GPU only.
        for alias in (name, f"{name}_triton"):
            vars(mixers).setdefault(alias, getattr(causal_conv1d_triton, name))
    norm, native = mixers.Mixer2RMSNormGated, mixers.Mixer2RMSNormGated.forward
    # On a GPU it is a kernel that returns the dtype of its input; the torch of a CPU returns that of the weight.
    norm.forward = lambda self, rows, gate: native(self, rows, gate).to(rows.dtype)
    cases, right = {kind: _cases(kind) for kind in KINDS}, {}
    for kind in KINDS:
        _run_all(dict(list(cases[kind].items())[:1]))
        start = time.process_time()
        red, right[kind] = _run_all(cases[kind])
        found["kinds"][kind] = {
            "cases": len(cases[kind]), "red": red, "margin": _largest(right[kind]),
            "cpu_seconds": time.process_time() - start,
        }  # fmt: skip
        print(kind, found["kinds"][kind], file=sys.stderr, flush=True)
    for name, bug in BUGS.items():
        sound = {each: run for each, run in cases[bug.kind].items()
                 if not any(text.startswith(f"{each}: ") for text in found["kinds"][bug.kind]["red"])}  # fmt: skip
        with put_in(bug):
            red, margins = _run_all(sound)
        moved = [each for each in sound if margins[each] != right[bug.kind][each]]
        found["with_bug"][name] = {"red": red, "cases": len(sound), "moved": moved, "margin": _largest(margins)}
        print(name, len(red), "of", len(sound), _largest(margins), "moved", moved, file=sys.stderr, flush=True)
    return found


def _run(backend: str, folder: str, *options: str) -> list[dict[str, Any]]:
    out = Path(folder) / "run.json"
    command = [sys.executable, "-m", "attn_testkit", "run", "--backend", backend, "--device", "cpu", "--json", str(out)]
    wanted = [*command, "--tier", "smoke", "--diagnose", "none", *options]
    path = os.pathsep.join(
        (
            str(ROOT / "packages" / "servers" / "tests" / "bridges"),
            os.environ.get("PYTHONPATH", ""),
        )
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    # Results of the bug before it must not count again.
    out.unlink(missing_ok=True)
    subprocess.run(wanted, env=env, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    results: list[dict[str, Any]] = json.loads(out.read_text())["results"]
    return results


def ours() -> dict[str, Any]:
    """This kit's: the bugs in tier smoke of the mode where each shows."""
    from sglang_state_side import BUGS

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, bug in BUGS.items():
            which = ("--mode", bug.mode, *(("--case", bug.case) if bug.case else ()))
            results = _run(f"sglang_state_side:{name}", folder, *which, "--execution", bug.execution)
            red = [each for each in results if each["status"] != "passed"]
            checks = sorted({finding["check"] for each in red for finding in each.get("findings", ())})
            found[name] = {"red": len(red), "cases": len(results), "checks": checks}
            print(name, found[name], file=sys.stderr, flush=True)
    return {"with_bug": found}


def main() -> None:
    """Write both sides to ``--out``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--side", choices=["theirs", "ours"], action="append")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    with prepared():
        for side, run in (("theirs", theirs), ("ours", ours)):
            if side in (args.side or [side]):
                with contextlib.redirect_stdout(sys.stderr):
                    found[side] = run()
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""SGLang's own attention kit, ``sglang.test.kits.attention_unittest``, without a GPU. Run by ``ci/side_by_side.py``.

    python ci/side/theirs.py --backend triton --bug DoubleCount --out FILE

Its functions run as they are, with their own tolerances and ``device="cuda"``, which this kit's emulation provides.
What stands in the way without a GPU, and is no fault of a backend, is seen to in ``prepared``.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
import time
import types
import unittest
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path[:0] = [
    str(HERE.parents[1]),
    str(HERE.parents[2] / "packages" / "servers" / "tests" / "bridges"),
]

from side.shapes import CHECKED, OWN_LISTS, Shape, shapes_of  # noqa: E402

KIT = "sglang.test.kits.attention_unittest"
FUNCTIONS = {
    "dense": "attention_methods.dense_attention:run_dense_attention_case",
    "decode-graph": "runner_modes.cuda_graph_decode_runner:run_dense_cuda_graph_decode_case",
    "verify": "runner_modes.speculative_target_verify_runner:run_dense_spec_verify_case",
    "verify-graph": "runner_modes.speculative_target_verify_runner:run_dense_spec_verify_cuda_graph_case",
    "v2-graph": "runner_modes.speculative_draft_extend_runner:run_dense_draft_extend_v2_cuda_graph_case",
    "v2-runner": "runner_modes.speculative_draft_extend_runner:run_dense_eagle_draft_extend_v2_cuda_graph_runner_case",
    "draft-runner": "runner_modes.speculative_draft_runner:run_dense_eagle_draft_cuda_graph_runner_case",
    "mtp-runner": "runner_modes.speculative_draft_runner:run_dense_frozen_kv_mtp_cuda_graph_runner_case",
    "split-op": "runner_modes.split_op_runner:run_dense_split_op_extend_case",
}
MODES = {
    "decode": "DECODE", "extend": "EXTEND", "target-verify": "TARGET_VERIFY", "draft-extend-v2": "DRAFT_EXTEND_V2"
}  # fmt: skip


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """A process in which the kit's cases run without a GPU."""
    from attn_testkit.environment import resolve
    from attn_testkit_servers.bridges.sglang import imports

    environment = resolve("cpu")
    environment.prepare_process()
    imports.prepare()
    # Its test_utils reads the first character.
    if not os.environ.get("CUDA_VISIBLE_DEVICES", "0"):
        del os.environ["CUDA_VISIBLE_DEVICES"]
    # The same module imports what measures servers, and with it packages of data sets. No case calls it.
    serving: Any = types.ModuleType("sglang.benchmark.serving")
    serving.run_benchmark = None
    sys.modules["sglang.benchmark.serving"] = serving
    import torch
    from sglang.srt.model_executor.runner_utils import pool
    from sglang.srt.runtime_context import set_stream

    # It fills the KV pool from projections that want a gradient.
    with torch.no_grad(), environment.active():
        # SGLang makes the stream of captures for the device that it was started on, a CPU.
        set_stream(pool._CAPTURE_STREAM_NAME, torch.cuda.Stream())
        yield


def all_shapes(backend: str) -> list[Shape]:
    """The lists of the wheel, and those of its test files."""
    dense = importlib.import_module(f"{KIT}.attention_methods.dense_attention")
    own = [case for name in OWN_LISTS[backend] for case in getattr(dense, name)(backend)]
    modes = {upper: mode for mode, upper in MODES.items()}
    return [
        *(
            Shape(
                case.name, "dense", modes[case.forward_mode.name], case.prefix_lens, case.extend_lens, case.page_size,
                case.num_heads, case.num_kv_heads, -1 if case.sliding_window_size is None else case.sliding_window_size,
            )
            for case in own
        ),
        *shapes_of(backend),
    ]  # fmt: skip


def runner_of(backend: str, shape: Shape) -> Callable[[], None]:
    """What runs the case; it raises where the case does not pass."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    dense = importlib.import_module(f"{KIT}.attention_methods.dense_attention")
    module, _, name = FUNCTIONS[shape.kind].partition(":")
    function = getattr(importlib.import_module(f"{KIT}.{module}"), name)
    case = dense.DenseAttentionCase(
        name=shape.name, backend=backend, forward_mode=ForwardMode[MODES[shape.mode]], num_heads=shape.q_heads,
        num_kv_heads=shape.kv_heads, page_size=shape.page_size, prefix_lens=shape.prefixes, extend_lens=shape.new,
        sliding_window_size=None if shape.window < 0 else shape.window,
    )  # fmt: skip
    return lambda: function(unittest.TestCase(), case, **dict(shape.options))


@contextlib.contextmanager
def bug_in_place(name: str) -> Iterator[None]:
    """A bug of ``sglang_bugs`` in every ``TritonAttnBackend`` that is made; none for an empty name.

    The class there is a class of the bridge that changes its ``real``. Here the bridge is left out of it.
    """
    if not name:
        yield
        return
    import sglang_bugs
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    bug_class, bridge, hook = getattr(sglang_bugs, name), sglang_bugs.Triton, "init_forward_metadata_out_graph"
    right = TritonAttnBackend.__init__

    def init(real: Any, *given: Any, **more: Any) -> None:
        right(real, *given, **more)
        out_graph = getattr(real, hook)
        bug = bug_class(real)
        bug.right = out_graph
        if hook in vars(bug_class):
            setattr(real, hook, getattr(bug, hook))

    replaced = {
        (bridge, "__init__"): lambda self, real: setattr(self, "real", real),
        (bridge, hook): lambda self, batch, in_capture=False: self.right(batch, in_capture=in_capture),
        (TritonAttnBackend, "__init__"): init,
    }
    with contextlib.ExitStack() as stack:
        for (owner, attribute), value in replaced.items():
            stack.enter_context(unittest.mock.patch.object(owner, attribute, value))
        yield


def run_all(backend: str, shapes: Sequence[Shape]) -> list[str]:
    """Of each what was wrong, in a line; empty where it passed."""
    wrong = []
    for shape in shapes:
        run = runner_of(backend, shape)
        try:
            run()
            wrong.append("")
        except unittest.SkipTest as skipped:
            wrong.append(f"skipped: {skipped}")
        except Exception as error:
            wrong.append(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")
    return wrong


def main() -> None:
    """Write what was found to ``--out``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True)
    parser.add_argument("--bug", action="append", default=[])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with prepared():
        shapes = all_shapes(args.backend)
        run_all(args.backend, shapes[:1])
        start, cpu = time.perf_counter(), time.process_time()
        wrong = run_all(args.backend, shapes)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
        print(f"  {len(shapes)} cases of SGLang's kit, {seconds:.1f} s", file=sys.stderr, flush=True)
        with_bug = {}
        for bug in args.bug:
            with bug_in_place(bug):
                found = run_all(args.backend, shapes)
            # A case that does not pass without the bug says nothing about it.
            with_bug[bug] = [text for text, before in zip(found, wrong, strict=True) if not before]
            red = sum(map(bool, with_bug[bug]))
            print(f"  {bug}: {red} of {len(with_bug[bug])} cases of SGLang's kit", file=sys.stderr, flush=True)
    args.out.write_text(json.dumps({
        "cases": len(shapes), "seconds": seconds, "cpu_seconds": cpu_seconds,
        "red": [f"{shape.name}: {text}" for shape, text in zip(shapes, wrong, strict=True) if text],
        "checked": sum(CHECKED[shape.kind] for shape in shapes),
        "with_bug": {bug: [sum(map(bool, found)), len(found)] for bug, found in with_bug.items()},
        "why": {bug: sorted({text for text in found if text}) for bug, found in with_bug.items()},
        "shapes": [[shape.name, *run] for shape in shapes for run in runs_of(shape)],
    }, indent=1))  # fmt: skip


def runs_of(shape: Shape) -> list[tuple[str, str]]:
    """Case-runs of this kit with the same shape."""
    from side.shapes import case_runs

    return case_runs([shape])


if __name__ == "__main__":
    main()

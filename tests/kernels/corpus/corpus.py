"""The corpus of public kernels: `python tests/kernels/corpus/corpus.py PROJECT OUT.jsonl [TEXT]` in its environment."""

from __future__ import annotations

import importlib
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> None:
    import triton.runtime.interpreter as interpreter

    from attn_testkit.emulation import emulated_cuda
    from corpus_run import run_all

    project, out, *text = sys.argv[1:]
    with emulated_cuda():
        calls = importlib.import_module(f"corpus_calls_{project}").calls()
    run_all(interpreter, [call for call in calls if not text or text[0] in call[0]], out, 3, 240)


if __name__ == "__main__":
    main()

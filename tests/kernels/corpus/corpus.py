"""The corpus of public kernels, in the environment of a project.

python tests/kernels/corpus/corpus.py calls PROJECT OUT.jsonl [PATTERN]    the package's own functions
python tests/kernels/corpus/corpus.py generated PROJECT OUT.jsonl [TEXT]   kernels that OUT.jsonl does not have yet
python tests/kernels/corpus/corpus.py generated PROJECT OUT.jsonl after=OTHER.jsonl   that lack block pointers there
python tests/kernels/corpus/corpus.py kernels PROJECT OUT.json             what belongs to the corpus
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.simplefilter("ignore")


def main() -> None:
    import corpus_imports
    import corpus_kernels
    import torch
    import triton
    import triton.runtime.interpreter as interpreter
    from corpus_run import BLOCK_POINTERS, compared_already, finished, generated_calls, run_all, without_block_pointers

    from cuda_on_cpu import emulated_cuda

    what, project, out, *text = sys.argv[1:]
    torch.set_num_threads(1)
    corpus_imports.prepare(project)
    known: Any = {}
    if what == "calls":
        with emulated_cuda():
            calls = importlib.import_module(f"corpus_calls_{project}").calls()
        left = [call for call in calls if (not text or re.search(text[0], call[0])) and call[0] not in finished(out)]
        run_all(interpreter, left, out, 2, 240)
        return
    with emulated_cuda():
        known = dict(
            corpus_kernels.of_modules(
                importlib.import_module("corpus_calls_tutorials").modules(), interpreter.InterpretedFunction
            )
            if project == "tutorials"
            else corpus_kernels.kernels(corpus_kernels.PROJECTS[project], interpreter.InterpretedFunction)
        )
    if what == "kernels":
        Path(out).write_text(json.dumps(described(project, known, triton.__version__), indent=1))
        return
    done = compared_already(out)
    after = text.pop().removeprefix("after=") if text and text[0].startswith("after=") else None
    wanted = without_block_pointers(after) if after else None
    for kernels in known.values():
        for kernel in [] if isinstance(kernels, str) else kernels:
            if (
                not kernel.called
                and kernel.name not in done
                and (not text or re.search(text[0], kernel.name))
                and (wanted is None or kernel.name in wanted)
            ):
                for calls in generated_calls(interpreter, kernel, out):
                    outcome = run_all(interpreter, [calls], out, 1, 30)[0]
                    if any(BLOCK_POINTERS in launch.detail for launch in outcome.launches):
                        break
                    if any(len(launch.lines) >= 0.7 * launch.of > 0 and launch.wrote for launch in outcome.launches):
                        break


def described(project: str, known: dict[str, Any], version: str) -> dict[str, Any]:
    """The kernels of a project as plain values, with why those are left out that do not run here."""
    import importlib.metadata

    import corpus_kernels

    chosen = corpus_kernels.PROJECTS.get(project, corpus_kernels.PROJECTS["fla"])
    kernels = {
        kernel.name: ""
        for several in known.values()
        if not isinstance(several, str)
        for kernel in several
        if not kernel.called
    }
    helpers = sum(kernel.called for several in known.values() if not isinstance(several, str) for kernel in several)
    for module, reason in known.items():
        if isinstance(reason, str):
            kernels.update({f"{module}.{name}": reason for name in corpus_kernels.written(chosen, module)})
    return {
        "project": project,
        "version": importlib.metadata.version(chosen.distribution) if project in corpus_kernels.PROJECTS else "",
        "triton": version,
        "helpers": helpers, "kernels": kernels,
    }  # fmt: skip


if __name__ == "__main__":
    main()

"""Checks of state that outlives a step, in the instance and in the process."""

from __future__ import annotations

from .check import Check, Stage, in_eager

__all__ = ["CHECKS"]

CHECKS = (
    Check(
        "steps-independent",
        "An eager step gives the same result whatever ran on the instance before it, and whatever a co-resident "
        "instance does meanwhile.",
        "A plan or table that is reused because its key looks the same, a buffer sized by the first batch, a buffer or "
        "constant that all instances of a process share.",
        "TensorRT-LLM #6163; vLLM #21525; LightLLM #1367",
        "As the first step of a fresh instance it is right. Look for state that survives a step: a cached plan or "
        "table whose cache key omits something, or, with a second instance in the process, a global.",
        evaluated_from=Stage.COMPLETED,
        applies=in_eager,
        behind_outputs=True,
    ),
    Check(
        "leaves-process-alone",
        "A backend leaves the process as it found it: default dtype and device, grad mode, deterministic flags, seeds, "
        "environment, current directory, warnings filters, signal handlers, modes that were entered, functions of "
        "torch and of the kit, threads and child processes. Drawing random numbers is fine, seeding is not.",
        "torch.set_default_dtype or torch.manual_seed in a constructor, an environment variable set for a compiler, "
        "a torch function replaced to work around a bug, a helper thread that outlives its instance.",
        "general",
        "`where` names what changed, from what to what. Set it in a `with` block, or pass what you need as an "
        "argument: the server and other backends share the process. Effects of a package's first import, pools that "
        "compile kernels, threads of other packages, and variables of compilers (`TRITON_`, `CUDA_`, ...) are not "
        "reported.",
        evaluated_from=Stage.COMPLETED,
    ),
)
"""Checks in the order in which they are worth reading. Their failures are found by diagnosis, and during a run."""

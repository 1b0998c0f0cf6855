"""Checks of what outlives a step: on the instance, and in the process."""

from __future__ import annotations

from .check import Check, Stage, in_eager

__all__ = ["CHECKS"]

CHECKS = (
    Check(
        "steps-independent",
        "An eager step gives the same whatever step ran on the instance before it, and whatever another "
        "instance does meanwhile.",
        "A plan or a table that is kept while a key looks the same, a buffer sized by the first batch, a buffer or a "
        "constant that all instances of a process share.",
        "TensorRT-LLM #6163; vLLM #21525; LightLLM #1367",
        "As the first step of a fresh instance it is right. Look for what outlives a step: a plan or table that is "
        "used again, and what its key leaves out; with another instance at work, for what belongs to the process.",
        judged_from=Stage.COMPLETED,
        applies=in_eager,
        behind_outputs=True,
    ),
    Check(
        "leaves-process-alone",
        "A backend leaves the process as it found it: default dtype and device, grad mode, deterministic flags, seeds, "
        "environment, current directory, warnings filters, signal handlers, modes that were entered, functions of "
        "torch and of the kit, threads and child processes. Drawing random numbers is fine, seeding is not.",
        "torch.set_default_dtype or torch.manual_seed in a constructor, an environment variable set for a compiler, a "
        "function of torch that is replaced to work around a bug, a helper thread that outlives its instance.",
        "general",
        "`where` names what changed, and from what to what. Set it in a `with` block, or pass what you need as an "
        "argument: the server and other backends share the process. What packages do at their first import, pools "
        "that compile kernels, threads of other packages, and variables of compilers (`TRITON_`, `CUDA_`, ...) are no "
        "finding.",
        judged_from=Stage.COMPLETED,
    ),
)
"""In the order in which they are worth reading. Found by diagnosis, and while driving."""

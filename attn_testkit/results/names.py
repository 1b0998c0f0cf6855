"""Names that front ends need before torch is imported: modes, executions, checks, parts of reasons."""

from __future__ import annotations

# The spellings of contract/modes.py, repeated here because it imports torch, for which reports and --help must not
# wait. A test compares them.
MODES = ("decode", "target-verify", "draft-extend", "draft-extend-v2", "extend", "draft-decode")


def mode_of(case: str) -> str:
    """The mode of a case id; empty for the id of another kit that names none of ``MODES``."""
    return max((mode for mode in MODES if case.startswith(f"{mode}-")), key=len, default="")


EXECUTIONS = ("eager", "graph")

NO_CASE = "(no case)"
"""The case of a row for a declared mode that no case can satisfy, or for a backend that cannot be imported."""

FUZZ = "fuzz"
"""The tier of a results file of random cases, which have no planned number."""

KIT_ERROR = "the kit itself failed: "
"""Beginning of a result's reason if the kit itself failed, not the backend."""

NO_ROOM = "no room "
"""Beginning of a result's reason if the machine lacks the memory that the case needs."""

IN_MPS = "under MPS: "
"""Beginning of ``CaseResult.repeated`` if the first attempt shared its GPU by MPS, and may have ended for a fault of
another case-run."""

NOT_STARTED = "not started: "
"""Beginning of a result's reason if the budget of the run left no time for it."""

CANNOT_IMPORT = "is installed and cannot be imported"
"""Part of the reason of a case-run that is not run because a package is broken."""

NOT_COMPILED = "not compiled"
"""Value of ``CaseResult.kernels`` if torch.compile was kept from compiling."""

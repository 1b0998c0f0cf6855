"""Healthy controls of what servers and kernels disagree about, each of which says what it does."""

from __future__ import annotations

from ..contract import ForwardMode
from .builds import RegisterRowsBackend
from .c_new_rows import FP8
from .catalogue import control
from .g_narrow_numbers import Fp8Probabilities
from .multi_step import MultiStepBackend


@control("new-rows-as-given")
class NewRowsAsGiven(RegisterRowsBackend):
    """New rows are attended in the model's dtype and stored in FP8, and it says so (sglang's and vLLM's prefill)."""

    capabilities = FP8.with_changes(new_rows_as_given=FP8.eager, takes_none_kv=True)


@control("draft-rows-as-given")
class DraftRowsAsGiven(MultiStepBackend, RegisterRowsBackend):
    """A forward's own rows in the model's dtype; those of the draft's earlier forwards from the FP8 pool."""

    capabilities = MultiStepBackend.capabilities.with_changes(
        kv_dtypes={"fp8_e4m3"}, new_rows_as_given={ForwardMode.DRAFT_DECODE}
    )


@control("fp8-probabilities-lifted")
class Fp8ProbabilitiesLifted(Fp8Probabilities):
    """Probabilities in FP8 times 256, queries in FP8, and it says so (FlashAttention 3)."""

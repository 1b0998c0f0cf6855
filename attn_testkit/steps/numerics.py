"""Numerics of a case: the declared formats on which its data and its limits depend."""

from __future__ import annotations

from dataclasses import dataclass

from ..cases.case import Case
from ..cases.features.data_pattern import HALFWAY
from ..contract import Capabilities, ForwardMode


@dataclass(frozen=True)
class Numerics:
    """Declared formats of a schedule. Backends with equal numerics for a case share its schedule and the oracle's
    answers."""

    matmul_dtype: str = "model"
    """Dtype of the backend's products (``Precision.matmul_dtype``, and ``tf32`` of ``Precision.fp32_products`` if
    that is coarser): limits follow from it, and so do the queries of a case with an FP8 pool, which may have to be
    exact in FP8."""
    new_rows_as_given: bool = False
    """True: a forward's own rows are attended to as given (``Precision.new_rows_as_given``)."""
    lse_dtype: str = "fp32"
    """Dtype of the log-sum-exps of a case with KV splits: ``fp32``, or ``model`` for the case's dtype."""
    q_scale: str = "none"
    """Scale of queries before they are rounded to FP8 (``Precision.q_scale``); ``none`` if the backend does not
    multiply in FP8."""
    state_products: str = "fp32"
    """Format of the factors of products in layers with states (``State.products``); ``fp32`` outside of extend."""
    ties: str = ""
    """Rounding of quotients between two numbers of the case's format (``KVPools.ties``), in a case that has some."""
    conv_products: str = "fp32"
    """Format of the products of a convolution in such layers (``State.conv_products``)."""


MODEL = Numerics()
"""Numerics with everything in the dtype of the model."""


def numerics_of(case: Case, declared: Capabilities) -> Numerics:
    """Return the numerics of a case: declarations for FP8 pools apply only to cases with an FP8 pool."""
    in_fp8 = case.kv_dtype != "same"
    products = declared.precision.matmul_dtype if in_fp8 else "model"
    if products == "model" and case.dtype == "fp32" and declared.precision.fp32_products == "tf32":
        products = "tf32"
    lse_in_model = bool(case.kv_splits) and declared.lse is not None and declared.lse.dtype == "model"
    return Numerics(
        matmul_dtype=products,
        new_rows_as_given=in_fp8 and case.mode in declared.precision.new_rows_as_given,
        lse_dtype="model" if lse_in_model else "fp32",
        q_scale=declared.precision.q_scale if in_fp8 else "none",
        state_products=declared.state.products
        if declared.state is not None and case.state is not None and case.mode is ForwardMode.EXTEND
        else "fp32",
        ties=declared.kv_pool.ties.get(case.kv_dtype, "") if case.data == HALFWAY else "",
        conv_products=declared.state.conv_products if declared.state is not None and case.state is not None else "fp32",
    )

"""Dtypes of a backend's inputs, and how its kernels round. The oracle and the limits follow these values."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from .context import BackendContext
from .declared import Declared, spelled
from .modes import ForwardMode
from .refusal import Refusal, first_outside, name_of_dtype

__all__ = ["DTYPES", "FP8_PRODUCTS", "FP32_PRODUCTS", "MATMUL_DTYPES", "Q_SCALES", "Precision"]

DTYPES = ("fp16", "bf16", "fp32")
FP8_PRODUCTS = ("fp8_e4m3", "fp8_e4m3_unscaled")
MATMUL_DTYPES = ("model", *FP8_PRODUCTS)
Q_SCALES = ("none", "per_token_head", "per_token", "per_tensor", "static")
FP32_PRODUCTS = ("ieee", "tf32")


@dataclass(frozen=True)
class Precision(Declared):
    """Dtypes and rounding of a backend: ``Precision(dtypes={"bf16"}, matmul_dtype="fp8_e4m3")``.

    Raises ``ValueError`` for a wrong spelling, and for scales of queries that are not rounded to FP8.
    """

    dtypes: Set[str] = frozenset({"fp16", "bf16"})
    """Dtypes of q, k, v and of the output: ``fp16``, ``bf16``, ``fp32``."""
    matmul_dtype: str = "model"
    """Dtype to which queries and probabilities are rounded before the two products, with an FP8 pool. ``model``: the
    model's dtype. ``fp8_e4m3``: FP8, with queries scaled as ``q_scale`` declares, and probabilities multiplied by a
    factor of at least 4 before they are rounded (FlyDSL: 7, FlashAttention 3: 256, XQA: 448). ``fp8_e4m3_unscaled``:
    the same, and probabilities are rounded without a factor, so all below 2^-10 vanish (flashinfer #5020). The limits
    and the test data follow from the word. None of these words allows probabilities that sum to 1 when they are rounded
    to FP8, because in long requests they vanish.

    With every value the kit expects that q·k stays in float32 through scale, soft cap, mask and softmax, and that both
    products accumulate in float32. The kernel may round probabilities to the model's dtype before the second product,
    the output, and each partial result that it combines, once; their sum stays in float32. Logits that are rounded to
    bf16 or fp16 before the softmax fail ``matches-oracle``."""
    q_scale: str = "none"
    """Group of numbers that share a scale when queries are rounded to FP8. It matters with an FP8 pool and a
    ``matmul_dtype`` of FP8. The scale is the largest absolute value of the group divided by 448 (the largest number of
    e4m3), or the next power of two. ``none``: queries are not scaled. ``per_token_head``: a scale for each head of each
    token. ``per_token``: a scale for each token. ``per_tensor``: one scale for all live rows of the forward, without
    padding. A backend with finer scales than it declares passes too. ``static``: ``AttentionLayer.q_scale``, a
    number of the checkpoint for each layer; queries beyond 448 times it are not tested.

    Test queries are exact under this rounding, beyond 448 and below the smallest number of FP8. With ``per_tensor``,
    rows that are small next to the largest may vanish, and the limits allow it."""
    fp32_products: str = "ieee"
    """Format to which the factors of both products are rounded if the model's dtype is float32. ``ieee``: float32.
    ``tf32``: 10 bits of mantissa, as tensor cores do by default (``tl.dot`` without ``input_precision``). The limits
    follow from it."""
    new_rows_as_given: Set[ForwardMode] = frozenset()
    """Modes in which, with an FP8 pool, a forward attends to its own k and v in the model's dtype, before they are
    rounded to FP8. Prefill kernels that read k and v directly do so. In other modes it attends to them as the pool
    stores them. Tokens that earlier forwards stored (earlier chunks, the same draft) are always used as the pool holds
    them, and so is everything if ``save_kv_cache`` is False. The oracle does the same."""

    _GUESSED = ("dtypes",)

    def _check(self) -> None:
        self._check_words("dtypes", DTYPES)
        for name, known in (
            ("matmul_dtype", MATMUL_DTYPES), ("q_scale", Q_SCALES), ("fp32_products", FP32_PRODUCTS),
        ):  # fmt: skip
            spelled(name, getattr(self, name), known)
        if self.q_scale != "none" and self.matmul_dtype not in FP8_PRODUCTS:
            raise ValueError(
                f"Precision.q_scale is {self.q_scale!r}, and matmul_dtype='model' says that queries are not rounded "
                "to FP8; write matmul_dtype='fp8_e4m3', or leave q_scale out"
            )
        self._check_modes("new_rows_as_given")

    def refused(self, context: BackendContext) -> Iterator[Refusal]:
        """The dtype of a context, if it is not declared."""
        yield from first_outside("dtype", [name_of_dtype(context.dtype)], self.dtypes)

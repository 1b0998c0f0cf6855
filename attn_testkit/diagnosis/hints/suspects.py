"""What makes a wrong number of data that are there to show it."""

from __future__ import annotations

__all__ = ["DATA_SUSPECTS", "LARGE_VALUES", "RESCALING", "SAME_RESULTS"]

RESCALING = "rescaling of what was summed when a later tile of keys has a larger maximum"
DATA_SUSPECTS = {
    "negative": [
        "a finite value that stands for minus infinity (all logits of this case are near -6e4)",
        "overflow of q k before it is scaled",
    ],
    "peaked": ["overflow or saturation of large logits"],
    "swamped": ["sums kept in 16 bits, which lose small terms beside a large one (values of this case)"],
    "saturated": ["a store in FP8 that does not stop at its largest number (values of this case are beyond it)"],
    "loud": ["the range of q: queries that are limited, or rounded to FP8 (those of this case are large)"],
    "large_and_small_queries": [
        "the scale of queries (q_scale): one that is missing, of another token or step, or not multiplied back (rows "
        "of this case are beyond what FP8 holds, or below it)"
    ],
    "towering": ["products of weights and values in 16 bits that are not yet divided by the sum of the weights"],
    "colossal": ["rows of bf16 that are converted to fp16, whose largest number is 65,504"],
    "faint": [
        "weights rounded to FP8 without a factor, where small ones vanish (matmul_dtype has to say fp8_e4m3_unscaled)"
    ],
    "cliff": [
        f"{RESCALING} (logits of this case climb and fall by hundreds along the keys)",
        "overflow or saturation of large logits",
    ],
}
"""Pattern of the data -> what to look at where they are in the case."""
SAME_RESULTS = ("mean", "negative", "codes", "footprint")
"""Patterns in which heads of a group, rows, or many KV tokens may give the same."""
LARGE_VALUES = ("towering", "colossal")
"""Patterns whose logits are 0, and whose values are large."""

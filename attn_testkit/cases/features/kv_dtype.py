"""The dtype of the KV pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...contract import KV_DTYPES, ROW_FORMATS
from ...glossary import Entry
from ..fields import Changes, Fields
from ..layers import SETTINGS
from .feature import Asked, Columns, Covered, Feature, OnLayers, Trait, Without, Word, of_fields
from .server.unused_scales import UNUSED_SCALES


def _layers(case: Fields) -> Sequence[Changes]:
    own = SETTINGS[: case.layers.count]
    kind = ROW_FORMATS[case.kv_dtype].layer_scale if case.kv_dtype in ROW_FORMATS else "tensor"
    queries: list[Changes] = [{"q_scale": each.q_scale} if case.kv_dtype != "same" else {} for each in own]
    if (case.kv_dtype == "same" and UNUSED_SCALES not in case.variants) or kind == "none":
        return queries
    if kind == "head":
        # Scales at capture are 1; each step has its own (``steps/data.py``).
        ones = torch.ones(case.heads.kv_heads)
        return [{**of, "k_head_scales": ones, "v_head_scales": ones} for of in queries]
    by = _ABOVE_SCALES_OF_BLOCKS if case.kv_dtype in ROW_FORMATS else 1.0
    return [
        {
            **of,
            "k_scale": each.k_scale * by,
            "v_scale": (each.k_scale if case.heads.layout.values_in_keys else each.v_scale) * by,
        }
        for each, of in zip(own, queries, strict=True)
    ]


_ABOVE_SCALES_OF_BLOCKS = 2.0**-4
"""Scale of a layer whose blocks have scales of few bits. With it, most numbers are neither too large nor too small for
their format."""


def _word(kv_dtype: str) -> str:
    return "kv" + kv_dtype.replace("_", "")


_WORDS = {_word(kv_dtype): kv_dtype for kv_dtype in KV_DTYPES if kv_dtype != "same"}


def _wrong(case: Fields) -> str:
    form = ROW_FORMATS.get(case.kv_dtype)
    if form is None or form.fits(case.heads.layout, case.dtype, case.head_dim, case.rope_dim):
        return ""
    rope = f" and a rope part of {case.rope_dim}" if form.latent and case.rope_dim else ""
    return f"{case.kv_dtype} with {case.heads} of {case.head_dim}{rope} in {case.dtype}: such rows are of {form.needs}"


KV_DTYPE = Feature(
    name="KV dtype",
    order=140,
    fields=("kv_dtype",),
    traits=(
        Trait("FP8 pool", lambda case: case.kv_dtype != "same"),
        Trait(
            "packed rows",
            lambda case: case.kv_dtype in ROW_FORMATS,
            excludes={
                "heads by layer": "rows of all layers have the same size in bytes",
            },
        ),
        Trait(
            "scales of the pool in memory of their own",
            lambda case: case.kv_dtype in ROW_FORMATS and ROW_FORMATS[case.kv_dtype].own_memory,
        ),
    ),
    wrong=_wrong,
    words=(
        Word(
            "|".join(_WORDS),
            lambda match, so_far: {"kv_dtype": _WORDS[match[0]]},
            lambda case: "" if case.kv_dtype == "same" else _word(case.kv_dtype),
        ),
    ),
    explained=(
        Entry(
            "kvfp8dsmla",
            "A row of the KV pool is 512 FP8 numbers, a float32 scale for each 128 of them, and a bf16 rope "
            "part. Scales are the largest number over 448, or powers of two (pow2).",
            also=("fp8_ds_mla", "656-byte row", "packed row", "kvfp8dsmlapow2", "fp8_ds_mla_pow2"),
        ),
        Entry(
            "kvnvfp4dsmla",
            "A row of the KV pool is 512 FP4 (e2m1) numbers, an FP8 rope part without a scale, and an e4m3 scale for "
            "each 16 numbers. Scales of every fourth tile are adjacent.",
            also=("nvfp4_ds_mla", "352-byte row"),
            page="how-to/selected-keys.md",
        ),
        Entry(
            "kvfp8dsmlav4",
            "Rows of DeepSeek V4: 448 FP8 numbers and a bf16 rope part, all of it value; after those of a whole page a "
            "power of two as scale for each 64 numbers.",
            also=("fp8_ds_mla_v4", "584-byte row"),
            page="how-to/selected-keys.md",
        ),
        Entry(
            "kvfp8dsmlav41",
            "Rows of DeepSeek V4.1: 512 FP8 numbers, all of it value; after those of a whole page a power of two as "
            "scale for each 32 numbers.",
            also=("fp8_ds_mla_v41", "528-byte row"),
            page="how-to/selected-keys.md",
        ),
        Entry(
            "kvint8pertokenhead",
            "Rows of the KV pool are int8 numbers, and after them a float32 scale per token and KV head.",
            also=("int8_per_token_head",),
            page="how-to/kv-formats.md",
        ),
        Entry(
            "kvfp8pertokenhead",
            "Rows of the KV pool are FP8 (e4m3) numbers, and after them a float32 scale per token and KV head.",
            also=("fp8_per_token_head",),
            page="how-to/kv-formats.md",
        ),
        Entry(
            "kvint8pertokenheadapart",
            "Rows of the KV pool are int8 numbers. Their float32 scales, per token and KV head, have memory "
            "of their own.",
            also=("int8_per_token_head_apart",),
            page="how-to/kv-formats.md",
        ),
        Entry(
            "kvfp8perhead",
            "The KV pool is FP8 (e4m3) with a scale per KV head, which the server changes in place between steps.",
            also=("fp8_per_head", "k_head_scales", "scales per head"),
            page="how-to/kv-formats.md",
        ),
        Entry(
            "kvint4group8",
            "Rows of the KV pool are integers of 4 bits, two to a byte, with a bf16 scale for each 8 of them."
            " Scales have memory of their own.",
            also=("int4_group8", "int4 KV cache"),
            page="how-to/kv-formats.md",
        ),
        Entry(
            "kvint8zerospertokenhead",
            "Rows of the KV pool are numbers of 8 bits without a sign. Their float32 scales and zeros, per token and "
            "KV head, have memory of their own.",
            also=("int8_zeros_per_token_head", "asymmetric quantization", "zero point"),
            page="how-to/kv-formats.md",
        ),
        Entry(
            "kvint4zerospertokenhead",
            "Rows of the KV pool are numbers of 4 bits without a sign: the first half of a row in the lower halves of "
            "its bytes. Their float32 scales and zeros, per token and KV head, have memory of their own.",
            also=("int4_zeros_per_token_head",),
            page="how-to/kv-formats.md",
        ),
        Entry(
            "kvnvfp4",
            "Rows of the KV pool are FP4 (e2m1) numbers, two to a byte, with an e4m3 scale for each 16 of "
            "them and a scale per layer.",
            also=("nvfp4", "FP4 KV cache", "block scales"),
            page="how-to/kv-formats.md",
        ),
        Entry(
            "kvfp4mxblock16",
            "Rows of the KV pool are FP4 (e2m1) numbers, two to a byte, with a power of two as scale for each"
            " 16 of them.",
            also=("fp4_mx_block16",),
            page="how-to/kv-formats.md",
        ),
        Entry(
            "kvfp8e4m3",
            "The KV pool is FP8 (e4m3), with a k_scale and a v_scale per layer.",
            also=("KV dtype", "fp8_e4m3", "FP8 KV cache"),
        ),
    ),
    describe=lambda case: {"kv_dtype": "" if case.kv_dtype == "same" else case.kv_dtype},
    declared=(
        Asked(
            lambda case: f"KV dtype {case.kv_dtype}", lambda declared, case: case.kv_dtype in declared.kv_pool.kv_dtypes
        ),
    ),
    values=Columns(lambda declared, mode, tier: {"kv_dtype": sorted(declared.kv_pool.kv_dtypes, reverse=True)}),
    covered=(
        Covered(
            "dtypes",
            "dtype and KV dtype",
            lambda declared, mode: (
                (dtype, kv_dtype) for dtype in declared.precision.dtypes for kv_dtype in declared.kv_pool.kv_dtypes
            ),
            lambda declared, case: (case.dtype, case.kv_dtype),
            lambda declared, case, pair: {"dtype": pair[0], "kv_dtype": pair[1]},
        ),
    ),
    simpler=of_fields("kv_dtype"),
    undeclared=Without("So far no context asks for a pool of an undeclared dtype other than the model's."),
    random=lambda draws, declared, so_far: {"kv_dtype": draws.one_of(sorted(declared.kv_pool.kv_dtypes, reverse=True))},
    varies="instance",
    apply=(OnLayers(_layers),),
)

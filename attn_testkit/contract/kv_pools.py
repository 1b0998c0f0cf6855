"""KV pools that a backend supports: dtypes, page sizes, layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field

from .context import BackendContext
from .declared import Declared, spelled
from .kv_layouts import KV_LAYOUTS
from .refusal import Refusal, first_outside, kv_dtype_of
from .row_format import ROW_FORMATS, TIES

__all__ = ["KV_DTYPES", "KVPools"]

KV_DTYPES = ("same", "fp8_e4m3", *ROW_FORMATS)
_WITH_TIES = tuple(name for name, each in ROW_FORMATS.items() if each.lets_declare_ties)


@dataclass(frozen=True)
class KVPools(Declared):
    """Paged KV memory that a backend supports: ``KVPools(kv_dtypes={"fp8_e4m3"}, page_sizes={64})``.

    ``BackendContext.kv_pool`` is the pool of an instance. Raises ``ValueError`` for an unknown dtype or layout.
    """

    kv_dtypes: Set[str] = frozenset({"same"})
    """Dtypes of the KV pool: ``same`` as the model, ``fp8_e4m3`` with per-tensor scales, or rows of a format of
    ``contract/row_format.py``. Their scales are stored in the row or separately: ``fp8_ds_mla``, ``nvfp4_ds_mla``,
    ``fp8_ds_mla_v4`` and ``fp8_ds_mla_v41`` for MLA in bf16;
    ``int8_per_token_head``, ``fp8_per_token_head``, ``fp8_per_head``, ``nvfp4``, ``fp4_mx_block16``, ``int4_group8``,
    ``int8_zeros_per_token_head`` and ``int4_zeros_per_token_head`` for K and V."""
    ties: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Format of ``kv_dtypes`` with signed int8, int4 or FP4 numbers -> the number to which a store rounds a quotient
    exactly between two of them. ``even``: the one whose last bit is 0, as ``KVPool.set_kv_buffer``, torch and
    ``cvt.rn.satfinite.e2m1x2`` do (FlashInfer's ``nvfp4_kv_quantize``). ``away``: the one farther from zero, as vLLM's
    kernel of int8 and SGLang's ``FP4MXBlock16KVQuantizeUtil`` do. ``toward_zero``: the other one, as ExLlamaV3's
    ``CacheLayer_nvfp4`` does. A format that is left out has no such quotients in its test data."""
    page_sizes: Set[int] = frozenset({16})
    """Page sizes of the KV pool, in slots."""
    kv_layouts: Set[str] = frozenset({"nhd"})
    """Layouts of the KV pool in memory, of those that ``KVPool`` lists. With ``custom`` the class allocates the pool
    itself, in ``AttentionBackend.lay_out_kv_pool``. ``KVPool.layout`` is the layout of an instance."""
    kv_groups: bool = False
    """True: layers may have KV groups (``BackendContext.kv_groups``): a pool, a request table and slots of new tokens
    for windowed layers, and others for the rest. False: all layers share one. In draft-decode they always do."""
    kv_sharing: bool = False
    """True: a layer may read the keys and values of an earlier layer (``AttentionLayer.kv_sharing_target_layer_id``).
    False: each layer stores its own."""

    _GUESSED = ("page_sizes",)

    def _check(self) -> None:
        self._check_words("kv_dtypes", KV_DTYPES)
        self._check_words("kv_layouts", KV_LAYOUTS)
        self._check_numbers("page_sizes", 1)
        if not isinstance(self.ties, Mapping):
            raise ValueError(
                f"KVPools.ties must be a dict of formats and rules, got {self.ties!r}; write {{'nvfp4': 'even'}}"
            )
        for name, rule in self.ties.items():
            spelled("format of ties", name, _WITH_TIES)
            spelled("rule of ties", rule, TIES)
        self._check_flags()

    def refused(self, context: BackendContext) -> Iterator[Refusal]:
        """Dtype, page size, layout and KV groups of a context's pool that are not declared."""
        yield from first_outside("KV dtype", [kv_dtype_of(context)], self.kv_dtypes)
        yield from first_outside("page size", [context.page_size], self.page_sizes)
        yield from first_outside("KV layout", [context.kv_pool.layout], self.kv_layouts)
        if len(context.groups) > 1 and not self.kv_groups:
            yield "number of KV groups", len(context.groups)
        targets = [each for layer in context.layers if (each := layer.kv_sharing_target_layer_id) >= 0]
        if targets and not self.kv_sharing:
            yield "a layer that reads the KV of layer", targets[0]

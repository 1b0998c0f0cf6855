"""Class I: keys that are wider than values, outside MLA, in pools that store K and V separately."""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer, ForwardMode

from .b_empty_batches import LEAN
from .catalogue import fault
from .parent import Metadata, PlannedBackend
from .pool_reads import read_slots

_MODES = (ForwardMode.DECODE, ForwardMode.EXTEND)
WIDER_KEYS = LEAN.with_changes(
    eager=_MODES, graph=_MODES, bounds={"max_topk": 0}, windows=(), heads={"wider_keys": {64}}
)


class WiderKeysBackend(PlannedBackend):
    """Healthy parent: values of their own width, which is that of the output."""

    capabilities = WIDER_KEYS

    def at_the_width_of_keys(self, layer: AttentionLayer, slots: torch.Tensor) -> torch.Tensor:
        """Flat places [..., Hk, Dv] in the buffer of values, for a kernel that assumes rows as wide as keys."""
        heads, values = layer.tp_v_head_num, layer.v_head_dim
        numbers = self.context.kv_pool.get_value_buffer(layer.layer_id).numel()
        head, number = self.index[:heads, None] * layer.head_dim, torch.arange(values, device=slots.device)
        return (slots[..., None, None] * heads * layer.head_dim + head + number) % numbers


@fault(
    "general; one stride for K and V in a store kernel (v_head_dim != head_dim)",
    "writes-own-kv",
    "slot",
    modes="decode extend",
    modelled="addresses past the buffer wrap around to its beginning",
)
class ValuesStoredAtTheStrideOfKeys(WiderKeysBackend):
    """The store kernel gets the stride of K for both, so values are written to the rows of other slots."""

    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        keys, values = self.context.kv_pool.get_kv_buffer(layer.layer_id)
        keys[meta.slots] = k.to(keys.dtype)
        values.view(-1)[self.at_the_width_of_keys(layer, meta.slots).flatten()] = v.to(values.dtype).flatten()


@fault(
    "general; one stride for K and V in an attention kernel (v_head_dim != head_dim)",
    "reads-own-kv matches-oracle finite",
    modes="decode extend",
    modelled="addresses past the buffer wrap around to its beginning",
)
class ValuesReadAtTheStrideOfKeys(WiderKeysBackend):
    """The kernel finds the value of a slot by the stride of K."""

    def gather(self, layer: AttentionLayer, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.context.kv_pool.get_kv_buffer(layer.layer_id)
        return read_slots(keys, slots), values.view(-1)[self.at_the_width_of_keys(layer, slots)].float()


@fault("general; v_head_dim passed as head_dim", "matches-oracle", modes="decode extend")
class ScaleOfTheWidthOfValues(WiderKeysBackend):
    """Logits are scaled by 1/sqrt(v_head_dim), although keys are wider."""

    capabilities = WIDER_KEYS.with_changes(options={"any_scaling": False})

    def logits(self, rows: torch.Tensor, keys: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
        wrong: float = (layer.head_dim / layer.v_head_dim) ** 0.5
        return super().logits(rows, keys, layer) * wrong

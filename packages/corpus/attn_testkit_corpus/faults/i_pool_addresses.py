"""Class I: addresses of a small KV pool that are computed with 32 bits: right as long as upper words are equal."""

from __future__ import annotations

import torch

from attn_testkit.contract import AttentionLayer, ForwardMode

from .b_empty_batches import LEAN
from .catalogue import fault
from .parent import Metadata, PlannedBackend
from .pool_addresses import LOWER, ReadsByAddress, addresses_of, reached, without_carry

_MODES = tuple(mode for mode in ForwardMode if mode is not ForwardMode.DRAFT_DECODE)
_READS = ("reads-own-kv", "matches-oracle", "finite")


@fault(
    "aiter #3824 (rocm-libraries #9214): the descriptor of a buffer adds offsets to 32 bits of its base",
    _READS,
    "4 GiB",
    modes=_MODES,
    modelled="upstream it reads 4 GiB lower; here that is taken modulo the pool",
)
class PoolAddressWithoutCarry(ReadsByAddress):
    """An offset is added to the lower word of the pool's address, and the carry to the upper word is lost."""

    def rows(self, view: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return without_carry(view, slots)


@fault(
    "general; tokenspeed #501 (a sign that poisons the upper word of a pointer)",
    _READS,
    "4 GiB",
    modes=_MODES,
    modelled="upstream it reads 4 GiB lower; here that is taken modulo the pool",
)
class LowerWordSignExtended(ReadsByAddress):
    """An address is an aligned base and 32 bits, which are extended with their sign."""

    def rows(self, view: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        whole = addresses_of(view, slots)
        return reached(view, (whole & ~LOWER) + (whole & LOWER).to(torch.int32))


@fault(
    "general; aiter #2517 (a bound of 32 bits, past which loads give zeros)",
    "reads-own-kv matches-oracle",
    "4 GiB",
    modes=_MODES,
)
class BoundsOfLowerWords(ReadsByAddress):
    """A row whose lower word is not below that of the pool's end counts as outside the pool, and loads give zeros."""

    def gather(self, layer: AttentionLayer, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = super().gather(layer, slots)
        views = self.context.kv_pool.get_kv_buffer(layer.layer_id)
        outside = [
            (addresses_of(view, slots) & LOWER) >= (view.data_ptr() + view.nbytes & LOWER) for view in views
        ]  # fmt: skip
        keys, values = (rows.masked_fill(out[..., None, None], 0.0) for rows, out in zip(found, outside, strict=True))
        return keys, values


@fault(
    "aiter #3824 (in a kernel that stores)",
    "writes-own-kv",
    modes=_MODES,
    modelled="upstream it writes 4 GiB lower; here that is taken modulo the pool",
)
class KVStoreWithoutCarry(PlannedBackend):
    """New keys are stored at an address whose upper word is that of the pool's first byte."""

    capabilities = LEAN

    def write_kv(self, layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor, meta: Metadata) -> None:
        keys, values = self.context.kv_pool.get_kv_buffer(layer.layer_id)
        keys[without_carry(keys, meta.slots)] = k.reshape(len(k), *keys.shape[1:])
        values[meta.slots] = v.reshape(len(v), *values.shape[1:])

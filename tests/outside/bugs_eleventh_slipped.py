"""A bug of the eleventh set that slipped through its first runs, with a case that there was not then."""

from __future__ import annotations

from bug_table import bug
from plain_backends import WithoutCausalMask, claims


@bug("sglang #39703", "extend-gqa2x2-d64-bf16-p16-k0x3-n31a20.1.70-shuffled-gauss-b3prod-noncausal")
class CausalTileBound(WithoutCausalMask):
    """The loop over keys ends at the diagonal of a tile of 64 rows, in layers that are not causal as well."""

    capabilities = claims("extend", page_sizes={16}, non_causal={"extend"})

    def visible(self, index, rows):
        seen = super().visible(index, rows)
        end = rows.prefix + (rows.place // 64 + 1) * 64
        return seen if rows.layer.causal else seen & (index < end[:, None])

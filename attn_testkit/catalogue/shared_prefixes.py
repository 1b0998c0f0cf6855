"""Many requests with a long common prefix: servers attend to it once for all requests, and to the rest of each request
separately."""

from __future__ import annotations

from collections.abc import Iterator

from ..cases.case import Case
from ..cases.co_residents import with_other_heads
from ..cases.features.numbers import nearest
from ..cases.layers import Layers
from ..contract import Capabilities
from .layer_options import with_options

_PREFIXES = (560, 601, 577, 1040, 561, 700, 563, 641, 624)
"""vLLM uses a cascade from 8 requests and 256 common tokens on; even prefixes that diverge half-way have as many in
common."""
_PAGE = 16


def shared_prefix_cases(declared: Capabilities, small: Case) -> Iterator[Case]:
    """Cases derived from ``small``. A plan for the common prefix has one request, and may be made for all requests by
    mistake (vLLM #17283). A cascade of two calls, whose results are merged, may lack what one call has: sinks (vLLM
    #26325), caps, scales of FP8. Windows disable a cascade.
    """
    shared = small.of_requests(
        _PREFIXES,
        page_size=nearest(declared.kv_pool.page_sizes, _PAGE),
        layout="shared",
        layers=Layers(1),
        data="gauss",
    )
    yield shared
    optional = with_options(declared, shared, -1).with_changes(kv_dtype=min(declared.kv_pool.kv_dtypes))
    if optional != shared:
        # One of two layers has the cap.
        yield with_other_heads(declared, optional).with_changes(layers=Layers())

"""Many requests with a long prefix in common: servers attend it once for all of them, and each one's own rest apart."""

from __future__ import annotations

from collections.abc import Iterator

from ..cases.case import Case
from ..cases.co_residents import with_other_heads
from ..cases.features.numbers import nearest
from ..cases.layers import Layers
from ..contract import Capabilities
from .layer_options import with_options

_PREFIXES = (560, 601, 577, 1040, 561, 700, 563, 641, 624)
"""vLLM cascades from 8 requests and 256 tokens on; as many are common where prefixes part half-way, too."""
_PAGE = 16


def shared_prefix_cases(declared: Capabilities, small: Case) -> Iterator[Case]:
    """A plan for the common prefix has one request, and is easily made for all (vLLM #17283). A cascade of two calls,
    whose results are merged, forgets what one call has: sinks (vLLM #26325), caps, scales of FP8. Windows turn it off.
    Made of ``small``.
    """
    shared = small.of_requests(
        _PREFIXES,
        page_size=nearest(declared.page_sizes, _PAGE),
        layout="shared",
        layers=Layers(1),
        data="gauss",
    )
    yield shared
    optional = with_options(declared, shared, -1).with_changes(kv_dtype=min(declared.kv_dtypes))
    if optional != shared:
        # One of two layers has the cap.
        yield with_other_heads(declared, optional).with_changes(layers=Layers())

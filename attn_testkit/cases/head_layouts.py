"""Head layouts that a backend declares, by common properties. ``contract/head_layout.py`` is their table."""

from __future__ import annotations

from ..contract import Capabilities
from ..contract.head_layout import HEAD_LAYOUTS, HeadLayout
from .fields import Heads


def declared_layouts(declared: Capabilities) -> list[HeadLayout]:
    """Declared layouts, the simplest first."""
    return [layout for name, layout in HEAD_LAYOUTS.items() if name in declared.heads.families]


def per_head(declared: Capabilities) -> list[HeadLayout]:
    """Declared layouts in which each KV head has its own keys and values."""
    return [layout for layout in declared_layouts(declared) if not layout.values_in_keys]


def as_many(declared: Capabilities) -> list[HeadLayout]:
    """Declared layouts with as many KV heads as query heads."""
    return [layout for layout in declared_layouts(declared) if layout.kv_heads == "as many" and layout.has_keys]


def single(declared: Capabilities) -> list[Heads]:
    """Heads of declared layouts that have only one."""
    return [Heads(layout.name, 1, 1) for layout in declared_layouts(declared) if layout.kv_heads == "single"]


def state_heads(declared: Capabilities) -> list[Heads]:
    """Heads of declared layers that keep a state: two key heads with one value head each, then with more."""
    found = []
    for layout in declared_layouts(declared):
        ratios = [1] if layout.kv_heads == "as many" else sorted(declared.heads.gqa_ratios)[:3]
        found += [Heads(layout.name, 2 * ratio, 2) for ratio in ratios if layout.has_state]
    return found


def by_layer(declared: Capabilities) -> list[HeadLayout]:
    """Declared layouts whose layers may differ in their heads."""
    return [layout for layout in declared_layouts(declared) if layout.by_layer]


def latent(declared: Capabilities) -> list[HeadLayout]:
    """Declared layouts with one latent row per token, whose keys hold the values."""
    return [layout for layout in declared_layouts(declared) if layout.values_in_keys]


def latent_heads(declared: Capabilities, q_heads: int) -> Heads:
    """Heads of the first latent layout. Raises ``IndexError`` if none is declared."""
    return Heads(latent(declared)[0].name, q_heads, 1)


def plain_layout(declared: Capabilities) -> str:
    """The first declared layout with as many KV heads as query heads; ``mha`` if there is no such layout."""
    return next((layout.name for layout in as_many(declared)), next(iter(HEAD_LAYOUTS)))


def alike(one: Heads, other: Heads) -> bool:
    """True if one may replace the other in a case: rows of both are of the same kind, so widths mean the same."""
    return _width_of_keys(one) == _width_of_keys(other)


def _width_of_keys(heads: Heads) -> tuple[bool, bool]:
    """(a key contains its value, there is a key): a convolution without a recurrence has none."""
    kind = heads.layout.state_kind
    return heads.layout.values_in_keys, kind is None or kind.recurs

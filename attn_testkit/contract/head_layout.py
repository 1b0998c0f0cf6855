"""Head layouts: how many KV heads a layer has for its query heads, what a row holds, and what follows from that.

``HEAD_LAYOUTS`` is the only place that knows one layout from another. All other code asks a layout for the property
that it needs. A layout also names its family, which is what a layer computes (``attn_testkit/families``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .state_kind import STATE_KINDS, StateKind

__all__ = ["HEAD_LAYOUTS", "HeadLayout", "OfHeadLayout", "head_layout_of", "register_head_layout"]

KVHeads = Literal["as many", "some", "one", "a divisor", "single"]
_HAS: dict[KVHeads, Callable[[int, int], bool]] = {
    "as many": lambda q_heads, kv_heads: kv_heads == q_heads,
    "some": lambda q_heads, kv_heads: 1 < kv_heads < q_heads,
    "one": lambda q_heads, kv_heads: kv_heads == 1 < q_heads,
    "a divisor": lambda q_heads, kv_heads: q_heads % kv_heads == 0,
    "single": lambda q_heads, kv_heads: q_heads == kv_heads == 1,
}


@dataclass(frozen=True)
class HeadLayout:
    """One head layout."""

    name: str
    """Name in ``HeadShapes.families`` and case ids: lower-case letters."""
    kv_heads: KVHeads
    """KV heads on one rank: as many as query heads, fewer but more than one, one, or any of these (states). ``single``:
    there is one head."""
    family: str = "softmax"
    """Family, which says what a layer computes: a name of ``attn_testkit.families.table``."""
    values_in_keys: bool = False
    """The value of a token is the first part of its key; the rest of the key is its rope part. A slot of the KV pool
    holds one row for all heads, and a layer has a ``kv_lora_rank``."""
    usual_scaling: bool = True
    """Layers may use the scaling 1/sqrt(head_dim). False: models of this layout use other scalings."""
    by_layer: bool = True
    """Layers of one model may differ in their heads (``HeadShapes.heads_by_layer``)."""
    wide_rows: bool = False
    """Rows are so wide that large cases have fewer heads and shorter contexts."""
    state_kind: StateKind | None = None
    """Kind of the recurrent state that layers keep for each request, with no keys: ``contract/state_layer.py``. None:
    they keep none."""

    compresses: bool = False
    """Layers make one row of each group of tokens, and attend to nothing: ``contract/compressor_layer.py``."""

    @property
    def has_keys(self) -> bool:
        """Layers store keys in the KV pool."""
        return not (self.has_state or self.compresses)

    @property
    def has_state(self) -> bool:
        """Layers keep a recurrent state for each request, and no keys."""
        return self.state_kind is not None

    @property
    def is_leveled(self) -> bool:
        """Layers keep several states for each request, one per level of a Fenwick tree."""
        return self.state_kind is not None and self.state_kind.leveled

    @property
    def is_one_to_one(self) -> bool:
        """No query heads share a KV head, so a backend declares no ratio."""
        return self.kv_heads in ("as many", "single")

    @property
    def pool_rows(self) -> int:
        """Rows that a slot of the KV pool holds in one layer: key and value, or one that is both."""
        return 1 if self.values_in_keys else 2

    @property
    def is_grouped(self) -> bool:
        """Several query heads share a KV head, so a backend can use the wrong one."""
        return self.kv_heads in ("some", "a divisor")

    def has(self, q_heads: int, kv_heads: int) -> bool:
        """True if these numbers of heads belong to this layout."""
        # With one query head it is all the same; of layouts that differ in it that one counts as "as many".
        return _HAS[self.kv_heads](q_heads, kv_heads) or (self.values_in_keys and q_heads == kv_heads == 1)

    def kv_heads_of(self, q_heads: int) -> int:
        """Number of KV heads for this number of query heads, if the layout determines it."""
        return q_heads if self.is_one_to_one else 1


HEAD_LAYOUTS = {
    layout.name: layout
    for layout in (
        HeadLayout("mha", "as many"),
        HeadLayout("gqa", "some"),
        HeadLayout("mqa", "one"),
        HeadLayout("mla", "one", values_in_keys=True, usual_scaling=False, by_layer=False, wide_rows=True),
        *(
            HeadLayout(
                kind.name, "a divisor" if kind.groups else "as many", family="recurrent", usual_scaling=False,
                by_layer=False, state_kind=kind,
            )
            for kind in STATE_KINDS.values()
        ),
        HeadLayout(
            "compressor", "single", family="compressor", usual_scaling=False, by_layer=False, compresses=True,
        ),
    )
}  # fmt: skip
"""Name -> layout, the simplest first."""


def register_head_layout(layout: HeadLayout) -> None:
    """Add a layout. Raises ``ValueError`` for a name that exists already, or that a case id cannot contain."""
    if HEAD_LAYOUTS.get(layout.name, layout) != layout:
        raise ValueError(f"a head layout named {layout.name!r} exists already; choose another name")
    if not (layout.name.isalpha() and layout.name.islower() and layout.name.isascii()):
        raise ValueError(f"head layout {layout.name!r}: names in case ids consist of lower-case letters")
    HEAD_LAYOUTS[layout.name] = layout


def head_layout_of(family: str, q_heads: int, kv_heads: int, *, values_in_keys: bool = False) -> HeadLayout:
    """Return the layout of a family for these numbers of heads. Raises ``LookupError`` if there is none."""
    for layout in HEAD_LAYOUTS.values():
        if layout.family == family and layout.values_in_keys == values_in_keys and layout.has(q_heads, kv_heads):
            return layout
    raise LookupError(f"no head layout of family {family!r} has {q_heads} query heads and {kv_heads} KV heads")


class OfHeadLayout:
    """Properties of a layer that follow from its head layout."""

    family: str
    tp_q_head_num: int
    tp_k_head_num: int
    kv_lora_rank: int

    @property
    def is_mla(self) -> bool:
        """True if the pool holds one latent row per token, whose first ``kv_lora_rank`` columns are the value."""
        return self.kv_lora_rank > 0

    @property
    def head_layout(self) -> HeadLayout:
        """The layout of the layer's heads."""
        return head_layout_of(self.family, self.tp_q_head_num, self.tp_k_head_num, values_in_keys=self.is_mla)

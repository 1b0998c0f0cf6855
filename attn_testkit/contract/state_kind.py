"""Kinds of layers that keep a recurrent state, and the properties in which they differ.

``STATE_KINDS`` is the only list of them. ``StateLayer`` has the formulas, and ``families/recurrent`` computes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["STATE_KINDS", "GateWidth", "StateKind"]

GateWidth = Literal["none", "head", "channel", "level"]


@dataclass(frozen=True)
class StateKind:
    """One kind of layer."""

    name: str
    """Name in ``HeadShapes.families`` and case ids."""
    parts: tuple[str, ...] = ("q", "k", "v")
    """Parts of ``mixed`` in their order, by the names that the kind's papers use. One is a value per value head, the
    others have the width of a key per key head."""
    value_part: int = 2
    """Index of the value in ``parts``."""
    a: GateWidth = "head"
    """Numbers of ``a`` per row: none, one per value head, or one per channel of a key of each value head."""
    b: GateWidth = "head"
    """Numbers of ``b`` per row; ``level``: one per level and value head, and one for the row itself."""
    groups: bool = True
    """Several value heads may share a key head. False: there are as many of both."""
    convolves: bool = True
    """A convolution precedes the recurrence. False: there is none, and a slot has no window."""
    overwrites: bool = True
    """A token replaces what the state holds for its key, if its gates are open. False: it adds to it."""
    normalizes: bool = True
    """Queries and keys are divided by the root of their sum of squares plus 1e-6, and queries by the root of K."""
    fixed_decay: bool = False
    """All tokens of a head have one decay, which is a parameter of the layer."""
    recurs: bool = True
    """A recurrence follows the convolution. False: there is none, so a slot has a window and no state (K is 0)."""
    in_drafts: bool = False
    """Draft models have such layers, too, so they also run in draft-extend-v2."""
    steps: bool = False
    """``a`` is the size of a step, from which both the decay of a token and the factor of its value follow (Mamba2)."""
    replicates_groups: bool = False
    """Several tensor-parallel ranks have the same group, with all its channels, if there are more ranks than groups
    (``extra_groups_for_head_shards`` of vLLM and SGLang). False: a key head is on one rank."""
    leveled: bool = False
    """A slot has several states per value head, one per level of a Fenwick tree (``StateLayer.levels``)."""


STATE_KINDS: Mapping[str, StateKind] = {
    kind.name: kind
    for kind in (
        StateKind("gdn"),
        StateKind("kda", a="channel"),
        StateKind(
            "mamba", parts=("x", "B", "C"), value_part=0, b="none", overwrites=False, normalizes=False, steps=True,
            replicates_groups=True,
        ),
        StateKind(
            "lightning", a="none", b="none", groups=False, convolves=False, overwrites=False, normalizes=False,
            fixed_decay=True,
        ),
        StateKind("rwkv", a="channel", b="channel", groups=False, convolves=False, normalizes=False),
        StateKind(
            "conv", parts=("x",), value_part=0, a="none", b="none", groups=False, overwrites=False,
            normalizes=False, recurs=False, in_drafts=True,
        ),
        StateKind(
            "loglinear", parts=("x", "B", "C"), value_part=0, b="level", overwrites=False, normalizes=False,
            steps=True, leveled=True,
        ),
    )
}  # fmt: skip
"""Name -> kind."""

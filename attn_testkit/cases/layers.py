"""The attention layers of the test model: how many, under which ids, and what differs from one to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..contract import HeadShape
from .head_shapes import SHAPES_WORD, shapes_word


class Setting(NamedTuple):
    """Settings of one layer."""

    factor: float
    """Scaling of the layer, over 1/sqrt(width)."""
    k_scale: float
    """Scale of K in an FP8 pool; ``v_scale`` is that of V."""
    v_scale: float
    sink: float
    """Mean of its sinks."""


SETTINGS = (
    Setting(0.5, 0.25, 0.5, 1.0),
    Setting(1.5, 0.5, 2.0, -0.5),
    Setting(0.75, 1.0, 0.25, 0.25),
    Setting(1.25, 2.0, 1.0, 0.75),
    Setting(0.625, 4.0, 8.0, -0.25),
    Setting(1.125, 8.0, 4.0, 0.5),
)
"""Layer by layer. No two have one of them in common: what repeats after two layers is wrong in the third."""
PERIOD = 2
"""Layers after which windows and soft caps repeat, as in models in which every second layer has a window."""

TURNS = 4
"""Layers after which options repeat where each layer has its own combination of them."""
CAPPED, SINKING = (0, 1), (0, 3)
"""Turns in which a layer has the soft cap, and sinks, where options vary: both, one of them, none, the other."""


@dataclass(frozen=True)
class Layers:
    """Number of attention layers, and their ids. Raises ``ValueError`` for none, more than six, or a negative id.

    Also for shapes that are not two, or of one layer, and for options that vary inside a KV group: it has one window.

    Three from 5 are those of a later pipeline rank: no id is an index into a list of as many entries as layers.
    """

    count: int = 2
    first: int = 0
    """Id of the first layer; the others follow."""
    groups: bool = False
    """Two KV groups, whose layers alternate: the windowed ones and the others. Without it all share one."""

    shapes: tuple[HeadShape, ...] = ()
    """Alternating shapes of their heads. Empty: all have those of the case."""
    hybrid: bool = False
    """Softmax layers between layers that keep a state, which are the first, third and so on."""
    varied: bool = False
    """Each layer has its own combination of window, soft cap and sinks, out of those that the case has. Without it
    windows and soft caps alternate, and all layers have sinks, or none."""

    def __post_init__(self) -> None:
        if not 1 <= self.count <= len(SETTINGS) or self.first < 0:
            raise ValueError(f"{self.count} layers from id {self.first}: there are 1 to {len(SETTINGS)}, from 0 on")
        if self.groups and self.count < PERIOD:
            raise ValueError(f"{self.count} layer has no two KV groups")
        if self.hybrid and (self.count < PERIOD or self.groups or self.shapes):
            raise ValueError(
                f"{self.count} layers, hybrid: there is one of each kind, in one KV group, of the case's heads"
            )
        if self.varied and (self.groups or self.hybrid or self.count < PERIOD):
            raise ValueError(f"{self}: options vary between two layers or more, of one kind, which share a KV group")
        if self.shapes and (len(self.shapes) != PERIOD or self.count < PERIOD or len(set(self.shapes)) == 1):
            raise ValueError(
                f"{self}: layers alternate between two shapes of heads, which differ, or all have the case's"
            )

    def __str__(self) -> str:
        kinds = "groups" * self.groups + "hybrid" * self.hybrid + "varied" * self.varied
        return f"layers{self.count}from{self.first}{kinds}{shapes_word(self.shapes)}"

    @property
    def words(self) -> str:
        """Description of the layers for people."""
        groups = ", alternately in two KV groups" if self.groups else ""
        heads = " and ".join(
            f"{shape.num_qo_heads} query and {shape.num_kv_heads} KV heads of {shape.head_dim}" for shape in self.shapes
        )
        shapes = f", alternately with {heads}" if heads else ""
        hybrid = ", which keep a state and attend to keys in turn" if self.hybrid else ""
        varied = ", each with its own combination of options" if self.varied else ""
        last = self.first + self.count - 1
        ids = f"{self.count}, of ids {self.first} to {last}" if self.count > 1 else f"1, of id {last}"
        return f"{ids}{groups}{hybrid}{shapes}{varied}"

    @property
    def turns(self) -> str:
        """Layers that have an option of every second layer."""
        return "one layer" if self.count <= PERIOD else "every second layer"

    def turns_from(self, first: int) -> list[int]:
        """Turn of each layer, 0 .. 3, where layer number ``first`` has turn 0."""
        return [(place - first) % TURNS for place in range(self.count)]

    def name(self, place: int) -> str:
        """Name of the layer that runs as number ``place``, from 0 on, as in messages: by its id."""
        return f"layer {self.first + place}"


def varies(row: Mapping[str, Any]) -> bool:
    """True for a row of a covering array whose layers have each their own combination of options."""
    return "layers" in row and bool(row["layers"].varied)


LAYERS_WORD = rf"layers(\d+)from(\d+)(groups|hybrid)?(varied)?{SHAPES_WORD}"
"""The word of a case id, which those of two layers from 0 lack."""

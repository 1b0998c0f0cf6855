"""The attention layers of the test model: how many layers, their ids, and how they differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..contract import HeadShape
from .head_shapes import SHAPES_WORD, shapes_word


class Setting(NamedTuple):
    """Settings of one layer."""

    factor: float
    """Scaling of the layer, as a multiple of 1/sqrt(width)."""
    k_scale: float
    """Scale of K in an FP8 pool; ``v_scale`` is that of V."""
    v_scale: float
    sink: float
    """Mean of its sinks."""
    q_scale: float
    """Scale of its queries before they are rounded to FP8, by the checkpoint: three bits, so that a product with an
    FP8 number is a number of the model's dtype."""


SETTINGS = (
    Setting(0.5, 0.25, 0.5, 1.0, 5.0),
    Setting(1.5, 0.5, 2.0, -0.5, 0.375),
    Setting(0.75, 1.0, 0.25, 0.25, 1.5),
    Setting(1.25, 2.0, 1.0, 0.75, 0.625),
    Setting(0.625, 4.0, 8.0, -0.25, 3.0),
    Setting(1.125, 8.0, 4.0, 0.5, 0.875),
)
"""Settings of each layer. No two layers share a value, so code that repeats settings after two layers is wrong in the
third."""
PERIOD = 2
"""Layers after which windows and soft caps repeat, as in models in which every second layer has a window."""

TURNS = 4
"""Number of layers after which options repeat, if each layer has its own combination of options."""
CAPPED, SINKING = (0, 1), (0, 3)
"""Turns in which a layer has the soft cap, and sinks, if options vary: first both, then one of them, none, and the
other."""


@dataclass(frozen=True)
class Layers:
    """Number of attention layers, and their ids. Raises ``ValueError`` for no layer, more than six, or a negative id;
    for another number of shapes than two, or shapes of a single layer; and for options that vary inside a KV group,
    which has one window. Three layers from id 5 are like the layers of a later pipeline rank: no id is an index into a
    list with one entry per layer.
    """

    count: int = 2
    first: int = 0
    """Id of the first layer; the others follow."""
    groups: bool = False
    """True if there are two KV groups whose layers alternate: windowed layers and the others. If False, all layers
    share one KV group."""

    shapes: tuple[HeadShape, ...] = ()
    """Alternating shapes of their heads. Empty: all layers have the shape of the case."""
    hybrid: bool = False
    """True if softmax layers are between layers that keep a state, which are the first, third and so on."""
    varied: bool = False
    """True if each layer has its own combination of the case's window, soft cap and sinks. If False, windows and soft
    caps alternate, and all layers have sinks, or none does."""

    def __post_init__(self) -> None:
        if not 1 <= self.count <= len(SETTINGS) or self.first < 0:
            raise ValueError(
                f"{self.count} layers from id {self.first}: expected 1 to {len(SETTINGS)} layers, with ids from 0 on"
            )
        if self.groups and self.count < PERIOD:
            raise ValueError(f"{self.count} layer cannot have two KV groups")
        if self.hybrid and (self.count < PERIOD or self.groups or self.shapes):
            raise ValueError(
                f"{self.count} layers, hybrid: expected layers of both kinds, in one KV group, with the case's heads"
            )
        if self.varied and (self.groups or self.hybrid or self.count < PERIOD):
            raise ValueError(f"{self}: options vary only between two or more layers of one kind that share a KV group")
        if self.shapes and (len(self.shapes) != PERIOD or self.count < PERIOD or len(set(self.shapes)) == 1):
            raise ValueError(
                f"{self}: layers alternate between two different shapes of heads, or all have the case's shape"
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
    """True for a row of a covering array in which each layer has its own combination of options."""
    return bool(row.get("varied"))


LAYERS_WORD = rf"layers(\d+)from(\d+)(groups|hybrid)?(varied)?{SHAPES_WORD}"
"""The word of a case id; ids of cases with two layers from 0 do not have it."""

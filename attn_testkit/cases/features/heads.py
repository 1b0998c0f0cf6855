"""The head layout of one rank, and which layouts of a backend are tried."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ...contract import Capabilities, ForwardMode
from ...contract.head_layout import HEAD_LAYOUTS, HeadLayout
from ...glossary import Entry
from ..fields import Changes, Fields, Heads
from ..head_layouts import as_many, declared_layouts, latent, latent_heads, plain_layout, single, state_heads
from .feature import Asked, Bound, Columns, Covered, Feature, OnLayers, Trait, Without, Word, of_fields
from .numbers import nearest

MOST_USUAL_RATIO = 8
"""The most query heads per KV head in a covering array."""
_MOST_HEADS = 64


def typical_heads(declared: Capabilities) -> list[Heads]:
    """The layouts that a covering array tries."""
    ratios = sorted(declared.heads.gqa_ratios - {1})
    heads: list[Heads] = [*single(declared), *state_heads(declared)]
    heads += [Heads(layout.name, 2, 2) for layout in as_many(declared)]
    if "gqa" in declared.heads.families and ratios:
        # The smallest, one that is not a power of two, and one large enough to matter.
        odd = [r for r in ratios if r & (r - 1) and r <= MOST_USUAL_RATIO]
        large = [r for r in ratios if r <= MOST_USUAL_RATIO]
        heads += [Heads("gqa", 2 * r, 2) for r in dict.fromkeys([*ratios[:1], *odd[:1], *large[-1:]])]
    if "mqa" in declared.heads.families and ratios:
        heads.append(Heads("mqa", nearest(ratios, 4), 1))
    if latent(declared):
        wanted = [r for r in sorted(declared.heads.gqa_ratios) if r in (2, 16)] or sorted(declared.heads.gqa_ratios)[:1]
        heads += [latent_heads(declared, r) for r in wanted]
    return heads


def smallest_heads_first(declared: Capabilities) -> list[Heads]:
    """Layouts with few KV heads, the simplest first; empty if a family is declared without numbers of heads."""
    groups = [ratio for ratio in sorted(declared.heads.gqa_ratios) if ratio > 1]
    found = [Heads(layout.name, count, count) for layout in as_many(declared) for count in (2, 1, 4)]
    found += [*single(declared), *state_heads(declared)]
    if "gqa" in declared.heads.families:
        found += [Heads("gqa", ratio * count, count) for ratio in groups for count in (2, 4)]
    if "mqa" in declared.heads.families:
        found += [Heads("mqa", ratio, 1) for ratio in groups]
    if latent(declared) and declared.heads.mla_rope_dims:
        found += [latent_heads(declared, count) for count in sorted(declared.heads.gqa_ratios)]
    return [heads for heads in found if heads.q_heads <= _MOST_HEADS] or found[:1]


def fewest_latent_heads(declared: Capabilities) -> Heads:
    """The fewest heads of a latent layout."""
    return latent_heads(declared, min(declared.heads.gqa_ratios))


def other_heads(declared: Capabilities) -> Heads:
    """A group of several heads if it costs little: with many rows the heads are more than a tile."""
    groups = sorted(declared.heads.gqa_ratios - {1})
    if single(declared):
        return single(declared)[0]
    if not groups or not declared.heads.families & {"gqa", "mqa"}:
        return Heads(plain_layout(declared), 2, 2)
    return _group(declared, max([group for group in groups if group <= 8], default=groups[0]))


def _group(declared: Capabilities, group: int) -> Heads:
    return Heads("gqa", 2 * group, 2) if "gqa" in declared.heads.families else Heads("mqa", group, 1)


def _with(declared: Capabilities, case: Fields, heads: Heads, **changes: Any) -> Changes:
    rope = (case.rope_dim or min(declared.heads.mla_rope_dims)) if heads.layout.values_in_keys else 0
    return {"heads": heads, "rope_dim": rope, **changes}


def of_mla(declared: Capabilities, case: Fields, **changes: Any) -> Changes:
    """``changes``, plus heads of MLA if the case has other heads."""
    return _with(
        declared, case, case.heads if case.heads.layout.values_in_keys else fewest_latent_heads(declared), **changes
    )


def of_others(declared: Capabilities, case: Fields, **changes: Any) -> Changes:
    """``changes``, plus heads of another family if the case has heads of MLA."""
    return _with(declared, case, other_heads(declared) if case.heads.layout.values_in_keys else case.heads, **changes)


def _read(family: str, first: int, second: int) -> Heads:
    layout = HEAD_LAYOUTS[family]
    return (
        Heads(family, first * second, second) if layout.is_grouped else Heads(family, first, layout.kv_heads_of(first))
    )


def _pattern() -> str:
    return rf"(?P<family>{'|'.join(HEAD_LAYOUTS)})(?P<first>\d+)(x(?P<second>\d+))?"


def _phrase(case: Fields) -> str:
    heads, of_all = case.heads, ", which contain the heads of all layers" if case.layers.shapes else ""
    many, few = ("value", "key") if heads.layout.has_state else ("query", "KV")
    fewer = f"{heads.kv_heads} {few} head{'s'[: heads.kv_heads - 1]}"
    return f"{heads.family}: {heads.q_heads} {many} head{'s'[: heads.q_heads - 1]}, {fewer}{of_all}"


def _declared(declared: Capabilities, case: Fields) -> bool:
    """True if the heads are declared. If layers differ, the heads of the case are not those of any layer."""
    own = (Heads.of(case.heads.layout.family, shape.num_qo_heads, shape.num_kv_heads) for shape in case.layers.shapes)
    return all(
        heads.family in declared.heads.families
        and (heads.layout.is_one_to_one or heads.q_heads // heads.kv_heads in declared.heads.gqa_ratios)
        for heads in (own if case.layers.shapes else (case.heads,))
    )


def _grouped(declared: Capabilities) -> str:
    """The family whose cases try groups. With several KV heads a query head can also use the wrong KV head."""
    return next((family for family in ("gqa", "mqa") if family in declared.heads.families), "")


def _groups(declared: Capabilities, mode: ForwardMode) -> Iterable[int]:
    # A group of one is mha.
    return declared.heads.gqa_ratios - {1} if _grouped(declared) else ()


def _group_of(declared: Capabilities, case: Fields) -> int | None:
    return case.heads.q_heads // case.heads.kv_heads if case.heads.family == _grouped(declared) else None


def _has_groups(layout: HeadLayout) -> bool:
    return layout.has_state and layout.kv_heads != "as many"


def _state_group_of(declared: Capabilities, case: Fields) -> int | None:
    return case.heads.q_heads // case.heads.kv_heads if _has_groups(case.heads.layout) else None


def _states_of_groups(declared: Capabilities) -> list[str]:
    """Declared kinds of states whose key heads may have several value heads."""
    return [layout.name for layout in declared_layouts(declared) if _has_groups(layout)]


def _like(case: Fields, heads: Heads, like: Fields) -> Changes:
    """Changes that give a case these heads and the settings that their family needs: MLA has a rope width and its own
    scaling."""
    if heads.layout.values_in_keys or not case.heads.layout.values_in_keys:
        return {"heads": heads}
    return {"heads": heads, "rope_dim": 0, "usual_scaling": like.usual_scaling}


_SERVER_RANKS = ((1, 1), (8, 1), (8, 2))
"""``BackendContext.tp_size`` and ``attn_tp_size`` of each value of the derived parameter ``server-ranks``."""


def _context(schedules: Sequence[Any]) -> Changes:
    case = schedules[0].case
    own = case.instance_of or case
    ranks = _SERVER_RANKS[0 if own.handed else own.derived("server-ranks")]
    return dict(zip(("tp_size", "attn_tp_size"), ranks, strict=True))


def _value(case: Fields) -> str:
    if not case.rope_dim:
        return str(case.heads)
    latent = case.heads.layout.values_in_keys
    return (
        f"{case.heads} with rope {case.rope_dim}" if latent else f"{case.heads}, keys that are wider by {case.rope_dim}"
    )


def _fewer(declared: Capabilities, case: Fields, minimal: Fields) -> Iterator[Changes]:
    for heads in smallest_heads_first(declared):
        if not heads.layout.values_in_keys or case.heads.layout.values_in_keys:
            yield _like(case, heads, minimal)
    if case.heads.layout.values_in_keys:
        yield from ({"rope_dim": width} for width in sorted(declared.heads.mla_rope_dims))
    elif case.rope_dim:
        yield {"rope_dim": 0}


HEADS = Feature(
    name="heads",
    order=30,
    fields=("heads",),
    traits=(
        Trait(
            "heads with their own scaling",
            lambda case: not case.heads.layout.usual_scaling,
            excludes={"usual scaling": "MLA has its own scaling"},
        ),
        Trait(
            "layers with the same heads",
            lambda case: not case.heads.layout.by_layer,
            excludes={"heads by layer": "all layers of MLA have the same heads"},
        ),
    ),
    words=(
        Word(
            _pattern(),
            lambda match, so_far: {"heads": _read(match["family"], int(match["first"]), int(match["second"] or 1))},
            lambda case: str(case.heads),
            always=True,
            current=_pattern,
            bounds=(Bound("query heads of a KV head", 1, 1024, "first"), Bound("KV heads", 1, 1024, "second")),
        ),
    ),
    explained=(
        Entry(
            "mha2",
            "Multi-head attention: as many KV heads as query heads. `mha2` has 2 of each.",
            also=("MHA", "multi-head attention"),
            numbers=True,
        ),
        Entry("gqa8x2", "Grouped-query attention: several query heads share a KV head. `gqa8x2` has groups of 8 query "
"heads on 2 KV heads.", also=("GQA", "grouped-query attention", "group"), numbers=True),
        Entry(
            "mqa4",
            "Multi-query attention: all query heads share one KV head. `mqa4` has 4 query heads.",
            also=("MQA", "multi-query attention"),
            numbers=True,
        ),
        Entry("mla16", "Multi-head latent attention: the pool has one latent row per token, which is key and value of "
"all heads. `mla16` has 16 query heads.", also=("MLA", "multi-head latent attention"), numbers=True),
        Entry(
            "gdn2x4",
            "Gated DeltaNet: 2 value heads for each of 4 key heads.",
            also=("GDN", "Gated DeltaNet"),
            page="how-to/recurrent-states.md",
            numbers=True,
        ),
        Entry(
            "kda2x4",
            "Kimi Delta Attention: a decay for each channel of a key.",
            also=("KDA", "Kimi Delta Attention"),
            page="how-to/recurrent-states.md",
            numbers=True,
        ),
        Entry(
            "mamba2x4",
            "Mamba2: 2 heads for each of 4 groups.",
            also=("Mamba2", "SSD"),
            page="how-to/recurrent-states.md",
            numbers=True,
        ),
        Entry(
            "lightning8",
            "Lightning attention: a fixed decay per head, and no convolution.",
            also=("Lightning", "lightning attention"),
            page="how-to/recurrent-states.md",
            numbers=True,
        ),
        Entry(
            "rwkv8",
            "RWKV-7: a decay and a learning rate for each channel of a key, and no convolution.",
            also=("RWKV-7", "RWKV"),
            page="how-to/recurrent-states.md",
            numbers=True,
        ),
        Entry(
            "conv8",
            "A short convolution without a recurrence, as in LFM2, of 8 heads.",
            also=("short convolution", "ShortConv"),
            page="how-to/recurrent-states.md",
            numbers=True,
        ),
        Entry(
            "compressor1",
            "Layers that compress keys, as in DeepSeek V4: one row for each group of tokens. They have one head.",
            also=("compressor",),
            page="how-to/compressors.md",
            numbers=True,
        ),
        Entry(
            "loglinear2x4",
            "Log-linear attention: Mamba2 with a state for each level of a Fenwick tree.",
            also=("log-linear attention", "Fenwick tree"),
            page="how-to/recurrent-states.md",
            numbers=True,
        ),
    ),
    describe=lambda case: {"heads": _phrase(case)},
    context=_context,
    declared=(Asked(lambda case: f"heads {case.heads}", _declared),),
    values=Columns(lambda declared, mode, tier: {"heads": typical_heads(declared)}),
    covered=(
        Covered(
            "family",
            "family",
            lambda declared, mode: declared.heads.families,
            lambda declared, case: case.heads.family,
            Without("The covering array has heads of every family."),
        ),
        Covered(
            "group",
            "group",
            _groups,
            _group_of,
            lambda declared, case, group: _with(declared, case, _group(declared, group)),
            largest_first=True,
            sampled=True,
        ),
        Covered(
            "state group",
            "value heads per key head",
            lambda declared, mode: declared.heads.gqa_ratios if _states_of_groups(declared) else (),
            _state_group_of,
            lambda declared, case, group: {"heads": Heads(_states_of_groups(declared)[0], 2 * group, 2)},
            largest_first=True,
            sampled=True,
        ),
        Covered(
            "mla_heads",
            "MLA heads",
            lambda declared, mode: declared.heads.gqa_ratios if latent(declared) else (),
            lambda declared, case: case.heads.q_heads if case.heads.layout.values_in_keys else None,
            lambda declared, case, heads: _with(declared, case, latent_heads(declared, heads)),
            largest_first=True,
            sampled=True,
        ),
    ),
    simpler=of_fields(
        "heads",
        "rope_dim",
        value=_value,
        reset=lambda case, minimal: {**_like(case, minimal.heads, minimal), "rope_dim": minimal.rope_dim},
        size=lambda case, minimal: (
            case.heads.layout.values_in_keys, case.heads.q_heads // case.heads.kv_heads, case.heads.q_heads,
            case.rope_dim,
        ),
        steps=_fewer,
    ),
    undeclared=Without("So far no context asks for undeclared heads."),
    random=lambda draws, declared, so_far: {"heads": draws.one_of(smallest_heads_first(declared))},
    varies="layer",
    apply=(OnLayers(
        lambda case: [
            {"tp_q_head_num": shape.num_qo_heads, "tp_k_head_num": shape.num_kv_heads,
             "family": case.heads.layout.family}
            for shape in case.layer_shapes
        ]
    ),),
)  # fmt: skip

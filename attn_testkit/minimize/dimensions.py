"""The dimensions of a case, and which values of them are nearer to those of the plain case.

A dimension is a word of the id, but for two: the lengths also say how many requests there are, and the bucket how many
of its requests are padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..cases.case import Case, Heads
from ..cases.draft import Draft
from ..cases.extend import room_for
from ..cases.layers import Layers
from ..cases.plainest import head_layouts
from ..cases.trees import Tree, chain
from ..contract import Capabilities, ForwardMode

__all__ = ["DIMENSIONS", "Changes", "Dimension", "changed", "nearer_numbers"]

Changes = Mapping[str, Any]
"""Fields of a case and their new values."""
Size = tuple[float, ...]
_FEW = 8
"""Claimed values below the case's own that are all tried; of more, powers of two and the two largest."""


def _nothing(claims: Capabilities, case: Case, plain: Case) -> Iterator[Changes]:
    yield from ()


@dataclass(frozen=True)
class Dimension:
    """One thing in which a case may differ from the plain one."""

    words: Callable[[Case], str]
    """Its value, for those who read."""
    of: Callable[[Case], Any]
    """Its value: the plain case's where the case does not differ in it, whatever the number of requests."""
    reset: Callable[[Case, Case], Changes]
    """(case, plain): what gives the case the plain one's value."""
    size: Callable[[Case, Case], Size] = lambda case, plain: (0,)
    """(case, plain): how far from plain it is."""
    nearer: Callable[[Capabilities, Case, Case], Iterator[Changes]] = _nothing
    """(claims, case, plain): what may bring it nearer without making it plain; what is worth most comes first."""


def changed(case: Case, changes: Changes) -> Case:
    """The case with other values, and in extend with the room in its graph that its new tokens need. Raises
    ``ValueError`` where there is no such case.
    """
    values: dict[str, Any] = {"new": case.new, "width": case.width, "bucket": case.bucket, **changes}
    if case.mode is ForwardMode.EXTEND and sum(values["new"]) > values["bucket"] * values["width"]:
        values["width"] = room_for(values["new"])
    return replace(case, **values)


def nearer_numbers(value: int, plain: int) -> Iterator[int]:
    """From half way on, back to the value's neighbour. Asked again after each that is taken, it is a bisection."""
    step = abs(value - plain) // 2
    while step:
        yield value - step if value > plain else value + step
        step //= 2


def _keep(case: Case, which: Sequence[int]) -> Changes:
    new = tuple(case.new[i] for i in which) if case.new else ()
    prefixes = tuple(case.prefixes[i] for i in which)
    return {"prefixes": prefixes, "new": new, "bucket": len(which) + case.bucket - case.bs}


def _fewer_requests(claims: Capabilities, case: Case, plain: Case) -> Iterator[Changes]:
    """One of each kind alone; one of each kind; a half; all but one of a kind."""
    entries = list(zip(case.prefixes, case.new or case.prefixes, strict=True))
    kinds = [entries.index(kind) for kind in dict.fromkeys(entries)]
    everyone, half = range(case.bs), case.bs // 2
    groups = [*([i] for i in kinds), kinds, everyone[:half], everyone[half:]]
    groups += [[i for i in everyone if i != left] for left in kinds]
    yield from (_keep(case, which) for which in groups if which)


def _fewer_keys(claims: Capabilities, case: Case, plain: Case) -> Iterator[Changes]:
    """All requests as the shortest; some plain; the longest shorter; each length shorter."""
    lens, of_plain = case.prefixes, plain.prefixes[0]

    def with_lens(length_of: Callable[[int], int]) -> Changes:
        return {"prefixes": tuple(map(length_of, lens))}

    yield with_lens(lambda _: min(lens))
    kinds = list(dict.fromkeys(length for length in lens if length != of_plain))
    for kind in kinds:
        yield with_lens(lambda each, kind=kind: of_plain if each == kind else each)  # type: ignore[misc]
    for cap in nearer_numbers(max(lens), of_plain):
        yield with_lens(lambda each, cap=cap: min(each, cap))  # type: ignore[misc]
    for kind in kinds if len(kinds) > 1 else ():
        for near in nearer_numbers(kind, of_plain):
            yield with_lens(lambda each, kind=kind, near=near: near if each == kind else each)  # type: ignore[misc]


def _rows_words(case: Case) -> str:
    if case.tree:
        is_chain = case.tree == chain(len(case.tree))
        return f"chain of {len(case.tree)}" if is_chain else "tree " + ".".join(map(str, case.tree.parents))
    if case.draft:
        return f"top-k {case.draft.branches} of {case.draft.steps} steps"
    new = ".".join(map(str, case.new))
    return new if case.mode is ForwardMode.EXTEND else f"{new} of {case.width}"


def _rows_size(case: Case, plain: Case) -> Size:
    if case.tree:
        return (case.topk, len(case.tree))
    if case.draft:
        return (case.draft.branches, case.draft.steps)
    if case.mode is ForwardMode.EXTEND:
        return (max(case.new), sum(case.new), case.width)
    return (len({*case.new, case.width}), case.width, sum(case.width - count for count in case.new))


def _fewer_rows(claims: Capabilities, case: Case, plain: Case) -> Iterator[Changes]:
    if case.tree:
        for tree in _smaller_trees(case.tree):
            yield {"tree": tree, "width": len(tree)}
    elif case.draft:
        for draft in _smaller_drafts(case.draft):
            yield {"draft": draft, "width": len(draft)}
    elif case.mode is ForwardMode.EXTEND:
        for new in _fewer_each(case.new):
            yield {"new": new, "width": room_for(new)}
        yield {"width": room_for(case.new)}
    elif case.new:
        yield from _fewer_accepted(case)


def _smaller_trees(tree: Tree) -> Iterator[Tree]:
    """A chain; fewer nodes; without one of its leaves."""
    sizes = [2, *nearer_numbers(len(tree), 1)]
    yield chain(len(tree))
    yield from (chain(size) for size in sizes)
    yield from (Tree(tree.parents[: size - 1]) for size in sizes)
    for leaf in reversed([node for node in range(1, len(tree)) if node not in tree.parents]):
        kept = (parent - (parent > leaf) for node, parent in enumerate(tree.parents, start=1) if node != leaf)
        yield Tree(tuple(kept))


def _smaller_drafts(draft: Draft) -> Iterator[Draft]:
    yield from (Draft(branches, draft.steps) for branches in (1, *nearer_numbers(draft.branches, 1)))
    yield from (Draft(draft.branches, steps) for steps in (2, *nearer_numbers(draft.steps, 2)))


def _fewer_each(new: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """One count of several less, the largest first."""
    for old in sorted(set(new), reverse=True):
        for count in (1, *nearer_numbers(old, 1)):
            yield tuple(count if each == old else each for each in new)


def _fewer_accepted(case: Case) -> Iterator[Changes]:
    """All rows of everyone; fewer rows, of which everyone accepts as many, or leaves out as many; the same count for
    everyone; one count more.
    """
    width, new = case.width, case.new
    yield {"new": (width,) * case.bs}
    for fewer in dict.fromkeys((2, max(new), *nearer_numbers(width, 1))):
        yield {"width": fewer, "new": tuple(min(count, fewer) for count in new)}
        yield {"width": fewer, "new": tuple(max(1, count - width + fewer) for count in new)}
    yield from ({"new": (count,) * case.bs} for count in sorted(set(new), reverse=True))
    for old in sorted(set(new)):
        yield {"new": tuple(width if count == old else count for count in new)}
    for old in sorted(set(new)):
        for more in (width - 1, *nearer_numbers(old, width)):
            yield {"new": tuple(more if count == old else count for count in new)}


def _heads_words(case: Case) -> str:
    return f"{case.heads} with rope {case.rope_dim}" if case.rope_dim else str(case.heads)


def _with_heads(case: Case, heads: Heads, like: Case) -> Changes:
    """With what goes with a family, as ``like`` has it: MLA has a rope width and a scaling of its own."""
    if heads.family == "mla" or case.heads.family != "mla":
        return {"heads": heads}
    return {"heads": heads, "rope_dim": 0, "usual_scaling": like.usual_scaling}


def _fewer_heads(claims: Capabilities, case: Case, plain: Case) -> Iterator[Changes]:
    for heads in head_layouts(claims):
        if heads.family != "mla" or case.is_mla:
            yield _with_heads(case, heads, plain)
    if case.is_mla:
        yield from ({"rope_dim": width} for width in sorted(claims.mla_rope_dims))


def _heads_size(case: Case, plain: Case) -> Size:
    heads = case.heads
    return (heads.family == "mla", heads.q_heads // heads.kv_heads, heads.q_heads, case.rope_dim)


def _smaller_claimed(name: str, claim: str) -> Callable[[Capabilities, Case, Case], Iterator[Changes]]:
    def nearer(claims: Capabilities, case: Case, plain: Case) -> Iterator[Changes]:
        below = [value for value in sorted(getattr(claims, claim)) if value < getattr(case, name)]
        few = len(below) <= _FEW
        yield from ({name: value} for value in below if few or not value & (value - 1) or value in below[-2:])

    return nearer


def _smaller_window(claims: Capabilities, case: Case, plain: Case) -> Iterator[Changes]:
    if case.window > claims.min_window:
        yield {"window": claims.min_window}
        yield from ({"window": window} for window in nearer_numbers(case.window, claims.min_window))


def _nearer_layers(claims: Capabilities, case: Case, plain: Case) -> Iterator[Changes]:
    count, first = case.layers.count, case.layers.first
    alone = Layers(count, first)
    one_thing = (replace(alone, groups=case.layers.groups), replace(alone, shapes=case.layers.shapes))
    for layers in (alone, *one_thing, replace(case.layers, first=0), replace(case.layers, count=2)):
        yield {"layers": layers}


def _layers_size(case: Case, plain: Case) -> Size:
    layers = case.layers
    return (bool(layers.shapes) + layers.groups, abs(layers.count - plain.layers.count), layers.first)


def _fewer_parts(claims: Capabilities, case: Case, plain: Case) -> Iterator[Changes]:
    kind = case.parts.rstrip("0123456789")
    ranks = case.parts.removeprefix(kind)
    yield {"own_merge": False}
    yield {"parts": "whole", "own_merge": False}
    yield from ({"parts": f"{kind}{fewer}"} for fewer in nearer_numbers(int(ranks or 2), 2))


def _parts_size(case: Case, plain: Case) -> Size:
    ranks = case.parts.lstrip("abcdefghijklmnopqrstuvwxyz")
    return (case.own_merge, case.parts not in ("", "whole"), int(ranks or 0))


def _padded(case: Case) -> int:
    return case.bucket - case.bs


def _field(name: str, *beside: str, **more: Any) -> Dimension:
    """A field, and those beside it that mean nothing without it."""
    names = (name, *beside)
    values: dict[str, Any] = {
        "words": lambda case: str(getattr(case, name) or "none"),
        "of": lambda case: tuple(getattr(case, each) for each in names),
        "reset": lambda case, plain: {each: getattr(plain, each) for each in names},
    }
    return Dimension(**values | more)


def _number(name: str, *beside: str, **more: Any) -> Dimension:
    values: dict[str, Any] = {
        "words": lambda case: str(getattr(case, name)),
        "size": lambda case, plain: (abs(getattr(case, name) - getattr(plain, name)),),
    }
    return _field(name, *beside, **values | more)


DIMENSIONS: Mapping[str, Dimension] = {
    "requests": Dimension(
        words=lambda case: str(case.bs),
        of=lambda case: case.bs,
        reset=lambda case, plain: _keep(case, [0]),
        size=lambda case, plain: (case.bs,),
        nearer=_fewer_requests,
    ),
    "heads": _field("heads", "rope_dim", words=_heads_words, size=_heads_size, nearer=_fewer_heads,
                    reset=lambda case, plain: {**_with_heads(case, plain.heads, plain), "rope_dim": plain.rope_dim}),
    "head dim": _number("head_dim", nearer=_smaller_claimed("head_dim", "head_dims")),
    "dtype": _field("dtype"),
    "page size": _number("page_size", nearer=_smaller_claimed("page_size", "page_sizes")),
    "keys": Dimension(
        words=lambda case: ".".join(map(str, case.prefixes)),
        of=lambda case: frozenset(case.prefixes),
        reset=lambda case, plain: {"prefixes": plain.prefixes * case.bs},
        size=lambda case, plain: (len(set(case.prefixes)), sum(abs(n - plain.prefixes[0]) for n in case.prefixes)),
        nearer=_fewer_keys,
    ),
    "rows": Dimension(
        words=_rows_words,
        of=lambda case: (case.width, frozenset(case.new), case.tree, case.draft),
        reset=lambda case, plain: {
            "width": plain.width, "new": plain.new * case.bs, "tree": plain.tree, "draft": plain.draft,
        },
        size=_rows_size,
        nearer=_fewer_rows,
    ),
    "prefixed": _field("prefixed", words=lambda case: "yes" if case.prefixed else "no"),
    "loop": _number("rounds", nearer=lambda claims, case, plain: (
        {"rounds": rounds} for rounds in (1, *nearer_numbers(case.rounds, 0)) if case.rounds
    )),
    "chunks": _number("chunks", nearer=lambda claims, case, plain: ({"chunks": 2} for _ in range(case.chunks > 2))),
    "layout": _field("layout"),
    "data": _field("data"),
    "KV dtype": _field("kv_dtype"),
    "KV layout": _field("kv_layout"),
    "window": _number(
        "window", "layer_windows", nearer=_smaller_window,
        words=lambda case: "none" if case.window < 0 else f"{case.window}{case.layer_windows.removeprefix('any')}",
    ),
    "usual scale": _field("usual_scaling", words=lambda case: "yes" if case.usual_scaling else "no"),
    "soft cap": _number("logit_cap"),
    "sinks": _field("sinks", words=lambda case: "yes" if case.sinks else "no"),
    "layers": _field("layers", size=_layers_size, nearer=_nearer_layers, words=lambda case: str(case.layers)),
    "parts": _field("parts", "own_merge", size=_parts_size, nearer=_fewer_parts),
    "padded requests": Dimension(
        words=lambda case: str(_padded(case)),
        of=_padded,
        reset=lambda case, plain: {"bucket": case.bs},
        size=lambda case, plain: (_padded(case),),
        nearer=lambda claims, case, plain: (
            {"bucket": case.bs + padded} for padded in nearer_numbers(_padded(case), 0)
        ),
    ),
    "padding": _field("padding"),
    "mixed": _field("mixed", words=lambda case: "yes" if case.mixed else "no"),
    "way": _field("way"),
    "seed": _number("seed"),
}  # fmt: skip
"""By name, in the order in which they are printed."""

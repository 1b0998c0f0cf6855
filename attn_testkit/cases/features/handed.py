"""Memory that another instance hands over: tensor-parallel ranks with other heads, other pages, another layout."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

from ...contract import KV_LAYOUTS, SENDER_RANKS, Capabilities, ForwardMode, heads_of_rank
from ...contract.kv_layouts import OWN
from ...contract.state_kind import STATE_KINDS
from ...glossary import Entry
from ..fields import Changes, Fields
from .feature import Asked, Bound, Columns, Covered, Feature, Row, Trait, Without, Word, of_fields

_LAYOUTS = {name.replace("-", ""): name for name in KV_LAYOUTS if name != OWN}
_PATTERN = rf"(?P<senders>\d+)to(?P<ranks>\d+)(?:k(?P<heads>\d+))?p(?P<page>\d+)(?P<layout>{'|'.join(_LAYOUTS)})"
SHARED = "shared heads"
"""Kind of a sender whose ranks share heads, or whose receiver's ranks do."""
_MOST_RANKS = 8


@dataclass(frozen=True)
class Handed:
    """A sender, and the rank that receives."""

    senders: int
    """Tensor-parallel ranks of the sender."""
    ranks: int
    """Tensor-parallel ranks of the receiver, of which the instance is one."""
    heads: int
    """KV heads of the model, and groups of Mamba2, if several ranks share one; 0: each is on one rank."""
    page: int
    """Slots of a page of the sender."""
    layout: str
    """KV layout of the sender."""

    def __str__(self) -> str:
        heads = f"k{self.heads}" * bool(self.heads)
        return f"{self.senders}to{self.ranks}{heads}p{self.page}{self.layout.replace('-', '')}"

    @property
    def compared(self) -> str:
        """The number of the sender's ranks, compared with that of the receiver's: one of ``SENDER_RANKS``."""
        if self.senders == self.ranks:
            return "same"
        return "fewer" if self.senders < self.ranks else "more"

    def total(self, here: int) -> int:
        """Heads of the model in a layer of keys of which a rank of the receiver has ``here``."""
        return self.heads or here * self.ranks

    def fits(self, here: int) -> bool:
        """True if a rank of the receiver has ``here`` heads of keys, and each rank of the sender a whole number."""
        total = self.total(here)
        whole = all(total % ranks == 0 or ranks % total == 0 for ranks in (self.senders, self.ranks))
        return whole and len(heads_of_rank(0, self.ranks, total)) == here

    def shares(self, here: int) -> bool:
        """True if several ranks have one head."""
        return self.total(here) < max(self.senders, self.ranks)


def handed_of(case: Fields) -> Handed | None:
    """The sender of a case; None if no memory is handed over."""
    match = re.fullmatch(_PATTERN, case.handed)
    if match is None:
        return None
    senders, ranks, heads, page = (int(match[name] or 0) for name in ("senders", "ranks", "heads", "page"))
    return Handed(senders, ranks, heads, page, _LAYOUTS[match["layout"]])


def state_key_heads(case: Fields, handed: Handed) -> int:
    """Key heads of the model in layers that keep a state."""
    here = case.heads.kv_heads
    return handed.total(here) if STATE_KINDS[case.heads.family].replicates_groups else here * handed.ranks


def handed_from(case: Fields, ranks: str, page: int, layout: str) -> str:
    """``Fields.handed`` for the heads of a case. ``ranks``: of ``SENDER_RANKS``, or ``shared heads``. Raises
    ``ValueError`` if the heads cannot be divided among as many ranks.
    """
    here, latent = case.heads.kv_heads, case.heads.layout.values_in_keys
    one = 1 if latent else 0
    found = {
        "same": Handed(2, 2, one, page, layout),
        "fewer": Handed(1 if latent else 2, 4, one, page, layout),
        "more": Handed(4, 2, one, page, layout),
        # Two ranks here share a head, or two ranks of the sender do.
        SHARED: Handed(1, 4, 2, page, layout) if here == 1 else Handed(2 * here, 1, here, page, layout),
    }[ranks]
    if wrong := _divided(case, found):
        raise ValueError(wrong)
    if found.senders > _MOST_RANKS:
        raise ValueError(f"{found.senders} ranks of a sender would be more than cases have")
    return str(found)


def _divided(case: Fields, handed: Handed) -> str:
    here, ranks = case.heads.kv_heads, (handed.senders, handed.ranks)
    if case.heads.layout.values_in_keys and handed.heads != 1:
        return f"memory from {handed}: all ranks have the same latent rows, so write k1"
    if not case.heads.layout.has_state:
        fits = handed.fits(here)
        return "" if fits else f"memory from {handed}: {here} KV heads on a rank cannot be divided like this"
    # Without Mamba2 only softmax layers of a hybrid model have heads that ranks share.
    shared = handed.heads and STATE_KINDS[case.heads.family].replicates_groups
    divided = [case.heads.q_heads, *([] if shared else [here])]
    fits = not handed.heads or handed.fits(here)
    if not fits or any(heads * handed.ranks % each for heads in divided for each in ranks):
        return f"memory from {handed}: {case.heads} cannot be divided among as many ranks"
    return ""


def _wrong(case: Fields) -> str:
    handed = handed_of(case)
    if handed is None:
        return ""
    if case.state is not None and case.state.big:
        return f"memory from {handed}: pools are compared as a whole, and this one has more than 2^31 elements"
    return _divided(case, handed)


def _shares(case: Fields, handed: Handed) -> bool:
    return not case.heads.layout.values_in_keys and handed.shares(case.heads.kv_heads)


def kinds_and_pools(declared: Capabilities) -> tuple[list[str], list[int], list[str]]:
    """Kinds of senders, as ``handed_from`` has them, their page sizes and their KV layouts; empty if none is
    declared."""
    receives = declared.receives
    if receives is None:
        return [], [], []
    kinds = [*(each for each in SENDER_RANKS if each in receives.ranks), *[SHARED] * receives.shared_heads]
    return kinds, sorted(receives.page_sizes), [name for name in KV_LAYOUTS if name in receives.kv_layouts]


def _declared(declared: Capabilities, case: Fields) -> bool:
    handed, receives = handed_of(case), declared.receives
    if handed is None or receives is None:
        return handed is None
    return (
        handed.compared in receives.ranks
        and handed.page in receives.page_sizes
        and handed.layout in receives.kv_layouts
        and (receives.shared_heads or not _shares(case, handed))
    )


def _columns(declared: Capabilities, mode: ForwardMode, tier: str) -> Mapping[str, Sequence[Any]]:
    """Each kind of ranks, page size and layout at least once; ``catalogue/handed.py`` has more of them together."""
    kinds, pages, layouts = kinds_and_pools(declared)
    # Ranks can share few of the numbers of heads that states have, so catalogue/handed.py has those cases.
    listed = [each for each in kinds if each != SHARED or declared.state is None], pages, layouts
    most = max(len(each) for each in listed)
    every = zip(*(islice(cycle(each), most) for each in listed), strict=True)
    return {"handed_from": ["", *every]} if most else {}


def _of_row(declared: Capabilities, row: Row, so_far: Changes) -> Changes:
    asked = row.get("handed_from")
    if not asked:
        return {}
    case = Fields(**so_far)
    return {"handed": handed_from(case, *asked)}


def _phrase(case: Fields) -> str:
    handed = handed_of(case)
    if handed is None:
        return ""
    groups = " and groups" * (case.heads.layout.has_state and STATE_KINDS[case.heads.family].replicates_groups)
    heads = f"; the model has {handed.heads} KV heads{groups}" if handed.heads else ""
    return (
        f"{handed.senders} tensor-parallel ranks hand the requests over to one of {handed.ranks}, from pages of "
        f"{handed.page} in the layout {handed.layout}{heads}"
    )


def _simpler(declared: Capabilities, case: Fields, minimal: Fields) -> Iterator[Changes]:
    handed = handed_of(case)
    if handed is None:
        return
    one = 1 if case.heads.layout.values_in_keys else 0
    for each in (
        replace(handed, senders=1, ranks=1, heads=one),
        replace(handed, page=case.page_size),
        replace(handed, layout="nhd"),
    ):
        if each != handed:
            yield {"handed": str(each)}


HANDED_FROM = Columns(_columns, _of_row, further=("handed_from",))
HANDED = Feature(
    name="handed memory",
    order=297,
    fields=("handed",),
    traits=(
        Trait(
            "memory from another instance",
            lambda case: bool(case.handed),
            excludes={
                "loop": "the requests of a loop are begun on its own instance",
                "multi-mode instance": "only one mode of the instance would receive requests",
                "KV splits": "keys that are dealt among ranks have other slots",
                "rows on ranks": "each rank would receive all keys",
                "heads by layer": "the memory of a sender has layers of one shape",
                "keys wider than values": "values of such keys are in memory of their own",
                "cross-attention layers": "encoder keys are handed over in servers that run encoders",
                "rollback of states by slots": "a request would have a window and a state in different slots",
                "snapshots of states": "a prefix cache is the receiver's own",
                "states of a prefix cache": "a request continues the state that it was handed",
                "bigpool": "the pools are compared as a whole",
            },
        ),
    ),
    wrong=_wrong,
    words=(
        Word(
            rf"handed({_PATTERN})",
            lambda match, so_far: {"handed": match[1]},
            lambda case: f"handed{case.handed}" * bool(case.handed),
            bounds=(
                Bound("number of the sender's ranks", 1, 64, "senders"),
                Bound("number of the receiver's ranks", 1, 64, "ranks"),
                Bound("number of KV heads", 1, 1024, "heads"),
                Bound("page size of the sender", 1, 1 << 16, "page"),
            ),
        ),
    ),
    explained=(
        Entry(
            "handed2to4p16hnd",
            "Before each step 2 tensor-parallel ranks of another instance hand its requests over to this one of 4, "
            "from pages of 16 slots in the layout hnd. With k2 after the 4 the model has 2 KV heads, and 2 groups of "
            "Mamba2.",
            also=("prefill/decode disaggregation", "PD disaggregation", "KV transfer", "KV connector", "hand over"),
            page="how-to/hand-memory-over.md",
            numbers=True,
        ),
    ),
    describe=lambda case: {"handed": _phrase(case)},
    declared=(
        Asked(lambda case: f"memory from {handed_of(case)}", _declared),
    ),
    values=HANDED_FROM,
    covered=(
        Covered(
            "handed",
            "memory from another instance with ranks:",
            lambda declared, mode: kinds_and_pools(declared)[0],
            lambda declared, case: (
                None
                if (handed := handed_of(case)) is None
                else SHARED if _shares(case, handed) else handed.compared
            ),
            Without("The covering array and catalogue/handed.py have every kind."),
        ),
    ),
    simpler=of_fields("handed", steps=_simpler),
    undeclared=Without("A constructor does not see from where requests will come."),
    varies="instance",
    apply=Without("runner_modes/handing_over.py fills the pools of a sender and calls receive."),
)  # fmt: skip

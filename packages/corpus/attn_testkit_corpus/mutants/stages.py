"""Stages of a mutant: smoke, and core if it is requested."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from attn_testkit.cases.case import Case, parse_case
from attn_testkit.cases.layers import Layers
from attn_testkit.contract import Capabilities
from attn_testkit.registry import UsageError
from attn_testkit.running.planning.most_valuable import pairs_of, richest_first
from attn_testkit.running.planning.plan import plan_run
from attn_testkit.running.planning.request import Item, Plan, Request

from .order import name_of
from .settings import Settings


@dataclass(frozen=True)
class Stage:
    """A series of case-runs that are tried on mutants."""

    plan: Plan
    items: tuple[Item, ...]
    seen: str
    """Digest of all case-runs that a survivor of this stage has seen, those of earlier stages included."""
    before: tuple[str, ...] = ()
    """Digests of earlier stages."""
    after: tuple[str, ...] = ()
    """Digests of later stages."""


def stages_of(settings: Settings, declared: Capabilities) -> list[Stage]:
    """Stages in their order. Raises ``UsageError`` if nothing of what is declared can run here."""
    stages: list[Stage] = []
    known: list[Item] = []
    for tier in ("smoke", "core") if settings.tier == "core" else ("smoke",):
        request = Request(
            backends=(settings.backend,),
            modes=settings.modes,
            tier=tier,
            device=settings.device,
            command="attn-testkit audit --mutants",
        )
        plan = replace(plan_run(request, lambda _: declared), explains="nothing")
        names = set(map(name_of, known))
        items = [replace(item, probe=False) for item in plan.items if name_of(item) not in names]
        if tier == "core":
            items = most_valuable(items, known)[: settings.most]
        known += items
        stages.append(Stage(plan, tuple(items), _digest(map(name_of, known))))
    if not known:
        why = "; ".join(dict.fromkeys(row.reason for row in stages[0].plan.preset if row.reason))
        raise UsageError(f"backend {settings.backend!r}: no case-run can be made here ({why})")
    digests = tuple(stage.seen for stage in stages)
    return [replace(stage, before=digests[:n], after=digests[n + 1 :]) for n, stage in enumerate(stages)]


def _digest(names: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()[:16]


def most_valuable(items: Sequence[Item], known: Sequence[Item]) -> list[Item]:
    """Case-runs by value: first those with a property that no earlier case has, such as a server variant; then those
    with a property that is new in their mode; then those with new pairs of values.
    """
    left = {item.case: parse_case(item.case) for item in items}
    met = [parse_case(name) for name in dict.fromkeys(item.case for item in known)]
    place: dict[str, int] = {}
    for features in (_words_of, _words_in_a_mode, pairs_of):
        seen = {feature for case in met for feature in features(case)}
        for case in list(richest_first(left.values(), features, met=met)):
            if features is not pairs_of and features(case) <= seen:
                break
            seen |= features(case)
            met.append(left.pop(case.id))
            place[case.id] = len(place)
    return sorted(items, key=lambda item: place[item.case])


def _words_of(case: Case) -> frozenset[Hashable]:
    """Pairs (field, value) that are a word, a switch or a shape of the model, not a length or another number."""
    found = (*case.values.items(), *(("variant", word) for word in case.variants))
    return frozenset((name, value) for name, value in found if isinstance(value, str | bool | Layers))


def _words_in_a_mode(case: Case) -> frozenset[Hashable]:
    return frozenset((case.mode, word) for word in _words_of(case))

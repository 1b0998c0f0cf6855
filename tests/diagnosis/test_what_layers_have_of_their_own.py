"""What is right where layers have nothing of their own: other heads, a KV group, a window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_changed_cases import Backend, asked_of
from wrong_steps import wrong_at

from attn_testkit.cases.case import Case, parse_case
from attn_testkit.diagnosis.hints import Evidence, hints
from attn_testkit.diagnosis.hints.changed import right_with_other_layers
from attn_testkit.diagnosis.raised import explain_raised
from attn_testkit.steps.data import make_layers
from attn_testkit.steps.schedule import make_schedule

SHAPES = "decode-gqa2x4-d64-fp32-p4-k15.22-shuffled-gauss-layers3from5by4x2d32.8x4d64-b2prod"
GROUPS = "decode-gqa2x2-d32-fp32-p4-k15.22-shuffled-gauss-layers3from5groups-b2prod"
WINDOW = "decode-gqa2x2-d32-fp32-p4-k15.22-shuffled-gauss-w4one-b2prod"
PLAIN = "decode-gqa2x2-d32-fp32-p4-k15.22-shuffled-gauss-b2prod"


class Changed:
    """Right without some features."""

    def __init__(self, *without: str) -> None:
        self.without = without

    def right_without(self, feature: str) -> bool:
        return feature in self.without

    def right_elsewhere(self, step: object) -> bool:
        return False


def windowed(case: str) -> int:
    return [layer.sliding_window_size >= 0 for layer in make_layers(parse_case(case))].index(True)


def reported(case: str, *without: str, layers: tuple[int, ...] = (0, 1), **more: Any) -> Evidence:
    schedule = make_schedule(parse_case(case))
    comparison = wrong_at(schedule, *((layer, 0, 0) for layer in layers))
    values: dict[str, Any] = {"changed": Changed(*without), **more}
    return Evidence(schedule, comparison, None, [], **{"in_graph": False, **values})


@pytest.mark.parametrize(
    ("case", "feature", "said"),
    [
        (SHAPES, "shapes", "the case passes if all layers have the same heads, and fails if they differ"),
        (GROUPS, "groups", "the case passes if all layers share one KV group, and fails with two"),
    ],
)
def test_it_is_reported_where_the_case_is_right_without(case: str, feature: str, said: str) -> None:
    found = reported(case, feature)
    assert said in hints(found)[-1]
    assert right_with_other_layers(reported(case)) == "", "wrong without as well"
    assert right_with_other_layers(reported(PLAIN, feature)) == "", "the case has nothing of the kind"
    assert right_with_other_layers(replace(found, in_graph=True)) == ""
    assert right_with_other_layers(replace(found, changed=None)) == ""


@pytest.mark.parametrize(("layers", "group"), [((0,), 0), ((0, 2), 0), ((1,), 1), ((1, 2), None)])
def test_the_kv_group_whose_layers_alone_are_wrong_is_named(layers: tuple[int, ...], group: int | None) -> None:
    said = right_with_other_layers(reported(GROUPS, "groups", layers=layers))
    assert ("in layers of KV group" in said) is (group is not None)
    assert group is None or f"only in layers of KV group {group}" in said


def test_a_window_is_reported_where_its_layers_alone_are_wrong_and_others_slots_are_read() -> None:
    own = windowed(WINDOW)
    said = "passes without a sliding window; with one, only the layers that have it (4) are wrong"
    found = reported(WINDOW, "window", layers=(own,), reads_foreign=True)
    assert right_with_other_layers(found).endswith(said)
    assert right_with_other_layers(replace(found, reads_foreign=False)) == "", "a range, and no table"
    assert right_with_other_layers(reported(WINDOW, "window", layers=(1 - own,), reads_foreign=True)) == ""
    assert right_with_other_layers(reported(WINDOW, "window", reads_foreign=True)) == ""
    assert right_with_other_layers(reported(WINDOW, layers=(own,), reads_foreign=True)) == ""


@pytest.mark.parametrize("case", [SHAPES, GROUPS])
def test_such_a_case_is_one_like_it_whose_layers_are_alike(case: str) -> None:
    feature = "shapes" if case == SHAPES else "groups"
    assert asked_of(lambda case: bool(getattr(case.layers, feature)), case).right_without(feature)
    assert not asked_of(lambda case: True, case).right_without(feature)
    assert not asked_of(lambda case: not getattr(case.layers, feature), case).right_without(feature)
    assert not asked_of(lambda case: bool(case.layers.count), PLAIN).right_without(feature)


class Graphs(Backend):
    """Raises in graphs alone."""

    def eager(self, schedule: Any, step: Any) -> Any:
        return object()

    def graph(self, schedule: Any) -> Any:
        return None if self.wrong(schedule.case) else object()


@pytest.mark.parametrize(
    ("case", "feature", "said"),
    [
        (SHAPES, "shapes", "nothing is raised if all layers have the same heads"),
        (GROUPS, "groups", "nothing is raised if all layers share one KV group"),
    ],
)
def test_what_raises_in_an_eager_run_or_in_graphs_alone_is_asked_about_there(
    case: str, feature: str, said: str
) -> None:
    def has(case: Case) -> bool:
        return bool(getattr(case.layers, feature))

    schedule = make_schedule(parse_case(case))
    eager = Backend(lambda case: None if has(case) else False)
    assert explain_raised(eager, schedule, in_graph=False).endswith(said)  # type: ignore[arg-type]
    assert explain_raised(Graphs(has), schedule, in_graph=True).endswith(said)  # type: ignore[arg-type]
    assert explain_raised(Graphs(has), schedule, in_graph=False) == ""  # type: ignore[arg-type]
    assert explain_raised(Graphs(lambda case: True), schedule, in_graph=True) == ""  # type: ignore[arg-type]

"""Who stops at the first failure gets an easy one: plain cases come before those with many options."""

from __future__ import annotations

import itertools

import pytest

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import Case, parse_case
from attn_testkit.registry import UsageError
from attn_testkit.running.planning.order import ordered
from attn_testkit.running.planning.plan import plan_run
from attn_testkit.running.planning.request import Item, Plan, Request

PLAIN = "decode-gqa2x2-d32-fp32-p4-k3.9-shuffled-gauss-b2prod"


def planned(**fields: object) -> Plan:
    return plan_run(Request(("torch_native",), device="cpu", **fields), lambda _: TorchNativeBackend.capabilities)  # type: ignore[arg-type]


def order(*ids: str, backends: tuple[str, ...] = ("m",)) -> list[tuple[str, str, str]]:
    entries = [
        (Item(backend, case.mode.value, execution, case.id), case)
        for backend in backends
        for execution in ("graph", "eager")
        for case in map(parse_case, ids)
    ]
    return [(item.backend, item.execution, item.case) for item in ordered(entries, "plainest")]


def cases_in_order(*ids: str) -> list[str]:
    return list(dict.fromkeys(case for _, _, case in order(*ids)))


def alike(case_id: str, to: Case) -> str:
    """The case with a seed under which it runs in the same grad mode."""
    case = parse_case(case_id)
    seeds = map(case.with_seed, itertools.count())
    return next(each.id for each in seeds if each.inference_mode == to.inference_mode)


@pytest.mark.parametrize(
    "odd",
    [
        "decode-gqa2x2-d32-fp32-p4-k3.9-shuffled-gauss-kvfp8e4m3-b2prod",
        "decode-gqa2x2-d32-fp32-p4-k3.9-shuffled-gauss-kvhnd-b2prod",
        "decode-gqa2x2-d32-fp32-p4-k3.9-shuffled-gauss-w0-b2prod",
        "decode-gqa2x2-d32-fp32-p4-k3.9-shuffled-gauss-cap1.5-b2prod",
        "decode-gqa2x2-d32-fp32-p4-k3.9-shuffled-gauss-sink-b2prod",
        "decode-gqa2x2-d32-fp32-p4-k3.9-shuffled-gauss-layers3from5-b2prod",
        "decode-gqa2x2-d32-fp32-p4-k3.9-shuffled-gauss-lsewhole-b2prod",
        "decode-gqa2x2-d32-fp32-p4-k3.9-shuffled-gauss-b3stale",
        "decode-gqa2x2-d32-fp32-p4-k3.9-shuffled-gauss-b2prod-zero_length_padding",
        "decode-gqa2x2-d32-fp32-p4-k3.9-shuffled-gauss-b2prod-multi_mode",
        "decode-gqa2x2-d32-fp32-p4-k3.9-shuffled-plus_minus_one-b2prod",
        "decode-gqa2x2-d32-fp32-p4-k3.9-shuffled-large_and_small_values-b2prod",
        "decode-gqa2x2-d32-fp32-p4-k1x5-shuffled-gauss-b5prod",
        "decode-gqa2x2-d32-fp32-p4-k3.256-shuffled-gauss-b2prod",
        "target-verify-gqa2x2-d32-fp32-p4-k3.9-t0.0-shuffled-gauss-b2prod",
        "extend-gqa2x2-d32-fp32-p4-k3.9-n4a3.4-chunks2-shuffled-gauss-b2prod",
        "draft-decode-gqa2x2-d32-fp32-p4-k3.9-topk1steps3-loop2-shuffled-gauss-b2prod",
    ],
)
def test_a_case_with_one_option_comes_behind_a_plain_one(odd: str) -> None:
    odd = alike(odd, parse_case(PLAIN))
    assert cases_in_order(odd, PLAIN) == [PLAIN, odd]


@pytest.mark.parametrize(
    "other", ["k1x4-shuffled-gauss-b4prod", "k3.255-shuffled-gauss-b2prod", "k3-reversed-mean-b2prod"]
)
def test_what_is_as_plain_stays_as_listed(other: str) -> None:
    other = alike(f"decode-gqa2x2-d32-fp32-p4-{other}", parse_case(PLAIN))
    assert cases_in_order(other, PLAIN) == [other, PLAIN]
    assert cases_in_order(PLAIN, other) == [PLAIN, other]


def test_several_modes_on_one_instance_are_harder_than_any_number_of_options() -> None:
    many = alike("decode-gqa2x2-d32-fp32-p4-k3x5-shuffled-gauss-kvfp8e4m3-w4-cap1.5-sink-b6stale", parse_case(PLAIN))
    mixed = alike(f"{PLAIN}-multi_mode", parse_case(PLAIN))
    assert cases_in_order(mixed, many, PLAIN) == [PLAIN, many, mixed]


def test_each_backend_by_itself_and_eager_before_graph() -> None:
    odd = alike(PLAIN.replace("-b2", "-sink-b2"), parse_case(PLAIN))
    assert order(odd, PLAIN, backends=("b", "a")) == [
        (backend, execution, case) for backend in "ba" for case in (PLAIN, odd) for execution in ("eager", "graph")
    ]


def test_a_process_goes_to_inference_mode_once_whatever_is_plain() -> None:
    for order in ("listed", "plainest"):
        modes = [parse_case(item.case).inference_mode for item in planned(order=order).items]
        assert modes == sorted(modes)
        assert set(modes) == {False, True}


def test_it_is_the_same_case_runs_in_another_order() -> None:
    listed, plainest = planned(tier="core"), planned(tier="core", order="plainest")
    assert sorted(map(str, listed.items)) == sorted(map(str, plainest.items))
    assert listed.items != plainest.items
    halves = itertools.groupby(plainest.items, key=lambda item: parse_case(item.case).inference_mode)
    for _, half in halves:
        mixed = [parse_case(item.case).multi_mode or parse_case(item.case).rounds > 0 for item in half]
        assert mixed == sorted(mixed)


def test_an_order_that_there_is_not_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown order 'plain' \\(known: listed, plainest, most valuable\\)"):
        planned(order="plain")

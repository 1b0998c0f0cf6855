"""The lossless loop: with a draft or without one, greedy decode says the same; and what the check hears of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attn_testkit.runner_modes.clock import Clock
from attn_testkit.runner_modes.greedy_loop import run_loop
from attn_testkit.runner_modes.harness import ServerHarness

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.checks.lossless import GeneratedTokens, lossless, ran_to_its_end
from attn_testkit.contract import AttentionBackend, AttentionLayer, ForwardMode
from attn_testkit.families.expected import Expected, expect_of
from attn_testkit.steps.greedy_loop import Loop, data_of_tokens, loop_modes, make_loop
from cuda_on_cpu import emulated_cuda

CASE = "draft-decode-gqa2x2-d64-bf16-p{page}-k17.32.1-topk{k}steps{s}-loop{rounds}-shuffled-gauss-b4prod"
DRAFT, VERIFY, V1, V2 = (
    ForwardMode.DRAFT_DECODE,
    ForwardMode.TARGET_VERIFY,
    ForwardMode.DRAFT_EXTEND,
    ForwardMode.DRAFT_EXTEND_V2,
)


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with torch.no_grad(), emulated_cuda():
        yield


def speak(
    k: int = 1,
    s: int = 3,
    rounds: int = 4,
    page: int = 16,
    *,
    graphs: bool = False,
    backend: type[AttentionBackend] = TorchNativeBackend,
    kept: list[list[int]] | None = None,
    modes: frozenset[ForwardMode] = frozenset(ForwardMode),
    case_id: str = CASE,
) -> tuple[Loop, GeneratedTokens, Expected]:
    case = parse_case(case_id.format(page=page, k=k, s=s, rounds=rounds))
    loop = make_loop(case, loop_modes(case, modes))
    if kept is not None:
        loop = replace(loop, kept=np.array(kept))
    harness = ServerHarness(backend, loop.schedules, torch.device("cuda"))
    generated = run_loop(harness, case, loop, Clock(), in_graphs=graphs)
    return loop, generated, expect_of(loop.schedules[0], data_of_tokens(loop.schedules[0], generated.tokens))


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(("k", "s", "page"), [(1, 3, 16), (2, 3, 16), (3, 2, 4), (2, 4, 1)])
def test_drafts_that_are_right_are_accepted_as_far_as_they_were_left_alone(
    k: int, s: int, page: int, graphs: bool
) -> None:
    loop, generated, expected = speak(k, s, page=page, graphs=graphs)
    assert [list(counts) for counts in generated.accepted] == loop.kept.tolist()
    assert ran_to_its_end(generated, loop)
    assert lossless(generated, loop, expected) == []


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(
    "kept",
    [[[3, 3, 3]] * 3, [[0, 0, 0]] * 3, [[1, 2, 3], [3, 2, 1], [0, 3, 0]]],
    ids=["all", "none", "uneven"],
)
def test_greedy_decode_says_the_same_at_any_acceptance(kept: list[list[int]], graphs: bool) -> None:
    loop, generated, expected = speak(rounds=3, kept=kept, graphs=graphs)
    assert [list(counts) for counts in generated.accepted] == kept
    assert lossless(generated, loop, expected) == []
    # Plain greedy decode, token by token of the oracle.
    start = 0
    for prompt, tokens in zip(loop.prompts, generated.tokens, strict=True):
        likely = expected.logits[start : start + len(tokens)].argmax(-1).tolist()
        assert likely[len(prompt) - 1 : -1] == list(tokens[len(prompt) :])
        start += len(tokens)


OPTIONS = CASE.replace("-gauss", "-gauss-kvfp8e4m3-w11-cap1.5-sink")


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graph"])
def test_a_loop_has_windows_soft_caps_sinks_and_a_pool_of_fp8(graphs: bool) -> None:
    loop, generated, expected = speak(k=2, graphs=graphs, case_id=OPTIONS)
    assert [list(counts) for counts in generated.accepted] == loop.kept.tolist()
    assert lossless(generated, loop, expected) == []


class IgnoresTheWindow(TorchNativeBackend):
    """Wrong: drafts see all keys in windowed layers."""

    def forward(self, q: Any, k: Any, v: Any, layer: AttentionLayer, batch: Any, save_kv_cache: bool = True) -> Any:
        if batch.forward_mode is DRAFT:
            layer = replace(layer, sliding_window_size=-1)
        return super().forward(q, k, v, layer, batch, save_kv_cache)


def test_a_window_that_drafts_ignore_is_heard() -> None:
    loop, generated, expected = speak(backend=IgnoresTheWindow, case_id=OPTIONS, kept=[[3, 3, 3]] * 4)
    (finding,) = lossless(generated, loop, expected)
    assert finding.step == "round 1, draft-decode"


def test_acceptance_changes_nothing_of_what_is_said() -> None:
    alone = speak(rounds=6, kept=[[0, 0, 0]] * 6)[1].tokens
    ahead = speak(rounds=6, kept=[[3, 3, 3]] * 6)[1].tokens
    assert all(long[: len(short)] == short for short, long in zip(alone, ahead, strict=True))


@pytest.mark.parametrize(
    ("supported", "modes"),
    [
        ({DRAFT, VERIFY, V1}, (DRAFT, VERIFY, V1)),
        ({DRAFT, VERIFY, V2}, (DRAFT, VERIFY, V2)),
        (set(ForwardMode), (DRAFT, VERIFY, V1, V2)),
        ({DRAFT, VERIFY}, ()),
        ({DRAFT, V1, V2}, ()),
        ({VERIFY, V1}, ()),
    ],
)
def test_a_loop_needs_verify_and_a_draft_extend(supported: set[ForwardMode], modes: tuple[ForwardMode, ...]) -> None:
    assert loop_modes(parse_case(CASE.format(page=16, k=1, s=3, rounds=2)), supported) == modes
    assert (
        loop_modes(parse_case("draft-decode-mha2-d64-bf16-p16-k5-topk1steps3-shuffled-gauss-b1prod"), supported) == ()
    )


@pytest.mark.parametrize("modes", [{DRAFT, VERIFY, V1}, {DRAFT, VERIFY, V2}], ids=["v1", "v2"])
def test_either_draft_extend_closes_the_loop(modes: set[ForwardMode]) -> None:
    loop, generated, expected = speak(2, modes=frozenset(modes))
    assert ran_to_its_end(generated, loop)
    assert lossless(generated, loop, expected) == []


class SeesAKeyTooMany(TorchNativeBackend):
    """Wrong: a row of a draft sees the slot behind its own, where an earlier draft may have left something."""

    def _kv_lens(self, batch: Any, counts: torch.Tensor) -> torch.Tensor:
        return super()._kv_lens(batch, counts) + (1 if batch.forward_mode is DRAFT else 0)


def test_a_key_too_many_in_a_draft_is_heard() -> None:
    loop, generated, expected = speak(backend=SeesAKeyTooMany, kept=[[3, 3, 3]] * 4)
    assert ran_to_its_end(generated, loop)
    (finding,) = lossless(generated, loop, expected)
    assert finding.check == "lossless"
    assert "draft-decode" in finding.step


def test_what_is_missing_of_a_loop_is_not_silence() -> None:
    loop, generated, _ = speak()
    accepted, tokens = generated.accepted, generated.tokens
    for less in (
        replace(generated, said=generated.said[1:]),
        replace(generated, said=()),
        replace(generated, accepted=accepted[1:]),
        replace(generated, accepted=()),
        replace(generated, accepted=((9, 9, 9), *accepted[1:])),
        replace(generated, accepted=tuple((0, 0, 0) for _ in accepted)),
        replace(generated, tokens=tokens[1:]),
        replace(generated, tokens=((*tokens[0], 1), *tokens[1:])),
        replace(generated, tokens=((99, *tokens[0][1:]), *tokens[1:])),
        replace(generated, tokens=((*tokens[0][:-1], 48), *tokens[1:])),
        replace(
            generated, said=(replace(generated.said[0], attention=generated.said[0].attention[:1]), *generated.said[1:])
        ),
    ):
        assert not ran_to_its_end(less, loop)


def test_another_token_than_the_likeliest_is_heard() -> None:
    loop, generated, expected = speak()
    row = next(each for each in generated.said if "verify" in each.stage and each.request == 0)
    far = expected.logits.clone()
    far[row.position, generated.tokens[0][row.position + 1]] -= 1e3
    (finding,) = lossless(generated, loop, replace(expected, logits=far))
    assert "greedy decode" in finding.headline


def test_a_token_may_be_less_likely_by_what_both_logits_may_be_off_and_no_more() -> None:
    loop, generated, expected = speak()
    row = next(each for each in generated.said if "verify" in each.stage and each.request == 2)
    at = sum(len(tokens) for tokens in generated.tokens[:2]) + row.position
    token = generated.tokens[2][row.position + 1]

    def heard(gap: float) -> int:
        logits, limits = expected.logits.clone(), torch.zeros_like(expected.logits_limit)
        logits[at] = 0.0
        logits[at, token] = -gap
        limits[:, 1] = 0.5
        return len(lossless(generated, loop, replace(expected, logits=logits, logits_limit=limits)))

    assert heard(1.0) == 0, "at the limit"
    assert heard(1.0 + 1e-9) == 1

"""The greedy-equivalence loop of target-verify: any acceptance equals plain decode, and what the check says if not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attn_testkit.runner_modes.clock import Clock
from attn_testkit.runner_modes.harness import ServerHarness
from attn_testkit.runner_modes.verify_loop import run_verify_loop

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.backends.torch_native_hybrid import TorchNativeHybridBackend
from attn_testkit.backends.torch_native_state import TorchNativeStateBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.checks.loop_mistakes import mistake_in
from attn_testkit.checks.lossless import GeneratedTokens, lossless, ran_to_its_end
from attn_testkit.contract import (
    AttentionBackend,
    AttentionLayer,
    BackendContext,
    ForwardBatch,
    ForwardMode,
    StateInput,
)
from attn_testkit.families.by_layer import data_of_texts
from attn_testkit.families.expected import Expected, expect_of
from attn_testkit.results.finding import Finding
from attn_testkit.steps.verify_loop import VerifyLoop, make_verify_loop
from attn_testkit_corpus.faults.hybrids import HybridBySlotsParent, HybridParent
from attn_testkit_corpus.faults.states import StateParent
from attn_testkit_corpus.faults.states_of_servers import SlotsParent
from cuda_on_cpu import emulated_cuda

STATES = "target-verify-{kind}4x2-d64-bf16-p16-k17.9.1-chain4-loop3-shuffled-mild_decay-k64w4s32{by}-{layers}b4prod"
KEYS = "target-verify-gqa2x2-d64-bf16-p4-k17.32.1-chain4-loop3-shuffled-gauss{options}-b4prod"
OPTIONS = "-kvfp8e4m3-w11-cap1.5-sink-layers2from0groups"
ANY = [[1, 2, 3], [3, 2, 1], [0, 3, 0]]


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    with torch.no_grad(), emulated_cuda():
        yield


def speak(
    case_id: str, backend: type[AttentionBackend], kept: list[list[int]] | None = None, *, graphs: bool = False
) -> tuple[VerifyLoop, GeneratedTokens, Expected, list[Finding]]:
    case = parse_case(case_id)
    loop = make_verify_loop(case)
    if kept is not None:
        loop = replace(loop, kept=np.array(kept))
    harness = ServerHarness(backend, loop.schedules, torch.device("cuda"))
    generated = run_verify_loop(harness, case, loop, Clock(), in_graphs=graphs)
    schedule = loop.schedules[0]
    data = data_of_texts(schedule, generated.tokens)
    expected = expect_of(schedule, data)
    found = lossless(
        generated, loop, expected, lambda said, layer: mistake_in(schedule, loop, generated, data, said, layer)
    )
    return loop, generated, expected, found


def hybrid(kind: str = "gdn", by: str = "") -> str:
    return STATES.format(kind=kind, by=by, layers="layers2from0hybrid-")


def fp32(case_id: str) -> str:
    """Without tokens that are nearly as likely as others."""
    return case_id.replace("bf16", "fp32")


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(
    ("case_id", "backend"),
    [
        (fp32(hybrid("gdn")), TorchNativeHybridBackend),
        (fp32(hybrid("mamba", ".slots")), TorchNativeHybridBackend),
        (fp32(STATES.format(kind="kda", by=".zeroed.slots", layers="")), TorchNativeStateBackend),
        (fp32(KEYS.format(options=OPTIONS)), TorchNativeBackend),
    ],
    ids=["commit", "slots", "states alone", "keys"],
)
def test_any_acceptance_equals_plain_decode(case_id: str, backend: type[AttentionBackend], graphs: bool) -> None:
    loop, generated, expected, found = speak(case_id, backend, ANY, graphs=graphs)
    assert found == []
    assert [list(counts) for counts in generated.accepted] == ANY
    assert ran_to_its_end(generated, loop)
    # Plain greedy decode, token by token of the oracle; and the text without drafts says the same.
    start = 0
    for prompt, tokens in zip(loop.texts, generated.tokens, strict=True):
        likely = expected.logits[start : start + len(tokens)].argmax(-1).tolist()
        assert likely[len(prompt) - 1 : -1] == list(tokens[len(prompt) :])
        start += len(tokens)
    bs = len(loop.prompts)
    for verified, decoded in zip(generated.tokens[:bs], generated.tokens[bs:], strict=True):
        both = min(len(verified), len(decoded))
        assert verified[:both] == decoded[:both]


@pytest.mark.parametrize("parent", [HybridParent, HybridBySlotsParent])
def test_healthy_parents_of_faults_pass(parent: type[HybridParent]) -> None:
    by = ".slots" if parent is HybridBySlotsParent else ""
    assert speak(hybrid("mamba", by), parent)[3] == []


def of_states(parent: type[HybridParent], states: type[StateParent]) -> type[HybridParent]:
    class Wrapper(parent):  # type: ignore[misc, valid-type]
        def of_states(self, context: BackendContext) -> StateParent:
            return states(context)

    return Wrapper


class OneTooFar(StateParent):
    def accepted(self, steps: torch.Tensor) -> torch.Tensor:
        return torch.where(steps >= 0, steps + 1, steps).clamp(max=self.context.num_draft_tokens - 1).long()


class OneTooFew(StateParent):
    def accepted(self, steps: torch.Tensor) -> torch.Tensor:
        return torch.where(steps > 0, steps - 1, steps).long()


class LosesTheSecond(StateParent):
    commits = 0

    def commit(self, steps: torch.Tensor, state: StateInput) -> None:
        self.commits += 1
        if self.commits != 2:
            super().commit(steps, state)


class KeepsTheWindow(StateParent):
    def accept(self, pool: torch.Tensor, scratch: torch.Tensor, steps: torch.Tensor, index: torch.Tensor) -> None:
        last = self.context.num_draft_tokens - 1
        window = pool.shape[-1] == 3
        super().accept(pool, scratch, torch.where(steps >= 0, last, steps) if window else steps, index)


class SlotsOfTheRoundBefore(SlotsParent):
    kept: torch.Tensor | None = None

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata_in_graph(batch)
        if batch.forward_mode.is_target_verify():
            now = self.lists
            self.lists, self.kept = now if self.kept is None else self.kept, now
            self.index = self.lists[:, 0]


@pytest.mark.parametrize(
    ("parent", "states", "step", "hint"),
    [
        (HybridParent, OneTooFar, "round 2, decode",
         "state and window continue from after node [123] of the draft of round 1.*rejected token was applied"),
        (HybridParent, OneTooFew, "round 2, decode",
         "state and window continue from after node [012] of the draft of round 1.*not applied"),
        (HybridParent, LosesTheSecond, "round 3, target-verify",
         "state and window continue from before the root of the draft of round 2.*not applied"),
        (HybridParent, KeepsTheWindow, "round 2, decode",
         "the convolution's window continues from after node 3 of the draft of round 1.*rejected token"),
        (HybridBySlotsParent, SlotsOfTheRoundBefore, "round 2, target-verify", "of request [012]"),
    ],
    ids=["node behind", "node before", "commit lost", "window", "slots before"],
)  # fmt: skip
def test_a_wrong_rollback_is_named(parent: type[HybridParent], states: type[StateParent], step: str, hint: str) -> None:
    by = ".slots" if parent is HybridBySlotsParent else ""
    (finding,) = speak(hybrid("gdn", by), of_states(parent, states), ANY)[3]
    assert finding.step == step
    assert "in the loop than in plain decode" in finding.headline
    assert finding.headline.startswith("request ")
    assert "token" in finding.where
    assert re.search(hint, finding.hint), finding.hint


def in_verify(**changes: Any) -> type[TorchNativeBackend]:
    """A backend that takes layers with other options in target-verify."""

    class Changed(TorchNativeBackend):
        def forward(self, q: Any, k: Any, v: Any, layer: AttentionLayer, batch: Any, save_kv_cache: bool = True) -> Any:
            if batch.forward_mode is ForwardMode.TARGET_VERIFY:
                layer = replace(layer, **changes)
            return super().forward(q, k, v, layer, batch, save_kv_cache)

    return Changed


class UnscaledInVerify(TorchNativeBackend):
    """Verify stores keys with the scale of the FP8 pool, and reads them without it."""

    def _store(self, k: Any, v: Any, layer: AttentionLayer, batch: Any, save_kv_cache: bool) -> None:
        own = next(each for each in self.context.layers if each.layer_id == layer.layer_id)
        super()._store(k, v, own, batch, save_kv_cache)

    def forward(self, q: Any, k: Any, v: Any, layer: AttentionLayer, batch: Any, save_kv_cache: bool = True) -> Any:
        if batch.forward_mode is ForwardMode.TARGET_VERIFY:
            layer = replace(layer, k_scale=1.0)
        return super().forward(q, k, v, layer, batch, save_kv_cache)


class TableOfTheFirstGroup(TorchNativeBackend):
    """Verify reads the keys of all layers by the table of the first KV group."""

    def init_forward_metadata_in_graph(self, batch: Any) -> None:
        super().init_forward_metadata_in_graph(batch)
        if batch.forward_mode is ForwardMode.TARGET_VERIFY:
            self._slots = dict.fromkeys(self._slots, self._slots[0, False])


@pytest.mark.parametrize(
    ("backend", "hint"),
    [
        (in_verify(sliding_window_size=-1), "sliding window is ignored"),
        (in_verify(sinks=None), "sinks are ignored"),
        (in_verify(logit_cap=0.0), "soft cap is ignored"),
        (UnscaledInVerify, "k_scale of the FP8 pool is not applied"),
        (TableOfTheFirstGroup, "a value cached in one stage is reused"),
    ],
    ids=["window", "sinks", "cap", "scale", "table"],
)
def test_options_that_only_verify_ignores_are_named(backend: type[AttentionBackend], hint: str) -> None:
    (finding,) = speak(KEYS.format(options=OPTIONS), backend, ANY)[3]
    assert finding.step == "round 1, target-verify"
    assert hint in finding.hint


def test_a_wrong_row_of_a_text_without_drafts_is_named_as_such() -> None:
    class Decodes(TorchNativeBackend):
        def forward(self, q: Any, k: Any, v: Any, layer: AttentionLayer, batch: Any, save_kv_cache: bool = True) -> Any:
            out = super().forward(q, k, v, layer, batch, save_kv_cache)
            return out * 2 if batch.forward_mode is ForwardMode.DECODE else out

    (finding,) = speak(KEYS.format(options=""), Decodes, ANY)[3]
    assert finding.step == "round 1, decode"
    assert finding.headline.startswith("request 0, decoded without drafts, gets a different result in the loop")


def test_what_is_missing_of_a_loop_is_not_silence() -> None:
    loop, generated, _, found = speak(KEYS.format(options=""), TorchNativeBackend, ANY)
    assert found == []
    assert ran_to_its_end(generated, loop)
    for less in (
        replace(generated, said=generated.said[1:]),
        replace(generated, drafts=()),
        replace(generated, drafts=generated.drafts[1:]),
        replace(generated, tokens=generated.tokens[:3]),
        replace(generated, tokens=(*generated.tokens[:-1], generated.tokens[-1][:-1])),
        replace(generated, accepted=tuple((0, 0, 0) for _ in generated.accepted)),
    ):
        assert not ran_to_its_end(less, loop)

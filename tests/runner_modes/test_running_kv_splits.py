"""Keys attended in parts: what a backend is asked, in which order, what it may answer, and how answers are merged."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from attn_testkit.runner_modes.harness import context_for
from attn_testkit.runner_modes.kv_splits import merged
from in_process import check_backend

from attn_testkit.cases.case import parse_case
from attn_testkit.contract import BackendContext, Capabilities, KVSplit, LogSumExp, Unsupported, refuse_undeclared
from attn_testkit.results.finding import Finding
from attn_testkit.steps.data import make_layers
from attn_testkit.steps.schedule import make_schedule
from attn_testkit_corpus.faults.with_kv_splits import MODES, NATURAL, SplitKVBackend

EAGER = {"executions": ["eager"], "device": "cpu"}
PREFIX = "decode-gqa2x2-d64-bf16-p4-k9.0.6-shuffled-gauss-sink-lseprefix-b3prod"
PAGES = "decode-gqa2x2-d64-bf16-p4-k9.0.6-shuffled-gauss-lsepages2merged-b4prod"
CAPABILITIES = SplitKVBackend.capabilities


def one(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers).view(-1, 1)


def test_parts_weigh_as_their_exponentials_and_empty_ones_nothing() -> None:
    outs = [torch.ones(3, 1, 2), 3 * torch.ones(3, 1, 2)]
    lses = [one(0.0, -torch.inf, -torch.inf), one(math.log(3), 5.0, -torch.inf)]
    assert merged(outs, lses, "e")[:, 0, 0].tolist() == pytest.approx([2.5, 3.0, 0.0])
    assert merged(outs, [lse / math.log(2) for lse in lses], "2")[:, 0, 0].tolist() == pytest.approx([2.5, 3.0, 0.0])
    assert merged([out.bfloat16() for out in outs], lses, "e").dtype == torch.bfloat16


def test_a_nan_of_an_empty_part_gets_through_and_far_sums_do_not_overflow() -> None:
    outs = [torch.full((1, 1, 2), torch.nan), torch.ones(1, 1, 2)]
    assert merged(outs, [one(-torch.inf), one(0.0)], "e").isnan().all()
    far = [torch.ones(1, 1, 2), 2 * torch.ones(1, 1, 2)]
    for size in (-6e4, 6e4):
        assert merged(far, [one(size), one(size)], "e")[0, 0].tolist() == [1.5, 1.5]


class Spy(SplitKVBackend):
    """Healthy; remembers what it was asked."""

    asked: list[tuple[str, bool, bool]] = []  # noqa: RUF012 - read after the instance is gone

    def forward_return_lse(self, *args: Any, part: KVSplit, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert set(more) <= {"save_kv_cache"}
        self.asked.append((str(part), more.get("save_kv_cache", True), part.sinks))
        assert part in self.context.kv_splits
        return super().forward_return_lse(*args, part=part, **more)

    def forward(self, *args: Any, **more: Any) -> torch.Tensor:
        raise AssertionError("a case with parts does not ask for all keys at once")


def test_the_first_part_stores_and_has_the_sinks_and_the_others_do_not() -> None:
    Spy.asked.clear()
    assert check_backend(Spy, cases=[PREFIX], **EAGER)
    first, second = Spy.asked[:2]
    assert first == ("the new rows", True, True)
    assert second == ("the prefix", False, False)
    assert Spy.asked[:4] == [first, second] * 2, "each layer is asked for both"


def findings(backend: type[SplitKVBackend], case: str = PREFIX, **more: Any) -> list[Finding]:
    results = check_backend(backend, cases=[case], **{**EAGER, **more})
    return [finding for row in results.rows for finding in row.findings]


class Answers(SplitKVBackend):
    """Answers with what ``answer`` makes of the right thing."""

    @staticmethod
    def answer(out: torch.Tensor, lse: torch.Tensor) -> object:
        return out, lse

    def forward_return_lse(self, *args: Any, **more: Any) -> Any:
        return self.answer(*super().forward_return_lse(*args, **more))


class OutputAlone(Answers):
    answer = staticmethod(lambda out, lse: out)


class FlatOutput(Answers):
    answer = staticmethod(lambda out, lse: (out.flatten(1), lse))


class HeadsFirst(Answers):
    answer = staticmethod(lambda out, lse: (out, lse.t()))


class HalfLse(Answers):
    answer = staticmethod(lambda out, lse: (out, lse.half()))


class WrongOutput(Answers):
    answer = staticmethod(lambda out, lse: (out.float(), lse))


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        (OutputAlone, "layer 0, the new rows, as its log-sum-exp, returned None, expected a tensor of shape"),
        (HeadsFirst, "layer 0, the new rows, as its log-sum-exp, returned shape (4, 3), expected (3, 4)"),
        (
            HalfLse,
            "layer 0, the new rows, as its log-sum-exp, returned torch.float16, expected as declared torch.float32",
        ),
        (WrongOutput, "layer 0, the new rows returned torch.float32, expected the model's torch.bfloat16"),
    ],
)
def test_what_is_no_output_and_log_sum_exp_is_said_so(backend: type[Answers], said: str) -> None:
    (finding,) = findings(backend)
    assert finding.check == "output-contract"
    assert said in finding.headline


def test_an_output_may_be_flat_as_it_may_without_parts() -> None:
    assert findings(FlatOutput) == []


class NoMethod(SplitKVBackend):
    def forward_return_lse(self, *args: Any, **more: Any) -> Any:
        return super(SplitKVBackend, self).forward_return_lse(*args, **more)


class NoMerge(SplitKVBackend):
    def merge_state(self, *args: Any) -> Any:
        return super(SplitKVBackend, self).merge_state(*args)


def test_a_capability_without_its_method_says_which() -> None:
    assert "NoMethod declares lse but does not define forward_return_lse" in findings(NoMethod)[0].headline
    assert (
        "NoMerge declares lse with merges=True but does not define merge_state" in findings(NoMerge, PAGES)[0].headline
    )


class OneBuffer(SplitKVBackend):
    """Healthy: all parts of all layers are returned in the same memory."""

    def forward_return_lse(self, *args: Any, **more: Any) -> Any:
        pair = super().forward_return_lse(*args, **more)
        memory = getattr(self, "memory", None)
        if memory is None or memory[0].shape != pair[0].shape:
            self.memory = memory = tuple(each.clone() for each in pair)
        for mine, new in zip(memory, pair, strict=True):
            mine.copy_(new)
        return memory


def test_parts_may_share_the_memory_of_what_they_return() -> None:
    assert findings(OneBuffer) == []


class WritesLseOnce(SplitKVBackend):
    """The log-sum-exp of a graph is of its first warm-up: no replay writes it."""

    def returned(self, lse: torch.Tensor) -> torch.Tensor:
        kept = self.__dict__.setdefault("kept", {})
        key = len(kept) if not torch.cuda.is_current_stream_capturing() else None
        if key is not None:
            kept[tuple(lse.shape), str(self.part)] = lse.clone()
            return lse
        return kept[tuple(lse.shape), str(self.part)]


def test_a_log_sum_exp_that_no_replay_writes_is_found() -> None:
    found = findings(WritesLseOnce, PAGES, executions=["graph"])
    assert found[0].check == "log-sum-exp"
    assert "is nan" in found[0].headline
    assert "never written" in found[0].hint


@pytest.mark.parametrize(
    ("supported", "part", "page_size", "fine"),
    [
        (NATURAL, KVSplit("rank", 1, 2, 4), 4, True),
        (NATURAL, KVSplit("rank", 1, 2, 8), 4, False),
        (LogSumExp("e", pages=MODES), KVSplit("rank", 0, 2, 4), 4, True),
        (LogSumExp("e", pages=MODES), KVSplit("rank", 0, 2, 1), 4, False),
        (LogSumExp("e", pages=MODES), KVSplit("rank", 0, 2, 1), 1, True),
        (LogSumExp("e", tokens=MODES), KVSplit("rank", 0, 2, 1), 4, True),
        (LogSumExp("e", tokens=MODES), KVSplit("rank", 0, 2, 4), 4, False),
        (LogSumExp("e", prefix=MODES), KVSplit("prefix"), 4, True),
        (LogSumExp("e", prefix=MODES), KVSplit("new"), 4, True),
        (LogSumExp("e", prefix=MODES), KVSplit(), 4, False),
        (LogSumExp("e", whole=MODES), KVSplit(), 4, True),
        (LogSumExp("e", whole={"extend"}), KVSplit(), 4, False),
        (None, KVSplit(), 4, False),
    ],
)
def test_a_constructor_refuses_parts_that_are_not_declared(
    supported: LogSumExp | None, part: KVSplit, page_size: int, fine: bool
) -> None:
    context = a_context(page_size, part)
    declared: Capabilities = CAPABILITIES.with_changes(lse=supported, kv_pool={"page_sizes": {1, 4}})
    if fine:
        refuse_undeclared(declared, context)
        return
    with pytest.raises(Unsupported, match=f"log-sum-exp of {part} is not declared"):
        refuse_undeclared(declared, context)


def a_context(page_size: int, part: KVSplit) -> BackendContext:
    case = parse_case(f"decode-gqa2x2-d64-bf16-p{page_size}-k9-shuffled-gauss-b1prod")
    context = context_for([make_schedule(case)], torch.device("cpu"), make_layers(case))
    assert context.kv_splits == ()
    return replace(context, kv_splits=(part,))

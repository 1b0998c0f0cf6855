"""What a worker sends is read as a message or not at all: a pickle can name any function."""

from __future__ import annotations

import os
import pickle
import subprocess
from dataclasses import fields

import numpy as np
import pytest
from attn_testkit.runner_modes.messages import Described, RunRecord, StepRecord

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.checks.lossless import GeneratedTokens, TokenAttention
from attn_testkit.checks.observation import Copies
from attn_testkit.contract import Capabilities, Requires
from attn_testkit.results.finding import Finding
from attn_testkit.running.processes.wire import Unreadable, read


def test_messages_travel_whole() -> None:
    copies = Copies(np.arange(8, dtype=np.uint8), (("attention", "0", "float32", (1, 2), 0),))
    record = StepRecord(0, "step 0", copies, "a label", replay=True, padded=1)
    finding = Finding("completes", "it raised")
    run_record = RunRecord((record,), (finding,), 5, seconds={"setup": 0.5}, replaced=("a",))
    found = read(pickle.dumps(run_record))
    assert [getattr(found, f.name) for f in fields(RunRecord)][1:] == [
        getattr(run_record, f.name) for f in fields(RunRecord)
    ][1:]
    assert found.records[0].copies.flat.tolist() == list(range(8))
    assert found.records[0].copies.layout == copies.layout


def test_what_a_loop_said_travels_whole() -> None:
    said = TokenAttention("round 1, draft-decode", 1, 5, np.ones((2, 4), np.float32))
    generated = read(pickle.dumps(RunRecord(generated=GeneratedTokens(((1, 2),), (said,), ((3,),))))).generated
    assert (generated.tokens, generated.accepted) == (((1, 2),), ((3,),))
    assert (generated.said[0].stage, generated.said[0].request, generated.said[0].position) == (
        "round 1, draft-decode",
        1,
        5,
    )
    assert generated.said[0].attention.tolist() == [[1.0] * 4] * 2


@pytest.mark.parametrize(
    "declared",
    [
        TorchNativeBackend.capabilities,
        Capabilities(eager={"decode"}, windows={"decode"}, server="vllm"),
        Capabilities(eager={"decode"}, mode_requires={"decode": Requires(sm=(90, 100), packages=("a>=1",))}),
    ],
)
def test_capabilities_travel_whole(declared: Capabilities) -> None:
    assert read(pickle.dumps(Described(declared))).declared == declared


def test_a_number_of_numpys_is_a_number() -> None:
    assert read(pickle.dumps(RunRecord(seconds={"setup": np.float64(0.5)}))).seconds == {"setup": 0.5}


class Calls:
    """Reduced to a call: what a pickle may ask of whoever reads it."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[object, ...]:
        return self.call


@pytest.mark.parametrize("function", [os._exit, os.system, subprocess.run, eval, getattr, open])
def test_nothing_is_called_and_nothing_is_imported_for_a_worker(function: object) -> None:
    with pytest.raises(Unreadable, match=r"which is not allowed in a message"):
        read(pickle.dumps(Calls(function, 0)))
    with pytest.raises(Unreadable):
        read(pickle.dumps(RunRecord(lost=Calls(function, 0))))  # type: ignore[arg-type]


def test_bytes_that_are_no_pickle_are_said_so() -> None:
    with pytest.raises(Unreadable, match="4 bytes that are not a message"):
        read(b"junk")

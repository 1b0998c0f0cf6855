"""Merged KV groups fail as evidence/findings.md says, others pass, and bugs put around vLLM's class are found."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: ci/servers.sh")

BUGS = {
    "ClonedLengths": ("decode", "graph", "replay-follows-batch"),
    "FreshBlockTable": ("decode", "graph", "addresses-stable"),
    "StaleSlots": ("decode", "graph", "writes-own-kv"),
    "PrefixInVerify": ("target-verify", "eager", "matches-oracle"),
    "ShortWindow": ("decode", "eager", "matches-oracle"),
    "ScheduleOfTheWarmUp": ("decode", "graph", "replay-follows-batch"),
}
RANKS = "decode-mla16-d512r64-bf16-p16-k{}-shuffled-gauss-kvcustom-ranks{}-b{}prod"
BUGS_OF_RANKS = {
    "RankOfGlobalLengths": "used the global length 38 of request 0 as its local one, which is",
    "RankWithoutInterleave": "rank 1 counts 19 keys of request 0 as for I = 1, but it has 16",
    "UnmaskedRank": "return zeros if a row sees no key",
}
MERGED = "decode-gqa8x2-d128-bf16-p32-k37-interleaved-rising_logits-kvcustom-w4{}-b4stale"


def results_of(tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    """As the command line writes them; those of case-runs."""
    record = tmp_path / "record.json"
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, "-m", "attn_testkit", "run", "--device", "cpu", *options, "--json", str(record)],
        env={**os.environ, "PYTHONPATH": path}, check=False, timeout=900, capture_output=True,
    )  # fmt: skip
    return [each for each in json.loads(record.read_text())["results"] if each["case"]]


def checks_of(result: dict[str, Any]) -> set[str]:
    return {finding["check"] for finding in result["findings"]}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_around_vllms_class_is_found_and_without_it_its_case_passes(tmp_path: Path, bug: str) -> None:
    mode, execution, check = BUGS[bug]
    which = ("--mode", mode, "--execution", execution)
    failed = results_of(tmp_path, "--backend", f"vllm_bugs:{bug}", *which, "-x")[-1]
    assert failed["status"] == "failed"
    assert check in checks_of(failed)
    healthy = "vllm:flashmla" if bug == "ScheduleOfTheWarmUp" else "vllm:flash_attn"
    without = results_of(tmp_path, "--backend", healthy, *which, "--case", failed["case"])
    assert [each["status"] for each in without] == ["passed"]


@pytest.mark.parametrize("bug", BUGS_OF_RANKS)
def test_a_bug_of_a_rank_of_vllm_is_found_and_its_failure_names_what_the_rank_used(tmp_path: Path, bug: str) -> None:
    case = RANKS.format("37.31.0", "2by16", 3)
    (failed,) = results_of(tmp_path, "--backend", f"vllm_bugs:{bug}", "--execution", "eager", "--case", case)
    first = failed["findings"][0]
    assert first["check"] == "log-sum-exp"
    assert BUGS_OF_RANKS[bug] in first["hint"]


@pytest.mark.parametrize("ranks", ["2by16", "4by1", "4by8"])
def test_two_and_four_ranks_of_vllms_class_pass_in_eager_and_graphs(tmp_path: Path, ranks: str) -> None:
    """Interleaves as in vLLM: one token, a part of a block, a block. One request has keys on one rank only."""
    passed = results_of(tmp_path, "--backend", "vllm:triton_mla", "--case", RANKS.format("37.0.16", ranks, 4))
    assert [each["status"] for each in passed] == ["passed", "passed"]


def test_ranks_of_flashmla_pass_also_those_without_keys(tmp_path: Path) -> None:
    case = RANKS.format("37.0.130", "4by64", 4).replace("-p16-", "-p64-")
    passed = results_of(tmp_path, "--backend", "vllm:flashmla", "--execution", "eager", "--case", case)
    assert [each["status"] for each in passed] == ["passed"]


def test_a_graph_whose_splits_are_left_to_a_heuristic_writes_no_row_of_longer_requests(tmp_path: Path) -> None:
    case = "extend-mqa4-d64-bf16-p16-k254.510.1022-n4a4x2.3-shuffled-plus_minus_one-kvcustom-b3prod"
    which = ("--execution", "graph", "--case", case)
    (failed,) = results_of(tmp_path, "--backend", "vllm_bugs:CountsRequests", *which)
    assert checks_of(failed) == {"replay-follows-batch"}
    (passed,) = results_of(tmp_path, "--backend", "vllm:flash_attn", *which)
    assert passed["status"] == "passed"


def test_layers_merged_into_one_kv_group_keep_the_length_of_a_capture(tmp_path: Path) -> None:
    merged = results_of(tmp_path, "--backend", "vllm:flex_merged", "--case", MERGED.format("one"))
    by_execution = {each["execution"]: each for each in merged}
    assert by_execution["eager"]["status"] == "passed"
    assert by_execution["graph"]["status"] == "failed"
    assert checks_of(by_execution["graph"]) == {"replay-follows-batch"}
    apart = results_of(tmp_path, "--backend", "vllm:flex", "--case", MERGED.format(""))
    assert [each["status"] for each in apart] == ["passed", "passed"]


def test_a_log_sum_exp_that_was_rounded_on_its_way_is_not_what_float32_is(tmp_path: Path) -> None:
    case = ("--tier", "core", "--execution", "eager", "--case", "decode-*-peaked-kvcustom-lsewhole-*")
    (rounded,) = results_of(tmp_path, "--backend", "vllm_wider:LseInFloat32", *case)
    assert checks_of(rounded) == {"log-sum-exp"}
    (supported,) = results_of(tmp_path, "--backend", "vllm:triton_mla", *case)
    assert supported["status"] == "passed"


@pytest.mark.parametrize(
    ("bug", "mode"), [("ShortDecodes", "decode"), ("FirstTable", "decode"), ("ChunkFromZero", "extend")]
)
def test_wrong_metadata_of_an_indexer_are_found_and_those_of_vllm_pass(tmp_path: Path, bug: str, mode: str) -> None:
    which = ("--mode", mode, "-k", "idx")
    failed = results_of(tmp_path, "--backend", f"vllm_index_metadata:{bug}", *which, "-x")[-1]
    assert checks_of(failed) <= {"selects-best", "selection-well-formed"}
    assert failed["status"] == "failed"
    without = results_of(tmp_path, "--backend", "vllm_index_metadata:Metadata", *which, "--case", failed["case"])
    assert [each["status"] for each in without] == ["passed"]


def test_a_proof_says_without_a_check_of_the_kit_that_linear_attention_continues_wrong_states() -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", HERE / "proof_vllm_linear.py"], env={**os.environ, "TRITON_INTERPRET": "1"},
        check=False, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 1
    wrong = ran.stdout.splitlines()[-1]
    assert wrong.startswith("WRONG: one token, fresh, MiniMax; one token, fresh, Bailing; draft of three")
    assert wrong.endswith("300 rows; outputs of 3 rows of a continued one")


def test_a_proof_says_without_the_kit_that_pages_of_a_span_are_left_out() -> None:
    script = HERE / "proof_vllm_flex_spans.py"
    assert "attn_testkit" not in script.read_text()
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", script], check=False, capture_output=True, text=True, timeout=300
    )
    assert (ran.returncode, ran.stdout.splitlines()[-1][:12]) == (1, "WRONG: pages")


FRESH = "extend-lightning2-d128-bf16-p16-k0.9-n1a1x2-shuffled-no_decay-k128w1s32.{}.kv-b2prod"
DRAFT = "target-verify-lightning2-d128-bf16-p16-k9.1-chain2-shuffled-unit_keys-k128w1s32.null.zeroed.kv.slots-b2prod"


@pytest.mark.parametrize(
    ("backend", "case", "check"),
    [
        ("BailingFresh", FRESH.format("null"), "reads-own-state"),
        ("LinearFresh", FRESH.format("slot0"), "reads-own-state"),
        ("BailingOfRunnerV2", DRAFT, "state-counts-tokens"),
    ],
)
def test_what_vllm_gives_linear_attention_is_found_and_with_what_it_needs_the_case_passes(
    tmp_path: Path, backend: str, case: str, check: str
) -> None:
    which = ("--execution", "eager", "--case")
    (failed,) = results_of(tmp_path, "--backend", f"vllm_wider:{backend}", *which, case)
    assert check in checks_of(failed)
    healthy = "vllm:linear" if backend == "LinearFresh" else "vllm:bailing"
    zeroed = case if ".zeroed" in case else case.replace(".kv", ".zeroed.kv")
    (passed,) = results_of(tmp_path, "--backend", healthy, *which, zeroed)
    assert passed["status"] == "passed"


HANDED = "decode-mha2-d64-bf16-p16-k3.37.9.17-shuffled-gauss-kvcustom-w4-cap1.5-handed2to2p16sidebysidehnd-b7stale"


def test_a_bug_put_into_the_worker_that_receives_is_found_and_without_it_its_case_passes(tmp_path: Path) -> None:
    (failed,) = results_of(tmp_path, "--backend", "vllm_transfer_bugs:TrimmedAtEnd", "--case", HANDED)
    assert checks_of(failed) == {"received-as-sent"}
    (without,) = results_of(tmp_path, "--backend", "vllm:triton_pd", "--case", HANDED)
    assert without["status"] == "passed"


def test_a_proof_says_without_a_check_of_the_kit_that_blocks_are_paired_wrongly() -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", HERE / "proof_vllm_nixl_blocks.py"], check=False, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert ran.stdout.splitlines()[-1] == "WRONG: a token is read from the place of another"

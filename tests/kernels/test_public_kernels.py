"""The corpus of public kernels: the nightly runs it, and adapters and proofs say what the findings page says."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import alone
import pytest

from attn_testkit.registry import load_backend
from attn_testkit.running.planning.known_failures import load_known

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KNOWN = ROOT / "ci" / "servers" / "known_failures_kernels.toml"
INSTALLED = all(importlib.util.find_spec(name) for name in ("sglang", "vllm", "flag_gems", "lightllm", "fla"))
needs_wheels = pytest.mark.skipif(not INSTALLED, reason="the wheels are not installed: ci/servers.sh public-kernels")

GQA, MHA, MLA = "gqa2x2-d64-fp16-p16", "mha2-d64-bf16-p16", "mla16-d512r64-bf16-p16"
GDN = "gdn4x2-d64-bf16-p16"
SPARSE_DECODE = "decode-mla16-d512r64-bf16-p64-k99.37-shuffled-gauss-sel64slots-b2prod"
SPARSE_SINK = "decode-mla4-d448r64-bf16-p64-k99.37-shuffled-gauss-sink-sel64slots-b2prod"
COMPRESSED = "target-verify-compressor1-d512-bf16-p128-k3.136.127-chain4-shuffled-gauss-ratio4overlap.fp8dsmlav4-b4prod"
SPARSE_EXTEND = "extend-mla16-d512r64-bf16-p64-k99.37-n2a2.1-shuffled-gauss-sel64slots-b2prod"
RIGHT = {
    "sglang_kernels:Decode": f"decode-{GQA}-k3.37.9-shuffled-gauss-b4prod",
    "sglang_kernels:DecodeMHA": f"decode-{MHA}-k3.37.9-shuffled-gauss-b4prod",
    "sglang_kernels:DecodeMLA": f"decode-{MLA}-k3.37-shuffled-gauss-b2prod",
    "sglang_kernels:Extend": f"target-verify-{GQA}-k3.37.9-t0.0.1-shuffled-gauss-b4prod",
    "sglang_kernels:SparseMLAPrefill": SPARSE_DECODE,
    "sglang_kernels:SparseMLAPrefillUnion2": SPARSE_EXTEND,
    "sglang_kernels:SparseMLAForward": SPARSE_DECODE,
    "sglang_kernels:SparseMLAPacked": SPARSE_DECODE.replace("sel64", "kvfp8dsmla-sel64"),
    "sglang_dsv4:UnifiedDecode": SPARSE_SINK,
    "sglang_dsv4:UnifiedDecodeSplits": SPARSE_SINK,
    "sglang_dsv4:UnifiedPrefill": SPARSE_SINK,
    "sglang_indexer:IndexerAmax": SPARSE_DECODE.replace("slots", "slots-idx4"),
    "sglang_indexer:IndexerPowersOfTwo": SPARSE_EXTEND.replace("slots", "slots-idx4pow2gauss"),
    "sglang_states:DeltaRule": f"target-verify-{GDN}-k9.1-chain2-shuffled-mild_decay-k64w4s32-b2prod",
    "fla_states:FLA": f"decode-{GDN}-k9.1-shuffled-mild_decay-k64w4s32-b2prod",
    "vllm_kernels:SparseMLA": SPARSE_DECODE,
    "vllm_kernels:Unified": f"extend-{GQA}-k3.37.9-n2a3.1.2-shuffled-gauss-w4-b3prod",
    "vllm_kernels:UnifiedFP8": f"decode-{GQA}-k3.37.9-shuffled-gauss-kvfp8e4m3-b4prod",
    "vllm_kernels:UnifiedPerTokenHead": f"decode-{GQA}-k3.37.9-shuffled-gauss-kvint8pertokenheadapart-b4prod",
    "vllm_kernels:UnifiedTF32": "decode-gqa2x2-d64-fp32-p16-k3.37.9-shuffled-gauss-b4prod",
    "vllm_kernels:ChunkedPrefillPagedDecode": f"draft-extend-{GQA}-k3.37.9-n2a1.2.1-shuffled-gauss-kvcustom-b4prod",
    "vllm_kernels:WithPaddedRequests": f"draft-extend-{GQA}-k3.37.9-n2a1.2.1-shuffled-gauss-kvcustom-b4prod",
    "vllm_kernels:Windowed": "decode-mqa4-d64-fp16-p16-k40.41-shared-gauss-kvcustom-w4-b4prod",
    "vllm_kernels:PrefixPrefill": f"extend-{MHA}-k1.2-n2a5.1-shuffled-gauss-kvcustom-b3prod",
    "vllm_kernels:DecodeMLA": f"decode-{MLA}-k3.37-shuffled-gauss-b2prod",
    "vllm_kernels:GroupedDecode": f"decode-{GQA}-k3.37.9-shuffled-gauss-b4prod",
    "vllm_compressor:CompressorOfDeepSeekV4": COMPRESSED,
    "lightllm_kernels:GQADecode": f"decode-{GQA}-k3.37.9-shuffled-gauss-usualscale-b4prod",
    "flag_gems_kernels:FlashMLA": f"decode-{MLA}-k3.37-shuffled-gauss-b2prod",
    "torch_kernels:SDPA": f"decode-{GQA}-k3.37.9-shuffled-gauss-w4-b4prod",
    "torch_kernels:SDPAFloatMask": f"decode-{GQA}-k3.37.9-shuffled-gauss-w4-b4prod",
}
"""A case that each adapter passes, with the kernels of the emulation."""
_PADDED = f"extend-{MHA}-k1.2-n2a5.1-shuffled-gauss-kvcustom-b3prod"
_POOL = "k9.37.1-shuffled-gauss{}-layers1from0-b4prod-bigpool"
WRONG = {
    "lightllm_kernels:GQADecode": (
        "eager",
        f"decode-mqa4-d128-bf16-p16-{_POOL.format('-usualscale')}",
        "completes",
        "before the start of K",
    ),
    "flag_gems_kernels:FlashMLA": (
        "eager",
        f"decode-{MLA}-{_POOL.format('')}",
        "completes",
        "before the start of Kv_cache",
    ),
    "vllm_kernels:WithPaddedRequests": ("graph", _PADDED, "completes", "past the end of output_ptr"),
    "vllm_kernels:Windowed": (
        "eager",
        "decode-mqa4-d64-fp16-p16-k40.41-shared-negative-kvcustom-w4-b4prod",
        "matches-oracle",
        "passes without a sliding window",
    ),
    "sglang_kernels:DecodeMLARope32": (
        "eager",
        "decode-mla16-d512r32-bf16-p16-k21-contiguous-gauss-b2prod",
        "completes",
        "Cannot make_shape_compatible",
    ),
    "sglang_kernels:DecodeMHA": (
        "eager",
        "decode-mha2-d64-bf16-p1-k13-contiguous-peaked-b2prod",
        "matches-oracle",
        "rounded to the model's dtype",
    ),
    "vllm_kernels:DecodeMLAOneHead": (
        "eager",
        "decode-mla1-d512r64-bf16-p16-k21-interleaved-rising_logits-b4stale",
        "matches-oracle",
        "the right KV tokens",
    ),
    "lightllm_kernels:FlashDecoding": (
        "eager",
        "decode-mha2-d128-bf16-p1-k32.128.64.16-reversed-peaked-usualscale-b5stale",
        "matches-oracle",
        "attended to the right KV tokens",
    ),
}
"""Adapter -> execution, case, check and words of the failure: what the findings page lists, in the emulation."""
PROOFS = {
    "vllm_padded_request": "WRONG: a request without rows stored one",
    "vllm_window": "WRONG: keys outside of the window are attended",
    "vllm_mla_one_head": "WRONG: q.k is multiplied and summed in the dtype",
    "sglang_mla_rope32": "WRONG: a shape is not taken",
    "lightllm_int32": "WRONG: slot 33554432 is not read at its place",
    "vllm_block_table_end": "WRONG: the block number behind the end of the table is read",
    "vllm_qq_bias_rows": "WRONG: rows of the bias behind those of the request are read",
    "vllm_sparse_mla_int32": "WRONG: slot 3728271 is not read at its place",
    "flag_gems_int32": "WRONG: page 233017 is not read at its place",
    "vllm_mla_lse_dtype": "WRONG: the log-sum-exp is rounded to the model's dtype",
    "vllm_lightning_decay": "WRONG: what is before a block is read with one decay too few",
    "vllm_gdn_widths": "WRONG: only K = V compiles",
    "sglang_mha_products": "WRONG: products of q and k are rounded before they are summed",
    "sglang_dsv4_int32": "WRONG: slot 4194304 is not read at its place",
    "sglang_gdn_padding": "WRONG: the last slot belongs to another request",
    "sglang_seg_la_quarters": "WRONG: a draft reads another output than a decode",
    "sglang_seg_la_int32": "WRONG: slot 2048 is not read at its place",
    "torch_sdpa_bool_mask": "right",
    "torch_flex_block_mask_in_region": "right",
}
"""What each says on a CPU. The last two are wrong on a GPU only."""


def result_of(tmp_path: Path, backend: str, execution: str, case: str) -> dict[str, Any]:
    """Of one case-run, as the command line writes it."""
    if not INSTALLED and not backend.startswith("torch_kernels"):
        pytest.skip("the wheels are not installed: ci/servers.sh public-kernels")
    record = tmp_path / "record.json"
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    options = ("--backend", backend, "--device", "cpu", "--execution", execution, "--case", case)
    subprocess.run(
        [sys.executable, "-m", "attn_testkit", "run", *options, "--json", str(record)],
        env={**os.environ, "PYTHONPATH": path}, check=False, timeout=300, capture_output=True,
    )  # fmt: skip
    (result,) = [each for each in json.loads(record.read_text())["results"] if each["case"]]
    assert result["case"] == case
    return dict(result)


@pytest.mark.parametrize("backend", RIGHT)
def test_an_adapter_of_a_right_kernel_passes(tmp_path: Path, backend: str) -> None:
    result = result_of(tmp_path, backend, "eager", RIGHT[backend])
    assert (result["status"], result["findings"]) == ("passed", [])


@pytest.mark.parametrize("backend", WRONG)
def test_what_the_findings_page_lists_is_found(tmp_path: Path, backend: str) -> None:
    execution, case, check, words = WRONG[backend]
    result = result_of(tmp_path, backend, execution, case)
    assert [each["check"] for each in result["findings"]] == [check]
    assert words in " ".join(json.dumps(result["findings"], ensure_ascii=False).split())


@needs_wheels
@pytest.mark.parametrize("proof", PROOFS)
def test_a_proof_says_without_the_kit_what_is_wrong(proof: str) -> None:
    script = HERE / "proofs" / f"{proof}.py"
    assert "attn_testkit" not in script.read_text()
    ran = subprocess.run([sys.executable, script], check=False, capture_output=True, text=True, timeout=300)
    assert ran.stdout.splitlines()[-1].startswith(PROOFS[proof])
    assert ran.returncode == PROOFS[proof].startswith("WRONG")


def test_there_is_a_proof_for_each_file_of_proofs_and_it_is_short() -> None:
    there = {path.stem: len(path.read_text().splitlines()) for path in (HERE / "proofs").glob("*.py")}
    del there["common"]
    assert set(there) == set(PROOFS)
    assert [name for name, lines in there.items() if lines >= 60] == []


def test_a_finding_names_its_script_and_the_table_names_the_finding() -> None:
    evidence = ROOT / "docs" / "evidence"
    pages = {path.name: path.read_text() for path in (evidence / "findings").glob("*.md")}
    table, text = (evidence / "findings.md").read_text(), "".join(pages.values())
    assert [name for name in pages if f"(findings/{name})" not in table] == []
    assert [name for name in PROOFS if f"proofs/{name}.py" not in text] == []


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs" / "evidence" / "findings").glob("*.md")), ids=lambda page: page.stem
)
def test_a_finding_can_be_filed(page: Path) -> None:
    parts = re.findall(r"^\*\*(.+?)\.\*\* \S", page.read_text(), re.M)
    assert parts == ["Versions", "Script", "Expected", "Seen", "Cause", "Proposed fix", "Last check"]


def test_the_nightly_runs_every_adapter_and_known_failures_are_of_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)
    nightly = (ROOT / "ci" / "nightly_servers.sh").read_text()
    listed = set(re.findall(r"\w+_(?:kernels|indexer|states|dsv4|compressor):\w+", nightly))
    assert listed == {*RIGHT, *WRONG}
    assert KNOWN.name in nightly
    for each in load_known(KNOWN):
        assert each.backend in listed
        shown = {execution for backend, execution, case in each.crashed if each.covers(backend, execution, case)}
        assert shown == ({"eager", "graph"} if each.kind == "quarantine" else set()), each.name
    for name in listed:
        load_backend(name)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package whose ``__init__`` files end the program that runs them, with a kernel file inside."""
    inside = tmp_path / "heavy" / "ops"
    inside.mkdir(parents=True)
    for folder in (tmp_path / "heavy", inside):
        (folder / "__init__.py").write_text("raise SystemExit('the project was imported')")
    (inside / "helper.py").write_text("NUMBER = 3")
    (inside / "kernel.py").write_text(
        "from heavy import _C\nfrom heavy.log import logger\nfrom .helper import NUMBER\nFOUND = logger(NUMBER), _C"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "heavy"]:
        del sys.modules[name]


def test_a_kernel_file_is_loaded_without_its_project(project: Path) -> None:
    module = alone.load("heavy.ops.kernel", {"heavy.log": {"logger": lambda number: -number}, "heavy._C": {}})
    number, compiled = module.FOUND
    assert number == -3
    assert isinstance(compiled, ModuleType)
    assert Path(module.__file__) == project / "heavy" / "ops" / "kernel.py"
    assert alone.load("heavy.ops.kernel", {}) is module


def test_a_project_that_is_not_installed_is_named_with_what_to_do() -> None:
    with pytest.raises(LookupError, match="no_such_project is not installed"):
        alone.load("no_such_project.ops.kernel", {})

"""Conformance of the batch attention wrappers, in eager mode and under CUDA graphs (#3605).

One module tests the decode, prefill and MLA wrappers through adapters that plan and run them as a server does. Each
test is one case-run of attn-testkit: up to fifteen forwards of one wrapper, with other lengths, pages, padding and live
requests at each replay of a graph, NaN in every slot that no request owns, and a float64 reference with a limit that
is computed for each element. The printed seed decides which cases run. Each wrapper runs in its own process, so an
illegal access fails one test and does not end the CUDA context of the other tests.

    pytest tests/attention/test_attention_conformance.py

FLASHINFER_ATTENTION_CONFORMANCE=0            the emergency switch: skip the module
FLASHINFER_ATTENTION_CONFORMANCE_SEED=7       other cases (default: 0)
FLASHINFER_ATTENTION_CONFORMANCE_EMULATED=1   without a GPU: CUDA is emulated, and kernels are fakes of the same API

Known failures are in attention_known_failures.toml, in the two kinds of the ledger. A failure prints the command that
repeats its case-run. README.md says what to install.
"""

from __future__ import annotations

import fnmatch
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

attn_testkit = pytest.importorskip("attn_testkit", reason="attn-testkit is not installed")

from tests.test_helpers.fuzz_ledger import Finding, FuzzLedger  # noqa: E402 # after the skip

PREFIX = "FLASHINFER_ATTENTION_CONFORMANCE"
SEED = int(os.environ.get(f"{PREFIX}_SEED", "0"))
EMULATED = os.environ.get(f"{PREFIX}_EMULATED", "0") not in ("", "0")
KNOWN = Path(__file__).with_name("attention_known_failures.toml")

pytestmark = [
    pytest.mark.skipif(os.environ.get(PREFIX, "1") == "0", reason=f"switched off by {PREFIX}=0"),
    pytest.mark.skipif(not (EMULATED or torch.cuda.is_available()), reason=f"needs a GPU, or {PREFIX}_EMULATED=1"),
]


def _finding(entry: dict[str, Any]) -> Finding:
    """An entry of the file as the project's ledger lists it."""
    globs = [entry["cases"]] if isinstance(entry["cases"], str) else entry["cases"]
    return Finding(
        match=lambda case_run: any(fnmatch.fnmatchcase(case_run.case, glob) for glob in globs),
        reason=f"#{entry['issue'].rpartition('/')[2]}: {', '.join(globs)}, until {entry['until']}",
        quarantine=entry["kind"] == "quarantine",
        backend=entry.get("backend"),
    )


LEDGER = FuzzLedger("attention", [_finding(entry) for entry in tomllib.loads(KNOWN.read_text()).get("known", ())])
"""The waived surface, for whoever lists all ledgers. The file itself is what applies to a case-run."""

REQUEST: dict[str, Any] = {"seed": SEED, "known_failures": KNOWN, "device": "cpu" if EMULATED else "cuda"}


@attn_testkit.conformance_cases("flashinfer", "flashinfer_ragged", **REQUEST)
def test_paged_and_ragged_wrappers(attn_case: Any, request: pytest.FixtureRequest) -> None:
    """Decode, prefill with a prefix, speculative verify and drafts, over paged and ragged KV."""
    _run(attn_case, request)


@attn_testkit.conformance_cases("flashinfer_mla", modes=["decode", "extend"], **REQUEST)
def test_mla_wrapper(attn_case: Any, request: pytest.FixtureRequest) -> None:
    """Decode and prefill over latent rows."""
    _run(attn_case, request)


def _run(attn_case: Any, request: pytest.FixtureRequest) -> None:
    print(f"seed {SEED}; REPRO: {PREFIX}_SEED={SEED} pytest '{request.node.nodeid}'")
    attn_case()

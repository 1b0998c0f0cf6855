"""Batches of layers with a recurrent state are recorded on SGLang, vLLM and classes of the kit, and become cases."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from test_record import python

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.backends.torch_native_state import TorchNativeStateBackend
from attn_testkit.cli import main
from attn_testkit_servers.record.cases import cases_of, read_lines

STATES = TorchNativeStateBackend.capabilities
CASES = [
    "decode-gdn2x2-d64-bf16-p16-k33.5.7-shuffled-mild_decay-k32w4s32.source-b3prod",
    "extend-mamba2x2-d32-bf16-p16-k9.0-n11a3.11-shuffled-mild_decay-k64w2sb16.kv.snap16-b2prod",
    "target-verify-kda2x2-d64-bf16-p16-k9.4-chain4-shuffled-mild_decay-k64w4s32-b2prod",
    "target-verify-gdn2x2-d64-bf16-p16-k9.4-chain3-shuffled-mild_decay-k64w4s32.null.slots-b2prod",
]


def test_cases_of_a_class_of_the_kit_come_out_again(tmp_path: Path) -> None:
    file = tmp_path / "calls.jsonl"
    asked = [word for case in CASES for word in ("--case", case)]
    done = python(
        "-m", "attn_testkit", "run", "-b", "live_states:LiveStates", "--device", "cpu", "-j", "1", *asked,
        ATTN_TESTKIT_RECORD=str(file),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = read_lines(file)
    assert {line["line"] for line in lines} == {"batch", "commit"}
    assert not any("seq_lens" in line for line in lines if line.get("how") == "capture")
    own = {case.replace("n11a3.11", "n7a3.11") for case in CASES}
    assert own <= set(cases_of(lines, STATES).cases)


LINE: dict[str, Any] = {
    "line": "batch", "backend": "HybridLinearAttnBackend", "instance": 0, "hook": "init_forward_metadata",
    "how": "eager", "mode": "extend", "requests": 2, "padded_to": 2, "seq_lens": [21, 16], "prefix_lens": [20, 7],
    "new_tokens": [1, 9], "process": 1,
    "state": {
        "kind": "GDNAttnBackend", "window": [8192, 3], "shape": [32, 128, 128], "window_dtype": "bfloat16",
        "dtype": "float32", "padding": "skip_minus_one", "rollback": "commit", "copies": 0,
    },
}  # fmt: skip
LAYER = {
    "line": "layer", "backend": "HybridLinearAttnBackend", "instance": 0, "layer": 3, "heads": [16, 2],
    "head_dim": 256, "v_head_dim": 256, "dtype": "bfloat16", "window": -1, "logit_cap": 0.0, "usual_scaling": True,
    "sinks": False, "save_kv_cache": True, "process": 1, "page_size": 64,
}  # fmt: skip


def changed(**state: Any) -> dict[str, Any]:
    return {**LINE, "state": {**LINE["state"], **state}}


@pytest.mark.parametrize(
    ("state", "part"),
    [
        ({}, "extend-gdn2x16-d128-bf16-p16-k20.7-n5a1.9-shuffled-mild_decay-k128w4s32-b2prod"),
        ({"window": [3, 8192], "dtype": "bfloat16"}, "mild_decay-k128w4sb16-b2prod"),
        ({"window": [8192, 5], "more_columns": 2, "rollback": "slots", "padding": "skip_zero"}, "k128w4s32.null-"),
        ({"kind": "Mamba2AttnBackend", "window": [4608, 3], "shape": [64, 64, 128]}, "mamba32x2-d64"),
        ({"kind": "LINEAR", "window": [], "shape": [8, 96, 96]}, "lightning8-d96-bf16-p16-k20.7-n5a1.9"),
        ({"copies": 64}, "k128w4s32.snap64"),
        ({"has_prefix_states": True}, "k128w4s32.source"),
    ],
)  # fmt: skip
def test_shapes_of_a_servers_memory_are_heads_and_widths(state: dict[str, Any], part: str) -> None:
    (case,) = cases_of([changed(**state)]).cases
    assert part in case


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"kind": "ShortConvAttnBackend"}, "states of ShortConvAttnBackend: the kit has gdn, kda, mamba, lightning"),
        ({"kind": "MAMBA1"}, "states of MAMBA1"),
        ({"unreadable": "no mamba_pool"}, "memory of GDNAttnBackend's states was not found: no mamba_pool"),
        ({"window": [8193, 3]}, "does not fit gdn with 32 value heads"),
        ({"window": [4096, 3]}, "does not fit gdn"),
        ({"window": [8192, 1], "more_columns": 1}, "0 columns"),
        ({"window": [8192]}, "expected channels and columns"),
        ({"shape": [4096, 128]}, "expected .heads, width of a value, width of a key."),
        ({"dtype": "float8_e5m2"}, "state dtype float8_e5m2"),
    ],
)
def test_states_without_a_case_are_named(state: dict[str, Any], reason: str) -> None:
    found = cases_of([changed(**state)])
    assert not found.cases
    (why,) = found.skipped
    assert re.search(reason, why), why


def test_a_hybrid_model_has_cases_of_both_kinds_and_a_backend_those_of_its_own() -> None:
    of_states, of_softmax = cases_of([LAYER, LINE]).cases
    assert "-gdn2x16-" in of_states
    assert "-gqa8x2-d256-bf16-p64-" in of_softmax
    wide = STATES.with_changes(heads={"head_dims": {128}, "gqa_ratios": {2}})
    assert list(cases_of([LAYER, LINE], wide).cases) == [of_states]
    plain = TorchNativeBackend.capabilities.with_changes(
        heads={"head_dims": {256}, "gqa_ratios": {8}}, kv_pool={"page_sizes": {64}}
    )
    assert list(cases_of([LAYER, LINE], plain).cases) == [of_softmax]


def test_a_verify_without_any_commit_is_said() -> None:
    verify = {**LINE, "mode": "target-verify", "spec": {"draft_token_num": 4, "topk": 1}}
    commit = {"line": "commit", "backend": LINE["backend"], "instance": 0, "process": 1, "requests": 2}
    for lines, said in (([verify], True), ([verify, commit], False), ([verify, {**commit, "instance": 1}], True)):
        ((name, differs),) = cases_of(lines).differs.items()
        assert name.startswith("target-verify-gdn2x16-d128-bf16-p16-k21.16-chain4-")
        assert any("got no commit call" in each for each in differs) is said
    slots = {**verify, "state": {**LINE["state"], "rollback": "slots"}}
    assert not any("got no commit call" in each for each in next(iter(cases_of([slots]).differs.values())))


def test_a_draft_model_and_a_capture_have_no_case_of_states() -> None:
    drafts = {**LINE, "mode": "draft-extend-v2", "spec": {"num_tokens_per_req": 4}}
    capture, idle = {**LINE, "how": "capture"}, {**LINE, "requests": 0}
    found = cases_of([drafts, capture, idle])
    assert not found.cases
    assert [next(word for word in ("draft model", "capture", "no live") if word in each) for each in found.skipped] == [
        "draft model", "capture", "no live"
    ]  # fmt: skip


SGLANG = """
import sys
from types import SimpleNamespace as N
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

class Tensor:
    def __init__(self, *shape, dtype="torch.bfloat16"):
        self.shape, self.dtype = shape, dtype
        self.device = N(type="cuda")

class MambaAttnBackendBase(AttentionBackend):
    def __init__(self, runner):
        self.req_to_token_pool = runner.pool
class GDNAttnBackend(MambaAttnBackendBase):
    def init_forward_metadata(self, forward_batch):
        pass
class HybridLinearAttnBackend(AttentionBackend):
    def __init__(self, full_attn_backend, linear_attn_backend, full_attn_layers):
        self.linear_attn_backend, self.full_attn_layers = linear_attn_backend, full_attn_layers
    def init_forward_metadata(self, forward_batch):
        self.linear_attn_backend.init_forward_metadata(forward_batch)
    def update_mamba_state_after_mtp_verify(self, last_correct_step_indices, mamba_track_indices):
        pass

cache = N(conv=[Tensor(2, 9, 512, 3)], temporal=Tensor(2, 9, 4, 64, 64, dtype="torch.float32"))
pool = N(mamba_pool=N(mamba_cache=cache))
other = GDNAttnBackend(N(pool=N()))
backend = HybridLinearAttnBackend(None, GDNAttnBackend(N(pool=pool)), [1])
batch = N(forward_mode=N(name="EXTEND"), batch_size=2, spec_info=None, seq_lens=Tensor(2), seq_lens_cpu=None,
          extend_prefix_lens_cpu=[64, 0], extend_seq_lens_cpu=[1, 30], mamba_track_mask=Tensor(2))
backend.init_forward_metadata(batch)
other.init_forward_metadata(batch)
batch.forward_mode.name, batch.seq_lens_cpu = "TARGET_VERIFY", [65, 30]
batch.spec_info = N(draft_token_num=4, topk=1)
backend.init_forward_metadata(batch)
backend.update_mamba_state_after_mtp_verify(Tensor(2), None)
"""
VLLM = """
from types import SimpleNamespace as N
from vllm.v1.attention.backend import AttentionMetadataBuilder

class GDNAttentionMetadataBuilder(AttentionMetadataBuilder):
    def __init__(self, kv_cache_spec, layer_names):
        self.kv_cache_spec = kv_cache_spec
    def build(self, common_prefix_len, common_attn_metadata, num_accepted_tokens=None,
              num_decode_draft_tokens_cpu=None):
        return "built"
    def build_for_cudagraph_capture(self, common_attn_metadata):
        return self.build(0, common_attn_metadata)

spec = N(shapes=((512, 5), (4, 64, 64)), dtypes=("torch.bfloat16", "torch.float32"), mamba_type=N(name="GDN_ATTN"),
         num_speculative_blocks=2)
builder = GDNAttentionMetadataBuilder(spec, ["model.layers.0"])
def batch(starts, lens):
    return N(num_reqs=len(starts) - 1, query_start_loc_cpu=starts, seq_lens=None, seq_lens_cpu_upper_bound=lens)
assert builder.build(0, batch([0, 1, 10], [21, 16])) == "built"
builder.build(0, batch([0, 1, 2, 2], [33, 5, 0]))
builder.build(0, batch([0, 1], [1]))
builder.build(0, batch([0, 3, 6], [24, 19]), num_accepted_tokens=[2, 1], num_decode_draft_tokens_cpu=[2, 2])
builder.build(0, batch([0, 3, 6], [24, 19]), num_decode_draft_tokens_cpu=[2, -1])
builder.build_for_cudagraph_capture(batch([0, 1], [99]))
class Softmax(AttentionMetadataBuilder):
    def __init__(self):
        self.kv_cache_spec = N(block_size=16)
    def build(self, common_prefix_len, common_attn_metadata):
        return "built"
assert Softmax().build(0, None) == "built"
"""
BASE = "class AttentionBackend:\n    pass\n"
BUILDER = """
import abc
class AttentionMetadataBuilder(abc.ABC):
    @abc.abstractmethod
    def build(self, common_prefix_len, common_attn_metadata):
        raise NotImplementedError
"""


@pytest.mark.parametrize(
    ("base", "text", "server", "wanted"),
    [
        (
            "sglang/srt/layers/attention/base_attn_backend.py", BASE, SGLANG,
            [
                "extend-gdn2x2-d64-bf16-p16-k64.0-n16a1.30-shuffled-mild_decay-k64w4s32.snap64-b2prod",
                "target-verify-gdn2x2-d64-bf16-p16-k65.30-chain4-shuffled-mild_decay-k64w4s32.snap64-b2prod",
            ],
        ),
        (
            "vllm/v1/attention/backend.py", BUILDER, VLLM,
            [
                "extend-gdn2x2-d64-bf16-p16-k20.7-n5a1.9-shuffled-mild_decay-k64w4s32.null-b2prod",
                "decode-gdn2x2-d64-bf16-p16-k32.4-shuffled-mild_decay-k64w4s32.null-b2prod",
                "extend-gdn2x2-d64-bf16-p16-k0-n1a1-shuffled-mild_decay-k64w4s32.null-b1prod",
                "target-verify-gdn2x2-d64-bf16-p16-k21.16-chain3-shuffled-mild_decay-k64w4s32.null.slots-b2prod",
                "extend-gdn2x2-d64-bf16-p16-k21.16-n3a3x2-shuffled-mild_decay-k64w4s32.null-b2prod",
            ],
        ),
    ],
)  # fmt: skip
def test_a_server_is_recorded_without_a_line_of_its_own(
    base: str, text: str, server: str, wanted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    file = tmp_path / base
    file.parent.mkdir(parents=True)
    file.write_text(text)
    (tmp_path / "server.py").write_text(server)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert main(["record", "--to", "calls.jsonl", "--", sys.executable, "server.py"]) == 0
    capfd.readouterr()
    assert main(["record", "--cases", "calls.jsonl"]) == 0
    out, err = capfd.readouterr()
    assert out.splitlines() == wanted
    assert "got no commit call" not in err
    assert ("memory of GDNAttnBackend's states was not found" in err) is base.startswith("sglang")
    assert ("only an upper bound" in err) is base.startswith("vllm")


def test_lines_of_a_newer_recorder_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "calls.jsonl"
    file.write_text(json.dumps({**LINE, "line": "states"}) + "\n")
    with pytest.raises(ValueError, match="line 1: expected a line that"):
        read_lines(file)


def test_what_sglang_0_5_23_and_vllm_0_33_0_were_asked() -> None:
    """Recorded on their own classes of GDN, behind the kit's bridges, in the emulation."""
    found = cases_of(read_lines(Path(__file__).parent / "data" / "servers_states.jsonl"))
    of_sglang, of_vllm = list(found.cases)[:6], list(found.cases)[6:]
    assert of_sglang[:2] == [
        "extend-gdn2x2-d64-bf16-p16-k20.7-n7a5.9-shuffled-mild_decay-k64w4s32-b2prod",
        "extend-gqa2x2-d64-bf16-p16-k20.7-n7a5.9-shuffled-gauss-b2prod",
    ]
    assert of_vllm[:2] == [
        "decode-gdn2x2-d64-bf16-p16-k63x2-shuffled-mild_decay-k64w4s32.null-b2prod",
        "target-verify-gdn2x2-d64-bf16-p16-k45x2-chain3-shuffled-mild_decay-k64w4s32.null.slots-b2prod",
    ]
    # SGLang's lengths of a verify were on the device, for states and for keys.
    assert found.skipped["the host did not know its lengths"] == 4
    assert len(of_vllm) == 7

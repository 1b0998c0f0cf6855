"""A live class is recorded, its cases run, and what goes wrong in recording costs a server nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.cli import main
from attn_testkit_servers.record.cases import Unreadable, cases_of, read_lines
from attn_testkit_servers.record.watch import MOST_LINES

HERE = Path(__file__).parent
CAPABILITIES = TorchNativeBackend.capabilities
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def python(*args: str, folder: Path = HERE, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], cwd=folder, env={**ENVIRONMENT, **environment}, capture_output=True, text=True,
        timeout=400, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the small server in ``live.py``."""
    file = tmp_path_factory.mktemp("record") / "calls.jsonl"
    done = python("live.py", ATTN_TESTKIT_RECORD=str(file))
    assert (done.returncode, done.stderr) == (0, "")
    return file


IDS = [
    "extend-gqa4x2-d64-bf16-p16-k0-n20a20-shuffled-gauss-w40one-usualscale-b1prod",
    "extend-gqa4x2-d64-bf16-p16-k20.7-n5a1.9-shuffled-gauss-w40one-usualscale-b2prod",
    # The 1st, 2nd, 4th, 8th and 16th of twenty decodes that differ in lengths alone.
    *(f"decode-gqa4x2-d64-bf16-p16-k{keys}.3-shuffled-gauss-w40one-usualscale-b2prod" for keys in (30, 31, 33, 37, 45)),
]


def test_the_cases_of_a_live_class_are_what_it_was_asked(record: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["record", "--cases", str(record)]) == 0
    out, err = capfd.readouterr()
    assert out.splitlines() == IDS
    assert "7 cases\n  not as recorded in 7: slots: the case lays tokens out in shuffled pages" in err


def test_a_record_holds_shapes_and_flags_and_no_data(record: Path) -> None:
    lines = read_lines(record)
    assert [line["line"] for line in lines].count("layer") == 2
    first, layer = lines[:2]
    assert {**first, "process": 0} == {
        "line": "batch", "backend": "Live", "instance": 0, "page_size": 16, "kv_dtype": "bfloat16",
        "hook": "init_forward_metadata", "how": "eager", "mode": "extend", "requests": 1, "padded_to": 1,
        "seq_lens": [20], "prefix_lens": [0], "new_tokens": [20], "process": 0,
    }  # fmt: skip
    assert (layer["heads"], layer["head_dim"], layer["window"], layer["dtype"]) == ([8, 2], 64, -1, "bfloat16")


def test_the_recorded_cases_run(record: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    main(["record", "--cases", str(record)])
    (tmp_path / "ids.txt").write_text(capfd.readouterr().out)
    done = python(
        "-m", "attn_testkit", "run", "--backend", "live:Live", "--device", "cpu", "--cases-from",
        str(tmp_path / "ids.txt"), "--json", str(tmp_path / "run.json"),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert {row["case"] for row in json.loads((tmp_path / "run.json").read_text())["results"] if row["case"]} == set(
        IDS
    )


GRAPHS = [
    "decode-gqa2x2-d64-bf16-p16-k33.5-shuffled-gauss-b3prod",
    "target-verify-gqa2x2-d64-bf16-p16-k9.4-chain4-shuffled-gauss-b2prod",
    "draft-extend-gqa2x2-d64-bf16-p16-k9.4-n4a1.3-shuffled-gauss-b2prod",
    "draft-extend-v2-gqa2x2-d64-bf16-p16-k9.4-n4a1.3-shuffled-gauss-b2prod",
    "extend-gqa2x2-d64-bf16-p16-k9.0-n7a3.11-shuffled-gauss-b2prod",
    "draft-decode-gqa2x2-d64-bf16-p16-k9.4-topk2steps3-shuffled-gauss-b2prod",
]


def test_recording_breaks_no_rule_and_every_mode_and_graph_comes_out_again(tmp_path: Path) -> None:
    file = tmp_path / "calls.jsonl"
    cases = [word for case in GRAPHS for word in ("--case", case)]
    done = python(
        "-m",
        "attn_testkit",
        "run",
        "-b",
        "live:Live",
        "--device",
        "cpu",
        "-j",
        "1",
        *cases,
        ATTN_TESTKIT_RECORD=str(file),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = read_lines(file)
    assert {line["how"] for line in lines if line["line"] == "batch"} == {"eager", "capture", "replay"}
    assert not any("seq_lens" in line for line in lines if line.get("how") == "capture")
    found = cases_of(lines, CAPABILITIES)
    modes = {case.mode.value for case in found.cases.values()}
    assert modes == {"decode", "target-verify", "draft-extend", "draft-extend-v2", "extend", "draft-decode"}
    # The own batch of each case, which its first step has; accepted tokens of v2 are on the device.
    own = {case.replace("n4a1.3", "n4a4x2") if "-v2-" in case else case for case in GRAPHS}
    assert own <= set(found.cases)


SERVER = {
    "sglang/srt/layers/attention/base_attn_backend.py": """
class AttentionBackend:
    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__()
        cls.registered = cls.__name__
    def init_forward_metadata(self, forward_batch):
        pass
    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        return self.forward_extend(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)
""",
    "server.py": """
import os, sys
from types import SimpleNamespace as N
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

class Theirs(AttentionBackend):
    def __init__(self, model_runner):
        self.page_size = model_runner.page_size
    def init_forward_metadata(self, forward_batch):
        super().init_forward_metadata(forward_batch)
    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        return q

class Tensor:
    dtype = "torch.bfloat16"
    @property
    def device(self):
        return N(type="cuda")
    def __getitem__(self, key):
        if not os.environ.get("MAY_WAIT"):
            raise AssertionError("that would wait for the device")
        return N(tolist=lambda: [65, 35])

assert Theirs.registered == "Theirs" and not hasattr(AttentionBackend, "registered")
backend = Theirs(N(page_size=64, kv_cache_dtype="torch.float8_e4m3fn"))
batch = N(forward_mode=N(name="MIXED"), batch_size=2, spec_info=None, seq_lens=Tensor(), seq_lens_cpu=None,
          extend_prefix_lens_cpu=[64, 5], extend_seq_lens_cpu=[1, 30])
backend.init_forward_metadata(batch)
layer = N(layer_id=3, tp_q_head_num=16, tp_k_head_num=1, qk_head_dim=576, head_dim=576, v_head_dim=512,
          sliding_window_size=-1, logit_cap=0.0, scaling=0.1)
# Layers with a recurrent state: GDN's, one of Lightning in a hybrid wrapper, and a call with Mamba2's mixer.
backend.forward(None, None, None, N(layer_id=0, num_v_heads=4), batch, mixed_qkv=Tensor())
class Hybrid(Theirs):
    full_attn_layers = [3]
Hybrid(N(page_size=64)).forward(Tensor(), None, None, N(layer_id=1, tp_q_head_num=4, tp_k_head_num=4), batch)
class Mamba(AttentionBackend):
    def forward(self, mixer, hidden_states, layer_id):
        return hidden_states
Mamba().forward(None, Tensor(), 2)
backend.forward(Tensor(), None, None, layer, batch, sinks=None)
batch.forward_mode.name = "DECODE"
backend.init_forward_metadata(batch)
print("served", *sys.argv[1:])
sys.exit(7)
""",
    "sitecustomize.py": "print('theirs too')\n",
}
"""As much of SGLang as is watched, and a server on it."""


@pytest.fixture
def server(tmp_path: Path) -> Path:
    for name, text in SERVER.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def test_a_server_on_sglang_is_recorded_without_a_line_of_its_own(
    server: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(server)
    monkeypatch.setenv("PYTHONPATH", str(server))
    assert main(["record", "--to", "calls.jsonl", "--", sys.executable, "server.py", "--port", "1"]) == 7
    out, err = capfd.readouterr()
    assert out == "theirs too\nserved --port 1\n"
    assert "3 lines in calls.jsonl; next: attn-testkit record --cases calls.jsonl" in err
    assert main(["record", "--cases", "calls.jsonl"]) == 0
    out, err = capfd.readouterr()
    assert out == "extend-mla16-d512r64-bf16-p64-k64.5-n16a1.30-shuffled-gauss-kvfp8e4m3-b2prod\n"
    assert "no case for 1 batches: the host did not know its lengths" in err


def test_lengths_that_the_device_alone_has_are_copied_where_that_is_asked_for(
    server: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(server)
    monkeypatch.setenv("MAY_WAIT", "1")
    assert main(["record", "--to", "calls.jsonl", "--waits", "--", sys.executable, "server.py"]) == 7
    capfd.readouterr()
    assert main(["record", "--cases", "calls.jsonl"]) == 0
    out, _ = capfd.readouterr()
    assert out.splitlines()[1] == "decode-mla16-d512r64-bf16-p64-k64.34-shuffled-gauss-kvfp8e4m3-b2prod"


def test_without_the_variable_nothing_is_watched(server: Path) -> None:
    done = python(
        "server.py", folder=server, PYTHONPATH=str(HERE.parents[1] / "attn_testkit_servers" / "record" / "startup")
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, "served\n", "")
    assert not list(server.glob("*.jsonl"))


@pytest.mark.parametrize("where", ["no/such/folder/calls.jsonl", "."])
def test_a_record_that_cannot_be_written_ends_with_one_warning_and_the_server_goes_on(server: Path, where: str) -> None:
    startup = str(HERE.parents[1] / "attn_testkit_servers" / "record" / "startup")
    done = python("server.py", folder=server, PYTHONPATH=startup, ATTN_TESTKIT_RECORD=str(server / where))
    assert (done.returncode, done.stdout) == (7, "served\n")
    (warning,) = done.stderr.splitlines()
    assert warning.startswith("attn-testkit: recording ended, the server goes on: ")


def test_the_file_that_is_loaded_into_servers_imports_the_standard_library_alone(tmp_path: Path) -> None:
    code = "import sys; import attn_testkit_servers.record.watch; print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert python("-c", code).stdout == "False False\n"
    text = (HERE.parents[1] / "attn_testkit_servers" / "record" / "watch.py").read_text()
    assert "from ." not in text
    assert "attn_testkit." not in text


def layer(**changes: Any) -> dict[str, Any]:
    return {
        "line": "layer", "process": 1, "backend": "B", "instance": 0, "page_size": 16, "kv_dtype": "bfloat16",
        "layer": 0, "heads": [4, 4], "head_dim": 64, "v_head_dim": 64, "dtype": "bfloat16", "window": -1,
        "logit_cap": 0.0, "usual_scaling": False, "sinks": False, "save_kv_cache": True, **changes,
    }  # fmt: skip


def batch(**changes: Any) -> dict[str, Any]:
    return {
        "line": "batch", "process": 1, "backend": "B", "instance": 0, "page_size": 16, "hook": "x", "how": "eager",
        "mode": "decode", "requests": 2, "padded_to": 2, "seq_lens": [7, 30], **changes,
    }  # fmt: skip


TREE = {"topk": 2, "draft_token_num": 4, "num_tokens_per_req": 4}


@pytest.mark.parametrize(
    ("lines", "case", "differs"),
    [
        ([batch(), layer()], "decode-mha4-d64-bf16-p16-k6.29-shuffled-gauss-b2prod", ""),
        ([batch(how="replay", padded_to=8), layer()], "decode-mha4-d64-bf16-p16-k6.29-shuffled-gauss-b8prod", ""),
        # Eager padding is no bucket of a graph.
        ([batch(padded_to=8), layer()], "decode-mha4-d64-bf16-p16-k6.29-shuffled-gauss-b2prod", ""),
        (
            [batch(), layer(window=9), layer(layer=1, window=9, logit_cap=30.0, sinks=True)],
            "decode-mha4-d64-bf16-p16-k6.29-shuffled-gauss-w9same-cap30-sink-b2prod", "",
        ),
        (
            [batch(), layer(window=9), layer(layer=1, window=4), layer(layer=2)],
            "decode-mha4-d64-bf16-p16-k6.29-shuffled-gauss-w4one-b2prod",
            "window: layers have 2 windows, and the case has the narrowest",
        ),
        (
            [batch(), layer(), layer(layer=1, heads=[8, 4])],
            "decode-mha4-d64-bf16-p16-k6.29-shuffled-gauss-b2prod",
            "heads: layers have 2 shapes, and the case has the first shape",
        ),
        (
            [batch(mode="target-verify", spec={**TREE, "topk": 1}), layer()],
            "target-verify-mha4-d64-bf16-p16-k7.30-chain4-shuffled-gauss-b2prod", "",
        ),
        (
            [batch(mode="target-verify", spec=TREE), layer()],
            "target-verify-mha4-d64-bf16-p16-k7.30-t0x2.1-shuffled-gauss-b2prod".replace("0x2", "0.0"),
            "tree: only the device has it, so each node of the case has 2 children as long as there are nodes",
        ),
        (
            [batch(mode="draft-extend", new_tokens=[1, 3], spec={"num_tokens_per_req": 4}), layer()],
            "draft-extend-mha4-d64-bf16-p16-k6.27-n4a1.3-shuffled-gauss-b2prod", "",
        ),
        (
            [batch(mode="draft-extend", new_tokens=[1, 3], steps=5, spec={"num_tokens_per_req": -1}), layer()],
            "draft-extend-mha4-d64-bf16-p16-k6.27-n6a1.3-shuffled-gauss-b2prod", "",
        ),
        (
            [batch(mode="draft-extend", new_tokens=[1, 3], spec={"num_tokens_per_req": -1}), layer()],
            "draft-extend-mha4-d64-bf16-p16-k6.27-n3a1.3-shuffled-gauss-b2prod",
            "rows in the graph: as many as the largest request has",
        ),
        (
            [batch(mode="draft-extend-v2", new_tokens=[4, 4], spec={"num_tokens_per_req": 4}), layer()],
            "draft-extend-v2-mha4-d64-bf16-p16-k3.26-n4a4x2-shuffled-gauss-b2prod",
            "accepted tokens: only the device has their number, so the case accepts all",
        ),
        # SGLang's steps of a multi-step backend are decodes with a spec_info.
        (
            [batch(spec={"num_tokens_per_req": 2}, steps=3), layer()],
            "draft-decode-mha4-d64-bf16-p16-k7.30-topk2steps3-shuffled-gauss-b2prod", "",
        ),
    ],
)  # fmt: skip
def test_a_batch_becomes_the_case_that_is_nearest(lines: list[dict[str, Any]], case: str, differs: str) -> None:
    found = cases_of(lines)
    assert list(found.cases) == [case]
    assert [each for each in found.differs[case] if not each.startswith("slots")] == ([differs] if differs else [])
    assert not found.skipped


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([batch()], "planned, but no layer ran"),
        ([batch(), layer(instance=1)], "planned, but no layer ran"),
        ([batch(how="capture"), layer()], "planned for a capture: lengths are fill values, and its replays have the"),
        ([batch(requests=0), layer()], "no live request"),
        ([batch(mode="idle"), layer()], "mode idle"),
        ([batch(mode="extend"), layer()], "the host did not know its lengths"),
        ([batch(), layer(dtype="float64")], "dtype float64"),
        ([batch(), layer(kv_dtype="float8_e5m2")], "KV dtype float8_e5m2"),
        ([batch(), layer(v_head_dim=128)], "values of 128 with keys of 64, and 4 KV heads"),
        ([batch(seq_lens=[7]), {"line": "layer", **layer(heads="4")}], "no case can be made of it: ValueError"),
    ],
)
def test_what_has_no_case_is_counted_with_its_reason(lines: list[dict[str, Any]], reason: str) -> None:
    found = cases_of(lines)
    assert not found.cases
    ((why, count),) = found.skipped.items()
    assert (why[: len(reason)], count) == (reason, 1)


def test_with_capabilities_only_what_they_hold_is_left_as_they_hold_it() -> None:
    lines = [batch(), layer(window=3), batch(seq_lens=[70, 1])]
    narrow = CAPABILITIES.with_changes(windows={"smallest": 5, "layers": "same"}, options={"any_scaling": False})
    assert next(iter(cases_of(lines, narrow).cases)) == (
        "decode-mha4-d64-bf16-p16-k6.29-shuffled-gauss-w5same-usualscale-b2prod"
    )
    wide = cases_of(
        [batch(), layer(window=3, usual_scaling=True)], CAPABILITIES.with_changes(kv_pool={"kv_layouts": {"hnd"}})
    )
    assert list(wide.cases) == ["decode-mha4-d64-bf16-p16-k6.29-shuffled-gauss-kvhnd-w3same-usualscale-b2prod"]
    none = cases_of(lines, CAPABILITIES.with_changes(kv_pool={"page_sizes": {1}}))
    assert dict(none.skipped) == {"not declared: page size 16": 2}


def test_a_line_that_a_killed_process_did_not_end_is_left_out_and_others_are_errors(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(batch()) + "\n" + json.dumps(layer())[:40])
    assert len(read_lines(file)) == 1
    file.write_text("{\n" + json.dumps(batch()))
    with pytest.raises(Unreadable, match=r"line 1 is not JSON: .*; expected a recording, which"):
        read_lines(file)
    file.write_text('{"line": "x"}')
    with pytest.raises(Unreadable, match="line 1: expected a line that `attn-testkit record` wrote"):
        read_lines(file)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give --to FILE -- COMMAND to record a server, or --cases FILE"),
        (["--to", "a", "--cases", "b", "--", "c"], "give --to FILE -- COMMAND to record a server, or --cases FILE"),
        (["--cases", "missing"], "cannot read missing: No such file or directory"),
        (["--to", "no/such/a", "--", "true"], "cannot write no/such/a: there is no directory no/such; create it"),
        (["--to", "a", "--", "no-such-command"], "cannot run no-such-command: No such file or directory"),
    ],
)
def test_what_is_asked_wrong_is_said(
    argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["record", *argv]) == 4
    assert message in capfd.readouterr().err


def test_a_process_writes_no_more_than_so_many_lines(tmp_path: Path) -> None:
    code = """
from types import SimpleNamespace as N
from attn_testkit_servers.record import watch
@watch
class B:
    def init_forward_metadata(self, batch):
        pass
b = B()
for size in range(1, 2501):
    b.init_forward_metadata(N(batch_size=size, forward_mode=N(name="DECODE"), seq_lens_cpu=[1] * size))
"""
    done = python("-c", code, ATTN_TESTKIT_RECORD=str(tmp_path / "a.jsonl"))
    assert (done.returncode, done.stderr) == (0, "")
    assert len(read_lines(tmp_path / "a.jsonl")) == MOST_LINES


def test_a_forked_process_has_lines_of_its_own(tmp_path: Path) -> None:
    code = """
import os
from types import SimpleNamespace as N
from attn_testkit_servers.record import watch
@watch
class B:
    def forward(self, q, k, v, layer, batch, save_kv_cache=True):
        pass
layer = N(layer_id=0, tp_q_head_num=1, tp_k_head_num=1, head_dim=64)
b, q = B(), N(dtype="torch.float16")
b.forward(q, q, q, layer, None)
child = os.fork()
b.forward(q, q, q, layer, None)
if child:
    os.waitpid(child, 0)
"""
    done = python("-c", code, ATTN_TESTKIT_RECORD=str(tmp_path / "a.jsonl"))
    assert (done.returncode, done.stderr) == (0, "")
    assert len({line["process"] for line in read_lines(tmp_path / "a.jsonl")}) == 2

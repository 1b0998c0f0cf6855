"""Naming a backend of SGLang: what is said where it is missing, old, or misspelt. None of this needs SGLang."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from named_places import missing_in

from attn_testkit.cases.case import parse_case
from attn_testkit.cases.declared import not_declared
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import SGLANG, Capabilities, ForwardMode
from attn_testkit.registry import BackendNotFound, bridges, load_backend
from attn_testkit.running.planning.known_failures import load_known
from attn_testkit_servers.bridges.sglang import NAMES
from attn_testkit_servers.bridges.sglang.capabilities import CAPABILITIES, CAPABILITIES_OF_OLDER, OF_SGLANG
from attn_testkit_servers.bridges.sglang.state_capabilities import OF_STATES
from attn_testkit_servers.bridges.sglang.versions import CURRENT, OLDER

ROOT = Path(__file__).resolve().parents[4]


def _installed(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def found(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", found)


def test_without_sglang_the_message_is_the_command_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, None)
    with pytest.raises(BackendNotFound) as raised:
        load_backend("sglang:triton")
    said = str(raised.value)
    assert said.startswith("backend 'sglang:triton': SGLang is not installed here; `bash ci/servers.sh`")
    assert f"build/servers/sglang-{CURRENT}/bin/attn-testkit run --backend sglang:triton" in said
    assert "importing" not in said


@pytest.mark.parametrize("version", ["0.5.22", "0.5.24", f"{CURRENT}.post1", "0.5.12"])
def test_a_version_that_nobody_tried_is_refused_with_those_that_are_supported(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    _installed(monkeypatch, version)
    with pytest.raises(BackendNotFound, match=f"SGLang {version} is installed; the kit runs .*{CURRENT}"):
        load_backend("sglang:triton")


def test_a_torch_for_cuda_without_a_gpu_is_refused_before_sglang_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, CURRENT)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendNotFound, match=r"is a build for CUDA, but there is no GPU here: .*ATTN_TORCH_INDEX"):
        load_backend("sglang:triton")


@pytest.mark.parametrize(
    ("name", "why"), [("flex_attention", "which the kit does not run"), ("tritn", "which SGLang does not have")]
)
def test_another_name_is_answered_with_all_there_are(name: str, why: str) -> None:
    with pytest.raises(BackendNotFound) as raised:
        load_backend(f"sglang:{name}")
    assert str(raised.value) == (
        f"backend 'sglang:{name}': it names {name!r}, {why}; there are "
        + ", ".join(f"sglang:{known}" for known in NAMES)
    )


def test_a_name_is_asked_for_before_sglang_is() -> None:
    """A typing mistake is not answered with an installation."""
    with pytest.raises(BackendNotFound, match="there are sglang:"):
        load_backend("sglang:no_such_backend")


@pytest.mark.parametrize(
    ("spec", "said"), [("sglang:", "is incomplete"), ("sglang", "is a server; name one of its backends")]
)
def test_a_server_without_a_name_is_incomplete(spec: str, said: str) -> None:
    with pytest.raises(BackendNotFound, match=f"'{spec}' {said}"):
        load_backend(spec)


def test_a_name_that_sglang_has_changed_is_answered_with_the_new_one() -> None:
    with pytest.raises(BackendNotFound, match="which SGLang has renamed: sglang:cutedsl_mla"):
        load_backend("sglang:tokenspeed_mla")


def test_of_the_older_release_only_what_is_driven_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, OLDER)
    with pytest.raises(BackendNotFound, match=f"the kit runs triton of SGLang {OLDER}, and flashinfer of"):
        load_backend("sglang:flashinfer")


@pytest.mark.parametrize("name", sorted(OF_STATES))
def test_every_case_of_a_class_with_states_has_the_conventions_that_it_declares(name: str) -> None:
    declared = CAPABILITIES[name].capabilities
    for mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.EXTEND):
        cases = generate(declared, mode, "core")
        assert cases
        assert not [case.id for case in cases if not_declared(declared, case)]


@pytest.mark.parametrize("version", [CURRENT, OLDER])
def test_the_script_that_messages_name_makes_an_environment_of_each_version(version: str) -> None:
    pins = (ROOT / "ci" / "servers" / f"sglang-{version}.txt").read_text().splitlines()
    assert f"sglang=={version}" in pins
    packages = [line for line in pins if not line.startswith("#")]
    assert all(line.count("==") == 1 for line in packages), "every version is pinned"


@pytest.mark.parametrize(
    ("file", "backends"),
    [
        (
            "known_failures.toml",
            {
                "sglang:dsa",
                "sglang:dsa_fused",
                "sglang:fa3",
                "sglang:fa4",
                "sglang:flashinfer",
                "sglang:flashinfer_mla",
                "sglang:gdn_flashinfer",
                "sglang:kda*",
                "sglang:lightning*",
                "sglang:mamba2_hybrid_pd",
                "sglang:triton",
                "sglang_bugs:FP8",
                "sglang_bugs:WindowsInDecode",
                "sglang_wider:SharedKV",
                "sglang_wider:SoftCap",
                "sglang_wider:WindowsInVerify",
            },
        ),
        ("known_failures_older.toml", {"sglang:triton"}),
    ],
)
def test_known_failures_of_a_servers_backend_are_read_and_the_nightly_runs_it(file: str, backends: set[str]) -> None:
    known = load_known(ROOT / "ci" / "servers" / file)
    assert {each.backend for each in known} == backends
    nightly = (ROOT / "ci" / "nightly_servers.sh").read_text()
    assert file in nightly
    assert all(name.rstrip("*") in nightly for name in backends)


def test_known_failures_of_sglang_triton_are_decodes_of_mha_with_large_logits() -> None:
    known = load_known(ROOT / "ci" / "servers" / "known_failures.toml")
    cases = [parse_case(each.cases) for each in known if each.backend == "sglang:triton"]
    assert {(case.mode, case.heads.family, case.data) for case in cases} == {
        (ForwardMode.DECODE, "mha", "rising_logits"),
        (ForwardMode.DECODE, "mha", "peaked"),
    }


@pytest.mark.parametrize("name", NAMES)
def test_capabilities_are_capabilities_and_each_is_made_once(name: str) -> None:
    declared = CAPABILITIES[name]
    fields = [line.capability for line in declared.lines]
    assert len(fields) == len(set(fields))
    made = declared.capabilities
    assert isinstance(made, Capabilities)
    if not declared.keeps_states:
        assert made.kv_pool.kv_layouts == {"custom"}, "SGLang's pools lay themselves out"
    assert made.graph <= made.eager
    same = {"takes_none_kv": False, "eager_without_waits": True, "context_len": SGLANG.context_len}
    assert made.server.with_changes(**same) == SGLANG


def test_no_name_is_both_driven_and_left_out() -> None:
    assert not set(OF_SGLANG) & {declared.registered for declared in CAPABILITIES.values()}


@pytest.mark.parametrize("bridge", bridges().values())
def test_importing_a_bridge_imports_no_server(bridge: str) -> None:
    code = f"import sys, {bridge}; print([name for name in {list(bridges())!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed: ci/servers.sh")
def test_each_place_that_a_capability_rests_on_is_there() -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    of_version = CAPABILITIES_OF_OLDER if importlib.metadata.version("sglang") == OLDER else CAPABILITIES
    places = [line.place for declared in of_version.values() for line in declared.lines]
    assert missing_in(Path(spec.origin).parent / "srt", places) == []

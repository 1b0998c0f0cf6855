"""Naming a backend of vLLM: what is said where it is missing, old, or misspelt; and the table of capabilities."""

from __future__ import annotations

import fnmatch
import importlib.metadata
import importlib.util
import itertools
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
from named_places import missing_in

from attn_testkit.cases.case import parse_case
from attn_testkit.cases.declared import not_declared
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import Capabilities, ForwardMode, server_conventions
from attn_testkit.registry import BackendNotFound, load_backend
from attn_testkit.running.planning.known_failures import KnownFailure, load_known
from attn_testkit.steps.schedule import make_schedule
from attn_testkit_servers.bridges.vllm import NAMES
from attn_testkit_servers.bridges.vllm import imports as of_imports
from attn_testkit_servers.bridges.vllm.capabilities import CAPABILITIES, OF_VLLM, BridgeCapabilities
from attn_testkit_servers.bridges.vllm.numbers import NUMBERS, capture_sizes
from attn_testkit_servers.bridges.vllm.versions import SUPPORTED

ROOT = Path(__file__).resolve().parents[4]


def _installed(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def found(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", found)


def test_without_vllm_the_message_is_the_command_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, None)
    with pytest.raises(BackendNotFound) as raised:
        load_backend("vllm:triton")
    said = str(raised.value)
    assert said.startswith(f"backend 'vllm:triton': vLLM is not installed here; `bash ci/servers.sh vllm-{SUPPORTED}`")
    assert f"build/servers/vllm-{SUPPORTED}/bin/attn-testkit run --backend vllm:triton" in said
    assert "importing" not in said


@pytest.mark.parametrize("version", ["0.32.0", "0.33.1", f"{SUPPORTED}.post1", "0.33.0+cpu"])
def test_another_version_is_refused_with_the_one_that_is_supported(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    _installed(monkeypatch, version)
    with pytest.raises(BackendNotFound) as raised:
        load_backend("vllm:triton")
    assert f"vLLM {version} is installed; the kit runs only {SUPPORTED}" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "why"),
    [("flashinfer_mla", "which the kit does not run"), ("tritn", "which vLLM does not have"), ("", None)],
)
def test_another_name_is_answered_with_all_there_are(name: str, why: str | None) -> None:
    """Before vLLM is asked for: a typing mistake is not answered with an installation."""
    with pytest.raises(BackendNotFound) as raised:
        load_backend(f"vllm:{name}")
    listed = ", ".join(f"vllm:{known}" for known in NAMES)
    if why is None:
        assert "is incomplete" in str(raised.value)
    else:
        assert str(raised.value) == f"backend 'vllm:{name}': it names {name!r}, {why}; there are {listed}"


def test_no_name_is_both_driven_and_left_out() -> None:
    assert not {name.lower() for name in OF_VLLM} & {declared.registered.lower() for declared in CAPABILITIES.values()}
    assert not set(OF_VLLM) & set(NAMES)


def test_the_script_that_messages_name_makes_an_environment_of_it() -> None:
    pins = (ROOT / "ci" / "servers" / f"vllm-{SUPPORTED}.txt").read_text().splitlines()
    assert f"vllm=={SUPPORTED}" in pins
    packages = [line for line in pins if not line.startswith("#")]
    assert all(line.count("==") == 1 for line in packages), "every version is pinned"
    assert len(packages) == len({line.partition("==")[0].lower() for line in packages})


@pytest.mark.parametrize("name", NAMES)
def test_capabilities_are_capabilities_and_each_is_made_once(name: str) -> None:
    declared = CAPABILITIES[name]
    fields = [line.capability for line in declared.lines]
    assert len(fields) == len(set(fields))
    made = declared.capabilities
    assert isinstance(made, Capabilities)
    assert made.graph <= made.eager
    # What is the model runner's is said of all.
    if declared.state_layer:
        changed = {
            "takes_out": True, "eager_without_waits": True, "drafts_without_prefix": False,
            "narrower_widths": server_conventions.VLLM.narrower_widths,
        }  # fmt: skip
        assert made.server.with_changes(**changed) == server_conventions.VLLM
    else:
        assert made.kv_pool.kv_layouts == {"custom"}
        assert made.server.with_changes(takes_none_kv=False, drafts_without_prefix=False) == server_conventions.VLLM
    assert made.bounds.max_topk == 1, "CommonAttentionMetadata has no mask and no tree"


@pytest.mark.parametrize("name", [name for name, declared in CAPABILITIES.items() if declared.state_layer])
def test_every_case_of_a_class_with_states_has_the_conventions_that_it_declares(name: str) -> None:
    declared = CAPABILITIES[name].capabilities
    for mode in sorted(declared.eager):
        cases = list(generate(declared, mode, "core"))
        assert cases
        assert not [case.id for case in cases if not_declared(declared, case)]
        rolled_back = {case.state.rollback for case in cases if case.state and case.tree is not None}
        assert rolled_back == ({"slots"} if mode is ForwardMode.TARGET_VERIFY else set())
        assert {case.state.padded_index for case in cases if case.state} == {0}, "the null block"


def test_groups_are_merged_by_a_flag_alone() -> None:
    """What passes and what fails differ in how layers are grouped, and in what is declared of groups."""
    plain, merged = CAPABILITIES["flex"], CAPABILITIES["flex_merged"]
    assert (plain.one_kv_group, merged.one_kv_group) == (False, True)
    assert plain.registered == merged.registered
    assert plain.capabilities.kv_pool.kv_groups
    assert not merged.capabilities.kv_pool.kv_groups
    assert merged.capabilities == plain.capabilities.with_changes(
        kv_pool={"kv_groups": False},
        heads={"heads_by_layer": False},
        windows={"layers": "one"},
        spans=plain.capabilities.spans.with_changes(by_layer=False),
    )


def test_both_kernels_of_triton_have_the_same_capabilities() -> None:
    # Each takes one of the two conventions of a span in a window.
    own = CAPABILITIES["triton"].capabilities
    assert CAPABILITIES["triton_2d"].capabilities == own.with_changes(
        spans=own.spans.with_changes(wider_than_window=not own.spans.wider_than_window)
    )
    assert CAPABILITIES["triton_2d"].capture_sizes == (1,)
    assert not CAPABILITIES["triton"].capture_sizes, "the buckets of the case"


def test_a_variable_that_vllm_has_read_already_is_not_set_behind_its_back(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = BridgeCapabilities("TRITON_ATTN", (), environment={"VLLM_BATCH_INVARIANT": "1"})
    monkeypatch.setitem(sys.modules, "vllm.envs", ModuleType("vllm.envs"))
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    with pytest.raises(RuntimeError, match="imported before VLLM_BATCH_INVARIANT=1 was set"):
        of_imports.prepare(declared)
    assert "VLLM_BATCH_INVARIANT" not in os.environ


def known_failures_of(backend: str) -> list[KnownFailure]:
    known = load_known(ROOT / "ci" / "servers" / "known_failures_vllm.toml")
    assert {each.backend for each in known} == {
        "vllm:bailing", "vllm:flash_attn_fp8", "vllm:flashinfer", "vllm:flashmla_fp8", "vllm:flex", "vllm:flex_merged",
        "vllm:gdn*", "vllm:linear", "vllm:triton_mla", "vllm_wider:LseInFloat32",
        "vllm_wider:SmallerBlocks",
    }  # fmt: skip
    return [each for each in known if each.backend == backend]


def test_known_failures_of_merged_groups_are_graphs_that_keep_the_length_of_their_capture() -> None:
    known = [each for each in known_failures_of("vllm:flex_merged") if "-spans" not in each.cases]
    assert {each.cases.partition("-*-")[0] for each in known} == CAPABILITIES["flex_merged"].capabilities.graph
    assert {each.execution for each in known} == {"graph"}
    # A mask that is rebuilt for fewer rows than the capture had may be read past its end.
    assert {check for each in known for check in each.checks} == {"replay-follows-batch", "completes"}


def test_the_known_failures_of_mla_are_log_sum_exps_that_fp16_cannot_hold() -> None:
    declared = CAPABILITIES["triton_mla"].capabilities
    assert declared.lse is not None
    assert declared.lse.dtype == "model"
    every = known_failures_of("vllm:triton_mla")
    assert [parse_case(known.cases).kv_splits for known in every] == ["whole", "ranks2by64"]
    for known in every:
        case = parse_case(known.cases)
        assert not not_declared(declared, case)
        assert (case.dtype, case.data) == ("fp16", "negative")
        assert known.execution == "", "eager and in graphs"
        assert known.checks == ("log-sum-exp", "matches-oracle")


@pytest.mark.parametrize("name", ["triton_mla", "flashmla"])
def test_ranks_of_mla_decode_because_vllm_refuses_drafts_of_several_rows_there(name: str) -> None:
    declared = CAPABILITIES[name].capabilities
    assert declared.lse is not None
    assert declared.lse.ranks == {ForwardMode.DECODE}
    assert not declared.lse.merges, "vLLM merges with collectives"
    ranks = [case for case in generate(declared, ForwardMode.DECODE, "core") if case.kv_splits.startswith("ranks")]
    assert {case.kv_splits[5] for case in ranks} == {"2", "3", "4", "8"}


@pytest.mark.parametrize(("name", "products"), [("flashmla_fp8", "fp8_e4m3_unscaled"), ("flash_attn_fp8", "fp8_e4m3")])
def test_known_failures_of_fp8_products_are_single_cases_of_large_logits_on_sm90(name: str, products: str) -> None:
    declared = CAPABILITIES[name].capabilities
    assert declared.precision.matmul_dtype == products
    for known in known_failures_of(f"vllm:{name}"):
        case = parse_case(known.cases)
        assert not not_declared(declared, case)
        assert (case.data, case.kv_dtype) == ("rising_logits", "fp8_e4m3")
        assert (known.when, known.checks) == ("sm90", ("matches-oracle",))


@pytest.mark.parametrize("name", ["bailing", "linear"])
def test_known_failures_of_linear_attention_are_prefills_with_a_decay_that_continue_a_request(name: str) -> None:
    every = known_failures_of(f"vllm:{name}")
    known = [each for each in every if each.checks == ("matches-oracle",)]
    # A dummy run updates the null block, which linear attention of MiniMax is declared to do.
    dummies = {(each.cases, each.execution, each.checks) for each in every if each not in known}
    modes = ("decode", "target-verify") if name == "bailing" else ()
    assert dummies == {(f"{mode}-*-empty_batches*", "graph", ("writes-own-state",)) for mode in modes}
    declared = CAPABILITIES[name].capabilities
    assert declared.state is not None
    assert declared.state.fresh == {"zeroed"}, "a fresh prompt of one token reads what its block held"
    failing = set[str]()
    for case in generate(declared, ForwardMode.EXTEND, "core"):
        schedule = make_schedule(case)
        ran = (schedule.steps[0], schedule.second)  # of an eager case-run
        steps = [[(request.prefix, request.new) for request in step.requests] for step in ran]
        # Leading requests of one row are decodes.
        prefills = [list(itertools.dropwhile(lambda each: each[1] == 1, requests)) for requests in steps]
        continues = any(prefix > 0 or new > 256 for requests in prefills for prefix, new in requests)
        if continues and case.data in ("mild_decay", "strong_decay", "like_keys"):
            failing.add(case.id)
        assert (case.id in failing) == any(fnmatch.fnmatch(case.id, each.cases) for each in known), case.id
    assert failing


class _Counted:
    """A context in which no two numbers are alike."""

    max_bs, max_num_tokens, max_context_len, page_size, num_draft_tokens = 3, 200, 5_000, 16, 7
    speculative_num_steps, max_extend_tokens = 5, 90
    modes = frozenset({ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY})
    capture_sizes, capture_tokens = (2, 3), (14, 21, 60)


def test_each_number_is_given_in_the_unit_in_which_vllm_counts_it() -> None:
    context = _Counted()
    given = {each.name: (each.value(context), each.unit) for each in NUMBERS}  # type: ignore[arg-type]
    assert given == {
        "max_num_seqs": (3, "requests"),
        "max_num_batched_tokens": (200, "tokens"),
        "max_model_len": (5_000, "tokens of a request"),
        "block_size": (16, "tokens of a block"),
        "max_cudagraph_capture_size": (60, "tokens"),
        "num_speculative_tokens": (6, "tokens of a request"),
    }
    assert capture_sizes(context) == (14, 21, 60)  # type: ignore[arg-type]
    context.capture_tokens = ()  # type: ignore[assignment]
    assert capture_sizes(context)[-1] == 200, "vLLM's default list up to the largest batch"  # type: ignore[arg-type]


VLLM = importlib.util.find_spec("vllm")


@pytest.mark.skipif(VLLM is None, reason="vLLM is not installed: ci/servers.sh")
def test_each_place_that_a_capability_or_a_number_rests_on_is_there() -> None:
    assert VLLM is not None
    assert VLLM.origin is not None
    lines = [line.place for declared in CAPABILITIES.values() for line in declared.lines]
    assert missing_in(Path(VLLM.origin).parent, [*lines, *(each.place for each in NUMBERS)]) == []

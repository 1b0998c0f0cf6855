"""Cases of memory that leaves to the host: their word, what they exclude, and which a tier has."""

from __future__ import annotations

import pytest

from attn_testkit.backends.torch_native import TorchNativeBackend
from attn_testkit.backends.torch_native_offload import TorchNativeOffloadBackend
from attn_testkit.backends.torch_native_sparse_offload import TorchNativeSparseOffloadBackend
from attn_testkit.cases.case import parse_case
from attn_testkit.cases.declared import not_declared
from attn_testkit.cases.features.offload import OFFLOAD
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import HOST_LAYOUTS, ForwardMode, Offloads

CASE = "decode-gqa4x2-d64-bf16-p16-k40.9-shuffled-gauss-{}-b3prod"
INDEXED = "decode-mla1-d512r64-bf16-p16-k21-shuffled-gauss-sel16-idx4-offloadlayerfirst-b2prod"


@pytest.mark.parametrize(
    ("word", "layout"), [*zip(("layerfirst", "pagefirst", "pagefirstdirect"), HOST_LAYOUTS, strict=True)]
)
def test_a_word_names_the_layout_of_the_host(word: str, layout: str) -> None:
    case = parse_case(CASE.format(f"offload{word}"))
    assert (case.id, case.offload) == (CASE.format(f"offload{word}"), layout)
    assert OFFLOAD.describe(case) == {"offload": f"the host and back, in the layout {layout}"}  # type: ignore[operator]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (CASE.format("offloadpage"), "cannot read 'offloadpage'"),
        (CASE.format("handed2to4p8nhd-offloadlayerfirst"), "memory moves in one way before a step"),
        (CASE.format("lsewhole-offloadlayerfirst"), "KV splits"),
    ],
)
def test_what_cannot_leave_is_refused(case: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_case(case)


def test_a_request_leaves_with_all_that_it_has() -> None:
    declared = TorchNativeSparseOffloadBackend.capabilities
    assert not not_declared(declared, parse_case(INDEXED))
    keys_alone = declared.with_changes(offloads={"memory": {"keys"}})
    assert not_declared(keys_alone, parse_case(INDEXED)) == "offloading of index_keys, keys to layer_first"


def test_smoke_tries_each_layout_in_each_mode() -> None:
    declared = TorchNativeOffloadBackend.capabilities
    for mode in (ForwardMode.DECODE, ForwardMode.EXTEND):
        assert {case.offload for case in generate(declared, mode, "smoke")} == {"", *HOST_LAYOUTS}
    assert not any(case.offload for case in generate(TorchNativeBackend.capabilities, ForwardMode.DECODE, "smoke"))


def test_a_declaration_is_checked() -> None:
    with pytest.raises(ValueError, match="unknown host_layouts 'pages_first'; did you mean 'page_first'"):
        Offloads({"pages_first"})
    with pytest.raises(ValueError, match=r"Offloads\.memory is empty"):
        Offloads({"layer_first"}, memory=set())
    with pytest.raises(ValueError, match="must be an Offloads"):
        TorchNativeBackend.capabilities.with_changes(offloads=True)

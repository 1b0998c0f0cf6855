"""Records in ``Capabilities``: how they are given and changed, and how earlier names are answered."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest

from attn_testkit.contract import SGLANG, VLLM, Capabilities, Requires, ServerConventions, Windows
from attn_testkit.contract.capabilities import MOVED

DECODE = Capabilities(eager={"decode"})  # type: ignore[arg-type]
EARLIER = (
    "eager", "graph", "families", "dtypes", "kv_dtypes", "matmul_dtype", "q_scale", "fp32_products",
    "new_rows_as_given", "takes_none_kv", "takes_strided_heads", "head_dims", "mla_rope_dims", "page_sizes",
    "kv_layouts", "gqa_ratios", "max_q_rows", "max_extend_tokens", "max_topk", "max_draft_branches",
    "drafts_without_prefix", "padding_slots", "padded_requests", "verify_lens", "takes_bare_chains", "non_causal",
    "kv_groups", "heads_by_layer", "kernel_changes_at", "max_context_len", "sliding_window", "min_window",
    "layer_windows", "window_in_trees", "any_scaling", "logit_cap", "sinks", "needs_cpu_seq_lens", "eager_waits",
    "waits_between_steps", "takes_more_rows", "takes_out", "output_lifetime", "takes_empty_batches",
    "takes_unset_width", "finite_page_tails", "deterministic", "batch_invariant", "lse", "requires", "mode_requires",
)  # fmt: skip
"""All fields of ``Capabilities`` before windows and conventions of servers were records."""
VALUES: dict[str, Any] = {
    "sliding_window": {"decode"}, "min_window": 2, "layer_windows": "one", "output_lifetime": "model",
    "padded_requests": {"nothing"}, "padding_slots": {-1}, "verify_lens": {"all"}, "drafts_without_prefix": False,
}  # fmt: skip
"""A value of each moved field that is not the default; True for the others."""


LATER = {
    ("server", "finite_padding"),
    ("server", "narrower_widths"),
    ("server", "context_len"),
    ("server", "instances_run_at_once"),
    ("server", "takes_rewritten_table"),
    ("server", "takes_unused_scales"),
    ("server", "takes_requests_without_rows"),
    ("windows", "chunked"),
}
"""Fields of records that ``Capabilities`` never had itself."""


def test_every_earlier_field_is_a_field_or_is_in_the_table() -> None:
    now = {f.name for f in fields(Capabilities)}
    assert {name for name in EARLIER if name not in now} == set(MOVED)
    assert {record for record, _ in MOVED.values()} == {"windows", "server"}
    later = {"sparse", "state", "kernel_changes_at_keys", "mode_invariant", "alibi", "wider_keys", "spans"} | {
        "qq_bias",
        "shared_qq_bias",
        "cross_attention",
    }
    assert now - set(EARLIER) == {"windows", "server"} | later
    assert set(MOVED.values()) == {
        *(("windows", f.name) for f in fields(Windows)), *(("server", f.name) for f in fields(ServerConventions)),
    } - LATER  # fmt: skip


@pytest.mark.parametrize("name", MOVED)
def test_what_answers_an_earlier_field_is_a_line_that_works(name: str) -> None:
    value = VALUES.get(name, True)
    record, new = MOVED[name]
    with pytest.raises(ValueError, match=f"^Capabilities.{name} is now {record}=") as answer:
        Capabilities(eager={"decode"}, **{name: value})  # type: ignore[arg-type]
    written = eval(f"Capabilities(eager={{'decode'}}, {str(answer.value).partition(' is now ')[2]})", globals())
    assert written == DECODE.with_changes(**{record: {new: value if name not in TURNED else not value}}) != DECODE
    with pytest.raises(ValueError, match=f"^Capabilities.{name} is now {record}=") as answer:
        DECODE.with_changes(**{name: value})
    assert eval(f"DECODE.with_changes({str(answer.value).partition(' is now ')[2]})", globals()) == written
    with pytest.raises(AttributeError, match=f"Capabilities has no '{name}'; it is now {record}.{new}"):
        getattr(written, name)


TURNED = ("eager_waits", "waits_between_steps")


def test_all_earlier_fields_are_answered_at_once() -> None:
    said = (
        "Capabilities.takes_out and Capabilities.eager_waits and Capabilities.sliding_window are now "
        "server=ServerConventions(takes_out=True, eager_without_waits=False), windows=Windows(modes={'decode'})"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        Capabilities(  # type: ignore[call-arg]
            eager={"decode"},
            takes_out=True,
            eager_waits=True,
            sliding_window={"decode"},  # type: ignore[arg-type]
        )


def test_a_dict_changes_a_record_in_part() -> None:
    first = DECODE.with_changes(server={"takes_out": True}, windows={"modes": {"decode"}, "smallest": 2})
    second = first.with_changes(server={"takes_more_rows": True}, windows={"layers": "one"})
    assert second.server == ServerConventions(takes_out=True, takes_more_rows=True)
    assert second.windows == Windows({"decode"}, smallest=2, layers="one")  # type: ignore[arg-type]
    assert second.with_changes(server=ServerConventions()) == first.with_changes(
        server={"takes_out": False}, windows={"layers": "one"}
    )


def test_a_set_of_modes_stands_for_windows_and_changes_their_modes_alone() -> None:
    few = Capabilities(eager={"decode", "extend"}, windows=["extend"])  # type: ignore[arg-type]
    assert few.windows == Windows({"extend"})  # type: ignore[arg-type]
    narrow = few.with_changes(windows={"smallest": 3, "layers": "same", "in_trees": True})
    assert narrow.with_changes(windows={"decode"}).windows == Windows(
        {"decode"},
        smallest=3,
        layers="same",
        in_trees=True,  # type: ignore[arg-type]
    )
    assert narrow.with_changes(windows=()).windows.modes == frozenset()


@pytest.mark.parametrize(("name", "preset"), [("sglang", SGLANG), ("vllm", VLLM)])
def test_the_name_of_a_server_stands_for_its_conventions(name: str, preset: ServerConventions) -> None:
    assert Capabilities(eager={"decode"}, server=name).server is preset  # type: ignore[arg-type]
    assert DECODE.with_changes(server=name).server is preset
    wider = preset.with_changes(takes_none_kv=True)
    assert wider.takes_none_kv
    assert wider.with_changes(takes_none_kv=False) == preset


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"server": "vlm"}, "unknown server 'vlm'; did you mean 'vllm'?"),
        ({"server": 5}, "expected ServerConventions(...), or a dict of its fields, got 5"),
        ({"server": Requires()}, "expected ServerConventions(...), or a dict of its fields, got Requires("),
        ({"server": {"takes_outs": True}}, "unknown capability 'takes_outs'; did you mean 'takes_out'?"),
        ({"server": {"takes_out": "yes"}}, "ServerConventions.takes_out must be True or False, got 'yes'"),
        ({"server": {"overlap_scheduling": 1}}, "ServerConventions.overlap_scheduling must be True or False, got 1"),
        ({"windows": "decode"}, "Windows.modes must be a set or list of values, got 'decode'; write {'decode'}"),
        ({"windows": {"decod"}}, "unknown modes 'decod'; did you mean 'decode'?"),
        ({"windows": {"smallest": -1}}, "Windows.smallest must be a whole number from 0 on, got -1"),
        ({"windows": {"layers": "all"}}, "unknown layers 'all' (known: any, one, same)"),
        ({"windows": 4}, "expected Windows(...), or a dict of its fields, got 4"),
        ({"takes_outs": True}, "unknown capability 'takes_outs'; did you mean 'server.takes_out'?"),
        ({"sliding_windows": True}, "unknown capability 'sliding_windows'; did you mean 'windows'?"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("changes", [False, True])
def test_a_record_that_cannot_be_is_refused(given: dict[str, Any], message: str, changes: bool) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        DECODE.with_changes(**given) if changes else Capabilities(eager={"decode"}, **given)  # type: ignore[arg-type]


def test_what_is_no_earlier_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match=r"Capabilities has no 'takes_all'$"):
        _ = DECODE.takes_all
    assert not hasattr(DECODE, "__wrapped__")

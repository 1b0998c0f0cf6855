"""Records in ``Capabilities``: how they are given and changed, and how a wrong spelling is answered."""

from __future__ import annotations

import re
from typing import Any

import pytest

from attn_testkit.contract import SGLANG, VLLM, Capabilities, Requires, ServerConventions, Windows

DECODE = Capabilities(eager={"decode"})  # type: ignore[arg-type]


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
        ({"takes_out": True}, "unknown capability 'takes_out'; did you mean 'server.takes_out'?"),
        ({"takes_outs": True}, "unknown capability 'takes_outs'; did you mean 'server.takes_out'?"),
        ({"sliding_windows": True}, "unknown capability 'sliding_windows'; did you mean 'windows'?"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("changes", [False, True])
def test_a_record_that_cannot_be_is_refused(given: dict[str, Any], message: str, changes: bool) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        DECODE.with_changes(**given) if changes else Capabilities(eager={"decode"}, **given)  # type: ignore[arg-type]

"""The page of capabilities is by group, with every field in the order of the code, and its defaults are the code's."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

import pytest
from transcript import ROOT

from attn_testkit.contract import SGLANG, VLLM, Capabilities, Requires, ServerConventions, Windows

PAGE = (ROOT / "docs" / "reference" / "capabilities.md").read_text()
GROUPS = {
    "Modes": ["eager", "graph"],
    "Heads": ["families", "gqa_ratios", "head_dims", "mla_rope_dims", "heads_by_layer"],
    "Numbers": ["dtypes", "matmul_dtype", "q_scale", "fp32_products", "new_rows_as_given"],
    "Pool": ["kv_dtypes", "page_sizes", "kv_layouts", "kv_groups"],
    "Windows and options of a layer": ["windows", "any_scaling", "logit_cap", "sinks", "non_causal"],
    "Bounds": ["max_q_rows", "max_extend_tokens", "max_topk", "max_draft_branches", "max_context_len",
               "kernel_changes_at"],
    "Conventions of servers": ["server"],
    "Promises": ["deterministic", "batch_invariant", "lse"],
    "Requirements": ["needs_cpu_seq_lens", "finite_page_tails", "requires", "mode_requires"],
}  # fmt: skip


def tables(heading: str) -> list[list[list[str]]]:
    """The rows of each table under a heading, their heads left out."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    found = []
    for block in section.split("\n\n"):
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines() if line[:1] == "|"]
        if rows:
            found.append(rows[2:])
    return found


def defaults(of: type[Any]) -> list[tuple[str, object]]:
    return [(f.name, f.default_factory() if f.default_factory is not MISSING else f.default) for f in fields(of)]


def read(cell: str) -> object:
    if cell == "required":
        return MISSING
    names = {"Requires": Requires, "ServerConventions": ServerConventions, "Windows": Windows}
    return eval(cell.strip("`"), names)


def test_groups_are_the_headings_in_the_order_of_the_fields() -> None:
    assert [name for names in GROUPS.values() for name in names] == [f.name for f in fields(Capabilities)]
    headings = [line.removeprefix("## ") for line in PAGE.splitlines() if line.startswith("## ")]
    assert headings == [*GROUPS, "Earlier names"]
    for heading, names in GROUPS.items():
        assert [row[0] for row in tables(heading)[0]] == [f"`{name}`" for name in names]


@pytest.mark.parametrize(
    ("record", "rows"),
    [
        (Capabilities, [row for heading in GROUPS for row in tables(heading)[0]]),
        (Windows, tables("Windows and options of a layer")[1]),
        (ServerConventions, tables("Conventions of servers")[1]),
    ],
)
def test_every_field_has_a_row_with_its_default(record: type[Any], rows: list[list[str]]) -> None:
    assert [(row[0].strip("`"), read(row[1])) for row in rows] == defaults(record)


@pytest.mark.parametrize(("column", "preset"), [(2, SGLANG), (3, VLLM)])
def test_presets_are_the_default_but_for_what_their_column_says(column: int, preset: ServerConventions) -> None:
    said = {row[0].strip("`"): read(row[column]) for row in tables("Conventions of servers")[1] if row[column]}
    assert said, "each differs in something"
    assert ServerConventions(**said) == preset  # type: ignore[arg-type]

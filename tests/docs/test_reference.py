"""``ci/reference.py`` writes a page for each part of the reference, and every part of the contract has a text."""

from __future__ import annotations

import importlib
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import MISSING, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pages import generated
from transcript import ROOT

from attn_testkit.cli import all_commands
from attn_testkit.contract import (
    SGLANG,
    VLLM,
    AttentionBackend,
    Capabilities,
    CrossAttention,
    ForwardBatch,
    ForwardMode,
    Indexer,
    KernelPlan,
    LogSumExp,
    ServerConventions,
    Spans,
    Sparse,
    Windows,
)

CI = ROOT / "ci"


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``ci/reference.py``."""
    monkeypatch.syspath_prepend(str(CI))
    return importlib.import_module("reference")


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``ci/reference_text.py``."""
    monkeypatch.syspath_prepend(str(CI))
    return importlib.import_module("reference_text")


def section(page: str, heading: str) -> str:
    """What follows a heading, up to the next one of its level."""
    level = heading.split(" ")[0]
    return re.split(rf"^{level} ", page.split(f"{heading}\n", 1)[1], maxsplit=1, flags=re.M)[0]


def test_the_program_writes_each_page_and_deletes_what_was_there(
    reference: ModuleType, text: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "old.md").touch()
    text.write(reference.pages(), tmp_path)
    written = {path.relative_to(tmp_path).as_posix(): path for path in tmp_path.rglob("*") if path.is_file()}
    assert {name: path.read_text() for name, path in written.items()} == generated()


def test_a_docstring_that_changes_changes_its_page(reference: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Capabilities, "__doc__", "Another text.")
    other = reference.pages()
    assert [name for name, page in generated().items() if other[name] != page] == ["reference/capabilities.md"]


RECORDS = [Capabilities, Windows, Spans, CrossAttention, ServerConventions, LogSumExp, Sparse]


@pytest.mark.parametrize("cls", [*RECORDS, ForwardBatch])
def test_every_field_of_the_contract_has_a_text(text: ModuleType, cls: type[Any]) -> None:
    found = {each.name: each.text for each in text.attributes(cls)}
    assert list(found) == [field.name for field in fields(cls)]
    assert [name for name, words in found.items() if not words.endswith(".")] == []


def test_every_hook_and_every_member_of_a_plan_is_on_its_page() -> None:
    hooks = generated()["reference/hooks.md"]
    assert [n for n in vars(AttentionBackend) if n[0] != "_" and f"`{n}`" not in hooks] == []
    plan = generated()["reference/kernel-plan.md"]
    assert [name for name in dir(KernelPlan) if name[0] != "_" and f"| `{name}` |" not in plan] == []


RECORDS = {field.default_factory for field in fields(Capabilities) if isinstance(field.default_factory, type)} - {
    dict
} | {LogSumExp, Sparse, Indexer}


def test_every_record_of_capabilities_has_a_section_with_its_fields_in_order() -> None:
    page = generated()["reference/capabilities.md"]
    assert sorted(re.findall(r"^## `(\w+)`$", page, re.M)) == sorted(each.__name__ for each in RECORDS)
    for record in RECORDS:
        names = [field.name for field in fields(record)]
        assert re.findall(r"^### `(\w+)`$", section(page, f"## `{record.__name__}`"), re.M) == names


@pytest.mark.parametrize("cls", sorted({Capabilities, *RECORDS}, key=str))
def test_the_page_has_the_defaults_of_the_code(cls: type[Any]) -> None:
    page = generated()["reference/capabilities.md"]
    if cls is not Capabilities:
        page = section(page, f"## `{cls.__name__}`")
    names = {each.__name__: each for each in RECORDS}
    for field in fields(cls):
        line = section(page, f"### `{field.name}`").strip().splitlines()[0]
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if default is MISSING:
            assert line.endswith("Required.")
        else:
            assert eval(line.partition(" Default: `")[2].removesuffix("`."), names) == default, field.name


@pytest.mark.parametrize(("name", "preset"), [("SGLANG", SGLANG), ("VLLM", VLLM)])
def test_presets_are_the_default_with_the_fields_of_their_line(name: str, preset: ServerConventions) -> None:
    page = generated()["reference/capabilities.md"]
    (line,) = re.findall(rf"^\* `{name}`.*$", page, re.M)
    written = re.findall(r"`(\w+=[^`]+)`", line.partition(": ")[2])
    assert written, "each differs in something"
    assert eval(f"ServerConventions({', '.join(written)})", {"ServerConventions": ServerConventions}) == preset


def test_every_command_has_its_section_with_each_option() -> None:
    page = generated()["reference/command-line.md"]
    for name, command in all_commands().items():
        shown = section(page, f"## {name}")
        options = [
            each for each in command.params if each.param_type_name == "option" and not getattr(each, "hidden", 0)
        ]
        assert [each.opts[-1] for each in options if f"{each.opts[-1]}" not in shown] == []


def test_a_table_of_a_docstring_becomes_a_table_and_a_line_without_a_first_cell_continues_the_row(
    text: ModuleType,
) -> None:
    source = (
        "Before.\n\n===== ======\nname  text\n===== ======\n``a`` one\n      more\nb     t|o\n===== ======\n\nAfter."
    )
    lines = [line for line in text.markdown(source).splitlines() if line]
    assert lines == ["Before.", "| name | text |", "|---|---|", "| `a` | one more |", "| b | t\\|o |", "After."]


def test_a_block_of_code_becomes_a_fence(text: ModuleType) -> None:
    found = text.markdown("Do this::\n\n    a = ``b``\n\nThen ``c``.")
    assert "```python\n" in found
    assert found.endswith("Then `c`.")


def test_each_mode_has_a_picture_that_keeps_the_rules_of_the_mode(reference: ModuleType) -> None:
    assert [each.mode for each in reference.PICTURES] == [mode.value for mode in ForwardMode]
    for each in reference.PICTURES:
        mode = ForwardMode(each.mode)
        for request in each.requests:
            all_tokens = request.prefix + len(request.new)
            prefix_only = mode.is_target_verify() or mode.is_draft_decode()
            assert request.counted == (request.prefix if prefix_only else all_tokens)
            if not mode.is_draft_decode():
                assert [max(sees) for _, sees in request.rows] == list(range(len(request.new))), (
                    "a row sees itself last"
                )
            if not prefix_only:
                assert [len(sees) for _, sees in request.rows] == list(range(1, len(request.new) + 1)), "causal"
        rows = [int(label.split()[1]) for request in each.requests for label, _ in request.rows]
        assert rows == list(range(len(rows))), "rows are packed"
        root = ElementTree.fromstring(reference.picture(each))
        cells = [rect for rect in root.iter("{http://www.w3.org/2000/svg}rect") if rect.get("class") == "new"]
        assert len(cells) == sum(len(request.new) for request in each.requests) + 1, "one is in the legend"

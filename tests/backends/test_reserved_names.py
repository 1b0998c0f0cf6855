"""Attributes of an author may have any name: base classes keep theirs under a prefix, and hiding one is refused."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
from in_process import check_backend
from short_names import HasShortMethods, KeepsShortNames

import attn_testkit.contract.backend
import attn_testkit.contract.kernel_backend
from attn_testkit.catalogue.tiers import generate
from attn_testkit.contract import AttentionBackend, BackendContext, KernelBackend, LegacyGraphHooks
from attn_testkit.examples.minimal import MinimalBackend

BASES = (AttentionBackend, KernelBackend, LegacyGraphHooks)


@pytest.mark.parametrize("backend", [KeepsShortNames, HasShortMethods])
def test_an_adapter_with_names_of_its_own_passes_in_every_mode_and_in_graphs(backend: type[AttentionBackend]) -> None:
    modes = sorted(backend.capabilities.graph)
    smallest = [
        min(generate(backend.capabilities, mode, "smoke"), key=lambda case: sum(case.prefixes)) for mode in modes
    ]
    found = check_backend(backend, device="cpu", cases=[case.id for case in smallest], executions=["graph"])
    assert found.ok, found
    assert {row.mode for row in found if row.mode} == set(modes)
    assert len(modes) > 3


@pytest.mark.parametrize("module", [attn_testkit.contract.backend, attn_testkit.contract.kernel_backend])
def test_a_base_class_has_no_private_name_without_the_prefix(module: object) -> None:
    """Neither among its methods nor among what it sets."""
    tree = ast.parse(inspect.getsource(module))  # type: ignore[arg-type]
    for kind in (
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in {b.__name__ for b in BASES}
    ):
        names = [node.name for node in kind.body if isinstance(node, ast.FunctionDef)]
        names += [n.attr for n in ast.walk(kind) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "self"]
        assert "forward" in names or kind.name == "LegacyGraphHooks"
        assert not [name for name in names if re.match(r"_(?!_|kit_)", name)], kind.name


@pytest.mark.parametrize("base", [AttentionBackend, KernelBackend, MinimalBackend])
@pytest.mark.parametrize("name", ["_kit_step", "_kit_anything", "context"])
def test_a_class_that_hides_a_reserved_name_is_refused_where_it_is_written(name: str, base: type) -> None:
    kept_by = "AttentionBackend" if base is AttentionBackend else "KernelBackend"
    for value in (None, 3, lambda self: None, property(lambda self: None)):
        with pytest.raises(TypeError) as refused:
            type("Mine", (base,), {name: value})
        assert f"Mine.{name} hides a name under which {kept_by} keeps" in str(refused.value)
        assert "give it another name" in str(refused.value)


def test_annotations_subclasses_of_subclasses_and_other_names_are_not_refused() -> None:
    class Annotated(MinimalBackend):
        context: BackendContext
        _kitchen = 1

    class Further(Annotated, LegacyGraphHooks):
        contexts = 2

    with pytest.raises(TypeError, match=r"Again\._kit_mask hides a name"):
        type("Again", (Further,), {"_kit_mask": None})


def test_the_lines_of_the_readme_still_make_a_backend() -> None:
    readme = (Path(__file__).parent.parent.parent / "README.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "(KernelBackend)" in block)
    made: dict[str, type[AttentionBackend]] = {}
    exec(compile(code, "readme", "exec"), made)
    assert issubclass(made["MyBackend"], KernelBackend)
    assert not inspect.isabstract(made["MyBackend"])

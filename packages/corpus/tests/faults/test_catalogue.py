"""The catalogue itself: complete, well-formed, importable from the command line, and built on healthy parents alone."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import pytest

from attn_testkit.checks import CHECKS
from attn_testkit.contract import AttentionBackend, Execution, ForwardMode
from attn_testkit_corpus.audit.show import audit_page
from attn_testkit_corpus.audit.verdicts import Audit, FaultVerdict, Settings
from attn_testkit_corpus.faults import all_controls, all_faults, catalogue
from attn_testkit_corpus.faults.catalogue import CLASSES, CorpusEntry, bug, control, fault, helper
from attn_testkit_corpus.faults.parent import PlannedBackend

Register = Callable[[type[AttentionBackend]], type[AttentionBackend]]
NOT_OF_THE_BODY = {"__module__", "__doc__", "__firstlineno__", "__static_attributes__", "__abstractmethods__",
                   "_abc_impl", "capabilities"}  # fmt: skip
"""What a class that changes nothing but its capabilities holds."""


def test_every_class_has_faults() -> None:
    assert {entry.bug_class for entry in all_faults()} == set(CLASSES)


def test_every_spec_names_the_class_that_registered() -> None:
    for entry in (*all_faults(), *all_controls()):
        module, _, name = entry.spec.partition(":")
        assert getattr(importlib.import_module(module), name) is entry.backend


def test_every_check_is_the_expected_one_of_a_fault() -> None:
    assert set(CHECKS) == {entry.checks[0] for entry in all_faults()}


def test_the_file_of_a_fault_gives_its_class_of_bug() -> None:
    for entry in all_faults():
        name = Path(importlib.import_module(entry.backend.__module__).__file__ or "").name
        assert name.startswith(f"{entry.bug_class.lower()}_")


def nearest_parent(backend: type[AttentionBackend]) -> type[AttentionBackend]:
    broken = {entry.backend for entry in all_faults()}
    return next(base for base in backend.__mro__[1:] if base not in broken)


def test_what_a_fault_breaks_is_a_healthy_parent_and_a_control_runs_that_parent_as_it_is() -> None:
    as_they_are = {entry.backend.__base__ for entry in all_controls() if not set(vars(entry.backend)) - NOT_OF_THE_BODY}
    assert {nearest_parent(entry.backend) for entry in all_faults()} <= as_they_are


def test_no_fault_and_no_control_is_made_of_an_adapter() -> None:
    for entry in (*all_faults(), *all_controls()):
        rooms = {base.__module__.split(".")[1] for base in entry.backend.__mro__ if base.__module__.startswith("attn_")}
        assert rooms == {"faults", "contract"}, entry.spec


def test_what_is_wrong_is_written_once_in_the_docstring_of_the_class_and_the_page_shows_it() -> None:
    found = Audit(Settings())
    for entry in all_faults():
        assert entry.about.endswith("."), entry.slug
        found.faults.append(FaultVerdict(entry.slug, entry.bug_class, entry.source, entry.checks))
    page = audit_page(found)
    assert (
        "Replay packs query offsets by accepted counts; the captured kernel keeps the fixed stride of capture." in page
    )
    assert all(entry.about.endswith(".") for entry in all_controls())


def test_a_docstring_of_a_parent_is_no_mechanism_and_no_reason() -> None:
    bare = type("Bare", (PlannedBackend,), {"__module__": "attn_testkit_corpus.faults.a_query_offsets"})
    assert CorpusEntry("fault", "bare", bare).about == ""
    with pytest.raises(ValueError, match="docstring of its class says what is wrong or unusual, and is missing"):
        control("bare")(bare)


def broken(**changes: object) -> type[AttentionBackend]:
    """A class as a module of class A would define it."""
    body = {"__module__": "attn_testkit_corpus.faults.a_query_offsets", "__doc__": "It is wrong."}
    return type(str(changes.get("__qualname__", "Broken")), (PlannedBackend,), {**body, **changes})


@pytest.mark.parametrize(
    ("changes", "backend", "message"),
    [
        ({"checks": ("matches-orakle",)}, broken(), "unknown checks"),
        ({"checks": ()}, broken(), "at least one check"),
        ({}, broken(__module__="attn_testkit_corpus.faults.z_nothing"), "begins with no letter of A, B"),
        ({}, broken(__module__="attn_testkit_corpus.faults.parent"), "begins with no letter of A, B"),
        ({}, broken(__doc__=None), "says what is wrong or unusual, and is missing"),
        ({"slug": "Not A Slug"}, broken(), "lower-case words"),
        ({"slug": "qlens-packed-vs-uniform-stride"}, broken(), "taken"),
        ({"modes": ()}, broken(), "none of its modes"),
        ({"source": ""}, broken(), "source is missing"),
    ],
)
def test_an_entry_that_cannot_be_audited_is_refused(
    changes: dict[str, object], backend: type[AttentionBackend], message: str
) -> None:
    all_faults()
    entry: dict[str, object] = {
        "slug": "a-slug",
        "source": "general",
        "modes": (ForwardMode.DECODE,),
        "checks": ("matches-oracle",),
    }
    with pytest.raises(ValueError, match=message):
        fault(**{**entry, **changes})(backend)  # type: ignore[arg-type]


def renamed(self: PlannedBackend) -> None:
    """A hook that no parent has."""


@pytest.mark.parametrize(
    "kind",
    [lambda body: body, property, cached_property, staticmethod, classmethod],
    ids=["plain", "property", "cached", "static", "class"],
)
@pytest.mark.parametrize(
    "register",
    [fault("general", "finite"), control(), bug(0, "a #1", "extend-mha2-d64-bf16-p16-k9-n3a3-shuffled-gauss-b1prod")],
    ids=["fault", "control", "bug"],
)
def test_a_method_that_overrides_nothing_is_refused_at_import_unless_it_is_marked_as_new(
    register: Register, kind: Callable[[object], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "_HELPERS", set())
    monkeypatch.setattr(catalogue, "_CORPUS", {})
    monkeypatch.setattr(
        importlib.import_module("attn_testkit_corpus.faults.a_query_offsets"), "BrokenWithoutBug", None, False
    )
    with pytest.raises(ValueError, match="no parent has plan_of_splits: correct the name"):
        register(broken(plan_of_splits=kind(renamed)))
    register(broken(plan_splits=kind(renamed)))
    helper(renamed)
    register(broken(plan_of_splits=kind(renamed)))


def test_the_class_names_an_entry_and_runs_it_everywhere_unless_it_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    corpus: dict[str, CorpusEntry] = {}
    monkeypatch.setattr(catalogue, "_CORPUS", corpus)
    fault("general", "finite matches-oracle")(broken(__qualname__="KeepsFP8OfTheCapture"))
    (plain,) = corpus.values()
    assert (plain.slug, plain.checks) == ("keeps-fp8-of-the-capture", ("finite", "matches-oracle"))
    assert (plain.modes, plain.executions) == (tuple(ForwardMode), tuple(Execution))
    fault("general", "finite", "a hint", modes="decode extend", executions="graph", slug="other")(broken())
    control("another")(broken())
    control()(broken(__qualname__="SlopesByRank"))
    assert [*corpus][1:] == ["other", "another", "slopes-by-rank"]
    other = corpus["other"]
    assert (other.modes, other.executions) == ((ForwardMode.DECODE, ForwardMode.EXTEND), (Execution.GRAPH,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"check": "matches-orakle"}, "unknown checks"),
        ({"execution": "graph"}, "none of its modes"),
        ({"source": ""}, "source is missing"),
    ],
)
def test_a_field_bug_that_cannot_be_audited_is_refused(changes: dict[str, str], message: str) -> None:
    entry = {"in_set": 0, "source": "sglang #1", "case": "extend-mha2-d64-bf16-p16-k9-n3a3-shuffled-gauss-b1prod"}
    declared = PlannedBackend.capabilities.with_changes(graph={"decode"})
    with pytest.raises(ValueError, match=message):
        bug(**{**entry, **changes})(broken(capabilities=declared))


def test_every_control_stands_in_a_file_of_controls_which_are_all_that_is_imported_to_list_them() -> None:
    files = {entry.backend.__module__.rpartition(".")[2] for entry in all_controls()}
    assert {name for name in files if not name.startswith("controls")} == set()

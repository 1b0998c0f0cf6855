"""Writes the pages that come from the code: python ci/reference.py FOLDER

Each page is made of docstrings, of click's parameters, of pytest's options, of the schema of results files, of the
glossary, of the texts of checks, or of submissions. No page is committed: ``ci/docs.sh`` makes them for the site, in
build/pages.
"""

from __future__ import annotations

import ast
import copy
import inspect
import json
import posixpath
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import click
from check_pages import check_pages
from contract_page import contract_page
from reference_pictures import PICTURES, picture
from reference_text import (
    attribute_sections,
    attribute_table,
    attributes,
    function_section,
    markdown,
    method_sections,
    methods,
    write,
)

import attn_testkit
from attn_testkit.cases import traits
from attn_testkit.cases.explained import all_entries, entry_of
from attn_testkit.cases.features.server.table import SERVER_VARIANTS
from attn_testkit.cli import all_commands, commands
from attn_testkit.contract import (
    ROW_FORMATS,
    SGLANG,
    VLLM,
    AttentionBackend,
    AttentionLayer,
    BackendContext,
    Bounds,
    Capabilities,
    Compressor,
    CompressorBackend,
    CompressorContext,
    CompressorLayer,
    CompressorPool,
    CrossAttention,
    EncoderOnly,
    ForwardBatch,
    HeadShapes,
    Indexer,
    IndexPool,
    KernelBackend,
    KernelPlan,
    KVGroup,
    KVPool,
    KVPools,
    LayerOptions,
    LegacyGraphHooks,
    LogSumExp,
    Needs,
    Precision,
    Promises,
    Requires,
    ServerConventions,
    Snapshot,
    Spans,
    Sparse,
    State,
    StateBackend,
    StateContext,
    StateInput,
    StateLayer,
    StatePool,
    Windows,
    index_scales,
)
from attn_testkit.contract.batch import DraftExtendInput, TreeMaskMode, VerifyInput, VerifyMask
from attn_testkit.contract.dialect import Dialect
from attn_testkit.contract.draft_decode import DraftDecodeInput
from attn_testkit.contract.kv_split import KVSplit
from attn_testkit.contract.layer import HeadShape
from attn_testkit.contract.modes import ForwardMode
from attn_testkit.contract.row_format import Plane
from attn_testkit.plugin import options as plugin_options
from attn_testkit.plugin.reporting import properties
from attn_testkit.results.case_result import CaseResult, Status
from attn_testkit.results.finding import Finding
from attn_testkit.results.run_header import RunHeader
from attn_testkit.submissions.matrix import matrix_page, read_folder
from attn_testkit_servers.fakes.all_refusals import LIMITS, all_refusals

ROOT = Path(__file__).resolve().parents[1]
HOME = "reference"
SYMBOLS = "[T, bs, N, S, K, Hq, Hk, D](glossary.md#symbols) are the symbols of all shapes."


def _page(title: str, *lines: str) -> str:
    return "\n".join([f"# {title}", "", *lines]).rstrip() + "\n"


def pages() -> dict[str, str]:
    """Path in ``docs/`` of each page and picture -> its text."""
    every = {
        "command-line.md": command_line(),
        "capabilities.md": capabilities(),
        "kernel-plan.md": kernel_plan(),
        "forward-batch.md": forward_batch(),
        "hooks.md": hooks(),
        "context.md": context(),
        "states.md": states(),
        "compressors.md": compressors(),
        "exclusions.md": exclusions(),
        "fakes.md": fakes(),
        "python-api.md": python_api(),
        "pytest.md": pytest_options(),
        "results-json.md": results_json(),
        "glossary.md": glossary(),
        **{f"rows-{each.mode}.svg": picture(each) for each in PICTURES},
    }
    matrix = {"evidence/matrix.html": matrix_page(*read_folder(ROOT / "docs" / "evidence" / "submissions"))}
    return {**{f"{HOME}/{name}": text for name, text in every.items()}, **check_pages(), **contract_page(), **matrix}


def glossary() -> str:
    """Every word of ids, texts and tables with its meaning, by group."""
    lines = [
        "The words of case ids, failures and tables, and their meaning. `attn-testkit explain WORD` prints an entry,",
        "and `attn-testkit explain --list` all words. Numbers in words are examples.",
    ]
    title = ""
    for entry in all_entries():
        if entry.group != title:
            title = entry.group
            lines += ["", f"## {title}", "", "| word | also | meaning |", "|---|---|---|"]
        also = ", ".join(entry.also)
        lines.append(f"| [{entry.word}]({posixpath.relpath(entry.page, HOME)}) | {also} | {entry.text} |")
    return _page("Glossary", *lines)


def command_line() -> str:
    lines = [
        "`attn-testkit COMMAND --help` prints what most users need. Data goes to stdout, everything else to stderr. "
        "[Exit codes](running.md#exit-codes) are the same for all commands.",
        "",
        *_options(commands),
        "| command | what it does |",
        "|---|---|",
        *(f"| [`{name}`](#{name.replace(' ', '-')}) | {_first_line(each)} |" for name, each in all_commands().items()),
        "",
    ]
    for name, each in all_commands().items():
        with click.Context(each, info_name=f"attn-testkit {name}") as ctx:
            usage = " ".join(each.get_usage(ctx).removeprefix("Usage: ").split())
        lines += [f"## {name}", "", *_paragraphs(each.help or ""), "```", usage, "```", "", *_options(each)]
        lines += ["```", textwrap.dedent(_examples(each)).strip(), "```", ""] if _examples(each) else []
    return _page("Command line", *lines)


def _first_line(command: click.Command) -> str:
    return " ".join((command.help or "").split("\n\n")[0].split())


def _paragraphs(text: str) -> list[str]:
    return [line for part in re.split(r"\n\s*\n", text.replace("\b", "")) for line in (" ".join(part.split()), "")]


def _examples(command: click.Command) -> str:
    return (command.epilog or "").replace("\b", "").replace("Examples:", "").strip("\n")


def _options(command: click.Command) -> list[str]:
    """A table of the arguments and options of a command."""
    rows = []
    with click.Context(command) as ctx:
        for param in command.params:
            # Help is one screen, and leaves out options that few need.
            each = copy.copy(param)
            each.hidden = False  # type: ignore[attr-defined]
            shown = each.get_help_record(ctx)
            if shown:
                rows.append(shown)
            elif isinstance(each, click.Argument):
                rows.append((each.make_metavar(ctx), getattr(each, "help", None) or ""))
    cells = [(_code(left), " ".join(right.split()).replace("|", "\\|").replace("<", "&lt;")) for left, right in rows]
    return (
        ["| option | meaning |", "|---|---|", *(f"| {left} | {right} |" for left, right in cells), ""] if rows else []
    )


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


def capabilities() -> str:
    """Entries, then the records in which they are declared."""
    presets = []
    for name, preset in (("SGLANG", SGLANG), ("VLLM", VLLM)):
        differs = {key: value for key, value in vars(preset).items() if value != getattr(ServerConventions(), key)}
        shown = ", ".join(f"`{key}={_value(value)}`" for key, value in differs.items())
        presets.append(f'* `{name}`, or `server="{name.lower()}"`: {shown}.')
    lines = [
        "```python",
        "from attn_testkit.contract import Capabilities",
        "```",
        "",
        markdown(_doc(Capabilities)),
        "",
        SYMBOLS,
        "",
        *attribute_sections(Capabilities),
        *(line for record in _RECORDS for line in _record(record, presets)),
    ]
    return _page("Capabilities", *lines)


_RECORDS = (
    HeadShapes, Precision, KVPools, Windows, LayerOptions, Spans, Sparse, Indexer, CrossAttention, EncoderOnly, Bounds,
    ServerConventions, Promises, LogSumExp, Needs, Requires,
)  # fmt: skip
"""Records of capabilities, in the order of the entries. ``State`` is on the page of states."""


def _record(record: type, presets: list[str]) -> list[str]:
    """Section of a record in which a backend declares what it can do."""
    differ = ["Presets differ from the defaults in these fields:", "", *presets, ""]
    return [
        f"## `{record.__name__}`",
        "",
        markdown(_doc(record)),
        "",
        *(differ if record is ServerConventions else ()),
        *attribute_sections(record),
    ]


def _value(value: object) -> str:
    if isinstance(value, frozenset):
        words = sorted(each.value if isinstance(each, ForwardMode) else each for each in value)
        return f"{{{', '.join(map(repr, words))}}}"
    return repr(value)


def _doc(thing: Any) -> str:
    return textwrap.dedent(f"    {thing.__doc__ or ''}").strip()


def kernel_plan() -> str:
    lines = [
        "The smaller interface: subclass `KernelBackend`, declare `capabilities`, and call your kernel in `run`. The "
        "kit prepares the plan.",
        "",
        SYMBOLS,
        "",
        "## `KernelBackend`",
        "",
        markdown(_doc(KernelBackend)),
        "",
        *_only(KernelBackend, ("run", "run_return_lse", "write_kv")),
        "## `KernelPlan`",
        "",
        markdown(_doc(KernelPlan)),
        "",
        "| member | meaning |",
        "|---|---|",
        *(f"| `{name}` | {_cell(text)} |" for name, text in _members(KernelPlan)),
        "",
    ]
    return _page("KernelBackend and KernelPlan", *lines)


def _only(cls: type[Any], names: tuple[str, ...]) -> list[str]:
    others = tuple(name for name, _, _ in methods(cls) if name not in names)
    return method_sections(cls, skip=others)


def _cell(text: str) -> str:
    return " ".join(markdown(text).split()).replace("|", "\\|")


def _members(cls: type[Any]) -> list[tuple[str, str]]:
    return [*((a.name, a.text) for a in attributes(cls) if a.text), *((n, t) for n, _, t in methods(cls))]


def forward_batch() -> str:
    rows = (
        ("decode", "1", "prefix + 1", "its request's keys"),
        ("target-verify", "N", "prefix", "the prefix, its ancestors in the tree, itself"),
        ("draft-extend", "1 to S + 1, ragged", "prefix + accepted", "the keys up to itself"),
        ("draft-extend-v2", "N", "prefix + N", "the keys up to itself"),
        ("extend", "1 and more, ragged", "prefix + new", "the keys up to itself"),
        ("draft-decode", "K per forward", "prefix", "the prefix and the tokens of its branch"),
    )
    lines = [
        "`ForwardBatch` describes one step. Its fields are the same in all modes; how many rows a request has, what "
        "`seq_lens` counts and what a row sees depend on the mode.",
        "",
        SYMBOLS,
        "",
        "| mode | rows per request | `seq_lens` | a row sees |",
        "|---|---|---|---|",
        *(f"| [`{m}`](#{m}) | {r} | {s} | {w} |" for m, r, s, w in rows),
        "",
    ]
    for each in PICTURES:
        lines += [
            f"## {each.mode}",
            "",
            each.caption,
            "",
            f"![Rows and slots of {each.mode}](rows-{each.mode}.svg)",
            "",
        ]
    lines += ["## Rules of all modes", "", *markdown(_doc(ForwardMode)).split("\n\n", 2)[2:], ""]
    text = markdown(_doc(ForwardBatch))
    lines += ["## `ForwardBatch`", "", *attribute_table(ForwardBatch)]
    lines += ["## The view at a replay", "", *text.split("\n\n", 1)[1:], ""]
    for cls in (VerifyInput, DraftExtendInput, DraftDecodeInput, VerifyMask):
        lines += [f"## `{cls.__name__}`", "", markdown(_doc(cls)), "", *attribute_table(cls)]
    lines += ["## `TreeMaskMode`", "", markdown(_doc(TreeMaskMode)), ""]
    return _page("ForwardBatch", *lines)


def hooks() -> str:
    lines = [
        "The larger interface: subclass `AttentionBackend` if your backend has its own metadata. Only `forward` is "
        "required. [A complete example](../tutorials/graph-hooks.md) has all hooks.",
        "",
        SYMBOLS,
        "",
        "## Order of calls",
        "",
        *markdown(_doc(AttentionBackend)).split("\n\n", 1)[1:],
        "",
        "## Class attributes",
        "",
        *attribute_table(AttentionBackend),
        "## Hooks",
        "",
        *method_sections(AttentionBackend),
        "## `LegacyGraphHooks`",
        "",
        markdown(_doc(LegacyGraphHooks)),
        "",
        *method_sections(LegacyGraphHooks, skip=("init_forward_metadata_out_graph",)),
    ]
    return _page("AttentionBackend and its hooks", *lines)


def context() -> str:
    lines = [
        "`self.context` is what a server knows when it constructs a backend: the KV pool, the request table, the "
        "layers, and the largest sizes.",
        "",
        SYMBOLS,
        "",
    ]
    for cls in (BackendContext, AttentionLayer, HeadShape, KVGroup, KVSplit, Dialect):
        lines += [f"## `{cls.__name__}`", "", markdown(_doc(cls)), "", *attribute_table(cls)]
        lines += _member_table(cls)
    lines += ["## `KVPool`", "", markdown(_doc(KVPool)), "", *method_sections(KVPool, skip=("pieces",))]
    lines += ["", "## `IndexPool`", "", markdown(_doc(IndexPool)), "", *method_sections(IndexPool)]
    lines += ["", *function_section("index_scales", index_scales), *_row_formats()]
    return _page("BackendContext, layers, KV pool", *lines)


def _member_table(cls: type[Any], skip: tuple[str, ...] = ()) -> list[str]:
    """Methods and properties of a class that have a text."""
    members = [(name, text) for name, _, text in methods(cls) if text and name not in skip]
    rows = [f"| `{name}` | {_cell(text)} |" for name, text in members]
    return ["| method or property | meaning |", "|---|---|", *rows, ""] if members else []


def _row_formats() -> list[str]:
    """A table of the formats of rows that hold scales."""
    lines = [
        "## Formats with scales",
        "",
        "Rows of a KV pool whose format is one of these hold numbers and scales. "
        "[Use a KV pool with scales](../how-to/kv-formats.md) shows how to read and write them.",
        "",
        "| `kv_dtypes` | planes of a row | scales are stored | scale of the layer | rows of | model's dtype |",
        "|---|---|---|---|---|---|",
    ]
    for name, each in ROW_FORMATS.items():
        planes = ", ".join(_plane(plane) for plane in each.planes)
        own = any(plane.is_scales for plane in each.planes)
        there = "after the numbers of a page" if each.page_multiple else "in memory of their own"
        place = (there if each.apart else "in the row") if own else "in the layer"
        kind = "MLA" if each.latent else "K and V"
        dtypes = ", ".join(sorted(each.dtypes))
        lines.append(f"| `{name}` | {planes} | {place} | {each.layer_scale} | {kind} | {dtypes} |")
    return [*lines, ""]


def _plane(plane: Plane) -> str:
    tile = {0: " per row", 1: ""}.get(plane.tile, f" per {plane.tile} numbers")
    return f"{plane.name} {str(plane.dtype).removeprefix('torch.')}{tile}"


def states() -> str:
    """The interface of layers that keep a recurrent state, and the memory of states."""
    lines = [
        "A layer such as GDN, KDA, Mamba2, Lightning or RWKV-7 keeps one recurrent state per request, and one of "
        "log-linear attention keeps one per level. "
        "Subclass `StateBackend`, declare `Capabilities(state=State(...))`, and update the states in `forward`. "
        "[Linear attention](../tutorials/linear-attention.md) is a tutorial with decode and a chunked prefill, and "
        "[how-to](../how-to/recurrent-states.md) describes drafts, prefix caches and hybrid models.",
        "",
        SYMBOLS,
        "",
        "| what you need | where it is |",
        "|---|---|",
        "| the memory of states | `self.context.state.pool`: `temporal(layer_id)`, `conv(layer_id)`, "
        "`scratch(layer_id)` |",
        "| the slot of each request | `batch.state.indices` |",
        "| the rows of each request in a prompt | `batch.extend_seq_lens` on the device, `batch.extend_seq_lens_cpu` "
        "on the host |",
        "| whether a request continues a state | `batch.state.has_initial_state` |",
        "| sizes and parameters of a layer | the `StateLayer` that `forward` is given |",
        "",
        "## `StateBackend`",
        "",
        markdown(_doc(StateBackend)),
        "",
        *method_sections(StateBackend),
        "## `StateLayer`",
        "",
        markdown(_doc(StateLayer)),
        "",
        *attribute_table(StateLayer),
        *_member_table(StateLayer, skip=("to",)),
        "## `StateInput`",
        "",
        markdown(_doc(StateInput)),
        "",
        *attribute_table(StateInput),
        "## `StateContext`",
        "",
        markdown(_doc(StateContext)),
        "",
        *attribute_table(StateContext),
        "## `StatePool`",
        "",
        markdown(_doc(StatePool)),
        "",
        *_only(StatePool, ("conv", "temporal", "scratch")),
        "## `Snapshot`",
        "",
        markdown(_doc(Snapshot)),
        "",
        *attribute_table(Snapshot),
        *_record(State, []),
    ]
    return _page("States", *lines)


def compressors() -> str:
    """The interface of layers that compress keys, and their memory."""
    lines = [
        "A layer of DeepSeek V4 makes one row of each group of tokens. Subclass `CompressorBackend`, declare "
        "`Capabilities(compressor=Compressor(...))`, and make the rows in `compress`. "
        "[How-to](../how-to/compressors.md) has an example.",
        "",
        SYMBOLS,
        "",
    ]
    for each, members in (
        (CompressorBackend, method_sections(CompressorBackend)),
        (CompressorLayer, [*attribute_table(CompressorLayer), *_member_table(CompressorLayer, skip=("to",))]),
        (CompressorContext, attribute_table(CompressorContext)),
        (CompressorPool, _only(CompressorPool, ("get_states", "get_rows"))),
    ):
        lines += [f"## `{each.__name__}`", "", markdown(_doc(each)), "", *members]
    return _page("Compressors", *lines, *_record(Compressor, []))


def exclusions() -> str:
    """Features that no case combines, each pair with its reason."""
    pairs = [(_named(one), _named(other), why) for one, other, why in traits.exclusions()]
    lines = [
        "No case combines two features of one row, and a case id that does is refused with the reason. Names in code "
        "are [words of case ids](case-ids.md).",
        "",
        "| feature | excludes | reason |",
        "|---|---|---|",
        *(f"| {one} | {other} | {_cell(why)} |" for one, other, why in pairs),
        "",
    ]
    return _page("What excludes what", *lines)


def fakes() -> str:
    """What fakes of kernels keep, cannot show and refuse."""
    lines = [
        "Without a GPU, torch code computes in the place of compiled kernels. Such a *fake* refuses what the kernel "
        "refuses, and nothing else; the package's own Python in front of it runs unchanged, with its own checks. "
        "No fake shows rounding inside a kernel, reads past a buffer, or speed. "
        "`python ci/vendor_agreement.py --refusals` tries every line below on the kernel.",
        "",
        "| fake | keeps between calls | cannot show |",
        "|---|---|---|",
        *(f"| {each.fake} | {_cell(each.keeps)} | {_cell(each.cannot_show)} |" for each in LIMITS),
        "",
    ]
    for entry in all_refusals():
        lines += [f"## {entry.entry}", "", "| refused | error | source |", "|---|---|---|"]
        for check in entry.checks:
            text = f"`{check.text.strip()}`" if check.text else "without a text"
            lines.append(f"| {_cell(check.tried)} | {text} | `{check.source}` |")
        lines.append("")
    return _page("Fakes of kernels", *lines)


def _named(trait: str) -> str:
    """A trait; one that is the word of a server variant in code."""
    return f"`{trait}`" if trait in SERVER_VARIANTS else trait


def python_api() -> str:
    from attn_testkit.plugin.own_tests import conformance_cases
    from attn_testkit.reports.outcome import NotConformant, Results
    from attn_testkit.running.check_backend import assert_conformant, check_backend

    lines = [f"`import attn_testkit` gives {_listed(sorted(set(attn_testkit.__all__) - {'__version__'}))}.", ""]
    for function in (check_backend, assert_conformant, conformance_cases):
        lines += function_section(function.__name__, function)
    lines += ["## Arguments", "", *_options_of_a_run()]
    for cls in (Results, NotConformant):
        lines += [f"## `{cls.__name__}`", "", markdown(_doc(cls)), ""]
        shown = [(name, text) for name, _, text in methods(cls) if text]
        if shown:
            lines += ["| member | meaning |", "|---|---|", *(f"| `{n}` | {_cell(t)} |" for n, t in shown), ""]
    for plain in (CaseResult, Finding, RunHeader):
        lines += [f"## `{plain.__name__}`", "", markdown(_doc(plain)), "", *attribute_table(plain)]
    lines += ["## `Status`", "", markdown(_doc(Status)), "", "| value | meaning |", "|---|---|"]
    lines += [f"| `{name}` | {_cell(text)} |" for name, text in _enum_members(Status)]
    return _page("Python API", *lines)


def _options_of_a_run() -> list[str]:
    """A table of the options of a run in Python, on the command line and in pytest; which are lacking, and why."""
    from attn_testkit.running.planning.request import OPTIONS

    lines = ["| argument | default | `attn-testkit run` | pytest | meaning |", "|---|---|---|---|---|"]
    for name, option in OPTIONS.items():
        if name == "backends":
            continue
        by_reason: dict[str, list[str]] = {}
        for front_end, reason in option.lacking.items():
            by_reason.setdefault(reason, []).append(f"`{front_end}`")
        lacking = "".join(f" Not in {', '.join(names)}: {reason}." for reason, names in by_reason.items())
        places = [
            f"`{dashes}{option.flag}`" if front_end not in option.lacking else ""
            for front_end, dashes in (("run", "--"), ("pytest", "--attn-"))
        ]
        lines.append(
            f"| `{name}` | `{option.default!r}` | {' | '.join(places)} | {_cell(option.help_with_unit + lacking)} |"
        )
    return [*lines, ""]


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names[:-1]) + f" and `{names[-1]}`"


def _enum_members(cls: type[Any]) -> list[tuple[str, str]]:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    found: list[tuple[str, str]] = []
    for each in node.body[1:]:
        if isinstance(each, ast.Assign):
            found.append((ast.literal_eval(each.value), ""))
        elif isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) and found:
            found[-1] = (found[-1][0], str(each.value.value))
    return found


class _Group:
    """The part of pytest's parser that the plugin uses."""

    def __init__(self) -> None:
        self.options: list[tuple[str, dict[str, Any]]] = []
        self.ini: list[tuple[str, str, str]] = []

    def getgroup(self, *_: str) -> _Group:
        return self

    def addoption(self, name: str, **words: Any) -> None:
        self.options.append((name, words))

    def addini(self, name: str, text: str, **words: Any) -> None:
        self.ini.append((name, text, str(words.get("default", ""))))


def pytest_options() -> str:
    group = _Group()
    plugin_options.add(group)  # type: ignore[arg-type]
    finding = Finding("finite", "headline")
    result = CaseResult("SPEC", "decode", "eager", "CASE", Status.FAILED, (finding,), margin=1.0, reason="reason")
    lines = [
        "The plugin is loaded with the package. [Use it in pytest](../how-to/pytest.md) shows the usual ways.",
        "",
        "## Options",
        "",
        "| option | meaning |",
        "|---|---|",
        *(
            f"| {_code(name + ('=' + words['metavar'] if 'metavar' in words else ''))} | {_cell(words['help'])} |"
            for name, words in group.options
        ),
        "",
        "## Ini values",
        "",
        "| name | meaning | default |",
        "|---|---|---|",
        *(f"| `{name}` | {_cell(text)} | {f'`{default}`' if default else ''} |" for name, text, default in group.ini),
        "",
        "## Fixtures and marks",
        "",
        "| name | meaning |",
        "|---|---|",
        *(f"| `{name}` | {_cell(text)} |" for name, text in _fixtures()),
        "",
        "## JUnit properties",
        "",
        "Each test has these properties in the file of `--junitxml`:",
        "",
        ", ".join(f"`{name}`" for name, _ in properties(result)) + ".",
        "",
    ]
    return _page("pytest options", *lines)


def _fixtures() -> list[tuple[str, str]]:
    from attn_testkit.plugin.own_tests import MARK, CaseRun, Check

    source = ast.parse((ROOT / "attn_testkit" / "plugin" / "__init__.py").read_text())
    found = [
        (node.name, ast.get_docstring(node) or "")
        for node in source.body
        if isinstance(node, ast.FunctionDef) and any("fixture" in ast.unparse(d) for d in node.decorator_list)
    ]
    known = {"attn_case": _doc(CaseRun), "attn_check": _doc(Check)}
    shown = [(name, known.get(name, text)) for name, text in found if name != "attn_item"]
    return [
        *shown,
        (f"@pytest.mark.{MARK}(...)", "The mark of `conformance_cases`: the same arguments, without an import."),
    ]


def results_json() -> str:
    schema = json.loads((ROOT / "attn_testkit" / "reports" / "report.schema.json").read_text())
    lines = [
        "`--json FILE` writes a results file. " + schema["description"],
        "",
        "[`report.schema.json`](../../attn_testkit/reports/report.schema.json) is the JSON Schema. "
        "`attn-testkit results report FILE` prints its summary, or writes a page.",
        "",
        "## The file",
        "",
        *_schema_table(schema),
    ]
    for name, part in schema["$defs"].items():
        lines += [f"## {name}", ""]
        lines += [part["description"], ""] if "description" in part else []
        lines += _schema_table(part, name) if "properties" in part else [f"{_schema_type(part)}.", ""]
    return _page("Results as JSON", *lines)


_CLASSES = {"header": RunHeader, "finding": Finding, "result": CaseResult}
"""Name of a part of the schema -> the class of which it is the JSON form."""


def _schema_table(part: dict[str, Any], of_class: str = "") -> list[str]:
    """A table of the fields of an object; what the schema does not say comes from the class, or from the glossary."""
    texts = {each.name: each.text for each in attributes(_CLASSES[of_class])} if of_class in _CLASSES else {}
    rows = []
    for name, each in part["properties"].items():
        needed = "" if name in part.get("required", ()) else " (may be absent)"
        known = entry_of(name) if of_class else None
        text = _cell(each.get("description") or texts.get(name) or (known.text if known else ""))
        rows.append(f"| `{name}` | {_schema_type(each)}{needed} | {text} |")
        for inner, of in each.get("properties", {}).items():
            rows.append(f"| `{name}.{inner}` | {_schema_type(of)} | {_cell(of.get('description', ''))} |")
    return ["| field | type | meaning |", "|---|---|---|", *rows, ""]


def _schema_type(part: dict[str, Any]) -> str:
    if "$ref" in part:
        name = part["$ref"].rpartition("/")[2]
        return f"[{name}](#{name})"
    if "const" in part:
        return f"`{json.dumps(part['const'])}`"
    if "enum" in part:
        return ", ".join(f"`{json.dumps(value)}`" for value in part["enum"])
    if "anyOf" in part or "oneOf" in part:
        return " or ".join(_schema_type(each) for each in part.get("anyOf") or part["oneOf"])
    kinds = part.get("type", "any")
    text = " or ".join(kinds) if isinstance(kinds, list) else kinds
    if "items" in part:
        return f"{text} of {_schema_type(part['items'])}"
    if isinstance(part.get("additionalProperties"), dict):
        return f"{text} of name to {_schema_type(part['additionalProperties'])}"
    return str(text)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    write(pages(), Path(sys.argv[1]))

"""The table of the corpus, from what runs wrote: `python tests/kernels/corpus/corpus_table.py FOLDER PAGE.md`."""

from __future__ import annotations

import collections
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

REASONS: tuple[tuple[str, str], ...] = (
    (
        r"to add @triton\.jit|gdc_",
        "functions of `triton.language` under another name, or of a GPU's own (`tl.extra.cuda`)",
    ),
    (r"'int' object has no attribute", "a loop variable that is converted"),
    (r"mask has unsupported dtype", "a mask that is not boolean"),
    (r"Block pointers have been removed", "block pointers, which this Triton does not have"),
    (r"inline_asm|inline asm|elementwise_asm", "inline assembly"),
    (r"libdevice|cannot convert None of type|extern|tl\.extra|no attribute 'extra'", "libdevice"),
    (r"died of signal", "the stock interpreter dies there"),
    (r"can only concatenate list", "a grid that is a list"),
)
"""Why the stock interpreter does not run a kernel as it is: what its error says, in words."""

MISFIT = "no fitting arguments: they are generated, and both interpreters raise"
"""Nothing is known of such a kernel."""


def reason(detail: str) -> str:
    """An error of the stock interpreter in words."""
    return next((words for pattern, words in REASONS if re.search(pattern, detail)), detail.split(" [")[0][:90])


def outcome(launches: Iterable[tuple[bool, dict[str, Any]]]) -> tuple[str, str]:
    """The verdict of a kernel, and why, from its launches; (is it generated, the launch)."""
    launches = list(launches)
    compared = [one for _, one in launches if one["verdict"] in ("same", "floats", "different")]
    if any(one["verdict"] == "different" for one in compared):
        return "different", next(one["detail"] for one in compared if one["verdict"] == "different")
    broken = [
        one
        for made, one in launches
        if one["verdict"] == "emulation raises" and not (made and _is_misfit(one["detail"]))
    ]
    if broken:
        return "emulation raises", broken[0]["detail"]
    if compared:
        floats = any(one["verdict"] == "floats" for one in compared)
        repaired = [one["detail"] for one in compared if "repairs" in one["repairs"]]
        if repaired and all("repairs" in one["repairs"] for one in compared):
            return "repaired", reason(repaired[0])
        return ("floats", "") if floats and not any(one["verdict"] == "same" for one in compared) else ("same", "")
    raised = [one["detail"] for _, one in launches if one["verdict"] == "stock raises"]
    if raised:
        return "stock raises", reason(raised[0].split(" | repaired: ")[-1])
    if any(one["verdict"] == "stock too slow" for _, one in launches):
        return "not run", "too slow in the stock interpreter"
    for pattern, words in REASONS[3:6]:
        if any(re.search(pattern, one["detail"]) for _, one in launches):
            return "not run", words
    return "not run", MISFIT


def _is_misfit(detail: str) -> bool:
    """Whether generated arguments lead a kernel out of its memory, where the emulation stops and stock goes on."""
    return bool(re.search(r"EmulationError|StrayAccessError|died of signal", detail))


def collect(folder: Path) -> dict[str, dict[str, Any]]:
    """By project: what `corpus.py kernels` described, and the launches of each kernel in every `PROJECT*.jsonl`."""
    found = {}
    for described in sorted(folder.glob("*.kernels.json")):
        project = json.loads(described.read_text())
        launches: dict[str, list[tuple[bool, dict[str, Any]]]] = collections.defaultdict(list)
        for file in sorted(folder.glob(f"{project['project']}[._-]*jsonl")):
            newest = {call["call"]: call for call in map(json.loads, file.read_text().splitlines())}
            for call in newest.values():
                for launch in call["launches"]:
                    launches[launch["kernel"]].append((call["call"].startswith("generated "), launch))
        found[project["project"]] = {**project, "launches": launches}
    return found


def page(projects: dict[str, dict[str, Any]]) -> str:
    """The table, and the kernels without the same bits, as Markdown."""
    rows, lists = [], []
    total: collections.Counter[str] = collections.Counter()
    for name, project in projects.items():
        counts: collections.Counter[str] = collections.Counter()
        why: dict[str, list[str]] = collections.defaultdict(list)
        for kernel, kept_out in project["kernels"].items():
            seen = project["launches"].get(kernel, [])
            verdict, words = (
                ("not run", kept_out)
                if kept_out
                else outcome(seen)
                if seen
                else ("not run", "no call of it is written, and arguments cannot be generated")
            )
            counts["kernels"] += 1
            counts[verdict] += 1
            counts["called"] += any(not made for made, _ in seen)
            if verdict != "same" and verdict != "floats":
                why[f"{_HEADS[verdict]}: {words}"].append(kernel)
        total += counts
        rows.append(_row(f"{name} {project['version']}", counts))
        lists.append(f"\n### {name}\n")
        for words, kernels in sorted(why.items(), key=lambda item: -len(item[1])):
            lists.append(f"* {words} ({len(kernels)}): {', '.join(_short(kernel) for kernel in sorted(kernels))}")
    rows.append(_row("**all**", total))
    head = (
        "| | kernels | launched by their package's own functions | same bits | same but for bfloat16, float8, tf32 "
        "| same, stock repaired | stock raises | emulation raises | different | not run |\n|---|" + "---|" * 9
    )
    return "\n".join([head, *rows, *lists]) + "\n"


_HEADS = {
    "repaired": "same bits once the stock interpreter is given",
    "stock raises": "runs in the emulation, not in the stock interpreter",
    "emulation raises": "the emulation raises",
    "different": "different bits",
    "not run": "not run",
}
_COLUMNS = (
    "kernels",
    "called",
    "same",
    "floats",
    "repaired",
    "stock raises",
    "emulation raises",
    "different",
    "not run",
)


def _row(name: str, counts: collections.Counter[str]) -> str:
    return f"| {name} | " + " | ".join(str(counts[column]) for column in _COLUMNS) + " |"


def _short(kernel: str) -> str:
    module, _, name = kernel.rpartition(".")
    return f"`{module.rpartition('.')[2]}.{name}`"


if __name__ == "__main__":
    text = page(collect(Path(sys.argv[1])))
    Path(sys.argv[2]).write_text(text) if len(sys.argv) > 2 else print(text)

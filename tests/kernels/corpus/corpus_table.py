"""The table of the corpus, from what runs wrote: `python tests/kernels/corpus/corpus_table.py FOLDER PAGE.md`."""

from __future__ import annotations

import collections
import json
import re
import statistics
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

MISFIT = "no call launches it, and with generated arguments both interpreters raise or it leaves its memory"
"""Nothing is known of such a kernel."""


def reason(detail: str) -> str:
    """An error of the stock interpreter in words."""
    return next((words for pattern, words in REASONS if re.search(pattern, detail)), detail.split(" [")[0][:90])


def outcome(launches: Iterable[tuple[bool, dict[str, Any]]]) -> tuple[str, str]:
    """The verdict of a kernel, and why, from its launches; (is it generated, the launch)."""
    launches = list(launches)
    compared = [
        one
        for made, one in launches
        if one["verdict"] in ("same", "floats", "different") and one.get("wrote", not made)
    ]
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
    both = [one["detail"] for made, one in launches if one["verdict"] == "both raise" and not made]
    if both:
        return "not run", f"both interpreters raise: {reason(both[0])}"
    if any(one["verdict"] == "stock too slow" for _, one in launches):
        return "not run", "too slow in the stock interpreter"
    if any(one["verdict"] in ("same", "floats") for _, one in launches):
        return "not run", "no call launches it, and with generated arguments it writes nothing"
    if not launches:
        return "not run", "no launch yet: this run did not reach it, or generated arguments raised before a launch"
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
    """The table, and by reason the kernels that do not simply leave the same bits, as Markdown."""
    rows, lists = [], []
    total: collections.Counter[str] = collections.Counter()
    everywhere: list[float] = []
    for name, project in projects.items():
        counts: collections.Counter[str] = collections.Counter()
        why: dict[str, list[str]] = collections.defaultdict(list)
        shares: list[float] = []
        for kernel, kept_out in project["kernels"].items():
            seen = project["launches"].get(kernel, [])
            verdict, words = ("not run", _without_paths(kept_out)) if kept_out else outcome(seen)
            counts["kernels"] += 1
            counts[verdict] += 1
            if verdict in ("same", "floats", "repaired"):
                counts["called"] += any(not made for made, _ in seen)
                shares.append(share_of_lines(seen))
            if verdict not in ("same", "floats"):
                why[f"{_HEADS[verdict]}{words}"].append(kernel)
        total += counts
        everywhere += shares
        rows.append(_row(f"{name} {project['version']}".strip(), counts, shares))
        lists.append(f"\n### {name}\n")
        for words, kernels in sorted(why.items(), key=lambda item: -len(item[1])):
            lists.append(f"* {words} ({len(kernels)}): {_listed(kernels)}")
    rows.append(_row("all", total, everywhere))
    head = (
        "| | kernels | same bits | same but for bfloat16, float8, tf32 | same, stock repaired | emulation alone "
        "| emulation raises | different | not run | by their package's functions | lines that ran |\n|---|"
    ) + "---|" * 10
    return "\n".join([head, *rows, *lists]) + "\n"


def share_of_lines(seen: Iterable[tuple[bool, dict[str, Any]]]) -> float:
    """How much of a kernel's own lines ran in the stock interpreter, over all launches that were compared."""
    compared = [one for _, one in seen if one["verdict"] in ("same", "floats") and one["of"]]
    lines = {line for one in compared for line in one["lines"]}
    return len(lines) / max((one["of"] for one in compared), default=1)


def _without_paths(words: str) -> str:
    return re.sub(r" ?\(?/[\w./+-]+\)?", "", words)


_HEADS = {
    "repaired": "same bits once the stock interpreter is given ",
    "stock raises": "runs in the emulation alone; the stock interpreter raises: ",
    "emulation raises": "**the emulation raises**: ",
    "different": "**different bits**: ",
    "not run": "not run: ",
}
_COLUMNS = (
    "kernels",
    "same",
    "floats",
    "repaired",
    "stock raises",
    "emulation raises",
    "different",
    "not run",
    "called",
)


def _row(name: str, counts: collections.Counter[str], shares: list[float]) -> str:
    lines = f"{100 * statistics.median(shares):.0f}%" if shares else ""
    return f"| {name} | " + " | ".join(str(counts[column]) for column in _COLUMNS) + f" | {lines} |"


def _listed(kernels: list[str]) -> str:
    modules: dict[str, list[str]] = collections.defaultdict(list)
    for kernel in sorted(kernels):
        module, _, name = kernel.rpartition(".")
        modules[module.rpartition(".")[2]].append(f"`{name}`")
    return "; ".join(f"{module}: {', '.join(names)}" for module, names in modules.items())


MARK = "<!-- written by corpus_table.py from here on -->\n"


def main() -> int:
    """Write or print the page. 1 where a kernel has different bits, or only the emulation refuses it."""
    projects = collect(Path(sys.argv[1]))
    text = page(projects)
    if len(sys.argv) > 2:
        file = Path(sys.argv[2])
        before = file.read_text().partition(MARK)[0] if file.exists() else ""
        file.write_text(f"{before}{MARK}\n{text}")
    else:
        print(text)
    verdicts = {
        outcome(project["launches"].get(kernel, []))[0]
        for project in projects.values()
        for kernel, kept_out in project["kernels"].items()
        if not kept_out
    }
    return int(bool(verdicts & {"different", "emulation raises"}))


if __name__ == "__main__":
    sys.exit(main())

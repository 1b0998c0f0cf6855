"""Finds words and sentences that readers stumble over, in all that the project shows them.

    python ci/vocabulary.py                              # a table: package or pages, findings
    python ci/vocabulary.py running docs README.md       # each finding: file, line, words, what to write instead
    python ci/vocabulary.py --check                      # fails if a package or page has more or fewer than accepted
    python ci/vocabulary.py --write                      # lowers the numbers of ci/vocabulary.toml to the present ones

Read are the strings, docstrings and comments of the kit's Python files, its templates and tables, the pages of docs/
and those next to the README. ``ci/vocabulary.toml`` has the phrases, and the findings that are accepted so far.
"""

from __future__ import annotations

import argparse
import ast
import bisect
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_suffix(".toml")
_DISTRIBUTIONS = (
    "packages/cuda_on_cpu/cuda_on_cpu",
    "packages/corpus/attn_testkit_corpus",
    "packages/servers/attn_testkit_servers",
)
_ROOTS = ("attn_testkit", "runner_modes", *_DISTRIBUTIONS, "docs")
_PAGES = (
    *("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "CHANGELOG.md"),
    *(f"packages/{name}/README.md" for name in ("cuda_on_cpu", "corpus", "servers")),
)
_ENDINGS = (".py", ".md", ".j2", ".toml")

# A docstring that begins with one of these words needs the line above it.
_STARTS = (
    r"what(?:ever)?|whether|which(?:ever)?|who(?:m|se|ever)?|why|how|where(?:ver)?|when(?:ever)?|of|as|that|those|these|this|such|its?|they|"
    r"their|there|if|unless|until|while|once|than|because|though|although|so|and|or|but|with|without|by|from|for|in|into|inside|on|at|to|"
    r"before|after|behind|below|above|between|among|besides|not|also|else|likewise|same|is|are|was|does|may|might|must|can"
)
_FRAGMENT = re.compile(rf"(?:{_STARTS})\b(?!-)|the same\b(?!\s+\w+\s+(?:as|of|in|for)\b)", re.IGNORECASE)
_LOWER_WORD = re.compile(r"[a-z]{2,}(?:'s)?(?=[\s,;:.]|$)")
_LOWER_NAMES = {"torch", "triton", "pytest", "torch's", "triton's", "pytest's", "cuda"}


@dataclass(frozen=True)
class Phrase:
    """A row of the table: what is found, and what to write instead."""

    find: re.Pattern[str]
    write: str
    wrong: tuple[str, ...]
    right: tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """Words that are not written as they should be, with their line and what to do."""

    line: int
    text: str


Line = tuple[int, str]
"""Number and text of a line."""


def phrases() -> tuple[Phrase, ...]:
    """Phrases of the table."""
    return tuple(
        Phrase(re.compile(row["find"], re.IGNORECASE), row["write"], tuple(row["wrong"]), tuple(row.get("right", ())))
        for row in tomllib.loads(TABLE.read_text())["phrase"]
    )


def begins_as_fragment(docstring: str) -> bool:
    """True if a docstring begins with neither a noun nor a verb, or in lower case with a word that is not a name.

    A question can be read by itself: a field of the capabilities is one.
    """
    text = docstring.lstrip()
    if re.match(r"[^.?]*(?:\.(?! )[^.?]*)*\?", " ".join(text.split())):
        return False
    if _FRAGMENT.match(text):
        return True
    first = _LOWER_WORD.match(text)
    return first is not None and first[0] not in _LOWER_NAMES


def findings(name: str, source: str, table: Iterable[Phrase]) -> list[Finding]:
    """Findings of one file, in the order of its lines. The name's ending says how to read it."""
    table, found = tuple(table), []
    passages = _python(source) if name.endswith(".py") else _markdown(source) if ".md" in name else _lines(source)
    for lines, docstring in passages:
        starts, text = [], ""
        for _, words in lines:
            starts.append(len(text))
            text += " ".join([*words.split(), ""])
        matches = [(match, phrase) for phrase in table for match in phrase.find.finditer(text.rstrip())]
        if docstring and begins_as_fragment(text) and all(match.start() for match, _ in matches):
            found.append(Finding(lines[0][0], f"{lines[0][1].strip()!r}: begin with a noun or a verb"))
        for match, phrase in matches:
            line = lines[bisect.bisect_right(starts, match.start()) - 1][0]
            found.append(Finding(line, f"{match[0].strip()!r}: write: {phrase.write}"))
    return sorted(found, key=lambda finding: finding.line)


def _without_code(text: str) -> str:
    """The text with `code` for what is in backquotes, on the lines that it had."""
    return re.sub(r"(`+)[^`]*?\1", lambda code: "`code`" + "\n" * code[0].count("\n"), text, flags=re.DOTALL)


def _numbered(text: str, first: int) -> list[Line]:
    return list(enumerate(_without_code(text).split("\n"), first))


def _python(source: str) -> Iterator[tuple[list[Line], bool]]:
    """Strings of several words, except patterns of hints; comments, of which adjacent lines are one; and whether each
    is a docstring. Attributes' docstrings are docstrings too."""
    nodes = list(ast.walk(ast.parse(source)))
    bare = {
        id(statement.value)
        for node in nodes
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for statement in node.body
        if isinstance(statement, ast.Expr)
    }
    faults = (node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "fault")
    patterns = {id(pattern) for call in faults for pattern in call.args[2:3]}
    patterns |= {id(node.value) for node in nodes if isinstance(node, ast.keyword) and node.arg == "hint"}
    for node in nodes:
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in patterns:
            continue
        if id(node) not in bare and " " not in node.value:
            continue
        first, paragraphs = node.lineno, re.split(r"\n(?= *\n)", node.value)
        for number, paragraph in enumerate(paragraphs):
            yield _numbered(paragraph, first), id(node) in bare and number == 0
            first += paragraph.count("\n") + 1
    block: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if block and token.start[0] != block[-1][0] + 1:
                yield _numbered("\n".join(words for _, words in block), block[0][0]), False
                block = []
            block.append((token.start[0], token.string.lstrip("# ")))
    if block:
        yield _numbered("\n".join(words for _, words in block), block[0][0]), False


def _markdown(source: str) -> Iterator[tuple[list[Line], bool]]:
    """Headings, paragraphs, items of lists and cells of tables, without code, comments and addresses."""
    hidden = re.compile(r"^( *)(```+).*?^\1\2 *$|<!--.*?-->|\{[%#].*?[%#]\}", re.DOTALL | re.MULTILINE)
    text = hidden.sub(lambda found: "\n" * found[0].count("\n"), source)
    text = re.sub(r"(?<=\])\([^()\s]*(?:\([^()\s]*\)[^()\s]*)*\)", "", text)
    block: list[Line] = []
    for number, line in [*_numbered(text, 1), (0, "")]:
        row = re.match(r"\s*\|", line)
        item = re.match(r"\s*(?:[-*+]|\d+\.|#+|>|!!!|\?\?\?) ?", line)
        if block and (row or item or not line.strip()):
            yield block, False
            block = []
        if row:
            for cell in line.strip().strip("|").split("|"):
                yield [(number, cell.replace("**", "").strip())], False
        elif line.strip():
            block.append((number, re.sub(r"\*\*|[\[\]]", "", line[item.end() if item else 0 :])))


def _lines(source: str) -> Iterator[tuple[list[Line], bool]]:
    """Lines of a template or table, without tags, braces, the glossary's other words and names of faults."""
    for number, line in _numbered(source, 1):
        words = re.sub(r"\b(?:also|faults) = \[.*?\]|<[^>]*>|\{[{%#].*?[}%#]\}", " ", line).strip()
        if " " in words:
            yield [(number, words)], False


def group_of(name: str) -> str:
    """The package of a file of the kit, ``docs`` for all pages in it, or the page itself."""
    parts = name.split("/")
    if parts[0] == "packages":
        return "cuda_on_cpu" if parts[1] == "cuda_on_cpu" else parts[min(3, len(parts) - 1)].partition(".")[0]
    if parts[0] != "attn_testkit":
        return parts[0]
    return parts[1].partition(".")[0]


def all_findings() -> dict[str, list[Finding]]:
    """Findings of each file that readers of the kit see."""
    table = phrases()
    paths = [path for root in _ROOTS for path in sorted((ROOT / root).rglob("*")) if path.suffix in _ENDINGS]
    names = [*_PAGES, *(str(path.relative_to(ROOT)) for path in paths)]
    return {name: findings(name, (ROOT / name).read_text(), table) for name in names}


def counts() -> dict[str, int]:
    """Findings of each package and page that has any."""
    found: Counter[str] = Counter()
    for name, those in all_findings().items():
        found[group_of(name)] += len(those)
    return {group: number for group, number in sorted(found.items()) if number}


def accepted() -> dict[str, int]:
    """Findings that ``ci/vocabulary.toml`` lets each package and page have."""
    return {str(name): int(number) for name, number in tomllib.loads(TABLE.read_text()).get("accepted", {}).items()}


def differences(present: dict[str, int], table: dict[str, int]) -> list[str]:
    """Packages and pages whose present count is not that of the table, with what to do."""
    return [
        f"{group}: {now} findings, {before} are accepted; see `python ci/vocabulary.py {group}`"
        if now > before
        else f"{group}: {before} findings are accepted, it has {now}: `python ci/vocabulary.py --write`"
        for group in sorted(present.keys() | table.keys())
        if (now := present.get(group, 0)) != (before := table.get(group, 0))
    ]


def _lower() -> None:
    """Write the present numbers into the table where they are lower. A row at zero goes."""
    present, text = counts(), TABLE.read_text()
    for group, number in accepted().items():
        now = min(number, present.get(group, 0))
        text = re.sub(
            rf'^"?{re.escape(group)}"? = \d+\n', f'"{group}" = {now}\n' if now else "", text, flags=re.MULTILINE
        )
    TABLE.write_text(text)


def main() -> int:
    """Print findings, compare their numbers with the accepted ones, or lower those."""
    parser = argparse.ArgumentParser(description="Find words and sentences that readers stumble over.")
    parser.add_argument("names", nargs="*", help="Packages, pages or files: print their findings.")
    parser.add_argument("--check", action="store_true", help="Fail if a number differs from ci/vocabulary.toml.")
    parser.add_argument("--write", action="store_true", help="Lower the numbers of ci/vocabulary.toml.")
    arguments = parser.parse_args()
    if arguments.write:
        _lower()
        return 0
    if arguments.check:
        wrong = differences(counts(), accepted())
        print("".join(f"{line}\n" for line in wrong), end="", file=sys.stderr)
        return 1 if wrong else 0
    for name, those in all_findings().items() if arguments.names else ():
        if any(group_of(name) == asked or name.startswith(asked) for asked in arguments.names):
            print("".join(f"{name}:{finding.line}: {finding.text}\n" for finding in those), end="")
    if not arguments.names:
        print("".join(f"{group:18}{number:6}\n" for group, number in counts().items()), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())

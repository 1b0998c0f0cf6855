"""Counts docstrings that begin as a fragment, and phrases of a private language, in the kit's Python files.

    python ci/docstrings.py                        # a table: package, fragments, phrases
    python ci/docstrings.py attn_testkit/fuzz      # each finding, with its line and what to write instead
    python ci/docstrings.py --write                # lowers the numbers of ci/docstrings.toml to the present ones

``tests/ci/test_docstrings.py`` compares the counts with ``ci/docstrings.toml``, the packages that are not clean yet.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_suffix(".toml")
_ROOTS = ("attn_testkit", "runner_modes")

_STARTS = (
    r"what(?:ever)?|whether|which(?:ever)?|who(?:m|se|ever)?|why|how|where(?:ver)?|when(?:ever)?|of|as|that|those|these|this|such|its?|they|"
    r"their|there|if|unless|until|while|once|than|because|though|although|so|and|or|but|with|without|by|from|for|in|into|inside|on|at|to|"
    r"before|after|behind|below|above|between|among|besides|not|also|else|likewise|same|is|are|was|does|may|might|must|can"
)
_FRAGMENT = re.compile(rf"(?:{_STARTS})\b(?!-)|the same\b(?!\s+\w+\s+(?:as|of|in|for)\b)", re.IGNORECASE)
_LOWER_WORD = re.compile(r"[a-z]{2,}(?:'s)?(?=[\s,;:.]|$)")
_LOWER_NAMES = {"torch", "triton", "pytest", "torch's", "triton's", "pytest's", "cuda"}

_COUNTED = (
    r"once|twice|times|(?:row|key|token|slot|head|page|step|call|layer|line|word|column|sum|scale)s?|bytes|bits|blocks?|branch(?:es)?|kernels|"
    r"seconds|minutes|requests|cases|numbers|entry|entries|elements|threads|programs|channels|launches|files|"
    r"(?:one|two|three|four)(?: (?!in|of|on|for|with|as|by|from|to|at|is|has|that|was|when)\w+)?"
)
_UNIT = (
    r"backend|batch|block|branch|bucket|call|capture|case|channel|check|chunk|column|command|dimension|draft|element|fault|field|file|graph|group|"
    r"head|instance|kernel|key|kind|launch|layer|line|minute|mode|name|night|node|page|pair|part|pool|process|program|rank|replay|request|round|"
    r"row|run|second|sequence|server|slot|split|step|tensor|test|thread|tile|token|value|word|worker"
)

# (pattern of a private phrase, words to write instead). Code in backquotes is not read.
PHRASES: tuple[tuple[str, str], ...] = (
    (r"(?<!leave it )(?<!leave them )(?<!leaves them )(?<!let )(?<!-)\balone\b", "only; by itself"),
    (rf"\b(?:{_COUNTED}) an? (?:{_UNIT})\b(?! \w+s\b)", "per"),
    (r"\bbeside\b", "next to, with, in addition to, between"),
    (r"\bmend(?:s|ed|ing)?\b", "fix"),
    (r"\b(?:held|holds?|holding)\b(?: [\w'-]+){0,5} against\b", "compare with"),
    (r"\bby turns\b", "in turn, alternately"),
    (r"\btold\b", "reported, given, distinguished"),
    (r"(?<!there )\b(?:is|are|was|were) (?:no (?!longer\b|more\b|less\b|fewer\b)|none\b)", "is not"),
    (r"(?<![-\w])(?:stands?|stood)\b(?!-)(?! out\b)", "is, lies, is written"),
    (r"\bjudg(?:ed|es|ing|e?ments?)\b", "evaluate, compare"),
    (r"\bas ever\b", "as usual"),
    (r"\bby lot\b", "at random"),
    (r"\bputs? back\b", "restore"),
    (r"\bsays? so\b", "reports it"),
    (r"\bhas it that\b", "says that"),
    (r"\bat the least\b", "at least"),
    (r"\b(?:un)?claim(?:s|ed|ing)?\b", "declare, capability"),
    (r"\buntried\b", "not covered"),
    (r"\bneighbou?rs?\b", "co-resident instance, next to"),
    (r"\b(?:in company|companions?)\b", "co-resident, other requests of the batch"),
    (r"\btwins?\b", "variant with other heads"),
    (r"\bhostile\b", "adversarial"),
    (r"\b(?:drives?|driven|drove)\b", "run"),
    (r"\bastray\b", "misrouted"),
    (r"\benriched\b", "randomly combined"),
    (r"\bplainest\b", "minimal"),
    (r"\bways? of (?:the |a )?servers?\b", "server variant"),
    (r"\b(?:parts of (?:the )?keys|keys in parts|KV parts)\b", "KV splits"),
    (r"\bblam(?:e|es|ed|ing)\b", "attribute"),
    (r"(?<=[.!] )Wh(?:at|o|oever|atever) [^.?!:]*[.!](?= |$)", "a sentence whose subject is a noun"),
)
# A phrase may begin a sentence; only None is not "none".
_PHRASES = tuple(
    (re.compile(pattern, re.NOFLAG if "none" in pattern else re.IGNORECASE), instead) for pattern, instead in PHRASES
)


@dataclass(frozen=True)
class Finding:
    """A docstring, comment or string that is not written as it should be."""

    line: int
    kind: str
    """``fragment`` or ``phrase``."""
    text: str
    """The words in question, and what to write."""


def begins_as_fragment(docstring: str) -> bool:
    """True if a docstring begins with neither a noun nor a verb, or in lower case with a word that is not a name."""
    text = docstring.lstrip()
    if _FRAGMENT.match(text):
        return True
    first = _LOWER_WORD.match(text)
    return first is not None and first[0] not in _LOWER_NAMES


def phrases(text: str) -> Iterator[str]:
    """Private phrases of a text, each with the words that replace it."""
    words = " ".join(re.sub(r"`+[^`]*`+", "`code`", text).split())
    for pattern, instead in _PHRASES:
        for found in pattern.finditer(words):
            yield f"{found[0]!r}: write {instead!r}"


def findings(source: str) -> list[Finding]:
    """Findings of one file, in the order of its lines."""
    docstrings, others = _strings(ast.parse(source))
    found = [
        Finding(line, "fragment", f"{text.split(chr(10))[0]!r}: begin with a noun or a verb")
        for line, text in docstrings
        if begins_as_fragment(text)
    ]
    for line, text in (*docstrings, *others, *_comments(source)):
        found += [Finding(line, "phrase", words) for words in phrases(text)]
    return sorted(found, key=lambda finding: finding.line)


def _strings(tree: ast.Module) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """Docstrings, attributes' among them, and other strings of several words, except patterns of hints."""
    nodes = list(ast.walk(tree))
    bare = {
        id(statement.value)
        for node in nodes
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for statement in node.body
        if isinstance(statement, ast.Expr)
    }
    patterns = {id(node.value) for node in nodes if isinstance(node, ast.keyword) and node.arg == "hint"}
    texts = [
        node
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in patterns
    ]
    docstrings = [(node.lineno, str(node.value)) for node in texts if id(node) in bare]
    return docstrings, [
        (node.lineno, str(node.value)) for node in texts if id(node) not in bare and " " in str(node.value)
    ]


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Comments; lines of comment that follow each other are one."""
    start, last, words = 0, 0, ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if token.start[0] == last + 1:
            last, words = token.start[0], f"{words} {token.string.lstrip('# ')}"
            continue
        yield start, words
        start, last, words = token.start[0], token.start[0], token.string.lstrip("# ")
    yield start, words


def package_of(path: Path) -> str:
    """The package of a file of the kit: ``contract``, ``runner_modes``, or the module itself."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0] if parts[0] == "runner_modes" else parts[1]


def all_findings() -> dict[Path, list[Finding]]:
    """Findings of each file of the kit."""
    return {path: findings(path.read_text()) for root in _ROOTS for path in sorted((ROOT / root).rglob("*.py"))}


def counts() -> dict[str, int]:
    """Findings of each package that has any."""
    found: Counter[str] = Counter()
    for path, those in all_findings().items():
        found[package_of(path)] += len(those)
    return {package: number for package, number in sorted(found.items()) if number}


def accepted() -> dict[str, int]:
    """Findings that ``ci/docstrings.toml`` lets each package have."""
    return {str(name): int(number) for name, number in tomllib.loads(TABLE.read_text()).items()}


def differences(present: dict[str, int], table: dict[str, int]) -> list[str]:
    """Packages whose present count is not that of the table, with what to do. A number may fall, and never rises."""
    return [
        f"{package}: {now} findings, {before} are accepted; see `python ci/docstrings.py {package}`"
        if now > before
        else f"{package}: {before} findings are accepted, it has {now}; write {now} (`python ci/docstrings.py --write`)"
        for package in sorted(present.keys() | table.keys())
        if (now := present.get(package, 0)) != (before := table.get(package, 0))
    ]


def main() -> None:
    """Print findings, or lower the numbers of the table."""
    parser = argparse.ArgumentParser(description="Count fragments and private phrases in the kit's Python files.")
    parser.add_argument("paths", nargs="*", help="Packages or files: print their findings.")
    parser.add_argument(
        "--write", action="store_true", help="Lower the numbers of ci/docstrings.toml to the present ones."
    )
    arguments = parser.parse_args()
    if arguments.write:
        present = counts()
        lower = {package: min(number, present.get(package, 0)) for package, number in accepted().items()}
        comments = "".join(line for line in TABLE.read_text().splitlines(keepends=True) if line.startswith("#"))
        TABLE.write_text(comments + "".join(f"{package} = {number}\n" for package, number in lower.items() if number))
        return
    found = all_findings()
    for path, those in found.items():
        name = str(path.relative_to(ROOT))
        if any(package_of(path) == asked or name.startswith(asked) for asked in arguments.paths):
            print("".join(f"{name}:{finding.line}: {finding.kind}: {finding.text}\n" for finding in those), end="")
    if not arguments.paths:
        kinds = Counter((package_of(path), finding.kind) for path, those in found.items() for finding in those)
        for package in sorted({package for package, _ in kinds}):
            print(f"{package:14}{kinds[package, 'fragment']:6}{kinds[package, 'phrase']:6}")


if __name__ == "__main__":
    main()

"""Rules for the emulation's own modules, and for the CUDA programs that it is compared with a real GPU on."""

from __future__ import annotations

import ast
import re
from collections.abc import Set
from pathlib import Path

SPEAKS_OF_ATTENTION = re.compile(
    r"attention|attend|\bkv|_kv\b|backend|forward_metadata|cuda_graph_state|decod|draft|prefill", re.IGNORECASE
)
NAMES_OF_OTHERS = (
    "_torchdynamo_orig_backend",  # an attribute of torch
    "scaled_dot_product_attention",  # a function of torch
    "triton.backends",  # a package of Triton
    "with arguments from the CUDA backend",  # torch's own words
)
NAMES_IN_STORED_VERDICTS = re.compile(r'"(kv \w+: [^"]+|triton: kv indices|paged attention)"')


def lines_of_attention(path: Path) -> list[str]:
    """Lines that speak of attention, but for names that others gave."""
    found = []
    for line in path.read_text().splitlines():
        said = NAMES_IN_STORED_VERDICTS.sub("", line)
        for name in NAMES_OF_OTHERS:
            said = said.replace(name, "")
        if SPEAKS_OF_ATTENTION.search(said):
            found.append(line)
    return found


def names_at_the_top(path: Path) -> set[str]:
    body = ast.parse(path.read_text()).body
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in body if isinstance(node, ast.AnnAssign)]
    return {target.id for target in targets if isinstance(target, ast.Name)} - {"__all__"}


def changed_names(path: Path, constants: Set[str]) -> list[str]:
    """Lines in which a function changes a name or a table of its module."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Global):
            found.append(f"line {node.lineno}: global {', '.join(node.names)}")
        if not isinstance(node, ast.Subscript) or isinstance(node.ctx, ast.Load):
            continue
        if isinstance(node.value, ast.Name) and node.value.id in constants:
            found.append(f"line {node.lineno} changes {node.value.id}")
    return found

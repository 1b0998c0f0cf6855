"""Prints how many pairs and triples of values the cases of a tier cover, by kind, and what they cost to show.

python ci/covered_pairs.py torch_native
python ci/covered_pairs.py my_pkg.attn:MyBackend --tier smoke --json before.json
python ci/covered_pairs.py torch_native --against before.json

Values are those of one layer in one replay: what is fixed for the instance, options of the layer, contents of the step.
Two values are covered if a layer has both in a replay, in the same mode. A replay whose data show no error of a query
or a key (``EQUAL_LOGITS``) covers nothing. Numbers such as lengths count by class.

Then it prints how many pairs of the covering array's columns are allowed, and how many of them rows of core have; each
one that lacks is printed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations, combinations_with_replacement, product
from pathlib import Path

import numpy as np
import numpy.typing as npt

from attn_testkit.cases.case import Case
from attn_testkit.cases.declared import within_declared
from attn_testkit.cases.features.data_pattern import EQUAL_LOGITS
from attn_testkit.catalogue.array import array_of
from attn_testkit.catalogue.tiers import TIERS, generate
from attn_testkit.contract import AttentionLayer, Capabilities, ForwardMode
from attn_testkit.registry import load_backend
from attn_testkit.steps.data import make_layers
from attn_testkit.steps.schedule import Schedule, Step, make_schedule

SCOPES = ("instance", "layer", "step")
Values = Mapping[str, object]
"""Name of a thing -> its value, or class of values."""


def of_instance(case: Case) -> Values:
    """What a capture fixes."""
    found: dict[str, object] = {
        "heads": str(case.heads), "head dim": (case.head_dim, case.rope_dim), "dtype": case.dtype,
        "KV dtype": case.kv_dtype, "page size": case.page_size, "KV layout": case.kv_layout,
        "KV splits": (case.kv_splits, case.merged_by_backend), "KV groups": case.layers.groups,
        "first layer": case.layers.first > 0, "bucket": case.bucket.bit_length(), "multi-mode": case.multi_mode,
        "width": case.width if case.mode is not ForwardMode.EXTEND else case.width.bit_length(),
        "depth": case.draft.steps if case.draft else 0,
    }  # fmt: skip
    return found | dict.fromkeys(case.variants, True)


def of_layer(case: Case, layer: AttentionLayer, place: int) -> Values:
    """Options of a layer. Windows count by the number of bits."""
    window = layer.sliding_window_size
    return {
        "window": window if window < 1 else window.bit_length(), "soft cap": layer.logit_cap > 0,
        "sinks": layer.sinks is not None, "place of the layer": min(place, 2), "causal": layer.causal,
        "heads of the layer": case.layer_shapes[place] if case.layers.shapes else None,
    }  # fmt: skip


def of_step(schedule: Schedule, step: Step) -> Values:
    """Contents of a replay."""
    prefixes, page = [request.prefix for request in step.requests], schedule.case.page_size
    new = [request.new for request in step.requests]
    last = max(prefixes, default=0)
    return {
        "requests": min(step.bs, 5) if step.bs < 9 else 9, "longest prefix": last.bit_length(),
        "shortest prefix": min(prefixes, default=0).bit_length(), "all as long": len(set(prefixes)) == 1,
        "end in the page": (last % page == 0, last % page == 1, last % page == page - 1),
        "order of slots": step.layout, "padding": step.padding if step.bs < step.bucket else None,
        "padded": min(step.bucket - step.bs, 2), "other bucket": step.bucket < schedule.max_bs,
        "data": step.data, "most new": max(new, default=0).bit_length(),
        "ragged": len(set(new)) > 1, "tree": step.requests[0].tree and step.requests[0].tree.topk if new else None,
        "accepted": frozenset(min(request.accepted, 3) for request in step.requests),
    }  # fmt: skip


def _vectors(case: Case) -> Iterator[tuple[Values, Values, Values]]:
    schedule = make_schedule(case)
    instance, layers = of_instance(case), make_layers(case)
    for step in schedule.steps:
        if step.requests and step.data not in EQUAL_LOGITS:
            contents = of_step(schedule, step)
            yield from ((instance, of_layer(case, layer, place), contents) for place, layer in enumerate(layers))


class Counted:
    """Numbers of values, and the rows of numbers that a mode's cases have."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[str, object], int] = {}
        self.names: dict[str, str] = {}
        """Name of a thing -> its scope."""

    def number(self, name: str, value: object) -> int:
        """Return the number of a value of a thing, from 1 on."""
        return self.numbers.setdefault((name, value), len(self.numbers) + 1)

    def rows(self, cases: Sequence[Case]) -> tuple[list[str], npt.NDArray[np.int64]]:
        """Names of the columns, and one row of numbers for each layer of each replay; 0 where a case lacks a thing."""
        rows: set[tuple[tuple[str, int], ...]] = set()
        for case in cases:
            for parts in _vectors(case):
                for scope, part in zip(SCOPES, parts, strict=True):
                    self.names.update(dict.fromkeys(part, scope))
                rows.add(tuple((name, self.number(name, value)) for part in parts for name, value in part.items()))
        columns = sorted({name for row in rows for name, _ in row})
        found = [[dict(row).get(name, 0) for name in columns] for row in rows]
        return columns, np.array(found, dtype=np.int64)


def covered(declared: Capabilities, tier: str) -> dict[str, int]:
    """Kind -> number of pairs or triples, over all modes; and the number of cases, captures and layers in replays."""
    found: dict[str, int] = {"cases": 0, "captures": 0, "replays": 0, "layers in replays": 0}
    for strength in (2, 3):
        found |= {" x ".join(kind): 0 for kind in combinations_with_replacement(SCOPES, strength)}
    for mode in ForwardMode:
        cases = generate(declared, mode, tier)
        found["cases"] += len(cases)
        for case in cases if mode in declared.graph else ():
            schedule = make_schedule(case)
            found["captures"] += len(schedule.buckets)
            found["replays"] += len(schedule.steps)
            found["layers in replays"] += len(schedule.steps) * case.layers.count
        counted = Counted()
        columns, rows = counted.rows(cases)
        base = len(counted.numbers) + 1
        for strength in (2, 3):
            for some in combinations(range(len(columns)), strength):
                of = rows[:, some]
                of = of[(of > 0).all(1)]
                key = sum(of[:, place] * base**place for place in range(strength))
                kind = sorted((counted.names[columns[column]] for column in some), key=SCOPES.index)
                found[" x ".join(kind)] += len(np.unique(key))
    return found


def lacking_pairs(declared: Capabilities, mode: ForwardMode) -> tuple[int, list[str]]:
    """Number of pairs of columns' values that nothing excludes, and those that no row of core has.

    A row counts if the declared lengths allow its case.
    """
    array = array_of(declared, mode, "core")
    if array.is_empty:
        return 0, []
    built = ((row, array.build(row)) for row in array.rows())
    rows = [row for row, case in built if case is not None and within_declared(declared, case)]
    return _lacking(mode, array.columns, array.excluded, array.unpaired, rows)


def _lacking(
    mode: ForwardMode,
    columns: Mapping[str, Sequence[object]],
    excluded: Collection[tuple[tuple[int, int], tuple[int, int]]],
    unpaired: Collection[tuple[int, int]],
    rows: Sequence[Mapping[str, object]],
) -> tuple[int, list[str]]:
    allowed, lacking = 0, list[str]()
    for (at, (one, values)), (later, (other, others)) in combinations(enumerate(columns.items()), 2):
        if (at, later) in unpaired:
            continue
        met = {(repr(row[one]), repr(row[other])) for row in rows}
        for (i, value), (j, second) in product(enumerate(values), enumerate(others)):
            if ((at, i), (later, j)) not in excluded and ((later, j), (at, i)) not in excluded:
                allowed += 1
                if (repr(value), repr(second)) not in met:
                    lacking.append(f"{mode}: {one} {value}, {other} {second}")
    return allowed, lacking


def main() -> None:
    """Print the table of one backend."""
    parser = argparse.ArgumentParser(description="Pairs and triples of values that the cases of a tier cover, by kind.")
    parser.add_argument("backend", help="registered name or module:Class")
    parser.add_argument("--tier", choices=list(TIERS), default="core")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--against", type=Path, help="compare with such a file")
    wanted = parser.parse_args()
    found = covered(load_backend(wanted.backend).capabilities, wanted.tier)
    before = json.loads(wanted.against.read_text()) if wanted.against else {}
    for name, count in found.items():
        was = f"{before[name]:>12,} " if name in before else ""
        change = f"{count / before[name]:>8.2f}" if before.get(name) else ""
        print(f"{name:30}{was}{count:>12,}{change}")
    if wanted.json:
        wanted.json.write_text(json.dumps(found, indent=1))
    declared = load_backend(wanted.backend).capabilities
    pairs = [lacking_pairs(declared, mode) for mode in ForwardMode if mode in declared.eager | declared.graph]
    lacking = [each for _, of_mode in pairs for each in of_mode]
    print(f"{'allowed pairs of columns':30}{sum(allowed for allowed, _ in pairs):>12,}, of which {len(lacking)} lack")
    for each in lacking:
        print(f"  {each}")
    if lacking:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

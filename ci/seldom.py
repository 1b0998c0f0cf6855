"""Prints which batch sizes and lengths the cases of a tier meet: what a kernel that is wrong for few of them needs.

python ci/seldom.py torch_native
python ci/seldom.py my_pkg.attn:MyBackend --tier full --seed 3
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from itertools import groupby

from attn_testkit.cases.catalogue import TIERS, generate
from attn_testkit.cases.seldom_cases import met_by
from attn_testkit.contract import Capabilities, ForwardMode
from attn_testkit.registry import load_backend

MOST_MODULUS, MOST_REQUESTS = 512, 64


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as ranges: ``1-48, 66``."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(sorted(numbers)), lambda at: at[1] - at[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def figures(declared: Capabilities, tier: str, seed: int) -> Iterator[str]:
    """One line for each mode that is declared."""
    for mode in ForwardMode:
        if mode not in declared.eager | declared.graph:
            continue
        met = met_by(generate(declared, mode, tier, seed))
        moduli = met.moduli(MOST_MODULUS)
        sizes = [size for size in met.sizes if 0 < size <= MOST_REQUESTS]
        yield f"{mode}: every remainder of a length by {ranges(moduli)}; batches of {ranges(sizes)} requests"


def main() -> None:
    """Print the figures of one backend."""
    parser = argparse.ArgumentParser(description="Batch sizes and lengths that the cases of a tier meet.")
    parser.add_argument("backend", help="registered name or module:Class")
    parser.add_argument("--tier", choices=list(TIERS), default="core")
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    for line in figures(load_backend(wanted.backend).capabilities, wanted.tier, wanted.seed):
        print(line)


if __name__ == "__main__":
    main()
